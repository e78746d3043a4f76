"""Reinforced agent merging: what one model changes is kept, what several change is averaged."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.registry import combine_stage, meaning

Threshold = Annotated[
    float, meaning("A model has changed what differs by more than this.", ge=0, allow_inf_nan=False)
]
Boost = Annotated[
    float,
    meaning("How much a model's own changes grow with what it shares, r.", allow_inf_nan=False),
]
Most = Annotated[
    float,
    meaning("The most that shared/own changes count for, α.", ge=0, allow_inf_nan=False),
]


def _changed(deltas: Deltas, threshold: float) -> NDArray[np.bool_]:
    """Tell what each model has changed, models × elements; NaN is a change."""
    least = np.float32(threshold)
    return np.array([~(np.abs(block.delta) <= least) for block in deltas.blocks])


def _average(deltas: Deltas, changed: NDArray[np.bool_]) -> Floats:
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
    return _average(deltas, _changed(deltas, threshold))


def survey_overlap(
    view: JointView, *, threshold: float, boost: float, most: float
) -> list[np.float32]:
    """Find each model's factor by counting what it has changed alone, and with others."""
    alone = together = np.zeros(len(view.weights), np.int64)
    for deltas in view():
        changed = _changed(deltas, threshold)
        own = np.count_nonzero(changed & (changed.sum(axis=0) == 1), axis=1)
        alone = alone + own
        together = together + np.count_nonzero(changed, axis=1) - own
    shares = np.minimum(together / np.maximum(alone, 1), most)
    return list((1 + boost * shares).astype(np.float32))


@combine_stage(paper="arXiv:2601.13572", sees="tensor", survey=survey_overlap, default_weight=None)
def ramplus(
    deltas: Deltas,
    *,
    threshold: Threshold = 1e-5,
    boost: Boost = 0.1,  # noqa: ARG001 (read by the survey)
    most: Most = 0.2,  # noqa: ARG001 (likewise)
) -> Floats:
    """Do as `ram`, and enlarge what a model alone has changed, for what it loses where it shares.

    What model i alone has changed is multiplied by 1 + r·min(sᵢ/oᵢ, α), where it has changed oᵢ
    elements of the tensor alone and sᵢ together with others. It is mergekit's `ramplus_tl`.
    """
    changed = _changed(deltas, threshold)
    merged = _average(deltas, changed)
    is_alone = changed.sum(axis=0) == 1
    with np.errstate(invalid="ignore", over="ignore"):
        for own, factor in zip(changed, deltas.summary, strict=True):
            np.multiply(merged, factor, out=merged, where=own & is_alone)
    return merged
