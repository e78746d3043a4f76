"""What figures share: scales, labels, tooltips.

The only module that imports Altair, which writes Vega-Lite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dare.output.page.tables import Row

Spec = dict[str, Any]
FAINT = 0.12


class _OnDemand:
    """Altair, imported when the first figure is drawn."""

    def __getattr__(self, name: str) -> Any:
        import altair

        return getattr(altair, name)


alt: Any = _OnDemand()


def by_name(
    channel: Any,
    names: Sequence[str],
    values: Sequence[Any] = (),
    *,
    field: str = "model",
    legend: Any = ...,
) -> Any:
    """Tell names apart, by the theme's values or by these; the legend uses the room there is."""
    chosen = {"range": repeated(values, len(names))} if values else {}
    coded = channel(f"{field}:N", title=None, sort=list(names)).scale(domain=list(names), **chosen)
    return coded.legend(alt.Legend(columns=room_for(names)) if legend is ... else legend)


def room_for(names: Sequence[str]) -> Any:
    """As many columns of a legend as there is room for."""
    pixels = min(190, 50 + 8 * max(map(len, names), default=0))  # labels are cut at 150
    return alt.expr(f"max(1, floor(width / {pixels}))")


def repeated(values: Sequence[Any], count: int) -> list[Any]:
    """So many values, begun again where there are fewer."""
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


def haloed_text(chart: Any, **looks: Any) -> Any:
    """Text that can be read on top of lines: a wide copy in the ground's colour lies below."""
    below = chart.mark_text(style="halo", aria=False, **looks)
    return alt.layer(below, chart.mark_text(aria=False, **looks))


def level_line(value: float, data: Any = ...) -> Any:
    """A dashed line across the chart."""
    chart = alt.Chart() if data is ... else alt.Chart(data)
    return chart.mark_rule(strokeDash=[4, 3], size=1.5, aria=False).encode(y=alt.datum(value))


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


def rows_named(name: str) -> Any:
    """Data that `finish_chart` is given by this name."""
    return alt.NamedData(name=name)


def finish_chart(
    chart: Any, rows: Sequence[Row], height: int = 280, **others: Sequence[Row]
) -> Spec:
    """The chart as Vega-Lite, as wide as its place.

    Rows are added at the end: Altair would copy them with every step, and check each of them.
    """
    whole = chart.properties(
        data=rows_named("rows"),
        width="container",
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    )
    spec: Spec = whole.to_dict(validate=False)  # which takes long; tests draw every figure
    del spec["config"]
    spec["datasets"] = {**spec.get("datasets", {}), "rows": list(rows), **others}
    return spec
