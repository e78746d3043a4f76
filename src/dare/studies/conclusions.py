"""What a study shows: the best setting, what it cannot be told apart from, and what limits that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dare.documents.words import times
from dare.errors import RecipeError
from dare.studies.judging import LEVELS, Entry, Judge, doubts, singles_of
from dare.studies.results import (
    NOT_MERGED,
    Conclusion,
    Difference,
    Holdout,
    Ranked,
    Role,
    Scored,
    Settings,
    State,
    StudyData,
    Trial,
    key_of,
)
from dare.studies.statistics import (
    BETTER,
    NO_DIFFERENCE,
    NOT_KNOWN,
    WORSE,
    Resampled,
    pareto_front,
    resample,
    verdict,
)

_NEAR = 0.02
"""A value is at the end of a range if it is nearer to it than this share of the range."""


def conclude(data: StudyData, *, resamples: int = 2000) -> Conclusion:
    """Rank the settings, compare the best with all else, and say what that is worth."""
    judge = Judge.of(data)
    entries = [*judge.entries_of_settings(data.trials), *judge.entries_of_names(data.baselines)]
    if not entries:
        return Conclusion(remarks=("Nothing is scored yet.", *_of_failures(data)))
    table = resample(entries, judge.objective, resamples=resamples)
    if not data.is_searched:
        return _among_baselines(data, judge, entries, table, resamples)
    singles = singles_of(entries)
    standing = [judge.ranked(e, table.estimate(n), singles) for n, e in enumerate(entries)]
    order = sorted(
        (n for n, ranked in enumerate(standing) if not ranked.baseline),
        key=lambda n: (bool(standing[n].broken), -table.values[n], entries[n].trials[0].number),
    )
    feasible = [n for n in order if not standing[n].broken]
    rest = [n for n, ranked in enumerate(standing) if ranked.baseline]
    differences = {
        n: _differ(table, feasible[0], n, standing[n].label, feasible)
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
        ways = judge.simplest_first(best, tied)
        ways = [way for way in ways if not _beating(way, [best], contests[1:])]  # on the holdout
        simplest = next(way for way in ways if way is best or not _beating(way, rivals, contests))
    noise = _noise(data.baselines, judge)
    told = {difference.verdict for n, difference in differences.items() if n in feasible}
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
        importance=dict(data.importance) if told & {BETTER, NOT_KNOWN} else {},
        front=_front(ranking, judge),
        noise=noise,
        holdout=holdout,
        remarks=(
            *_of_chance(table, entries),
            *(_of_seeds(data, entries[feasible[0]]) if best else ()),
            *(_of_ends(data.space, best.settings, judge) if best else ()),
            *_of_others(table, standing, order, feasible, noise, data),
            *_of_failures(data),
            *_of_scores(judge, standing, singles),
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
        """Whether one is worse than another, beyond chance; False if either has no scores here."""
        place, rival = self.places.get(_key(one)), self.places.get(_key(other))
        if place is None or rival is None or place == rival:
            return False
        among = () if one.baseline else self.among
        return verdict(self.table.difference(place, rival, among)) == WORSE


def _beating(one: Ranked, rivals: Sequence[Ranked], contests: Sequence[_Contest]) -> list[Ranked]:
    """The rivals that are better, beyond chance, in any contest."""
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


def _differ(table: Resampled, best: int, other: int, name: str, among: Sequence[int]) -> Difference:
    value = table.difference(best, other, among)
    return Difference(name, value, verdict(value))


def _front(ranking: Sequence[Ranked], judge: Judge) -> tuple[int, ...]:
    """By the scores that the objective or a guard has a direction for."""
    names = [n for n in ranking[0].scores if all(n in r.scores for r in ranking)] if ranking else []
    return tuple(pareto_front([r.scores for r in ranking], judge.directions(names)))


def _noise(baselines: Sequence[Trial], judge: Judge) -> float | None:
    """How far two scorings of the same weights are apart."""
    once, again = (
        _mean_objective([t for t in baselines if t.name == role], judge)
        for role in (Role.AVERAGE, Role.AGAIN)
    )
    return None if once is None or again is None else abs(once - again)


def _mean_objective(trials: Sequence[Trial], judge: Judge) -> float | None:
    """Over those that are done; None if none is."""
    scores = [t.scored.scores for t in trials if t.is_done and t.scored is not None]
    return fmean(map(judge.objective.value, scores)) if scores else None


# ----------------------------------------------------------------------------------- baselines


def _among_baselines(
    data: StudyData, judge: Judge, entries: Sequence[Entry], table: Resampled, resamples: int
) -> Conclusion:
    """Take the best baseline, once all are scored."""
    singles = singles_of(entries)
    standing = [judge.ranked(e, table.estimate(n), singles) for n, e in enumerate(entries)]
    ended = sum(trial.state.is_final for trial in data.baselines)
    rivals = [r for r in standing if 0 < data.planned <= ended and not r.broken]
    contest = _Contest(table, {r.baseline: n for n, r in enumerate(standing) if r in rivals})
    best = _top(rivals, contest)
    holdout, held, on_holdout = _holdout(data, judge, best, resamples) if best else (None, None, ())
    chosen = _top(rivals, contest, held)
    against = _facing(contest, best) if best else ()
    tied = {item.other for item in against if item.verdict == NO_DIFFERENCE}
    remarks = *_of_simpler(chosen, against), *_of_chance(table, entries), *_of_failures(data)
    return Conclusion(
        baselines=tuple(standing),
        best=best,
        against=against,
        tied=tuple(ranked for ranked in rivals if ranked.baseline in tied),
        chosen=chosen,
        simplest=chosen,
        noise=_noise(data.baselines, judge),
        holdout=holdout,
        remarks=(*remarks, *_of_scores(judge, standing, singles), *on_holdout),
    )


def _top(
    rivals: Sequence[Ranked], contest: _Contest, held: _Contest | None = None
) -> Ranked | None:
    """The best that is not beaten, on the holdout neither; of equal ones the simplest."""
    for best in sorted(rivals, key=lambda ranked: (-ranked.objective.value, _level(ranked))):
        found = *_facing(contest, best), *(_facing(held, best) if held else ())
        if all(difference.verdict != WORSE for difference in found):
            return best
    return None


def _level(ranked: Ranked) -> int:
    """How simple a baseline is; the base is simplest."""
    return next(place for place, level in enumerate(LEVELS) if ranked.role in level)


def _of_simpler(chosen: Ranked | None, against: Sequence[Difference]) -> Iterator[str]:
    """Whether a merge is shown to be better than what needs none."""
    unbeaten = [d.other for d in against if d.verdict != BETTER and Role.of(d.other) in NOT_MERGED]
    if chosen is not None and chosen.role not in NOT_MERGED and unbeaten:
        names = ", ".join(unbeaten)
        yield f"It is not shown to be better than: {names}. More items would tell."


def _facing(contest: _Contest, one: Ranked) -> tuple[Difference, ...]:
    """One minus each of the others, by intervals that hold for all of them at once."""
    if (place := contest.places.get(_key(one))) is None:
        return ()
    others = {name: n for name, n in contest.places.items() if n != place}
    found = {k: -contest.table.difference(n, place, [*others.values()]) for k, n in others.items()}
    return tuple(Difference(name, value, verdict(value)) for name, value in found.items())


# ------------------------------------------------------------------------------------- holdout


def _holdout(
    data: StudyData, judge: Judge, best: Ranked, resamples: int
) -> tuple[Holdout | None, _Contest | None, tuple[str, ...]]:
    """The winner on the second evaluator, beside all else that was scored there."""
    names = (best.baseline,) if best.baseline else (Role.WINNER, Role.EARLIER_WINNER)
    winners = [trial for trial in data.holdout if trial.name in names]
    done = [t for t in winners if t.is_done and t.scored is not None]
    if not done:
        failed = [f"The winner has no score on the holdout: {t.message}." for t in winners[-1:]]
        return None, None, tuple(failed)
    latest = best.settings if any(t.settings == best.settings for t in done) else done[-1].settings
    trials = [t for t in done if t.settings == latest]
    others = judge.entries_of_names(t for t in data.holdout if t not in winners)
    entries = [judge.entry(trials, best.baseline, judge.is_random(latest)), *others]
    try:
        table = resample(entries, judge.objective, resamples=resamples)
        singles = singles_of(others)
        standing = [judge.ranked(e, table.estimate(n), singles) for n, e in enumerate(entries)]
    except RecipeError as error:
        return None, None, (f"The holdout cannot be compared: {error}.",)
    places = {}
    for place, entry in enumerate(entries):
        settings = entry.trials[0].settings
        if settings or not standing[place].broken:
            places[key_of(settings) if settings else entry.name] = place
    seeds = {trial.seed for trial in trials}
    chosen = [t for t in data.trials if t.is_done and t.scored and t.settings == latest]
    validation = _mean_objective([t for t in chosen if t.seed in seeds] or chosen, judge)
    validation = best.objective.value if validation is None else validation
    usual = []
    for place, other in enumerate(others, start=1):
        before = _mean_objective([t for t in data.baselines if t.name == other.name], judge)
        if before is not None:
            usual.append(before - float(table.values[place]))
    winner, contest = standing[0], _Contest(table, places)
    pairs = (_differ(table, 0, n, other.name, ()) for n, other in enumerate(others, start=1))
    looks = len({(t.name, key_of(t.settings)) for t in winners})
    holdout = Holdout(
        objective=winner.objective,
        against=_facing(contest, best) if best.baseline else tuple(pairs),
        validation=validation,
        loss=validation - winner.objective.value,
        usual_loss=fmean(usual) if usual else None,
        looks=looks,
    )
    return holdout, contest, tuple(_of_holdout(winner, best, latest, looks))


# ------------------------------------------------------------------------------------- remarks


def _of_holdout(winner: Ranked, best: Ranked, settings: Settings, looks: int) -> Iterator[str]:
    """What a winner's scores on the holdout say; its settings may no longer be the best."""
    if settings != best.settings:
        yield "The holdout was scored for an earlier winner, not for the present best setting."
    if looks > 1:
        yield f"{looks} winners have been scored on the holdout, so it is no longer held out."
    for sentence in winner.broken:
        yield f"On the holdout the winner breaks a guard: {sentence}."


