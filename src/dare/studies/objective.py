"""What is to be large, and what must not be given up for it: objectives and guards.

An objective is a formula over the scores: `mean`, `min`, a score's name, `-english`,
`mean(add, sort)`, `add + 0.5*sort - english`. It is read as a tree and turned into sums; no text
is ever run. A guard is a bound on a score: `english:max:1.25`, `add:min:0.5`, `*:keep:0.95`.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dare.errors import RecipeError, did_you_mean

_LONGEST = 4000
_DEEPEST = 200
_EXAMPLES = "mean, min(add, sort), -loss, add + 0.5*sort, 'arc-easy'"
_KINDS = ("max", "min", "keep")
_SMALLER_IS_BETTER = {"loss", "perplexity", "ppl", "bits", "bpb", "error", "err", "nll", "wer"}


def _mean(values: Sequence[Any]) -> Any:
    return functools.reduce(np.add, values) / len(values)


_FOLDS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": _mean,
    "min": functools.partial(functools.reduce, np.minimum),
    "max": functools.partial(functools.reduce, np.maximum),
}


@dataclass(frozen=True)
class _Score:
    name: str


@dataclass(frozen=True)
class _Fold:
    """The mean, least or largest of some sums; of all scores, if there are none."""

    kind: str
    parts: tuple[_Sum, ...]


@dataclass(frozen=True)
class _Sum:
    """A number plus scores and folds, each times a number."""

    constant: float
    terms: tuple[tuple[_Score | _Fold, float], ...] = ()

    def times(self, factor: float) -> _Sum:
        return _Sum(self.constant * factor, tuple((atom, c * factor) for atom, c in self.terms))

    def plus(self, other: _Sum) -> _Sum:
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0.0) + factor
        return _Sum(self.constant + other.constant, tuple(factors.items()))

    def value(self, scores: Mapping[str, Any]) -> Any:
        return sum((factor * _value(atom, scores) for atom, factor in self.terms), self.constant)

    def bounds(self, scores: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        """The least and the largest value, by those of the scores."""
        low = high = self.constant
        for atom, factor in self.terms:
            ends = [factor * end for end in _bounds(atom, scores)] if factor else [0.0]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def scores(self, all_names: Sequence[str], factor: float = 1.0) -> Iterator[tuple[str, float]]:
        """Each score that counts, with the sign of its effect in that place."""
        for atom, own in self.terms:
            match atom:
                case _Score(name):
                    yield name, factor * own
                case _Fold(_, ()):
                    yield from ((name, factor * own) for name in all_names)
                case _Fold(_, parts):
                    for part in parts:
                        yield from part.scores(all_names, factor * own)


def _value(atom: _Score | _Fold, scores: Mapping[str, Any]) -> Any:
    if isinstance(atom, _Score):
        return scores[atom.name]
    parts = [part.value(scores) for part in atom.parts] or list(scores.values())
    return _FOLDS[atom.kind](parts)


def _bounds(atom: _Score | _Fold, scores: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    if isinstance(atom, _Score):
        return scores[atom.name]
    parts = [part.bounds(scores) for part in atom.parts] or list(scores.values())
    low, high = (float(_FOLDS[atom.kind](ends)) for ends in zip(*parts, strict=True))
    return low, high


@dataclass(frozen=True)
class Objective:
    """A formula over the scores; the larger its value, the better."""

    text: str
    _formula: _Sum = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read a formula.

        >>> objective = Objective.parse("mean(add, sort) - 0.5*english")
        >>> objective.value({"add": 1.0, "sort": 0.5, "english": 1.5}), objective.names
        (0.0, ('add', 'sort', 'english'))
        """
        formula = _sum_of(_parsed(text), text)
        if not any(factor for _, factor in formula.scores([""])):
            raise _refusal(text, "it uses no score")
        return cls(text.strip(), formula)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The scores that it uses, in the order of the text; None: all that there are."""
        everything = ""  # which no score is called: `_sum_of` refuses it
        names = tuple(dict.fromkeys(name for name, _ in self._formula.scores([everything])))
        return None if everything in names else names

    def check(self, names: Iterable[str]) -> None:
        """Refuse if it uses a score that an evaluator does not give."""
        known = list(names)
        if not known:
            raise RecipeError(f"objective {self.text!r}: the evaluator gives no scores")
        for name in dict.fromkeys(name for name, _ in self._formula.scores([])):
            if name not in known:
                raise RecipeError(
                    f"objective {self.text!r}: there is no score {name!r}"
                    f"{_quoting(name, known) or did_you_mean(name, known)}; "
                    f"the evaluator gives {', '.join(known)}"
                )

    def value(self, scores: Mapping[str, float]) -> float:
        """The objective of one candidate."""
        self.check(scores)
        return float(self._formula.value(scores))

    def values(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """The objective of many at once: the arrays must have one shape, which it has too."""
        self.check(scores)
        return np.asarray(self._formula.value(scores), dtype=np.float64)

    def bounds(self, scores: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        """The least and the largest value that it can have, by those of all scores.

        >>> Objective.parse("mean - 2*add").bounds({"add": (0, 1), "sort": (0, 1)})
        (-2.0, 1.0)
        """
        self.check(scores)
        return self._formula.bounds(scores)

    def directions(self, names: Iterable[str]) -> dict[str, int]:
        """1 for scores that should be large, -1 for small ones; others are left out.

        >>> Objective.parse("min(add, sort) - english").directions(["add", "english", "other"])
        {'add': 1, 'english': -1}
        """
        known = list(names)
        signs: dict[str, set[float]] = {}
        for name, factor in self._formula.scores(known):
            signs.setdefault(name, set()).add(math.copysign(1.0, factor) if factor else 0.0)
        return {n: int(*signs[n]) for n in known if signs.get(n) in ({1.0}, {-1.0})}


def _quoting(name: str, known: Iterable[str]) -> str:
    """What to write for a name that was taken for a difference or a quotient."""
    longer = [other for other in known if re.match(re.escape(name) + r"[^\w]", other)]
    return f" (write '{longer[0]}' in quotes)" if longer else ""


def _refusal(text: str, reason: str) -> RecipeError:
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    return RecipeError(f"objective {shown!r}: {reason}; examples: {_EXAMPLES}")


def _parsed(text: str) -> ast.expr:
    if not text.strip():
        raise _refusal(text, "it is empty")
    if len(text) > _LONGEST:
        raise _refusal(text, f"it has {len(text)} characters, more than {_LONGEST}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _refusal(
            text, "it is not a formula (a name with other characters needs quotes)"
        ) from None


def _sum_of(node: ast.expr, text: str, depth: int = 0) -> _Sum:
    """A part of the tree as a sum; what is neither is refused."""
    if depth > _DEEPEST:
        raise _refusal(text, f"it is nested more than {_DEEPEST} deep")
    inner = functools.partial(_sum_of, text=text, depth=depth + 1)
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _Sum(_finite(number, text))
        case ast.Constant(value=str() as name) if name:
            return _Sum(0.0, ((_Score(name), 1.0),))
        case ast.Name(id=name):
            atom = _Fold(name, ()) if name in _FOLDS else _Score(name)
            return _Sum(0.0, ((atom, 1.0),))
        case ast.Attribute() if re.fullmatch(r"[\w.]+", _source(node)):
            return _Sum(0.0, ((_Score(ast.unparse(node)), 1.0),))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return inner(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return inner(operand).times(-1.0)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _checked(inner(left).plus(inner(right)), text)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _checked(inner(left).plus(inner(right).times(-1.0)), text)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right):
            return _checked(_scaled(inner(left), op, inner(right), text), text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FOLDS and args:
            return _Sum(0.0, ((_Fold(name, tuple(map(inner, args))), 1.0),))
        case ast.Call(func=ast.Name(id=name)) if name in _FOLDS:
            raise _refusal(
                text,
                f"{name} is written with scores in brackets, or without brackets for all scores",
            )
        case ast.Call(func=function):
            shown = ast.unparse(function)
            raise _refusal(
                text,
                f"there is no function {shown}{did_you_mean(shown, _FOLDS)}, "
                f"only {', '.join(_FOLDS)}",
            )
    raise _refusal(text, f"{_source(node)} is not a score, a number, or + - * / of them")


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "a part of it"


def _scaled(left: _Sum, op: ast.operator, right: _Sum, text: str) -> _Sum:
    if isinstance(op, ast.Div):
        if right.terms:
            raise _refusal(
                text, "a score can be divided by a number only (a name with a slash needs quotes)"
            )
        if right.constant == 0:
            raise _refusal(text, "it divides by zero")
        return left.times(1.0 / right.constant)
    if left.terms and right.terms:
        raise _refusal(text, "a score can be multiplied by a number only")
    return left.times(right.constant) if left.terms else right.times(left.constant)


def _finite(number: float, text: str) -> float:
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise _refusal(text, "a number in it is too large")
    return value


def _checked(total: _Sum, text: str) -> _Sum:
    for number in (total.constant, *(factor for _, factor in total.terms)):
        _finite(number, text)
    return total


def doubts(objective: Objective, names: Iterable[str], guards: Sequence[Guard] = ()) -> list[str]:
    """What looks like a mistake: scores that count as better when they grow, and should not."""
    known = list(names)
    bounded = {guard.name for guard in guards if guard.kind == "max"}
    return [
        f"In the objective {objective.text!r} a larger {name} is better, but "
        + ("a guard sets its maximum" if name in bounded else "its name is that of an error")
        + f"; if smaller is better, write -{name if name.isidentifier() else repr(name)}."
        for name, sign in objective.directions(known).items()
        if sign > 0 and (name in bounded or sounds_like_an_error(name))
    ]


def sounds_like_an_error(name: str) -> bool:
    """Whether a score is called like something that has no upper end, and should be small."""
    return not _SMALLER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


# ------------------------------------------------------------------------------------- guards


@dataclass(frozen=True)
class Guard:
    """A bound on a score, which a merge must keep to be taken at all."""

    text: str
    name: str
    """Of a score; `*` for each score of the objective."""
    kind: str
    """`max`, `min`, or `keep`: a share of the best that a single model has."""
    bound: float
    objective: Objective | None = None
    """It tells which scores `*` stands for, and which are the better the smaller."""

    @classmethod
    def parse(cls, text: str, objective: Objective | None = None) -> Guard:
        """Read `NAME:max:X`, `NAME:min:X` or `NAME:keep:SHARE`.

        >>> guard = Guard.parse("english:max:1.25")
        >>> guard.broken({"english": 1.31}), round(guard.slack({"english": 1.31}), 6)
        (['english is 1.31, above 1.25'], 0.06)
        """
        name, kind, bound = ([part.strip() for part in text.rsplit(":", 2)] + ["", ""])[:3]
        where = f"guard {text!r}"
        if not name or not kind or not bound:
            raise RecipeError(f"{where}: write NAME:max:X, NAME:min:X or NAME:keep:SHARE")
        if kind not in _KINDS:
            raise RecipeError(
                f"{where}: {kind!r} is not a kind of guard{did_you_mean(kind, _KINDS)}; "
                f"there are {', '.join(_KINDS)}"
            )
        try:
            number = float(bound)
        except ValueError:
            raise RecipeError(f"{where}: {bound!r} is not a number") from None
        if not math.isfinite(number):
            raise RecipeError(f"{where}: the bound must be a finite number, not {bound}")
        if kind == "keep" and number < 0:
            raise RecipeError(f"{where}: a share to keep must not be negative; an example is 0.95")
        return cls(text.strip(), name, kind, number, objective)

    def check(self, names: Iterable[str]) -> None:
        """Refuse if it bounds a score that an evaluator does not give."""
        known = list(names)
        if self.name != "*" and self.name not in known:
            raise RecipeError(
                f"guard {self.text!r}: there is no score {self.name!r}"
                f"{did_you_mean(self.name, known)}; the evaluator gives {', '.join(known)}"
            )

    def directions(self, names: Iterable[str]) -> dict[str, int]:
        """The scores that it bounds: 1 where it bounds from below, -1 from above."""
        known = list(names)
        of_objective = self.objective.directions(known) if self.objective else {}
        bounded = [self.name] if self.name != "*" else (list(of_objective) or known)
        if self.kind != "keep":
            return dict.fromkeys(bounded, 1 if self.kind == "min" else -1)
        return {name: of_objective.get(name, 1) for name in bounded}

    def broken(
        self, scores: Mapping[str, float], singles: Sequence[Mapping[str, float]] = ()
    ) -> list[str]:
        """What it finds wrong, a sentence for each score; empty if all is well."""
        return [
            self._sentence(name, scores[name], limit, best, sign)
            for name, limit, best, sign in self._limits(scores, singles)
            if sign * (limit - scores[name]) > 0
        ]

    def slack(
        self, scores: Mapping[str, float], singles: Sequence[Mapping[str, float]] = ()
    ) -> float:
        """By how much it is broken, by the score where that is most; 0 or less if it is kept."""
        limits = list(self._limits(scores, singles))
        return max((sign * (limit - scores[name]) for name, limit, _, sign in limits), default=0.0)

    def is_judged(
        self, scores: Mapping[str, float], singles: Sequence[Mapping[str, float]]
    ) -> bool:
        """Whether all its bounds are known: to keep a share, a single model must have the score."""
        return len(list(self._limits(scores, singles))) == len(self.directions(scores))

    def _limits(
        self, scores: Mapping[str, float], singles: Sequence[Mapping[str, float]]
    ) -> Iterator[tuple[str, float, float, int]]:
        """Name, limit, the best of the single models, and 1 for a limit from below."""
        self.check(scores)
        for name, sign in self.directions(scores).items():
            if self.kind != "keep":
                yield name, self.bound, math.nan, sign
            elif reached := [single[name] for single in singles if name in single]:
                best = sign * max(sign * value for value in reached)
                # A share of a negative score, or of an error, would ask for more than the best.
                yield name, best - sign * (1 - self.bound) * abs(best), best, sign

    def _sentence(self, name: str, value: float, limit: float, best: float, sign: int) -> str:
        shown, shown_limit = _told_apart(value, limit)
        side = "below" if sign > 0 else "above"
        found = f"{name} is {shown}, {side} {shown_limit}"
        if self.kind == "keep":
            found += f" (to keep {self.bound:.4g} of the best single model's {best:.4g})"
        return found


def _told_apart(value: float, limit: float) -> tuple[str, str]:
    """Both with four digits, or as many as tell them apart."""
    for digits in range(4, 17):
        shown = f"{value:.{digits}g}", f"{limit:.{digits}g}"
        if shown[0] != shown[1]:
            break
    return shown


def directions_of(
    objective: Objective, guards: Iterable[Guard], names: Iterable[str]
) -> dict[str, int]:
    """For each score that the objective or a guard has a direction for: 1 if more is better."""
    known = list(names)
    found: dict[str, int] = {}
    for guard in guards:
        found |= {name: sign for name, sign in guard.directions(known).items() if name in known}
    return found | objective.directions(known)
