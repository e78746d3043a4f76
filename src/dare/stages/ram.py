"""Reinforced agent merging: what one model changes is kept, what several change is averaged."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import combine_stage, meaning

Threshold = Annotated[
    float, meaning("A model has changed what differs by more than this.", ge=0, allow_inf_nan=False)
]


def changed_by(deltas: Deltas, threshold: float) -> NDArray[np.bool_]:
    """Tell what each model has changed, models × elements; NaN is a change."""
    least = np.float32(threshold)
    return np.array([~(np.abs(block.delta) <= least) for block in deltas.blocks])


def average_of(deltas: Deltas, changed: NDArray[np.bool_]) -> Floats:
    """Return the mean of the models that have changed an element."""
    total = np.zeros(deltas.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for block, own in zip(deltas.blocks, changed, strict=True):
            np.add(total, block.delta, out=total, where=own)
        total /= np.maximum(changed.sum(axis=0, dtype=np.float32), 1)
    return total


@combine_stage(paper="arXiv:2601.13572", default_weight=None)
def ram(deltas: Deltas, *, threshold: Threshold = 1e-5) -> Floats:
    """Keep what one model has changed, and average what several have.

    Σ δ̂ᵢ / c over the c models with |δ̂ᵢ| > threshold; 0 where there are none.
    """
    return average_of(deltas, changed_by(deltas, threshold))
