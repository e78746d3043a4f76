"""Two analyses, recipes or finished merges side by side: which is it to be?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dare.analysis.judge.judgement import Advice, Readiness
from dare.analysis.judge.prediction import OUTER, bounded_error, exposure_of
from dare.analysis.judge.readiness import chance_cancelled
from dare.analysis.page import words
from dare.analysis.page.outcome import ModelOutcome, Outcome
from dare.analysis.page.series import suggested_rates
from dare.analysis.results import Analysis, ModelAnalysis
from dare.errors import InputError
from dare.output.page.words import NOTHING, listed, share
from dare.recipe.schema import Recipe

MOST_PAIRS = 10
"""Pairs of models in the table: those that differ most come first."""
DROPPING = ("dare", "darex")
"""Stages whose error is predicted."""


@dataclass(frozen=True)
class Side:
    """One of the two: what was found about its models, and what it does or did with them."""

    name: str
    analysis: Analysis
    readiness: Readiness
    advice: Advice
    recipe: Recipe | None = None
    """What is, or was, to be merged; None: what is advised."""
    outcome: Outcome | None = None

    @property
    def method(self) -> str:
        """By which it merges."""
        if self.recipe is not None:
            return self.recipe.method
        return str(self.advice.recipe.get("method", NOTHING))

    def model(self, name: str) -> ModelAnalysis | None:
        """Its model of that name."""
        return next((model for model in self.analysis.models if model.name == name), None)

    def drop_rate(self, name: str) -> float | None:
        """The rate for a model, that of most of its elements; None: nothing is dropped."""
        if self.recipe is None:
            return suggested_rates(self.analysis, self.advice).get(name)
        if name not in self.analysis.names or not self._drops():
            return None
        sizes: dict[float, int] = {}
        model = self.analysis.model(name)
        for tensor in model.tensors:
            rate, _ = self._rate(tensor.name, self.analysis.names.index(name))
            sizes[rate] = sizes.get(rate, 0) + tensor.statistics.elements
        return max(sizes, key=sizes.__getitem__, default=None)

    def error(self, name: str) -> float | None:
        """What the error of a model's outputs stays under; None: nothing is dropped by chance."""
        rate = self.drop_rate(name)
        if rate is None:
            return None
        model, index = self.analysis.model(name), self.analysis.names.index(name)
        inner = [tensor for tensor in model.tensors if tensor.kind not in OUTER]
        squares, elements = 0.0, 0
        for tensor in inner or model.tensors:
            exposure = exposure_of(tensor)
            if math.isfinite(exposure.relative_norm):
                own, q = (rate, None) if self.recipe is None else self._rate(tensor.name, index)
                squares += exposure.elements * bounded_error(exposure, own, q) ** 2
                elements += exposure.elements
        return math.sqrt(squares / elements) if elements else 0.0

    def merged_error(self) -> float | None:
        """The same of the merge, all models together; None if that is not known."""
        if self.recipe is None:
            return self.advice.predicted_error if self.advice.recipe else None
        if not self._drops():
            return None
        errors = [self.error(name) or 0.0 for name in self.analysis.names]
        return math.hypot(*map(math.prod, zip(self._shares(), errors, strict=True)))

    def _drops(self) -> bool:
        return self.method.partition("+")[0] in DROPPING

    def _rate(self, tensor: str, index: int) -> tuple[float, float | None]:
        """Drop rate and q of the first stage, for a tensor of a model."""
        assert self.recipe is not None
        first, *_ = self.recipe.settings_for(tensor, index)
        return first["drop_rate"], first.get("q")

    def _shares(self) -> list[float]:
        """How much of each model's error is in the merge; elsewhere weights only decide votes."""
        assert self.recipe is not None
        if self.method.rpartition("+")[2] not in ("linear", "sum"):
            return [abs(self.recipe.scale)] * len(self.recipe.models)
        weights = (max(map(abs, w)) if isinstance(w, list) else w for w in self.recipe.weights())
        return [abs(self.recipe.scale * weight) for weight in weights]


@dataclass(frozen=True)
class Compared:
    """One quantity of both."""

    quantity: str
    first: str
    second: str
    difference: str
    """Empty if there is none that counts."""


Groups = dict[str, list[Compared]]
"""By title."""


