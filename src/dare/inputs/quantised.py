"""Quantised models: those that can be read exactly are presented as weights, all others refused.

An output has plain weights and a configuration that says so. Codes cannot be merged, and copied
beside such a configuration they would be a broken model. So anything that looks like codes, by its
name, by scales beside it, or because the configuration mentions them, is refused here, before
anything is planned, for the base and every model. Two forms are read.

FP8: a weight in F8_E4M3 or F8_E5M2 with a scale is presented as float32, each element one float32
product `stored · scale`. A scale is one number, one for each row, or one for each block of 128×128
(DeepSeek). FP8 tensors without a scale are passed on as they are.

MXFP4 (gpt-oss): beside a layer's experts stand `NAME_blocks` (experts × outputs × groups × 16
bytes, two codes of four bits in each, the low half first) and `NAME_scales` (a power of two for
each group of 32). `NAME` is presented as experts × inputs × outputs in BF16, which holds every
product exactly. The stored layout is the transpose, so the codes of one expert are read as a whole
and kept by the thread until it asks for another.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import notice
from dare.documents.words import times
from dare.errors import InputError
from dare.inputs.sources import Bytes, Floats, Opening, Raw, Source, SourceView, decoded
from dare.tensors.dtypes import CODE_TYPES, STORAGE_TYPES
from dare.tensors.header import TensorInfo
from dare.tensors.names import quantised_kind, some_of

SETTINGS = ("quantization_config", "compression_config")  # of quantised weights
MLX_SETTINGS = "quantization"
FP8_TYPES = ("F8_E4M3", "F8_E5M2")
SCALES = ("scale", "absmax", "zero_point", "zeros")

# Schemes that change what plain weights do, and what they would do without the configuration.
IN_USE = {"bitnet": "its layers round their weights in use, and a merged model would not"}
HOW = {
    "bitsandbytes": "load it in transformers, call model.dequantize()",
    "compressed-tensors": "load it in transformers with "
    "quantization_config=CompressedTensorsConfig(dequantize=True)",
    "mxfp4": "load it in transformers with quantization_config=Mxfp4Config(dequantize=True)",
    "higgs": "load it in transformers, call model.dequantize()",
    "mlx": "convert it with mlx_lm.convert --dequantize",
}


def read_quantised(source: Source, config: Mapping[str, Any]) -> Source:
    """Present quantised weights as what they stand for, by a model's configuration; or refuse."""
    plain = dequantized(unpacked(source, config))
    method = quantisation_method(config)
    where = f"{next(iter(source.files)).parent}: " if source.files else ""
    if reason := IN_USE.get(method or ""):
        raise InputError(f"{where}config.json: quant_method is {method!r}; {reason}")
    if found := _find_codes(plain, method):
        tensor, kind = found
        scheme = f"{kind}, quant_method {method!a}" if method else kind
        by_kind = (HOW[name] for name in HOW if name in kind.lower())
        how = HOW.get(method or "") or next(by_kind, None)
        dequantise = f", or dequantise it first: {how}, and save it" if how else ""
        raise InputError(
            f"{where}{tensor}: quantised ({scheme}); quantised weights cannot be merged; merge the "
            f"model that it was made from{dequantise}"
        )
    return plain


def open_form(opening: Opening) -> Source:
    """Open safetensors that may be quantised."""
    return read_quantised(opening.stored, opening.config)


