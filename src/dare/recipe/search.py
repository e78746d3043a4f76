"""The table `[search]`: the settings over which a recipe is searched, and the objective.

    [search]
    eval = "score.py:score"
    objective = { math = 1.0, loss = -0.5 }

    [search.over]
    drop_rate = [0.8, 0.85, 0.9, 0.95]
    "weight.math" = { from = 0.0, to = 1.0, layers = 3 }

A merge leaves it aside. The objective is the weighted mean of scores, each with a weight that is
negative where less is better. A guard is a bound on a score: `english:max:1.25`, `add:min:0.5`,
`*:keep:0.95`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Annotated, Any, Literal, cast

import numpy as np

from dare.documents.values import Before, Finite
from dare.errors import RecipeError, did_you_mean
from dare.recipe.entries import as_tuple
from dare.recipe.fields import Strict, described

Scores = Mapping[str, float]
Sampler = Literal["grid", "random", "tpe"]
# Texts that earlier versions read as a formula; no score has such a name.
_FORMULA = re.compile(r"^-|[()+*]|\s[-/]\s|^(mean|min|max)?$")
_KINDS = ("max", "min", "keep")


class Range(Strict):
    """All numbers from one to another."""

    start: Finite = described("The smallest value.", key="from")
    to: Finite = described("The largest value.")
    log: bool = described("Whether to search on a logarithmic scale.", False)
    step: Finite | None = described("The step between values.", None, gt=0)
    layers: int | None = described(
        "Number of values from the first layer to the last.", None, ge=2, le=16
    )

    def check_together(self) -> None:
        wrong = ""
        if self.start >= self.to:
            wrong = "the range is empty; `from` must be below `to`"
        elif self.log and (self.start <= 0 or self.step is not None):
            wrong = "log needs a range above zero, and no step"
        if wrong:
            raise RecipeError(f"from = {self.start:g}, to = {self.to:g}: {wrong}")

    @property
    def values(self) -> tuple[float, ...] | None:
        """All its values, if it has a step."""
        if self.step is None:
            return None
        count = math.floor((self.to - self.start) / self.step + 1e-9) + 1
        return tuple(self.fitted(self.start + place * self.step) for place in range(count))

    def fitted(self, value: float) -> float:
        """Return a value as settings have it: whole if the start and the step are."""
        if self.step is None:
            return value
        is_whole = self.start.is_integer() and self.step.is_integer()
        return round(value) if is_whole else round(value, 12)


Choices = tuple[Any, ...]  # values to choose from: numbers, texts, or lists over the layers


def _over(value: object) -> object:
    if not isinstance(value, Mapping):
        raise RecipeError("over: must be a table, as in [search.over]")
    return {name: _dimension(name, dimension) for name, dimension in value.items()}


def _dimension(name: str, value: object) -> Choices | Range:
    try:
        if isinstance(value, Range | Mapping):
            return value if isinstance(value, Range) else Range(**value)
        if not isinstance(value, list | tuple) or not value:
            raise RecipeError(f"{value!r}: must be a list of values, or {{ from = …, to = … }}")
        if len({repr(choice) for choice in value}) < len(value):
            raise RecipeError(f"{list(value)}: has the same value twice")
    except RecipeError as error:
        raise RecipeError(f"over {name} = {error}") from None
    return tuple(value)


def _weights(value: Any) -> Any:
    """Read a name, names with or without `=WEIGHT`, or a table of weights."""
    if isinstance(value, Mapping):
        return value
    weights: dict[str, float] = {}
    for text in cast("Iterable[Any]", as_tuple(value)):
        name, equals, weight = str(text).strip().rpartition("=")
        if not equals and _FORMULA.search(weight):
            remedy = "write { math = 1.0, loss = -0.5 }, or leave it out for the mean of all scores"
            raise RecipeError(f"objective {text!r}: formulas are no longer read; {remedy}")
        try:
            weights[name if equals else weight] = float(weight) if equals else 1.0
        except ValueError:
            raise RecipeError(f"objective {text!r}: {weight!r} is not a number") from None
    return weights


def _files(value: Any) -> object:
    return (str(value),) if isinstance(value, str | PathLike) else tuple(map(str, value))


class Search(Strict):
    """The settings that a search tries, and its objective."""

    over: Annotated[dict[str, Choices | Range], Before(_over)] = described(
        "By setting: a list of values, or a range.", {}
    )
    sampler: Sampler | None = described(
        "How settings are chosen; grid if all are lists, else tpe.", None
    )
    trials: int | None = described(
        "How many candidates to score: 40 by default, all in a grid.", None, gt=0
    )
    seeds: int = described("How many seeds each setting is tried with.", 1, gt=0, le=1000)
    data: Annotated[tuple[str, ...], Before(_files)] = described(
        "Files of examples, one for each task: JSONL, CSV or Parquet.", ()
    )
    minutes: Finite | None = described(
        "About how long to search; 15 where no settings are given.", None, gt=0
    )
    eval: str | None = described("What scores a candidate, in place of examples.", None)
    holdout: str | None = described("Scores the winner once, on other data.", None)
    objective: Annotated[dict[str, Finite], Before(_weights)] = described(
        "The weight of each score; larger is better.", {}
    )
    guards: Annotated[tuple[str, ...], Before(as_tuple)] = described(
        "Conditions on scores, such as english:max:1.25 or *:keep:0.95.", ()
    )
    race: bool = described("Stop bad candidates early, after part of the items.", False)
    time_limit: Finite | None = described("Seconds that one scoring may take.", None, gt=0)


def search_table(value: object) -> object:
    """Read the table; errors in it begin with its name."""
    if value is None or isinstance(value, Search):
        return value
    try:
        if not isinstance(value, Mapping):
            raise RecipeError("must be a table")
        return Search(**value)
    except RecipeError as error:
        raise RecipeError(f"[search] {error}") from None


# ---------------------------------------------------------------- what is asked of scores


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
        return float(self.values(scores))

    def values(self, scores: Mapping[str, Any]) -> np.ndarray:
        """Return the objective of many at once: arrays of one shape give one of that shape."""
        shares = self.shares(scores)
        parts = (share * np.asarray(scores[name], np.float64) for name, share in shares.items())
        return np.asarray(sum(parts), np.float64)  # of floats, Python 3.12 adds up otherwise

    def bounds(self, scores: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        """Return the least and the largest value that it can have, by those of all scores."""
        ends = [[share * e for e in scores[n]] for n, share in self.shares(scores).items()]
        return math.fsum(map(min, ends)), math.fsum(map(max, ends))

    def directions(self, names: Iterable[str]) -> dict[str, int]:
        """Return 1 for scores that should be large, -1 for small ones; others are left out."""
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
    # It tells which scores `*` stands for, and which are the better the smaller.
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
