"""The conclusion of a study: the best, others that may be as good, and caveats.

A judge applies the objective and the guards; a comparison has all settings and baselines that one
evaluator has scored on all items. The best of them is the answer, even if it is an unmerged model.
A holdout only reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from dare.documents.notices import Notice, notice
from dare.documents.words import counted, listed
from dare.errors import RecipeError
from dare.recipe.document import request_from_document
from dare.recipe.recipe import Recipe
from dare.recipe.settings import with_settings
from dare.studies.judging import Guard, Judge, Objective, Scores
from dare.studies.results import (
    ALONE,
    NOT_COMPARED,
    NOT_MERGED,
    Conclusion,
    Contender,
    Difference,
    Holdout,
    Ranked,
    Role,
    State,
    StudyData,
    TaskScores,
    Trial,
    key_of,
)
from dare.studies.space import PLAN, is_random
from dare.studies.statistics import (
    BETTER,
    NO_DIFFERENCE,
    NOT_KNOWN,
    WORSE,
    resample,
    sounds_like_an_error,
    verdict,
)


def conclude(data: StudyData, *, resamples: int = 2000) -> Conclusion:
    """Take the best of all settings and baselines, compare it with them, and say what limits it."""
    recipe = request_from_document(data.recipe, "the study's recipe").recipe
    entries = _contenders(recipe, [*data.baselines, *data.trials])
    if not entries:
        return Conclusion(notices=(notice("not_scored", what="Nothing"), *_failure_notices(data)))
    comparison = _Comparison(Judge.by(data.objective, data.guards), recipe, entries, resamples)
    results, values = comparison.results, comparison.table.values
    ranking = sorted(
        (n for n, ranked in enumerate(results) if not ranked.baseline),
        key=lambda n: (bool(results[n].broken), -values[n], entries[n].trials[0].number),
    )
    rest = [n for n, ranked in enumerate(results) if ranked.baseline]
    found = Conclusion(
        ranking=tuple(results[n] for n in ranking),
        baselines=tuple(results[n] for n in rest),
        noise=_noise(data.baselines, comparison.judge),
        notices=(
            *_chance_notices(comparison),
            *_failure_notices(data),
            *_score_notices(comparison),
        ),
    )
    if (best := comparison.best) is None:
        return replace(found, notices=(*_guard_notices(comparison), *found.notices))
    others = [n for n in ranking if n != best and not results[n].broken]
    others = [n for n in others if comparison.digests(n) != comparison.digests(best)]
    differences = {n: comparison.difference(best, n) for n, _ in enumerate(results) if n != best}
    tied = [n for n in comparison.others if differences[n].verdict in (NO_DIFFERENCE, WORSE)]
    tied = [n for n in tied if comparison.digests(n) != comparison.digests(best)]
    tied.sort(key=lambda n: -values[n])
    shown = [*others[:1], *(n for n in rest if n != best)]
    holdout, held, on_holdout = _holdout(data, comparison, results[best])
    tasks = tuple(_tasks(comparison, held or comparison, 0 if held else best))
    return replace(
        found,
        best=results[best],
        runner_up=results[others[0]] if others else None,
        against=tuple(differences[n] for n in shown),
        tied=tuple(results[n] for n in tied),
        holdout=holdout,
        tasks=tasks,
        notices=(
            *on_holdout,
            *([] if results[best].role in NOT_MERGED else _loss_notices(tasks)),
            *([] if data.sampler == PLAN else _seed_notices(data, entries[best])),
            *_selection_notices(comparison, found.noise, data),
            *found.notices,
        ),
    )


# ---------------------------------------------------------------- comparing


def _contenders(recipe: Recipe, trials: Iterable[Trial]) -> list[Contender]:
    """Group done trials by name or setting, except the one that measures the noise."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.is_done and trial.scored is not None and trial.role not in NOT_COMPARED:
            groups.setdefault(trial.name or key_of(trial.settings), []).append(trial)
    return [_contender(recipe, same, same[0].name) for same in groups.values()]


def _contender(recipe: Recipe, trials: Sequence[Trial], name: str) -> Contender:
    """Return trials of one setting or baseline; tell if another seed would give other weights."""
    settings, role = trials[0].settings, trials[0].role
    is_setting = bool(settings) or role is Role.SETTING
    is_drawn = is_setting and is_random(with_settings(recipe, settings))
    return Contender(tuple(trials), name, is_drawn)


