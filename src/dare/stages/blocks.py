"""The arguments of stages: one model's delta over a chunk, and the deltas of all models over it.

Where no stage asks for values, several chunks that follow each other are worked on as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache, partial
from itertools import combinations_with_replacement
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from dare.kernels import GROUP, Band, Operand, reference
from dare.tensors.chunks import chunk_spans
from dare.tensors.mask import mask_key

Floats = NDArray[np.float32]

BINS = 1 << 16  # of a histogram of magnitudes
INFINITY = 0x7F800000  # the bits of an infinite magnitude; those of NaN are greater

_key = lru_cache(maxsize=1024)(mask_key)


@dataclass(eq=False, repr=False)
class Block:
    """One model's delta over a chunk, on its way through the stages.

    It is lazy. The work of the usual stages, dropping by a mask and keeping the largest, is only
    noted down; a combine stage hands the notes of all models to one kernel that does everything
    while the numbers are in registers. A stage that needs more asks for `values`, which are
    computed then. A factor that all elements share is left to the weight in the combine stage.
    """

    kernels: Any
    tensor: str
    start: int  # index of the first element in the tensor
    seed: int
    tuned: NDArray[Any]
    # The base's stored elements, or zeros: the delta is the difference from these.
    origin: NDArray[Any]
    _scratch: Scratch | OnlyNotes
    _threshold_bits: np.int32
    factor: float = 1.0  # a number that `values` still have to be multiplied by
    summary: Any = None  # the result of the survey of the stage being applied
    # The number of the draw that the stage being applied makes; None if it is not random.
    draw: int | None = None
    mask: Mask | None = None
    band: Band | None = None  # the magnitudes that are noted down to be kept, after the mask
    _values: Floats | None = None
    _left: NDArray[np.bool_] | None = None
    _figures: NDArray[np.int64] | None = None
    # The survivors of each stage, as `end_stage` leaves them.
    _counts: list[int | FigureColumn | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self._survivors = self.tuned.size

    @property
    def key(self) -> tuple[np.uint32, np.uint32]:
        """The two words that the masks of the stage being applied are keyed with."""
        if self.draw is None:
            raise TypeError("a stage draws at random, but is not registered with is_random")
        key0, key1 = _key(self.seed, self.tensor, self.draw)
        return np.uint32(key0), np.uint32(key1)

    @property
    def is_noted(self) -> bool:
        """True if all that was done to the block is in `mask` and `band`."""
        return self._values is None

    @property
    def values(self) -> Floats:
        """The delta, to be changed in place, but for `factor`."""
        return self._carry_out() if self._values is None else self._values

    def take(self) -> Floats:
        """Return `values`, but keep them only if the notes cannot give them once more."""
        is_noted, values = self.is_noted, self.values
        if is_noted:
            self._values = self._left = None
        return values

    @property
    def delta(self) -> Floats:
        """The delta itself: `values`, with the factor multiplied in."""
        if self.factor != 1:
            with np.errstate(invalid="ignore", over="ignore"):
                np.multiply(self.values, np.float32(self.factor), out=self.values)
            self.factor = 1.0
        return self.values

    def _carry_out(self) -> Floats:
        """Compute the delta and carry out the notes."""
        values = np.empty(self.size, np.float32)
        lanes, kept = self.lanes()
        peak, over = self._take(lanes, values)
        if peak > INFINITY and self.zero_common_infinities():
            peak, over = self._take(lanes, values)
        left = self._keep_band(values, self.band) if self.band else kept
        self.measured(np.array([[peak, over, kept, left]], np.int64))
        if self.band:
            self._left = values != 0
        elif self.mask is not None:
            self._left = lanes[: self.size] != 0
        self._values = values
        return values

    def _take(self, lanes: NDArray[np.uint8], values: Floats) -> tuple[int, int]:
        base = self._scratch.base_of(self.kernels, self.origin)
        peak, over = self.kernels.delta(self.tuned, base, lanes, values, self._threshold_bits)
        return int(peak), int(over)

    def zero_common_infinities(self) -> bool:
        """Make sure that an infinity which the base has too is no change; say if there is any.

        The difference of two infinities is NaN, so zeros are put in their place on both sides. Any
        other value differs from an infinite base by an infinity, as before. This is done only where
        a delta is NaN.
        """
        origin = self._scratch.finite(self.kernels, self.origin)
        if origin is self.origin:
            return False
        self.tuned = _without_common_infinities(self.tuned, self.origin)
        self.origin = origin
        return True

    def lanes(self) -> tuple[NDArray[np.uint8], int]:
        """Draw the mask that is noted down: 255 for what is kept, else 0; and how many are kept.

        The array is used again by the next call.
        """
        if self.mask is None:
            return self._scratch.all_kept, self.size
        key0, key1, high, low = self.mask
        lanes = self._scratch.lanes
        kept = self.kernels.draw(
            lanes, self.size, self.start, np.uint32(key0), np.uint32(key1), high, np.uint32(low)
        )
        return lanes, int(kept)

    def drop(self, mask: Mask) -> None:
        """Drop the elements that a mask does not keep."""
        if self.is_noted and self.mask is None and self.band is None:
            self.mask = mask
            return
        values = self.values
        self.mask, self.band = mask, None
        lanes, _ = self.lanes()
        self.kernels.keep_lanes(values, lanes)
        self.leave(lanes[: self.size] != 0)

    def keep(self, band: Band) -> None:
        """Drop magnitudes that lie outside a band."""
        if self.is_noted and self.band is None:
            self.band = band
            return
        self._keep_band(self.values, band)
        self.leave_nonzero()

    def _keep_band(self, values: Floats, band: Band) -> int:
        lanes = np.full(self.size, 255, np.uint8)
        kept = self.kernels.keep_band(values, self._scratch.zeros, lanes, self.start, *band)
        self.kernels.keep_lanes(values, lanes)
        return int(kept)

    def collect(
        self, low: int, high: int, keys: NDArray[np.uint64], figures: NDArray[np.int64]
    ) -> int:
        """Do `collect_keys`; return how many elements have survived."""
        arguments = (low, high, self.start, keys)
        return self._tally(self.kernels.collect_keys, arguments, (figures,))

    def count(self, low: int, shift: int, tallies: Sequence[NDArray[Any]]) -> int:
        """Do `count_bins`; return how many elements have survived."""
        return self._tally(self.kernels.count_bins, (low, shift), tallies)

    def _tally(
        self, kernel: Callable[..., int], arguments: tuple[Any, ...], tallies: Sequence[Any]
    ) -> int:
        """Run a kernel on the delta that adds to tallies; return how many have survived."""
        if not self.is_noted or self.band is not None:
            kernel(self.values, self._scratch.zeros, self._scratch.all_kept, *arguments, *tallies)
            return self._survivors
        before = [tally.copy() for tally in tallies]
        lanes, survivors = self.lanes()
        peak = kernel(self.tuned, self.origin, lanes, *arguments, *tallies)
        if peak > INFINITY and self.zero_common_infinities():
            for tally, old in zip(tallies, before, strict=True):
                tally[:] = old
            kernel(self.tuned, self.origin, lanes, *arguments, *tallies)
        return survivors

    def survivors(self) -> NDArray[np.bool_] | None:
        """Return which elements no earlier stage has dropped; None if none was dropped."""
        if self.is_noted and self.band is None:
            return None if self.mask is None else self.lanes()[0][: self.size] != 0
        if self._values is None:
            self._carry_out()
        return self._left

    def leave(self, kept: NDArray[np.bool_]) -> None:
        """Note which elements the stage being applied has kept; the others' values are 0."""
        self._left = kept if self._left is None else self._left & kept
        self._survivors = int(np.count_nonzero(self._left))

    def leave_nonzero(self) -> None:
        """Take all zeros for dropped."""
        self._left = self.values != 0
        self._survivors = int(np.count_nonzero(self._left))

    def measured(self, figures: NDArray[np.int64]) -> None:
        """Take in the figures of the kernel that carried out the notes, a row for each chunk."""
        self._figures = figures
        column = FigureColumn.IN_BAND if self.band else FigureColumn.MASKED
        self._survivors = int(figures[:, column].sum())

    def end_stage(self) -> None:
        """Remember for the report how many elements a stage has left.

        That is a number; or, of a block that is noted, the figure that will say so once the notes
        are carried out, or None if nothing is dropped.
        """
        if not self.is_noted:
            self._counts.append(self._survivors)
        elif self.band:
            self._counts.append(FigureColumn.IN_BAND)
        else:
            self._counts.append(FigureColumn.MASKED if self.mask else None)

    def figures(self) -> list[tuple[int, ...]]:
        """Return for each chunk the largest magnitude's bits, the count over the threshold, and
        the count of survivors after each stage.
        """
        if self._figures is None:
            self.take()
        assert self._figures is not None  # carrying out has measured
        found = self._figures.T.tolist()
        sizes = [size for _, size in chunk_spans(self.size)]
        left = (
            sizes if c is None else found[c] if isinstance(c, FigureColumn) else [c] * len(sizes)
            for c in self._counts
        )
        of_all = found[FigureColumn.PEAK], found[FigureColumn.OVER_THRESHOLD]
        return list(zip(*of_all, *left, strict=True))


