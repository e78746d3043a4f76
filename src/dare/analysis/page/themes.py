"""The colours of the page and its figures, light and dark: the one place that holds them.

Models have Okabe and Ito's colours, which people with any kind of colour vision can tell apart,
as far as they stand out from the background; dashes and shapes tell the models apart as well.
Amounts go from the background to its opposite, so that more is always easier to see.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
AMOUNTS = (
    "#f2f6e3",
    "#d3ebd0",
    "#9dd6c4",
    "#5bb8c4",
    "#2f8fbb",
    "#255fa3",
    "#22377d",
    "#141c4e",
)
"""From light to dark, and evenly so: they can be told apart without seeing colours."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke")
DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2], [12, 4], [5, 3, 1, 3, 1, 3])


@dataclass(frozen=True)
class Colours:
    """What the page is painted with; the names are those of its CSS variables."""

    page: str
    panel: str
    raised: str
    ink: str
    muted: str
    line: str
    accent: str
    good: str
    good_tint: str
    fair: str
    fair_tint: str
    poor: str
    poor_tint: str


@dataclass(frozen=True)
class Theme:
    """Light or dark: colours of the page and of what the figures show."""

    name: str
    colours: Colours
    models: tuple[str, ...]
    amounts: tuple[str, ...]
    opposites: tuple[str, ...]
    """From -1 over 0 to 1."""


LIGHT = Theme(
    "light",
    Colours(
        page="#f6f6f3",
        panel="#ffffff",
        raised="#f0f0ec",
        ink="#1b1d20",
        muted="#575d65",
        line="#dededa",
        accent="#00609a",
        good="#00654a",
        good_tint="#e2f2ec",
        fair="#7d4700",
        fair_tint="#fcf0da",
        poor="#9c2f00",
        poor_tint="#fbe6dc",
    ),
    ("#0072b2", "#d55e00", "#009e73", "#b3508a", "#7a6a00", "#3d9bd1", "#1b1d20"),
    AMOUNTS,
    ("#0072b2", "#8fbfdc", "#f3f3f0", "#f0b48a", "#d55e00"),
)
DARK = Theme(
    "dark",
    Colours(
        page="#121417",
        panel="#1a1d21",
        raised="#23272c",
        ink="#e9e9e5",
        muted="#a6acb4",
        line="#33383f",
        accent="#6cc0f0",
        good="#5fd3ae",
        good_tint="#12312a",
        fair="#f0b64a",
        fair_tint="#352711",
        poor="#ff9a6b",
        poor_tint="#3a1f14",
    ),
    ("#56b4e9", "#e8862e", "#2fbf94", "#de94bf", "#f0e442", "#8c9eff", "#e9e9e5"),
    tuple(reversed(AMOUNTS)),
    ("#56b4e9", "#35627c", "#262a30", "#7d5520", "#e69f00"),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


def css_variables(theme: Theme) -> str:
    """The colours as declarations of CSS.

    >>> css_variables(LIGHT).split(";")[0]
    '--page:#f6f6f3'
    """
    declared = {name.replace("_", "-"): value for name, value in asdict(theme.colours).items()}
    return "".join(f"--{name}:{value};" for name, value in declared.items())


def vega_config(theme: Theme) -> dict[str, Any]:
    """The configuration that gives figures the page's looks."""
    colours = theme.colours
    return {
        "font": FONT,
        "background": None,
        "padding": 4,
        "view": {"stroke": None},
        "axis": {
            "labelColor": colours.muted,
            "titleColor": colours.muted,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "gridColor": colours.line,
            "domainColor": colours.line,
            "tickColor": colours.line,
            "labelLimit": 140,
        },
        "legend": {
            "labelColor": colours.ink,
            "titleColor": colours.muted,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "labelLimit": 150,
            "symbolSize": 80,
            "orient": "top",
        },
        "title": {
            "color": colours.ink,
            "fontSize": 15,
            "anchor": "start",
            "offset": 12,
        },
        "text": {"color": colours.ink, "fontSize": 12},
        "rule": {"color": colours.muted},
        "bar": {"color": theme.models[0]},
        "line": {"color": theme.models[0], "strokeWidth": 2},
        "range": {
            "category": list(theme.models),
            "ordinal": list(theme.amounts),
            "ramp": list(theme.amounts),
            "heatmap": list(theme.amounts),
            "diverging": list(theme.opposites),
            "symbol": list(SHAPES),
        },
    }
