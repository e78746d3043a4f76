"""Weights in FP8 with scales.

A weight in F8_E4M3 or F8_E5M2 with a scale is presented as float32, each element one float32
product `stored · scale`. A scale is one number, one for each row, or one for each block: of the
size that the configuration says, else 128×128 (DeepSeek). FP8 tensors without a scale are passed on
as they are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from dare.documents.notices import notice
from dare.documents.words import times
from dare.errors import InputError
from dare.inputs.sources import CodedInfo, Floats, Raw, Source, SourceView, decoded, home_of
from dare.tensors.chunks import rectangles
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo

FP8_TYPES = ("F8_E4M3", "F8_E5M2")

Block = tuple[int, int]  # rows and columns that have one scale
USUAL_BLOCK: Block = (128, 128)
SCALE_ENDINGS = ("_scale_inv", "_scale")  # both are factors; the first is DeepSeek's
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
PIECE_ELEMENTS = 1 << 16
PIECE_BYTES = PIECE_ELEMENTS * 16  # memory for a piece: codes, their values, their factors


@dataclass(frozen=True)
class Scale:
    """A weight's type, and the grid of factors, each for a block of it."""

    dtype: StorageType
    info: TensorInfo
    columns: int
    block_rows: int
    block_columns: int

    @property
    def is_one(self) -> bool:
        """Tell if there is one factor for the whole weight."""
        return self.info.elements == 1


class DecodedSource(SourceView):
    """Another source with codes presented as float32, and what belongs to them out of sight."""

    def __init__(
        self, inner: Source, decoded: Mapping[str, CodedInfo], hidden: Container[str], kind: str
    ) -> None:
        tensors = {name: info for name, info in inner.tensors.items() if name not in hidden}
        super().__init__(inner, {**tensors, **decoded}, computed=decoded)
        self.cost = inner.cost.with_reading(PIECE_BYTES)
        count = times(len(decoded), f"{kind} tensor")
        self.remarks += (notice("dequantised", tensors=count, dtype="float32"),)

    def compute(self, name: str, start: int, into: Raw) -> None:
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            self.decode(name, start + done, piece)
            np.copyto(piece, np.float32(np.nan), where=np.isnan(piece))  # every NaN is this one

    def decode(self, name: str, first: int, values: Floats) -> None:
        """Fill `values` with elements from one on, each multiplied by its factor."""
        raise NotImplementedError


class Fp8Source(DecodedSource):
    """Another source with its scales applied."""

    def __init__(self, inner: Source, scales: Mapping[str, Scale]) -> None:
        self._scales = scales
        kind, stored = STORAGE_TYPES["F32"], inner.tensors
        decoded = {
            name: CodedInfo(name, kind, stored[name].shape, stored[name].start, scale)
            for name, scale in scales.items()
        }
        super().__init__(inner, decoded, {scale.info.name for scale in scales.values()}, "FP8")

    def prefetch(self, name: str, start: int, count: int) -> None:
        self.inner.prefetch(name, start, count)

    def decode(self, name: str, first: int, values: Floats) -> None:
        info, scale = self.inner.tensors[name], self._scales[name]
        values[:] = read_values(self.inner, info, first, values.size)
        width = info.shape[-1] if info.shape else 1
        for row, rows, column, columns in rectangles(first, values.size, width):
            begin = row * width + column - first
            matrix = values[begin : begin + rows * columns].reshape(rows, columns)
            with np.errstate(all="ignore"):
                matrix *= self._factors(scale, row, rows, column, columns)

    def _factors(self, scale: Scale, row: int, rows: int, column: int, columns: int) -> Floats:
        """Read the factors of a rectangle, in one column if they agree in rows."""
        top, bottom = row // scale.block_rows, (row + rows - 1) // scale.block_rows
        count = (bottom + 1 - top) * scale.columns
        grid = read_values(self.inner, scale.info, top * scale.columns, count)
        grid = grid.reshape(-1, scale.columns)
        if scale.columns > 1:
            grid = grid[:, np.arange(column, column + columns) // scale.block_columns]
        return grid[np.arange(row, row + rows) // scale.block_rows - top]


def read_values(source: Source, info: TensorInfo, first: int, count: int) -> Floats:
    """Read some elements of a tensor that may be FP8, in float32."""
    raw = np.empty(count, info.dtype.carrier)
    source.read(info.name, first, raw)
    if info.dtype.itemsize == 1:
        return np.take(_float8_values(info.dtype.name), raw.view(np.uint8))
    return decoded(raw)


def dequantized(source: Source, block: Block = USUAL_BLOCK, is_sure: bool = False) -> Source:
    """Apply a source's scales, if it has any; if `is_sure`, each must be for such a block."""
    scales = {
        name: scale
        for name, info in source.tensors.items()
        if info.dtype.name in FP8_TYPES and (scale := _find_scale(info, source, block, is_sure))
    }
    return Fp8Source(source, scales) if scales else source


def _find_scale(weight: TensorInfo, source: Source, block: Block, is_sure: bool) -> Scale | None:
    """Find a weight's scale, and which part of the weight each of its factors is for."""
    where, tensors = home_of(source), source.tensors
    names = [weight.name + end for end in SCALE_ENDINGS if weight.name + end in tensors]
    if not names:
        return None
    if len(names) > 1:
        both = " and ".join(names)
        raise InputError(f"{where}: {weight.name} has two scales, {both}; remove one")
    scale = tensors[names[0]]
    if scale.dtype.name not in SCALE_TYPES:
        kinds = ", ".join(SCALE_TYPES)
        raise InputError(f"{where}: {scale.name} is {scale.dtype.name}, not {kinds}")
    width = weight.shape[-1] if weight.shape else 1
    rows = weight.elements // width if width else 0
    grid = -(-rows // block[0]), -(-width // block[1])
    if scale.elements == 1 and (not is_sure or grid == (1, 1)):
        return Scale(weight.dtype, scale, 1, max(rows, 1), max(width, 1))
    if len(weight.shape) == 2 and not is_sure and scale.shape in ((rows,), (rows, 1)):
        return Scale(weight.dtype, scale, 1, 1, width)
    if len(weight.shape) == 2 and scale.shape == grid:
        return Scale(weight.dtype, scale, scale.shape[1], *block)
    others = " (is weight_block_size right?)" if is_sure else ", one for each row, or one"
    raise InputError(
        f"{where}: {scale.name} is {scale.form} and {weight.name} is {weight.form}; expected one "
        f"scale for each block of {block[0]}×{block[1]}{others}. Dequantise the model first"
    )


@cache
def _float8_values(name: str) -> Floats:
    """Return the value of each of a type's 256 codes; this is four times as fast as decoding."""
    codes = np.arange(256, dtype=np.uint8)
    if name == "F8_E8M0":  # 2**(code − 127); 255 is NaN
        powers = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
        return np.where(codes == 255, np.float32(np.nan), powers)
    return decoded(codes.view(STORAGE_TYPES[name].carrier))
