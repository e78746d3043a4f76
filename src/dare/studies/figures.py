"""The figures of a study: one function for each, from the study to a chart with its numbers.

A function returns None if there is nothing to draw. The texts are in `figures.toml`. Names of
settings and scores come from outside: they are values in rows, never part of an expression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from string import ascii_uppercase
from typing import Any

from dare.documents.charts import (
    PLOT_WIDTH,
    SHAPES,
    alt,
    by_name,
    corner_labels,
    fill_table,
    finish_chart,
    make_figure,
    named_levels,
    read_texts,
    rows_named,
    staggered_names,
    tooltip_of,
)
from dare.documents.document import Columns, Figure, Row, tabulate
from dare.documents.words import listed, times, value_text
from dare.studies.conclusions import Judge
from dare.studies.results import Conclusion, Ranked, StudyData, is_number, rounded, settings_text

MOST_RANKED = 12  # settings in the figure of the ranking
FAR = 20  # a baseline further from the settings than so many times their range stands at the edge
MOST_CURVES = 8
MOST_GROUPS = 7  # lines in one figure that colours can tell apart
MOST_NUMBERS = 200  # rows of the table below a figure; the table of trials has all
WIDE_RANGE = 100  # largest over smallest value from which an axis is logarithmic
KEY_PIXELS = 16  # the height of a name in the key of baselines
GREY = "#888"  # stands out from light and dark grounds alike
KINDS = ("best", "may be as good", "other setting", "baseline")
SHORT = ".4~g"
TEXTS = read_texts("dare.studies")
_figure = partial(make_figure, TEXTS)
INTERVAL = (("low:Q", "from", SHORT), ("high:Q", "to", SHORT), "trials:Q")  # fields of tooltips


def draw_figures(data: StudyData, conclusion: Conclusion) -> list[Figure]:
    """Draw all figures that there is something to draw in."""
    drawn = [
        ranking(conclusion),
        *curves(data, conclusion),
        pareto(data, conclusion),
    ]
    return [figure for figure in drawn if figure is not None]


def setting_names(data: StudyData) -> tuple[str, ...]:
    """Return all settings that trials have: those of the space in its order, then others."""
    used = {name: None for trial in data.trials for name in trial.settings}
    of_space = [name for name in data.space if name in used]
    return (*of_space, *(name for name in used if name not in data.space))


def split_settings(data: StudyData) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the settings that differ between trials, and those that all trials share."""
    tried = [trial.settings for trial in data.trials]
    names = setting_names(data)
    shared = [n for n in names if len({value_text(settings.get(n)) for settings in tried}) == 1]
    return tuple(n for n in names if n not in shared), {n: tried[0][n] for n in shared}


# ---------------------------------------------------------------- ranking


def ranking(conclusion: Conclusion) -> Figure | None:
    """Draw the best settings and the baselines, with their intervals."""
    rows = _ranking_rows(conclusion)
    if not rows:
        return None
    band, meaning = noise_band(conclusion)
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    y = alt.Y("name:N", title=None, sort=None).axis(ticks=False, domain=False, labelPadding=8)
    tooltip = tooltip_of("name:N", "settings:N", ("objective:Q", "", SHORT), *INTERVAL)
    colour = by_name(alt.Color, kinds, field="kind")
    place = alt.Chart().encode(y=y, color=colour, tooltip=tooltip)
    x = alt.X("at:Q", title="objective").scale(zero=False, padding=10, nice=False)
    x = x.axis(tickCount=6, format="~g")
    ends = {"x": alt.X("low:Q", title="objective"), "x2": "high:Q"}
    noise = alt.Chart(rows_named("band")).mark_rect(opacity=0.13, color=GREY, aria=False)
    chart = alt.layer(
        *([noise.encode(**ends)] if band else []),
        place.mark_rule(size=3, aria=False, opacity=0.6).encode(**ends),
        place.mark_point(filled=True, size=90, opacity=1, aria=False).encode(
            x=x, shape=by_name(alt.Shape, kinds, SHAPES, field="kind")
        ),
    )
    is_cut = len(conclusion.ranking) > MOST_RANKED
    return _figure(
        "ranking",
        finish_chart(chart, rows, height=26 * len(rows), band=band),
        rows[:MOST_NUMBERS],
        intervals=TEXTS["intervals"] if any(r["low"] < r["high"] for r in rows) else "",
        band=meaning,
        shown=f" Only the first {MOST_RANKED} settings are shown." if is_cut else "",
        settings=times(min(len(conclusion.ranking), MOST_RANKED), "setting"),
        baselines=times(len(conclusion.baselines), "baseline"),
        first=f"{rows[0]['name']} with {value_text(rows[0]['objective'])}",
    )


