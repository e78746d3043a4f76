"""Outputs in the base's own format: its FP8 and MXFP4 weights are stored in that format again.

Everything else stays as it is. The configuration keeps its entry for the format, by which programs
recognise it; in a stack of layers, modules excepted by number get the numbers of their copies.

FP8 has the base's types, and scales for the same blocks. Scales are fresh: the largest magnitude of
a block by the largest number of the type (448 for F8_E4M3), rounded up where scales are powers of
two, and 1 for a block of zeros. An element is divided by its scale, and rounded to the nearest,
ties to even. So what was stored with such scales is stored again with the same codes, and a scale
in float32 changes by its last bit at most.

MXFP4, for the experts of gpt-oss: a group of 32 inputs of an output has the smallest power of two
as its scale under which no element is above 6, the largest code, as Triton's kernels choose it;
elements are rounded to the nearest, ties to even. So what was MXFP4 keeps its values, whatever the
scale was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.errors import NotFiniteError, RecipeError
from dare.formats.recoding import (
    PIECE_ELEMENTS,
    PIECE_WORK,
    LossMeter,
    Put,
    Read,
    Recoding,
    Unit,
)
from dare.inputs.directory import MODELOPT_CONFIG, Sidecars
from dare.inputs.quantised import (
    FP4_VALUES,
    MXFP4,
    MXFP4_GROUP,
    MXFP4_GROUP_BYTES,
    SCALE_ENDINGS,
    Scale,
    block_size,
    quantisation_settings,
    tables_of,
)
from dare.inputs.sources import (
    Bytes,
    CodedInfo,
    Floats,
    Raw,
    Source,
    decoded,
    read_config,
)
from dare.recipe.layers import at_layer, count_layers, stack_and_layer
from dare.recipe.recipe import Recipe
from dare.tensors.chunks import rectangles
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.files import is_there
from dare.tensors.header import Described, TensorInfo

Numbers = NDArray[np.intp]
Pieces = Callable[[], Iterable[tuple[int, Raw]]]  # each with its place in the tensor
limits_of: Any = ml_dtypes.finfo  # which has no types


@dataclass(frozen=True)
class Fp8:
    """A weight in FP8 with scales."""

    scale: Scale
    powers_of_two: bool  # True if scales are powers of two, whatever their type

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
                found = np.maximum.reduceat(np.abs(matrix), _block_starts(columns), axis=1)
                found = np.maximum.reduceat(found, _block_starts(rows), axis=0)
                part = largest[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                np.maximum(part, found, out=part)
            scales = self._scales_for(largest[band] / np.float32(top))
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

    def _scales_for(self, wanted: Floats) -> Raw:
        """Return the best factors as scales of the stored type."""
        wanted = np.where(wanted > 0, wanted, np.float32(1))
        if self.powers_of_two:
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


def _block_starts(blocks: Numbers) -> Numbers:
    """Return the positions at which a new block begins."""
    return np.flatnonzero(np.diff(blocks, prepend=-1))


LOWEST_EXPONENT = -127  # exponent of the smallest scale


class Mxfp4:
    """The experts of a layer: experts × inputs × outputs, merged in BF16."""

    def stored(self, tensor: Described) -> Sequence[Described]:
        """Return blocks and scales."""
        name, _, (experts, inputs, outputs) = tensor
        grid, kind = (experts, outputs, inputs // MXFP4_GROUP), STORAGE_TYPES["U8"]
        blocks = f"{name}_blocks", kind, (*grid, MXFP4_GROUP_BYTES)
        return [blocks, (f"{name}_scales", kind, grid)]

    def unit(self, tensor: Described) -> Unit:
        """Return an expert, whose codes are held in memory."""
        _, inputs, outputs = tensor[2]
        held = inputs // 2 + inputs // MXFP4_GROUP * np.dtype(np.int32).itemsize
        return Unit(inputs * outputs, work_bytes=(PIECE_WORK * MXFP4_GROUP + held) * outputs)

    def encode(self, tensor: Described, read: Read, put: Put) -> LossMeter:
        """Store experts, one after the other."""
        (blocks, _, (_, outputs, groups, _)), (scales, *_) = self.stored(tensor)
        meter, size = LossMeter(), MXFP4_GROUP * outputs
        codes = np.empty((outputs, groups, MXFP4_GROUP_BYTES), np.uint8)
        exponents = np.empty((outputs, groups), np.int32)
        for start, raw in read(size):
            expert, group = divmod(start // size, groups)
            values = decoded(raw, "cpu").reshape(MXFP4_GROUP, outputs)
            if not np.isfinite(values).all():
                what = "has values that are not finite, which MXFP4 cannot store"
                raise NotFiniteError(f"{tensor[0]}: {what}; leave format out")
            largest = np.abs(values).max(axis=0) / FP4_VALUES.max()
            own = ceil_log2(np.maximum(largest, np.float32(2.0**LOWEST_EXPONENT)))
            exponents[:, group] = own
            scaled = values * np.ldexp(np.float32(1), -own)
            places = np.take(_fp4_codes(), scaled.view(np.uint32) >> 16)
            codes[:, group] = (places[0::2] | places[1::2] << 4).T
            meter.add(values, FP4_VALUES[places] * np.ldexp(np.float32(1), own))
            if group == groups - 1:
                put(blocks, expert * codes.size, codes.reshape(-1))
                powers = (exponents - LOWEST_EXPONENT).astype(np.uint8)
                put(scales, expert * powers.size, powers.reshape(-1))
        return meter


@cache
def _fp4_codes() -> Bytes:
    """Return the code of each number in BF16."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        codes: Bytes = numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes


