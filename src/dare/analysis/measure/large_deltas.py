"""Whether large deltas matter: only what is dropped at random can suffer from them.

Dropping replaces a change by a gamble that is right on average, whose noise is in proportion to the
change. How much that is to a layer depends on the size of the change relative to the base and on
the drop rate, not on |δ| alone. So a model is warned of if many of its elements exceed the recipe's
`delta_threshold` and, where matrices were looked at, the predicted error is above its bound. Only
whoever sets another threshold is warned by that alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dare.analysis.judge.limits import limit
from dare.analysis.measure.glance import Change, Glance
from dare.errors import Concern, Notice, Strength
from dare.output.report import Report
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan

FEW = 0.1
"""A share of large elements that is no reason to warn. In a Gaussian delta with so many above the
threshold, |δ| is on average half of the threshold."""
MOST = 0.5
"""The share from which a warning is strong: |δ| is then above the threshold on average too."""
MARGIN = 1.5
"""How many times its bound the error may be. It is predicted from parts of a few matrices: of the
demonstration's models and others with normal, heavy-tailed and low-rank changes these gave 0.98 to
1.25 times the error that an analysis of the whole model gives."""


class Part(NamedTuple):
    """One tensor of a model, as it came out of a merge."""

    tensor: TensorPlan
    over_threshold: int
    drop_rate: float
    """The share that random stages have dropped of it."""


def with_size_warnings(plan: Plan, report: Report, seen: Glance) -> Report:
    """The report with a notice for each model whose deltas are too large for random dropping.

    `seen` is what a glance showed of the models' matrices.
    """
    notices = [
        notice
        for model, changes in enumerate(seen.changes)
        for notice in _size_warnings(plan, report, model, changes)
    ]
    return replace(report, warnings=(*report.warnings, *notices))


def _size_warnings(
    plan: Plan, report: Report, model: int, changes: Sequence[Change]
) -> Iterator[Notice]:
    gambled = [part for part in _parts(plan, report, model) if part.drop_rate > 0]
    elements = sum(part.tensor.elements for part in gambled)
    over = sum(part.over_threshold for part in gambled)
    if not elements or over < FEW * elements:
        return
    rates = {part.tensor.name: part.drop_rate for part in gambled}
    seen = [change for change in changes if change.tensor.name in rates and _is_measured(change)]
    reason = "DARE works best where changes are small"
    bound = limit("output_error")
    is_borne = bool(seen) and _predicted_error(seen, rates) <= MARGIN * bound
    if is_borne and plan.recipe.has_default_threshold:
        return
    if seen and not is_borne:
        dropped = sum(part.drop_rate * part.tensor.elements for part in gambled) / elements
        reason = (
            f"relative to the base these changes are too large to drop {dropped:.0%} of them at "
            f"random: the predicted error of its layers' outputs is above the bound of {bound:.0%}"
        )
    draws = gambled[0].tensor.draws_of(plan.stages, model)
    names = [s.name for s, draw in zip(plan.stages, draws, strict=False) if draw is not None]
    leave = f", or leave {' and '.join(names)} out of the method" if names else ""
    share, figures = over / elements, report.models[model]
    yield Notice(
        Concern.LARGE_DELTAS,
        f"{plan.model_names[model]}: |δ| exceeds {plan.recipe.delta_threshold:g} in {over:,} of "
        f"{elements:,} elements ({share:.2%}), and reaches {figures.largest_delta:.3g} in "
        f"{figures.largest_delta_in}; {reason}. Lower drop_rate (`dare advise` finds one that "
        f"fits){leave}",
        Strength.STRONG if share >= MOST and not is_borne else Strength.WARNING,
    )


def _parts(plan: Plan, report: Report, model: int) -> Iterator[Part]:
    for tensor, figures in zip(plan.merged(), report.tensors, strict=True):
        if model in tensor.models:
            place = tensor.models.index(model)
            rate = _random_rate(plan, tensor, model, figures.survivors[place])
            yield Part(tensor, figures.over_threshold[place], rate)


def _random_rate(plan: Plan, tensor: TensorPlan, model: int, survivors: Sequence[int]) -> float:
    """The share of a model's tensor that was dropped at random, by what survived each stage."""
    drop = tensor.drop_of(model)
    kept = 1.0 if drop is None else 1.0 - drop.rate
    counts = (tensor.elements, *survivors)
    for position, draw in enumerate(tensor.draws_of(plan.stages, model)):
        if draw is not None and counts[position]:
            kept *= counts[position + 1] / counts[position]
    return 1.0 - kept


def _is_measured(change: Change) -> bool:
    return change.concentration > 0 and math.isfinite(change.relative_norm)


def _predicted_error(changes: Sequence[Change], rates: Mapping[str, float]) -> float:
    """What the error of a model's outputs is predicted to be, at the rates of its tensors."""
    from dare.analysis.judge.prediction import Exposure, bounded_error, row_width

    squares = 0.0
    for change in changes:
        tensor = change.tensor
        carriers = row_width(tensor.elements, tensor.shape) / change.concentration
        exposure = Exposure(tensor.elements, change.relative_norm, carriers)
        squares += tensor.elements * bounded_error(exposure, rates[tensor.name]) ** 2
    return math.sqrt(squares / sum(change.tensor.elements for change in changes))
