"""What the figures and the table of trials are made from: rows of finite values.

Names of settings and scores come from outside: they are values here, never part of an expression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dare.documents.document import Row, finite
from dare.documents.words import NOTHING
from dare.studies.judging import Judge
from dare.studies.results import Conclusion, Ranked, StudyData, Trial, settings_text, value_text
from dare.studies.words import state_text

MOST_GROUPS = 7
"""Lines in one figure that colours can tell apart."""


def setting_names(data: StudyData) -> tuple[str, ...]:
    """The names of all settings: those of the space in its order, then others that trials have."""
    used = {name: None for trial in data.trials for name in trial.settings}
    of_space = [name for name in data.space if name in used]
    return (*of_space, *(name for name in used if name not in data.space))


def is_number(value: Any) -> bool:
    """Whether a setting's value has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def numeric_settings(data: StudyData) -> tuple[str, ...]:
    """Settings whose values are numbers, of which more than one can be drawn."""
    found = []
    for name in setting_names(data):
        values = [trial.settings[name] for trial in data.trials if name in trial.settings]
        are_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if are_numbers and len(set(filter(is_number, values))) > 1:
            found.append(name)
    return tuple(found)


def objective_of(trial: Trial) -> float | None:
    """The objective, if it is there and can be drawn."""
    return None if trial.objective is None else finite(trial.objective)


def smaller_is_better(data: StudyData) -> set[str]:
    """Scores of which less is better, by the objective or a guard."""
    directions = Judge.by(data.objective, data.guards).directions(data.score_names)
    return {name for name, sign in directions.items() if sign < 0}


# ---------------------------------------------------------------- ranking


def ranking_rows(conclusion: Conclusion, most: int) -> tuple[list[Row], list[str]]:
    """The best settings and the baselines with their intervals, the best first.

    Baselines that lie so far away that intervals could no longer be seen are only named.
    """
    tied = {ranked.label for ranked in conclusion.tied}
    settings = [_ranking_row(ranked, conclusion, tied) for ranked in conclusion.ranking[:most]]
    others = [_ranking_row(ranked, conclusion, tied) for ranked in conclusion.baselines]
    settings = [row for row in settings if row["objective"] is not None]
    others = [row for row in others if row["objective"] is not None]
    near = others
    if settings:
        low, high = min(row["low"] for row in settings), max(row["high"] for row in settings)
        near = [row for row in others if _is_near(row["objective"], low, high)]
    rows = sorted([*settings, *near], key=lambda row: -row["objective"])
    far = [f"{row['label']} {row['objective']:.3g}" for row in others if row not in near]
    return [{**row, "place": place} for place, row in enumerate(rows)], far


def _ranking_row(ranked: Ranked, conclusion: Conclusion, tied: set[str]) -> Row:
    return {
        "label": ranked.label,
        "kind": _kind(ranked, conclusion, tied),
        "objective": finite(ranked.objective.value),
        **bounds(ranked),
        "seeds": len(ranked.trials),
    }


def _is_near(value: float, low: float, high: float) -> bool:
    """Whether a value can be drawn together with others without squeezing them."""
    span = (high - low) or abs(high) or 1.0
    return low - span / 2 <= value <= high + span / 2


KINDS = ("best", "within noise", "other setting", "baseline")


def _kind(ranked: Ranked, conclusion: Conclusion, tied: set[str]) -> str:
    if ranked.baseline:
        return "baseline"
    if ranked == conclusion.best:
        return "best"
    return "within noise" if ranked.label in tied else "other setting"


def bounds(ranked: Ranked) -> Row:
    """The interval of a setting; both ends are its value where it has none."""
    value = finite(ranked.objective.value)
    ends = {"low": ranked.objective.low, "high": ranked.objective.high}
    return {
        name: value if end is None or not math.isfinite(end) else finite(end)
        for name, end in ends.items()
    }


# ---------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curves:
    """The objective over one setting: a point for each trial, and lines where they make sense."""

    points: list[Row]
    means: list[Row]
    """One for each value of each line; empty if every trial stands alone."""
    groups: tuple[str, ...]
    """What tells the lines, or else the points, apart."""
    by: str
    """The settings that tell them apart; empty if nothing does."""