def _complexity(recipe: Recipe, ranked: Ranked) -> tuple[int, ...]:
    """Return a key that sorts by complexity: baselines first, then by stages, drops, settings."""
    if ranked.baseline:
        return 0, list(Role).index(ranked.role)
    made = with_settings(recipe, ranked.settings)
    seen = max(("element", "tensor", "matrix").index(stage.sees) for stage, _ in made.chain)
    return 1, len(made.chain), seen, is_random(made), len(ranked.settings)


class _Comparison:
    """Settings and baselines that one evaluator has scored."""

    def __init__(
        self, judge: Judge, recipe: Recipe, entries: Sequence[Contender], resamples: int
    ) -> None:
        self.judge, self.recipe, self.entries, self.resamples = judge, recipe, entries, resamples
        self.table = resample(entries, judge.objective, resamples=resamples)
        alone = (entry.scored for entry in entries if Role.of(entry.name) is Role.SINGLE)
        self.singles: list[Scores] = [one.scores for scored in alone for one in scored]
        self.results = [
            Ranked(
                settings={} if entry.name else dict(entry.trials[0].settings),
                trials=tuple(trial.number for trial in entry.trials),
                objective=self.table.estimate(place),
                scores=entry.scores,
                broken=judge.broken(entry.scores, self.singles),
                baseline=entry.name,
            )
            for place, entry in enumerate(entries)
        ]
        kept = [n for n, ranked in enumerate(self.results) if not ranked.broken]
        top = max(self.table.values[kept], default=None)
        equal = [n for n in kept if self.table.values[n] == top]
        simplicity = [_complexity(recipe, ranked) for ranked in self.results]
        self.best = min(equal, key=simplicity.__getitem__, default=None)
        self.others = [n for n in kept if n != self.best]  # all others that keep to the guards

    def difference(self, one: int, other: int) -> Difference:
        """Return one minus another, with an interval that holds for all pairs at once."""
        value = self.table.difference(one, other)
        return Difference(self.results[other].short, value, verdict(value))

    def digests(self, place: int) -> set[object]:
        """Return the digests of an entry's weights; an unknown digest differs from all others."""
        return {trial.digest or id(trial) for trial in self.entries[place].trials}


def _noise(baselines: Sequence[Trial], judge: Judge) -> float | None:
    """Return the difference between two scorings of the same weights."""
    once, again = (
        _mean_objective([t for t in baselines if t.name == role], judge)
        for role in (Role.AVERAGE, Role.AGAIN)
    )
    return None if once is None or again is None else abs(once - again)


def _mean_objective(trials: Sequence[Trial], judge: Judge) -> float | None:
    """Return the mean objective of the trials that are done; None if none is."""
    scores = [t.scored.scores for t in trials if t.is_done and t.scored is not None]
    return fmean(map(judge.objective.value, scores)) if scores else None


def _holdout(
    data: StudyData, chosen_by: _Comparison, best: Ranked
) -> tuple[Holdout | None, _Comparison | None, list[Notice]]:
    """Compare the best, on the second evaluator, with everything else that was scored there."""
    judge, recipe = chosen_by.judge, chosen_by.recipe
    name = best.baseline or Role.WINNER
    of_best = [trial for trial in data.holdout if trial.name == name]
    done = [trial for trial in of_best if trial.is_done and trial.scored is not None]
    roles = (Role.WINNER, Role.EARLIER_WINNER)
    looks = max(1, len({key_of(t.settings) for t in data.holdout if t.name in roles}))
    if not done:
        problems = [f"The winner has no score on the holdout: {t.message}" for t in of_best[-1:]]
        failed = [notice("holdout_failed", problem=problem) for problem in problems]
        is_outdated = not of_best and any(trial.name in roles for trial in data.holdout)
        return None, None, [*failed, *([notice("holdout_outdated")] if is_outdated else [])]
    try:
        others = _contenders(recipe, (t for t in data.holdout if t.name not in (name, *roles)))
        entries = [_contender(recipe, done, best.baseline), *others]
        comparison = _Comparison(judge, recipe, entries, chosen_by.resamples)
    except RecipeError as error:
        problem = f"The holdout cannot be compared: {error}"
        return None, None, [notice("holdout_failed", problem=problem)]
    seeds = {trial.seed for trial in done}
    chosen = [t for t in data.trials if t.is_done and t.settings == best.settings]
    validation = _mean_objective([t for t in chosen if t.seed in seeds] or chosen, judge)
    validation = best.objective.value if validation is None else validation
    winner = comparison.results[0]
    holdout = Holdout(
        objective=winner.objective,
        against=tuple(comparison.difference(0, n) for n, _ in enumerate(others, start=1)),
        validation=validation,
        loss=validation - winner.objective.value,
        looks=looks,
    )
    return holdout, comparison, list(_holdout_notices(comparison, holdout))


