"""One unified delta for all tasks: the sign that wins and the largest magnitude."""

from __future__ import annotations

import numpy as np

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import combine_stage


@combine_stage(paper="arXiv:2405.17461", votes=True)
def emr(deltas: Deltas) -> Floats:
    """Vote on the sign of each element and take the largest change that has it (EMR-Merging).

    s = Σ wᵢ·δ̂ᵢ. Where s > 0 the result is the largest of the wᵢ·δ̂ᵢ, where s < 0 the smallest, and
    where s = 0 it is 0. The authors also keep a mask and a scale for each task, which nearly
    restore its own model. No program loads these, so this is the unified model alone. In their code
    a sum of zero counts as negative.
    """
    total, most, least = np.zeros((3, deltas.size), np.float32)
    for block, weight in zip(deltas.blocks, deltas.weights, strict=True):
        if weight != 0:  # and not 0·∞
            combined = np.float32(weight * block.factor)
            deltas.kernels.add_extremes(block.values, combined, total, most, least)
    deltas.kernels.elect_extremes(total, most, least)
    return total
