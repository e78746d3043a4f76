"""Outputs in the base's format are loaded by transformers and compressed-tensors.

Weights are those that are read here; logits are compared with those of a merge with plain weights.
"""

import json

import numpy as np
import pytest
import torch
from quantised_models import (
    BLOCK,
    FORMATS,
    distance,
    fp8_state,
    is_fp8,
    load,
    logits,
    make,
    merge,
    scale_of,
    small_llama,
    tuned,
    write,
)

import dare
from dare.inputs.opening import open_model
from dare.inputs.sources import read_floats


def read(folder):
    """Return the weights of a model as they are presented, in float32."""
    with open_model(folder) as source:
        return {
            name: torch.from_numpy(read_floats(source, name, 0, info.elements)).reshape(info.shape)
            for name, info in source.tensors.items()
            if info.dtype.is_weight
        }


def check(folder, base, model, output_of, apart, **how):
    """Merge in the base's format and as plain weights; compare what is loaded."""
    report = merge(base, model, folder / "out", format="input")
    merge(base, model, folder / "plain", dtype="BF16")
    loaded = load(folder / "out", **how)
    expected = read(folder / "out")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
    assert set(report.recoded.tensors) == output_of
    off = distance(logits(loaded), logits(load(folder / "plain")))
    assert 0 < off < apart
    return report, off


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_loads_what_is_stored(tmp_path, add_row, name):
    *_, settings = FORMATS[name]
    base, model = make(tmp_path, name)
    how = {"quantization_config": settings(dequantize=True)}
    with open_model(base) as source:
        coded = {n for n, info in source.tensors.items() if hasattr(info, "code")}
    report, off = check(tmp_path, base, model, coded, apart=0.15, **how)
    assert report.recoded.format == name
    kind = "gpt-oss" if name == "MXFP4" else "Llama"
    add_row("formats", name, "transformers", kind, off)
    assert all(loss.error < 0.08 for loss in report.recoded.tensors.values())


def test_transformers_loads_one_scale_for_each_tensor(tmp_path, add_row):
    model = small_llama()
    state = model.state_dict()
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
    folders = [
        write(tmp_path / name, model, fp8_state(weights, "one"), settings)
        for name, weights in (("base", state), ("tuned", tuned(state, 1)))
    ]
    coded = {n for n, v in state.items() if is_fp8(n, v)}
    _, off = check(tmp_path, *folders, coded, apart=0.15)
    add_row("formats", "FP8, one scale", "transformers", "Llama", off)


def test_a_stack_of_fp8_layers_is_loaded(tmp_path):
    base, _ = make(tmp_path, "FP8")
    layers = [{"base": base, "range": [0, 2]}, {"base": base, "range": [1, 2]}]
    given = {"base": base, "layers": layers, "verbose": False}
    dare.merge(**given, output=tmp_path / "out", format="input")
    dare.merge(**given, output=tmp_path / "plain", dtype="BF16")
    found, expected = (load(tmp_path / name) for name in ("out", "plain"))
    assert found.config.num_hidden_layers == 3
    assert torch.equal(logits(found), logits(expected))  # nothing was merged


# ---------------------------------------------------------------- compressed-tensors

TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
ARGUMENTS = {  # the format, weights and activations of each scheme
    "row": ("float-quantized", {"strategy": "channel"}, TOKEN),
    "one": ("float-quantized", {"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    "block": (
        "float-quantized",
        {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        {"strategy": "group", "group_size": BLOCK, "dynamic": True},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"strategy": "tensor_group", "group_size": 16, "num_bits": 4},
        {"strategy": "tensor_group", "group_size": 16, "num_bits": 4, "dynamic": "local"},
    ),
}


def parameters(weight, kind):
    """Return scales of a weight, and those of activations that a static scheme has."""
    if kind != "nvfp4":
        scale = scale_of(weight, kind)
        static = {"input_scale": torch.tensor([0.5])} if kind == "one" else {}
        return {"weight_scale": scale.reshape(1) if kind == "one" else scale, **static}
    number = (6 * 448 / weight.abs().amax()).reshape(1)
    scale = weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 * number
    given = {"weight_global_scale": number, "input_global_scale": torch.tensor([3.0])}
    return {"weight_scale": scale.to(torch.float8_e4m3fn).float(), **given}


def compress(folder, state, kind):
    """Write a model as compressed-tensors stores it; return what that makes of the weights."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    form, *given = ARGUMENTS[kind]
    weights, activations = (
        quantization.QuantizationArgs(**{"num_bits": 8, "type": "float", **each}) for each in given
    )
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=activations, format=form
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    stored, expected = {}, {}
    for name, value in state.items():
        stored[name] = expected[name] = value
        if is_fp8(name, value):
            parts = {"weight": value.float(), **parameters(value.float(), kind)}
            local = compressor.compress(parts, scheme)
            del stored[name]
            stored |= {name.removesuffix("weight") + part: own for part, own in local.items()}
            expected[name] = compressor.decompress(dict(local), scheme)["weight"]
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    settings = json.loads(config.model_dump_json(exclude_none=True))
    return write(folder, small_llama(), stored, settings), expected


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_compressed_tensors_are_read_as_it_decompresses_them(tmp_path, kind):
    folder, expected = compress(tmp_path / "model", small_llama().state_dict(), kind)
    found = read(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].to(value.dtype), value), name


@pytest.mark.parametrize("kind", ["row", "one", "block"])
def test_compressed_tensors_loads_what_is_stored(tmp_path, add_row, kind):
    state = small_llama().state_dict()
    base, _ = compress(tmp_path / "base", state, kind)
    model, _ = compress(tmp_path / "tuned", tuned(state, 1), kind)
    report = merge(base, model, tmp_path / "out", format="input")
    merge(base, model, tmp_path / "plain", dtype="BF16")
    assert len(report.recoded.tensors) == 14
    loaded = load(tmp_path / "out", dtype=torch.float32)
    off = distance(logits(loaded), logits(load(tmp_path / "plain")))
    assert 0 < off < 0.2
    scales = {"row": "a scale for each row", "one": "one scale", "block": "scales for blocks"}
    add_row("formats", f"FP8, {scales[kind]}", "compressed-tensors", "Llama", off)
    if kind == "one":
        for name, value in loaded.state_dict().items():
            assert not name.endswith("input_scale") or value == 0.5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized"
    np.testing.assert_array_equal(*[sorted(read(tmp_path / n)) for n in ("out", "plain")])