def _tasks(comparison: _Comparison, shown: _Comparison, best: int) -> Iterator[TaskScores]:
    """Yield objective and scores of the best, with those of base, best single model and average.

    Scores are from `shown`; the `comparison` decides which single model is best at a task.
    """
    judge, winner = comparison.judge, shown.entries[best]
    known = {entry.name: entry for entry in shown.entries if entry.name} | {winner.name: winner}
    singles = [e for e in comparison.entries if e.name in known and Role.of(e.name) is Role.SINGLE]
    scores = [entry.scores for entry in (*known.values(), *singles)]
    names = [name for name in winner.scores if all(name in given for given in scores)]
    directions = judge.directions(names)
    for task in ["", *names] if len(judge.objective.shares(names)) > 1 else names:
        objective, sign = judge.objective, directions.get(task, 1)
        if task:
            objective = Objective({task: 1.0})
        tops = max(singles, key=lambda e: sign * objective.value(e.scores), default=None)
        single = None if tops is None else tops.name
        wanted = {n: known[n] for n in (Role.BASE, single, Role.AVERAGE) if n in known}
        places = {name: place for place, name in enumerate({**wanted, winner.name: winner})}
        table = resample([known[n] for n in places], objective, resamples=shown.resamples)
        changes = {}
        for rival in places.keys() & {single, Role.BASE} - {winner.name}:
            value = table.difference(places[winner.name], places[rival])
            changes[rival] = Difference(rival, value, verdict(value, sign))
        base, alone, average = (
            table.estimate(places[name]) if name in places else None
            for name in (Role.BASE, single, Role.AVERAGE)
        )
        is_share = sign > 0 and table.bounds[0] == 0 and math.isclose(table.bounds[1], 1)
        mine = table.estimate(places[winner.name])
        name = (single or "").removesuffix(ALONE)
        against = changes.get(single or ""), changes.get(Role.BASE)
        yield TaskScores(task, table.items, is_share, base, alone, average, mine, name, *against)


def change_text(task: TaskScores, change: Difference | None) -> str:
    """Return a task's gain or loss against another model, and if it may be chance."""
    if change is None:
        return ""
    value, found = change.estimate.value, change.verdict
    size = f"{100 * abs(value):.1f}" if task.is_share else f"{abs(value):.2f}"
    if found in (BETTER, WORSE):
        return f"{'won' if found == BETTER else 'lost'} {size}{' points' * task.is_share}"
    return f"{'-' if value < 0 else '+'}{size}{', not clear' * (found != NOT_KNOWN)}"


# ------------------------------------------------------------------------------------- notices


def _loss_notices(tasks: Iterable[TaskScores]) -> Iterator[Notice]:
    """Say at which tasks a merge is worse than the base or the best single model, beyond chance."""
    losses = []
    for task in tasks:
        changes = [each for each in (task.change, task.from_base) if each and task.name]
        lost = [each for each in changes if each.verdict == WORSE]
        if lost:
            largest = max(lost, key=lambda each: abs(each.estimate.value))
            rival = "the base" if largest.other == Role.BASE else largest.other
            losses.append(f"{task.name} {change_text(task, largest)} against {rival}")
    if losses:
        yield notice("task_lost", losses=listed(losses))


def _holdout_notices(comparison: _Comparison, holdout: Holdout) -> Iterator[Notice]:
    """Say what the scores of the best on the holdout mean; the choice stays the same."""
    kept = {ranked.short for ranked in comparison.results if not ranked.broken}
    if better := [d.other for d in holdout.against if d.verdict == WORSE and d.other in kept]:
        yield notice("holdout_disagrees", names=listed(better))
    if holdout.looks > 1:
        yield notice("holdout_reused", winners=holdout.looks)
    for sentence in comparison.results[0].broken:
        yield notice("holdout_guard", sentence=sentence)


