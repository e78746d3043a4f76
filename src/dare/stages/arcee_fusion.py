"""The changes that matter most, by how far they move the distributions that rows stand for."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Deltas, DeltaView, Floats, JointView
from dare.stages.ranks import row_length
from dare.stages.registry import always, combine_stage
from dare.stages.trim import find_bits
from dare.tensors.chunks import CHUNK

CHANCE = 1e-8  # is added to every probability

Doubles = NDArray[np.float64]


class Rows:
    """The rows that a chunk has elements of."""

    def __init__(self, deltas: Deltas, columns: int) -> None:
        start = deltas.blocks[0].start
        first, end = start // columns, -(-(start + deltas.size) // columns)
        self.span = slice(first, end)
        self._starts = np.maximum(np.arange(first, end) * columns - start, 0)
        self._sizes = np.diff(self._starts, append=deltas.size)

    def spread(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return for each element the number of its row."""
        return np.repeat(numbers[self.span], self._sizes)

    def reduce(self, operation: np.ufunc, values: Doubles) -> Doubles:
        """Return for each row the sum, or the largest, of its elements in the chunk."""
        found: Doubles = operation.reduceat(values, self._starts)
        return found


class Fusion(NamedTuple):
    """How far each row is from the base's, and the least importance of what is kept."""

    columns: int
    divergences: Floats
    threshold: np.float32


def survey_importance(view: JointView) -> Fusion:
    """Find the divergence of every row, and then the quartiles of all importances."""
    elements, columns = math.prod(view.shape), row_length(view.shape)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        divergences = _divergences(view, columns, elements // columns)
    scores = view.scores(partial(_importance, columns, divergences))
    counts = scores.histogram().counts
    low, middle, high = (_quartile(scores, counts, elements, number) for number in (1, 2, 3))
    return Fusion(columns, divergences, np.float32(middle + 1.5 * (high - low)))


def _divergences(view: JointView, columns: int, count: int) -> Floats:
    """Return KL(softmax of the model's row, of the base's), summed in float64."""
    peaks, sums = np.full((2, count), -np.inf), np.zeros((2, count))
    for deltas in view():
        rows = Rows(deltas, columns)
        for values, peak, total in zip(_wide(deltas), peaks, sums, strict=True):
            before = peak[rows.span].copy()
            peak[rows.span] = np.maximum(before, rows.reduce(np.maximum, values))
            total[rows.span] *= np.exp(before - peak[rows.span])
            total[rows.span] += rows.reduce(np.add, np.exp(values - rows.spread(peak)))
    found = np.zeros(count)
    for deltas in view():
        rows = Rows(deltas, columns)
        model, base = (
            np.exp(values - rows.spread(peak)) / rows.spread(total) + CHANCE
            for values, peak, total in zip(_wide(deltas), peaks, sums, strict=True)
        )
        found[rows.span] += rows.reduce(np.add, model * np.log(model / base))
    return np.maximum(found, 0).astype(np.float32)


def _wide(deltas: Deltas) -> tuple[Doubles, Doubles]:
    """Return the model's elements and the base's."""
    base = deltas.base.astype(np.float64)
    return base + deltas.blocks[0].delta, base


def _importance(columns: int, divergences: Floats, deltas: Deltas) -> Floats:
    with np.errstate(invalid="ignore", over="ignore"):
        spread: Floats = Rows(deltas, columns).spread(divergences)
        return np.abs(deltas.blocks[0].delta) * spread


def _quartile(scores: DeltaView, counts: NDArray[np.int64], elements: int, number: int) -> float:
    """Return the importance that so many quarters of all lie below; zeros are not counted."""
    wanted = elements - (elements - 1) * number // 4
    if wanted > counts.sum():
        return 0.0
    bits, _ = find_bits(scores, counts, wanted)
    return float(np.uint32(bits).view(np.float32))


def _survey_bytes(shape: tuple[int, ...], _models: int) -> int:
    elements = math.prod(shape)
    return 24 * min(elements, CHUNK) + 48 * (elements // row_length(shape))


@combine_stage(
    sees="tensor",
    survey=survey_importance,
    survey_bytes=_survey_bytes,
    kept_bytes=lambda shape, _models: 4 * (math.prod(shape) // row_length(shape)),
    default_weight=None,
    models=1,
    needs_base=always,
)
def arcee_fusion(deltas: Deltas) -> Floats:
    """Adopt the most important changes of one model, and leave the rest as in the base.

    δ̂ is kept where its importance |δ̂|·KL(p‖q) is at least median + 1.5·(Q₃ - Q₁) of the tensor's
    importances. p and q are the softmax of the model's and the base's row, with 10⁻⁸ added to each
    element; a row is the last dimension. The quartiles are exact: of n numbers in order, those at
    ⌊k·(n - 1)/4⌋. A row with NaN is kept whole. mergekit's `arcee_fusion` takes a sample where n
    is above a million, and computes KL in the type of the merge, whose rounding error in float32 is
    about as large as KL itself between fine-tunes.
    """
    found: Fusion = deltas.summary
    importance = _importance(found.columns, found.divergences, deltas)
    return np.where(importance < found.threshold, np.float32(0), deltas.blocks[0].delta)
