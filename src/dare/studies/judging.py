"""The judgement of merges: objective, guards, which trials belong together, which is simplest.

The objective is the weighted mean of scores, each with a weight that is negative where less is
better. A guard is a bound on a score: `english:max:1.25`, `add:min:0.5`, `*:keep:0.95`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dare.documents.notices import Notice, notice
from dare.errors import RecipeError, did_you_mean
from dare.recipe.document import recipe_from_document, with_settings
from dare.recipe.schema import Recipe
from dare.studies.results import (
    Estimate,
    Ranked,
    Role,
    Scored,
    Scores,
    Settings,
    StudyData,
    Trial,
    key_of,
)
from dare.studies.space import is_random

_PLAIN = (Role.AVERAGE, Role.WITHOUT_STRANGERS, Role.SUM)
"""Baselines that are merges, and need no setting."""
LEVELS = (
    (Role.BASE,),
    (Role.SINGLE,),
    (Role.AVERAGE, Role.WITHOUT_STRANGERS),
    (Role.SUM, Role.PART),
    (Role.ADVICE,),
    (Role.RECIPE,),
)
"""Baselines, the simplest first."""
_KINDS = ("max", "min", "keep")
_SMALLER_IS_BETTER = {"loss", "perplexity", "ppl", "bits", "bpb", "error", "err", "nll", "wer"}


def _check_name(name: str, known: Iterable[str], where: str) -> None:
    """Refuse a score that an evaluator does not give."""
    names = list(known)
    if name not in names:
        raise RecipeError(
            f"{where}: there is no score {name!r}{did_you_mean(name, names)}; the evaluator gives "
            f"{', '.join(names) or 'no scores'}"
        )


@dataclass(frozen=True)
class Objective:
    """The weighted mean of scores; the larger its value, the better.

    >>> Objective({"add": 1.0, "loss": -1.0}).value({"add": 1.0, "loss": 0.5, "other": 9.0})
    0.25
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    """By score; if there are none, all scores count the same."""

    def __post_init__(self) -> None:
        """Refuse a score that counts nothing."""
        for name, weight in self.weights.items():
            if not name or not weight or not math.isfinite(weight):
                raise RecipeError(f"objective {name!r}: {weight:g} is not a weight; leave it out")

    def shares(self, scores: Iterable[str]) -> dict[str, float]:
        """Return the share of each score; their sizes add up to 1."""
        names = list(scores)
        for name in self.weights:
            _check_name(name, names, f"objective {name!r}")
        weights = self.weights or dict.fromkeys(names, 1.0)
        total = math.fsum(map(abs, weights.values()))
        return {name: weight / total for name, weight in weights.items()}

    def value(self, scores: Mapping[str, float]) -> float:
        return float(self.values({name: np.float64(score) for name, score in scores.items()}))

    def values(self, scores: Mapping[str, Any]) -> np.ndarray:
        """Return the objective of many at once: arrays of one shape give one of that shape."""
        shares = self.shares(scores)
        return np.asarray(sum(share * scores[name] for name, share in shares.items()), np.float64)

    def bounds(self, scores: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        """Return the least and the largest value that it can have, by those of all scores."""
        ends = [[share * e for e in scores[n]] for n, share in self.shares(scores).items()]
        return math.fsum(map(min, ends)), math.fsum(map(max, ends))

    def directions(self, names: Iterable[str]) -> dict[str, int]:
        """Return 1 for scores that should be large, -1 for small ones; others are left out."""
        known = list(names)
        signs = {name: int(math.copysign(1, weight)) for name, weight in self.weights.items()}
        return {n: signs.get(n, 1) for n in known if n in signs or not signs}


def doubts(
    objective: Objective, names: Iterable[str], guards: Sequence[Guard] = ()
) -> list[Notice]:
    """Return a notice for each score that should not count as better when it grows."""
    bounded = {guard.name for guard in guards if guard.kind == "max"}
    return [
        notice(
            "larger_is_better",
            name=name,
            reason="a guard sets its maximum" if name in bounded else "its name is of an error",
        )
        for name, sign in objective.directions(names).items()
        if sign > 0 and (name in bounded or sounds_like_an_error(name))
    ]


def sounds_like_an_error(name: str) -> bool:
    """Tell if a score is called like something that has no upper end, and should be small."""
    return not _SMALLER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


@dataclass(frozen=True)
class Guard:
    """A bound on a score, which a merge must keep to be taken at all."""

    text: str
    name: str  # the score's name; `*` for each score of the objective
    kind: str  # `max`, `min`, or `keep`: a share of the best that a single model has
    bound: float
    objective: Objective = field(default_factory=Objective)
    """It tells which scores `*` stands for, and which are the better the smaller."""

    @classmethod
    def parse(cls, text: str, objective: Objective | None = None) -> Guard:
        """Read `NAME:max:X`, `NAME:min:X` or `NAME:keep:SHARE`.

        >>> guard = Guard.parse("english:max:1.25")
        >>> guard.broken({"english": 1.31}), round(guard.slack({"english": 1.31}), 6)
        (['english is 1.31, above 1.25'], 0.06)
        """
        name, kind, bound = ([part.strip() for part in text.rsplit(":", 2)] + ["", ""])[:3]
        try:
            number = float(bound)
        except ValueError:
            number = math.nan
        wrong = ""
        if not name or kind not in _KINDS:
            wrong = f"{kind!r} is not a kind of guard{did_you_mean(kind, _KINDS)}"
        elif not math.isfinite(number) or (kind == "keep" and number < 0):
            wrong = f"the bound {bound!r} must be a finite number"
            wrong += ", not below 0" if kind == "keep" else ""
        if wrong:
            raise RecipeError(f"guard {text!r}: {wrong}; write NAME:max:X, :min:X or :keep:SHARE")
        return cls(text.strip(), name, kind, number, objective or Objective())

    def check(self, names: Iterable[str]) -> None:
        """Refuse if it bounds a score that an evaluator does not give."""
        if self.name != "*":
            _check_name(self.name, names, f"guard {self.text!r}")

    def directions(self, names: Iterable[str]) -> dict[str, int]:
        """Return 1 for each score that it bounds from below, -1 from above."""
        of_objective = self.objective.directions(names)
        bounded = [self.name] if self.name != "*" else list(of_objective)
        if self.kind != "keep":
            return dict.fromkeys(bounded, 1 if self.kind == "min" else -1)
        return {name: of_objective.get(name, 1) for name in bounded}

    def broken(self, scores: Scores, singles: Sequence[Scores] = ()) -> list[str]:
        """Return a sentence for each score that breaks it."""
        found = []
        for name, limit, best, sign in self._limits(scores, singles):
            if sign * (limit - scores[name]) > 0:
                for digits in range(4, 17):  # as many as tell them apart
                    shown, bound = f"{scores[name]:.{digits}g}", f"{limit:.{digits}g}"
                    if shown != bound:
                        break
                kept = f" (to keep {self.bound:.4g} of the best single model's {best:.4g})"
                side = "below" if sign > 0 else "above"
                more = kept if self.kind == "keep" else ""
                found.append(f"{name} is {shown}, {side} {bound}{more}")
        return found

    def slack(self, scores: Scores, singles: Sequence[Scores] = ()) -> float:
        """Return by how much it is broken, at most; 0 or less if it is kept."""
        limits = self._limits(scores, singles)
        return max((sign * (limit - scores[name]) for name, limit, _, sign in limits), default=0.0)

    def is_judged(self, scores: Scores, singles: Sequence[Scores]) -> bool:
        """Tell if all its bounds are known: to keep a share, a single model must have the score."""
        return len(list(self._limits(scores, singles))) == len(self.directions(scores))

    def _limits(
        self, scores: Scores, singles: Sequence[Scores]
    ) -> Iterator[tuple[str, float, float, int]]:
        """Yield name, limit, the best of the single models, and 1 for a limit from below."""
        self.check(scores)
        for name, sign in self.directions(scores).items():
            if self.kind != "keep":
                yield name, self.bound, math.nan, sign
            elif reached := [single[name] for single in singles if name in single]:
                best = sign * max(sign * value for value in reached)
                # A share of a negative score, or of an error, would ask for more than the best.
                yield name, best - sign * (1 - self.bound) * abs(best), best, sign


# ------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Entry:
    """The scored trials of a setting with its seeds, or of a baseline."""

    trials: tuple[Trial, ...]
    name: str = ""  # the name of a baseline
    is_random: bool = True
    """True if another seed would give other weights; if not, one trial is all there is."""

    @property
    def scored(self) -> tuple[Scored, ...]:
        return tuple(trial.scored for trial in self.trials if trial.scored is not None)

    @property
    def scores(self) -> dict[str, float]:
        """The means over the seeds, of the scores that all have."""
        scores = [scored.scores for scored in self.scored]
        names = [n for n in scores[0] if all(n in given for given in scores)]
        return {n: math.fsum(given[n] for given in scores) / len(scores) for n in names}


@dataclass(frozen=True)
class Judge:
    """The demands on merges in a study."""

    objective: Objective
    guards: tuple[Guard, ...]
    recipe: Recipe | None = None
    """None if it cannot be read here, as when a stage of its own is missing."""

    @classmethod
    def of(cls, data: StudyData) -> Judge:
        document = {key: value for key, value in data.recipe.items() if key != "search"}
        try:
            recipe = recipe_from_document(document, "the study's recipe")
        except RecipeError:
            recipe = None
        return cls.by(data.objective, data.guards, recipe)

    @classmethod
    def by(
        cls, weights: Mapping[str, float], guards: Iterable[str], recipe: Recipe | None = None
    ) -> Judge:
        objective = Objective(weights)
        return cls(objective, tuple(Guard.parse(text, objective) for text in guards), recipe)

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
        found: dict[str, int] = {}
        for guard in self.guards:
            found |= {n: sign for n, sign in guard.directions(names).items() if n in names}
        return found | self.objective.directions(names)

    def with_settings(self, settings: Settings) -> Recipe | None:
        """Return the recipe of a setting, if it can be had."""
        try:
            return with_settings(self.recipe, settings) if self.recipe else None
        except RecipeError:
            return None

    def is_random(self, settings: Settings) -> bool:
        """Tell if another seed gives other weights; assumed if that is not known."""
        recipe = self.with_settings(settings)
        return recipe is None or is_random(recipe)

    def ranked(self, entry: Entry, value: Estimate, singles: Sequence[Scores]) -> Ranked:
        """Return an entry with its objective, and the guards that its mean scores break."""
        return Ranked(
            settings={} if entry.name else dict(entry.trials[0].settings),
            trials=tuple(trial.number for trial in entry.trials),
            objective=value,
            scores=entry.scores,
            broken=self.broken(entry.scores, singles),
            baseline=entry.name,
        )

    def entries(self, trials: Iterable[Trial]) -> list[Entry]:
        """Put done trials together by name or setting, but for the one that tells the noise."""
        found: dict[str, tuple[Trial, ...]] = {}
        for trial in trials:
            if trial.is_done and trial.scored is not None and trial.role is not Role.AGAIN:
                key = trial.name or key_of(trial.settings)
                found[key] = (*found.get(key, ()), trial)
        return [Entry(same, same[0].name, self._draws(same[0])) for same in found.values()]

    def _draws(self, trial: Trial) -> bool:
        """Tell if another seed gives other weights; of plain baselines, only recipes may draw."""
        if trial.name and not trial.settings:
            return trial.role in (Role.ADVICE, Role.RECIPE)
        return self.is_random(trial.settings)

    def simplest_first(self, best: Ranked, tied: Sequence[Ranked]) -> list[Ranked]:
        """Sort by what they need: a plain merge, then few stages, no randomness, few changes."""
        merges = [best, *(r for r in tied if r.role in (Role.SETTING, *_PLAIN))]
        return sorted(merges, key=lambda one: (self._complexity(one), -one.objective.value))

    def _complexity(self, ranked: Ranked) -> tuple[int, int, bool, int]:
        if ranked.baseline:
            return 0, 0, False, 0
        recipe = self.with_settings(ranked.settings)
        if recipe is None:
            stages = len(str(ranked.settings.get("method", "")).split("+"))
            return 1, stages, True, sum(map(_count, ranked.settings.values()))
        return 1, len(recipe.chain), is_random(recipe), self._changes(ranked.settings)

    def _changes(self, settings: Settings) -> int:
        """Count settings that differ in effect from the recipe's; each layer's value counts."""
        method = {name: value for name, value in settings.items() if name == "method"}
        start, changes = self.with_settings(method), 0
        if start is not None and self.recipe is not None:
            before, now = ([s.name for s, _ in r.chain] for r in (self.recipe, start))
            changes = int(before != now)
        for name, value in settings.items():
            if name != "method":
                changed = self.with_settings({**method, name: value})
                differs = changed is None or start is None or _effect(changed) != _effect(start)
                changes += _count(value) if differs else 0
        return changes


def _effect(recipe: Recipe) -> tuple[Any, ...]:
    return (
        [(stage.name, dict(settings)) for stage, settings in recipe.chain],
        [entry.settings for entry in recipe.models],
        (recipe.weights(), recipe.seeds()),
        (recipe.scale, recipe.embedding_drop_rate),
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple) else 1
