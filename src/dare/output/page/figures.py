"""A figure: a chart with what has to be said about it, which is in a `figures.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dare.output.page.charts import Spec
from dare.output.page.tables import Table


@dataclass(frozen=True)
class Figure:
    """A chart with what has to be said about it."""

    name: str
    """Of files and anchors: `magnitudes`."""
    title: str
    caption: str
    """What is seen, and how to read it."""
    description: str
    """For those who do not see it: what is drawn, and the most telling numbers."""
    spec: Spec
    """Vega-Lite, without colours."""
    table: Table
    models: tuple[str, ...] = ()
    """Whose figure it is, if it is not everybody's."""
    width: float = 1.0
    """The share of the page's width that it needs."""
    zooms: bool = False
    folded: bool = False
    """Whether it waits until somebody asks for it."""


def read_texts(package: str) -> dict[str, Any]:
    """What a package's `figures.toml` says, by the figures' names."""
    return tomllib.loads(files(package).joinpath("figures.toml").read_text("utf-8"))


def make_figure(
    texts: Mapping[str, Any], name: str, spec: Spec, table: Table, known: Mapping[str, str]
) -> Figure:
    """A figure with its texts, in which the known values are filled in."""
    title, caption, description = (
        texts[part].format_map(known) for part in ("title", "caption", "description")
    )
    looks = {"width": texts.get("width", 1.0), "zooms": texts.get("zooms", False)}
    return Figure(name, title, caption, description, spec, table, **looks)