def _ranking_rows(conclusion: Conclusion) -> list[Row]:
    """Return the best settings and all baselines, the best first."""
    tied = {ranked.label for ranked in conclusion.tied}

    def make_row(ranked: Ranked) -> Row:
        kind = "may be as good" if ranked.label in tied else "other setting"
        kind = "baseline" if ranked.baseline else kind
        kind = "best" if ranked == conclusion.best else kind
        settings = settings_text(ranked.settings)
        return {"name": ranked.short, "settings": settings, "kind": kind, **_estimate(ranked)}

    settings, others = (
        [row for row in map(make_row, found) if row["objective"] is not None]
        for found in (conclusion.ranking[:MOST_RANKED], conclusion.baselines)
    )
    shown = settings or others
    low, high = (
        min((r["low"] for r in shown), default=0),
        max((r["high"] for r in shown), default=0),
    )
    for row in (rows := [*settings, *others]):
        row["at"] = _within(row["objective"], low, high, FAR)
        if row["at"] != row["objective"]:
            arrow = "←" if row["objective"] < row["at"] else "→"
            row |= {"name": f"{arrow} {row['name']}", "low": row["at"], "high": row["at"]}
    return sorted(rows, key=lambda row: -row["objective"])


def _within(value: float, low: float, high: float, reach: float) -> float:
    """Return where a value is drawn: at an edge if it would squeeze those from low to high."""
    room = ((high - low) or abs(high) or 1.0) * reach
    return min(max(value, low - room), high + room)


def noise_band(conclusion: Conclusion) -> tuple[list[Row], str]:
    """Return a band around the best score that chance alone may fill, and what it means."""
    best, noise = conclusion.best, conclusion.noise
    if best is None or rounded(best.objective.value) is None:
        return [], ""
    row = _estimate(best)
    if row["low"] < row["high"]:
        return [row], TEXTS["band"]["interval"]
    row |= {"low": row["objective"] - (noise or 0.0), "high": row["objective"] + (noise or 0.0)}
    return ([row], TEXTS["band"]["noise"]) if noise else ([], "")


def _estimate(ranked: Ranked) -> Row:
    """Return an objective with its interval; both ends are its value where it has none."""
    value = rounded(ranked.objective.value)
    low, high = (
        value if end is None or not math.isfinite(end) else rounded(end)
        for end in (ranked.objective.low, ranked.objective.high)
    )
    return {"objective": value, "low": low, "high": high, "trials": len(ranked.trials)}


# ---------------------------------------------------------------- settings


def curves(data: StudyData, conclusion: Conclusion) -> list[Figure]:
    """Draw the objective over each setting that is a number, the most important first."""
    found = []
    for name in setting_names(data):
        values = [trial.settings[name] for trial in data.trials if name in trial.settings]
        are_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if are_numbers and len(set(filter(is_number, values))) > 1:
            found.append(name)
    found.sort(key=lambda name: -conclusion.importance.get(name, 0.0))
    drawn = [curve(data, conclusion, name) for name in found[:MOST_CURVES]]
    shown = [figure for figure in drawn if figure is not None]
    width = 1.0 if len(shown) == 1 else 0.5
    return [replace(figure, name=f"curve-{n}", width=width) for n, figure in enumerate(shown, 1)]


