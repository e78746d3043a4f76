"""The figure of a study: the ranking of settings and baselines, with its numbers.

The texts are in `figures.toml`. Names of settings and scores come from users: they are values in
rows, never part of an expression.
"""

from __future__ import annotations

import math
from typing import Any

from dare.documents.charts import (
    SHAPES,
    alt,
    by_name,
    finish_chart,
    make_figure,
    read_texts,
    tooltip_of,
)
from dare.documents.document import Figure, Row
from dare.documents.words import counted, number, value_text
from dare.studies.results import Conclusion, Ranked, StudyData, rounded, settings_text

MOST_RANKED = 12  # settings in the figure of the ranking
FAR = 20  # a baseline that is further from the settings than this times their range is at the edge
KINDS = ("best", "may be as good", "other setting", "baseline")
SHORT = ".3~g"
TEXTS = read_texts("dare.studies")
INTERVAL = (("low:Q", "from", SHORT), ("high:Q", "to", SHORT), "trials:Q")  # fields of tooltips


def split_settings(data: StudyData) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the settings that differ between trials, in the space's order, and all others."""
    tried = [trial.settings for trial in data.trials]
    used = {name: None for settings in tried for name in settings}
    names = [name for name in {**data.space, **used} if name in used]
    shared = [n for n in names if len({value_text(settings.get(n)) for settings in tried}) == 1]
    return tuple(n for n in names if n not in shared), {n: tried[0][n] for n in shared}


def draw_figures(conclusion: Conclusion) -> list[Figure]:
    """Draw the best settings and the baselines, with their intervals, if anything is scored."""
    rows = _ranking_rows(conclusion)
    if not rows:
        return []
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    y = alt.Y("name:N", title=None, sort=None).axis(ticks=False, domain=False, labelPadding=8)
    tooltip = tooltip_of("name:N", "settings:N", ("objective:Q", "", SHORT), *INTERVAL)
    colour = by_name(alt.Color, kinds, field="kind")
    place = alt.Chart().encode(y=y, color=colour, tooltip=tooltip)
    x = alt.X("at:Q", title="objective").scale(zero=False, padding=10, nice=False)
    x = x.axis(tickCount=6, format="~g")
    ends = {"x": alt.X("low:Q", title="objective"), "x2": "high:Q"}
    chart = alt.layer(
        place.mark_rule(size=3, aria=False, opacity=0.6).encode(**ends),
        place.mark_point(filled=True, size=90, opacity=1, aria=False).encode(
            x=x, shape=by_name(alt.Shape, kinds, SHAPES, field="kind")
        ),
    )
    is_cut = len(conclusion.ranking) > MOST_RANKED
    figure = make_figure(
        TEXTS,
        "ranking",
        finish_chart(chart, rows, height=26 * len(rows)),
        rows,
        intervals=TEXTS["intervals"] if any(r["low"] < r["high"] for r in rows) else "",
        shown=f" Only the first {MOST_RANKED} settings are shown." if is_cut else "",
        settings=counted(min(len(conclusion.ranking), MOST_RANKED), "setting"),
        baselines=counted(len(conclusion.baselines), "baseline"),
        first=f"{rows[0]['name']} with {number(rows[0]['objective'])}",
    )
    return [figure]


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
        [row for row in map(make_row, ranked) if row["objective"] is not None]
        for ranked in (conclusion.ranking[:MOST_RANKED], conclusion.baselines)
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
    """Return where to draw a value: at an edge, if it is too far from the others to show both."""
    room = ((high - low) or abs(high) or 1.0) * reach
    return min(max(value, low - room), high + room)


def _estimate(ranked: Ranked) -> Row:
    """Return an objective with its interval; without one, both ends are its value."""
    value = rounded(ranked.objective.value)
    low, high = (
        value if end is None or not math.isfinite(end) else rounded(end)
        for end in (ranked.objective.low, ranked.objective.high)
    )
    return {"objective": value, "low": low, "high": high, "trials": len(ranked.trials)}
