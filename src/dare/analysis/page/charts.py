"""What the figures share: axes, lines, bars, tooltips.

The only module that imports Altair, which writes Vega-Lite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dare.analysis.page.series import Row
from dare.analysis.page.themes import DASHES, SHAPES

Spec = dict[str, Any]
CHOSEN = "!model || datum.model === model"
CHOSEN_PAIR = "!model || datum.model === model || datum.other === model"
FAINT = 0.12
CONTRAST = "luminance(scale('color', datum.{field})) > 0.3 ? '#111417' : '#ffffff'"
"""The colour of text on a cell of a matrix."""


class _OnDemand:
    """Altair, imported when the first figure is drawn."""

    def __getattr__(self, name: str) -> Any:
        import altair

        return getattr(altair, name)


alt: Any = _OnDemand()


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
    dashes = alt.Scale(domain=list(range(len(names))), range=_repeated(DASHES, len(names)))
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


def by_name(
    channel: Any,
    names: Sequence[str],
    values: Sequence[Any] = (),
    *,
    field: str = "model",
    legend: Any = ...,
) -> Any:
    """Tell names apart, by the theme's values or by these; the legend uses the room there is."""
    chosen = {"range": _repeated(values, len(names))} if values else {}
    coded = channel(f"{field}:N", title=None, sort=list(names)).scale(domain=list(names), **chosen)
    return coded.legend(alt.Legend(columns=room_for(names)) if legend is ... else legend)


def room_for(names: Sequence[str]) -> Any:
    """As many columns of a legend as there is room for."""
    pixels = min(190, 50 + 8 * max(map(len, names), default=0))  # labels are cut at 150
    return alt.expr(f"max(1, floor(width / {pixels}))")


def dashed(rows: Sequence[Row], names: Sequence[str], field: str = "model") -> list[Row]:
    """The rows with the number of their dashes."""
    return [{**row, "dash": names.index(row[field])} for row in rows]


def _repeated(values: Sequence[Any], count: int) -> list[Any]:
    return [values[place % len(values)] for place in range(count)]


def bright_if(test: str) -> Any:
    """Opacity: full where the test holds, faint elsewhere."""
    return alt.when(test).then(alt.value(1)).otherwise(alt.value(FAINT))


def tooltip_of(*fields: str | tuple[str, ...]) -> list[Any]:
    """Fields, with a title and a format where they need them."""
    pairs = [(field,) if isinstance(field, str) else field for field in fields]
    keys = ("shorthand", "title", "format")
    return [
        alt.Tooltip(**{key: text for key, text in zip(keys, texts, strict=False) if text})
        for texts in pairs
    ]


def level_line(value: float, data: Any = ...) -> Any:
    """A dashed line across the chart."""
    chart = alt.Chart() if data is ... else alt.Chart(data)
    return chart.mark_rule(strokeDash=[4, 3], size=1.5, aria=False).encode(y=alt.datum(value))


def layer_numbers() -> Any:
    """Layers as numbers, from left to right."""
    x = alt.X("layer:Q", title="layer").scale(padding=12, nice=False, zero=False)
    return x.axis(tickMinStep=1, format="d")


def layer_names() -> Any:
    """Layers, and what stands outside of them in a short word."""
    label = "datum.label === 'outside' ? 'out' : datum.label"
    x = alt.X("layer:N", title="layer", sort=None)
    return x.axis(labelAngle=0, labelOverlap="greedy", labelExpr=label)


def logarithmic(scale: str, *, percent: bool = False) -> Any:
    """A logarithmic axis with labels at powers of ten; also at 2 and 5 if it is short."""
    mantissa = "datum.value / pow(10, floor(log(datum.value * 1.0001) / LN10))"
    short = f"domain('{scale}')[1] < 1001 * domain('{scale}')[0]"
    plain = "datum.value > 0.0009 && datum.value < 90000"
    shape = "'~%'" if percent else f"{plain} ? '~g' : '~e'"
    labelled = f"indexof({short} ? [1, 2, 5] : [1], round({mantissa})) >= 0"
    power = f"round({mantissa}) === 1"
    return alt.Axis(
        labelExpr=f"{labelled} ? format(datum.value, {shape}) : ''",
        labelOverlap=False,
        grid=True,
        gridOpacity=alt.when(power).then(alt.value(1)).otherwise(alt.value(0.3)),
        ticks=False,
        labelPadding=6,
    )


def zoom() -> Any:
    """Zoom with shift and the wheel, so that scrolling the page stays what it is."""
    return alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.shiftKey]")


def finish(chart: Any, rows: Sequence[Row], height: int = 280) -> Spec:
    """The chart as Vega-Lite, as wide as its place, with the parameter `model`."""
    whole = chart.properties(
        data={"values": rows},
        width="container",
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    ).add_params(alt.param(name="model", value=""))
    spec: Spec = whole.to_dict()
    del spec["config"]
    return spec