def curve(data: StudyData, conclusion: Conclusion, name: str) -> Figure | None:
    """Draw the objective over one setting: trials, means over seeds with intervals, baselines."""
    points, means, by = curve_rows(data, conclusion, name)
    if not points:
        return None
    every = [*means, *points]
    groups = tuple(sorted({row["group"] for row in every}))
    band, meaning = noise_band(conclusion)
    ends = ("objective", "low", "high")
    heights = [row[key] for row in (*every, *band) for key in ends if key in row]
    levels = level_rows(conclusion, min(heights), max(heights))
    x = _setting_axis(name, [row["x"] for row in every])
    y = _objective_axis([*heights, *(row[key] for row in levels for key in ("level", "at"))])
    colour = {"color": by_name(alt.Color, groups, field="group")} if len(groups) > 1 else {}
    opacity = 0.5 if means else 0.85
    dots = alt.Chart().mark_point(filled=True, size=40, opacity=opacity, aria=False, clip=True)
    fields = ("trial:Q", ("x:Q", name, SHORT), ("objective:Q", "", SHORT), "seed:N", "settings:N")
    dots = dots.encode(x=x, y=y, tooltip=tooltip_of(*fields), **colour)
    of_level = tooltip_of("baseline:N", ("objective:Q", "", SHORT))
    noise = alt.Chart(rows_named("band")).mark_rect(opacity=0.13, color=GREY, aria=False, clip=True)
    sides = {"x": alt.value(0), "x2": alt.value(alt.expr(PLOT_WIDTH)), "y2": "high:Q"}
    noise = noise.encode(y=alt.Y("low:Q", title="objective"), **sides)
    layers = [*([noise] if band else []), *named_levels("levels", of_level), dots]
    layers += _mean_lines(x, y, colour, name) if means else []
    height = 300 if len(groups) > 1 else 280
    text = "Each point is a trial. Other settings vary too."
    if means:
        text = "Small points are trials. Lines join the means over the seeds; bands are the "
        text += "means' 95% intervals."
    best = max(every, key=lambda row: row["objective"])
    columns = {name: "{0[x]:value}", **TEXTS["curve"]["of_means" if means else "of_trials"]}
    numbers = means or sorted(points, key=lambda row: row["x"])
    return _figure(
        "curve",
        finish_chart(alt.layer(*layers), points, height, means=means, levels=levels, band=band),
        fill_table(columns, numbers[:MOST_NUMBERS]),
        setting=name,
        means=text + (f" The colours stand for {by}." if by and len(groups) > 1 else ""),
        levels=(" Dashed lines are baselines." if levels else "") + meaning,
        points=times(len(points), "trial"),
        best=f", the largest {value_text(best['objective'])} at {value_text(best['x'])}",
    )


def curve_rows(
    data: StudyData, conclusion: Conclusion, name: str
) -> tuple[list[Row], list[Row], str]:
    """Return a point for each trial, means where lines make sense, and what tells lines apart."""
    lines: dict[str, list[Ranked]] = {}
    for ranked in conclusion.ranking:
        if is_number(ranked.settings.get(name)) and math.isfinite(ranked.objective.value):
            rest = {other: value for other, value in ranked.settings.items() if other != name}
            lines.setdefault(settings_text(rest), []).append(ranked)
    others = [other for other in setting_names(data) if other != name]
    means: list[Row] = []
    if 0 < len(lines) <= MOST_GROUPS and any(len(line) > 1 for line in lines.values()):
        means = [
            {"x": rounded(ranked.settings[name]), **_estimate(ranked), "group": group}
            for group, line in lines.items()
            for ranked in sorted(line, key=lambda ranked: ranked.settings[name])
        ]
    else:  # the first setting with few values, which colours can show
        values: dict[str, set[str]] = {}
        for other, value in (pair for trial in data.trials for pair in trial.settings.items()):
            values.setdefault(other, set()).add(value_text(value))
        others = [other for other in others if 1 < len(values[other]) < MOST_GROUPS][:1]
    points = [
        {
            "x": rounded(trial.settings[name]),
            "objective": rounded(trial.objective or 0.0),
            "group": settings_text({o: v for o, v in trial.settings.items() if o in others}),
            "trial": trial.number,
            "seed": value_text(trial.seed if trial.is_random else None),
            "settings": settings_text(trial.settings),
        }
        for trial in data.trials
        if trial.is_done and is_number(trial.settings.get(name)) and is_number(trial.objective)
    ]
    return points, means, ", ".join(others)


