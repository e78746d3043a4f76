"""Pages as files.

The only module that imports vl-convert, which holds the JavaScript of Vega.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dare.errors import OutputError
from dare.output.page.charts import Figure
from dare.output.targets import check_free

NEEDED = ("altair", "jinja2", "vl_convert")
EXPOSE = "window.vegaEmbed = vegaEmbed;"


def check_installed() -> None:
    """Refuse to make a page without the packages that it takes."""
    if not all(find_spec(name) for name in NEEDED):
        raise OutputError(
            "a report needs altair, jinja2 and vl-convert-python, and not all of them are "
            "installed: pip install 'dare-merge[report]'"
        )


def library_for(figures: Sequence[Figure]) -> str:
    """The JavaScript that draws these figures."""
    return drawing_bundle(_version(figures[0].spec)) if figures else ""


@cache
def drawing_bundle(version: str) -> str:
    """The JavaScript that draws, for figures of a version of Vega-Lite."""
    import vl_convert

    library = vl_convert.javascript_bundle(EXPOSE, vl_version=version)
    return re.sub(r"</(?=script)", r"<\\/", library, flags=re.IGNORECASE)


def _version(spec: dict[str, Any]) -> str:
    """The version of Vega-Lite that a specification names.

    >>> _version({"$schema": "https://vega.github.io/schema/vega-lite/v6.4.1.json"})
    '6.4'
    """
    major, minor, *_ = spec["$schema"].rpartition("/v")[2].split(".")
    return f"{major}.{minor}"


def write_file(path: Path, content: bytes, kind: str | None, *, overwrite: bool = True) -> None:
    """Write a file, and the folders that it lies in; never over a file of another kind."""
    if kind is not None:
        check_free(path, kind, overwrite=overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb" if overwrite else "xb") as file:
            file.write(content)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None
