"""Checkpoints with FP8 weights and scales beside them, presented as the weights they stand for.

A weight in F8_E4M3 or F8_E5M2 with a scale is presented as float32, each element one float32
product `stored · scale`, computed for what is asked for. A scale is one number, one for each row,
or one for each block of 128×128 (DeepSeek). FP8 tensors without a scale, and all others, are
passed on as they are; scales are hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dare.documents.words import times
from dare.errors import InputError
from dare.inputs.reading import Floats, decoded, rectangles
from dare.inputs.sources import Raw, Source, SourceView
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

BLOCK = 128
SCALE_ENDINGS = ("_scale_inv", "_scale")
"""Both are factors: DeepSeek's is the inverse of what the weights were divided by."""
ACTIVATION_SCALES = (
    *("activation_scale", "input_scale", "input_scale_ub", "output_scale"),
    *("q_scale", "k_scale", "v_scale", "kv_scale"),
)
"""Scales of what passes through a layer, which no weight depends on."""
FP8_TYPES = ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
PIECE_ELEMENTS = 1 << 16
"""How many elements are multiplied at once."""
PIECE_BYTES = PIECE_ELEMENTS * 16
"""What that takes: codes, what they mean, and the factors of all of them."""


@dataclass(frozen=True)
class Scale:
    """A grid of factors, each for a block of a matrix."""

    info: TensorInfo
    columns: int
    """Factors in a row of the grid."""
    block_rows: int
    block_columns: int


class DequantizedSource(SourceView):
    """Another source with its scales applied and out of sight."""

    def __init__(self, inner: Source) -> None:
        where = str(inner.files[0].parent) if inner.files else "the model"
        self._scales = {
            name: _fit(info, inner.tensors, where)
            for name, info in inner.tensors.items()
            if _has_scale(info, inner.tensors)
        }
        applied = {scale.info.name for scale in self._scales.values()}
        activations = {
            name
            for name in inner.tensors
            if name.rpartition(".")[2] in ACTIVATION_SCALES and name not in applied
        }
        tensors = {
            name: replace(info, dtype=STORAGE_TYPES["F32"]) if name in self._scales else info
            for name, info in inner.tensors.items()
            if name not in applied | activations
        }
        super().__init__(inner, tensors)
        self.reading_bytes += PIECE_BYTES
        self.remarks += (f"{times(len(applied), 'FP8 tensor')} read as float32, scales applied",)
        if activations:
            self.remarks += (f"{times(len(activations), 'activation scale')} left out",)

    def read(self, name: str, start: int, into: Raw) -> None:
        if name not in self._scales:
            self.inner.read(name, start, into)
            return
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            self._fill(piece, self.inner.tensors[name], start + done, self._scales[name])

    def _fill(self, values: Floats, info: TensorInfo, first: int, scale: Scale) -> None:
        """Read elements and multiply each by its factor; every NaN is the same one."""
        values[:] = self._read_floats(info, first, values.size)
        width = info.shape[-1] if info.shape else 1
        for row, rows, column, columns in rectangles(first, values.size, width):
            begin = row * width + column - first
            matrix = values[begin : begin + rows * columns].reshape(rows, columns)
            with np.errstate(all="ignore"):
                matrix *= self._factors(scale, row, rows, column, columns)
        np.copyto(values, np.float32(np.nan), where=np.isnan(values))

    def _factors(self, scale: Scale, row: int, rows: int, column: int, columns: int) -> Floats:
        """The factors of a rectangle, as far as they differ: one column if they agree in rows."""
        top, bottom = row // scale.block_rows, (row + rows - 1) // scale.block_rows
        count = (bottom + 1 - top) * scale.columns
        grid = self._read_floats(scale.info, top * scale.columns, count).reshape(-1, scale.columns)
        if scale.columns > 1:
            grid = grid[:, np.arange(column, column + columns) // scale.block_columns]
        return grid[np.arange(row, row + rows) // scale.block_rows - top]

    def _read_floats(self, info: TensorInfo, first: int, count: int) -> Floats:
        raw = np.empty(count, info.dtype.carrier)
        self.inner.read(info.name, first, raw)
        if info.dtype.itemsize == 1:
            return np.take(_table(info.dtype.name), raw.view(np.uint8))
        return decoded(raw)


def dequantized(source: Source) -> Source:
    """Apply a source's scales, if it has any."""
    has_scales = any(_has_scale(info, source.tensors) for info in source.tensors.values())
    return DequantizedSource(source) if has_scales else source


def _scale_names(weight: str, tensors: Mapping[str, TensorInfo]) -> list[str]:
    return [weight + end for end in SCALE_ENDINGS if weight + end in tensors]


def _has_scale(info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a tensor is of FP8 and means something only with its scale."""
    return info.dtype.name in FP8_TYPES and bool(_scale_names(info.name, tensors))


def _fit(weight: TensorInfo, tensors: Mapping[str, TensorInfo], where: str) -> Scale:
    """Find a weight's scale, and which part of the weight each of its factors is for."""
    names = _scale_names(weight.name, tensors)
    if len(names) > 1:
        both = " and ".join(names)
        raise InputError(f"{where}: {weight.name} has two scales, {both}; remove one")
    scale = tensors[names[0]]
    if scale.dtype.name not in SCALE_TYPES:
        kinds = ", ".join(SCALE_TYPES)
        raise InputError(f"{where}: {scale.name} is {scale.dtype.name}, not {kinds}")
    width = weight.shape[-1] if weight.shape else 1
    rows = weight.elements // width if width else 0
    if scale.elements == 1:
        return Scale(scale, 1, max(rows, 1), max(width, 1))
    if len(weight.shape) == 2 and scale.shape in ((rows,), (rows, 1)):
        return Scale(scale, 1, 1, width)
    if len(weight.shape) == 2 and scale.shape == (-(-rows // BLOCK), -(-width // BLOCK)):
        return Scale(scale, scale.shape[1], BLOCK, BLOCK)
    raise InputError(
        f"{where}: {scale.name} is {scale.form} and {weight.name} is "
        f"{weight.form}; expected one scale, one for each row, or one for each "
        f"block of {BLOCK}×{BLOCK}. Dequantise the model first"
    )


@cache
def _table(name: str) -> Floats:
    """What each of a type's 256 codes means; looking it up is four times as fast as decoding."""
    codes = np.arange(256, dtype=np.uint8)
    if name == "F8_E8M0":  # 2**(code − 127); 255 is NaN
        powers = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
        return np.where(codes == 255, np.float32(np.nan), powers)
    return decoded(codes.view(STORAGE_TYPES[name].carrier))
