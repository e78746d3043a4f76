"""Everything that the page is made of, by name: what the server answers with, or a folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

from dare.demo.merges import BASE, TUNED
from dare.demo.tasks import TASKS, held_out_english
from dare.output.page.shell import SHELL, Section, render_template

EngineKind = Literal["browser", "local"]
PACKAGE = "dare.web"
PAGE = Path(__file__).parent / "page"
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
    "default-src 'none'; connect-src 'self'; worker-src 'self'; img-src 'self' data: blob:; "
    "style-src 'unsafe-inline'; frame-src 'self' blob:"
)

Assets = Mapping[str, Callable[[], bytes]]


def page_assets(kind: EngineKind) -> Assets:
    """Each file of the page with what makes its content."""
    found: dict[str, Callable[[], bytes]] = {
        "index.html": partial(render_index, kind),
        "vega.js": drawing_library,
        "prompts.json": prompts,
    }
    for path in PAGE.rglob("*"):
        if path.is_file() and path.suffix in {".js", ".wasm", ".json", ".svg"}:
            found[path.relative_to(PAGE).as_posix()] = path.read_bytes
    for name, folder in {"base": BASE, **TUNED}.items():
        found[f"models/{name}.safetensors"] = (folder / "model.safetensors").read_bytes
    return found


def render_index(kind: EngineKind) -> bytes:
    """The page itself."""
    styles = [files(PACKAGE).joinpath("templates", name).read_text("utf-8") for name in STYLES]
    return render_template(
        PACKAGE,
        "playground.html.jinja",
        scripts=[files(SHELL).joinpath("templates", "page.js").read_text("utf-8")],
        styles=styles,
        policy=POLICY,
        allowed="'self' 'wasm-unsafe-eval'",
        title="dare playground",
        sections=SECTIONS,
        drawings=[],
        kind=kind,
    ).encode()


def drawing_library() -> bytes:
    """The JavaScript that draws figures."""
    import altair

    from dare.output.page.writing import library

    return library(".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])).encode()


def prompts() -> bytes:
    """What the models are asked: by task prompts with their answers, and English to predict."""
    tasks = [
        {"name": task.name, "title": task.title, "examples": task.examples("test", PROMPTS)}
        for task in TASKS
    ]
    english = held_out_english()[:ENGLISH_BYTES].decode("ascii")
    return json.dumps({"tasks": tasks, "english": english}).encode()


def write_folder(folder: Path) -> None:
    """Write the page for any web server that hands out files."""
    for name, content in page_assets("browser").items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content())
