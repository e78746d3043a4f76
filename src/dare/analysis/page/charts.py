"""What the figures of models share: lines, bars, layers, and the model that is brought out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dare.output.page.charts import (
    DASHES,
    SHAPES,
    Spec,
    alt,
    bright_if,
    by_name,
    finish_chart,
    repeated,
    room_for,
    zoom,
)
from dare.output.page.tables import Row

CHOSEN = "!model || datum.model === model"
CHOSEN_PAIR = "!model || datum.model === model || datum.other === model"
CONTRAST = "luminance(scale('color', datum.{field})) > 0.3 ? '#111417' : '#ffffff'"
"""The colour of text on a cell of a matrix."""
LEFT_OUT = "left_out"
"""The parameter with the names of models that the advice does not merge."""
MARKED = f"(indexof({LEFT_OUT}, datum.label) >= 0 ? '⚠ ' : '') + datum.label"
"""A model's name on an axis or in a legend; a sign stands before those that are left out."""


def lines(
    names: Sequence[str],
    *,
    x: Any,
    y: Any,
    tooltip: list[Any],
    points: bool = True,
    field: str = "model",
    shown: Sequence[str] = (),
) -> Any:
    """A line for each name, told apart by colour, dashes and shapes; models' can be zoomed.

    If only some have a line, `shown` names them; each has the looks that it has among all.
    """
    of_models = field == "model"
    opacity = bright_if(CHOSEN if of_models else CHOSEN_PAIR)
    legend = legend_of(shown or names) if of_models else ...
    chart = alt.Chart().encode(
        x=x, y=y, color=by_name(alt.Color, names, field=field, legend=legend), opacity=opacity
    )
    looks = {"interpolate": "monotone"} if of_models else {}
    # Dashes by number: by name they would get into the legend, as dashed outlines.
    dashes = alt.Scale(domain=list(range(len(names))), range=repeated(DASHES, len(names)))
    curves = chart.mark_line(aria=False, clip=True, **looks)
    curves = curves.encode(strokeDash=alt.StrokeDash("dash:O").scale(dashes).legend(None))
    marks = chart.mark_point(filled=True, size=55 if points else 220, aria=False, clip=True)
    shape = by_name(alt.Shape, names, SHAPES, field=field, legend=legend)
    marks = marks.encode(shape=shape, tooltip=tooltip)
    if not points:  # only there to be hovered over
        marks = marks.encode(opacity=alt.value(0))
    return alt.layer(curves, marks.add_params(zoom()) if of_models else marks)


def model_bars(names: Sequence[str], *, text: Any, **places: Any) -> Any:
    """A bar for each model, with a text behind it."""
    model = model_axis(alt.Y, names)
    chart = alt.Chart().encode(y=model, opacity=bright_if(CHOSEN), **places)
    bars = chart.mark_bar(cornerRadiusEnd=2, aria=False)
    bars = bars.encode(color=by_name(alt.Color, names, legend=None))
    return alt.layer(bars, chart.mark_text(align="left", dx=5, aria=False).encode(text=text))


def legend_of(names: Sequence[str], **looks: Any) -> Any:
    """A legend of models, in as many columns as there is room for."""
    return alt.Legend(columns=room_for(names), values=list(names), labelExpr=MARKED, **looks)


def model_axis(channel: Any, names: Sequence[str], field: str = "model", **looks: Any) -> Any:
    """Models one after the other."""
    return channel(f"{field}:N", title=None, sort=list(names)).axis(
        labelExpr=MARKED, labelLimit=110, labelOverlap=False, **looks
    )


def at_least(low: float, high: float, least: float, *, around: float) -> list[float]:
    """The ends of a scale, so far apart that noise looks like noise.

    >>> at_least(-0.01, 0.3, 0.1, around=0.0)
    [-0.1, 0.3]
    """
    return [min(low, around - least), max(high, around + least)]


def dashed(rows: Sequence[Row], names: Sequence[str], field: str = "model") -> list[Row]:
    """The rows with the number of their dashes."""
    return [{**row, "dash": names.index(row[field])} for row in rows]


def layer_numbers() -> Any:
    """Layers as numbers, from left to right."""
    x = alt.X("layer:Q", title="layer").scale(padding=12, nice=False, zero=False)
    return x.axis(tickMinStep=1, format="d")


def layer_names() -> Any:
    """Layers, and what stands outside of them in a short word."""
    label = "datum.label === 'outside' ? 'out' : datum.label"
    x = alt.X("layer:N", title="layer", sort=None)
    return x.axis(labelAngle=0, labelOverlap="greedy", labelExpr=label)


def finish(chart: Any, rows: Sequence[Row], height: int = 280) -> Spec:
    """The chart as Vega-Lite, with the parameters `model` and `left_out`."""
    chosen, left_out = alt.param(name="model", value=""), alt.param(name=LEFT_OUT, value=[])
    return finish_chart(chart.add_params(chosen, left_out), rows, height)
