"""Trimming by magnitude, exact and in a stream.

A magnitude's bits order like the magnitude. So the k-th largest of any number of elements is found
by counting: first all of them by their upper 16 bits, then those in the bin that holds the k-th by
their lower 15.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Block, Walk
from dare.stages.registry import Census, Round, always, delta_stage, meaning
from dare.tensors.chunks import CHUNK, chunk_count

KeepRatio = Annotated[
    float, meaning("Share of each delta's elements to keep, the largest ones.", gt=0, le=1)
]
Scope = Annotated[
    Literal["tensor", "model"],
    meaning("Keep that share of each tensor, or of all tensors of a model together."),
]

HIGH_COUNTS = 1 << 16
LOW_COUNTS = 1 << 15


@dataclass(frozen=True)
class Cut:
    """The k-th largest magnitude of a tensor, and what to do with elements that equal it."""

    bits: int
    ties: NDArray[np.int64]
    """The number of elements at the cut, for each chunk."""
    ties_kept: NDArray[np.int64]
    """The number of those that are kept, for each chunk."""


class Magnitudes:
    """The non-zero magnitudes of a tensor, chunk by chunk; remembered if there is room."""

    def __init__(self, walk: Walk) -> None:
        self.survivors = 0
        self.elements = 0
        self._walk = walk
        self._kernels: Any = None
        self._remembered: tuple[NDArray[np.uint32], NDArray[np.int64]] | None = None
        """All of them, and the end of each chunk."""

    def __call__(
        self, counts: NDArray[np.int64] | None = None
    ) -> Iterator[tuple[Any, NDArray[np.uint32], NDArray[np.int64]]]:
        """Yield pieces, with the ends of chunks in each; one piece if all are remembered.

        The first time, they can be counted by their upper 16 bits.
        """
        if self._remembered is not None:
            yield self._kernels, *self._remembered
            return
        self.survivors = self.elements = 0
        needed, room = math.prod(self._walk.shape), self._walk.spare_bytes // 4
        remembered = np.empty(min(needed, room), np.uint32)
        passing = np.empty(0 if needed <= room else CHUNK, np.uint32)
        ends: list[int] = []
        end, is_enough = 0, True
        for block in self._walk():
            self._kernels = block.kernels
            self.elements += block.size
            is_enough = is_enough and remembered.size - end >= block.size
            into = remembered[end:] if is_enough else passing
            count, survivors = block.magnitudes(into, counts)
            self.survivors += survivors
            end += count
            ends.append(end)
            yield block.kernels, into[:count], np.array([count])
        if is_enough and ends:
            self._remembered = remembered[:end], np.array(ends)


def survey_cut(walk: Walk, *, keep_ratio: float, scope: Scope) -> Cut:
    """Find the k-th largest magnitude, k being the share to keep of what has survived."""
    magnitudes = Magnitudes(walk)
    if scope == "model":
        return _cut_of_model(magnitudes, walk)
    counts = count_high(magnitudes)
    return find_cut(magnitudes, counts, _wanted(keep_ratio, magnitudes.survivors))


def _wanted(keep_ratio: float, survivors: int) -> int:
    return max(1, int(keep_ratio * survivors))


def count_high(magnitudes: Magnitudes) -> NDArray[np.int64]:
    """Count magnitudes by their upper 16 bits; the survivors are known afterwards."""
    counts = np.zeros(HIGH_COUNTS, np.int64)
    for _ in magnitudes(counts):
        pass
    return counts


def find_cut(magnitudes: Magnitudes, counts: NDArray[np.int64], wanted: int) -> Cut:
    """Find the magnitude of that rank: the lower 15 bits are counted where the upper 16 agree."""
    if counts.sum() <= wanted:  # no more than that are not zero: keep them all
        nothing = np.zeros(chunk_count(magnitudes.elements), np.int64)
        return Cut(0, nothing, nothing)
    high, wanted = count_down(counts, wanted)
    low, wanted = count_down(count_low(magnitudes, high), wanted)
    return _cut_at(magnitudes, high << 15 | low, wanted)


def count_low(magnitudes: Magnitudes, high: int) -> NDArray[np.int64]:
    """Count the magnitudes with these upper 16 bits by their lower 15."""
    counts = np.zeros(LOW_COUNTS, np.int64)
    for kernels, found, _ in magnitudes():
        kernels.count_low(found, np.uint32(high), counts)
    return counts


def _cut_at(magnitudes: Magnitudes, cut: int, wanted: int) -> Cut:
    counted = [np.empty(0, np.int64)]
    for kernels, found, ends in magnitudes():
        counted.append(np.empty(ends.size, np.int64))
        kernels.count_equal(found, ends, np.uint32(cut), counted[-1])
    ties = np.concatenate(counted)
    return Cut(cut, ties, _first(wanted, ties))


def _first(wanted: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many of each count to take, so that the first that are wanted are taken."""
    before = np.cumsum(counts) - counts
    taken: NDArray[np.int64] = np.clip(wanted - before, 0, counts)
    return taken


