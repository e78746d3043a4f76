"""The conclusion of a study: the best setting, what it cannot be told apart from, and caveats.

A judge holds merges against the objective and the guards, and says which are simplest; a contest
compares all that one evaluator has scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dare.documents.notices import Notice, notice
from dare.documents.words import listed, times
from dare.errors import RecipeError
from dare.recipe.document import request_from_document, with_settings
from dare.recipe.recipe import Recipe
from dare.recipe.search import Guard, Objective, Scores
from dare.studies.results import (
    NOT_MERGED,
    Conclusion,
    Difference,
    Entry,
    Holdout,
    Ranked,
    Role,
    Settings,
    State,
    StudyData,
    Trial,
    is_number,
    key_of,
)
from dare.studies.space import is_random
from dare.studies.statistics import (
    BETTER,
    NO_DIFFERENCE,
    NOT_KNOWN,
    WORSE,
    pareto_front,
    resample,
    sounds_like_an_error,
    verdict,
)

_NEAR = 0.02  # a value is at the end of a range if it is nearer to it than this share of the range
_PLAIN = (Role.AVERAGE, Role.WITHOUT_STRANGERS, Role.SUM)  # merges that need no setting


def conclude(data: StudyData, *, resamples: int = 2000) -> Conclusion:
    """Rank the settings, compare the best with all else, and say what that is worth."""
    recipe = request_from_document(data.recipe, "the study's recipe").recipe
    entries = _entries(recipe, [*data.trials, *data.baselines])
    if not entries:
        return Conclusion(notices=(notice("not_scored", what="Nothing"), *_of_failures(data)))
    contest = _Contest(Judge.by(data.objective, data.guards), recipe, entries, resamples)
    return (_among_settings if data.is_searched else _among_baselines)(data, contest)


# ---------------------------------------------------------------- judging


@dataclass(frozen=True)
class Judge:
    """The demands on merges in a study."""

    objective: Objective
    guards: tuple[Guard, ...]

    @classmethod
    def by(cls, weights: Mapping[str, float], guards: Iterable[str]) -> Judge:
        objective = Objective(weights)
        return cls(objective, tuple(Guard.parse(text, objective) for text in guards))

    def check_names(self, scores: Iterable[str]) -> None:
        """Refuse an objective or a guard that asks for scores which there are not."""
        names = list(scores)
        self.objective.shares(names)
        for guard in self.guards:
            guard.check(names)

    def broken(self, scores: Scores, singles: Sequence[Scores]) -> tuple[str, ...]:
        """Return a sentence for each guard that is broken."""
        return tuple(line for guard in self.guards for line in guard.broken(scores, singles))

    def directions(self, names: Sequence[str]) -> dict[str, int]:
        """Return 1 for scores of which more is better, -1 for less; others are left out."""
        bounds = [pair for guard in self.guards for pair in guard.directions(names).items()]
        found = {name: sign for name, sign in bounds if name in names}
        return found | self.objective.directions(names)


def _entries(recipe: Recipe, trials: Iterable[Trial]) -> list[Entry]:
    """Put done trials together by name or setting, but for the one that tells the noise.

    If the advice has the weights of another baseline, the two are one.
    """
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.is_done and trial.scored is not None and trial.role is not Role.AGAIN:
            found.setdefault(trial.name or key_of(trial.settings), []).append(trial)
    advised = {trial.digest for trial in found.get(Role.ADVICE, ()) if trial.digest}
    others = [n for n, (one, *_) in found.items() if one.name and one.role is not Role.ADVICE]
    twins = [name for name in others if found[name][0].digest in advised][:1]
    if twins:
        del found[Role.ADVICE]
    return [_entry(recipe, same, same[0].name, name in twins) for name, same in found.items()]


def _entry(recipe: Recipe, trials: Sequence[Trial], name: str, is_advice: bool = False) -> Entry:
    """Return trials of one setting or baseline; tell if another seed would give other weights."""
    settings, role = trials[0].settings, trials[0].role
    is_drawn = role in (Role.ADVICE, Role.RECIPE)
    if settings or role is Role.SETTING:
        is_drawn = is_random(with_settings(recipe, settings))
    return Entry(tuple(trials), name, is_drawn, is_advice)


def _complexity(recipe: Recipe, ranked: Ranked) -> tuple[int, ...]:
    """Return what it needs: a plain merge, few stages that see little, no drops, few changes."""
    if ranked.baseline:
        return (0,)
    made = with_settings(recipe, ranked.settings)
    seen = max(("element", "tensor", "matrix").index(stage.sees) for stage, _ in made.chain)
    return 1, len(made.chain), seen, is_random(made), _changes(recipe, ranked.settings)


def _changes(recipe: Recipe, settings: Settings) -> int:
    """Count settings that differ in effect from the recipe's; each layer's value counts."""
    method = {name: value for name, value in settings.items() if name == "method"}
    start = with_settings(recipe, method)
    before, now = ([stage.name for stage, _ in made.chain] for made in (recipe, start))
    changes = int(before != now)
    for name, value in settings.items():
        if _effect(with_settings(recipe, {**method, name: value})) != _effect(start):
            changes += len(value) if isinstance(value, list | tuple) else 1
    return changes


def _effect(recipe: Recipe) -> tuple[Any, ...]:
    return (
        [(stage.name, dict(settings)) for stage, settings in recipe.chain],
        [entry.settings for entry in recipe.models],
        (recipe.weights(), recipe.seeds()),
        (recipe.scale, recipe.embedding_drop_rate),
    )


class _Contest:
    """Settings and baselines that one evaluator has scored."""

    def __init__(
        self, judge: Judge, recipe: Recipe, entries: Sequence[Entry], resamples: int
    ) -> None:
        self.judge, self.recipe, self.entries, self.resamples = judge, recipe, entries, resamples
        self.table = resample(entries, judge.objective, resamples=resamples)
        alone = (entry.scored for entry in entries if Role.of(entry.name) is Role.SINGLE)
        self.singles: list[Scores] = [one.scores for scored in alone for one in scored]
        self.standing = [
            Ranked(
                settings={} if entry.name else dict(entry.trials[0].settings),
                trials=tuple(trial.number for trial in entry.trials),
                objective=self.table.estimate(place),
                scores=entry.scores,
                broken=judge.broken(entry.scores, self.singles),
                baseline=entry.name,
                is_advice=entry.is_advice,
            )
            for place, entry in enumerate(entries)
        ]
        # By settings as text, or by the name of a baseline that keeps to the guards.
        self.places: dict[str, int] = {}
        for place, entry in enumerate(entries):
            settings = entry.trials[0].settings
            if settings or not entry.name:
                self.places[key_of(settings)] = place
            elif not self.standing[place].broken:
                self.places[entry.name] = place
        self.among: Sequence[int] = ()  # places of the settings of which the best was chosen here

    def difference(self, one: int, other: int, among: Sequence[int] = ()) -> Difference:
        """Return one minus another, by an interval that holds for all of some at once."""
        value = self.table.difference(one, other, among)
        return Difference(self.standing[other].short, value, verdict(value))

    def is_worse(self, one: Ranked, other: Ranked) -> bool:
        """Tell if one is worse than another, beyond chance; False if either has no scores here."""
        place, rival = self.places.get(one.key), self.places.get(other.key)
        if place is None or rival is None or place == rival:
            return False
        return self.difference(place, rival, () if one.baseline else self.among).verdict == WORSE

    def against_all(self, one: Ranked) -> tuple[Difference, ...]:
        """Return one minus each of the others, by intervals that hold for all of them at once."""
        if (place := self.places.get(one.key)) is None:
            return ()
        every = [n for n in self.places.values() if n != place]
        found = [(n, -self.table.difference(n, place, every)) for n in every]
        return tuple(Difference(self.standing[n].short, v, verdict(v)) for n, v in found)


def _among_settings(data: StudyData, contest: _Contest) -> Conclusion:
    """Take the best setting that keeps to the guards, unless a baseline beats it."""
    judge, standing, entries = contest.judge, contest.standing, contest.entries
    values = contest.table.values
    order = sorted(
        (n for n, ranked in enumerate(standing) if not ranked.baseline),
        key=lambda n: (bool(standing[n].broken), -values[n], entries[n].trials[0].number),
    )
    feasible = contest.among = [n for n in order if not standing[n].broken]
    rest = [n for n, ranked in enumerate(standing) if ranked.baseline]
    best = standing[feasible[0]] if feasible else None
    differences = {
        n: contest.difference(feasible[0], n, feasible) for n in [*feasible[1:], *rest] if feasible
    }
    tied = tuple(
        standing[n]
        for n, difference in differences.items()
        if difference.verdict == NO_DIFFERENCE and not standing[n].broken
    )
    ranking = tuple(standing[n] for n in order)
    scores = [ranked.scores for ranked in ranking]
    names = [name for name in (scores[0] if scores else ()) if all(name in s for s in scores)]
    holdout, held, on_holdout = _holdout(data, contest, best)
    contests = [contest, *held]
    rivals = [standing[n] for n in rest if not standing[n].broken]
    better, chosen = _choose(best, rivals, contests) if best else ([], None)
    simplest = chosen
    if best is not None and chosen is best:
        merges = [best, *(one for one in tied if one.role in (Role.SETTING, *_PLAIN))]
        merges.sort(key=lambda one: (_complexity(contest.recipe, one), -one.objective.value))
        merges = [one for one in merges if not _beating(one, [best], held)]
        simplest = next(o for o in merges if o is best or not _beating(o, rivals, contests))
    noise = _noise(data.baselines, judge)
    verdicts = {difference.verdict for n, difference in differences.items() if n in feasible}
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
        importance=dict(data.importance) if verdicts & {BETTER, NOT_KNOWN} else {},
        front=tuple(pareto_front(scores, judge.directions(names))),
        noise=noise,
        holdout=holdout,
        notices=(
            *_of_chance(contest),
            *(_of_seeds(data, entries[feasible[0]]) if best else ()),
            *(_of_ends(data.space, best.settings, contest.recipe) if best else ()),
            *_of_others(contest, order, noise, data),
            *_of_failures(data),
            *_of_scores(contest),
            *on_holdout,
        ),
    )


def _beating(one: Ranked, rivals: Sequence[Ranked], contests: Sequence[_Contest]) -> list[Ranked]:
    """Return the rivals that are better, beyond chance, in any contest."""
    return [r for r in rivals if any(contest.is_worse(one, r) for contest in contests)]


def _choose(
    best: Ranked, rivals: Sequence[Ranked], contests: Sequence[_Contest]
) -> tuple[list[Ranked], Ranked | None]:
    """Return the baselines that beat the best setting, and what to take."""
    better = _beating(best, rivals, contests)
    if not better:
        return [], best
    beaten = {r.baseline for r in rivals if _beating(r, rivals, contests)}
    better.sort(key=lambda ranked: (ranked.baseline in beaten, -ranked.objective.value))
    left = [r for r in rivals if r.baseline not in beaten]
    return better, max(left, key=lambda r: (r in better, r.objective.value), default=None)


def _noise(baselines: Sequence[Trial], judge: Judge) -> float | None:
    """Return how far two scorings of the same weights are apart."""
    once, again = (
        _mean_objective([t for t in baselines if t.name == role], judge)
        for role in (Role.AVERAGE, Role.AGAIN)
    )
    return None if once is None or again is None else abs(once - again)


def _mean_objective(trials: Sequence[Trial], judge: Judge) -> float | None:
    """Return the mean over those that are done; None if none is."""
    scores = [t.scored.scores for t in trials if t.is_done and t.scored is not None]
    return fmean(map(judge.objective.value, scores)) if scores else None


def _among_baselines(data: StudyData, contest: _Contest) -> Conclusion:
    """Take the best baseline, once all are scored."""
    ended = sum(trial.state.is_final for trial in data.baselines)
    rivals = [r for r in contest.standing if 0 < data.planned <= ended and not r.broken]
    best = _unbeaten(rivals, [contest])
    holdout, held, on_holdout = _holdout(data, contest, best)
    chosen = _unbeaten(rivals, [contest, *held])
    against = contest.against_all(best) if best else ()
    tied = {item.other for item in against if item.verdict == NO_DIFFERENCE}
    return Conclusion(
        baselines=tuple(contest.standing),
        best=best,
        against=against,
        tied=tuple(ranked for ranked in rivals if ranked.short in tied),
        chosen=chosen,
        simplest=chosen,
        noise=_noise(data.baselines, contest.judge),
        holdout=holdout,
        notices=(
            *_of_simpler(chosen, rivals, against),
            *_of_chance(contest),
            *_of_failures(data),
            *_of_scores(contest),
            *on_holdout,
        ),
    )


def _unbeaten(rivals: Sequence[Ranked], contests: Sequence[_Contest]) -> Ranked | None:
    """Return the best that nothing beats in any contest; of equal ones the simplest."""
    for best in sorted(rivals, key=lambda one: -one.objective.value):  # the simplest come first
        if not any(d.verdict == WORSE for c in contests for d in c.against_all(best)):
            return best
    return None


def _holdout(
    data: StudyData, chosen_by: _Contest, best: Ranked | None
) -> tuple[Holdout | None, list[_Contest], list[Notice]]:
    """Compare the winner on the second evaluator with all else that was scored there."""
    if best is None:
        return None, [], []
    judge, recipe = chosen_by.judge, chosen_by.recipe
    names = (best.baseline,) if best.baseline else (Role.WINNER, Role.EARLIER_WINNER)
    winners = [trial for trial in data.holdout if trial.name in names]
    done = [t for t in winners if t.is_done and t.scored is not None]
    if not done:
        problems = [f"The winner has no score on the holdout: {t.message}" for t in winners[-1:]]
        return None, [], [notice("holdout_failed", problem=problem) for problem in problems]
    latest = best.settings if any(t.settings == best.settings for t in done) else done[-1].settings
    trials = [t for t in done if t.settings == latest]
    others = _entries(recipe, (t for t in data.holdout if t not in winners))
    try:
        entries = [_entry(recipe, trials, best.baseline), *others]
        contest = _Contest(judge, recipe, entries, chosen_by.resamples)
    except RecipeError as error:
        problem = f"The holdout cannot be compared: {error}"
        return None, [], [notice("holdout_failed", problem=problem)]
    seeds = {trial.seed for trial in trials}
    chosen = [t for t in data.trials if t.is_done and t.scored and t.settings == latest]
    validation = _mean_objective([t for t in chosen if t.seed in seeds] or chosen, judge)
    validation = best.objective.value if validation is None else validation
    usual = []
    for place, other in enumerate(others, start=1):
        before = _mean_objective([t for t in data.baselines if t.name == other.name], judge)
        if before is not None:
            usual.append(before - float(contest.table.values[place]))
    winner = contest.standing[0]
    winners_seen = len({(t.name, key_of(t.settings)) for t in winners})
    pairs = (contest.difference(0, n) for n, _ in enumerate(others, start=1))
    holdout = Holdout(
        objective=winner.objective,
        against=contest.against_all(best) if best.baseline else tuple(pairs),
        validation=validation,
        loss=validation - winner.objective.value,
        usual_loss=fmean(usual) if usual else None,
        looks=winners_seen,
    )
    return holdout, [contest], list(_of_holdout(winner, best, latest, winners_seen))


# ------------------------------------------------------------------------------------- notices


def _of_simpler(
    chosen: Ranked | None, rivals: Sequence[Ranked], against: Sequence[Difference]
) -> Iterator[Notice]:
    """Warn if a merge is not shown to be better than what needs none."""
    unmerged = [ranked.short for ranked in rivals if ranked.role in NOT_MERGED]
    unbeaten = [d.other for d in against if d.verdict != BETTER and d.other in unmerged]
    if chosen is not None and chosen.role not in NOT_MERGED and unbeaten:
        yield notice("not_shown_better", names=listed(unbeaten))


def _of_holdout(winner: Ranked, best: Ranked, settings: Settings, winners: int) -> Iterator[Notice]:
    """Say what a winner's scores on the holdout mean; its settings may no longer be the best."""
    if settings != best.settings:
        yield notice("holdout_outdated")
    if winners > 1:
        yield notice("holdout_reused", winners=winners)
    for sentence in winner.broken:
        yield notice("holdout_guard", sentence=sentence)


