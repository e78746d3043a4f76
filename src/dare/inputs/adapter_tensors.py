"""Tensors that an adapter represents, computed from the factors and rows that it stores.

A LoRA's change of a matrix, or of each expert's matrix, is a sum of products. DoRA's magnitudes and
the rows of trained tokens turn the base's weights into whole weights. All are computed in float32,
for the requested elements only. `Read` fills an array with elements of what whole weights are
computed from: the base's weights plus the change by the factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.inputs.sources import Floats, Raw, Source, decoded, read_floats
from dare.tensors.chunks import CHUNK

Read = Callable[[int, Floats], None]

PIECE = 1 << 20  # elements of the left factor that are read at once


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
