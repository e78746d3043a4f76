"""Weighted sums of deltas."""

from __future__ import annotations

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import always, combine_stage


@combine_stage(default_weight=lambda models: 1 / models, is_identity=always, is_lazy=always)
def linear(deltas: Deltas) -> Floats:
    """Average the deltas: Σ wᵢ·δ̂ᵢ, where each weight is 1/n unless given."""
    return deltas.sum(deltas.weights)


@combine_stage(paper="arXiv:2212.04089", adds_up=True, is_identity=always, is_lazy=always)
def sum(deltas: Deltas) -> Floats:  # noqa: A001
    """Add the deltas up (task arithmetic): Σ wᵢ·δ̂ᵢ, where each weight is 1 unless given."""
    return deltas.sum(deltas.weights)
