"""Everything that the page is made of, by name: what the server answers with, or a folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dare.demo.broken import BROKEN, WEIGHTS, broken_model
from dare.demo.merges import BASE, TUNED
from dare.demo.tasks import TASKS, held_out_english
from dare.errors import OutputError
from dare.output.page.shell import SHELL, Section, render_template
from dare.output.page.writing import write_file
from dare.stages import STAGES
from dare.stages.catalogue import catalogue
from dare.stages.outside import load_installed_stages
from dare.web.drawing import drawing_library
from dare.web.modules import needed_by

EngineKind = Literal["browser", "local"]
PACKAGE = "dare.web"
INDEX = "index.html"
PAGE = Path(__file__).parent / "page"
MODELS: Mapping[str, Callable[[], bytes]] = {
    **{name: (home / WEIGHTS).read_bytes for name, home in {"base": BASE, **TUNED}.items()},
    **{name: partial(broken_model, name) for name in BROKEN},
}
"""What each model's file holds, by the names that a setting has for them."""
PROMPTS = 100
"""For each task, of those that no model was trained on; as many as `dare demo` asks."""
ENGLISH_BYTES = 4096

SECTIONS = (
    Section("drop", "Drop and rescale", "drop.html.jinja"),
    Section("signs", "Signs and conflict", "signs.html.jinja"),
    Section("arc", "The arc", "arc.html.jinja"),
    Section("live", "Merge live", "live.html.jinja"),
    Section("predict", "Predict first", "predict.html.jinja"),
    Section("breaking", "Break it", "breaking.html.jinja"),
    Section("own", "Your own models", "own.html.jinja"),
)
STYLES = ("playground.css", "live.css", "own.css")
POLICY = (
    "connect-src 'self'; worker-src 'self'; img-src 'self' data: blob:; "
    "style-src 'unsafe-inline'; frame-src 'self' blob:"
)
SINGLE_POLICY = "connect-src blob:; img-src data: blob:; style-src 'unsafe-inline'"
"""Of a page that is one file."""

Assets = Mapping[str, Callable[[], bytes]]


def page_assets(kind: EngineKind) -> Assets:
    """Each file of the page with what makes its content."""
    found: dict[str, Callable[[], bytes]] = {
        INDEX: partial(render_index, kind),
        "vega.js": drawing_library,
        "methods.json": partial(methods, kind),
        "prompts.json": prompts,
    }
    for path in PAGE.rglob("*"):
        if path.is_file() and path.suffix in {".js", ".wasm", ".json", ".svg"}:
            found[path.relative_to(PAGE).as_posix()] = path.read_bytes
    for name, read in MODELS.items():
        found[f"models/{name}.safetensors"] = read
    return found


def render_index(
    kind: EngineKind, embedded: Mapping[str, Any] | None = None, drawing: str = ""
) -> bytes:
    """The page itself; with all that it needs embedded it loads nothing."""
    scripts = [files(SHELL).joinpath("templates", "page.js").read_text("utf-8")]
    if embedded is not None:
        scripts = [drawing, *scripts, _template("single.js")]
    return render_template(
        PACKAGE,
        "playground.html.jinja",
        scripts=scripts,
        styles=[_template(name) for name in STYLES],
        policy=POLICY if embedded is None else SINGLE_POLICY,
        allowed=("'self'" if embedded is None else "blob:", "'wasm-unsafe-eval'"),
        title="dare playground",
        sections=SECTIONS,
        drawings=[],
        kind=kind,
        modules=needed_by("main.js", _modules()),
        embedded=embedded,
    ).encode()


def _modules() -> dict[str, str]:
    """The page's scripts, by name."""
    found = PAGE.rglob("*.js")
    return {path.relative_to(PAGE).as_posix(): path.read_text("utf-8") for path in found}


def _template(name: str) -> str:
    return files(PACKAGE).joinpath("templates", name).read_text("utf-8")


def methods(kind: EngineKind) -> bytes:
    """Every stage and alias: what it does, and what can be set of it."""
    if kind == "local":
        load_installed_stages()
    return json.dumps(catalogue(STAGES), ensure_ascii=False).encode()


def prompts() -> bytes:
    """What the models are asked: by task prompts with their answers, and English to predict."""
    tasks = [
        {"name": task.name, "title": task.title, "examples": task.examples("test", PROMPTS)}
        for task in TASKS
    ]
    english = held_out_english()[:ENGLISH_BYTES].decode("ascii")
    return json.dumps({"tasks": tasks, "english": english}).encode()


def write_folder(folder: Path) -> list[str]:
    """Write the page for any web server that hands out files; return the names of its files."""
    assets = page_assets("browser")
    there = [name for name in assets if (folder / name).exists()]
    if there and not (folder / INDEX).exists():
        raise OutputError(
            f"{folder}: contains {there[0]} and no {INDEX} of the page, so dare did not write it; "
            "build into an empty folder"
        )
    write_file(folder / INDEX, assets[INDEX](), "page")
    for name, content in assets.items():
        write_file(folder / name, content(), kind=None)
    return sorted(assets)


def others_in(folder: Path) -> list[str]:
    """What a folder holds that is not of the page."""
    names = page_assets("browser")
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    return sorted({path.relative_to(folder).as_posix() for path in found} - names.keys())
