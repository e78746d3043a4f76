"""FP8 with scales, as the base has it: the same types, and scales for the same blocks.

Scales are fresh: the largest magnitude of a block by the largest number of the type (448 for
F8_E4M3), rounded up where scales are powers of two, and 1 for a block of zeros. An element is
divided by its scale, and rounded to the nearest, ties to even. So what was stored with such scales
is stored again with the same codes, and a scale in float32 changes by its last bit at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.errors import NotFiniteError
from dare.formats.recoding import Loss, LossMeter, Put, Read
from dare.inputs.fp8 import SCALE_ENDINGS, Scale
from dare.inputs.sources import Floats, Raw, decoded
from dare.tensors.chunks import rectangles
from dare.tensors.header import Described

Numbers = NDArray[np.intp]
limits_of: Any = ml_dtypes.finfo  # which has no types

PIECE_ELEMENTS = 1 << 18  # recoded at once


@dataclass(frozen=True)
class Fp8:
    """The code of a weight."""

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

    def encode(self, tensor: Described, read: Read, put: Put) -> Loss:
        """Store a weight; it is read twice, first for its scales."""
        (name, kind, _), (beside, _, grid) = self.stored(tensor)
        meter, cpu = LossMeter(), kernels.load("cpu")
        largest = np.zeros((1 if self.scale.is_one else grid[0], self.scale.columns), np.float32)
        top = float(limits_of(kind.numpy_type).max)
        most = top * float(limits_of(self.scale.info.dtype.numpy_type).max)
        for _, matrix, rows, columns in self._pieces(tensor, read):
            if not float(np.abs(matrix).max(initial=0)) <= most:  # or it is NaN
                what = "has values that are not finite, or too large for FP8 with such scales"
                raise NotFiniteError(f"{name}: {what}; leave format out")
            found = np.maximum.reduceat(np.abs(matrix), _begins(columns), axis=1)
            found = np.maximum.reduceat(found, _begins(rows), axis=0)
            part = largest[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            np.maximum(part, found, out=part)
        scales = self._fresh(largest / np.float32(top))
        put(beside, 0, scales.reshape(-1).view(np.uint8))
        factors = scales.astype(np.float32)
        for start, matrix, rows, columns in self._pieces(tensor, read):
            own = factors[rows[0] : rows[-1] + 1]
            own = (own if self.scale.columns == 1 else own[:, columns])[rows - rows[0]]
            codes = np.empty(matrix.size, kind.carrier)
            cpu.encode(np.clip(matrix / own, -top, top).reshape(-1), codes)
            put(name, start, codes.view(np.uint8))
            meter.add(matrix, decoded(codes, "cpu").reshape(matrix.shape) * own)
        return meter.loss

    def _pieces(
        self, tensor: Described, read: Read
    ) -> Iterator[tuple[int, Floats, Numbers, Numbers]]:
        """Yield rectangles of a weight: where they begin, and the block of each row and column."""
        shape, scale = tensor[2], self.scale
        elements, width = math.prod(shape), shape[-1] if shape else 1
        height = elements if scale.is_one else scale.block_rows
        for first in range(0, elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, elements - first)
            for row, rows, column, columns in rectangles(first, count, width):
                start = row * width + column
                values = decoded(read(start, rows * columns), "cpu").reshape(rows, columns)
                above = np.arange(row, row + rows) // height
                left = np.arange(column, column + columns) // scale.block_columns
                yield start, values, above, left

    def _fresh(self, wanted: Floats) -> Raw:
        """Return scales in their type, for the factors that would be best."""
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
    """Return the places where another block begins."""
    return np.flatnonzero(np.diff(blocks, prepend=-1))