def level_rows(conclusion: Conclusion, low: float, high: float) -> list[Row]:
    """Return all baselines; those far from the values from low to high stand at an edge.

    Labels have places of their own: lines that lie close together would hide each other's.
    """
    rows: list[Row] = []
    for name, value in ((r.short, rounded(r.objective.value)) for r in conclusion.baselines):
        if value is not None:
            at = _within(value, low, high, 0.5)
            arrow = "" if at == value else "↓ " if value < at else "↑ "
            known = {"baseline": name, "objective": value, "is_beyond": at != value}
            rows.append({**known, "label": f"{arrow}{name} {value_text(value)}", "level": at})
    levels = [low, high, *(row["level"] for row in rows)]
    room, last = (max(levels) - min(levels)) / 15, -math.inf
    rows.sort(key=lambda row: row["objective"])
    for row in rows:
        row["at"] = last = max(row["level"], last + room)
    return rows


def _mean_lines(x: Any, y: Any, colour: dict[str, Any], name: str) -> list[Any]:
    """Return lines through the means, with a band and a bar for each interval."""
    chart = alt.Chart(rows_named("means")).encode(x=x, **colour)
    low, high = alt.Y("low:Q", title="objective"), "high:Q"
    fields = ("x:Q", name, SHORT), ("objective:Q", "mean", SHORT), *INTERVAL, ("group:N", "with")
    tooltip = tooltip_of(*fields)
    return [
        chart.mark_area(opacity=0.16, aria=False, clip=True).encode(y=low, y2=high),
        chart.mark_rule(size=1.5, opacity=0.6, aria=False, clip=True).encode(y=low, y2=high),
        chart.mark_line(aria=False, clip=True).encode(y=y),
        chart.mark_point(filled=True, size=90, aria=False, clip=True).encode(y=y, tooltip=tooltip),
    ]


def _setting_axis(name: str, values: Sequence[float]) -> Any:
    low, high = min(values), max(values)
    kind = "log" if low > 0 and high > WIDE_RANGE * low else "linear"
    x = alt.X("x:Q", title=name).scale(
        type=kind, zero=False, nice=False, padding=14, range=[0, alt.expr(PLOT_WIDTH)]
    )
    few = sorted(set(values))
    return x.axis(values=few, format=".6~g") if len(few) <= 8 else x.axis(format="~g", tickCount=6)


def _objective_axis(heights: Sequence[float]) -> Any:
    low, high = min(heights), max(heights)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    y = alt.Y("objective:Q", title="objective").axis(tickCount=5, format="~g")
    return y.scale(domain=[low - room, high + room], nice=False, zero=False)


def _objective_colour() -> Any:
    looks = {"gradientLength": 180, "gradientThickness": 10, "format": ".3~g", "tickCount": 4}
    return alt.Color("objective:Q", title="objective").legend(**looks)


# ---------------------------------------------------------------- scores


