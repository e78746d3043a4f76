"""Quantised models: those that can be read exactly are presented as weights, all others refused.

An output has plain weights and a configuration that says so, unless it is quantised again
(`dare.formats.quantised`). Codes cannot be merged, and copied beside such a configuration they
would be a broken model. So anything that looks like codes, by its name, by scales beside it, or
because the configuration mentions them, is refused here, before anything is planned, for the base
and every model. Those that are read have a module each: `fp8`, `mxfp4`, `nvfp4`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from dare.documents.notices import notice
from dare.errors import InputError
from dare.inputs import fp8, mxfp4, nvfp4
from dare.inputs.sources import CodedInfo, Opening, Raw, Source, SourceView, home_of
from dare.tensors.dtypes import CODE_TYPES, STORAGE_TYPES
from dare.tensors.header import TensorInfo
from dare.tensors.names import quantised_kind, some_of

SETTINGS = ("quantization_config", "compression_config")  # of quantised weights
MLX_SETTINGS = "quantization"

_DATA = tomllib.loads(files("dare.inputs").joinpath("quantised.toml").read_text("utf-8"))


def read_quantised(
    source: Source, config: Mapping[str, Any], *, keeps_scales: bool = False
) -> Source:
    """Present quantised weights as what they stand for, by a model's configuration; or refuse.

    Scales of activations are left out, or shown as bits, which are copied and never merged.
    """
    where = f"{home_of(source)}: " if source.files else ""
    unpacked = nvfp4.unpacked(mxfp4.unpacked(source, config))
    plain = fp8.dequantized(unpacked, *block_size(config, where))
    if plain is not source:
        left = {
            name: info
            for name, info in plain.tensors.items()
            if name.rpartition(".")[2] in _DATA["activation_scales"] and not info.dtype.packed_bits
        }
        plain = _WithoutActivations(plain, left, keeps=keeps_scales) if left else plain
    method = quantisation_method(config)
    if reason := _DATA["in_use"].get(method or ""):
        raise InputError(f"{where}config.json: quant_method is {method!r}; {reason}")
    if found := _find_codes(plain, method):
        tensor, kind = found
        scheme = f"{kind}, quant_method {method!a}" if method else kind
        ways = _DATA["how"]
        by_kind = (ways[name] for name in ways if name in kind.lower())
        how = ways.get(method or "") or next(by_kind, None)
        dequantise = f", or dequantise it first: {how}, and save it" if how else ""
        raise InputError(
            f"{where}{tensor}: quantised ({scheme}); quantised weights cannot be merged; merge the "
            f"model that it was made from{dequantise}"
        )
    return plain


class _WithoutActivations(SourceView):
    """A source without the scales of what passes through layers, or with their bits."""

    def __init__(self, inner: Source, left: Mapping[str, TensorInfo], *, keeps: bool) -> None:
        tensors = {name: info for name, info in inner.tensors.items() if name not in left}
        for name, info in left.items() if keeps else ():
            bits = STORAGE_TYPES[f"U{info.dtype.itemsize * 8}"]
            tensors[name] = CodedInfo(name, bits, info.shape, info.start, info.dtype)
        super().__init__(inner, tensors, computed=left)
        code = "base_scales" if keeps else "not_weights"
        self.remarks += (notice(code, names=some_of(sorted(left))),)

    def compute(self, name: str, start: int, into: Raw) -> None:
        self.inner.read(name, start, into.view(self.inner.tensors[name].dtype.carrier))


def open_form(opening: Opening) -> Source:
    """Open safetensors that may be quantised."""
    return read_quantised(opening.stored, opening.config, keeps_scales=opening.keeps_scales)


def tables_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and those of its parts, such as text_config."""
    left = [config]
    for table in left:
        left += [value for value in table.values() if isinstance(value, dict)]
        yield table


def block_size(config: Mapping[str, Any], where: str = "") -> tuple[fp8.Block, bool]:
    """Return the size of the blocks that FP8 has scales for, and if all scales are for blocks.

    transformers says so for the whole model; groups of compressed-tensors may differ in it.

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
    return fp8.USUAL_BLOCK, False


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