def curves_over(data: StudyData, conclusion: Conclusion, name: str) -> Curves:
    """The objective over a setting that is a number."""
    lines: dict[str, list[Ranked]] = {}
    for ranked in conclusion.ranking:
        if is_number(ranked.settings.get(name)) and math.isfinite(ranked.objective.value):
            rest = {other: value for other, value in ranked.settings.items() if other != name}
            lines.setdefault(settings_text(rest), []).append(ranked)
    is_sweep = 0 < len(lines) <= MOST_GROUPS and any(len(line) > 1 for line in lines.values())
    others = [other for other in setting_names(data) if other != name]
    means: list[Row] = []
    if is_sweep:
        means = [
            {
                "x": finite(ranked.settings[name]),
                "objective": finite(ranked.objective.value),
                **bounds(ranked),
                "group": group,
                "seeds": len(ranked.trials),
            }
            for group, line in lines.items()
            for ranked in sorted(line, key=lambda ranked: ranked.settings[name])
        ]
    else:
        others = _telling(data, others)
    points = [
        _point(trial, name, others)
        for trial in data.trials
        if trial.is_done and is_number(trial.settings.get(name)) and objective_of(trial) is not None
    ]
    groups = tuple({row["group"]: None for row in (*means, *points)})
    return Curves(points, means, groups, ", ".join(others) if len(groups) > 1 else "")


def _point(trial: Trial, name: str, others: Sequence[str]) -> Row:
    kept = {other: trial.settings[other] for other in others if other in trial.settings}
    return {
        "x": finite(trial.settings[name]),
        "objective": objective_of(trial),
        "group": settings_text(kept),
        "trial": trial.number,
        "seed": trial.seed,
        "settings": settings_text(trial.settings),
    }


def _telling(data: StudyData, names: Sequence[str]) -> list[str]:
    """The first setting with few values, which colours can show."""
    for name in names:
        values = {value_text(t.settings[name]) for t in data.trials if name in t.settings}
        if 1 < len(values) < MOST_GROUPS:
            return [name]
    return []


# ---------------------------------------------------------------- scores and levels


def score_rows(conclusion: Conclusion) -> list[Row]:
    """A row for each setting and baseline, with its scores by name."""
    front = set(conclusion.front)
    rows = []
    for place, ranked in enumerate([*conclusion.ranking, *conclusion.baselines]):
        scores = {name: finite(value) for name, value in ranked.scores.items()}
        rows.append(
            {
                "label": ranked.label,
                "baseline": ranked.baseline,
                "kind": "baseline" if ranked.baseline else "setting",
                "scores": {name: value for name, value in scores.items() if value is not None},
                "objective": finite(ranked.objective.value),
                "front": not ranked.baseline and place in front,
                "turn": place % 3,
            }
        )
    return rows


def level_rows(conclusion: Conclusion, low: float, high: float) -> tuple[list[Row], list[str]]:
    """Baselines that lie near the values from low to high, and the names of those that do not.

    Labels have places of their own: lines that lie close together would hide each other's.
    """
    near: list[Row] = []
    far: list[str] = []
    for ranked in conclusion.baselines:
        value = finite(ranked.objective.value)
        if value is not None and _is_near(value, low, high):
            near.append({"label": ranked.baseline, "level": value})
        elif value is not None:
            far.append(f"{ranked.baseline} {value:.3g}")
    near.sort(key=lambda row: row["level"])
    top = max([high, *(row["level"] for row in near)])
    bottom = min([low, *(row["level"] for row in near)])
    room = (top - bottom) / 15
    last = -math.inf
    for row in near:
        last = row["at"] = max(row["level"], last + room)
    return near, far


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class TrialTable:
    """All baselines and trials: what is shown, and what it is sorted by."""

    columns: tuple[str, ...]
    rows: tuple[tuple[float | str | None, ...], ...]
    comparable: tuple[bool, ...]
    """Whether a row has scores to compare."""

    @property
    def texts(self) -> list[list[str]]:
        """The cells as they are shown."""
        return [[NOTHING if cell is None else value_text(cell) for cell in r] for r in self.rows]

    @property
    def of_text(self) -> list[bool]:
        """Whether a column has texts."""
        places = range(len(self.columns))
        return [any(isinstance(row[place], str) for row in self.rows) for place in places]


def trial_table(data: StudyData) -> TrialTable:
    """A row for each baseline and trial."""
    settings, scores = setting_names(data), data.score_names
    trials = (*data.baselines, *data.trials)
    return TrialTable(
        (
            *("trial", "objective", *scores, *settings),
            *("seed", "state", "guards broken", "seconds"),
        ),
        tuple(_cells(trial, settings, scores) for trial in trials),
        tuple(trial.scored is not None for trial in trials),
    )


def _cells(
    trial: Trial, settings: Sequence[str], scores: Sequence[str]
) -> tuple[float | str | None, ...]:
    given = trial.scored.scores if trial.scored else {}
    return (
        trial.name or trial.number,
        objective_of(trial),
        *(finite(given[name]) if name in given else None for name in scores),
        *(_sortable(trial.settings.get(name)) for name in settings),
        trial.seed,
        state_text(trial),
        "; ".join(trial.broken) or None,
        finite(trial.seconds),
    )


def _sortable(value: Any) -> float | str | None:
    if value is None:
        return None
    return finite(value) if is_number(value) else value_text(value)