def _of_chance(contest: _Contest) -> Iterator[Notice]:
    """Say what the intervals do not cover."""
    table = contest.table
    has_seeds = any(size > 1 for size in table.seeds)
    given = any(scored.items for entry in contest.entries for scored in entry.scored)
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


def _of_others(
    contest: _Contest, order: Sequence[int], noise: float | None, data: StudyData
) -> Iterator[Notice]:
    """Say what the others mean for the best, or why there is none."""
    table, feasible = contest.table, contest.among
    if not order:
        yield notice("not_scored", what="No setting")
        return
    if not feasible:
        first, settings = contest.standing[order[0]], times(len(order), "setting")
        broken = "; ".join(first.broken)
        yield notice("all_break_guards", settings=settings, first=first.label, broken=broken)
        return
    best, count = feasible[0], len(feasible)
    gap = float(table.values[best] - table.values[feasible[1]]) if count > 1 else math.inf
    if noise is not None and noise > gap:
        yield notice("noisy_evaluator", noise=noise, gap=gap)
    done = {key_of(trial.settings) for trial in data.trials if trial.is_done}
    stopped = len({key_of(t.settings) for t in data.trials if t.scored is not None} - done)
    if count + stopped > 1:
        is_known = count > 1 and table.difference(best, feasible[1], feasible).low is not None
        allowed = f"the {count} settings that were scored on all items" if stopped else "that"
        yield notice(
            "winners_curse",
            settings=count + stopped,
            intervals=f"; the intervals of its differences allow for {allowed}" if is_known else "",
            remedy="" if data.holdout else "Add a holdout to see by how much",
        )