def count_down(counts: NDArray[np.int64], wanted: int) -> tuple[int, int]:
    """Return the bin that holds the wanted-th largest, and its rank inside that bin."""
    above = np.cumsum(counts[::-1])[::-1]  # elements in this bin and all higher ones
    bin_found = int(np.flatnonzero(above >= wanted)[-1])
    return bin_found, int(wanted - (above[bin_found] - counts[bin_found]))


# ---------------------------------------------------------------- all tensors of a model


class Counts(NamedTuple):
    """The numbers of 16 bits that occur in one tensor, each with its count."""

    numbers: NDArray[np.uint16]
    counts: NDArray[np.uint32]
    survivors: int


HighBits = tuple[int, int]
"""The upper bits of the k-th largest of all tensors, and its rank among their sharers."""


class TensorCut(NamedTuple):
    """The k-th largest of all tensors, and how many elements of one tensor equal it."""

    bits: int
    ties: int
    ties_kept: int


def _sparse(counts: NDArray[np.int64], magnitudes: Magnitudes) -> Counts:
    numbers = np.flatnonzero(counts)
    return Counts(
        numbers.astype(np.uint16), counts[numbers].astype(np.uint32), magnitudes.survivors
    )


def _total(observed: Mapping[str, Counts], size: int) -> NDArray[np.int64]:
    total = np.zeros(size, np.int64)
    for found in observed.values():
        total[found.numbers] += found.counts
    return total


def observe_high(walk: Walk, _known: None, **_settings: Any) -> Counts:
    """Count a tensor's magnitudes by their upper bits."""
    magnitudes = Magnitudes(walk)
    return _sparse(count_high(magnitudes), magnitudes)


def conclude_high(
    observed: Mapping[str, Counts], _known: None, *, keep_ratio: float, **_settings: Any
) -> HighBits | None:
    """Find the upper bits of the k-th largest; None if no more than k are not zero."""
    total = _total(observed, HIGH_COUNTS)
    wanted = _wanted(keep_ratio, sum(found.survivors for found in observed.values()))
    return None if total.sum() <= wanted else count_down(total, wanted)


def observe_low(walk: Walk, known: HighBits | None, **_settings: Any) -> Counts | None:
    """Count by their lower bits a tensor's magnitudes that have the upper bits found."""
    if known is None:
        return None
    magnitudes = Magnitudes(walk)
    return _sparse(count_low(magnitudes, known[0]), magnitudes)


def conclude_low(
    observed: Mapping[str, Counts], known: HighBits | None, **_settings: Any
) -> dict[str, TensorCut | None]:
    """Find the k-th largest, and how many of its equals each tensor keeps, the first ones first."""
    if known is None:
        return dict.fromkeys(observed)
    high, rank = known
    low, rank = count_down(_total(observed, LOW_COUNTS), rank)
    ties = np.array([o.counts[o.numbers == low].sum() for o in observed.values()], np.int64)
    return {
        name: TensorCut(high << 15 | low, int(count), int(kept))
        for name, count, kept in zip(observed, ties, _first(rank, ties), strict=True)
    }


def _cut_of_model(magnitudes: Magnitudes, walk: Walk) -> Cut:
    """One tensor's part of a cut through all; it is read only if some of its equals are kept."""
    found: TensorCut | None = walk.census
    nothing = np.zeros(chunk_count(math.prod(walk.shape)), np.int64)
    if found is None:
        return Cut(0, nothing, nothing)
    if 0 < found.ties_kept < found.ties:
        return _cut_at(magnitudes, found.bits, found.ties_kept)
    some = nothing + 1
    return Cut(found.bits, some, some if found.ties_kept else nothing)


@delta_stage(
    paper="arXiv:2306.01708",
    sees="tensor",
    survey=survey_cut,
    surveys_when=lambda settings: settings["keep_ratio"] < 1,
    census=Census(
        when=lambda settings: settings["keep_ratio"] < 1 and settings["scope"] == "model",
        rounds=(Round(observe_high, conclude_high), Round(observe_low, conclude_low)),
        observation_bytes=HIGH_COUNTS * 6,
    ),
    keeps="magnitude",
    is_identity=lambda settings: settings["keep_ratio"] == 1,
    is_lazy=always,
)
def trim(
    block: Block,
    *,
    keep_ratio: KeepRatio = 0.2,
    scope: Scope = "tensor",  # noqa: ARG001 (read by the census and the survey)
) -> None:
    """Keep the elements of largest magnitude in each tensor, set the others to zero.

    k = max(1, ⌊keep_ratio · n⌋), where n counts the elements that no earlier stage has dropped:
    after DARE at p = 0.9 most elements are zero, and counting those would keep every survivor.
    Among elements of equal magnitude at the cut those with the lowest index are kept.

    `scope = "model"` ranks the elements of all tensors of a model together, as the authors' code
    does, so that tensors that change more keep more; of equals, those in the tensors whose names
    come first are kept. Tensors for which rules set another `keep_ratio` are ranked among
    themselves. It reads the models twice more.
    """
    if keep_ratio == 1:
        return
    cut: Cut = block.summary
    chunk = block.start // CHUNK
    block.keep_largest(cut.bits, int(cut.ties_kept[chunk]), int(cut.ties[chunk]))
