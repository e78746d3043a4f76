"""The files of the page, by name, for the server or for a folder.

The JavaScript that draws figures is made once and kept: making it takes seconds, in which the maker
lets no other thread of its process go on. So `python -m dare.web.assets` prints it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

from dare.demo.merges import BASE, BROKEN, ENGLISH_BYTES, PROMPTS, TUNED, WEIGHTS, broken_model
from dare.demo.tasks import TASKS, held_out_english
from dare.documents.charts import alt
from dare.documents.document import Section
from dare.documents.page import PACKAGE as SHELL
from dare.documents.page import drawing_bundle, read_template, render_template
from dare.errors import OutputError
from dare.output.targets import write_file
from dare.tensors.files import cache_folder, read_private, write_private

PACKAGE = "dare.web"
INDEX = "index.html"
PAGE = Path(__file__).parent / "page"
# The content of each model's file, by the model's name in a setting.
MODELS: Mapping[str, Callable[[], bytes]] = {
    **{name: (home / WEIGHTS).read_bytes for name, home in {"base": BASE, **TUNED}.items()},
    **{name: partial(broken_model, name) for name in BROKEN},
}
DIGEST_BYTES = 32


# The parts of the playground; each has a tab, and a template of its name.
SECTIONS = (
    Section("top", "What is DARE?"),
    Section("drop", "Drop and rescale"),
    Section("signs", "Signs and conflict"),
    Section("live", "Merge live"),
    Section("predict", "Predict first"),
    Section("breaking", "Break it"),
    Section("own", "Your own models"),
)
STYLES = ("playground.css", "live.css", "own.css")
POLICY = (
    "connect-src 'self'; worker-src 'self'; img-src 'self' data: blob:; style-src 'unsafe-inline'"
)

Assets = Mapping[str, Callable[[], bytes]]


def page_assets(*, is_server: bool, has_docs: bool = False) -> Assets:
    """Return the files of the page with their makers; only a server has own models.

    With `has_docs` it links to the documentation, in whose folder it lies.
    """
    found: dict[str, Callable[[], bytes]] = {
        INDEX: partial(render_index, is_server=is_server, has_docs=has_docs),
        "vega.js": drawing_library,
        "prompts.json": prompts,
    }
    for path in PAGE.rglob("*"):
        if path.is_file() and path.suffix in {".js", ".wasm", ".json", ".svg"}:
            found[path.relative_to(PAGE).as_posix()] = path.read_bytes
    for name, read in MODELS.items():
        found[f"models/{name}.safetensors"] = read
    return found


def render_index(**known: bool) -> bytes:
    """Render the page itself, with what its templates know of where it lies."""
    return render_template(
        PACKAGE,
        "playground.html.jinja",
        scripts=[read_template(SHELL, "page.js"), read_template(PACKAGE, "tabs.js")],
        styles=[read_template(PACKAGE, name) for name in STYLES],
        policy=POLICY,
        allowed=("'self'", "'wasm-unsafe-eval'"),
        title="dare playground",
        sections=SECTIONS,
        drawings=[],
        **known,
    ).encode()


def prompts() -> bytes:
    """Return the prompts of each task with their answers, and English to predict, as JSON."""
    tasks = [
        {"name": task.name, "title": task.title, "examples": task.examples("test", PROMPTS)}
        for task in TASKS
    ]
    english = held_out_english()[:ENGLISH_BYTES].decode("ascii")
    return json.dumps({"tasks": tasks, "english": english}).encode()


def write_folder(folder: Path, *, overwrite: bool = False) -> list[str]:
    """Write the page for any web server that hands out files; return the names of its files.

    A folder with files that do not belong to the page is refused, unless `overwrite` is true.
    """
    assets = page_assets(is_server=False, has_docs=(folder.absolute().parent / "methods").is_dir())
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    if not overwrite and (others := [name for name in names if name not in assets]):
        remedy = "build into an empty folder, or add --overwrite"
        raise OutputError(f"{folder}: contains {others[0]}, not part of the page; {remedy}")
    there = [name for name in assets if (folder / name).exists()]
    if there and INDEX not in there:
        fault = f"contains {there[0]} and no {INDEX}, so dare did not write it"
        raise OutputError(f"{folder}: {fault}; build into an empty folder")
    write_file(folder / INDEX, assets[INDEX](), "page")
    for name, content in assets.items():
        write_file(folder / name, content(), kind=None)
    return sorted(assets)


# ---------------------------------------------------------------- the library that draws


def drawing_library() -> bytes:
    """Return the library that was kept, if it is whole and nobody else can have written it.

    Otherwise make and keep a new one.
    """
    path = cache_folder() / f"vega-{version('altair')}-{version('vl-convert-python')}.js"
    with suppress(OSError):
        content = read_private(path)
        if hashlib.sha256(content[DIGEST_BYTES:]).digest() == content[:DIGEST_BYTES]:
            return content[DIGEST_BYTES:]
    library = _make_in_process()
    with suppress(OSError):
        write_private(path, hashlib.sha256(library).digest() + library)
    return library


def _make_in_process() -> bytes:
    """Build the library in a separate process."""
    command = [sys.executable, "-m", "dare.web.assets"]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OutputError(f"the library that draws figures cannot be made: {reason}")
    return done.stdout


if __name__ == "__main__":  # print the library, for Altair's version of Vega-Lite
    version_number = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    sys.stdout.buffer.write(drawing_bundle(version_number).encode())
