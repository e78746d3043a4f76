"""A quantised model is read exactly or refused, whatever says that it is one."""

import json

import ml_dtypes
import numpy as np
import pytest

import dare
from dare.errors import InputError
from dare.inputs.arrays import array_source
from dare.inputs.opening import open_model
from dare.inputs.quantised import read_quantised
from dare.recipe.recipe import Recipe, Request
from dare.tensors.names import QUANTISED
from helpers import save

FLOATS, BYTES = np.ones((4, 4), np.float32), np.ones((4, 4), np.uint8)
HALVES = np.ones((4, 4), np.float16)
INTS = np.ones((4, 4), np.int32)
FP8 = np.ones((4, 4), ml_dtypes.float8_e4m3fn)

PACKED = {
    "AWQ": ({"l.qweight": INTS, "l.qzeros": INTS, "l.scales": HALVES}, "qweight", "AWQ or GPTQ"),
    "GPTQ": ({"l.g_idx": INTS, "l.qweight": INTS, "l.scales": HALVES}, "g_idx", "GPTQ"),
    "bitsandbytes 4": (
        {"l.weight": BYTES, "l.weight.absmax": FLOATS, "l.weight.quant_map": FLOATS},
        "weight.absmax",
        "bitsandbytes",
    ),
    "bitsandbytes 8": ({"l.weight": INTS, "l.SCB": FLOATS}, "SCB", "bitsandbytes"),
    "compressed-tensors": (
        {"l.weight_packed": INTS, "l.weight_scale": HALVES, "l.weight_shape": INTS},
        "weight_packed",
        "packed compressed-tensors",
    ),
    "compressed-tensors int8": (
        {"l.weight": BYTES.astype(np.int8), "l.weight_scale": HALVES},
        "weight",
        "I8 with scales",
    ),
    "NVFP4": (
        {"l.weight": BYTES, "l.weight_scale_2": FLOATS},
        "weight_scale_2",
        "NVFP4",
    ),
    "HQQ": ({"l.W_q": BYTES, "l.scale": HALVES, "l.zero": HALVES}, "W_q", "HQQ"),
    "quanto": ({"l.weight._data": BYTES, "l.weight._scale": HALVES}, "weight._data", "U8 with"),
    "torchao": ({"l.weight_qdata": BYTES, "l.weight_scale": HALVES}, "weight_qdata", "U8 with"),
    "AQLM": ({"l.codes": INTS, "l.codebooks": HALVES, "l.scales": HALVES}, "codes", "I32 with"),
    "VPTQ": ({"l.centroids.weight": HALVES, "l.indices": FLOATS}, "centroids.weight", "VPTQ"),
    "MLX": (
        {"l.weight": INTS.astype(np.uint32), "l.scales": HALVES, "l.biases": HALVES},
        "weight",
        "U32 with scales",
    ),
    "OpenAI's own MXFP4": ({"l.w.blocks": BYTES, "l.w.scales": BYTES}, "w.blocks", "U8 with"),
    "MXFP4 without scales": (
        {"l.experts.down_proj_blocks": BYTES},
        "experts.down_proj_blocks",
        "MXFP4",
    ),
    "FP8 with an unknown scale": ({"l.weight": FP8, "l.scale": FLOATS}, "weight", "F8_E4M3 with"),
    "ComfyUI's FP8": ({"l.weight": FP8, "l.scale_weight": FLOATS}, "weight", "F8_E4M3 with"),
}


@pytest.mark.parametrize("scheme", PACKED)
def test_packed_weights_are_refused_by_what_they_are_beside(scheme):
    tensors, name, kind = PACKED[scheme]
    source = array_source({"norm.weight": FLOATS, **tensors}, "x")
    with pytest.raises(
        InputError, match=rf"^l\.{name}: quantised \({kind}.*quantised weights cannot be merged"
    ):
        read_quantised(source, {})


