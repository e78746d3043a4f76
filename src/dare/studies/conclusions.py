"""What a study shows: the best setting, what it cannot be told apart from, and what limits that."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dare.errors import RecipeError
from dare.recipe.document import recipe_from_document
from dare.recipe.schema import Recipe
from dare.recipe.settings import with_settings
from dare.studies.items import estimate, groups_of_scores
from dare.studies.objective import Guard, Objective, doubts
from dare.studies.results import (
    Conclusion,
    Difference,
    Estimate,
    Holdout,
    Ranked,
    Scored,
    Settings,
    State,
    StudyData,
    Subset,
    Trial,
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
from dare.tensors.sizes import times

_PLAIN = ("average", "sum")
"""Baselines that are merges, and need no setting."""
_NEAR = 0.02
"""A value is at the end of a range if it is nearer to it than this share of the range."""
_ENDS = (("low", "high"), ("min", "max"), ("from", "to"))
"""What the ends of a range may be called in the document of a space."""


@dataclass(frozen=True)
class _Entry:
    """A setting with its seeds, or a baseline: what is scored of it."""

    trials: tuple[Trial, ...]
    scored: tuple[Scored, ...]
    name: str
    is_random: bool

    @property
    def scores(self) -> dict[str, float]:
        """Means over the seeds, of the scores that all have."""
        names = [n for n in self.scored[0].scores if all(n in s.scores for s in self.scored)]
        return {n: math.fsum(s.scores[n] for s in self.scored) / len(self.scored) for n in names}


@dataclass(frozen=True)
class _Judge:
    """What is asked of merges in a study."""

    objective: Objective
    guards: tuple[Guard, ...]
    recipe: Recipe | None
    """None if it cannot be read here, as when a stage of its own is missing."""

    @classmethod
    def of(cls, data: StudyData) -> _Judge:
        objective = Objective.parse(data.objective)
        document = {key: value for key, value in data.recipe.items() if key != "search"}
        try:
            recipe = recipe_from_document(document, "the study's recipe")
        except RecipeError:
            recipe = None
        return cls(objective, tuple(Guard.parse(g, objective) for g in data.guards), recipe)

    def with_settings(self, settings: Settings) -> Recipe | None:
        """The recipe of a setting, if it can be had."""
        try:
            return with_settings(self.recipe, settings) if self.recipe else None
        except RecipeError:
            return None

    def is_random(self, settings: Settings) -> bool:
        """Whether another seed gives other weights; taken for granted if it cannot be told."""
        recipe = self.with_settings(settings)
        return recipe is None or _is_random(recipe)

    def ranked(self, entry: _Entry, value: Estimate, singles: Sequence[Scored]) -> Ranked:
        """An entry with its objective, and the guards that its mean scores break."""
        scores = entry.scores
        single_scores = [single.scores for single in singles]
        broken = [s for guard in self.guards for s in guard.broken(scores, single_scores)]
        return Ranked(
            settings={} if entry.name else dict(entry.trials[0].settings),
            trials=tuple(trial.number for trial in entry.trials),
            objective=value,
            scores=scores,
            broken=tuple(broken),
            baseline=entry.name,
        )


def conclude(data: StudyData, *, resamples: int = 2000) -> Conclusion:
    """Rank the settings, compare the best with all else, and say what that is worth."""
    judge = _Judge.of(data)
    entries = [*_of_settings(data.trials, judge), *_of_names(data.baselines, judge)]
    if not entries:
        remarks = ("Nothing is scored yet.", *_failures(data))
        return Conclusion((), (), None, (), (), None, {}, (), None, None, None, remarks)
    table = _resampled(entries, judge, data.subset, resamples)
    singles = _singles(entries)
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
    holdout, of_holdout = _holdout(data, judge, best, resamples) if best else (None, ())
    noise = _noise(data.baselines, judge.objective)
    shown = [*feasible[1:2], *(rest if feasible else ())]
    return Conclusion(
        ranking=ranking,
        baselines=tuple(standing[n] for n in rest),
        best=best,
        against=tuple(differences[n] for n in shown),
        tied=tied,
        simplest=_simplest(best, tied, judge) if best else None,
        importance=_importance(data.trials, judge.objective),
        front=_front(ranking, judge),
        noise=noise,
        subset_error=_subset_error(data.subset, entries[feasible[0]], judge) if feasible else None,
        holdout=holdout,
        remarks=(
            *_of_chance(table, entries),
            *(_of_best(data, judge, best, entries[feasible[0]]) if best else _of_none(ranking)),
            *(_of_others(table, standing, feasible, noise, bool(data.holdout)) if best else ()),
            *_failures(data),
            *_of_scores(judge, standing, singles),
            *of_holdout,
        ),
    )


# ------------------------------------------------------------------------------------- entries


def _of_settings(trials: Iterable[Trial], judge: _Judge) -> list[_Entry]:
    """Settings with those of their seeds that are done."""
    together: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.is_done and trial.scored is not None:
            together.setdefault(_key(trial.settings), []).append(trial)
    return [_entry(trials, "", judge.is_random(trials[0].settings)) for trials in together.values()]


def _of_names(trials: Iterable[Trial], judge: _Judge) -> list[_Entry]:
    """Baselines that are done, but for the one that is there to tell the noise."""
    together: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.is_done and trial.scored is not None and not trial.name.endswith(" again"):
            together.setdefault(trial.name, []).append(trial)
    return [
        _entry(own, name, judge.is_random(own[0].settings) if own[0].settings else name == "advice")
        for name, own in together.items()
    ]


def _entry(trials: Sequence[Trial], name: str, is_random: bool) -> _Entry:
    scored = tuple(trial.scored for trial in trials if trial.scored is not None)
    return _Entry(tuple(trials), scored, name, is_random)


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _singles(entries: Iterable[_Entry]) -> list[Scored]:
    """What single models have, for guards that ask for a share of it."""
    return [s for entry in entries if entry.name.endswith(" alone") for s in entry.scored]


def _resampled(
    entries: Sequence[_Entry], judge: _Judge, subset: Subset | None, resamples: int
) -> Resampled:
    contenders = [Contender(entry.scored, entry.is_random) for entry in entries]
    weights = subset.weights if subset else None
    return resample(contenders, judge.objective, weights=weights, resamples=resamples)


def _difference(
    table: Resampled, best: int, other: int, label: str, among: Sequence[int]
) -> Difference:
    value = table.difference(best, other, among)
    return Difference(label, value, verdict(value))


# ------------------------------------------------------------------------------------- simplicity


def _simplest(best: Ranked, tied: Sequence[Ranked], judge: _Judge) -> Ranked:
    """What needs least: a plain merge, then few stages, no randomness, few changes."""
    merges = [best, *(r for r in tied if not r.baseline or r.baseline in _PLAIN)]
    return min(merges, key=lambda ranked: (_complexity(ranked, judge), -ranked.objective.value))


def _complexity(ranked: Ranked, judge: _Judge) -> tuple[int, int, bool, int]:
    if ranked.baseline:
        return 0, 0, False, 0
    recipe = judge.with_settings(ranked.settings)
    if recipe is None:
        stages = len(str(ranked.settings.get("method", "")).split("+"))
        return 1, stages, True, sum(map(_count, ranked.settings.values()))
    return 1, len(recipe.chain), _is_random(recipe), _changes(ranked.settings, judge)


def _is_random(recipe: Recipe) -> bool:
    """Whether a stage draws, for any model and in any layer."""
    overrides = [{}, *(entry.settings for entry in recipe.models)]
    return any(
        stage.is_random({name: _most(own.get(name, value)) for name, value in settings.items()})
        for stage, settings in recipe.chain
        for own in overrides
    )


def _most(value: Any) -> Any:
    return max(value) if isinstance(value, list | tuple) else value


def _changes(settings: Settings, judge: _Judge) -> int:
    """How many settings differ in effect from the recipe's; each layer's value counts."""
    method = {name: value for name, value in settings.items() if name == "method"}
    start = judge.with_settings(method)
    changes = int(start is not None and _method(start) != _method(judge.recipe))
    for name, value in settings.items():
        if name != "method":
            changed = judge.with_settings({**method, name: value})
            differs = changed is None or start is None or _effect(changed) != _effect(start)
            changes += _count(value) if differs else 0
    return changes


def _method(recipe: Recipe | None) -> list[str]:
    return [stage.name for stage, _ in recipe.chain] if recipe else []


def _effect(recipe: Recipe) -> tuple[Any, ...]:
    return (
        [(stage.name, dict(settings)) for stage, settings in recipe.chain],
        [entry.settings for entry in recipe.models],
        (recipe.weights(), recipe.seeds()),
        (recipe.scale, recipe.embedding_drop_rate),
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple) else 1


# ------------------------------------------------------------------------------------- numbers


def _importance(trials: Iterable[Trial], objective: Objective) -> dict[str, float]:
    done = [
        (t.settings, objective.value(t.scored.scores)) for t in trials if t.is_done and t.scored
    ]
    return importance([settings for settings, _ in done], [value for _, value in done])


def _front(ranking: Sequence[Ranked], judge: _Judge) -> tuple[int, ...]:
    """By the scores that the objective or a guard has a direction for."""
    names = [n for n in ranking[0].scores if all(n in r.scores for r in ranking)] if ranking else []
    directions: dict[str, int] = {}
    for guard in judge.guards:
        directions |= {n: sign for n, sign in guard.directions(names).items() if n in names}
    directions |= judge.objective.directions(names)
    return tuple(pareto_front([ranked.scores for ranked in ranking], directions))


def _noise(baselines: Sequence[Trial], objective: Objective) -> float | None:
    """How far two scorings of the same weights are apart."""
    values = {t.name: objective.value(t.scored.scores) for t in baselines if t.is_done and t.scored}
    for name, value in values.items():
        if name.endswith(" again") and (first := name.removesuffix(" again")) in values:
            return abs(values[first] - value)
    return None


def _subset_error(subset: Subset | None, best: _Entry, judge: _Judge) -> float | None:
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
    data: StudyData, judge: _Judge, best: Ranked, resamples: int
) -> tuple[Holdout | None, tuple[str, ...]]:
    """The winner on the second evaluator, beside all else that was scored there."""
    winners = [t for t in data.holdout if t.name.startswith("winner")]
    done = [t for t in winners if t.is_done and t.scored is not None]
    if not done:
        failed = (
            f"The winner has no score on the holdout: {winners[-1].message}." if winners else ""
        )
        return None, (failed,) if failed else ()
    latest = best.settings if any(t.settings == best.settings for t in done) else done[-1].settings
    trials = [t for t in done if t.settings == latest]
    winner = _entry(trials, "", judge.is_random(latest))
    others = _of_names((t for t in data.holdout if t not in winners), judge)
    try:
        table = _resampled([winner, *others], judge, None, resamples)
        standing = judge.ranked(winner, table.estimate(0), _singles(others))
    except RecipeError as error:
        return None, (f"The holdout cannot be compared: {error}.",)
    seeds = {trial.seed for trial in trials}
    chosen = [t for t in data.trials if t.is_done and t.scored and t.settings == latest]
    chosen = [t for t in chosen if t.seed in seeds] or chosen
    validation = _mean_objective(chosen, judge.objective) if chosen else best.objective.value
    flattery = [validation - float(table.values[0])]
    for place, other in enumerate(others, start=1):
        if before := [t for t in data.baselines if t.name == other.name and t.is_done and t.scored]:
            flattery.append(_mean_objective(before, judge.objective) - float(table.values[place]))
    usual = math.fsum(flattery[1:]) / max(1, len(flattery) - 1)
    looks = len({(t.name, _key(t.settings)) for t in winners})
    holdout = Holdout(
        objective=standing.objective,
        against=tuple(_difference(table, 0, n, o.name, ()) for n, o in enumerate(others, start=1)),
        validation=validation,
        loss=flattery[0] - usual,
        looks=looks,
    )
    return holdout, tuple(_of_holdout(standing, best, latest, looks))


def _mean_objective(trials: Sequence[Trial], objective: Objective) -> float:
    values = [objective.value(trial.scored.scores) for trial in trials if trial.scored]
    return math.fsum(values) / len(values)


# ------------------------------------------------------------------------------------- remarks


def _of_holdout(winner: Ranked, best: Ranked, settings: Settings, looks: int) -> Iterator[str]:
    if settings != best.settings:
        yield "The holdout was scored for an earlier winner, not for the best setting of now."
    if looks > 1:
        yield (
            f"{looks} winners have been scored on the holdout, so it has helped to choose; "
            "it is no longer held out."
        )
    for sentence in winner.broken:
        yield f"On the holdout the winner breaks a guard: {sentence}."


def _of_chance(table: Resampled, entries: Sequence[_Entry]) -> Iterator[str]:
    """What the intervals do not hold."""
    has_seeds = any(size > 1 for size in table.seeds)
    given = any(scored.items for entry in entries for scored in entry.scored)
    if not table.items:
        reason = (
            "No score of the objective is the mean of items that all have"
            if given
            else ("The evaluator gives no items")
        )
        yield f"{reason}, so " + (
            "intervals tell the chance of seeds only, not of the items."
            if has_seeds
            else "nothing tells whether a difference is chance."
        )
    elif table.without_items:
        names = ", ".join(table.without_items)
        yield f"Intervals leave out the chance in {names}: not made of items that all have."
    if table.left_out:
        yield (
            f"Not all were scored on the same items: {table.items:,} that all have are compared, "
            f"{table.left_out:,} are left out."
        )


def _of_best(data: StudyData, judge: _Judge, best: Ranked, entry: _Entry) -> Iterator[str]:
    """What the best setting itself says of the search."""
    yield from _of_seeds(data, entry)
    for name, end in _at_ends(data.space, best.settings, judge):
        yield f"{name} is at the {end} value searched ({best.settings[name]:.4g}): search further."


def _of_others(
    table: Resampled,
    standing: Sequence[Ranked],
    feasible: Sequence[int],
    noise: float | None,
    is_held_out: bool,
) -> Iterator[str]:
    """What the others say of the best."""
    best, count = feasible[0], len(feasible)
    gap = float(table.values[best] - table.values[feasible[1]]) if count > 1 else math.inf
    if noise is not None and noise > gap:
        yield (
            f"Scoring the same weights twice differs by {noise:.4g}, more than the best and "
            f"the runner-up ({gap:.4g})."
        )
    if count > 1:
        yield (
            f"The best was chosen from {count} settings on the same data, so its objective is "
            "rather too high than too low; the intervals of its differences allow for that"
            + ("." if is_held_out else ", and a holdout tells by how much.")
        )
    for place, ranked in enumerate(standing):
        if ranked.baseline and not ranked.broken and table.values[place] > table.values[best]:
            is_shown = verdict(table.difference(best, place, feasible)) == WORSE
            yield (
                f"The baseline {ranked.baseline} has a larger objective than the best setting"
                + (", beyond chance." if is_shown else ".")
            )


def _of_seeds(data: StudyData, best: _Entry) -> Iterator[str]:
    count = len(best.trials)
    if not best.is_random:
        return
    if count < len(data.seeds):
        yield f"The best setting has been scored with {count} of {len(data.seeds)} seeds."
    if count == 1:
        yield "The best setting has one seed: how far another would differ is not known."
    elif count == 2:
        yield "Two seeds tell little of how far seeds differ; three or more are better."


def _of_none(ranking: Sequence[Ranked]) -> Iterator[str]:
    if ranking:
        yield f"All of {times(len(ranking), 'setting')} break guards, so there is no best one."
    else:
        yield "No setting is scored yet."


def _failures(data: StudyData) -> Iterator[str]:
    ended = [t for t in data.trials if t.state not in (State.WAITING, State.RUNNING)]
    if failed := sum(trial.state is State.FAILED for trial in ended):
        yield f"{failed} of {times(len(ended), 'trial')} failed."
    for trial in data.baselines:
        if trial.state is State.FAILED:
            reason = f": {trial.message.rstrip('.')}" if trial.message else ""
            yield f"The baseline {trial.name} failed{reason}."


def _of_scores(
    judge: _Judge, standing: Sequence[Ranked], singles: Sequence[Scored]
) -> Iterator[str]:
    scores = standing[0].scores
    yield from doubts(judge.objective, scores, judge.guards)
    for guard in judge.guards:
        if not guard.is_judged(scores, [single.scores for single in singles]):
            yield f"The guard {guard.text} is not judged: no single model has been scored."


def _at_ends(
    space: Mapping[str, Any], settings: Settings, judge: _Judge
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
        if isinstance(over, list):
            numbers = [v for v in over if isinstance(v, int | float) and not isinstance(v, bool)]
            if numbers and len(numbers) == len(over):
                yield name, (min(numbers), max(numbers), False)
        elif isinstance(over, Mapping):
            ends = next(((over[a], over[b]) for a, b in _ENDS if a in over and b in over), None)
            if ends is None:
                yield from _ranges(over, f"{name}.")
            else:
                yield name, (*ends, bool(over.get("log")))
