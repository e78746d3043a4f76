"""Charts: scales, labels, tooltips, texts (`figures.toml`) and looks (`themes.toml`) of figures.

The only module that imports Altair, which writes Vega-Lite.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from string import Formatter
from types import SimpleNamespace
from typing import Any

from dare.documents.document import Figure, Row, Spec, Table, tabulate
from dare.documents.words import NOTHING, number, rate_text, share, value_text, weight_text

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
    """Return as many columns of a legend as there is room for."""
    pixels = min(190, 50 + 8 * max(map(len, names), default=0))  # labels are cut at 150
    return alt.expr(f"max(1, floor(width / {pixels}))")


def repeated(values: Sequence[Any], count: int) -> list[Any]:
    """Return `count` values, starting again if there are fewer."""
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
        labelFlush=20,  # pixels: a first label centred there would lie in the other axis
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


# ---------------------------------------------------------------- a figure


def read_texts(package: str) -> dict[str, Any]:
    """Return the contents of a package's `figures.toml`, by the figures' names."""
    return tomllib.loads(files(package).joinpath("figures.toml").read_text("utf-8"))


def make_figure(
    texts: Mapping[str, Any], name: str, spec: Spec, numbers: Table | Iterable[Any], **known: str
) -> Figure:
    """Return a figure with its texts and the table of its numbers, all filled in."""
    own = texts[name]
    table = numbers if isinstance(numbers, Table) else fill_table(own["columns"], numbers)
    title, caption, description = (
        own[part].format_map(known) for part in ("title", "caption", "description")
    )
    looks = {"width": own.get("width", 1.0), "zooms": own.get("zooms", False)}
    return Figure(name, title, caption, description, spec, table, **looks)


def _interval_text(row: Row) -> str:
    if row["low"] == row["high"]:
        return NOTHING
    return f"{number(row['low'])} … {number(row['high'])}"


FORMS: dict[str, Callable[[Any], str]] = {
    **{"share": share, "number": number, "value": value_text, "weight": weight_text},
    **{"rate": rate_text, "interval": _interval_text, "given": lambda text: text or NOTHING},
}


class _Cells(Formatter):
    """Texts of cells, with formats of our own besides the usual ones."""

    def format_field(self, value: Any, form: str) -> Any:
        return FORMS[form](value) if form in FORMS else super().format_field(value, form)


def fill_table(columns: Mapping[str, str], items: Iterable[Any], **looks: Any) -> Table:
    """Return a table with a row for each item, which fills in the texts of the columns.

    >>> fill_table({"model": "{0[name]}", "left >": "{0[left]:share}"}, [{"name": "a", "left": 1}])
    Table(columns=('model', 'left >'), rows=(('a', '100%'),), ...)
    """
    fill = _Cells().format
    return tabulate(items, {name: partial(fill, text) for name, text in columns.items()}, **looks)


# ---------------------------------------------------------------- looks

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke")
DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2], [12, 4], [5, 3, 1, 3, 1, 3])


_LOOKS = tomllib.loads(files("dare.documents").joinpath("themes.toml").read_text("utf-8"))
# Light and dark: `colours` of the page, by name, and of what the figures show.
THEMES = {name: SimpleNamespace(**_LOOKS[name]) for name in ("light", "dark")}


def vega_config(theme: SimpleNamespace) -> dict[str, Any]:
    """Return the configuration that gives figures the page's looks."""
    known = {**theme.colours, **vars(theme), "shapes": list(SHAPES), "none": None}
    known["first"] = theme.models[0]

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(each) for key, each in value.items()}
        is_name = isinstance(value, str) and value.startswith("@")
        return known[value[1:]] if is_name else value

    looks: dict[str, Any] = fill(_LOOKS["vega"])
    return looks