def _of_seeds(data: StudyData, best: Entry) -> Iterator[Notice]:
    count = len(best.trials)
    if not best.is_random:
        return
    if count < len(data.seeds):
        yield notice("seeds_missing", count=count, seeds=len(data.seeds))
    if count <= 2:
        yield notice("few_seeds", seeds=times(count, "seed"))


def _of_failures(data: StudyData) -> Iterator[Notice]:
    ended = [trial for trial in data.trials if trial.state.is_final]
    if failed := sum(trial.state is State.FAILED for trial in ended):
        yield notice("trials_failed", failed=failed, trials=times(len(ended), "trial"))
    for trial in data.baselines:
        if trial.state is State.FAILED:
            reason = f": {trial.message.rstrip('.')}" if trial.message else ""
            yield notice("baseline_failed", name=trial.name, reason=reason)


def _of_scores(contest: _Contest) -> Iterator[Notice]:
    scores, judge = contest.standing[0].scores, contest.judge
    yield from doubts(judge.objective, scores, judge.guards)
    for guard in judge.guards:
        if not guard.is_judged(scores, contest.singles):
            yield notice("guard_unchecked", guard=guard.text)


def doubts(
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


def _of_ends(space: Mapping[str, Any], settings: Settings, recipe: Recipe) -> Iterator[Notice]:
    """Find numbers of a setting at an end of their range, where the recipe would take more."""
    for name, over in space.items():
        value, is_log = settings.get(name), isinstance(over, Mapping) and over.get("log", False)
        values = [over["from"], over["to"]] if isinstance(over, Mapping) else over
        if not all(map(is_number, [value, *values])) or min(values) >= max(values):
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
            if share <= _NEAR and _is_valid(recipe, {**settings, name: further}):
                yield notice("end_of_range", name=name, end=end, value=value)


def _is_valid(recipe: Recipe, settings: Settings) -> bool:
    try:
        return bool(with_settings(recipe, settings))
    except RecipeError:
        return False