def pareto(data: StudyData, conclusion: Conclusion) -> Figure | None:
    """Draw settings by two of their scores, and those that no other beats."""
    names = data.score_names
    rows = [row for row in _score_rows(conclusion) if row["scores"]]
    if len(names) < 2 or not rows:
        return None
    signs = dict.fromkeys(names, 1)
    signs |= Judge.by(data.objective, data.guards).directions(names)
    down = [name for name in names if signs[name] < 0]
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
    x = alt.X("x:Q", title=None).scale(zero=False, padding=16, range=[0, alt.expr(PLOT_WIDTH)])
    placed = placed.transform_filter("isValid(datum.x) && isValid(datum.y)").encode(
        x=x.axis(format="~g", tickCount=6),
        y=alt.Y("y:Q", title=None).scale(zero=False, padding=16).axis(format="~g", tickCount=5),
    )
    fields = ("x:Q", "across", SHORT), ("y:Q", "up", SHORT), ("objective:Q", "", SHORT)
    tooltip = tooltip_of(("label:N", "setting"), *fields)
    settings = placed.transform_filter("datum.kind === 'setting'")
    order = [alt.SortField("sx", order="descending"), alt.SortField("sy", order="descending")]
    front = settings.transform_window(highest="max(sy)", sort=order, frame=[None, 0])
    front = front.transform_window(before="lag(highest)", sort=order)
    front = front.transform_filter("!isValid(datum.before) || datum.sy > datum.before")
    front = front.mark_line(strokeWidth=1.5, strokeDash=[5, 3], aria=False)
    rings = settings.transform_filter("datum.front")
    rings = rings.mark_point(size=150, strokeWidth=1.5, aria=False)
    points = settings.mark_point(
        filled=True, size=60, opacity=1, stroke=GREY, strokeWidth=0.6, aria=False
    )
    baselines = placed.transform_filter("datum.kind === 'baseline'")
    diamonds = baselines.mark_point(shape="diamond", filled=True, size=110, color=GREY, aria=False)
    count = sum(row["kind"] == "setting" for row in rows)
    names_at = [{"at": KEY_PIXELS * n, "key": row["key"]} for n, row in enumerate(rows[count:], 1)]
    gutter, room = alt.expr(f"{PLOT_WIDTH} + 8"), alt.expr(f"width - ({PLOT_WIDTH}) - 8")
    keys = alt.Chart(rows_named("keys")).mark_text(align="left", limit=room, aria=False)
    of_settings = [
        front.encode(order=alt.Order("sx:Q")),
        rings.encode(color=alt.value(GREY)),
        points.encode(tooltip=tooltip, color=_objective_colour()),
    ]
    layers = [
        *(of_settings if count else []),
        diamonds.encode(tooltip=tooltip),
        *staggered_names(baselines, "letter"),
        keys.encode(x=alt.value(gutter), y=alt.Y("at:Q", scale=None), text="key:N"),
        *corner_labels("across", "up"),
    ]
    chart = alt.layer(*layers).add_params(alt.param(name="signs", value=signs), *chosen)
    scores = {f"{n} >": lambda row, n=n: value_text(row["scores"].get(n)) for n in names}
    columns: Columns = {
        "setting": lambda row: row["label"],
        **scores,
        "": lambda row: "on the front" if row["front"] else "",
    }
    return _figure(
        "pareto",
        finish_chart(chart, rows, max(360, KEY_PIXELS * len(names_at)), corner=[{}], keys=names_at),
        tabulate(rows[:MOST_NUMBERS], columns),
        directions=f" (less of {listed(down)} is better)" if down else "",
        settings=times(count, "setting"),
        baselines=times(len(rows) - count, "baseline"),
        scores=listed(names),
    )


def _score_rows(conclusion: Conclusion) -> list[Row]:
    found = [*conclusion.ranking, *conclusion.baselines]
    return [
        {
            "label": ranked.label,
            "letter": letter,
            "key": f"{letter}  {ranked.label}",
            "kind": "baseline" if ranked.baseline else "setting",
            "scores": {n: rounded(value) for n, value in ranked.scores.items() if is_number(value)},
            "objective": rounded(ranked.objective.value),
            "front": not ranked.baseline and place in conclusion.front,
            "turn": place % 3,
        }
        for place, ranked in enumerate(found)
        for letter in [(ascii_uppercase * len(found))[place - len(conclusion.ranking)]]
    ]
