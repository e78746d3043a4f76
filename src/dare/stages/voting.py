"""Combining element by element, by how many models change one and in which direction."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.registry import always, combine_stage, meaning
from dare.stages.trimming import KeepRatio

TrimFirst = Annotated[
    KeepRatio | None,
    meaning("Trim each delta to this share of its elements first; default: no trimming."),
]
Divisor = Annotated[
    Literal["weights", "signed", "count", "nothing"],
    meaning(
        "Divide by the weights of the models that agree, these with their signs, their number, or "
        "nothing."
    ),
]
Vote = Annotated[
    Literal["sum", "count"],
    meaning("Whether the sign of the sum wins, or the one that more models have."),
]
Weighted = Annotated[bool, meaning("Whether a model's vote counts by its weight.")]


@combine_stage(
    paper="arXiv:2306.01708",
    votes=True,
    is_identity=always,
    is_lazy=lambda settings: settings["vote"] == "sum" and settings["weighted"],
)
def ties(
    deltas: Deltas,
    *,
    keep_ratio: TrimFirst = None,  # noqa: ARG001 (makes a stage of its own: see IMPLIED)
    divide_by: Divisor = "weights",
    vote: Vote = "sum",
    weighted: Weighted = True,
) -> Floats:
    """Let the models vote on the sign of each element, then average those that agree with it.

    P = Σ wᵢ·δ̂ᵢ over the positive terms, N over the negative ones. Where P + N > 0 the result is
    P / Σ wᵢ over the models that made up P, where P + N < 0 it is N / Σ wᵢ likewise, and where
    they cancel it is 0. `divide_by = "count"` divides by the number of those models, as PEFT does,
    and `divide_by = "nothing"` leaves P and N as they are, as mergekit's `dare_ties` does. Where
    weights are negative, Σ |wᵢ| is meant; `divide_by = "signed"` divides by Σ wᵢ, unless that is 0,
    as mergekit's `ties` does.
    `keep_ratio` trims each delta first, as the stage `trim` does; without it nothing is trimmed.
    (The published function `dare_ties_merge` trims unless told otherwise: to 0.2 of what DARE has
    kept on dicts, to 0.5 on files.)

    `weighted = false` counts votes by Σ ±δ̂ᵢ, the sign that of the weight, instead of P + N, and
    `vote = "count"` by the weights of the models on either side, or with `weighted = false` by
    their number. PEFT has `weighted = false`, `divide_by = "count"` and either vote.
    """
    weights = deltas.weights
    sizes, ones = [abs(w) for w in weights], [1.0] * len(weights)
    divisors = {"weights": sizes, "signed": weights, "count": ones}
    shares = divisors.get(divide_by, [0.0] * len(weights))
    if vote == "sum" and weighted:
        return deltas.elect(weights, shares)
    sums = deltas.sides(weights, shares)
    if vote == "count":
        _, _, above, below = deltas.sides(weights, sizes if weighted else ones)
        balance = above - below
    else:
        balance = deltas.sum([math.copysign(float(w != 0), w) for w in weights])
    merged = np.empty(deltas.size, np.float32)
    deltas.kernels.elect(sums.reshape(-1), balance, merged)
    return merged


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
