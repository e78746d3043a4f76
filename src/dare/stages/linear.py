"""Weighted sums of deltas."""

from __future__ import annotations

from dare.stages.registry import Deltas, Floats, combine_stage


@combine_stage(default_weight=lambda models: 1 / models)
def linear(deltas: Deltas) -> Floats:
    """Average the deltas: Σ wᵢ·δ̂ᵢ, where each weight is 1/n unless given."""
    return _weighted_sum(deltas)


@combine_stage(paper="arXiv:2212.04089")
def sum(deltas: Deltas) -> Floats:  # noqa: A001
    """Add the deltas up (task arithmetic): Σ wᵢ·δ̂ᵢ, where each weight is 1 unless given."""
    return _weighted_sum(deltas)


def _weighted_sum(deltas: Deltas) -> Floats:
    (total,) = deltas.rows(1)
    for number, (block, weight) in enumerate(deltas):
        if number == 0:
            block.write_to(total, weight)
        else:
            block.add_to(total, weight)
    return total