class FigureColumn(IntEnum):
    """The columns of what a kernel counts of a chunk while it carries out the notes."""

    PEAK = 0  # the bits of the largest magnitude
    OVER_THRESHOLD = 1
    MASKED = 2  # elements that the mask keeps
    IN_BAND = 3  # those of them that the band keeps


class Mask(NamedTuple):
    """The source of a mask: two key words, and the threshold's upper 8 and lower 32 bits."""

    key0: int
    key1: int
    high: int
    low: int


class Scratch:
    """One thread's arrays, used again for each chunk."""

    def __init__(self, size: int) -> None:
        self.lanes = np.empty(size, np.uint8)
        self.merged = np.empty(size, np.float32)
        self._floats = np.empty(size, np.float32)
        self._decoded: NDArray[Any] | None = None
        self._finite: tuple[NDArray[Any], NDArray[Any]] | None = None

    @cached_property
    def all_kept(self) -> NDArray[np.uint8]:
        """A mask that keeps everything."""
        return np.full(self.lanes.size, 255, np.uint8)

    @cached_property
    def zeros(self) -> Floats:
        """A base for kernels that take the difference of values that are one already."""
        return np.zeros(self.merged.size, np.float32)

    def base_of(self, kernels: Any, base: NDArray[Any]) -> Floats:
        """Return the base as float32; decoded once for all models of a chunk."""
        if base.dtype == np.float32:  # which only F32 is carried by
            return base
        floats = self._floats[: base.size]
        if self._decoded is not base:
            kernels.decode(base, floats)
            self._decoded = base
        return floats

    def finite(self, kernels: Any, base: NDArray[Any]) -> NDArray[Any]:
        """Return the base's stored elements with zeros for infinities; itself if there are none."""
        if self._finite is None or self._finite[0] is not base:
            is_infinite = np.isinf(self.base_of(kernels, base))
            changed = np.where(is_infinite, base.dtype.type(0), base) if is_infinite.any() else base
            self._finite = base, changed
        return self._finite[1]


