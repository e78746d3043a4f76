"""Whether large deltas matter: only what is dropped at random can suffer from them.

Dropping replaces a change by a gamble that is right on average, whose noise is in proportion to the
change. How much that is to a layer depends on the size of the change relative to the base and on
the drop rate, not on |δ| alone. So a model is warned of if many of its elements exceed the recipe's
`delta_threshold` and, where matrices were looked at, the predicted error is above its bound. A
threshold that the user gives warns of every element that exceeds it, by whatever method.
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
from dare.tensors.sizes import times

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
    asked_rate: float
    """The share that they were asked to drop."""


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
    parts = list(_parts(plan, report, model))
    gambled = [part for part in parts if part.drop_rate > 0]
    is_given = plan.recipe.has_given_threshold
    counted = parts if is_given else gambled
    elements = sum(part.tensor.elements for part in counted)
    over = sum(part.over_threshold for part in counted)
    if not over or (not is_given and over < FEW * elements):
        return
    rates = {part.tensor.name: part.drop_rate for part in gambled}
    seen = [change for change in changes if change.tensor.name in rates and _is_measured(change)]
    bound = limit("output_error")
    is_borne = not gambled or (bool(seen) and _predicted_error(seen, rates) <= MARGIN * bound)
    if is_borne and not is_given:
        return
    share, figures = over / elements, report.models[model]
    yield Notice(
        Concern.LARGE_DELTAS,
        f"{plan.model_names[model]}: |δ| exceeds {plan.recipe.delta_threshold:g} in {over:,} of "
        f"{elements:,} elements ({share:.2%}){_most_of(counted) if is_given else ''}, and reaches "
        f"{figures.largest_delta:.3g} in {figures.largest_delta_in}"
        + (_remedy(plan, model, gambled, is_too_large=bool(seen) and not is_borne)),
        Strength.STRONG if share >= MOST and not is_borne else Strength.WARNING,
    )


def _most_of(parts: Sequence[Part]) -> str:
    """Say where the elements above the threshold are."""
    found = [part for part in parts if part.over_threshold]
    most = max(found, key=lambda part: part.over_threshold)
    return (
        f" of {times(len(found), 'tensor')}, most of them, {most.over_threshold:,}, in "
        f"{most.tensor.name}"
    )


def _remedy(plan: Plan, model: int, gambled: Sequence[Part], *, is_too_large: bool) -> str:
    """Say why that matters and what to do, where changes are dropped at random."""
    if not gambled:
        return ""
    reason = "DARE works best where changes are small"
    if is_too_large:
        elements = sum(part.tensor.elements for part in gambled)
        asked = sum(part.asked_rate * part.tensor.elements for part in gambled) / elements
        reason = (
            f"relative to the base these changes are too large to drop {round(100 * asked, 2):g}% "
            "of them at random: the predicted error of its layers' outputs is above the bound of "
            f"{limit('output_error'):.0%}"
        )
    draws = gambled[0].tensor.draws_of(plan.stages, model)
    names = [s.name for s, draw in zip(plan.stages, draws, strict=False) if draw is not None]
    leave = f", or leave {' and '.join(names)} out of the method" if names else ""
    return f"; {reason}. Lower drop_rate (`dare advise` finds one that fits){leave}"


def _parts(plan: Plan, report: Report, model: int) -> Iterator[Part]:
    for tensor, figures in zip(plan.merged(), report.tensors, strict=True):
        if model in tensor.models:
            place = tensor.models.index(model)
            rates = _random_rates(plan, tensor, model, figures.survivors[place])
            yield Part(tensor, figures.over_threshold[place], *rates)


def _random_rates(
    plan: Plan, tensor: TensorPlan, model: int, survivors: Sequence[int]
) -> tuple[float, float]:
    """The share of a model's tensor that was dropped at random, and the share that was asked for.

    The first by what survived each stage; so is the second where a stage has no `drop_rate`.
    """
    drop = tensor.drop_of(model)
    kept = asked = 1.0 if drop is None else 1.0 - drop.rate
    counts = (tensor.elements, *survivors)
    settings = tensor.settings_of(model)
    for position, draw in enumerate(tensor.draws_of(plan.stages, model)):
        if draw is not None and counts[position]:
            left = counts[position + 1] / counts[position]
            kept *= left
            asked *= 1.0 - settings[position].get("drop_rate", 1.0 - left)
    return 1.0 - kept, 1.0 - asked


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