def compare(first: Side, second: Side) -> Groups:
    """What both have, side by side; refused if they have no model in common."""
    if not set(first.analysis.names) & set(second.analysis.names):
        raise InputError(
            f"{first.name} has the models {listed(first.analysis.names)}, {second.name} has "
            f"{listed(second.analysis.names)}: name two that have a model in common"
        )
    groups = {
        "All together": list(_together(first, second)),
        "Each model": list(_models(first, second)),
        "Every two models": _pairs(first, second),
    }
    return {title: rows for title, rows in groups.items() if rows}


def _together(first: Side, second: Side) -> Iterator[Compared]:
    both = (first, second)
    yield _texts("verdict", *(words.headline(side.readiness) for side in both))
    yield _texts("method", *(side.method for side in both))
    yield _texts("models", *(f"{len(side.analysis.models)}" for side in both))
    yield _shares("predicted error", *(side.merged_error() for side in both))
    yield _shares("bound on it", *(side.advice.error_bound or None for side in both))
    if all(side.analysis.pairs for side in both):
        yield _shares("cancel if added up", *(side.analysis.together.cancelled for side in both))
        yield _shares("by chance about", *(chance_cancelled(s.analysis) for s in both))
    if all(side.outcome for side in both):
        counts = (f"{len(side.outcome.warnings)}" for side in both if side.outcome)
        yield _texts("warnings of the merge", *counts)


def _models(first: Side, second: Side) -> Iterator[Compared]:
    merged = [_outcomes(side) for side in (first, second)]
    for name in dict.fromkeys((*first.analysis.names, *second.analysis.names)):
        both = [side.model(name) for side in (first, second)]
        changes = [None if model is None else model.total.relative_norm for model in both]
        yield _shares(f"{name}: change", *changes)
        yield _numbers(f"{name}: drop rate", first.drop_rate(name), second.drop_rate(name))
        yield _shares(f"{name}: error, at most", first.error(name), second.error(name))
        if all(name in models for models in merged):
            left = [list(models[name].kept.values()) for models in merged]
            yield _shares(f"{name}: kept", *(kept[-1] if kept else 1.0 for kept in left))
            yield _shares(f"{name}: survived", *(survival(s).get(name) for s in (first, second)))


def _outcomes(side: Side) -> Mapping[str, ModelOutcome]:
    return {model.name: model for model in side.outcome.models} if side.outcome else {}


def survival(side: Side) -> dict[str, float]:
    """How much of each model's delta is in the merged one."""
    return {pair.first: pair.ratio for pair in side.outcome.survival} if side.outcome else {}


def _pairs(first: Side, second: Side) -> list[Compared]:
    cosines = [
        {(pair.first, pair.second): pair.total.cosine for pair in side.analysis.pairs}
        for side in (first, second)
    ]
    common = [two for two in cosines[0] if two in cosines[1]]
    common.sort(key=lambda two: -abs(cosines[0][two] - cosines[1][two]))
    return [
        _compared(f"{' and '.join(two)}: cosine", cosines[0][two], cosines[1][two], words.cosine)
        for two in common[:MOST_PAIRS]
    ]


# ---------------------------------------------------------------- rows


def _texts(quantity: str, first: str, second: str) -> Compared:
    return Compared(quantity, first, second, "" if first == second else "differs")


def _shares(quantity: str, first: float | None, second: float | None) -> Compared:
    return _compared(quantity, first, second, share, lambda value: f"{100 * value:+.2g} points")


def _numbers(quantity: str, first: float | None, second: float | None) -> Compared:
    return _compared(quantity, first, second, lambda value: f"{value:g}")


def _compared(
    quantity: str,
    first: float | None,
    second: float | None,
    shown: Callable[[float], str],
    shown_difference: Callable[[float], str] = lambda value: f"{value:+.2g}",
) -> Compared:
    """Two numbers; they differ if that can be seen."""
    one, other = (NOTHING if value is None else shown(value) for value in (first, second))
    if one == other:
        return Compared(quantity, one, other, "")
    if first is None or second is None or not math.isfinite(second - first):
        return Compared(quantity, one, other, "differs")
    return Compared(quantity, one, other, shown_difference(second - first))


def drawn_values(sides: Sequence[Side]) -> dict[str, list[tuple[str, str, float]]]:
    """By figure: side, model and value of what both have."""
    found: dict[str, list[tuple[str, str, float | None]]] = {
        "compared-survival": [(s.name, *item) for s in sides for item in survival(s).items()],
        "compared-error": [
            (s.name, name, s.error(name)) for s in sides for name in s.analysis.names
        ],
    }
    return {
        figure: [(side, name, value) for side, name, value in rows if value is not None]
        for figure, rows in found.items()
        if len({side for side, _, value in rows if value}) == len(sides)
    }