def _chance_notices(comparison: _Comparison) -> Iterator[Notice]:
    """Say what the intervals do not cover."""
    table = comparison.table
    has_seeds = any(size > 1 for size in table.seeds)
    given = any(scored.items for entry in comparison.entries for scored in entry.scored)
    if not table.items:
        reason = "The evaluator gave no per-item results"
        reason = "The objective is not a mean of items that every setting has" if given else reason
        limit = "the top score may be luck"
        limit = "the intervals cover only chance in the seeds" if has_seeds else limit
        yield notice("no_items", reason=reason, consequence=limit)
    elif table.without_items:
        yield notice("scores_without_items", names=", ".join(table.without_items))
    if table.left_out:
        yield notice("items_left_out", items=table.items, left_out=table.left_out)


def _guard_notices(comparison: _Comparison) -> Iterator[Notice]:
    """Say that no candidate keeps to the guards, and which ones the best of all breaks."""
    first = max(comparison.results, key=lambda ranked: ranked.objective.value)
    broken, count = "; ".join(first.broken), counted(len(comparison.results), "candidate")
    yield notice("all_break_guards", candidates=count, first=first.label, broken=broken)


def _selection_notices(
    comparison: _Comparison, noise: float | None, data: StudyData
) -> Iterator[Notice]:
    """Say what the number of the others, and their distance, mean for the choice."""
    table, best, others = comparison.table, comparison.best, comparison.others
    assert best is not None
    different = [n for n in others if comparison.digests(n) != comparison.digests(best)]
    gap = float(table.values[best] - max(table.values[different], default=-math.inf))
    if noise is not None and noise > gap:
        yield notice("noisy_evaluator", noise=noise, gap=gap)
    done = {key_of(trial.settings) for trial in data.trials if trial.is_done}
    stopped = len({key_of(t.settings) for t in data.trials if t.scored is not None} - done)
    if different and data.is_finished and not data.holdout:
        is_known = table.difference(best, different[0]).low is not None
        allowed = f"the {1 + len(others)} that were scored on all items" if stopped else "that"
        yield notice(
            "winners_curse",
            candidates=1 + len(others) + stopped,
            intervals=f"; the intervals of its differences allow for {allowed}" if is_known else "",
        )


def _seed_notices(data: StudyData, best: Contender) -> Iterator[Notice]:
    """Say that more seeds would help."""
    count = len(best.trials)
    if best.name or not best.is_random:
        return
    if count < len(data.seeds):
        yield notice("seeds_missing", count=count, seeds=len(data.seeds))
    if count <= 2:
        yield notice("few_seeds", seeds=counted(count, "seed"))


def _failure_notices(data: StudyData) -> Iterator[Notice]:
    ended = [trial for trial in data.trials if trial.state.is_final]
    if failed := sum(trial.state is State.FAILED for trial in ended):
        yield notice("trials_failed", failed=failed, trials=counted(len(ended), "trial"))
    for trial in data.baselines:
        if trial.state is State.FAILED:
            reason = f": {trial.message.rstrip('.')}" if trial.message else ""
            yield notice("baseline_failed", name=trial.name, reason=reason)


def _score_notices(comparison: _Comparison) -> Iterator[Notice]:
    scores, judge = comparison.results[0].scores, comparison.judge
    yield from direction_notices(judge.objective, scores, judge.guards)
    for guard in judge.guards:
        if not guard.is_judged(scores, comparison.singles):
            yield notice("guard_unchecked", guard=guard.text)


def direction_notices(
    objective: Objective, names: Iterable[str], guards: Sequence[Guard] = ()
) -> list[Notice]:
    """Return a notice for each score that should not count as better when it grows."""
    bounded = {guard.name for guard in guards if guard.kind == "max"}
    return [
        notice(
            "larger_is_better",
            name=name,
            reason="a guard sets its maximum" if name in bounded else "its name suggests an error",
        )
        for name, sign in objective.directions(names).items()
        if sign > 0 and (name in bounded or sounds_like_an_error(name))
    ]
