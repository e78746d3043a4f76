"""Limiting deltas by magnitude: the largest, the middle, or small steps.

The k-th largest magnitude of a tensor is found exactly, in a stream. A sample says between which
magnitudes it most likely lies. One pass counts what is above and collects what is between; the k-th
is found exactly among these. If it is not there, or if there is no room for them and they differ,
it is found by counting: a magnitude's bits order like the magnitude, so all are counted by their
upper 16 bits, then those in the bin that holds the k-th by their lower 15. A GPU that holds the
models finds the ranks that a stage declares (`ranks`) before its surveys begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.kernels import Band
from dare.kernels.reference import INDEX_BITS
from dare.stages.blocks import BINS, Block, DeltaView, Floats
from dare.stages.ranks import (
    CutRows,
    Keys,
    magnitudes_left,
    row_length,
    select,
    survey_rows,
    work_on_rows,
)
from dare.stages.registry import Census, Round, always, delta_stage, meaning
from dare.tensors.chunks import CHUNK

SMALL = 1 << 16  # elements of a tensor that are all collected
LARGEST = 0x7FFFFFFF  # the bits of the largest magnitude
DEVIATIONS = 4  # standard deviations of a rank in the sample that are collected on either side
GROUPS = 16  # parts of a sample whose counts are compared for that deviation

KeepRatio = Annotated[
    float, meaning("Share of each delta's elements to keep, the largest ones.", gt=0, le=1)
]
Scope = Annotated[
    Literal["tensor", "model"],
    meaning("Keep that share of each tensor, or of all tensors of a model together."),
]
Rescaled = Annotated[
    Literal[False, "l1"], meaning("l1: scale what is kept to the delta's L1 norm.")
]


class Cut(NamedTuple):
    """A magnitude, and the index after the last of its equals that counts as larger."""

    bits: int
    end: int


ABOVE_ALL = Cut(LARGEST, 0)


def band_between(lowest: Cut, highest: Cut = ABOVE_ALL) -> Band:
    """Return the band from one cut to below another."""
    return Band(*lowest, *highest)


def survey_cut(
    view: DeltaView, *, keep_ratio: float, scope: Scope, rescale: Rescaled
) -> tuple[Band, float]:
    """Find the k-th largest magnitude, k being the share to keep of what has survived.

    The factor is that which keeps the L1 norm, if it is asked for.
    """
    if scope == "model":
        cut = _cut_of_model(view)
    else:
        (cut,) = find_cuts(view, lambda survivors: [_wanted(keep_ratio, survivors)])
    band = band_between(cut)
    return band, view.l1_ratio(lambda block: block.keep(band)) if rescale else 1.0


def _wanted(keep_ratio: float, survivors: int) -> int:
    return max(1, int(keep_ratio * survivors))


def find_cuts(view: DeltaView, wanted: Callable[[int], Sequence[int]]) -> list[Cut]:
    """Find the magnitudes of the ranks that are wanted of so many survivors, in one pass.

    The rank 0 is above all. If no more elements than a rank are not zero, its cut is below them.
    """
    elements = math.prod(view.shape)
    cuts = [view.known_cut(rank) if rank else ABOVE_ALL for rank in wanted(elements)]
    known = [Cut(*cut) for cut in cuts if cut is not None]
    if len(known) == len(cuts):
        return known
    sample = view.sample() if elements > SMALL else None
    brackets = _brackets(sample, wanted(0 if sample is None else sample.size))
    room = max(view.spare_bytes, 4 * CHUNK) // (8 * len(brackets))
    keys = np.empty((len(brackets), min(elements, room)), np.uint64)
    figures = np.zeros((len(brackets), 2), np.int64)
    survivors = 0
    for block in view():
        for bracket, room_for_keys, counts in zip(brackets, keys, figures, strict=True):
            left = block.collect(*bracket, room_for_keys, counts)
        survivors += left
    return list(map(partial(_find_cut, view), wanted(survivors), brackets, keys, figures))


def _brackets(sample: NDArray[np.uint32] | None, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return two magnitudes for each rank between which its own lies, judging by a sample."""
    if sample is None or sample.size < GROUPS:
        return [(1, LARGEST)] * len(ranks)
    ordered = np.maximum(np.sort(sample)[::-1], 1)
    found = []
    for rank in ranks:
        margin = math.ceil(DEVIATIONS * (1 + _deviation(sample, ordered[max(rank - 1, 0)])))
        low = ordered[rank - 1 + margin] if rank + margin <= sample.size else 1
        high = ordered[rank - 1 - margin] if rank > margin else LARGEST
        found.append((int(low), int(high)) if rank else (LARGEST, LARGEST))
    return found


