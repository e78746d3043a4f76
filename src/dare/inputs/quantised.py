"""Quantised models: what can be read exactly is presented as weights, all else is refused.

An output has plain weights and a configuration that says so. Codes cannot be merged, and copied
beside such a configuration they would be a broken model. So whatever looks like codes, by its
name, by scales beside it, or because the configuration speaks of them, is refused here, before
anything is planned, for the base and every model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dare.errors import InputError
from dare.inputs import fp8, mxfp4
from dare.inputs.sources import Source

SETTINGS = ("quantization_config", "compression_config")
MLX_SETTINGS = "quantization"
"""Entries of a configuration that speak of quantised weights."""
NAMES = {
    **dict.fromkeys(("qweight", "qzeros"), "AWQ or GPTQ"),
    "g_idx": "GPTQ",
    "weight_packed": "packed compressed-tensors",
    "weight_zero_point": "asymmetric compressed-tensors",
    **dict.fromkeys(("bitmask", "row_offsets"), "sparse compressed-tensors"),
    "weight_scale_2": "NVFP4",
    **dict.fromkeys(("absmax", "nested_absmax", "quant_map", "SCB"), "bitsandbytes"),
    "quant_state": "bitsandbytes",
    "W_q": "HQQ",
    "centroids": "VPTQ",
    "dense_weights": "SpQR",
    "dqweight": "FP-Quant",
    "q_weight": "EXL2",
    "trellis": "EXL3",
    "Qidxs": "QuIP#",
    **dict.fromkeys(("gate_up_proj_blocks", "down_proj_blocks"), "MXFP4"),
}
"""Parts of names that only quantised models of a kind have."""
CODES = ("U8", "I8", "U16", "I16", "U32", "I32", *fp8.FP8_TYPES)
"""Types that codes are stored in. Positions and indices, which other models have, are I64."""
SCALES = ("scale", "absmax", "zero_point", "zeros")

IN_USE = {"bitnet": "its layers round their weights in use, and a merged model would not"}
"""Schemes that change what plain weights do, and what they would do without the configuration."""
HOW = {
    "bitsandbytes": "load it in transformers, call model.dequantize()",
    "compressed-tensors": "load it in transformers with "
    "quantization_config=CompressedTensorsConfig(dequantize=True)",
    "mxfp4": "load it in transformers with quantization_config=Mxfp4Config(dequantize=True)",
    "higgs": "load it in transformers, call model.dequantize()",
    "mlx": "convert it with mlx_lm.convert --dequantize",
}
"""How a scheme is undone."""


def read_quantised(source: Source, config: Mapping[str, Any]) -> Source:
    """Present quantised weights as what they stand for, by a model's configuration; or refuse."""
    plain = fp8.dequantized(mxfp4.unpacked(source, config))
    method = quantisation_method(config)
    where = f"{source.files[0].parent}: " if source.files else ""
    if reason := IN_USE.get(method or ""):
        raise InputError(f"{where}config.json: quant_method is {method!r}; {reason}")
    if found := _find_codes(plain, method):
        tensor, kind = found
        scheme = f"{kind}, quant_method {method!a}" if method else kind
        raise InputError(f"{where}{tensor}: quantised ({scheme}); {_remedy(method, kind)}")
    return plain


def tables_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A configuration and those of its parts, such as text_config."""
    left = [config]
    for table in left:
        left += [value for value in table.values() if isinstance(value, dict)]
        yield table


def quantisation_settings(table: Mapping[str, Any]) -> list[str]:
    """The entries of a configuration's table that say its weights are quantised.

    >>> quantisation_settings({"quantization_config": {"quant_method": "gptq"}, "quantization": 3})
    ['quantization_config']
    """
    mlx = table.get(MLX_SETTINGS)
    is_mlx = isinstance(mlx, dict) and "bits" in mlx
    return [*(key for key in SETTINGS if table.get(key)), *([MLX_SETTINGS] if is_mlx else [])]


def quantisation_method(config: Mapping[str, Any]) -> str | None:
    """What a configuration says its weights are quantised by; None if they are not."""
    for table in tables_of(dict(config)):
        for key in quantisation_settings(table):
            settings = table[key]
            named = settings.get("quant_method") if isinstance(settings, dict) else None
            return str(named or ("mlx" if key == MLX_SETTINGS else "unknown"))
    return None


def _find_codes(source: Source, method: str | None) -> tuple[str, str] | None:
    """A tensor that holds codes or belongs to them, and what of it says so."""
    scales: dict[str, list[str]] = {}
    for name in source.tensors:
        module, _, last = name.rpartition(".")
        if kind := next((NAMES[part] for part in name.split(".") if part in NAMES), None):
            return name, kind
        if any(word in last.lower() for word in SCALES):
            scales.setdefault(module, []).append(name)
    for name, info in source.tensors.items():
        if info.dtype.name not in CODES or not info.shape:
            continue
        module = name.rpartition(".")[0]
        beside = (t for t in scales.get(module, ()) if module or t.startswith(name))
        if any(scale != name for scale in beside) or name in scales:
            return name, f"{info.dtype.name} with scales"
        if method is not None:
            return name, f"{info.dtype.name} in a quantised model"
    return None


def _remedy(method: str | None, kind: str) -> str:
    by_kind = (scheme for scheme in HOW if scheme in kind.lower())
    how = HOW.get(method or "") or next((HOW[scheme] for scheme in by_kind), None)
    dequantise = f", or dequantise it first: {how}, and save it" if how else ""
    return f"quantised weights cannot be merged; merge the model that it was made from{dequantise}"
