"""Parameter competition balancing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import HIGH_COUNTS, LOW_COUNTS, Block, Deltas, Floats, View
from dare.stages.registry import combine_stage, meaning
from dare.stages.trim import count_down

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

    scores = _Scores(view, peaks)
    tops = [np.uint32(0)] * len(peaks)
    counts = np.zeros((len(peaks), HIGH_COUNTS), np.int64)
    for kernels, model, bits in scores():
        tops[model] = max(tops[model], bits.max(initial=0))
        kernels.count_high(bits, counts[model])
    wanted: list[tuple[int, int] | None] = [
        count_down(found, kept + 1) if found.sum() > kept else None for found in counts
    ]

    counts = np.zeros((len(peaks), LOW_COUNTS), np.int64)
    for kernels, model, bits in scores():
        if (place := wanted[model]) is not None:
            kernels.count_low(bits, np.uint32(place[0]), counts[model])
    cuts = [
        np.uint32(place[0] << 15 | count_down(found, place[1])[0]) if place else np.uint32(0)
        for place, found in zip(wanted, counts, strict=True)
    ]
    return [
        Competition(peak, cut.view(np.float32), top.view(np.float32))
        for peak, cut, top in zip(peaks, cuts, tops, strict=True)
    ]


def _peak(block: Block) -> float:
    found = np.abs(block.values)
    return float(found.max(where=np.isfinite(found), initial=0)) * abs(block.factor)


def _all_scores(deltas: Deltas, peaks: Sequence[float]) -> Iterator[Floats]:
    """Yield the scores of one model after the other; the array is used again."""
    count = len(deltas.blocks)
    total = deltas.sum([1.0] * count)
    scores = np.empty(deltas.size, np.float32)
    for block, peak in zip(deltas.blocks, peaks, strict=True):
        deltas.kernels.balance_scores(
            block.values, total, block.factor, peak or 1.0, float(count), scores
        )
        yield scores


class _Scores:
    """The bits of the positive scores, which order like them; remembered if there is room."""

    def __init__(self, view: View, peaks: Sequence[float]) -> None:
        self._view = view
        self._peaks = peaks
        self._remembered: list[tuple[Any, int, NDArray[np.uint32]]] | None = None

    def __call__(self) -> Iterator[tuple[Any, int, NDArray[np.uint32]]]:
        if self._remembered is not None:
            yield from self._remembered
            return
        room = self._view.spare_bytes
        seen = []
        for deltas in self._view():
            for model, scores in enumerate(_all_scores(deltas, self._peaks)):
                bits: NDArray[np.uint32] = scores[scores > 0].view(np.uint32)
                room -= bits.nbytes
                if room >= 0:
                    seen.append((deltas.kernels, model, bits))
                yield deltas.kernels, model, bits
        if room >= 0:
            self._remembered = seen


@combine_stage(paper="arXiv:2410.02396", sees="tensor", survey=survey_scores)
def pcb(deltas: Deltas, *, score_ratio: ScoreRatio = 0.1) -> Floats:  # noqa: ARG001
    """Let the models compete for each element, and average the winners by their scores.

    βᵢ = exp(n·(δ̂ᵢ/max|δ̂ᵢ|)²)·tanh(δ̂ᵢ·Σⱼ δ̂ⱼ): what is large within its tensor and goes where all
    together go scores high (PCB-Merging). Of each model the k = max(1, ⌊score_ratio · size⌋)
    highest scores of a tensor are kept, if they are above 0, and spread from 0, the highest that
    is not kept (cᵢ), to 1: sᵢ = (βᵢ - cᵢ)/(max βᵢ - cᵢ). The result is Σ wᵢ·sᵢ·δ̂ᵢ / Σ sᵢ, and 0
    where nobody scores. Where more than k share the highest score, they all have sᵢ = 1.

    The authors' code has one competition over the whole model, draws in the 0.01 % largest
    magnitudes (1 % in their vision code), and spreads from the k-th score, which then counts for
    nothing. Here it is for each tensor, and what goes against the sum scores 0.
    """
    competitions: list[Competition] = deltas.summary
    above = np.zeros(deltas.size, np.float32)
    below = np.zeros(deltas.size, np.float32)
    all_scores = _all_scores(deltas, [found.peak for found in competitions])
    models = zip(deltas.blocks, deltas.weights, competitions, all_scores, strict=True)
    with np.errstate(invalid="ignore", over="ignore"):
        for block, weight, found, scores in models:
            share = _shares(scores, found)
            winning = share > 0
            term = share * (np.float32(weight * block.factor) * block.values)
            above += np.where(winning, term, np.float32(0))
            below += share
        np.divide(above, below, out=above, where=below > 0)
        for block in deltas.blocks:
            above[np.isnan(block.values)] = np.nan
    return above


def _shares(scores: Floats, found: Competition) -> Floats:
    """Return the shares that scores count for: from 0 at the cut to 1 at the top."""
    if found.top == found.cut:
        shared: Floats = ((scores == found.top) & (scores > 0)).astype(np.float32)
        return shared
    spread: Floats = np.maximum(scores - found.cut, np.float32(0)) / (found.top - found.cut)
    return spread
