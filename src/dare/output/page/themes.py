"""The looks of the page and its figures; the colours are in `themes.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
FONTS = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
HALO = {"strokeWidth": 4, "strokeJoin": "round"}
"""Of what is drawn below a text, so that it can be read on top of lines."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke")
DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2], [12, 4], [5, 3, 1, 3, 1, 3])


@dataclass(frozen=True)
class Theme:
    """Light or dark: colours of the page, by name, and of what the figures show."""

    colours: dict[str, str]
    models: list[str]
    amounts: list[str]
    opposites: list[str]


_FILE = files("dare.output.page").joinpath("themes.toml").read_text("utf-8")
THEMES = {name: Theme(**colours) for name, colours in tomllib.loads(_FILE).items()}


def vega_config(theme: Theme) -> dict[str, Any]:
    """The configuration that gives figures the page's looks."""
    colours = theme.colours
    return {
        "font": FONT,
        "background": None,
        "padding": 4,
        "view": {"stroke": None},
        "axis": {
            "labelColor": colours["muted"],
            "titleColor": colours["muted"],
            **FONTS,
            "titlePadding": 8,
            "gridColor": colours["line"],
            "domainColor": colours["line"],
            "tickColor": colours["line"],
            "labelLimit": 140,
        },
        "legend": {
            "labelColor": colours["ink"],
            "titleColor": colours["muted"],
            **FONTS,
            "labelLimit": 150,
            "symbolSize": 80,
            "orient": "top",
        },
        "title": {"color": colours["ink"], "fontSize": 15, "anchor": "start", "offset": 12},
        "text": {"color": colours["ink"], "fontSize": 12},
        "rule": {"color": colours["muted"]},
        "style": {"halo": {"fill": colours["panel"], "stroke": colours["panel"], **HALO}},
        "bar": {"color": theme.models[0]},
        "tick": {"color": colours["ink"]},
        "line": {"color": theme.models[0], "strokeWidth": 2},
        "range": {
            "category": theme.models,
            "ordinal": theme.amounts,
            "ramp": theme.amounts,
            "heatmap": theme.amounts,
            "diverging": theme.opposites,
            "symbol": list(SHAPES),
        },
    }