def _of_chance(table: Resampled, entries: Sequence[Entry]) -> Iterator[str]:
    """What the intervals do not hold."""
    has_seeds = any(size > 1 for size in table.seeds)
    given = any(scored.items for entry in entries for scored in entry.scored)
    if not table.items:
        reason = (
            "No score of the objective is a mean of items that every setting has"
            if given
            else "The evaluator gives no items"
        )
        yield f"{reason}, so " + (
            "intervals cover only the chance of the seeds, not that of the items."
            if has_seeds
            else "it is not known whether a difference is chance."
        )
    elif table.without_items:
        names = ", ".join(table.without_items)
        yield f"Intervals omit the chance in {names} (not means of items that every setting has)."
    if table.left_out:
        yield f"Only the {table.items:,} common items are compared, {table.left_out:,} left out."


def _of_others(
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
        yield f"Every setting breaks a guard ({times(len(order), 'setting')}); none is best."
        yield f"{first.label} has the largest objective and breaks: {'; '.join(first.broken)}."
        return
    best, count = feasible[0], len(feasible)
    gap = float(table.values[best] - table.values[feasible[1]]) if count > 1 else math.inf
    if noise is not None and noise > gap:
        yield f"Two scorings of the same weights differ by {noise:.4g}, the best two by {gap:.4g}."
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


def _of_seeds(data: StudyData, best: Entry) -> Iterator[str]:
    count = len(best.trials)
    if not best.is_random:
        return
    if count < len(data.seeds):
        yield f"The best setting has been scored with {count} of {len(data.seeds)} seeds."
    if count == 1:
        yield "The best setting was scored with one seed, so it is not known how much seeds differ."
    elif count == 2:
        yield "Two seeds say little about how much seeds differ; use three or more."


def _of_failures(data: StudyData) -> Iterator[str]:
    """What could not be scored."""
    ended = [trial for trial in data.trials if trial.state.is_final]
    if failed := sum(trial.state is State.FAILED for trial in ended):
        yield f"{failed} of {times(len(ended), 'trial')} failed."
    for trial in data.baselines:
        if trial.state is State.FAILED:
            reason = f": {trial.message.rstrip('.')}" if trial.message else ""
            yield f"The baseline {trial.name} failed{reason}."


def _of_scores(judge: Judge, ranked: Sequence[Ranked], singles: Sequence[Scored]) -> Iterator[str]:
    """What is doubtful in the objective and the guards."""
    scores = ranked[0].scores
    yield from doubts(judge.objective, scores, judge.guards)
    for guard in judge.guards:
        if not guard.is_judged(scores, [single.scores for single in singles]):
            yield f"The guard {guard.text} is not checked, because no single model has been scored."


def _of_ends(space: Mapping[str, Any], settings: Settings, judge: Judge) -> Iterator[str]:
    """Numbers of a setting that lie at an end of their range, where the recipe would take more."""
    for name, over in space.items():
        value, is_log = settings.get(name), isinstance(over, Mapping) and over.get("log", False)
        values = [over["from"], over["to"]] if isinstance(over, Mapping) else over
        if not all(map(_is_number, [value, *values])) or min(values) >= max(values):
            continue
        low, high = min(values), max(values)
        for end, edge, other in (("smallest", low, high), ("largest", high, low)):
            if is_log:
                share = math.log(value / edge) / math.log(other / edge)
                beyond = edge * (edge / other) ** _NEAR
            else:
                share = (value - edge) / (other - edge)
                beyond = edge + (edge - other) * _NEAR
            further = edge + (1 if edge > other else -1) if isinstance(value, int) else beyond
            could = judge.recipe is None or judge.with_settings({**settings, name: further})
            if share <= _NEAR and could:
                yield f"{name} is at the {end} value searched ({value:.4g}): widen the range."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
