"""Whether large deltas matter: only what is dropped at random can suffer from them.

Dropping replaces a change by a gamble that is right on average, whose noise is in proportion to the
change. How much that is to a layer depends on the size of the change relative to the base and on
the drop rate, not on |δ| alone. So a model is warned of if many of its elements exceed the recipe's
`delta_threshold` and, where matrices were looked at, the predicted error is above its bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dare.analysis.measure.glance import Change
from dare.errors import Concern, Notice, Strength
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan

FEW = 0.1
"""A share of large elements that is no reason to warn. In a Gaussian delta with so many above the
threshold, |δ| is on average half of the threshold."""
MOST = 0.5
"""The share from which a warning is strong: |δ| is then above the threshold on average too."""
MARGIN = 1.5
"""How many times its bound the error may be. It is predicted from parts of a few matrices, which
was seen to be off by up to a third from what all of a model comes to."""


class Part(NamedTuple):
    """One tensor of a model, as it came out of a merge."""

    tensor: TensorPlan
    over_threshold: int
    drop_rate: float
    """The share that random stages have dropped of it."""


def warn_of_large(
    plan: Plan, model: int, parts: Sequence[Part], peak: str, changes: Sequence[Change]
) -> Iterator[Notice]:
    """A notice, if a model's deltas are too large for what is dropped of them at random.

    `peak` says which is the largest, and `changes` are what was seen of the model's matrices.
    """
    gambled = [part for part in parts if part.drop_rate > 0]
    elements = sum(part.tensor.elements for part in gambled)
    over = sum(part.over_threshold for part in gambled)
    if not elements or over < FEW * elements:
        return
    rates = {part.tensor.name: part.drop_rate for part in gambled}
    seen = [change for change in changes if change.tensor.name in rates]
    advice = f"DARE works best where changes are small; {_remedy(plan)}"
    if _is_measured(seen):
        found = _consequence(plan, seen, rates)
        if found is None:
            return
        advice = found
    share = over / elements
    yield Notice(
        Concern.LARGE_DELTAS,
        f"{plan.model_names[model]}: |δ| exceeds {plan.recipe.delta_threshold:g} in {over:,} of "
        f"{elements:,} elements ({share:.2%}){peak}; {advice}",
        Strength.STRONG if share >= MOST else Strength.WARNING,
    )


def _is_measured(changes: Sequence[Change]) -> bool:
    return any(0 < c.relative_norm < math.inf and c.concentration for c in changes)


def _consequence(plan: Plan, changes: Sequence[Change], rates: dict[str, float]) -> str | None:
    """What dropping is predicted to do to a model's layers; None if that is within the bound."""
    from dare.analysis.judge.limits import limit
    from dare.analysis.judge.prediction import (
        Exposure,
        bounded_error,
        row_width,
        tolerated_drop_rate,
    )

    exposures = {
        change.tensor.name: Exposure(
            change.tensor.elements,
            change.relative_norm,
            row_width(change.tensor.elements, change.tensor.shape) / change.concentration,
        )
        for change in changes
        if change.concentration and math.isfinite(change.relative_norm)
    }
    elements = sum(exposure.elements for exposure in exposures.values())
    squares = sum(
        exposure.elements * bounded_error(exposure, rates[name]) ** 2
        for name, exposure in exposures.items()
    )
    error, bound = math.sqrt(squares / elements), limit("output_error")
    if error <= MARGIN * bound:
        return None
    dropped = sum(rates[name] * e.elements for name, e in exposures.items()) / elements
    tolerated = tolerated_drop_rate(exposures.values())
    return (
        f"dropping {dropped:.0%} at random is predicted to put an error of {error:.0%} on the "
        f"outputs of its layers, and {bound:.0%} is the bound; {_remedy(plan, tolerated)}"
    )


def _remedy(plan: Plan, tolerated: float | None = None) -> str:
    names = [stage.name for stage in plan.stages if stage.kind == "delta"]
    lower = "lower drop_rate" if tolerated is None else f"lower drop_rate to {tolerated:g}"
    leave = f"leave {' and '.join(names)} out of the method" if names else "use the whole model"
    return leave if tolerated == 0 else f"{lower}, or {leave}"
