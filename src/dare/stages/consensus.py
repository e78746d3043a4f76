"""Elements that several models need: TALL masks and the consensus of them."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import combine_stage, meaning

Selectivity = Annotated[
    float,
    meaning(
        "λ: a model needs changes of at least λ times their distance to the sum.",
        gt=0,
        allow_inf_nan=False,
    ),
]
Agree = Annotated[int, meaning("How many models must need an element, k.", ge=1)]


@combine_stage(paper="arXiv:2405.07813")
def consensus(deltas: Deltas, *, selectivity: Selectivity = 0.4, agree: Agree = 2) -> Floats:
    """Add the deltas up, and keep the elements that at least k models need.

    s = Σ wⱼ·δ̂ⱼ; model i needs an element where |δ̂ᵢ| ≥ λ·|s - δ̂ᵢ|, its TALL mask. The result is
    s where k or more models do (all of them, if there are fewer than k), else 0. A model of weight
    0 does not count. The paper tries λ from 0.2 to 0.6; k = 1 drops only what no model needs. The
    authors' code keeps nothing if there are fewer than k models.
    """
    total = deltas.sum(deltas.weights)
    needed = np.zeros(deltas.size, np.int32)
    asked = 0
    for block, weight in zip(deltas.blocks, deltas.weights, strict=True):
        if weight == 0:
            continue
        asked += 1
        factor = np.float32(block.factor)
        deltas.kernels.count_needing(block.values, factor, total, np.float32(selectivity), needed)
    deltas.kernels.keep_needed(total, needed, min(agree, asked))
    return total
