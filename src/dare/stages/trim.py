"""Trimming by magnitude, exact and in a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dare.chunks import CHUNK, chunk_count
from dare.stages.blocks import Block, Walk
from dare.stages.registry import delta_stage

KeepRatio = Annotated[
    float,
    Field(gt=0, le=1, description="Share of each delta's elements to keep, the largest ones."),
]

HIGH_COUNTS = 1 << 16
LOW_COUNTS = 1 << 15


@dataclass(frozen=True)
class Cut:
    """The k-th largest magnitude of a tensor, and what to do with elements that equal it."""

    bits: int
    ties: NDArray[np.int64]
    """For each chunk, how many elements are at the cut."""
    ties_kept: NDArray[np.int64]
    """For each chunk, how many of those are kept."""


class Magnitudes:
    """The non-zero magnitudes of a tensor, chunk by chunk; remembered if there is room."""

    def __init__(self, walk: Walk) -> None:
        self.survivors = 0
        self.elements = 0
        self._walk = walk
        self._kernels: Any = None
        self._remembered: list[NDArray[np.uint32]] | None = None

    def __call__(self) -> Iterator[tuple[Any, NDArray[np.uint32]]]:
        if self._remembered is not None:
            yield from ((self._kernels, found) for found in self._remembered)
            return
        self.survivors = self.elements = 0
        room = self._walk.spare_bytes
        seen: list[NDArray[np.uint32]] = []
        buffer = np.empty(CHUNK, np.uint32)
        for block in self._walk():
            self._kernels = block.kernels
            self.elements += block.size
            count, survivors = block.magnitudes(buffer)
            self.survivors += survivors
            found = buffer[:count]
            room -= found.nbytes
            if room >= 0:
                seen.append(found.copy())
            yield block.kernels, found
        if room >= 0:
            self._remembered = seen


def survey_cut(walk: Walk, *, keep_ratio: float) -> Cut:
    """Find the k-th largest magnitude, k being the share to keep of what has survived."""
    magnitudes = Magnitudes(walk)
    counts = count_high(magnitudes)
    return find_cut(magnitudes, counts, max(1, int(keep_ratio * magnitudes.survivors)))


def count_high(magnitudes: Magnitudes) -> NDArray[np.int64]:
    """Count magnitudes by their upper 16 bits; the survivors are known afterwards."""
    counts = np.zeros(HIGH_COUNTS, np.int64)
    for kernels, found in magnitudes():
        kernels.count_high(found, counts)
    return counts


def find_cut(magnitudes: Magnitudes, counts: NDArray[np.int64], wanted: int) -> Cut:
    """Find the magnitude of that rank: the lower 15 bits are counted where the upper 16 agree."""
    if counts.sum() <= wanted:  # no more than that are not zero: keep them all
        nothing = np.zeros(chunk_count(magnitudes.elements), np.int64)
        return Cut(0, nothing, nothing)
    high, wanted = _count_down(counts, wanted)

    counts = np.zeros(LOW_COUNTS, np.int64)
    for kernels, found in magnitudes():
        kernels.count_low(found, np.uint32(high), counts)
    low, wanted = _count_down(counts, wanted)
    cut = high << 15 | low

    ties = np.array(
        [kernels.count_equal(found, np.uint32(cut)) for kernels, found in magnitudes()], np.int64
    )
    before = np.concatenate(([0], np.cumsum(ties)[:-1]))
    return Cut(cut, ties, np.clip(wanted - before, 0, ties))


def _count_down(counts: NDArray[np.int64], wanted: int) -> tuple[int, int]:
    """Return the bin that holds the wanted-th largest, and its rank inside that bin."""
    above = np.cumsum(counts[::-1])[::-1]  # elements in this bin and all higher ones
    bin_found = int(np.flatnonzero(above >= wanted)[-1])
    return bin_found, int(wanted - (above[bin_found] - counts[bin_found]))


@delta_stage(
    paper="arXiv:2306.01708",
    survey=survey_cut,
    surveys_when=lambda settings: settings["keep_ratio"] < 1,
    is_lazy=lambda _settings: True,
)
def trim(block: Block, *, keep_ratio: KeepRatio = 0.2) -> None:
    """Keep the elements of largest magnitude in each tensor, set the others to zero.

    k = max(1, ⌊keep_ratio · n⌋), where n counts the elements that no earlier stage has dropped:
    after DARE at p = 0.9 most elements are zero, and counting those would keep every survivor.
    Among elements of equal magnitude at the cut those with the lowest index are kept.
    """
    if keep_ratio == 1:
        return
    cut: Cut = block.summary
    chunk = block.start // CHUNK
    block.keep_largest(cut.bits, int(cut.ties_kept[chunk]), int(cut.ties[chunk]))
