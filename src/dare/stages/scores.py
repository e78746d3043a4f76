"""Keeping the elements of the highest scores, which are counted over a whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.kernels import reference
from dare.stages.blocks import BINS, INFINITY, Block, Deltas, DeltaView, Floats, JointView, View
from dare.stages.ranks import row_length
from dare.stages.registry import always, combine_stage, meaning
from dare.stages.trimming import Cut, count_cut, count_down, find_bits
from dare.tensors.chunks import CHUNK

TINY = np.finfo(np.float32).smallest_subnormal
STEP = 16  # of so many elements of a chunk one is scored to find a floor

ScoreRatio = Annotated[
    float, meaning("Share of each delta's elements to keep, by score.", gt=0, le=1)
]


class Competition(NamedTuple):
    """The scale of one model's scores in a tensor."""

    peak: float
    cut: np.float32  # the largest score that is not kept; 0 if all positive ones are
    top: np.float32


def survey_scores(view: View, *, score_ratio: float) -> list[Competition]:
    """Find each model's largest magnitude, its (k + 1)-th largest score, and the largest."""
    peaks: list[float] = []
    elements = 0
    for deltas in view():
        elements += deltas.size
        peaks = peaks or [0.0] * len(deltas.blocks)
        peaks = [max(p, _peak(block)) for p, block in zip(peaks, deltas.blocks, strict=True)]
    kept = max(1, int(score_ratio * elements))
    for share in sorted({min(1.0, 2 * score_ratio), 1.0}):
        scores = _Scores(view, peaks, share)
        tops = [np.float32(0)] * len(peaks)
        counts = np.zeros((len(peaks), BINS), np.int64)
        for count, model, found in scores():
            tops[model] = max(tops[model], found.max(initial=0))
            count(found, 0, 15, counts[model])
        if all(of_model.sum() > kept for of_model in counts):
            break
    firsts = [count_down(c, kept + 1)[0] << 15 if c.sum() > kept else None for c in counts]
    lower, figures = np.zeros_like(counts), np.zeros((len(peaks), 2), np.int64)
    for count, model, found in scores():
        if (first := firsts[model]) is not None:
            figures[model] += count(found, first, 0, lower[model])
    cuts = [
        np.uint32(0 if first is None else first + count_down(c, kept + 1 - above)[0])
        for first, c, above in zip(firsts, lower, figures[:, 0], strict=True)
    ]
    return [
        Competition(peak, cut.view(np.float32), top)
        for peak, cut, top in zip(peaks, cuts, tops, strict=True)
    ]


def _peak(block: Block) -> float:
    bits = reference.magnitude_bits(block.values)
    finite = bits[bits < INFINITY] if bits.max(initial=0) >= INFINITY else bits
    return float(finite.max(initial=0).view(np.float32)) * abs(block.factor)


class _Scores:
    """The positive scores of all models; remembered if there is room.

    Those below a model's floor are left out. By elements of the first chunk, about the share given
    is above it.
    """

    def __init__(self, view: View, peaks: Sequence[float], share: float) -> None:
        self._view = view
        self._peaks = peaks
        self._share = share
        self._remembered: list[tuple[Any, int, Floats]] | None = None

    def __call__(self) -> Iterator[tuple[Any, int, Floats]]:
        """Yield a function that counts, a model, and its scores in a chunk."""
        if self._remembered is not None:
            yield from self._remembered
            return
        room, seen = self._view.spare_bytes, []
        floors: list[float] = []
        for deltas in self._view():
            floors = floors or self._find_floors(deltas)
            for model, scores in enumerate(_all_scores(deltas, self._peaks, floors)):
                found = scores[scores >= (floors[model] or TINY)]
                room -= found.nbytes
                each = partial(_count, deltas), model, found
                seen += [each] if room >= 0 else []
                yield each
        if room >= 0:
            self._remembered = seen

    def _find_floors(self, deltas: Deltas) -> list[float]:
        rank = int(self._share * (some := deltas.size // STEP))
        if self._share == 1 or not some:
            return [0.0] * len(self._peaks)
        found = _all_scores(deltas, self._peaks, [0.0] * len(self._peaks), STEP)
        return [float(np.partition(scores, -rank - 1)[-rank - 1]) for scores in found]


def _count(
    deltas: Deltas, scores: Floats, low: int, shift: int, counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    figures, seen = np.zeros(2, np.int64), np.empty(BINS, np.uint32)
    deltas.kernels.count_bins(scores, *deltas.plain, low, shift, counts, seen, figures)
    return figures


def _all_scores(
    deltas: Deltas, peaks: Sequence[float], floors: Sequence[float], step: int = 1
) -> Iterator[Floats]:
    """Yield the scores of one model after the other, of one element in so many.

    The array is used again. Those below a floor may be 0.
    """
    count = len(deltas.blocks)
    total = deltas.sum([1.0] * count)[::step]
    scores = np.empty(total.size, np.float32)
    for block, peak, floor in zip(deltas.blocks, peaks, floors, strict=True):
        deltas.kernels.balance_scores(
            block.values[::step], total, block.factor, peak or 1.0, float(count), floor, scores
        )
        yield scores


@combine_stage(paper="arXiv:2410.02396", sees="tensor", survey=survey_scores)
def pcb(deltas: Deltas, *, score_ratio: ScoreRatio = 0.1) -> Floats:  # noqa: ARG001
    """Let the models compete for each element, and average the winners by their scores.

    βᵢ = exp(n·(δ̂ᵢ/max|δ̂ᵢ|)²)·tanh(δ̂ᵢ·Σⱼ δ̂ⱼ): an element scores high if it is large within its
    tensor and has the sign of the sum (PCB-Merging). Of each model the k = max(1, ⌊score_ratio ·
    size⌋) highest scores of a tensor are kept, if they are above 0, and spread from 0 (for cᵢ, the
    highest not kept) to 1: sᵢ = (βᵢ - cᵢ)/(max βᵢ - cᵢ). The result is Σ wᵢ·sᵢ·δ̂ᵢ / Σ sᵢ, and
    0 where no model scores. Where more than k share the highest score, they all have sᵢ = 1.

    The authors' code has one competition over the whole model, clips the 0.01% largest
    magnitudes (1% in their vision code), and spreads from the k-th score, which then counts for
    nothing. Here each tensor has its own, and what goes against the sum scores 0.
    """
    competitions: list[Competition] = deltas.summary
    above = np.zeros(deltas.size, np.float32)
    below = np.zeros(deltas.size, np.float32)
    cuts = [float(found.cut) for found in competitions]
    all_scores = _all_scores(deltas, [found.peak for found in competitions], cuts)
    models = zip(deltas.blocks, deltas.weights, competitions, all_scores, strict=True)
    for block, weight, found, scores in models:
        weight32 = np.float32(weight * block.factor)
        deltas.kernels.add_shares(
            scores, block.values, weight32, found.cut, found.top, above, below
        )
    with np.errstate(invalid="ignore", over="ignore"):
        np.divide(above, below, out=above, where=below > 0)
    for block in deltas.blocks:
        above[np.isnan(block.values)] = np.nan
    return above


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
    """The divergence of each row from the base's, and the least importance of what is kept."""

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


def _fusion_bytes(shape: tuple[int, ...], _models: int) -> int:
    elements = math.prod(shape)
    return 24 * min(elements, CHUNK) + 48 * (elements // row_length(shape))


@combine_stage(
    sees="tensor",
    survey=survey_importance,
    survey_bytes=_fusion_bytes,
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
