"""Reinforced agent merging in which a model's own changes grow with what it shares."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.ram import Threshold, average_of, changed_by
from dare.stages.registry import combine_stage, meaning

Boost = Annotated[
    float,
    meaning("How much a model's own changes grow with those it shares, r.", allow_inf_nan=False),
]
Most = Annotated[float, meaning("Upper bound on shared/own changes, α.", ge=0, allow_inf_nan=False)]


def survey_overlap(
    view: JointView, *, threshold: float, boost: float, most: float
) -> list[np.float32]:
    """Find each model's factor by counting what it has changed alone, and with others."""
    alone = together = np.zeros(len(view.weights), np.int64)
    for deltas in view():
        changed = changed_by(deltas, threshold)
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
    """Like `ram`, but enlarge what only one model changed, to make up for what it loses elsewhere.

    What model i alone has changed is multiplied by 1 + r·min(sᵢ/oᵢ, α), where it has changed oᵢ
    elements of the tensor alone and sᵢ together with others. It is mergekit's `ramplus_tl`.
    """
    changed = changed_by(deltas, threshold)
    merged = average_of(deltas, changed)
    is_alone = changed.sum(axis=0) == 1
    with np.errstate(invalid="ignore", over="ignore"):
        for own, factor in zip(changed, deltas.summary, strict=True):
            np.multiply(merged, factor, out=merged, where=own & is_alone)
    return merged
