"""Quantised models: those that can be read exactly are presented as weights, all others refused.

An output has plain weights and a configuration that says so, unless it is quantised again
(`dare.formats.quantised`). Codes cannot be merged, and if they were copied beside such a
configuration, the model would be broken. So anything that looks like codes, by its name, by scales
beside it, or because the configuration mentions them, is refused here, before anything is planned,
for the base and every model. Three kinds are read:

FP8: a weight in F8_E4M3 or F8_E5M2 with a scale is presented as float32, each element one float32
product `stored · scale`. A scale is one number, one for each row, or one for each block: of the
size that the configuration says, else 128×128 (DeepSeek). FP8 tensors without a scale are passed on
as they are.

MXFP4, experts of gpt-oss: a layer's experts are stored as `NAME_blocks` (experts × outputs × groups
× 16 bytes, two codes of four bits in each, the low half first) and `NAME_scales` (a power of two
for each group of 32). `NAME` is presented as experts × inputs × outputs in BF16, which holds every
product exactly. The stored layout is the transpose, so the codes of one expert are read as a whole
and kept by the thread until it asks for another.

NVFP4, as ModelOpt and compressed-tensors store it: codes of four bits, two in each byte, the low
half first, with a scale in F8_E4M3 for every 16 of a row and a number for the whole tensor. The
weight is presented under its own name as float32, `code · (scale · number)`; in compressed-tensors,
the number is a divisor.
"""

from __future__ import annotations

import math
import re
import threading
import tomllib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import notice
from dare.documents.words import counted
from dare.errors import InputError
from dare.inputs.sources import (
    Bytes,
    CodedInfo,
    Floats,
    Opening,
    Raw,
    Source,
    SourceView,
    decoded,
    home_of,
)
from dare.tensors.chunks import rectangles
from dare.tensors.dtypes import CODE_TYPES, STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo
from dare.tensors.names import quantised_kind, some_of

SETTINGS = ("quantization_config", "compression_config")  # of quantised weights
MLX_SETTINGS = "quantization"

_DATA = tomllib.loads(files("dare.inputs").joinpath("quantised.toml").read_text("utf-8"))


def read_quantised(
    source: Source, config: Mapping[str, Any], *, keeps_scales: bool = False
) -> Source:
    """Present quantised weights as the numbers they represent, or refuse them.

    Scales of activations are left out, or shown as bits, which are copied and never merged.
    """
    where = f"{home_of(source)}: " if source.files else ""
    unpacked = unpack_nvfp4(unpack_mxfp4(source, config))
    plain = apply_fp8_scales(unpacked, *block_size(config, where))
    if plain is not source:
        scales = {
            name: info
            for name, info in plain.tensors.items()
            if name.rpartition(".")[2] in _DATA["activation_scales"] and not info.dtype.packed_bits
        }
        plain = _WithoutActivations(plain, scales, keeps=keeps_scales) if scales else plain
    method = quantisation_method(config)
    if reason := _DATA["in_use"].get(method or ""):
        raise InputError(f"{where}config.json: quant_method is {method!r}; {reason}")
    if codes := _find_codes(plain, method):
        tensor, kind = codes
        scheme = f"{kind}, quant_method {method!a}" if method else kind
        ways = _DATA["how"]
        by_kind = (ways[name] for name in ways if name in kind.lower())
        how = ways.get(method or "") or next(by_kind, None)
        dequantise = f", or dequantise it first: {how}" if how else ""
        raise InputError(
            f"{where}{tensor}: quantised ({scheme}); quantised weights cannot be merged; merge the "
            f"model that it was made from{dequantise}"
        )
    return plain


class _WithoutActivations(SourceView):
    """A source without the scales of activations, or with their bits."""

    def __init__(self, inner: Source, scales: Mapping[str, TensorInfo], *, keeps: bool) -> None:
        tensors = {name: info for name, info in inner.tensors.items() if name not in scales}
        for name, info in scales.items() if keeps else ():
            bits = STORAGE_TYPES[f"U{info.dtype.itemsize * 8}"]
            tensors[name] = CodedInfo(name, bits, info.shape, info.start, info.dtype)
        super().__init__(inner, tensors, computed=scales)
        code = "base_scales" if keeps else "not_weights"
        self.remarks += (notice(code, names=some_of(sorted(scales))),)

    def compute(self, name: str, start: int, into: Raw) -> None:
        self.inner.read(name, start, into.view(self.inner.tensors[name].dtype.carrier))


