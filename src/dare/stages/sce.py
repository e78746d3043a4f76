"""Select, calculate, erase: a mean of the elements in which models differ."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np

from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.registry import combine_stage, meaning
from dare.stages.trim import Cut, count_cut

LEAST_SQUARE = 1e-6  # mean squares that add up to less than this are taken for equal
LEAST_SHARE = 1e-6  # the smallest divisor

SelectRatio = Annotated[
    float, meaning("Share of the elements to keep, those in which models differ most.", ge=0, le=1)
]


class Selection(NamedTuple):
    """The elements of a tensor that are kept, and the models' weights."""

    cut: Cut | None  # by variance; None: all are kept
    weights: list[float]


def survey_selection(view: JointView, *, select_ratio: float) -> Selection:
    """Find the least variance that is kept, and each model's share of the squares above it."""
    count, cut = len(view.weights), None
    if select_ratio < 1:
        variances = view.scores(_variance)
        counts = variances.histogram().counts
        wanted = int(select_ratio * counts.sum())
        if not wanted:
            return Selection(None, [0.0] * count)
        cut = count_cut(variances, counts, wanted)
    squares = [0.0] * count
    for deltas in view():
        _select(deltas, cut)
        for i, block in enumerate(deltas.blocks):
            squares[i] += view.kernels.sum_products(block.delta, block.delta)
    total = math.fsum(squares)
    if not LEAST_SQUARE <= total / max(1, math.prod(view.shape)) < math.inf:
        return Selection(cut, [1 / count] * count)
    return Selection(cut, [square / total for square in squares])


def _variance(deltas: Deltas) -> Floats:
    """Return the variance over the models; it is 0 where all are equal."""
    first, *others = deltas.blocks
    mean, squares = np.zeros((2, deltas.size), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for block in others:  # as distances to the first: of equals they are exactly 0
            apart = block.delta - first.delta
            mean += apart
            squares += np.multiply(apart, apart, out=apart)
        mean /= len(deltas.blocks)
        squares /= len(deltas.blocks)
        squares -= np.multiply(mean, mean, out=mean)
        return np.maximum(squares, np.float32(0), out=squares)


def _select(deltas: Deltas, cut: Cut | None) -> None:
    """Drop the elements whose variance is below the cut, in all models."""
    if cut is None:
        return
    bits = _variance(deltas).view(np.uint32)
    before = max(0, cut.end - deltas.blocks[0].start)
    keep = bits > cut.bits
    keep[:before] |= bits[:before] == cut.bits
    for block in deltas.blocks:
        deltas.kernels.keep_lanes(block.values, keep * np.uint8(255))


@combine_stage(
    paper="arXiv:2408.07990",
    sees="tensor",
    survey=survey_selection,
    default_weight=None,
    votes=True,
)
def sce(deltas: Deltas, *, select_ratio: SelectRatio = 1.0) -> Floats:  # noqa: ARG001
    """Keep elements in which models differ most, and average the models that agree with the sum.

    Of the elements of a tensor whose variance over the models is not 0, the share `select_ratio` of
    largest variance is kept, of equal ones the first; with 1, all elements. A model's weight wᵢ is
    its share of what is kept, Σ δ̂ᵢ²; all are equal where the mean squares add up to less than 10⁻⁶,
    as they do in most language models. The result is Σ wᵢ·δ̂ᵢ / max(Σ wᵢ, 10⁻⁶) over the models
    whose sign is that of Σ δ̂ᵢ, where 0 counts as positive. It is mergekit's `sce`.
    """
    found: Selection = deltas.summary
    _select(deltas, found.cut)
    sums = deltas.sides(found.weights, found.weights)
    np.maximum(sums[2:], np.float32(LEAST_SHARE), out=sums[2:])
    balance = deltas.sum([1.0] * len(found.weights))
    balance[balance == 0] = 1
    merged = np.empty(deltas.size, np.float32)
    deltas.kernels.elect(sums.reshape(-1), balance, merged)
    return merged