class ComputedError(Exception):
    """Values are asked for where notes alone are taken: of several chunks at once."""


class OnlyNotes:
    """In the place of a `Scratch`: whatever is computed needs an array of it."""

    def __getattr__(self, name: str) -> Any:
        raise ComputedError(name)


def _without_common_infinities(tuned: NDArray[Any], base: NDArray[Any]) -> NDArray[Any]:
    """Return a model's elements, but where the base is infinite their difference from it."""
    values, origin = _decoded(tuned), _decoded(base)
    is_same = tuned == base if tuned.dtype == base.dtype else values == origin
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.where(is_same, np.float32(0), values - origin)
    stored = np.empty_like(tuned)
    reference.encode(change, stored)
    return np.where(np.isinf(origin), stored, tuned)


def _decoded(raw: NDArray[Any]) -> Floats:
    values = np.empty(raw.size, np.float32)
    reference.decode(raw, values)
    return values


class Note(NDArrayOperatorsMixin):
    """Deltas to be added up or elected, noted down.

    It is an array as soon as somebody computes with it. One that a stage returns as it is, is
    carried out together with what follows, in one call for a whole batch.
    """

    def __init__(
        self, deltas: Deltas, weights: Sequence[float], shares: Sequence[float], *, elects: bool
    ) -> None:
        self.operands = deltas.operands(weights, shares)
        self.elects = elects
        self.is_array = False
        self._deltas = deltas
        self._weights_and_shares = weights, shares

    @cached_property
    def array(self) -> Floats:
        """The merged delta, computed when it is first asked for."""
        self.is_array = True
        return self._deltas.carry_out(self, *self._weights_and_shares)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype, copy=copy)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **how: Any) -> Any:
        arrays = [each.array if isinstance(each, Note) else each for each in inputs]
        if "out" in how:
            outs = (each.array if isinstance(each, Note) else each for each in how["out"])
            how["out"] = tuple(outs)
        return getattr(function, method)(*arrays, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)

    def __getitem__(self, place: Any) -> Any:
        return self.array[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self.array[place] = value

    def __len__(self) -> int:
        return self._deltas.size


@dataclass(eq=False, repr=False)
class Deltas:
    """The deltas of all models over one chunk, in recipe order, and ways to combine them."""

    kernels: Any
    _base: NDArray[Any]
    blocks: Sequence[Block]
    weights: Sequence[float]
    _scratch: Scratch | OnlyNotes
    _threshold_bits: np.int32
    summary: Any = None

    def __post_init__(self) -> None:
        self.size = self._base.size

    @property
    def base(self) -> Floats:
        """The base's tensor over this chunk; 0 where it is infinite."""
        return self._scratch.base_of(self.kernels, self._scratch.finite(self.kernels, self._base))

    @property
    def plain(self) -> tuple[Floats, NDArray[np.uint8]]:
        """A base of zeros and the lanes of a mask that keeps everything, for kernels."""
        return self._scratch.zeros, self._scratch.all_kept

    def sum(self, weights: Sequence[float], of_base: float = 0.0) -> Floats:
        """Return Σ weight·factor·delta + of_base·base, each product rounded once to float32."""
        if self._can_note(weights):
            noted = Note(self, weights, [0.0] * len(weights), elects=False)
            if not of_base:
                return cast("Floats", noted)
            total = noted.array
        else:
            total = self._scratch.merged[: self.size]
            total.fill(0)
            for block, weight in zip(self.blocks, weights, strict=True):
                if weight != 0:  # and not 0·∞
                    self.kernels.add_scaled(total, block.take(), np.float32(weight * block.factor))
        if of_base:
            self.kernels.add_scaled(total, self.base, np.float32(of_base))
        return total

    def elect(self, weights: Sequence[float], shares: Sequence[float]) -> Floats:
        """Return the weighted mean of the side that outweighs the other, element by element.

        A side is divided by the sum of its models' shares.
        """
        if self._can_note(weights):
            return cast("Floats", Note(self, weights, shares, elects=True))
        merged = self._scratch.merged[: self.size]
        sums = self.sides(weights, shares, of_all=True)
        with np.errstate(invalid="ignore", over="ignore"):
            balance = sums[0] + sums[1]
        self.kernels.elect(sums.reshape(-1), balance, merged)
        return merged

    def sides(
        self, weights: Sequence[float], shares: Sequence[float], *, of_all: bool = False
    ) -> Floats:
        """Return four rows: the positive terms, the negative ones, and the shares of both.

        Unless `of_all`, a model of weight 0 has no part in them, and 0·∞ makes nothing NaN.
        """
        sums = np.zeros((4, self.size), np.float32)
        for block, weight, share in zip(self.blocks, weights, shares, strict=True):
            if weight != 0 or of_all:
                combined = np.float32(weight * block.factor)
                values = block.take() if of_all else block.values
                self.kernels.vote(sums.reshape(-1), values, combined, np.float32(share))
        return sums

    def _can_note(self, weights: Sequence[float]) -> bool:
        """Tell whether one kernel can do it all at once."""
        kinds = {block.tuned.dtype for block in self.blocks}
        noted = all(block.is_noted and block.origin is self._base for block in self.blocks)
        return len(kinds) == 1 and noted and 0 not in weights

    def operands(self, weights: Sequence[float], shares: Sequence[float]) -> list[Operand]:
        """Return the blocks, of which nothing is computed yet, as operands of a kernel."""
        return [
            Operand(block.tuned, block.mask, block.band, np.float32(weight * block.factor), share)
            for block, weight, share in zip(self.blocks, weights, shares, strict=True)
        ]

    def carry_out(self, note: Note, weights: Sequence[float], shares: Sequence[float]) -> Floats:
        """Compute what a note says, by itself."""
        if isinstance(self._scratch, OnlyNotes):
            raise ComputedError("array")
        merged, start = np.empty(self.size, np.float32), self.blocks[0].start
        figures = self._combine(note.operands, start, note.elects, merged)
        if figures[..., 0].max() > INFINITY:
            changed = [block.zero_common_infinities() for block in self.blocks]
            if any(changed):
                self._base = self.blocks[0].origin
                figures = self._combine(self.operands(weights, shares), start, note.elects, merged)
        self.measured(figures)
        return merged

    def _combine(
        self, operands: list[Operand], start: int, elects: bool, out: Floats
    ) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.kernels.combine(
            self._base, operands, start, elects, self._threshold_bits, out
        )
        return found

    def measured(self, figures: NDArray[np.int64]) -> None:
        """Give each block its figures, chunk by chunk."""
        for number, block in enumerate(self.blocks):
            block.measured(figures[:, number])


# ---------------------------------------------------------------- whole tensors, for surveys


@dataclass(eq=False)
class View:
    """A tensor as a survey sees it: calling it goes over its blocks in order, as often as asked."""

    kernels: Any
    shape: tuple[int, ...]
    spare_bytes: int  # memory the survey may use to remember what it has seen
    walk: Callable[[], Iterator[Any]]

    def __call__(self) -> Iterator[Any]:
        """Yield `Block`s for a delta stage, `Deltas` for a combine stage."""
        return self.walk()


class BinCounts(NamedTuple):
    """Magnitudes counted in bins, and how many are above those; zeros are not counted."""

    counts: NDArray[np.int64]
    seen: NDArray[np.uint32]  # the bits by which magnitudes of a bin differ, as in `count_bins`
    above: int
    survivors: int  # elements that no earlier stage has dropped


@dataclass(eq=False)
class DeltaView(View):
    """One model's tensor, and figures of its magnitudes."""

    census: Any = None  # the conclusion of the stage's census for the tensor, if it has one
    # Returns a block of elements from all over the tensor; None if reading them takes long.
    peek: Callable[[], Block | None] = lambda: None
    # Returns a rank's bits and the place after its equals that count, if they were found before.
    known_cut: Callable[[int], tuple[int, int] | None] = lambda _rank: None

    sampled: int = 0  # elements in the sample, once it was taken

    def sample(self) -> NDArray[np.uint32] | None:
        """Return magnitudes from all over the tensor, of elements that have survived."""
        block = self.peek()
        if block is None:
            return None
        self.sampled = block.size
        bits, left = reference.magnitude_bits(block.values), block.survivors()
        return bits if left is None else bits[left]

    def histogram(self, low: int = 0, shift: int = 15) -> BinCounts:
        """Count the magnitudes that are not zero in BINS of 2^shift each, from `low` on."""
        counts, seen = np.zeros(BINS, np.int64), np.zeros(BINS, np.uint32)
        figures = np.zeros(2, np.int64)
        survivors = sum(block.count(low, shift, (counts, seen, figures)) for block in self())
        return BinCounts(counts, seen, int(figures[0]), survivors)

    def end_of(self, bits: int, rank: int) -> int:
        """Return the index after the magnitude of these bits that has a rank among its equals."""
        for block in self():
            equals = np.flatnonzero(reference.magnitude_bits(block.values) == bits)
            if rank <= equals.size:
                return int(block.start + equals[rank - 1] + 1)
            rank -= equals.size
        raise ValueError("there are fewer equals")

    def l1_ratio(self, change: Callable[[Block], None]) -> float:
        """Return the sum of all magnitudes before a change to every block over that after it.

        It is 1 where nothing is left.
        """
        before = after = 0.0
        for block in self():
            before += self.kernels.sum_products(block.values, np.sign(block.values))
            change(block)
            after += self.kernels.sum_products(block.values, np.sign(block.values))
        return before / after if after else 1.0


class Scores:
    """A number of 0 or more for each element of a chunk, seen by a `DeltaView` like a block."""

    def __init__(self, deltas: Deltas, values: Floats) -> None:
        self.values = values
        self.start = deltas.blocks[0].start
        self._count = partial(deltas.kernels.count_bins, values, *deltas.plain)

    def count(self, low: int, shift: int, tallies: Sequence[NDArray[Any]]) -> int:
        """Count as `Block.count` does."""
        self._count(low, shift, *tallies)
        return self.values.size


class Grams(NamedTuple):
    """The Gram matrices of a layer's inputs, and the dimension of these in its tensor."""

    axis: int
    read: Callable[[], Iterator[Floats]]  # yields each model's, in recipe order


@dataclass(eq=False)
class JointView(View):
    """A tensor of all models, and products between them, in float64 in a fixed order."""

    weights: Sequence[float] = ()
    grams: Grams | None = None  # for a stage that takes them

    def dots(self, *, with_base: bool) -> list[list[float]]:
        """Return the product of every model's delta with every other's, or of whole tensors.

        They are summed within a chunk as the kernel does, then chunk after chunk.
        """
        products = [[0.0] * len(self.weights) for _ in self.weights]
        for _, (row, column), left, right in self._pairs(with_base):
            products[row][column] += self.kernels.sum_products(left, right)
        for row in range(len(products)):
            for column in range(row):
                products[row][column] = products[column][row]
        return products

    def line_dots(self, columns: int, *, by_column: bool, with_base: bool) -> NDArray[np.float64]:
        """Return the same products for each row of `columns` elements, or for each column.

        A row of the result is for a pair of models: aa, ab, … bb, …. They are summed element after
        element.
        """
        pairs = list(combinations_with_replacement(range(len(self.weights)), 2))
        lines = columns if by_column else math.prod(self.shape) // columns
        sums = np.zeros((len(pairs), lines))
        of = dict(zip(pairs, sums, strict=True))
        for start, pair, left, right in self._pairs(with_base):
            self.kernels.add_products(left, right, start, columns, by_column, of[pair])
        return sums

    def scores(self, score: Callable[[Deltas], Floats]) -> DeltaView:
        """Return a view of a score for each element, which is counted like a magnitude.

        Scores are remembered if there is room.
        """
        remembered: list[Scores] = []
        fits = 4 * math.prod(self.shape) <= self.spare_bytes

        def walk() -> Iterator[Scores]:
            if remembered:
                yield from remembered
                return
            seen = []
            for deltas in self():
                scores = Scores(deltas, score(deltas).copy() if fits else score(deltas))
                if fits:
                    seen.append(scores)
                yield scores
            remembered.extend(seen)

        return DeltaView(self.kernels, self.shape, self.spare_bytes, walk)

    def _pairs(self, with_base: bool) -> Iterator[tuple[int, tuple[int, int], Floats, Floats]]:
        """Yield the start of every chunk with two models and their tensors, for every pair.

        A tensor is base + delta, or the delta. Few are held at a time: the rows of a group, and
        one column after the other.
        """
        models = range(len(self.weights))
        for deltas in self():
            for first in models[::GROUP]:
                rows: list[Floats] = []
                for column in models[first:]:
                    tensor = self._tensor(deltas, deltas.blocks[column], with_base)
                    if len(rows) < GROUP:
                        rows.append(tensor)
                    for row, left in enumerate(rows, first):
                        yield deltas.blocks[0].start, (row, column), left, tensor

    def _tensor(self, deltas: Deltas, block: Block, with_base: bool) -> Floats:
        values = block.take() if block.is_noted else block.values.copy()
        with np.errstate(invalid="ignore", over="ignore"):
            if block.factor != 1:
                np.multiply(values, np.float32(block.factor), out=values)
            return np.add(values, deltas.base, out=values) if with_base else values
