"""Checkpoints with FP8 weights and scales beside them, presented as the weights they stand for.

A weight in F8_E4M3 or F8_E5M2 with a scale is presented as float32, each element one float32
product `stored · scale`, computed for what is asked for. A scale is one number, one for each row,
or one for each block of 128×128 (DeepSeek). FP8 tensors without a scale, and all others, are
passed on as they are; scales are hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.reading import decoded
from dare.inputs.sources import Raw, Source, open_source
from dare.inputs.views import SourceView
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo

BLOCK = 128
SCALE_ENDINGS = ("_scale_inv", "_scale")
"""Both are factors: DeepSeek's is the inverse of what the weights were divided by."""
ACTIVATION_SCALES = {
    "activation_scale",
    "input_scale",
    "k_scale",
    "kv_scale",
    "output_scale",
    "q_scale",
    "v_scale",
}
"""Scales of what passes through a layer, which no weight depends on."""
FP8_TYPES = ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
PIECE_ELEMENTS = 1 << 16
"""How many elements are multiplied at once."""

_F32 = STORAGE_TYPES["F32"]
_DEQUANTIZE_FIRST = (
    "such weights are codes, and codes cannot be merged; merge the model it was made from, or "
    "dequantise it first (in transformers: model.dequantize(), then save_pretrained)"
)
PACKED = {
    "qweight": "AWQ or GPTQ",
    "qzeros": "AWQ or GPTQ",
    "g_idx": "GPTQ",
    "weight_packed": "packed compressed-tensors",
    "weight_scale_2": "NVFP4",
    "weight_zero_point": "asymmetric compressed-tensors",
    "absmax": "bitsandbytes",
    "nested_absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "SCB": "bitsandbytes",
}
"""Last parts of names that only quantised models of a kind have."""
_BITSANDBYTES_STATE = ".quant_state."

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scale:
    """A grid of factors, each for a block of a matrix."""

    name: str
    dtype: StorageType
    columns: int
    """Factors in a row of the grid."""
    block_rows: int
    block_columns: int


class DequantizedSource(SourceView):
    """Another source with its scales applied and out of sight."""

    def __init__(self, inner: Source) -> None:
        where = str(inner.files[0].parent) if inner.files else "the model"
        self._scales = {
            weight: _fit(inner.tensors[weight], inner.tensors[scale], where)
            for weight, scale in _pairs(inner.tensors, where)
        }
        scales = {scale.name for scale in self._scales.values()}
        self.left_out = tuple(
            name
            for name in inner.tensors
            if name.rpartition(".")[2] in ACTIVATION_SCALES and name not in scales
        )
        """Scales of activations, which are no weights."""
        hidden = {*scales, *self.left_out}
        tensors = {
            name: TensorInfo(name, _F32, info.shape, 0) if name in self._scales else info
            for name, info in inner.tensors.items()
            if name not in hidden
        }
        super().__init__(inner, tensors)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know of how the model is presented."""
        remarks = [f"{len(self._scales)} FP8 tensors are presented as float32, scales applied"]
        if self.left_out:
            remarks.append(f"{len(self.left_out)} scales of activations are left out: no weights")
        return tuple(remarks)

    def read(self, name: str, start: int, into: Raw) -> None:
        if name not in self._scales:
            self.inner.read(name, start, into)
            return
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            piece[:] = self._decode(name, start + done, piece.size)

    def _decode(self, name: str, first: int, count: int) -> Floats:
        """Read elements and multiply each by its factor; every NaN is the same one."""
        info, scale = self.inner.tensors[name], self._scales[name]
        values = self._read_floats(name, info.dtype, first, count)
        width = info.shape[-1] if info.shape else 1
        for row, rows, column, columns in _rectangles(first, count, width):
            begin = row * width + column - first
            matrix = values[begin : begin + rows * columns].reshape(rows, columns)
            with np.errstate(all="ignore"):
                matrix *= self._factors(scale, row, rows, column, columns)
        np.copyto(values, np.float32(np.nan), where=np.isnan(values))
        return values

    def _factors(self, scale: Scale, row: int, rows: int, column: int, columns: int) -> Floats:
        """The factors of a rectangle, as far as they differ: one column if they agree in rows."""
        top = row // scale.block_rows
        bottom = (row + rows - 1) // scale.block_rows
        grid = self._read_floats(
            scale.name, scale.dtype, top * scale.columns, (bottom + 1 - top) * scale.columns
        ).reshape(-1, scale.columns)
        if scale.columns > 1:
            grid = grid[:, np.arange(column, column + columns) // scale.block_columns]
        return grid[np.arange(row, row + rows) // scale.block_rows - top]

    def _read_floats(self, name: str, dtype: StorageType, first: int, count: int) -> Floats:
        raw = np.empty(count, dtype.carrier)
        self.inner.read(name, first, raw)
        return _decoded(raw, dtype)


def looks_like(path: Path) -> bool:
    """Say whether a path holds safetensors with scales; this reads their headers."""
    try:
        return has_scales(open_source(path))
    except InputError:
        return False


def open_fp8(path: str | os.PathLike[str]) -> Source:
    """Open safetensors, with scales applied where there are any."""
    return dequantized(open_source(path))


def dequantized(source: Source) -> Source:
    """Apply a source's scales, if it has any; refuse what is quantised in other ways."""
    check_not_packed(source)
    return DequantizedSource(source) if has_scales(source) else source


