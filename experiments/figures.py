"""The figures of docs/evidence.md, as SVG that follows the reader's choice of light or dark."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from evidence import (
    WAYS,
    Cell,
    Evidence,
    Record,
    differences,
    effects_by_count,
    estimate,
    kept,
    methods,
    shares_by_rate,
)

from dare.documents.charts import THEMES, by_name, vega_config

VARIANTS = {"as it is": "{}", "tuned": "{} tuned", "after DARE 0.5": "dare+{} 0.5"}
"""Of a method, by the name of a series."""
POINTS = {"domain": (-15, 10), "clamp": True}
EFFECTS = {"domain": (-25, 5), "clamp": True}
SHARES = {"domain": (-0.5, 1.2), "clamp": True}
"""Of axes; what lies outside is drawn at their ends."""
POWERS_OF_TEN = [10.0**power for power in range(-6, 2)]


def methods_figure(evidence: Evidence) -> Any:
    sets, names = evidence.sets, methods(evidence.sets)
    cells = [
        Cell(name, label, estimate(differences(sets, form.format(name))))
        for name in names
        for label, form in VARIANTS.items()
    ]
    chart = alt.Chart(_data(cells)).encode(
        y=alt.Y("x:N", title=None, sort=names),
        yOffset=alt.YOffset("series:N", sort=list(VARIANTS)),
        color=by_name(alt.Color, list(VARIANTS), field="series"),
    )
    ends = alt.X("low:Q").scale(**POINTS), alt.X2("high:Q")
    dots = chart.mark_point(filled=True, opacity=1).encode(
        alt.X("mean:Q", title="points, minus the plain average").scale(**POINTS)
    )
    return (chart.mark_rule().encode(*ends) + dots).properties(width=480, height=24 * len(names))


def tolerance_figure(evidence: Evidence) -> Any:
    y = alt.Y("mean:Q", title="share of the gain kept").axis(format="%")
    return _lines(shares_by_rate(evidence), "drop rate", y, SHARES, 300)


def counts_figure(evidence: Evidence) -> Any:
    y = alt.Y("mean:Q", title="points, minus without DARE")
    return _lines(effects_by_count(evidence), "models", y, EFFECTS, 190)


def sizes_figure(evidence: Evidence) -> Any:
    measures = {"relative_norm": "‖δ‖ / ‖base‖", "mean_magnitude": "mean │δ│"}
    rows = [
        {"x": m[key], "y": kept(m, m["rescaled"]["0.9"]), "series": WAYS[m["way"]], "panel": panel}
        for m in evidence.gainers
        for key, panel in measures.items()
    ]
    chart = alt.Chart().mark_point(filled=True, size=50, opacity=0.8)
    chart = chart.encode(
        alt.X("x:Q", title=None).scale(type="log").axis(format="~g", values=POWERS_OF_TEN),
        alt.Y("y:Q", title="gain kept at 0.9").axis(format="%").scale(**SHARES),
        by_name(alt.Color, list(WAYS.values()), field="series"),
    )
    return _panels(chart, alt.Data(values=rows), list(measures.values()), 300).resolve_scale(
        x="independent"
    )


FIGURES: dict[str, Callable[[Evidence], Any]] = {
    "methods": methods_figure,
    "tolerance": tolerance_figure,
    "counts": counts_figure,
    "sizes": sizes_figure,
}
"""By the name of their file."""


def _lines(cells: Sequence[Cell], title: str, y: Any, scale: Record, width: int) -> Any:
    """Series with their intervals, in panels side by side."""
    series = list(dict.fromkeys(cell.series for cell in cells))
    panels = list(dict.fromkeys(cell.panel for cell in cells))
    chart = alt.Chart().encode(
        x=alt.X("x:O", title=title, sort=None).axis(labelAngle=0),
        color=by_name(alt.Color, series, field="series"),
    )
    rules = chart.mark_rule(opacity=0.6).encode(alt.Y("low:Q").scale(**scale), alt.Y2("high:Q"))
    lines = chart.mark_line(point=True).encode(y.scale(**scale))
    return _panels(rules + lines, _data(cells), panels, width)


def _panels(chart: Any, data: Any, panels: list[str], width: int) -> Any:
    sized = chart.properties(width=width, height=220)
    return sized.facet(alt.Facet("panel:N", title=None, sort=panels), data=data)


def _data(cells: Iterable[Cell]) -> Any:
    """The cells that have an estimate."""
    keys = ("mean", "low", "high")
    rows: list[Record] = [
        {"x": c.x, "series": c.series, "panel": c.panel}
        | {key: round(v, 4) for key, v in zip(keys, astuple(c.estimate), strict=False) if v == v}
        for c in cells
        if c.estimate.bases
    ]
    return alt.Data(values=rows)


# ---------------------------------------------------------------- files


def is_current(file: Path, chart: Any) -> bool:
    """Whether a file was drawn from the same data; how, depends on fonts and versions."""
    return file.exists() and _digest(chart) in file.read_text("utf-8")


def _digest(chart: Any) -> str:
    return hashlib.sha256(json.dumps(chart.to_dict()["data"]).encode()).hexdigest()[:16]


def draw(chart: Any) -> str:
    """A chart as SVG with a background of its own, in light colours or in dark ones."""
    light, dark = (
        [*theme.models, *theme.colours.values()] for theme in (THEMES["light"], THEMES["dark"])
    )
    colours = THEMES["light"].colours
    looks = vega_config(THEMES["light"]) | {
        "background": colours["panel"],
        "header": {"labelColor": colours["ink"], "labelFontSize": 12},
    }
    drawn = vl_convert.vegalite_to_svg(chart.to_dict() | {"config": looks})
    rules = "".join(
        f'[{part}="{old}"]{{{part}:{new}}}'
        for old, new in zip(light, dark, strict=True)
        for part in ("fill", "stroke")
        if f'{part}="{old}"' in drawn
    )
    start, rest = drawn.split(">", 1)
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>"
    return f"{start}><!-- {_digest(chart)} -->{style}{rest}\n"
