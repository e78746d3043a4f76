"""FP8 with scales, as the base has it: the same types, and scales for the same blocks.

Scales are fresh: the largest magnitude of a block by the largest number of the type (448 for
F8_E4M3), rounded up where scales are powers of two, and 1 for a block of zeros. An element is
divided by its scale, and rounded to the nearest, ties to even. So what was stored with such scales
is stored again with the same codes, and a scale in float32 changes by its last bit at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.errors import NotFiniteError
from dare.formats.recoding import PIECE_ELEMENTS, PIECE_WORK, LossMeter, Put, Read, Unit
from dare.inputs.fp8 import SCALE_ENDINGS, Scale
from dare.inputs.sources import Floats, Raw, decoded
from dare.tensors.chunks import rectangles
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import Described

Numbers = NDArray[np.intp]
Pieces = Callable[[], Iterable[tuple[int, Raw]]]  # each with its place in the tensor
limits_of: Any = ml_dtypes.finfo  # which has no types


@dataclass(frozen=True)
class Fp8:
    """A weight in FP8 with scales."""

    scale: Scale
    takes_powers: bool  # True if scales are powers of two, whatever their type

    def stored(self, tensor: Described) -> Sequence[Described]:
        """Return the weight and its scale; there may be more rows than the base has."""
        name, _, shape = tensor
        own = self.scale.info
        ending = next(end for end in SCALE_ENDINGS if own.name.endswith(end))
        grid = own.shape
        if not self.scale.is_one:
            grid = (-(-shape[0] // self.scale.block_rows), *grid[1:])
        return [(name, self.scale.dtype, shape), (name + ending, own.dtype, grid)]

    def unit(self, tensor: Described) -> Unit:
        """Return a row of blocks; or the tensor, which is read twice, if it has one scale."""
        shape, work = tensor[2], PIECE_WORK * PIECE_ELEMENTS
        if self.scale.is_one:
            return Unit(math.prod(shape), 2, work)
        elements = self.scale.block_rows * shape[-1]
        held = 2 * STORAGE_TYPES["F32"].itemsize * max(PIECE_ELEMENTS, elements)
        return Unit(elements, 1, work + held)

    def encode(self, tensor: Described, read: Read, put: Put) -> LossMeter:
        """Store rows of blocks, some at once; or all of the tensor, read twice, with one scale."""
        (name, kind, _), (beside, scale_kind, grid) = self.stored(tensor)
        meter, cpu = LossMeter(), kernels.load("cpu")
        largest = np.zeros((1 if self.scale.is_one else grid[0], self.scale.columns), np.float32)
        top = float(limits_of(kind.numpy_type).max)
        most = top * float(limits_of(scale_kind.numpy_type).max)
        for band, pieces in self._bands(tensor, read):
            for _, matrix, rows, columns in self._rectangles(tensor, pieces()):
                if not float(np.abs(matrix).max(initial=0)) <= most:  # or it is NaN
                    what = "has values that are not finite, or too large for FP8 with such scales"
                    raise NotFiniteError(f"{name}: {what}; leave format out")
                found = np.maximum.reduceat(np.abs(matrix), _begins(columns), axis=1)
                found = np.maximum.reduceat(found, _begins(rows), axis=0)
                part = largest[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                np.maximum(part, found, out=part)
            scales = self._fresh(largest[band] / np.float32(top))
            put(beside, band.start * scales[:1].nbytes, scales.reshape(-1).view(np.uint8))
            factors = scales.astype(np.float32)
            for start, matrix, rows, columns in self._rectangles(tensor, pieces()):
                own = factors if self.scale.columns == 1 else factors[:, columns]
                own = own[rows - band.start]
                codes = np.empty(matrix.size, kind.carrier)
                cpu.encode(np.clip(matrix / own, -top, top).reshape(-1), codes)
                put(name, start, codes.view(np.uint8))
                meter.add(matrix, decoded(codes, "cpu").reshape(matrix.shape) * own)
        return meter

    def _bands(self, tensor: Described, read: Read) -> Iterator[tuple[slice, Pieces]]:
        """Yield rows of blocks, each with a function that yields their elements at every call."""
        unit = self.unit(tensor).elements
        if self.scale.is_one or not unit:
            yield slice(0, None), lambda: read(PIECE_ELEMENTS)
            return
        for start, raw in read(max(1, PIECE_ELEMENTS // unit) * unit):
            band = slice(start // unit, -(-(start + raw.size) // unit))
            yield band, partial(iter, [(start, raw)])

    def _rectangles(
        self, tensor: Described, pieces: Iterable[tuple[int, Raw]]
    ) -> Iterator[tuple[int, Floats, Numbers, Numbers]]:
        """Yield rectangles of a weight: where they begin, and the block of each row and column."""
        shape, scale = tensor[2], self.scale
        width = shape[-1] if shape else 1
        height = math.prod(shape) if scale.is_one else scale.block_rows
        at_once = max(1, PIECE_ELEMENTS // max(width, 1))
        for first, raw in pieces:
            for row, rows, column, columns in rectangles(first, raw.size, width, at_once):
                start = row * width + column
                part = raw[start - first :][: rows * columns]
                values = decoded(part, "cpu").reshape(rows, columns)
                above = np.arange(row, row + rows) // height
                left = np.arange(column, column + columns) // scale.block_columns
                yield start, values, above, left

    def _fresh(self, wanted: Floats) -> Raw:
        """Return the best factors as scales of the stored type."""
        wanted = np.where(wanted > 0, wanted, np.float32(1))
        if self.takes_powers:
            wanted = np.ldexp(np.float32(1), ceil_log2(wanted))
        kind = self.scale.info.dtype.numpy_type
        limits = limits_of(kind)
        return np.clip(wanted, float(limits.smallest_subnormal), float(limits.max)).astype(kind)


def ceil_log2(values: Floats) -> NDArray[np.int32]:
    """Return the exponents of the next powers of two.

    >>> ceil_log2(np.float32([0.5, 1, 1.5, 448])).tolist()
    [-1, 0, 1, 9]
    """
    mantissas, exponents = np.frexp(values)
    found: NDArray[np.int32] = exponents - (mantissas == 0.5)
    return found


def _begins(blocks: Numbers) -> Numbers:
    """Return the positions at which a new block begins."""
    return np.flatnonzero(np.diff(blocks, prepend=-1))