def has_scales(source: Source) -> bool:
    """Say whether a source has FP8 weights that mean something only with their scales."""
    return any(
        info.dtype.name in FP8_TYPES and _scale_name(name, source.tensors)
        for name, info in source.tensors.items()
    )


def check_not_packed(source: Source) -> None:
    """Raise InputError if weights are packed in integers, as by AWQ, GPTQ and bitsandbytes."""
    for name, info in source.tensors.items():
        kind = PACKED.get(name.rpartition(".")[2])
        if _BITSANDBYTES_STATE in name:
            kind = "bitsandbytes"
        elif kind is None and not info.dtype.is_weight and _scale_name(name, source.tensors):
            kind = f"{info.dtype.name} with scales"
        if kind is not None:
            where = f"{source.files[0].parent}: " if source.files else ""
            raise InputError(f"{where}{name}: quantised ({kind}); {_DEQUANTIZE_FIRST}")


def _scale_name(weight: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    return next((weight + end for end in SCALE_ENDINGS if weight + end in tensors), None)


def _pairs(tensors: Mapping[str, TensorInfo], where: str) -> Iterator[tuple[str, str]]:
    """Every FP8 weight that has a scale, with its name."""
    for name, info in tensors.items():
        if info.dtype.name not in FP8_TYPES:
            continue
        scales = [name + end for end in SCALE_ENDINGS if name + end in tensors]
        if len(scales) > 1:
            raise InputError(f"{where}: {name} has both {' and '.join(scales)}; which one applies?")
        if scales:
            yield name, scales[0]


def _fit(weight: TensorInfo, scale: TensorInfo, where: str) -> Scale:
    """Find out which part of a weight each factor is for."""
    if scale.dtype.name not in SCALE_TYPES:
        raise InputError(
            f"{where}: {scale.name} is {scale.dtype.name}; a scale is one of "
            f"{', '.join(SCALE_TYPES)}"
        )
    width = weight.shape[-1] if weight.shape else 1
    rows = weight.elements // width if width else 0
    if scale.elements == 1:
        return Scale(scale.name, scale.dtype, 1, max(rows, 1), max(width, 1))
    if len(weight.shape) == 2:
        if scale.shape in ((rows,), (rows, 1)):
            return Scale(scale.name, scale.dtype, 1, 1, width)
        if scale.shape == (-(-rows // BLOCK), -(-width // BLOCK)):
            return Scale(scale.name, scale.dtype, scale.shape[1], BLOCK, BLOCK)
    raise InputError(
        f"{where}: {scale.name} is {_shape(scale)} and {weight.name} is {_shape(weight)}; a scale "
        f"is one number, one for each row, or one for each block of {BLOCK}×{BLOCK}. "
        "Dequantise the model first"
    )


def _rectangles(first: int, count: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a run of elements into rectangles: row, rows, column, columns."""
    row, column = divmod(first, width)
    while count:
        if column or count < width:
            rows, columns = 1, min(width - column, count)
        else:
            rows, columns = count // width, width
        yield row, rows, column, columns
        count -= rows * columns
        row, column = row + rows, 0


def _decoded(raw: Raw, dtype: StorageType) -> Floats:
    return np.take(_table(dtype.name), raw.view(np.uint8)) if dtype.itemsize == 1 else decoded(raw)


@cache
def _table(name: str) -> Floats:
    """What each of a type's 256 codes means; looking it up is four times as fast as decoding."""
    codes = np.arange(256, dtype=np.uint8)
    if name == "F8_E8M0":  # 2**(code − 127); 255 is NaN
        powers = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
        return np.where(codes == 255, np.float32(np.nan), powers)
    return decoded(codes.view(STORAGE_TYPES[name].carrier))


def _shape(info: TensorInfo) -> str:
    return "×".join(map(str, info.shape)) or "one number"
