"""The demands on scores: an objective and guards, which a judge applies.

The objective is the weighted mean of scores; a weight is negative if less is better. A guard is a
bound on a score: `english:max:1.25`, `add:min:0.5`, `*:keep:0.95`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dare.errors import RecipeError, did_you_mean

Scores = Mapping[str, float]
_KINDS = ("max", "min", "keep")


def _check_name(name: str, known: Iterable[str], where: str) -> None:
    """Refuse a score that an evaluator does not give."""
    names = list(known)
    if name not in names:
        given = ", ".join(names) or "no scores"
        hint = f"{did_you_mean(name, names)}; the evaluator gives {given}"
        raise RecipeError(f"{where}: there is no score {name!r}{hint}")


@dataclass(frozen=True)
class Objective:
    """The weighted mean of scores; the larger its value, the better.

    >>> Objective({"add": 1.0, "loss": -1.0}).value({"add": 1.0, "loss": 0.5, "other": 9.0})
    0.25
    """

    # By score; if there are none, all scores count the same.
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a weight that is zero or not finite."""
        for name, weight in self.weights.items():
            if not name or not weight or not math.isfinite(weight):
                raise RecipeError(f"objective {name!r}: {weight:g} is not a weight; leave it out")

    def shares(self, scores: Iterable[str]) -> dict[str, float]:
        """Return the share of each score; their absolute values add up to 1."""
        names = list(scores)
        for name in self.weights:
            _check_name(name, names, f"objective {name!r}")
        weights = self.weights or dict.fromkeys(names, 1.0)
        total = math.fsum(map(abs, weights.values()))
        return {name: weight / total for name, weight in weights.items()}

    def value(self, scores: Mapping[str, float]) -> float:
        return float(self.values(scores))

    def values(self, scores: Mapping[str, Any]) -> np.ndarray:
        """Return the objective of many at once: arrays of one shape give one of that shape."""
        shares = self.shares(scores)
        parts = (share * np.asarray(scores[name], np.float64) for name, share in shares.items())
        return np.asarray(sum(parts), np.float64)  # plain floats add up differently in Python 3.12

    def bounds(self, scores: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        """Return the least and the largest possible value, from those of all scores."""
        ends = [[share * e for e in scores[n]] for n, share in self.shares(scores).items()]
        return math.fsum(map(min, ends)), math.fsum(map(max, ends))

    def directions(self, names: Iterable[str]) -> dict[str, int]:
        """Return 1 for scores that should be large, -1 for those that should be small.

        Other scores are left out.
        """
        known = list(names)
        signs = {name: int(math.copysign(1, weight)) for name, weight in self.weights.items()}
        return {n: signs.get(n, 1) for n in known if n in signs or not signs}


@dataclass(frozen=True)
class Guard:
    """A bound on a score, which a merge must keep to be taken at all."""

    text: str
    name: str  # the score's name; `*` for each score of the objective
    kind: str  # `max`, `min`, or `keep`: a share of the best that a single model has
    bound: float
    # It decides which scores `*` means, and for which of them less is better.
    objective: Objective = field(default_factory=Objective)

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
        """Refuse a bound on a score that an evaluator does not give."""
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
        sentences = []
        for name, limit, best, sign in self._limits(scores, singles):
            if sign * (limit - scores[name]) > 0:
                for digits in range(4, 17):  # until the two numbers look different
                    shown, bound = f"{scores[name]:.{digits}g}", f"{limit:.{digits}g}"
                    if shown != bound:
                        break
                kept = f" (to keep {self.bound:.4g} of the best single model's {best:.4g})"
                side = "below" if sign > 0 else "above"
                more = kept if self.kind == "keep" else ""
                sentences.append(f"{name} is {shown}, {side} {bound}{more}")
        return sentences

    def slack(self, scores: Scores, singles: Sequence[Scores] = ()) -> float:
        """Return by how much it is broken, at worst; 0 or less if it is kept."""
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
        """Refuse an objective or a guard that asks for missing scores."""
        names = list(scores)
        self.objective.shares(names)
        for guard in self.guards:
            guard.check(names)

    def broken(self, scores: Scores, singles: Sequence[Scores]) -> tuple[str, ...]:
        """Return a sentence for each guard that is broken."""
        return tuple(line for guard in self.guards for line in guard.broken(scores, singles))

    def directions(self, names: Sequence[str]) -> dict[str, int]:
        """Return 1 for scores where more is better, -1 for less; others are left out."""
        bounds = [pair for guard in self.guards for pair in guard.directions(names).items()]
        of_guards = {name: sign for name, sign in bounds if name in names}
        return of_guards | self.objective.directions(names)
