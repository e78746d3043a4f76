"""Parameter competition balancing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.kernels import reference
from dare.stages.blocks import BINS, INFINITY, Block, Deltas, Floats, View
from dare.stages.registry import combine_stage, meaning
from dare.stages.trim import count_down

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

    The authors' code has one competition over the whole model, clips the 0.01 % largest
    magnitudes (1 % in their vision code), and spreads from the k-th score, which then counts for
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
