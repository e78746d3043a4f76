"""What a study shows: the best setting, what it cannot be told apart from, and what limits that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dare.errors import RecipeError
from dare.studies import remarks
from dare.studies.items import estimate, groups_of_scores
from dare.studies.judging import (
    Entry,
    Judge,
    entries_of_names,
    entries_of_settings,
    entry_of,
    simplest_first,
    singles_of,
)
from dare.studies.objective import Objective, directions_of
from dare.studies.results import (
    Conclusion,
    Difference,
    Holdout,
    Ranked,
    Role,
    StudyData,
    Subset,
    Trial,
    key_of,
)
from dare.studies.statistics import (
    NO_DIFFERENCE,
    WORSE,
    Contender,
    Resampled,
    importance,
    pareto_front,
    resample,
    verdict,
)


def conclude(data: StudyData, *, resamples: int = 2000) -> Conclusion:
    """Rank the settings, compare the best with all else, and say what that is worth."""
    judge = Judge.of(data)
    entries = [*entries_of_settings(data.trials, judge), *entries_of_names(data.baselines, judge)]
    if not entries:
        limits = ("Nothing is scored yet.", *remarks.of_failures(data))
        return Conclusion((), (), None, (), (), (), None, None, {}, (), None, None, None, limits)
    table = _resampled(entries, judge, data.subset, resamples)
    singles = singles_of(entries)
    standing = [judge.ranked(e, table.estimate(n), singles) for n, e in enumerate(entries)]
    order = sorted(
        (n for n, ranked in enumerate(standing) if not ranked.baseline),
        key=lambda n: (bool(standing[n].broken), -table.values[n], entries[n].trials[0].number),
    )
    feasible = [n for n in order if not standing[n].broken]
    rest = [n for n, ranked in enumerate(standing) if ranked.baseline]
    differences = {
        n: _difference(table, feasible[0], n, standing[n].label, feasible)
        for n in [*feasible[1:], *rest]
        if feasible
    }
    tied = tuple(
        standing[n]
        for n, difference in differences.items()
        if difference.verdict == NO_DIFFERENCE and not standing[n].broken
    )
    best = standing[feasible[0]] if feasible else None
    ranking = tuple(standing[n] for n in order)
    holdout, held, on_holdout = _holdout(data, judge, best, resamples) if best else (None, None, ())
    names = {_key(r): n for n, r in enumerate(standing) if not (r.baseline and r.broken)}
    contests = [_Contest(table, names, feasible), *([held] if held else ())]
    rivals = [standing[n] for n in rest if not standing[n].broken]
    better, chosen = _choose(best, rivals, contests) if best else ([], None)
    simplest = chosen
    if best is not None and chosen is best:
        ways = simplest_first(best, tied, judge)
        simplest = next(way for way in ways if way is best or not _beating(way, rivals, contests))
    noise = _noise(data.baselines, judge.objective)
    shown = [*feasible[1:2], *(rest if feasible else ())]
    return Conclusion(
        ranking=ranking,
        baselines=tuple(standing[n] for n in rest),
        best=best,
        against=tuple(differences[n] for n in shown),
        tied=tied,
        better=tuple(better),
        chosen=chosen,
        simplest=simplest,
        importance=_importance(data.trials, judge.objective),
        front=_front(ranking, judge),
        noise=noise,
        subset_error=_subset_error(data.subset, entries[feasible[0]], judge) if feasible else None,
        holdout=holdout,
        remarks=(
            *remarks.of_chance(table, entries),
            *(remarks.of_best(data, judge, best, entries[feasible[0]]) if best else ()),
            *remarks.of_others(table, standing, order, feasible, noise, data),
            *remarks.of_failures(data),
            *remarks.of_scores(judge, standing, singles),
            *on_holdout,
        ),
    )


def _key(ranked: Ranked) -> str:
    return ranked.baseline or key_of(ranked.settings)


@dataclass(frozen=True)
class _Contest:
    """Settings and baselines that one evaluator has scored."""

    table: Resampled
    places: Mapping[str, int]
    """By the name of a baseline that keeps to the guards, or by settings as text."""
    among: Sequence[int] = ()
    """Places of the settings of which the best was chosen here."""

    def is_worse(self, one: Ranked, other: Ranked) -> bool:
        """Whether one is worse than a baseline, beyond chance."""
        place, rival = self.places.get(_key(one)), self.places.get(_key(other))
        if place is None or rival is None or place == rival:
            return False
        among = () if one.baseline else self.among
        return verdict(self.table.difference(place, rival, among)) == WORSE


def _beating(one: Ranked, rivals: Sequence[Ranked], contests: Sequence[_Contest]) -> list[Ranked]:
    """The baselines that are better, beyond chance, in any contest."""
    return [r for r in rivals if any(contest.is_worse(one, r) for contest in contests)]


def _choose(
    best: Ranked, rivals: Sequence[Ranked], contests: Sequence[_Contest]
) -> tuple[list[Ranked], Ranked | None]:
    """The baselines that beat the best setting, and what to take."""
    better = _beating(best, rivals, contests)
    if not better:
        return [], best
    beaten = {r.baseline for r in rivals if _beating(r, rivals, contests)}
    better.sort(key=lambda ranked: (ranked.baseline in beaten, -ranked.objective.value))
    left = [r for r in rivals if r.baseline not in beaten]
    first = max(left, key=lambda r: (r in better, r.objective.value), default=None)
    return better, first


def _resampled(
    entries: Sequence[Entry], judge: Judge, subset: Subset | None, resamples: int
) -> Resampled:
    contenders = [Contender(entry.scored, entry.is_random) for entry in entries]
    weights = subset.weights if subset else None
    return resample(contenders, judge.objective, weights=weights, resamples=resamples)


def _difference(
    table: Resampled, best: int, other: int, label: str, among: Sequence[int]
) -> Difference:
    value = table.difference(best, other, among)
    return Difference(label, value, verdict(value))


# ------------------------------------------------------------------------------------- numbers


def _importance(trials: Iterable[Trial], objective: Objective) -> dict[str, float]:
    done = [
        (t.settings, objective.value(t.scored.scores)) for t in trials if t.is_done and t.scored
    ]
    return importance([settings for settings, _ in done], [value for _, value in done])


def _front(ranking: Sequence[Ranked], judge: Judge) -> tuple[int, ...]:
    """By the scores that the objective or a guard has a direction for."""
    names = [n for n in ranking[0].scores if all(n in r.scores for r in ranking)] if ranking else []
    directions = directions_of(judge.objective, judge.guards, names)
    return tuple(pareto_front([ranked.scores for ranked in ranking], directions))


def _noise(baselines: Sequence[Trial], objective: Objective) -> float | None:
    """How far two scorings of the same weights are apart."""
    values = {t.name: objective.value(t.scored.scores) for t in baselines if t.is_done and t.scored}
    if Role.AVERAGE not in values or Role.AGAIN not in values:
        return None
    return abs(values[Role.AVERAGE] - values[Role.AGAIN])


def _subset_error(subset: Subset | None, best: Entry, judge: Judge) -> float | None:
    """The standard error of the best's objective for having scored a subset of items only.

    The errors of the scores go through the objective as normal draws.
    """
    if subset is None or not all(set(subset.ids) <= set(s.items) for s in best.scored):
        return None
    items = {i: math.fsum(s.items[i] for s in best.scored) / len(best.scored) for i in subset.ids}
    _, errors = estimate(subset, items)
    groups = groups_of_scores(best.scored[0], subset.weights)
    random = np.random.Generator(np.random.PCG64(0))
    draws = {
        name: value + errors.get(groups.get(name, ""), 0.0) * random.standard_normal(10_000)
        for name, value in best.scores.items()
    }
    return float(judge.objective.values(draws).std())


# ------------------------------------------------------------------------------------- holdout


def _holdout(
    data: StudyData, judge: Judge, best: Ranked, resamples: int
) -> tuple[Holdout | None, _Contest | None, tuple[str, ...]]:
    """The winner on the second evaluator, beside all else that was scored there."""
    winners = [t for t in data.holdout if t.role in (Role.WINNER, Role.EARLIER_WINNER)]
    done = [t for t in winners if t.is_done and t.scored is not None]
    if not done:
        return (
            None,
            None,
            tuple(
                f"The winner has no score on the holdout: {winner.message}."
                for winner in winners[-1:]
            ),
        )
    latest = best.settings if any(t.settings == best.settings for t in done) else done[-1].settings
    trials = [t for t in done if t.settings == latest]
    winner = entry_of(trials, "", judge.is_random(latest))
    others = entries_of_names((t for t in data.holdout if t not in winners), judge)
    try:
        table = _resampled([winner, *others], judge, None, resamples)
        singles = singles_of(others)
        all_standing = [
            judge.ranked(entry, table.estimate(n), singles)
            for n, entry in enumerate([winner, *others])
        ]
    except RecipeError as error:
        return None, None, (f"The holdout cannot be compared: {error}.",)
    standing = all_standing[0]
    places = {
        key_of(entry.trials[0].settings) if entry.trials[0].settings else entry.name: n
        for n, entry in enumerate([winner, *others])
        if entry.trials[0].settings or not all_standing[n].broken
    }
    seeds = {trial.seed for trial in trials}
    chosen = [t for t in data.trials if t.is_done and t.scored and t.settings == latest]
    chosen = [t for t in chosen if t.seed in seeds] or chosen
    validation = _mean_objective(chosen, judge.objective) if chosen else best.objective.value
    usual = []
    for place, other in enumerate(others, start=1):
        if before := [t for t in data.baselines if t.name == other.name and t.is_done and t.scored]:
            usual.append(_mean_objective(before, judge.objective) - float(table.values[place]))
    looks = len({(t.name, key_of(t.settings)) for t in winners})
    holdout = Holdout(
        objective=standing.objective,
        against=tuple(_difference(table, 0, n, o.name, ()) for n, o in enumerate(others, start=1)),
        validation=validation,
        loss=validation - standing.objective.value,
        usual_loss=math.fsum(usual) / len(usual) if usual else None,
        looks=looks,
    )
    contest = _Contest(table, places)
    return holdout, contest, tuple(remarks.of_holdout(standing, best, latest, looks))


def _mean_objective(trials: Sequence[Trial], objective: Objective) -> float:
    values = [objective.value(trial.scored.scores) for trial in trials if trial.scored]
    return math.fsum(values) / len(values)