def open_form(opening: Opening) -> Source:
    """Open safetensors that may be quantised."""
    return read_quantised(opening.stored, opening.config, keeps_scales=opening.keeps_scales)


def tables_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and those of its parts, such as text_config."""
    tables = [config]
    for table in tables:
        tables += [value for value in table.values() if isinstance(value, dict)]
        yield table


def block_size(config: Mapping[str, Any], where: str = "") -> tuple[Block, bool]:
    """Return the size of the blocks that FP8 has scales for, and if all scales are for blocks.

    transformers says this for the whole model; groups of compressed-tensors may differ.

    >>> block_size({"quantization_config": {"weight_block_size": [128, 64]}}), block_size({})
    (((128, 64), True), ((128, 128), False))
    """
    tables = list(tables_of(dict(config)))
    for key in ("weight_block_size", "block_structure"):
        for size in (table[key] for table in tables if table.get(key) is not None):
            match size:
                case [int(rows), int(columns)] if min(rows, columns) > 0:
                    return (rows, columns), key == "weight_block_size"
            if key == "weight_block_size":
                raise InputError(f"{where}config.json: {key} is {size!a}, not two numbers above 0")
    return USUAL_BLOCK, False


def quantisation_settings(table: Mapping[str, Any]) -> list[str]:
    """Return the entries of a configuration's table that say its weights are quantised.

    >>> quantisation_settings({"quantization_config": {"quant_method": "gptq"}, "quantization": 3})
    ['quantization_config']
    """
    mlx = table.get(MLX_SETTINGS)
    is_mlx = isinstance(mlx, dict) and "bits" in mlx
    return [*(key for key in SETTINGS if table.get(key)), *([MLX_SETTINGS] if is_mlx else [])]


def quantisation_method(config: Mapping[str, Any]) -> str | None:
    """Return the scheme of quantisation that a configuration names, if any."""
    for table in tables_of(dict(config)):
        for key in quantisation_settings(table):
            settings = table[key]
            named = settings.get("quant_method") if isinstance(settings, dict) else None
            return str(named or ("mlx" if key == MLX_SETTINGS else "unknown"))
    return None


def _find_codes(source: Source, method: str | None) -> tuple[str, str] | None:
    """Find a tensor that holds codes or belongs to them; also return its sign."""
    tensors = {n: info for n, info in source.tensors.items() if not isinstance(info, CodedInfo)}
    scales: dict[str, list[str]] = {}
    for name in tensors:
        module, _, last = name.rpartition(".")
        if kind := quantised_kind(name):
            return name, kind
        if any(word in last.lower() for word in _DATA["scales"]):
            scales.setdefault(module, []).append(name)
    for name, info in tensors.items():
        if info.dtype.name not in CODE_TYPES or not info.shape:
            continue
        module = name.rpartition(".")[0]
        beside = (t for t in scales.get(module, ()) if module or t.startswith(name))
        if any(scale != name for scale in beside) or name in scales:
            return name, f"{info.dtype.name} with scales"
        if method is not None:
            return name, f"{info.dtype.name} in a quantised model"
    return None


# ---------------------------------------------------------------- FP8

FP8_TYPES = ("F8_E4M3", "F8_E5M2")

Block = tuple[int, int]  # rows and columns that have one scale
USUAL_BLOCK: Block = (128, 128)
SCALE_ENDINGS = ("_scale_inv", "_scale")  # both are factors; the first is DeepSeek's
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
PIECE_ELEMENTS = 1 << 16
PIECE_BYTES = PIECE_ELEMENTS * 16  # memory for a piece: codes, their values, their factors


@dataclass(frozen=True)
class Scale:
    """A weight's type, and the grid of its factors, one for each block."""

    dtype: StorageType
    info: TensorInfo
    columns: int
    block_rows: int
    block_columns: int

    @property
    def is_one(self) -> bool:
        """Return whether there is one factor for the whole weight."""
        return self.info.elements == 1


