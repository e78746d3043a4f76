"""Tensors that an adapter represents, computed from the factors and rows that it stores.

A LoRA's change of a matrix, or of each expert's matrix, is a sum of products; other kinds multiply
products by each other, element by element (LoHa) or as blocks (LoKr). DoRA's magnitudes, IA³'s
vectors and the rows of trained tokens turn the base's weights into whole weights. All are computed
in float32, for the requested elements only. `Read` fills an array with elements of what whole
weights are computed from: the base's weights plus the change by the factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.inputs.sources import Floats, Raw, Source, SourceView, decoded, read_floats
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

Read = Callable[[int, Floats], None]

PIECE = 1 << 20  # elements of the left factor that are read at once
SPAN = 1 << 16  # elements of IA³'s whole weights that are computed at once


@dataclass(frozen=True)
class Product:
    """A delta as a product: scale · left·right, each a stored tensor or its transpose.

    The left factor is read a piece at a time. An element is the sum of its products in the order of
    the rank, so its bits do not depend on the pieces. With several experts, each has such a matrix:
    lora_A has their directions one after the other, lora_B has them side by side.
    """

    left: str
    right: str | None  # None is a column of ones: the delta is `left` itself
    transposed: bool  # True if `left` is lora_A, False if it is lora_B
    scale: float
    experts: int = 1
    offset: int = 0  # elements of the tensor before it; they, and those after it, do not change

    def sides(self, stored: Source) -> tuple[int, int, int]:
        """Return rows, rank and columns, of one expert."""
        if self.right is None:
            return stored.tensors[self.left].elements, 1, 1
        left, right = (_as_matrix(stored, key) for key in (self.left, self.right))
        if self.transposed:
            return left[1], left[0] // self.experts, right[0]
        return left[0], left[1] // self.experts, right[1]

    def reading_bytes(self, stored: Source) -> int:
        """Return the memory beside a chunk: right factor, rows of the left, one of them twice."""
        rows, rank, columns = self.sides(stored)
        height = min(rows, self._most_rows(rank), CHUNK // max(1, columns) + 2)
        keys = (key for key in (self.left, self.right) if key is not None)
        itemsize = max(4, *(stored.tensors[key].dtype.itemsize for key in keys))
        of_others = (self.experts - 1) * (columns if self.transposed else height)
        copied = height if self.experts > 1 else 0
        stored_bytes = itemsize * (max(height, columns) + of_others)
        return rank * (4 * (height + columns + of_others + copied) + stored_bytes)

    def fill(self, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        rows, _, columns = self.sides(stored)
        start, size = start - self.offset, rows * columns
        first, end = max(0, start), min(start + into.size, size * self.experts)
        if end - first < into.size:
            into[:] = 0
        for expert in range(first // max(1, size), -(-end // max(1, size))):
            begin, last = max(first, expert * size), min(end, (expert + 1) * size)
            part = into[begin - start : last - start]
            self._fill_expert(stored, expert, begin - expert * size, part)

    def _fill_expert(self, stored: Source, expert: int, start: int, into: Floats) -> None:
        _, rank, columns = self.sides(stored)
        right = np.ones((1, 1), np.float32)
        if self.right is not None:
            right = np.ascontiguousarray(self._read_rows(stored, self.right, expert, 0, columns).T)
        end, most = start + into.size, self._most_rows(rank)
        last = -(-end // columns)
        for top in range(start // columns, last, most):
            bottom, begin = min(top + most, last), max(start, top * columns)
            left = np.ascontiguousarray(self._read_rows(stored, self.left, expert, top, bottom))
            part = into[begin - start : min(end, bottom * columns) - start]
            first = begin - top * columns
            kernels.load("cpu").low_rank(left, right, first, np.float32(self.scale), part)
            del left  # frees its memory before the next is read

    def _most_rows(self, rank: int) -> int:
        return max(1, PIECE // max(1, rank * self.experts))

    def _read_rows(self, stored: Source, key: str, expert: int, top: int, bottom: int) -> Floats:
        """Read some rows of an expert's lora_B, or columns of its lora_A as rows."""
        if (key == self.left) != self.transposed:
            return read_block(stored, key, top, bottom)[:, expert :: self.experts]
        rank = self.sides(stored)[1]
        return read_block(stored, key, expert * rank, (expert + 1) * rank, top, bottom).T


def read_block(
    stored: Source, key: str, top: int, bottom: int, first: int = 0, last: int | None = None
) -> Floats:
    """Read rows and columns of a stored matrix, in float32; a vector is a column."""
    width = _as_matrix(stored, key)[1]
    last = width if last is None else last
    raw: Raw = np.empty((bottom - top, last - first), stored.tensors[key].dtype.carrier)
    if last - first == width:
        stored.read(key, top * width, raw.reshape(-1))
    else:
        for row in range(top, bottom):
            stored.read(key, row * width + first, raw[row - top])
    if raw.dtype == np.float32:  # which only F32 is carried by
        return raw
    return decoded(raw.reshape(-1), "cpu").reshape(raw.shape)


