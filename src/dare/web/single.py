"""The page as one file, which a browser opens from the disk, with no server at all.

Browsers load neither modules nor data from files that lie beside a page. So all of it stands in
the page: a script makes a blob of each part, and modules import each other by the blobs' addresses.
Workers cannot be started there, and the engine computes in the page itself, a little at a time.
"""

from __future__ import annotations

import base64
import re
from graphlib import TopologicalSorter

from dare.web.assets import page_assets, render_index
from dare.web.modules import imports, with_imports

_BESIDE = re.compile(r"new URL\(([^)]+), import\.meta\.url\)")
"""How a module names a file that lies beside it."""


def single_page() -> bytes:
    """The whole page as one HTML file."""
    made = {name: make() for name, make in page_assets("browser").items() if name != "index.html"}
    drawing = made.pop("vega.js").decode()
    modules = {name: text.decode() for name, text in made.items() if name.endswith(".js")}
    data = {
        name.removeprefix("engine/"): base64.b64encode(content).decode()
        for name, content in made.items()
        if name not in modules
    }
    parts = {"modules": [[name, _within(name, modules[name])] for name in _in_order(modules)]}
    return render_index("browser", {**parts, "data": data}, drawing)


def _in_order(modules: dict[str, str]) -> list[str]:
    """Names of modules, each after those that it imports."""
    wanted = {name: imports(name, text) for name, text in modules.items()}
    return list(TopologicalSorter(wanted).static_order())


def _within(name: str, text: str) -> str:
    """A module that finds others by marks, which the loader replaces, and data by their names."""
    return _BESIDE.sub(r"dareFile(\1)", with_imports(name, text, lambda other: f"@@{other}@@"))