@dataclass(frozen=True)
class QuantisedRecoding(Recoding):
    """The formats of a base's tensors."""

    format: str
    codes: Mapping[str, Fp8 | Mxfp4]
    kinds: Mapping[str, StorageType]  # of scales of activations, which are copied
    config: Mapping[str, Any] = field(default_factory=dict)

    def merged_type(self, base: TensorInfo) -> StorageType:
        is_exact = isinstance(self.codes.get(base.name), Mxfp4)
        return STORAGE_TYPES["BF16"] if is_exact else base.dtype

    def stored(self, tensor: Described) -> Sequence[Described]:
        name, dtype, shape = tensor
        if name in self.codes:
            return self.codes[name].stored(tensor)
        return [(name, self.kinds.get(name, dtype), shape)]

    def unit(self, tensor: Described) -> Unit:
        code = self.codes.get(tensor[0])
        return Unit() if code is None else code.unit(tensor)

    def encode(self, tensor: Described, read: Read, put: Put) -> LossMeter | None:
        code = self.codes.get(tensor[0])
        return super().encode(tensor, read, put) if code is None else code.encode(tensor, read, put)

    def with_files(self, beside: Sidecars) -> Self:
        if is_there(beside.directory / MODELOPT_CONFIG):
            beside.take(beside.directory, [MODELOPT_CONFIG])
        return self


def quantised_recoding(_recipe: Recipe, inputs: Sequence[Source]) -> QuantisedRecoding | None:
    """Return the formats of the base's weights; None if it has plain ones."""
    base = inputs[0]
    coded = {name: info.code for name, info in base.tensors.items() if isinstance(info, CodedInfo)}
    config = {} if base.folder is None else read_config(base.folder)
    settings = {
        key: _restacked(table[key], base)
        for table in tables_of(dict(config))
        for key in quantisation_settings(table)
        if isinstance(table[key], dict)
    }
    powers = any(table.get("scale_fmt") == "ue8m0" for table in settings.values())
    block, blocks_only = block_size(config)
    codes: dict[str, Fp8 | Mxfp4] = {}
    for name, code in coded.items():
        if isinstance(code, Scale):
            if blocks_only and not code.is_one and block != (code.block_rows, code.block_columns):
                what = f"{name}: its blocks are not of the base's weight_block_size"
                raise RecipeError(f"{what}; leave format out, or take another base")
            codes[name] = Fp8(code, powers or code.info.dtype.name == "F8_E8M0")
        elif code == MXFP4:
            codes[name] = Mxfp4()
        elif not isinstance(code, StorageType):
            what = "NVFP4 cannot be written; leave format out, or set dtype"
            raise RecipeError(f'format = "input": {what}')
    kinds = {name: code for name, code in coded.items() if isinstance(code, StorageType)}
    formats = sorted({"FP8" if isinstance(code, Fp8) else "MXFP4" for code in codes.values()})
    found = QuantisedRecoding(" and ".join(formats), codes, kinds, settings)
    _check_stack(base, found)
    return found if codes else None


def _restacked(settings: Mapping[str, Any], base: Source) -> Mapping[str, Any]:
    """Renumber modules that settings list by name, once for each layer that has them now."""
    counts = count_layers(base.tensors)

    def moved(module: Any) -> list[Any]:
        stack, layer = stack_and_layer(f"{module}.") or ("", 0)
        if counts.get(stack) != len(base.layers):
            return [module]
        places = (new for new, (_, old) in enumerate(base.layers) if old == layer)
        return [at_layer(f"{module}.", new)[:-1] for new in places]

    lists = {key: value for key, value in settings.items() if isinstance(value, list)}
    restacked = {key: [m for e in value for m in moved(e)] for key, value in lists.items()}
    return {**settings, **restacked}


def _check_stack(base: Source, found: QuantisedRecoding) -> None:
    """Refuse a stack of models stored in different ways, or not as the configuration says."""
    if base.layers and base.folder is not None and not found.config:
        what = "the base's config.json does not say that weights are quantised"
        raise RecipeError(f'format = "input": {what}; leave format out, or take another base')
    if len({home for home, _ in base.layers}) < 2:
        return
    kinds: dict[str, Any] = {}
    for name, info in base.tensors.items():
        stored = found.stored((name, info.dtype, info.shape)) if name in found.codes else ()
        kind = [(own.removeprefix(name), *form) for own, *form in stored]
        if stack_and_layer(name) and kinds.setdefault(at_layer(name, 0), kind) != kind:
            what = "is not quantised in the same way in all layers"
            raise RecipeError(f'{name}: {what}; leave format = "input" out')
