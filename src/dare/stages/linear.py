"""Weighted sums of deltas, or of whole models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from dare.stages.angles import on_weights, sum_in
from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import Settings, always, combine_stage, meaning

NO_SUM = 1e-8  # weights whose sum is less than this cancel each other

Normalize = Annotated[bool, meaning("Divide by the sum of the weights, in each tensor.")]
Terms = Annotated[
    Literal["deltas", "weights"], meaning("Add up the models' deltas, or their tensors.")
]


def _is_sum(settings: Settings) -> bool:
    return not (settings["normalize"] or on_weights(settings))


_DECLARED: dict[str, Any] = {
    "is_identity": always,
    "is_lazy": always,
    "needs_base": on_weights,
    "is_sum": _is_sum,
}


def weights_fault(settings: Settings, weights: Sequence[float]) -> str:
    """Say why weights that cancel each other cannot be divided by their sum."""
    if not settings["normalize"] or not _cancel(weights):
        return ""
    return " add up to 0, which they are divided by; give other weights, or set normalize = false"


@combine_stage(default_weight=lambda models: 1 / models, weights_fault=weights_fault, **_DECLARED)
def linear(deltas: Deltas, *, normalize: Normalize = False, on: Terms = "deltas") -> Floats:
    """Average the deltas: Σ wᵢ·δ̂ᵢ, where each weight is 1/n unless given.

    `normalize` divides the weights by their sum, which must not be 0. `on = "weights"` averages the
    models' tensors: the result is Σ wᵢ·(base + δ̂ᵢ), and the base counts only if it is also listed
    as a model, with a weight.
    """
    return _add_up(deltas, normalize, on)


@combine_stage(paper="arXiv:2212.04089", adds_up=True, **_DECLARED)
def sum(  # noqa: A001
    deltas: Deltas, *, normalize: Normalize = False, on: Terms = "deltas"
) -> Floats:
    """Add the deltas up (task arithmetic): Σ wᵢ·δ̂ᵢ, where each weight is 1 unless given.

    `normalize` divides the weights by their sum, unless that is 0. `on = "weights"` adds up the
    models' tensors: the result is Σ wᵢ·(base + δ̂ᵢ).
    """
    return _add_up(deltas, normalize and not _cancel(deltas.weights), on)


def _cancel(weights: Sequence[float]) -> bool:
    return abs(math.fsum(weights)) < NO_SUM


def _add_up(deltas: Deltas, normalize: bool, on: Terms) -> Floats:
    divisor = math.fsum(deltas.weights) if normalize else 1.0
    return sum_in(deltas, [weight / divisor for weight in deltas.weights], on)
