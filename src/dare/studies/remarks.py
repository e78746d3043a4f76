"""What limits a study's conclusion, a plain sentence each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dare.studies.judging import Entry, Judge
from dare.studies.objective import doubts
from dare.studies.results import Ranked, Scored, Settings, State, StudyData, key_of
from dare.studies.statistics import WORSE, Resampled, verdict
from dare.tensors.sizes import times

_NEAR = 0.02
"""A value is at the end of a range if it is nearer to it than this share of the range."""


def of_holdout(winner: Ranked, best: Ranked, settings: Settings, looks: int) -> Iterator[str]:
    """What a winner's scores on the holdout say; its settings may no longer be the best."""
    if settings != best.settings:
        yield "The holdout was scored for an earlier winner, not for the present best setting."
    if looks > 1:
        yield (
            f"{looks} winners have been scored on the holdout, so it helped to choose "
            "and is no longer held out."
        )
    for sentence in winner.broken:
        yield f"On the holdout the winner breaks a guard: {sentence}."


def of_chance(table: Resampled, entries: Sequence[Entry]) -> Iterator[str]:
    """What the intervals do not hold."""
    has_seeds = any(size > 1 for size in table.seeds)
    given = any(scored.items for entry in entries for scored in entry.scored)
    if not table.items:
        reason = (
            "No score of the objective is a mean of items that every setting has"
            if given
            else ("The evaluator gives no items")
        )
        yield f"{reason}, so " + (
            "intervals cover only the chance of the seeds, not that of the items."
            if has_seeds
            else "it is not known whether a difference is chance."
        )
    elif table.without_items:
        names = ", ".join(table.without_items)
        yield (
            f"Intervals leave out the chance in {names} (not means of items "
            "that every setting has)."
        )
    if table.left_out:
        yield (
            f"Not all settings were scored on the same items: the {table.items:,} "
            f"common ones are compared, {table.left_out:,} are left out."
        )


def of_best(data: StudyData, judge: Judge, best: Ranked, entry: Entry) -> Iterator[str]:
    """What the best setting itself says of the search."""
    yield from _of_seeds(data, entry)
    for name, end in _at_ends(data.space, best.settings, judge):
        yield (
            f"{name} is at the {end} value searched ({best.settings[name]:.4g}): widen the range."
        )


def of_others(
    table: Resampled,
    standing: Sequence[Ranked],
    order: Sequence[int],
    feasible: Sequence[int],
    noise: float | None,
    data: StudyData,
) -> Iterator[str]:
    """What the others say of the best, or why there is none."""
    if not feasible:
        if not order:
            yield "No setting is scored yet."
            return
        first = standing[order[0]]
        yield (
            f"Every setting breaks a guard ({times(len(order), 'setting')}), so there "
            "is no best one."
        )
        yield f"{first.label} has the largest objective and breaks: {'; '.join(first.broken)}."
        return
    best, count = feasible[0], len(feasible)
    gap = float(table.values[best] - table.values[feasible[1]]) if count > 1 else math.inf
    if noise is not None and noise > gap:
        yield (
            f"Two scorings of the same weights differ by {noise:.4g}; the best and "
            f"the runner-up differ by only {gap:.4g}."
        )
    done = {key_of(trial.settings) for trial in data.trials if trial.is_done}
    stopped = len({key_of(t.settings) for t in data.trials if t.scored is not None} - done)
    if count + stopped > 1:
        is_known = count > 1 and table.difference(best, feasible[1], feasible).low is not None
        allowed = f"the {count} settings that were scored on all items" if stopped else "that"
        yield (
            f"The best was chosen from {count + stopped} settings on the same data, "
            "so its objective is probably too high"
            + (f"; the intervals of its differences allow for {allowed}" if is_known else "")
            + ("." if data.holdout else "; add a holdout to see by how much.")
        )
    for place, ranked in enumerate(standing):
        if ranked.baseline and not ranked.broken and table.values[place] > table.values[best]:
            is_shown = verdict(table.difference(best, place, feasible)) == WORSE
            yield (
                f"The baseline {ranked.baseline} has a larger objective than the best setting"
                + (", beyond chance." if is_shown else ".")
            )


def _of_seeds(data: StudyData, best: Entry) -> Iterator[str]:
    count = len(best.trials)
    if not best.is_random:
        return
    if count < len(data.seeds):
        yield f"The best setting has been scored with {count} of {len(data.seeds)} seeds."
    if count == 1:
        yield (
            "The best setting was scored with one seed, so it is not known how much seeds differ."
        )
    elif count == 2:
        yield "Two seeds say little about how much seeds differ; use three or more."


def of_failures(data: StudyData) -> Iterator[str]:
    """What could not be scored."""
    ended = [t for t in data.trials if t.state not in (State.WAITING, State.RUNNING)]
    if failed := sum(trial.state is State.FAILED for trial in ended):
        yield f"{failed} of {times(len(ended), 'trial')} failed."
    for trial in data.baselines:
        if trial.state is State.FAILED:
            reason = f": {trial.message.rstrip('.')}" if trial.message else ""
            yield f"The baseline {trial.name} failed{reason}."


def of_scores(judge: Judge, standing: Sequence[Ranked], singles: Sequence[Scored]) -> Iterator[str]:
    """What is doubtful in the objective and the guards."""
    scores = standing[0].scores
    yield from doubts(judge.objective, scores, judge.guards)
    for guard in judge.guards:
        if not guard.is_judged(scores, [single.scores for single in singles]):
            yield (
                f"The guard {guard.text} is not checked, because no single model has been scored."
            )


def _at_ends(
    space: Mapping[str, Any], settings: Settings, judge: Judge
) -> Iterator[tuple[str, str]]:
    """Numbers of a setting that lie at an end of their range, where the recipe would take more."""
    for name, (low, high, is_log) in _ranges(space):
        value = settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or low >= high:
            continue
        for end, edge, other in (("smallest", low, high), ("largest", high, low)):
            if is_log and min(value, edge, other) > 0:
                share = math.log(value / edge) / math.log(other / edge)
                beyond = edge * (edge / other) ** _NEAR
            else:
                share = (value - edge) / (other - edge)
                beyond = edge + (edge - other) * _NEAR
            is_whole = isinstance(value, int)
            further = edge + (1 if edge > other else -1) if is_whole else beyond
            could = judge.recipe is None or judge.with_settings({**settings, name: further})
            if share <= _NEAR and could:
                yield name, end


def _ranges(
    space: Mapping[str, Any], before: str = ""
) -> Iterator[tuple[str, tuple[float, float, bool]]]:
    """The ends of each numeric range, and whether it is searched by its logarithm."""
    for key, over in space.items():
        name = before + key
        if isinstance(over, list | tuple):
            numbers = [v for v in over if isinstance(v, int | float) and not isinstance(v, bool)]
            if numbers and len(numbers) == len(over):
                yield name, (min(numbers), max(numbers), False)
        elif isinstance(over, Mapping):
            if "from" in over and "to" in over:
                yield name, (over["from"], over["to"], bool(over.get("log")))
            else:
                yield from _ranges(over, f"{name}.")
