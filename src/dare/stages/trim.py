"""Trimming by magnitude, exact and in a stream.

A magnitude's bits order like the magnitude. So the k-th largest of any number of elements is found
by counting: first all of them by their upper 16 bits, then those in the bin that holds the k-th by
their lower 15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import HIGH_COUNTS, LOW_COUNTS, Block, DeltaView
from dare.stages.registry import Census, Round, always, delta_stage, meaning
from dare.tensors.chunks import CHUNK, chunk_count

KeepRatio = Annotated[
    float, meaning("Share of each delta's elements to keep, the largest ones.", gt=0, le=1)
]
Scope = Annotated[
    Literal["tensor", "model"],
    meaning("Keep that share of each tensor, or of all tensors of a model together."),
]
Rescaled = Annotated[
    Literal[False, "l1"], meaning("l1: scale what is kept to the delta's L1 norm; else not.")
]


@dataclass(frozen=True)
class Cut:
    """The k-th largest magnitude of a tensor, and what to do with elements that equal it."""

    bits: int
    ties: NDArray[np.int64]  # the number of elements at the cut, for each chunk
    ties_kept: NDArray[np.int64]  # the number of those that are kept, for each chunk

    def keep_largest(self, block: Block) -> None:
        """Drop what is below the cut."""
        chunk = block.start // CHUNK
        block.keep_largest(self.bits, int(self.ties_kept[chunk]), int(self.ties[chunk]))


def survey_cut(
    view: DeltaView, *, keep_ratio: float, scope: Scope, rescale: Rescaled
) -> tuple[Cut, float]:
    """Find the k-th largest magnitude, k being the share to keep of what has survived.

    The factor is that which keeps the L1 norm, if it is asked for.
    """
    if scope == "model":
        cut = _cut_of_model(view)
    else:
        counts = view.histogram()
        cut = find_cut(view, counts, _wanted(keep_ratio, view.survivors))
    return cut, view.l1_ratio(cut.keep_largest) if rescale else 1.0


def _wanted(keep_ratio: float, survivors: int) -> int:
    return max(1, int(keep_ratio * survivors))


def find_cut(view: DeltaView, counts: NDArray[np.int64], wanted: int) -> Cut:
    """Find the magnitude of that rank, and its equals."""
    if counts.sum() <= wanted:  # no more than that are not zero: keep them all
        return _no_cut(view)
    return _cut_at(view, *find_bits(view, counts, wanted))


def find_bits(view: DeltaView, counts: NDArray[np.int64], wanted: int) -> tuple[int, int]:
    """Return the bits of the wanted-th largest that is not zero, and its rank among its equals.

    The lower 15 bits are counted where the upper 16 agree.
    """
    high, wanted = count_down(counts, wanted)
    low, wanted = count_down(view.histogram(high), wanted)
    return high << 15 | low, wanted


def _no_cut(view: DeltaView) -> Cut:
    nothing = np.zeros(chunk_count(math.prod(view.shape)), np.int64)
    return Cut(0, nothing, nothing)


def _cut_at(view: DeltaView, bits: int, wanted: int) -> Cut:
    ties = view.count_equal(bits)
    return Cut(bits, ties, _first(wanted, ties))


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


# The upper bits of the k-th largest of all tensors, and its rank among their sharers.
HighBits = tuple[int, int]


class TensorCut(NamedTuple):
    """The k-th largest of all tensors, and how many elements of one tensor equal it."""

    bits: int
    ties: int
    ties_kept: int


def _sparse(view: DeltaView, prefix: int | None = None) -> Counts:
    counts = view.histogram(prefix)
    numbers = np.flatnonzero(counts)
    return Counts(numbers.astype(np.uint16), counts[numbers].astype(np.uint32), view.survivors)


def _total(observed: Mapping[str, Counts], size: int) -> NDArray[np.int64]:
    total = np.zeros(size, np.int64)
    for found in observed.values():
        total[found.numbers] += found.counts
    return total


def observe_high(view: DeltaView, _known: None, **_settings: Any) -> Counts:
    """Count a tensor's magnitudes by their upper bits."""
    return _sparse(view)


def conclude_high(
    observed: Mapping[str, Counts], _known: None, *, keep_ratio: float, **_settings: Any
) -> HighBits | None:
    """Find the upper bits of the k-th largest; None if no more than k are not zero."""
    total = _total(observed, HIGH_COUNTS)
    wanted = _wanted(keep_ratio, sum(found.survivors for found in observed.values()))
    return None if total.sum() <= wanted else count_down(total, wanted)


def observe_low(view: DeltaView, known: HighBits | None, **_settings: Any) -> Counts | None:
    """Count by their lower bits a tensor's magnitudes that have the upper bits found."""
    return None if known is None else _sparse(view, known[0])


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


def _cut_of_model(view: DeltaView) -> Cut:
    """One tensor's part of a cut through all; it is read only if some of its equals are kept."""
    found: TensorCut | None = view.census
    nothing = _no_cut(view)
    if found is None:
        return nothing
    if 0 < found.ties_kept < found.ties:
        return _cut_at(view, found.bits, found.ties_kept)
    some = nothing.ties + 1
    return Cut(found.bits, some, some if found.ties_kept else nothing.ties)


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
    is_identity=lambda settings: settings["keep_ratio"] == 1,
    is_lazy=always,
)
def trim(
    block: Block,
    *,
    keep_ratio: KeepRatio = 0.2,
    scope: Scope = "tensor",  # noqa: ARG001 (read by the census and the survey)
    rescale: Rescaled = False,  # noqa: ARG001 (read by the survey)
) -> None:
    """Keep the elements of largest magnitude in each tensor, set the others to zero.

    k = max(1, ⌊keep_ratio · n⌋), where n counts the elements that no earlier stage has dropped:
    after DARE at p = 0.9 most elements are zero, and counting those would keep every survivor.
    Among elements of equal magnitude at the cut those with the lowest index are kept.

    `scope = "model"` ranks the elements of all tensors of a model together, as the authors' code
    does, so that tensors that change more keep more; of equals, those in the tensors whose names
    come first are kept. Tensors for which rules set another `keep_ratio` are ranked among
    themselves. It reads the models twice more.

    `rescale = "l1"` scales what is kept to the L1 norm of the whole delta, as mergekit can.
    """
    if keep_ratio == 1:
        return
    cut, factor = block.summary
    cut.keep_largest(block)
    block.factor *= factor