def tables_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and those of its parts, such as text_config."""
    left = [config]
    for table in left:
        left += [value for value in table.values() if isinstance(value, dict)]
        yield table


def quantisation_settings(table: Mapping[str, Any]) -> list[str]:
    """Return the entries of a configuration's table that say its weights are quantised.

    >>> quantisation_settings({"quantization_config": {"quant_method": "gptq"}, "quantization": 3})
    ['quantization_config']
    """
    mlx = table.get(MLX_SETTINGS)
    is_mlx = isinstance(mlx, dict) and "bits" in mlx
    return [*(key for key in SETTINGS if table.get(key)), *([MLX_SETTINGS] if is_mlx else [])]


def quantisation_method(config: Mapping[str, Any]) -> str | None:
    """Return the scheme that a configuration says its weights are quantised by, if any."""
    for table in tables_of(dict(config)):
        for key in quantisation_settings(table):
            settings = table[key]
            named = settings.get("quant_method") if isinstance(settings, dict) else None
            return str(named or ("mlx" if key == MLX_SETTINGS else "unknown"))
    return None


def _find_codes(source: Source, method: str | None) -> tuple[str, str] | None:
    """Find a tensor that holds codes or belongs to them, and the sign of it."""
    scales: dict[str, list[str]] = {}
    for name in source.tensors:
        module, _, last = name.rpartition(".")
        if kind := quantised_kind(name):
            return name, kind
        if any(word in last.lower() for word in SCALES):
            scales.setdefault(module, []).append(name)
    for name, info in source.tensors.items():
        if info.dtype.name not in CODE_TYPES or not info.shape:
            continue
        module = name.rpartition(".")[0]
        beside = (t for t in scales.get(module, ()) if module or t.startswith(name))
        if any(scale != name for scale in beside) or name in scales:
            return name, f"{info.dtype.name} with scales"
        if method is not None:
            return name, f"{info.dtype.name} in a quantised model"
    return None


def _rectangles(
    first: int, count: int, width: int, height: int | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a run into rectangles of matrices of a height: row, rows, column, columns."""
    while count:
        row, column = divmod(first, width)
        rows, columns = 1, min(width - column, count)
        if not column and count >= width:
            rows = min(count // width, count if height is None else height - row % height)
        yield row, rows, column, columns
        first, count = first + rows * columns, count - rows * columns


# ---------------------------------------------------------------- FP8

BLOCK = 128
SCALE_ENDINGS = ("_scale_inv", "_scale")  # both are factors; the first is DeepSeek's
# Scales of what passes through a layer, which no weight depends on.
ACTIVATION_SCALES = (
    *("activation_scale", "input_scale", "input_scale_ub", "output_scale"),
    *("q_scale", "k_scale", "v_scale", "kv_scale"),
)
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
PIECE_ELEMENTS = 1 << 16
PIECE_BYTES = PIECE_ELEMENTS * 16  # memory for a piece: codes, their values, their factors


@dataclass(frozen=True)
class Scale:
    """A grid of factors, each for a block of a matrix."""

    info: TensorInfo
    columns: int
    block_rows: int
    block_columns: int


class DequantizedSource(SourceView):
    """Another source with its scales applied and out of sight."""

    def __init__(self, inner: Source, scales: Mapping[str, Scale]) -> None:
        self._scales = scales
        applied = {scale.info.name for scale in scales.values()}
        activations = {
            name
            for name in inner.tensors
            if name.rpartition(".")[2] in ACTIVATION_SCALES and name not in applied
        }
        tensors = {
            name: replace(info, dtype=STORAGE_TYPES["F32"]) if name in scales else info
            for name, info in inner.tensors.items()
            if name not in applied | activations
        }
        super().__init__(inner, tensors, computed=scales)
        self.cost = inner.cost.with_reading(PIECE_BYTES)
        count = times(len(applied), "FP8 tensor")
        self.remarks += (notice("dequantised", tensors=count, dtype="float32"),)
        if activations:
            self.remarks += (notice("not_weights", names=some_of(sorted(activations))),)

    def prefetch(self, name: str, start: int, count: int) -> None:
        self.inner.prefetch(name, start, count)

    def compute(self, name: str, start: int, into: Raw) -> None:
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            self._fill(piece, self.inner.tensors[name], start + done, self._scales[name])

    def _fill(self, values: Floats, info: TensorInfo, first: int, scale: Scale) -> None:
        """Read elements and multiply each by its factor; every NaN is the same one."""
        values[:] = self._read_floats(info, first, values.size)
        width = info.shape[-1] if info.shape else 1
        for row, rows, column, columns in _rectangles(first, values.size, width):
            begin = row * width + column - first
            matrix = values[begin : begin + rows * columns].reshape(rows, columns)
            with np.errstate(all="ignore"):
                matrix *= self._factors(scale, row, rows, column, columns)
        np.copyto(values, np.float32(np.nan), where=np.isnan(values))

    def _factors(self, scale: Scale, row: int, rows: int, column: int, columns: int) -> Floats:
        """Read the factors of a rectangle, in one column if they agree in rows."""
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
            return np.take(_float8_values(info.dtype.name), raw.view(np.uint8))
        return decoded(raw)


def dequantized(source: Source) -> Source:
    """Apply a source's scales, if it has any."""
    scales = {
        name: scale
        for name, info in source.tensors.items()
        if info.dtype.name in FP8_TYPES and (scale := _find_scale(info, source)) is not None
    }
    return DequantizedSource(source, scales) if scales else source


def _where(source: Source) -> str:
    return str(next(iter(source.files)).parent) if source.files else "the model"


def _find_scale(weight: TensorInfo, source: Source) -> Scale | None:
    """Find a weight's scale, and which part of the weight each of its factors is for."""
    where, tensors = _where(source), source.tensors
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
    if scale.elements == 1:
        return Scale(scale, 1, max(rows, 1), max(width, 1))
    if len(weight.shape) == 2 and scale.shape in ((rows,), (rows, 1)):
        return Scale(scale, 1, 1, width)
    if len(weight.shape) == 2 and scale.shape == (-(-rows // BLOCK), -(-width // BLOCK)):
        return Scale(scale, scale.shape[1], BLOCK, BLOCK)
    raise InputError(
        f"{where}: {scale.name} is {scale.form} and {weight.name} is {weight.form}; expected one "
        f"scale, one for each row, or for each block of {BLOCK}×{BLOCK}. Dequantise the model first"
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

MXFP4_MODEL_TYPE = "gpt_oss"
GROUP = 32
GROUP_BYTES = GROUP // 2
TILE = 1 << 16
TILE_BYTES = TILE * 16  # memory for a tile: codes, places in the table, and values
# Values of the codes 0 to 7; 8 to 15 are the same with a minus.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS = re.compile(r"(.*\bexperts\.(?:gate_up_proj|down_proj))_blocks")


class UnpackedSource(SourceView):
    """Another source with its experts unpacked, blocks and scales out of sight."""

    def __init__(self, inner: Source, packed: Mapping[str, TensorInfo]) -> None:
        self._packed = packed
        stored = {name + end for name in packed for end in ("_blocks", "_scales")}
        tensors = {name: info for name, info in inner.tensors.items() if name not in stored}
        super().__init__(inner, {**tensors, **packed}, computed=packed)
        count = times(len(packed), "MXFP4 tensor")
        self.remarks += (notice("dequantised", tensors=count, dtype="bfloat16, which is exact"),)
        largest = max(info.elements // max(info.shape[0], 1) for info in packed.values())
        self.cost = inner.cost.with_reading(largest // 2 + largest // GROUP + TILE_BYTES)
        self._kept: dict[int, tuple[str, int, Bytes, Bytes]] = {}  # each thread's last expert

    def compute(self, name: str, start: int, into: Raw) -> None:
        _, inputs, outputs = self._packed[name].shape
        done = 0
        for place, rows, column, columns in _rectangles(start, into.size, outputs, inputs):
            expert, row = divmod(place, inputs)
            matrix = into[done : done + rows * columns].reshape(rows, columns)
            blocks, scales = self._expert(name, expert)
            step = max(1, TILE // rows)
            for left in range(0, columns, step):
                right = min(left + step, columns)
                part = slice(column + left, column + right)
                matrix[:, left:right] = _unpack(blocks[part], scales[part], row, rows)
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
        found = []
        for end, width in (("_blocks", inputs // 2), ("_scales", inputs // GROUP)):
            raw = np.empty(outputs * width, np.uint8)
            self.inner.read(name + end, expert * raw.size, raw)
            found.append(raw.reshape(outputs, width))
        self._kept[thread] = name, expert, found[0], found[1]
        return found[0], found[1]


def unpacked(source: Source, config: Mapping[str, Any]) -> Source:
    """Unpack a source's MXFP4 experts, if it has any and is of the kind whose layout is known."""
    packed: dict[str, TensorInfo] = {}
    if config.get("model_type", MXFP4_MODEL_TYPE) == MXFP4_MODEL_TYPE:
        for name, info in source.tensors.items():
            if (match := _BLOCKS.fullmatch(name)) and info.dtype.name == "U8":
                expert = _describe_experts(match[1], source)
                packed |= {} if expert is None else {expert.name: expert}
    return UnpackedSource(source, packed) if packed else source


def _describe_experts(name: str, source: Source) -> TensorInfo | None:
    """Describe the tensor that blocks and scales stand for; None without scales."""
    blocks, scales = source.tensors[f"{name}_blocks"], source.tensors.get(f"{name}_scales")
    where = _where(source)
    if scales is None:
        return None
    fits = len(blocks.shape) == 4 and blocks.shape[3] == GROUP_BYTES
    if not fits or scales.shape != blocks.shape[:3] or scales.dtype.name != "U8":
        raise InputError(
            f"{where}: {blocks.name} is {blocks.form}, {scales.name} {scales.described}; expected "
            f"experts × outputs × groups × {GROUP_BYTES}, a U8 scale for each group. Dequantise it"
        )
    if name in source.tensors:
        raise InputError(f"{where}: has both {name} and {blocks.name}; remove one of them")
    experts, outputs, groups, _ = blocks.shape
    return TensorInfo(name, STORAGE_TYPES["BF16"], (experts, groups * GROUP, outputs), 0)


def _unpack(blocks: Bytes, scales: Bytes, row: int, rows: int) -> NDArray[np.uint16]:
    """Return some inputs of some outputs as inputs × outputs, in the bits of BF16."""
    some = blocks[:, row // 2 : (row + rows - 1) // 2 + 1]
    codes = np.empty((len(some), some.shape[1], 2), np.uint16)
    np.bitwise_and(some, 15, out=codes[:, :, 0])
    np.right_shift(some, 4, out=codes[:, :, 1])
    places = codes.reshape(len(some), -1)[:, row % 2 :][:, :rows]
    places += scales[:, np.arange(row, row + rows) // GROUP].astype(np.uint16) * 16
    return _mxfp4_bits()[places].T


@cache
def _mxfp4_bits() -> NDArray[np.uint16]:
    """Return the bits of 16 codes under 256 scales; the last scale is no NaN in transformers."""
    codes = [*MAGNITUDES, *(-value for value in MAGNITUDES)]
    powers = [math.ldexp(1.0, scale - 127) for scale in range(256)]
    with np.errstate(over="ignore"):
        values = np.multiply.outer(np.array(powers), np.array(codes)).astype(np.float32)
        bits: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits.reshape(-1)
