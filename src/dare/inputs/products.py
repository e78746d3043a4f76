"""Deltas that are stored as two factors, computed for the elements that are asked for.

Factors are read a piece at a time, so that memory is bounded whatever their rank. An element is the
sum of its products in the order of the rank, so its bits do not depend on the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dare import kernels
from dare.inputs.reading import Floats
from dare.inputs.sources import Raw, Source
from dare.tensors.chunks import CHUNK

PIECE = 1 << 20
"""Elements of a factor that are decoded at a time."""


@dataclass(frozen=True)
class Product:
    """A delta as a product: scale · left·right, each a stored tensor or its transpose."""

    left: str
    right: str | None
    """None is a column of ones: the delta is `left` itself."""
    transposed: bool
    scale: float

    def sides(self, stored: Source) -> tuple[int, int, int]:
        """Rows, rank and columns."""
        if self.right is None:
            return stored.tensors[self.left].elements, 1, 1
        left, right = (_as_matrix(stored, key) for key in (self.left, self.right))
        if self.transposed:
            return left[1], left[0], right[0]
        return left[0], left[1], right[1]

    def reading_bytes(self, stored: Source) -> int:
        """What filling a chunk takes beside it: a piece of each factor, one of them twice."""
        rows, rank, columns = self.sides(stored)
        most = max(1, PIECE // max(1, rank))
        height, width = min(rows, most, CHUNK // max(1, columns) + 2), min(columns, most)
        keys = (key for key in (self.left, self.right) if key is not None)
        itemsize = max(4, *(stored.tensors[key].dtype.itemsize for key in keys))
        product = 0 if width == columns else 4 * height * width
        return rank * (4 * (height + width) + itemsize * max(height, width)) + product

    def fill(self, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        if not into.size:
            return
        rank, columns = self.sides(stored)[1:]
        most = max(1, PIECE // max(1, rank))
        end = start + into.size
        rows = start // columns, -(-end // columns)
        is_within_row = rows[1] - rows[0] == 1
        across = (start % columns, end - rows[0] * columns) if is_within_row else (0, columns)
        right = self._columns(stored, *across) if across[1] - across[0] <= most else None
        for top, bottom in _spans(*rows, most):
            left = self._rows(stored, top, bottom)
            if right is not None:
                begin = max(start, top * columns)
                part = into[begin - start : min(end, bottom * columns) - start]
                self._multiply(left, right, begin - top * columns - across[0], part)
            else:
                for first, last in _spans(*across, most):
                    block = np.empty((bottom - top, last - first), np.float32)
                    narrow = self._columns(stored, first, last)
                    self._multiply(left, narrow, 0, block.reshape(-1))
                    _put(block, top * columns + first - start, columns, into)
                    del block, narrow
            del left  # before the next is read, for memory's sake

    def _multiply(self, left: Floats, right: Floats, first: int, into: Floats) -> None:
        kernels.load("cpu").low_rank(left, right, first, np.float32(self.scale), into)

    def _rows(self, stored: Source, top: int, bottom: int) -> Floats:
        """Some rows of the left factor, with all columns."""
        if self.right is None:
            return read_block(stored, self.left, top, bottom, 0, 1)
        if not self.transposed:
            return read_block(stored, self.left, top, bottom, 0, _as_matrix(stored, self.left)[1])
        rank = _as_matrix(stored, self.left)[0]
        return np.ascontiguousarray(read_block(stored, self.left, 0, rank, top, bottom).T)

    def _columns(self, stored: Source, first: int, last: int) -> Floats:
        """Some columns of the right factor, with all rows."""
        if self.right is None:
            return np.ones((1, 1), np.float32)
        if not self.transposed:
            return read_block(stored, self.right, 0, _as_matrix(stored, self.right)[0], first, last)
        rank = _as_matrix(stored, self.right)[1]
        return np.ascontiguousarray(read_block(stored, self.right, first, last, 0, rank).T)


def _put(block: Floats, place: int, columns: int, into: Floats) -> None:
    """Put a rectangle of a matrix of so many columns to its place, as far as there is room."""
    for row in block:
        here, there = max(0, place), min(into.size, place + row.size)
        if here < there:
            into[here:there] = row[here - place : there - place]
        place += columns


def read_block(stored: Source, key: str, top: int, bottom: int, first: int, last: int) -> Floats:
    """Rows and columns of a stored matrix, in float32; a vector is a column."""
    width = _as_matrix(stored, key)[1]
    raw: Raw = np.empty((bottom - top, last - first), stored.tensors[key].dtype.carrier)
    if last - first == width:
        stored.read(key, top * width, raw.reshape(-1))
    else:
        for row in range(top, bottom):
            stored.read(key, row * width + first, raw[row - top])
    if raw.dtype == np.float32:  # which only F32 is carried by
        return raw
    values = np.empty(raw.shape, np.float32)
    kernels.load("cpu").decode(raw.reshape(-1), values.reshape(-1))
    return values


def _as_matrix(stored: Source, key: str) -> tuple[int, int]:
    shape = stored.tensors[key].shape
    return shape[0], math.prod(shape[1:])


def _spans(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    return ((place, min(end, place + size)) for place in range(begin, end, size))