def _deviation(sample: NDArray[np.uint32], bits: int) -> float:
    """Return how far the count of a magnitude and larger ones is off, by that of its groups."""
    groups = sample[: sample.size // GROUPS * GROUPS].reshape(GROUPS, -1)
    counts = np.count_nonzero(groups >= bits, axis=1)
    return float(np.std(counts, ddof=1)) * math.sqrt(GROUPS)


def _find_cut(
    view: DeltaView,
    rank: int,
    bracket: tuple[int, int],
    keys: NDArray[np.uint64],
    figures: NDArray[np.int64],
) -> Cut:
    """Return the cut of a rank, from what was collected if it is there."""
    (low, high), (above, inside) = bracket, figures.tolist()
    if rank == 0:
        return ABOVE_ALL
    if low == 1 and above + inside <= rank:  # only zeros are below
        return Cut(0, 0)
    is_inside = above < rank <= above + inside
    if is_inside and inside <= keys.size:
        found, place = keys[:inside], inside + above - rank
        found.partition(place)
        key = int(found[place])
        return Cut(key >> INDEX_BITS, (1 << INDEX_BITS) - key % (1 << INDEX_BITS))
    if is_inside and low == high:
        return Cut(low, view.end_of(low, rank - above))
    return count_cut(view, view.histogram().counts, rank)


def count_cut(view: DeltaView, counts: NDArray[np.int64], rank: int) -> Cut:
    """Find a cut by counting."""
    if counts.sum() <= rank:
        return Cut(0, 0)
    bits, rank = find_bits(view, counts, rank)
    return Cut(bits, view.end_of(bits, rank))


def find_bits(view: DeltaView, counts: NDArray[np.int64], wanted: int) -> tuple[int, int]:
    """Return the bits of the wanted-th largest that is not zero, and its rank among its equals.

    `counts` are those by the upper 16 bits; the lower 15 are counted where these agree.
    """
    first = count_down(counts, wanted)[0] << 15
    found = view.histogram(first, 0)
    bits, rank = count_down(found.counts, wanted - found.above)
    return first + bits, rank


def count_down(counts: NDArray[Any], wanted: float) -> tuple[int, int]:
    """Return the bin that holds the wanted-th largest, and its rank inside that bin."""
    above = np.cumsum(counts[::-1])[::-1]  # elements in this bin and all higher ones
    bin_found = int(np.flatnonzero(above >= wanted)[-1])
    return bin_found, int(wanted - (above[bin_found] - counts[bin_found]))


# ---------------------------------------------------------------- all tensors of a model


class Sample(NamedTuple):
    """Magnitudes of elements of one tensor that have survived, each of which stands for several."""

    magnitudes: NDArray[np.uint32]
    weight: float
    elements: int


class Counts(NamedTuple):
    """The bins of a histogram that are not empty, each with its count, of one tensor."""

    numbers: NDArray[np.uint16]
    counts: NDArray[np.uint32]
    seen: NDArray[np.uint32]
    above: int
    survivors: int


class Bins(NamedTuple):
    """The magnitudes to be counted: BINS of 2^shift from `low` on."""

    low: int
    shift: int


ALL_BINS = Bins(0, 15)


class TensorCut(NamedTuple):
    """The k-th largest of all tensors, and how many elements of one tensor equal it."""

    bits: int
    ties: int
    ties_kept: int


def observe_sample(view: DeltaView, _known: None, **_settings: Any) -> Sample:
    """Take a sample of a tensor, unless it is small."""
    elements = math.prod(view.shape)
    found = view.sample() if elements > SMALL else None
    if found is None:
        return Sample(np.empty(0, np.uint32), 0, elements)
    return Sample(found, elements / view.sampled, elements)


def conclude_sample(
    observed: Mapping[str, Sample], _known: None, *, keep_ratio: float, **_settings: Any
) -> Bins:
    """Find bins that most likely hold the k-th largest."""
    samples = [found for found in observed.values() if found.magnitudes.size >= GROUPS]
    if not samples:
        return ALL_BINS
    bits = np.concatenate([found.magnitudes for found in samples])
    weights = np.repeat([s.weight for s in samples], [s.magnitudes.size for s in samples])
    counts = np.bincount(bits >> np.uint32(15), weights, BINS)

    def magnitude_at(rank: float) -> int:
        if not 0 < rank < counts.sum():
            return LARGEST if rank <= 0 else 0
        high = count_down(counts, rank)[0]
        rest = rank - counts[high + 1 :].sum()
        inside = bits >> np.uint32(15) == high
        order = np.argsort(bits[inside])[::-1]
        place = np.searchsorted(np.cumsum(weights[inside][order]), rest)
        return int(bits[inside][order[min(place, order.size - 1)]])

    rank = keep_ratio * float(counts.sum())
    middle = magnitude_at(rank)
    squares = sum((s.weight * _deviation(s.magnitudes, middle)) ** 2 for s in samples)
    unseen = sum(s.elements for s in observed.values()) - sum(s.elements for s in samples)
    for deviations in (DEVIATIONS, DEVIATIONS / 2):  # bins of one magnitude are worth a risk
        margin = deviations * math.sqrt(squares) + unseen
        low, high = magnitude_at(rank + margin), magnitude_at(rank - margin)
        if high - low < BINS:
            break
    return Bins(low, max(0, (high - low).bit_length() - 16))


def observe_counts(view: DeltaView, known: Bins, **_settings: Any) -> Counts:
    """Count a tensor's magnitudes in bins."""
    found = view.histogram(*known)
    numbers = np.flatnonzero(found.counts)
    counts = found.counts[numbers].astype(np.uint32)
    small = numbers.astype(np.uint16), counts, found.seen[numbers]
    return Counts(*small, found.above, found.survivors)


def conclude_counts(
    observed: Mapping[str, Counts], known: Bins, *, keep_ratio: float, **_settings: Any
) -> Bins | dict[str, TensorCut | None]:
    """Find the k-th largest, and how many of its equals each tensor keeps, the first ones first.

    It is None where no more than k are not zero. If its bin holds other magnitudes too, or no bin
    holds it, say which to count instead.
    """
    total, seen = np.zeros(BINS, np.int64), np.zeros(BINS, np.uint32)
    for found in observed.values():
        total[found.numbers] += found.counts
        seen[found.numbers] |= found.seen
    above = sum(found.above for found in observed.values())
    wanted = _wanted(keep_ratio, sum(found.survivors for found in observed.values()))
    if known.low <= 1 and above + total.sum() <= wanted:  # no more than that are not zero
        return dict.fromkeys(observed)
    if not above < wanted <= above + total.sum():
        return ALL_BINS
    number, rank = count_down(total, wanted - above)
    lacking, rest = divmod(int(seen[number]), 1 << 16)
    first = known.low + (number << known.shift)
    if rest & lacking:
        return Bins(first, 0)
    bits = first + rest
    ties = np.array([o.counts[o.numbers == number].sum() for o in observed.values()], np.int64)
    kept = np.clip(rank - (np.cumsum(ties) - ties), 0, ties)
    return {
        name: TensorCut(bits, int(count), int(first))
        for name, count, first in zip(observed, ties, kept, strict=True)
    }


def _cut_of_model(view: DeltaView) -> Cut:
    """One tensor's part of a cut through all; it is read only if some of its equals are kept."""
    found: TensorCut | None = view.census
    if found is None:
        return Cut(0, 0)
    if 0 < found.ties_kept < found.ties:
        return Cut(found.bits, view.end_of(found.bits, found.ties_kept))
    return Cut(found.bits, math.prod(view.shape) if found.ties_kept else 0)


@delta_stage(
    paper="arXiv:2306.01708",
    sees="tensor",
    survey=survey_cut,
    surveys_when=lambda settings: settings["keep_ratio"] < 1,
    census=Census(
        when=lambda settings: settings["keep_ratio"] < 1 and settings["scope"] == "model",
        # Counting is done again if the first bins are not the right ones, or too wide.
        rounds=(
            Round(observe_sample, conclude_sample),
            *[Round(observe_counts, conclude_counts, lambda known: isinstance(known, Bins))] * 3,
        ),
        observation_bytes=BINS * 10,
    ),
    ranks=lambda settings, elements: (
        [_wanted(settings["keep_ratio"], elements)] if settings["scope"] == "tensor" else []
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
    themselves. It reads the models once more.

    `rescale = "l1"` scales what is kept to the L1 norm of the whole delta, as mergekit can.
    """
    if keep_ratio == 1:
        return
    band, factor = block.summary
    block.keep(band)
    block.factor *= factor


KeepMiddle = Annotated[
    float, meaning("Share of each delta's elements to keep, β, the middle ones.", gt=0, le=1)
]
DropLargest = Annotated[
    float, meaning("Share to drop at the top, γ, as far as β leaves room for it.", ge=0, lt=1)
]
Compared = Annotated[
    Literal["tensor", "row"], meaning("Compare the elements of a tensor, or of a row.")
]


Middle = Band | CutRows


def survey_middle(
    view: DeltaView, *, keep_middle: float, drop_largest: float, per: Compared, rescale: Rescaled
) -> tuple[Middle, float]:
    """Find the magnitudes that bound a tensor's middle, or the middles of rows that are cut.

    The factor is that which keeps the L1 norm, if it is asked for.
    """
    share = keep_middle, drop_largest
    found: Middle
    if per == "row":
        work = partial(_select_middle, share)
        found = survey_rows(view, row_length(view.shape), magnitudes_left, work)
    else:
        found = band_between(*find_cuts(view, partial(_ranks, share)))
    return found, view.l1_ratio(partial(_keep_middle, share, found)) if rescale else 1.0


@delta_stage(
    paper="arXiv:2312.06795",
    sees="tensor",
    survey=survey_middle,
    surveys_when=lambda settings: settings["keep_middle"] < 1,
    ranks=lambda settings, elements: (
        _ranks((settings["keep_middle"], settings["drop_largest"]), elements)
        if settings["per"] == "tensor"
        else []
    ),
    is_lazy=lambda settings: settings["per"] == "tensor",
    is_identity=lambda settings: settings["keep_middle"] == 1,
)
def breadcrumbs(
    block: Block,
    *,
    keep_middle: KeepMiddle = 0.9,
    drop_largest: DropLargest = 0.01,
    per: Compared = "tensor",  # noqa: ARG001 (read by the survey)
    rescale: Rescaled = False,  # noqa: ARG001 (likewise)
) -> None:
    """Drop the smallest and the very largest elements, keep the middle.

    Of n elements the t = min(⌊γ·n⌋, n - k) largest are dropped, the next k = max(1, ⌊β·n⌋) are
    kept as they are, and the n - k - t smallest are dropped. n counts the elements of the tensor,
    or with `per = "row"` of the row, that no earlier stage has dropped. Of elements with equal
    magnitude, those with the lowest index count as larger. `rescale = "l1"` scales what is kept to
    the L1 norm of the whole delta, as mergekit can.
    """
    if keep_middle < 1:
        found, factor = block.summary
        _keep_middle((keep_middle, drop_largest), found, block)
        block.factor *= factor


def _keep_middle(share: tuple[float, float], found: Middle, block: Block) -> None:
    if isinstance(found, CutRows):
        keep = work_on_rows(block, found, magnitudes_left(block), partial(_select_middle, share))
        block.kernels.multiply_kept(block.values, keep)
        block.leave(keep != 0)
        return
    block.keep(found)


def _ranks(share: tuple[float, float], elements: int) -> tuple[int, int]:
    """Return the ranks of the smallest element that is kept and of the last one above those."""
    kept, top = _shares(elements, *share)
    return kept + top, top


def _shares(elements: int, keep_middle: float, drop_largest: float) -> tuple[int, int]:
    """Return how many of so many elements are kept, and how many are dropped above those."""
    kept = max(1, int(keep_middle * elements))
    return kept, max(0, min(int(drop_largest * elements), elements - kept))


def _select_middle(share: tuple[float, float], kernels: Any, keys: Keys) -> Floats:
    columns = keys.shape[1]
    kept, top = _shares_of_left(columns, *share)
    return select(kernels, keys, columns - top - kept, columns - top)


@lru_cache
def _shares_of_left(columns: int, keep_middle: float, drop_largest: float) -> NDArray[np.int64]:
    """Return the shares for each number of elements that may be left of a row."""
    return np.array([_shares(left, keep_middle, drop_largest) for left in range(columns + 1)]).T


Step = Annotated[
    float, meaning("The largest magnitude that a change may have.", ge=0, allow_inf_nan=False)
]


@delta_stage()
def nearswap(block: Block, *, t: Step = 0.0001) -> None:
    """Limit every change to t: a small change is taken over whole, a large one in part.

    δ̂ᵢ = min(1, t/|δᵢ|)·δᵢ. Followed by `sum` it is mergekit's `nearswap`.
    """
    np.clip(block.delta, -np.float32(t), np.float32(t), out=block.values)