def test_every_name_of_a_scheme_is_refused_and_the_file_is_said(tmp_path):
    for part in QUANTISED:
        path = save(tmp_path / "model.safetensors", {f"l.{part}": INTS})
        with pytest.raises(InputError, match=rf"^{path}: l.{part}: quantised"):
            open_model(path)


PLAIN = {
    "masks and positions": {
        "h.attn.bias": BYTES,
        "h.attn.c_attn.weight": FLOATS,
        "h.position_ids": np.arange(4),
    },
    "Swin v2": {"attn.logit_scale": FLOATS, "attn.relative_position_index": np.ones((4, 4), int)},
    "FP8 as it is": {"l.weight": FP8, "norm.weight": FLOATS},
    "a scale beside plain weights": {"l.weight": FLOATS, "l.weight_scale": FLOATS},
    "top level": {"logit_scale": FLOATS, "ids": INTS},
}


@pytest.mark.parametrize("model", PLAIN)
def test_plain_models_are_what_they_were(model):
    source = array_source(PLAIN[model], "x")
    assert read_quantised(source, {}) is source


# ---------------------------------------------------------------- what the configuration says

METHODS = [
    *("mxfp4", "fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "bitsandbytes", "hqq"),
    *("quanto", "torchao", "aqlm", "eetq", "vptq", "modelopt", "auto-round", "of-tomorrow"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("codes", [BYTES, INTS, BYTES.astype(np.int8), FP8])
def test_a_scheme_with_codes_that_nothing_else_gives_away_is_refused(method, codes):
    source = array_source({"l.B": codes, "norm.weight": FLOATS}, "x")
    config = {"quantization_config": {"quant_method": method}}
    with pytest.raises(InputError, match=rf"^l\.B: quantised \(.* in a quantised .*'{method}'\);"):
        read_quantised(source, config)
    with pytest.raises(InputError, match=rf"'{method}'"):
        read_quantised(source, {"text_config": config})


@pytest.mark.parametrize("method", [*METHODS, None])
def test_plain_weights_are_plain_whatever_the_configuration_says(method):
    source = array_source({"l.weight": FLOATS, "l.position_ids": np.arange(4)}, "x")
    config = {"quantization_config": {"quant_method": method}}
    assert read_quantised(source, config) is source


def test_weights_that_are_rounded_in_use_cannot_do_without_their_configuration():
    source = array_source({"l.weight": FLOATS}, "x")
    with pytest.raises(InputError, match=r"quant_method is 'bitnet'; its layers round"):
        read_quantised(source, {"quantization_config": {"quant_method": "bitnet"}})


# ---------------------------------------------------------------- in a merge


def model(folder, config=None, **tensors):
    save(folder / "model.safetensors", {"norm.weight": FLOATS, **tensors})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("packed", ["base", "model"])
@pytest.mark.parametrize("single", [False, True])
def test_base_and_models_are_looked_at_as_folders_and_as_files(tmp_path, packed, single):
    config = {"quantization_config": {"quant_method": "of-tomorrow"}}
    paths = {
        name: model(tmp_path / name, config if name == packed else {}, **{"l.B": BYTES})
        for name in ("base", "model")
    }
    if single:
        paths = {name: path / "model.safetensors" for name, path in paths.items()}
    recipe = Recipe(base=paths["base"], models=[paths["model"]], output=tmp_path / "out")
    with pytest.raises(InputError, match=rf"{packed}/model.*: l.B: quantised .*'of-tomorrow'"):
        dare.plan(recipe)


def test_a_configuration_that_still_speaks_of_it_loses_that(tmp_path):
    """Also where it is taken from another model than the base."""
    settings = {"quantization_config": {"quant_method": "gptq"}, "quantization": {"bits": 4}}
    recipe = Request.of(
        base=model(tmp_path / "base", {"model_type": "llama"}),
        models=[model(tmp_path / "tuned", {"model_type": "llama", **settings})],
        output=tmp_path / "out",
        copy_from="tuned",
        verbose=False,
    )
    dare.merge(recipe)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config) == {"model_type", "torch_dtype"}
