"""The figures of a study: one function for each, from the study to a chart with its numbers.

A function returns None if there is nothing to draw. What is said about a figure is in
`figures.toml`; colours come from the page's themes when it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dare.documents.charts import (
    SHAPES,
    Figure,
    Spec,
    alt,
    by_name,
    finish_chart,
    haloed_text,
    make_figure,
    read_texts,
    rows_named,
    tooltip_of,
    zoom,
)
from dare.documents.document import Columns, Row, Table
from dare.documents.words import NOTHING, listed, share, times
from dare.studies.page import series
from dare.studies.results import Conclusion, StudyData, value_text

MOST_RANKED = 12
"""Settings in the figure of the ranking."""
MOST_CURVES = 8
MOST_NUMBERS = 200
"""Rows of the table below a figure; the table of trials has all."""
WIDE_RANGE = 100
"""Largest over smallest value from which an axis is logarithmic."""
GREY = "#888"
"""Of marks that stand out from light and dark grounds alike."""
TEXTS = read_texts("dare.studies.page")


def draw_figures(data: StudyData, conclusion: Conclusion) -> list[Figure]:
    """Draw all figures that there is something to draw in."""
    drawn = [
        ranking(conclusion),
        *curves(data, conclusion),
        importance(conclusion),
        pareto(data, conclusion),
    ]
    return [figure for figure in drawn if figure is not None]


def _figure(name: str, spec: Spec, table: Table, **known: str) -> Figure:
    cut = replace(table, rows=table.rows[:MOST_NUMBERS])
    return make_figure(TEXTS[name], name, spec, cut, known)


# ---------------------------------------------------------------- ranking


def ranking(conclusion: Conclusion) -> Figure | None:
    """The best settings and the baselines, with their intervals."""
    rows, far = series.ranking_rows(conclusion, MOST_RANKED)
    if not rows:
        return None
    kinds = [kind for kind in series.KINDS if any(row["kind"] == kind for row in rows)]
    y = alt.Y("place:O").axis(None)
    place = alt.Chart().encode(
        y=y,
        color=by_name(alt.Color, kinds, field="kind"),
        tooltip=tooltip_of(
            ("label:N", "setting"),
            ("objective:Q", "", ".4~g"),
            ("low:Q", "from", ".4~g"),
            ("high:Q", "to", ".4~g"),
            "seeds:Q",
        ),
    )
    x = alt.X("objective:Q", title="objective").scale(zero=False, padding=10, nice=False)
    x = x.axis(tickCount=6, format="~g")
    # The label stands above its interval: beside it there is no room on a phone.
    label = alt.Chart().mark_text(align="left", dy=-8, limit=alt.expr("width"), aria=False)
    chart = alt.layer(
        place.mark_rule(size=3, aria=False, opacity=0.6, yOffset=6).encode(
            x=alt.X("low:Q", title="objective"), x2="high:Q"
        ),
        place.mark_point(filled=True, size=90, opacity=1, aria=False, yOffset=6).encode(
            x=x, shape=by_name(alt.Shape, kinds, SHAPES, field="kind")
        ),
        label.encode(y=y, x=alt.value(0), text="label:N"),
    )
    columns: Columns = {
        "setting": lambda row: row["label"],
        "objective": lambda row: value_text(row["objective"]),
        "95% interval": _interval,
        "seeds": lambda row: str(row["seeds"]),
        "": lambda row: row["kind"],
    }
    hidden = len(conclusion.ranking) - MOST_RANKED
    return _figure(
        "ranking",
        finish_chart(chart, rows, height=38 * len(rows)),
        listing(rows, columns),
        shown=(f" Only the first {MOST_RANKED} settings are shown." if hidden > 0 else "")
        + _far_words(far),
        settings=times(min(len(conclusion.ranking), MOST_RANKED), "setting"),
        baselines=times(len(conclusion.baselines), "baseline"),
        first=f"{rows[0]['label']} with {value_text(rows[0]['objective'])}",
    )


def _interval(row: Row) -> str:
    if row["low"] == row["high"]:
        return NOTHING
    return f"{value_text(row['low'])} … {value_text(row['high'])}"


# ---------------------------------------------------------------- settings


def curves(data: StudyData, conclusion: Conclusion) -> list[Figure]:
    """The objective over each setting that is a number, the most important first."""
    names = sorted(series.numeric_settings(data), key=lambda n: -conclusion.importance.get(n, 0.0))
    drawn = [curve(data, conclusion, name) for name in names[:MOST_CURVES]]
    found = [figure for figure in drawn if figure is not None]
    width = 1.0 if len(found) == 1 else 0.5
    return [replace(figure, name=f"curve-{n}", width=width) for n, figure in enumerate(found, 1)]


def curve(data: StudyData, conclusion: Conclusion, name: str) -> Figure | None:
    """The objective over one setting: trials, means over seeds with their interval, baselines."""
    found = series.curves_over(data, conclusion, name)
    if not found.points:
        return None
    every = [*found.means, *found.points]
    heights = [row[key] for row in every for key in ("objective", "low", "high") if key in row]
    levels, far = series.level_rows(conclusion, min(heights), max(heights))
    x = _setting_axis(name, [row["x"] for row in every])
    y = _objective_axis([*heights, *(row[key] for row in levels for key in ("level", "at"))])
    groups, many = found.groups, len(found.groups) > 1
    colour = {"color": by_name(alt.Color, groups, field="group")} if many else {}
    points = alt.Chart().mark_point(
        filled=True, size=40, opacity=0.5 if found.means else 0.85, aria=False, clip=True
    )
    points = points.encode(
        x=x,
        y=y,
        tooltip=tooltip_of(
            "trial:Q", ("x:Q", name, ".4~g"), ("objective:Q", "", ".4~g"), "seed:Q", "settings:N"
        ),
        **colour,
    )
    layers = [*_level_lines(), points.add_params(zoom())]
    if found.means:
        layers += _mean_lines(x, y, colour, name)
    spec = finish_chart(
        alt.layer(*layers), found.points, 300 if many else 280, means=found.means, levels=levels
    )
    best = max(every, key=lambda row: row["objective"])
    return _figure(
        "curve",
        spec,
        _curve_table(name, found),
        setting=name,
        means=_curve_words(found),
        levels=(" Dashed lines are baselines." if levels else "") + _far_words(far),
        points=times(len(found.points), "trial"),
        best=f", the largest {value_text(best['objective'])} at {value_text(best['x'])}",
    )


def _mean_lines(x: Any, y: Any, colour: dict[str, Any], name: str) -> list[Any]:
    """Lines through the means, with a band and a bar for each interval."""
    chart = alt.Chart(rows_named("means")).encode(x=x, **colour)
    low, high = alt.Y("low:Q", title="objective"), "high:Q"
    tooltip = tooltip_of(
        ("x:Q", name, ".4~g"),
        ("objective:Q", "mean", ".4~g"),
        ("low:Q", "from", ".4~g"),
        ("high:Q", "to", ".4~g"),
        "seeds:Q",
        ("group:N", "with"),
    )
    return [
        chart.mark_area(opacity=0.16, aria=False, clip=True).encode(y=low, y2=high),
        chart.mark_rule(size=1.5, opacity=0.6, aria=False, clip=True).encode(y=low, y2=high),
        chart.mark_line(aria=False, clip=True).encode(y=y),
        chart.mark_point(filled=True, size=90, aria=False, clip=True).encode(y=y, tooltip=tooltip),
    ]


def _setting_axis(name: str, values: Sequence[float]) -> Any:
    low, high = min(values), max(values)
    kind = "log" if low > 0 and high > WIDE_RANGE * low else "linear"
    x = alt.X("x:Q", title=name).scale(type=kind, zero=False, nice=False, padding=14)
    few = sorted(set(values))
    return x.axis(values=few, format=".6~g") if len(few) <= 8 else x.axis(format="~g", tickCount=6)


def _objective_axis(heights: Sequence[float]) -> Any:
    low, high = min(heights), max(heights)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    y = alt.Y("objective:Q", title="objective").axis(tickCount=5, format="~g")
    return y.scale(domain=[low - room, high + room], nice=False, zero=False)


def _level_lines() -> list[Any]:
    """Baselines as dashed lines, their names on the right; their rows are called `levels`."""
    chart = alt.Chart(rows_named("levels"))
    line = chart.mark_rule(strokeDash=[4, 3], size=1.2, aria=False, clip=True)
    label = chart.encode(y="at:Q", x=alt.value(alt.expr("width")), text="label:N")
    tooltip = tooltip_of(("label:N", "baseline"), ("level:Q", "objective", ".4~g"))
    return [
        line.encode(y="level:Q", tooltip=tooltip),
        haloed_text(label, align="right", baseline="bottom", dx=-4, dy=-2),
    ]


def _far_words(far: list[str]) -> str:
    return f" Too far away to be drawn: {', '.join(far)}." if far else ""


def _curve_words(found: series.Curves) -> str:
    told = f" The colours stand for {found.by}." if found.by else ""
    if not found.means:
        return f"Each point is a trial. Other settings vary too.{told}"
    return (
        "Small points are trials. Lines join the means over the seeds; bands are the means' 95% "
        f"intervals.{told}"
    )


def _curve_table(name: str, found: series.Curves) -> Table:
    if not found.means:
        rows = sorted(found.points, key=lambda row: row["x"])
        columns: Columns = {
            name: lambda row: value_text(row["x"]),
            "objective": lambda row: value_text(row["objective"]),
            "trial": lambda row: str(row["trial"]),
        }
        return listing(rows, columns)
    columns = {
        name: lambda row: value_text(row["x"]),
        "mean objective": lambda row: value_text(row["objective"]),
        "95% interval": _interval,
        "seeds": lambda row: str(row["seeds"]),
        "with": lambda row: row["group"] or NOTHING,
    }
    return listing(found.means, columns)


def importance(conclusion: Conclusion) -> Figure | None:
    """How much each setting tells good trials from others."""
    rows: list[Row] = [
        {"setting": name, "share": round(value, 4), "label": share(value)}
        for name, value in sorted(conclusion.importance.items(), key=lambda pair: -pair[1])
    ]
    if not rows:
        return None
    chart = alt.Chart().encode(
        y=alt.Y("setting:N", title=None, sort=None),
        x=alt.X("share:Q", title="importance")
        .scale(domain=[0, 1.15 * max(0.05, rows[0]["share"])])
        .axis(format="~%", tickCount=5),
        tooltip=tooltip_of("setting:N", ("share:Q", "importance", ".1%")),
    )
    bars = chart.mark_bar(cornerRadiusEnd=2, aria=False)
    texts = chart.mark_text(align="left", dx=5, aria=False).encode(text="label:N")
    columns: Columns = {"setting": lambda row: row["setting"], "share": lambda row: row["label"]}
    return _figure(
        "importance",
        finish_chart(alt.layer(bars, texts), rows, height=max(90, 34 * len(rows))),
        listing(rows, columns),
        shares=", ".join(f"{row['setting']} {row['label']}" for row in rows),
    )


# ---------------------------------------------------------------- scores


def pareto(data: StudyData, conclusion: Conclusion) -> Figure | None:
    """Settings by two of their scores, and those that no other beats."""
    names = data.score_names
    rows = [row for row in series.score_rows(conclusion) if row["scores"]]
    if len(names) < 2 or not rows:
        return None
    down = [name for name in names if name in series.smaller_is_better(data)]
    signs = {name: -1 if name in down else 1 for name in names}
    chosen = [
        alt.param(name=param, value=value, bind=alt.binding_select(options=list(names), name=label))
        for param, value, label in (("across", names[0], "Across "), ("up", names[1], "Up "))
    ]
    # Scores are looked up by what was chosen: their names are data, never code.
    placed = alt.Chart().transform_calculate(
        x="datum.scores[across]",
        y="datum.scores[up]",
        sx="datum.x * signs[across]",
        sy="datum.y * signs[up]",
    )
    placed = placed.transform_filter("isValid(datum.x) && isValid(datum.y)")
    x = alt.X("x:Q", title=None).scale(zero=False, padding=16).axis(format="~g", tickCount=6)
    y = alt.Y("y:Q", title=None).scale(zero=False, padding=16).axis(format="~g", tickCount=5)
    tooltip = tooltip_of(
        ("label:N", "setting"),
        ("x:Q", "across", ".4~g"),
        ("y:Q", "up", ".4~g"),
        ("objective:Q", "", ".4~g"),
    )
    settings = placed.transform_filter("datum.kind === 'setting'")
    order = [alt.SortField("sx", order="descending"), alt.SortField("sy", order="descending")]
    front = settings.transform_window(highest="max(sy)", sort=order, frame=[None, 0])
    front = front.transform_window(before="lag(highest)", sort=order)
    front = front.transform_filter("!isValid(datum.before) || datum.sy > datum.before")
    points = settings.mark_point(
        filled=True, size=60, opacity=1, stroke=GREY, strokeWidth=0.6, aria=False
    )
    colour = alt.Color("objective:Q", title="objective")
    colour = colour.legend(gradientLength=180, gradientThickness=10, format=".3~g", tickCount=4)
    points = points.encode(x=x, y=y, tooltip=tooltip, color=colour)
    rings = settings.transform_filter("datum.front").mark_point(
        size=150, strokeWidth=1.5, aria=False
    )
    baselines = placed.transform_filter("datum.kind === 'baseline'").encode(x=x, y=y)
    layers = [
        front.mark_line(strokeWidth=1.5, strokeDash=[5, 3], aria=False).encode(
            x=x, y=y, order=alt.Order("sx:Q")
        ),
        rings.encode(x=x, y=y, color=alt.value(GREY)),
        points,
        baselines.mark_point(shape="diamond", filled=True, size=110, color=GREY, aria=False).encode(
            tooltip=tooltip
        ),
        *_baseline_names(baselines),
        *_corner_labels(),
    ]
    chart = alt.layer(*layers).add_params(alt.param(name="signs", value=signs), *chosen)
    columns: Columns = {
        "setting": lambda row: row["label"],
        **{name: _score_cell(name) for name in names},
        "": lambda row: "on the front" if row["front"] else "",
    }
    count = sum(row["kind"] == "setting" for row in rows)
    return _figure(
        "pareto",
        finish_chart(chart, rows, 360, corner=[{}]),
        listing(rows, columns),
        directions=f" (less of {listed(tuple(down))} is better)" if down else "",
        settings=times(count, "setting"),
        baselines=times(len(rows) - count, "baseline"),
        scores=listed(names),
    )


def _baseline_names(chart: Any) -> list[Any]:
    """Names beside points, above and below in turn: baselines often lie on each other."""
    named = chart.encode(text="baseline:N")
    return [
        haloed_text(
            named.transform_filter(f"datum.turn === {turn}"), align="left", dx=8, dy=dy, limit=110
        )
        for turn, dy in enumerate((0, -11, 11))
    ]


def _score_cell(name: str) -> Any:
    return lambda row: value_text(row["scores"][name]) if name in row["scores"] else NOTHING


def _corner_labels() -> list[Any]:
    """Which score goes which way; titles of axes cannot change with the choice."""
    corner = alt.Chart(rows_named("corner"))
    looks = {"fontWeight": 600, "aria": False, "opacity": 0.8}
    across = corner.mark_text(align="right", text=alt.expr("across + ' →'"), dx=-4, dy=-8, **looks)
    up = corner.mark_text(align="left", text=alt.expr("'↑ ' + up"), dx=6, dy=10, **looks)
    return [
        across.encode(x=alt.value(alt.expr("width")), y=alt.value(alt.expr("height"))),
        up.encode(x=alt.value(0), y=alt.value(0)),
    ]