def _as_matrix(stored: Source, key: str) -> tuple[int, int]:
    shape = stored.tensors[key].shape
    return shape[0], math.prod(shape[1:])


# ---------------------------------------------------------------- kinds other than LoRA


@dataclass(frozen=True)
class HadamardProduct:
    """LoHa: two matrices multiplied element by element."""

    left: str
    right: str
    scale: float

    def reading_bytes(self, stored: Source) -> int:  # noqa: ARG002
        """Return the memory for the elements of both, as they are read and decoded."""
        return 16 * CHUNK

    def fill(self, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        into[:] = read_floats(stored, self.left, start, into.size)
        into *= read_floats(stored, self.right, start, into.size)
        into *= np.float32(self.scale)


@dataclass(frozen=True)
class KroneckerProduct:
    """LoKr: each element of the left matrix is replaced by the right matrix times that element.

    The right matrix has outer · inner rows, and the rows for each `outer` follow one another.
    """

    left: str
    right: str
    scale: float
    outer: int  # usually 1
    left_rows: int
    inner: int
    left_columns: int
    right_columns: int

    def reading_bytes(self, stored: Source) -> int:  # noqa: ARG002
        """Return the memory for whole rows of the result and of both matrices."""
        columns = self.left_columns * self.right_columns
        rows = min(self.inner, CHUNK // max(1, columns) + 2)
        return 4 * rows * (columns + 3 * self.right_columns) + 16 * self.left_columns

    def fill(self, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        columns, end = self.left_columns * self.right_columns, start + into.size
        row, last = start // columns, -(-end // columns)
        while row < last:
            block, inner = divmod(row, self.inner)
            outer, left_row = divmod(block, self.left_rows)
            count, width = min(self.inner - inner, last - row), self.right_columns
            place = left_row * self.left_columns, self.left_columns
            numbers = read_floats(stored, self.left, *place) * np.float32(self.scale)
            place = (outer * self.inner + inner) * width, count * width
            rows = read_floats(stored, self.right, *place).reshape(count, 1, width)
            values, first = (numbers[:, None] * rows).reshape(-1), row * columns
            begin, stop = max(start, first), min(end, first + values.size)
            into[begin - start : stop - start] = values[begin - first : stop - first]
            row += count


@dataclass(frozen=True)
class KernelProduct:
    """A matrix of LoHa or LoKr for a convolution, with a kernel between two factors.

    The factors are rank × outputs and rank × inputs, the kernel is rank × rank × its own sizes, and
    the columns of the matrix are inputs × kernel.
    """

    keys: tuple[str, str, str]  # kernel, outputs, inputs

    def reading_bytes(self, stored: Source) -> int:
        """Return the memory for kernel and factors, as they are, in order and multiplied."""
        kernel, outputs, inputs = (stored.tensors[key].elements for key in self.keys)
        rank = stored.tensors[self.keys[0]].shape[0]
        return 12 * (kernel + outputs + inputs) + 8 * (kernel // rank) * (inputs // rank)

    def fill(self, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        low_rank, rank = kernels.load("cpu").low_rank, stored.tensors[self.keys[0]].shape[0]
        kernel, outputs, inputs = (read_block(stored, key, 0, rank) for key in self.keys)
        turned = kernel.reshape(rank, rank, -1).transpose(1, 0, 2).reshape(rank, -1)
        values = np.empty((inputs.shape[1], rank, turned.shape[1] // rank), np.float32)
        low_rank(inputs.T.copy(), turned, 0, np.float32(1), values.reshape(-1))
        right = values.transpose(1, 0, 2).reshape(rank, -1)
        low_rank(outputs.T.copy(), right, start, np.float32(1), into)


@dataclass(frozen=True)
class ScaledRows:
    """A factor of AdaLoRA or VeRA: the first columns of a matrix, each row times a number."""

    key: str
    numbers: str
    columns: int

    def reading_bytes(self, stored: Source) -> int:
        """Return the memory for all rows, as they are stored and decoded, and multiplied."""
        return 12 * stored.tensors[self.numbers].elements * self.columns

    def fill(self, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        top, bottom = start // self.columns, -(-(start + into.size) // self.columns)
        rows = read_block(stored, self.key, top, bottom, 0, self.columns)
        rows = rows * read_floats(stored, self.numbers, top, bottom - top)[:, None]
        into[:] = rows.reshape(-1)[start - top * self.columns :][: into.size]


Computed = Product | HadamardProduct | KroneckerProduct | KernelProduct | ScaledRows


class FactorView(SourceView):
    """The stored tensors of an adapter, and factors that are computed from them."""

    tensors: dict[str, TensorInfo]

    def __init__(self, stored: Source) -> None:
        self._made: dict[str, Computed] = {}
        super().__init__(stored, dict(stored.tensors), computed=self._made)

    def make(self, name: str, shape: tuple[int, ...], made: Computed) -> str:
        """Add a factor; return its name."""
        self._made[name] = made
        self.tensors[name] = TensorInfo(name, STORAGE_TYPES["F32"], shape, 0)
        self.cost = max(self.cost, self.inner.cost.with_reading(made.reading_bytes(self.inner)))
        return name

    def compute(self, name: str, start: int, into: Raw) -> None:
        self._made[name].fill(self.inner, start, into)


# ---------------------------------------------------------------- whole weights

_NORMS_LOCK = RLock()


@dataclass
class DoraMagnitudes:
    """DoRA: every row of W + ΔW, or every column, scaled to a stored norm.

    PEFT takes norms over the inputs: of rows, or of columns where the inputs come first, as in an
    embedding. Norms of columns are computed once, and kept.
    """

    key: str
    rows: int
    columns: int
    by_column: bool
    _norms: NDArray[np.float64] | None = field(default=None, repr=False)

    @property
    def reading_bytes(self) -> int:
        """The memory for whole rows with their squares, and for norms."""
        return 12 * max(CHUNK, self.columns) + 24 * max(self.rows, self.columns)

    def fill(self, read: Read, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        if not into.size:
            return
        wanted = read_floats(stored, self.key, 0, stored.tensors[self.key].elements)
        by_column = _quotient(wanted, self._column_norms(read)) if self.by_column else None
        end, bottom = start + into.size, -(-(start + into.size) // self.columns)
        for top, tuned in self._blocks(read, start // self.columns, bottom):
            if by_column is not None:
                tuned[:] *= by_column
            else:
                squares = [kernels.load("cpu").sum_products(row, row) for row in tuned]
                tuned[:] *= _quotient(wanted[top:][: len(tuned)], np.sqrt(squares))[:, None]
            first = top * self.columns
            begin, last = max(start, first), min(end, first + tuned.size)
            into[begin - start : last - start] = tuned.reshape(-1)[begin - first : last - first]

    def _blocks(self, read: Read, top: int, bottom: int) -> Iterator[tuple[int, Floats]]:
        """Yield some whole rows at a time, and the number of the first."""
        step = max(1, CHUNK // self.columns)
        for row in range(top, bottom, step):
            block = np.empty((min(step, bottom - row), self.columns), np.float32)
            read(row * self.columns, block.reshape(-1))
            yield row, block

    def _column_norms(self, read: Read) -> NDArray[np.float64]:
        with _NORMS_LOCK:
            if self._norms is None:
                total = np.zeros(self.columns)
                for _, block in self._blocks(read, 0, self.rows):
                    total += np.square(block, dtype=np.float64).sum(axis=0)
                self._norms = np.sqrt(total)
        return self._norms


def _quotient(wanted: Floats, norms: NDArray[np.float64]) -> Floats:
    return np.divide(wanted, norms, dtype=np.float64).astype(np.float32)


@dataclass(frozen=True)
class TrainedRows:
    """Trained rows of an embedding, in place of the base's."""

    key: str
    columns: int
    rows: tuple[int, ...]  # of the embedding, in the order of the stored ones

    reading_bytes = 0

    def fill(self, read: Read, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        read(start, into)
        for place, row in enumerate(self.rows):
            first = row * self.columns
            begin, last = max(start, first), min(start + into.size, first + self.columns)
            if begin < last:
                position = place * self.columns + begin - first
                part = read_floats(stored, self.key, position, last - begin)
                into[begin - start : last - start] = part


@dataclass(frozen=True)
class ScaledWeights:
    """IA³: the base's weights times numbers, one for each output or for each input.

    `step` elements have the same number, and the next `step` the next. After the last the first
    follows, or in another group of a convolution the first of those for that group.
    """

    key: str
    step: int
    count: int  # of numbers, in a group
    group: int  # elements of a group

    reading_bytes = 48 * SPAN

    def fill(self, read: Read, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        read(start, into)
        numbers = read_floats(stored, self.key, 0, stored.tensors[self.key].elements)
        for begin in range(0, into.size, SPAN):
            part = into[begin : begin + SPAN]
            place = np.arange(start + begin, start + begin + part.size)
            part *= numbers[place // self.step % self.count + place // self.group * self.count]
