"""What the figures of models share: lines, bars, layers, and the model that is brought out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dare.output.page.charts import Spec, alt, bright_if, by_name, finish_chart, repeated, zoom
from dare.output.page.tables import Row
from dare.output.page.themes import DASHES, SHAPES

CHOSEN = "!model || datum.model === model"
CHOSEN_PAIR = "!model || datum.model === model || datum.other === model"
CONTRAST = "luminance(scale('color', datum.{field})) > 0.3 ? '#111417' : '#ffffff'"
"""The colour of text on a cell of a matrix."""


def lines(
    names: Sequence[str],
    *,
    x: Any,
    y: Any,
    tooltip: list[Any],
    points: bool = True,
    field: str = "model",
) -> Any:
    """A line for each name, told apart by colour, dashes and shapes; models' can be zoomed."""
    of_models = field == "model"
    opacity = bright_if(CHOSEN if of_models else CHOSEN_PAIR)
    chart = alt.Chart().encode(
        x=x, y=y, color=by_name(alt.Color, names, field=field), opacity=opacity
    )
    looks = {"interpolate": "monotone"} if of_models else {}
    # Dashes by number: by name they would get into the legend, as dashed outlines.
    dashes = alt.Scale(domain=list(range(len(names))), range=repeated(DASHES, len(names)))
    curves = chart.mark_line(aria=False, clip=True, **looks)
    curves = curves.encode(strokeDash=alt.StrokeDash("dash:O").scale(dashes).legend(None))
    marks = chart.mark_point(filled=True, size=55 if points else 220, aria=False, clip=True)
    marks = marks.encode(shape=by_name(alt.Shape, names, SHAPES, field=field), tooltip=tooltip)
    if not points:  # only there to be hovered over
        marks = marks.encode(opacity=alt.value(0))
    return alt.layer(curves, marks.add_params(zoom()) if of_models else marks)


def model_bars(names: Sequence[str], *, text: Any, **places: Any) -> Any:
    """A bar for each model, with a text behind it."""
    model = alt.Y("model:N", title=None, sort=list(names))
    chart = alt.Chart().encode(y=model, opacity=bright_if(CHOSEN), **places)
    bars = chart.mark_bar(cornerRadiusEnd=2, aria=False)
    bars = bars.encode(color=by_name(alt.Color, names, legend=None))
    return alt.layer(bars, chart.mark_text(align="left", dx=5, aria=False).encode(text=text))


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
    """The chart as Vega-Lite, with the parameter `model`."""
    return finish_chart(chart.add_params(alt.param(name="model", value="")), rows, height)