class DecodedSource(SourceView):
    """Another source with codes presented as numbers; tensors that belong to them are hidden."""

    def __init__(
        self,
        inner: Source,
        decoded: Mapping[str, TensorInfo],
        hidden: Container[str],
        kind: str,
        dtype: str = "float32",
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        tensors = {name: info for name, info in inner.tensors.items() if name not in hidden}
        super().__init__(inner, {**tensors, **decoded}, computed=decoded)
        self.cost = inner.cost.with_reading(piece_bytes)
        count = counted(len(decoded), f"{kind} tensor")
        self.remarks += (notice("dequantised", tensors=count, dtype=dtype),)

    def compute(self, name: str, start: int, into: Raw) -> None:
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            self.decode(name, start + done, piece)
            np.copyto(
                piece, np.float32(np.nan), where=np.isnan(piece)
            )  # all NaN have one bit pattern

    def decode(self, name: str, first: int, values: Floats) -> None:
        """Fill `values` with elements from `first` on, each multiplied by its factor."""
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
        """Read the factors of a rectangle, as one column if each row has one factor."""
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


def apply_fp8_scales(source: Source, block: Block, blocks_only: bool) -> Source:
    """Apply a source's scales, if it has any; with `blocks_only`, each must be for a `block`."""
    scales = {
        name: scale
        for name, info in source.tensors.items()
        if info.dtype.name in FP8_TYPES and (scale := _find_scale(info, source, block, blocks_only))
    }
    return Fp8Source(source, scales) if scales else source


def _find_scale(
    weight: TensorInfo, source: Source, block: Block, blocks_only: bool
) -> Scale | None:
    """Find a weight's scale, and the part of the weight that each of its factors is for."""
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
    if scale.elements == 1 and (not blocks_only or grid == (1, 1)):
        return Scale(weight.dtype, scale, 1, max(rows, 1), max(width, 1))
    if len(weight.shape) == 2 and not blocks_only and scale.shape in ((rows,), (rows, 1)):
        return Scale(weight.dtype, scale, 1, 1, width)
    if len(weight.shape) == 2 and scale.shape == grid:
        return Scale(weight.dtype, scale, scale.shape[1], *block)
    others = " (is weight_block_size right?)" if blocks_only else ", one for each row, or one"
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


# ---------------------------------------------------------------- MXFP4

MXFP4 = "MXFP4"
MXFP4_MODEL_TYPE = "gpt_oss"
MXFP4_GROUP = 32
MXFP4_GROUP_BYTES = MXFP4_GROUP // 2
TILE = 1 << 16
TILE_BYTES = TILE * 16  # memory for a tile: codes, places in the table, and values
# Values of the codes; 8 to 15 are 0 to 7 with a minus sign.
FP4_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4_VALUES = np.concatenate([FP4_VALUES, -FP4_VALUES])
_BLOCKS = re.compile(r"(.*\bexperts\.(?:gate_up_proj|down_proj))_blocks")


class Mxfp4Source(DecodedSource):
    """Another source with its experts unpacked; blocks and scales are hidden."""

    def __init__(self, inner: Source, packed: Mapping[str, TensorInfo]) -> None:
        self._packed = packed
        stored = {name + end for name in packed for end in ("_blocks", "_scales")}
        largest = max(info.elements // max(info.shape[0], 1) for info in packed.values())
        piece_bytes = largest // 2 + largest // MXFP4_GROUP + TILE_BYTES
        super().__init__(inner, packed, stored, MXFP4, "bfloat16, which is exact", piece_bytes)
        self._kept: dict[int, tuple[str, int, Bytes, Bytes]] = {}  # each thread's last expert

    def compute(self, name: str, start: int, into: Raw) -> None:
        _, inputs, outputs = self._packed[name].shape
        done = 0
        for place, rows, column, columns in rectangles(start, into.size, outputs, inputs):
            expert, row = divmod(place, inputs)
            matrix = into[done : done + rows * columns].reshape(rows, columns)
            blocks, scales = self._expert(name, expert)
            step = max(1, TILE // rows)
            for left in range(0, columns, step):
                right = min(left + step, columns)
                part = slice(column + left, column + right)
                matrix[:, left:right] = _mxfp4_rectangle(blocks[part], scales[part], row, rows)
            done += rows * columns

    def __exit__(self, *error: object) -> None:
        self._kept.clear()
        super().__exit__(*error)

    def _expert(self, name: str, expert: int) -> tuple[Bytes, Bytes]:
        """Read blocks and scales of an expert, outputs × bytes; threads share them."""
        thread = threading.get_ident()
        for kept in list(self._kept.values()):
            if kept[:2] == (name, expert):
                self._kept[thread] = kept
                return kept[2:]
        self._kept.pop(thread, None)  # so that no thread ever has two
        _, inputs, outputs = self._packed[name].shape
        matrices = []
        for end, width in (("_blocks", inputs // 2), ("_scales", inputs // MXFP4_GROUP)):
            raw = np.empty(outputs * width, np.uint8)
            self.inner.read(name + end, expert * raw.size, raw)
            matrices.append(raw.reshape(outputs, width))
        blocks, scales = matrices
        self._kept[thread] = name, expert, blocks, scales
        return blocks, scales


def unpack_mxfp4(source: Source, config: Mapping[str, Any]) -> Source:
    """Unpack a source's MXFP4 experts, if it has any and its type's layout is known."""
    packed: dict[str, TensorInfo] = {}
    if config.get("model_type", MXFP4_MODEL_TYPE) == MXFP4_MODEL_TYPE:
        for name, info in source.tensors.items():
            if (match := _BLOCKS.fullmatch(name)) and info.dtype.name == "U8":
                expert = _describe_experts(match[1], source)
                packed |= {} if expert is None else {expert.name: expert}
    return Mxfp4Source(source, packed) if packed else source


def _describe_experts(name: str, source: Source) -> CodedInfo | None:
    """Describe the tensor that blocks and scales represent; None without scales."""
    blocks, scales = source.tensors[f"{name}_blocks"], source.tensors.get(f"{name}_scales")
    where = home_of(source)
    if scales is None:
        return None
    fits = len(blocks.shape) == 4 and blocks.shape[3] == MXFP4_GROUP_BYTES
    if not fits or scales.shape != blocks.shape[:3] or scales.dtype.name != "U8":
        raise InputError(
            f"{where}: {blocks.name} is {blocks.form}, {scales.name} {scales.described}; expected "
            f"experts × outputs × groups × {MXFP4_GROUP_BYTES}, a U8 scale for each group. "
            "Dequantise it"
        )
    if name in source.tensors:
        raise InputError(f"{where}: has both {name} and {blocks.name}; remove one of them")
    experts, outputs, groups, _ = blocks.shape
    shape = experts, groups * MXFP4_GROUP, outputs
    return CodedInfo(name, STORAGE_TYPES["BF16"], shape, 0, MXFP4)


def _mxfp4_rectangle(blocks: Bytes, scales: Bytes, row: int, rows: int) -> NDArray[np.uint16]:
    """Return some inputs of some outputs as inputs × outputs, in the bits of BF16."""
    pairs = blocks[:, row // 2 : (row + rows - 1) // 2 + 1]
    codes = np.empty((len(pairs), pairs.shape[1], 2), np.uint16)
    np.bitwise_and(pairs, 15, out=codes[:, :, 0])
    np.right_shift(pairs, 4, out=codes[:, :, 1])
    places = codes.reshape(len(pairs), -1)[:, row % 2 :][:, :rows]
    places += scales[:, np.arange(row, row + rows) // MXFP4_GROUP].astype(np.uint16) * 16
    return _mxfp4_bits()[places].T


@cache
def _mxfp4_bits() -> NDArray[np.uint16]:
    """Return the bits of 16 codes for 256 scales; the last scale is not NaN in transformers."""
    powers = [math.ldexp(1.0, scale - 127) for scale in range(256)]
    with np.errstate(over="ignore"):
        values = np.multiply.outer(np.array(powers), FP4_VALUES).astype(np.float32)
        bits: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits.reshape(-1)


# ---------------------------------------------------------------- NVFP4

NVFP4_GROUP = 16
NVFP4_NUMBERS = {"": "_scale_2", "_packed": "_global_scale"}  # by the ending of the codes' name


class Nvfp4Parts(NamedTuple):
    """The stored tensors that represent a weight."""

    codes: TensorInfo
    scales: TensorInfo
    number: TensorInfo


class Nvfp4Source(DecodedSource):
    """Another source with its codes unpacked."""

    def __init__(self, inner: Source, packed: Mapping[str, Nvfp4Parts]) -> None:
        self._packed = packed
        decoded = {}
        for name, parts in packed.items():
            *rows, width = parts.codes.shape
            decoded[name] = CodedInfo(name, STORAGE_TYPES["F32"], (*rows, width * 2), 0, parts)
        hidden = {info.name for parts in packed.values() for info in parts}
        super().__init__(inner, decoded, hidden, "NVFP4")

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name in self._packed:
            name, start, count = self._packed[name].codes.name, start // 2, count // 2
        self.inner.prefetch(name, start, count)

    def decode(self, name: str, first: int, values: Floats) -> None:
        packed, last = self._packed[name], first + values.size - 1
        raw = np.empty(last // 2 + 1 - first // 2, np.uint8)
        self.inner.read(packed.codes.name, first // 2, raw)
        values[:] = np.take(_nvfp4_pairs(), raw, axis=0).reshape(-1)[first % 2 :][: values.size]
        group = first // NVFP4_GROUP
        scales = read_values(self.inner, packed.scales, group, last // NVFP4_GROUP + 1 - group)
        number = read_values(self.inner, packed.number, 0, 1)
        divides = packed.number.name.endswith(NVFP4_NUMBERS["_packed"])
        factors = scales / number if divides else scales * number
        values *= factors[np.arange(first, last + 1) // NVFP4_GROUP - group]


def unpack_nvfp4(source: Source) -> Source:
    """Unpack a source's weights in NVFP4, if it has any."""
    packed: dict[str, Nvfp4Parts] = {}
    for name, codes in source.tensors.items():
        for ending, number in NVFP4_NUMBERS.items() if codes.dtype.name == "U8" else ():
            stem = name.removesuffix(ending)
            beside = [source.tensors.get(stem + end) for end in ("_scale", number)]
            if name.endswith(ending) and all(beside):
                packed[stem] = Nvfp4Parts(codes, *(info for info in beside if info is not None))
                _check_nvfp4(stem, packed[stem], source)
    return Nvfp4Source(source, packed) if packed else source


def _check_nvfp4(name: str, packed: Nvfp4Parts, source: Source) -> None:
    """Refuse scales that do not fit their codes, and a second tensor of the same name."""
    codes, scales, number = packed
    width = codes.shape[-1] if codes.shape else 0
    fits = scales.dtype.name == "F8_E4M3" and number.dtype.name == "F32" and number.elements == 1
    if not fits or width % 8 or scales.shape != (*codes.shape[:-1], width * 2 // NVFP4_GROUP):
        parts = ", ".join(f"{info.name} is {info.described}" for info in packed)
        raise InputError(
            f"{home_of(source)}: {parts}; expected an F8_E4M3 scale for each {NVFP4_GROUP} of a "
            "row and one F32 number. Dequantise it"
        )
    if name in source.tensors and name != codes.name:
        raise InputError(f"{home_of(source)}: has both {name} and {codes.name}; remove one of them")


@cache
def _nvfp4_pairs() -> Floats:
    """Return the values of the two codes in each byte."""
    codes = np.arange(256)
    return FP4_VALUES[np.stack([codes & 15, codes >> 4], axis=1)]
