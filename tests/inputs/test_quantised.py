"""Quantised models are read exactly, element by element, or refused by name."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import PLACES, Ranged

import dare
from dare.errors import InputError
from dare.inputs.arrays import array_source
from dare.inputs.opening import open_model
from dare.inputs.quantised import PIECE_BYTES, TILE_BYTES, Fp8Source, Mxfp4Source, read_quantised
from dare.recipe.recipe import Recipe, Request
from dare.tensors.names import QUANTISED
from helpers import read_elements, read_tensor, save

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
BF16 = ml_dtypes.bfloat16
EXPERTS = "layers.0.mlp.experts.down_proj"
ONE = np.ones(1, np.float32)
ENDINGS = {"ModelOpt": ("", "_scale", "_scale_2"), "ct": ("_packed", "_scale", "_global_scale")}
"""Of codes, scales and the number of an NVFP4 weight, by who writes them."""


def codes(shape, dtype=E4M3, seed=0):
    """Any bytes, so with NaN and infinities among them."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8).view(dtype)


def factors(shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def experts(*shape, seed=0, name=EXPERTS):
    """Experts × outputs × groups in MXFP4, under scales that keep values in the range of BF16."""
    scales = np.random.default_rng(seed).integers(110, 126, shape, np.uint8)
    return {f"{name}_blocks": codes((*shape, 16), np.uint8, seed), f"{name}_scales": scales}


def nvfp4(kind, rows=(5,), groups=3):
    """Any codes and scales, with NaN among the scales."""
    parts = codes((*rows, groups * 8), np.uint8), codes((*rows, groups)), np.float32([0.37])
    return {f"w{end}": part for end, part in zip(ENDINGS[kind], parts, strict=True)}


def source_of(arrays, config=None):
    return read_quantised(array_source(arrays, "x"), config or {})


def presented(arrays, config=None, name="w"):
    source = source_of(arrays, config)
    info = source.tensors[name]
    return np.frombuffer(read_tensor(source, name), info.dtype.numpy_type).reshape(info.shape)


def assert_same_bits(found, expected):
    """Every NaN is the same one."""
    expected = np.where(np.isnan(expected), np.float32(np.nan), expected).astype(np.float32)
    assert (found.shape, found.dtype) == (expected.shape, np.float32)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def product(weight, grid, block):
    """Each element times the factor of its block."""
    for axis, size in enumerate(block):
        grid = np.repeat(grid, size, axis)
    with np.errstate(invalid="ignore"):
        return weight.astype(np.float32) * grid[: weight.shape[0], : weight.shape[1]]


# ---------------------------------------------------------------- values


def test_values_computed_by_hand():
    # 0x38 is 1, 0x40 is 2, 0xC4 is −3, 0x01 is 2⁻⁹, 0x7E is 448 in E4M3.
    weight = np.array([[0x38, 0x40], [0xC4, 0x01], [0x7E, 0x80]], np.uint8).view(E4M3)
    expected = np.array([[0.5, 1], [-6, 2.0**-8], [-448, 0]], np.float32)
    assert_same_bits(presented({"w": weight, "w_scale": np.float32([0.5, 2, -1])}), expected)
    # In four bits, the low half first: 0x21 is 0.5 and 1, 0xF7 is 6 and −6.
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, 0, 0, 0], blocks[0, 1, 0, 15] = 0x21, 0xF7
    scales = np.array([[[127], [129]]], np.uint8)  # 1 and 4
    arrays = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}
    found = presented(arrays, name=EXPERTS)
    assert (found.shape, found.dtype) == ((1, 32, 2), BF16)
    assert found[0, :3, 0].tolist() == [0.5, 1, 0]
    assert found[0, 29:, 1].tolist() == [0, 24, -24]
    packed = np.zeros((2, 8), np.uint8)
    packed[0, 0], packed[1, 7] = 0x21, 0xF7
    for kind, number in (("ModelOpt", 0.25), ("ct", 4)):
        parts = packed, np.array([[2], [448]], E4M3), np.float32([number])
        found = presented({f"w{end}": p for end, p in zip(ENDINGS[kind], parts, strict=True)})
        assert (found.shape, found.dtype) == ((2, 16), np.float32)
        assert found[0, :3].tolist() == [0.25, 0.5, 0]
        assert found[1, 13:].tolist() == [0, 672, -672]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("kind", [np.float32, np.float16, BF16, E8M0])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        *((shape, (200, 300)) for shape in ((), (1,), (1, 1))),
        *((shape, (1, 300)) for shape in ((200,), (200, 1))),
        ((2, 3), (128, 128)),
    ],
)
def test_every_fp8_element_is_one_product_in_float32(dtype, ending, kind, shape, block):
    weight, scale = codes((200, 300), dtype), factors(shape).astype(kind)
    found = presented({"w": weight, f"w{ending}": scale})
    grid = scale.astype(np.float32).reshape(shape if len(shape) == 2 else (-1, 1))
    assert_same_bits(found, product(weight, grid, block))


@pytest.mark.parametrize("shape", [(2, 3, 4), ()])
def test_a_weight_of_any_rank_may_have_one_factor(shape):
    weight = codes(shape)
    found = presented({"w": weight, "w_scale": np.float32([3])})
    assert_same_bits(found, weight.astype(np.float32) * 3)


SAYS = {
    "transformers": lambda size: {"quantization_config": {"weight_block_size": size}},
    "compressed-tensors": lambda size: {
        "text_config": {"compression_config": {"g": {"weights": {"block_structure": size}}}}
    },
}


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
@pytest.mark.parametrize("size", [(200, 200), (1, 128), (64, 300), (130, 256)])
def test_blocks_are_of_the_size_that_the_configuration_says(size, says):
    grid = factors([-(-256 // block) for block in size])
    weight = codes((256, 256))
    found = presented({"w": weight, "w_scale_inv": grid}, says(list(size)))
    assert_same_bits(found, product(weight, grid, size))


@pytest.mark.parametrize("size", [[128], [0, 128], [128.0, 128], "128", [100, 100]])
@pytest.mark.parametrize("grid", [(2, 2), (256, 1), ()])
def test_scales_that_disagree_with_the_configuration_are_refused(size, grid):
    arrays = {"w": codes((256, 256)), "w_scale": factors(grid)}
    with pytest.raises(InputError, match=r"weight_block_size"):
        source_of(arrays, SAYS["transformers"](size))
    assert presented(arrays, SAYS["transformers"](None)).dtype == np.float32


def test_every_code_under_every_scale_is_what_transformers_makes_of_it():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 1, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 256, 1), 16, 2)
    for b, s in ((blocks, scales), experts(3, 10, 4).values()):
        expected = theirs.convert_moe_packed_tensors(torch.from_numpy(b), torch.from_numpy(s))
        found = presented({f"{EXPERTS}_blocks": b, f"{EXPERTS}_scales": s}, name=EXPERTS)
        assert found.shape == tuple(expected.shape)
        assert np.array_equal(found.view(np.uint16), expected.view(torch.uint16).numpy())


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("rows", [(5,), (2, 3), (40_000,)])
def test_every_nvfp4_element_is_one_product_of_a_code_and_a_factor(kind, rows):
    arrays = nvfp4(kind, rows)
    packed, scales, number = arrays.values()
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*rows, -1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(invalid="ignore"):
        scales = scales.astype(np.float32)
        scales = scales / number if kind == "ct" else scales * number
        assert_same_bits(presented(arrays), values * np.repeat(scales, 16, -1))


# ---------------------------------------------------------------- ranges

RANGED = {
    "block": {"w": codes((130, 300)), "w_scale": factors((2, 3))},
    "row": {"w": codes((70, 11)), "w_scale": factors(70)},
    "one": {"w": codes((3, 5)), "w_scale": factors(())},
    "MXFP4": experts(3, 10, 4),
    **{kind: nvfp4(kind) for kind in ENDINGS},
}


@given(st.sampled_from(sorted(RANGED)), PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(kind, one, other):
    source, name = source_of(RANGED[kind]), EXPERTS if kind == "MXFP4" else "w"
    Ranged(source, {name: read_tensor(source, name)}).check(name, one, other)


def test_many_tiles_are_the_same_from_many_threads():
    source = source_of(experts(2, 700, 8))
    whole, size = read_tensor(source, EXPERTS), 2 * 700 * 256

    def read(begin):
        return read_elements(source, EXPERTS, begin, min(90_001, size - begin)).tobytes()

    with ThreadPoolExecutor(4) as pool:
        assert b"".join(pool.map(read, range(0, size, 90_001))) == whole


# ---------------------------------------------------------------- what is presented

PLAIN_BESIDE = {
    **{"logit_scale": ONE, "bf16": ONE, "bf16_scale": ONE, "norm.weight": ONE},
    **{"plain": codes((2, 2), seed=5), "table": np.arange(4, dtype=np.int32)},
}


def test_scales_are_hidden_and_the_rest_is_passed_on():
    arrays = {
        **{"a.weight": codes((2, 3)), "a.weight_scale": factors(2), "a.k_scale": factors(1)},
        **{"a.input_scale": factors(()), "a.input_scale_ub": factors(()), **PLAIN_BESIDE},
    }
    source = source_of(arrays)
    assert isinstance(source.inner, Fp8Source)
    assert source.tensors.keys() == {"a.weight", *PLAIN_BESIDE}
    assert [remark.code for remark in source.remarks] == ["dequantised", "not_weights"]
    assert source.cost.reading_bytes == PIECE_BYTES
    for name, array in PLAIN_BESIDE.items():
        assert source.tensors[name].dtype.numpy_type == array.dtype
        assert read_tensor(source, name) == array.tobytes()


@pytest.mark.parametrize("kind", ENDINGS)
def test_nvfp4_may_stand_beside_fp8(kind):
    activations = {"input_scale": ONE, "input_global_scale": ONE, "m.input_scale": ONE}
    fp8 = {"m.weight": np.ones((2, 2), E4M3), "m.weight_scale": ONE}
    source = source_of({**nvfp4(kind), **activations, **fp8, "norm": ONE})
    shapes = {name: info.shape for name, info in source.tensors.items()}
    assert shapes == {"w": (5, 48), "norm": (1,), "m.weight": (2, 2)}
    codes = [remark.code for remark in source.remarks]
    assert codes == ["dequantised", "dequantised", "not_weights"]


def test_experts_take_the_memory_that_is_said():
    source = source_of({"norm": ONE, **experts(3, 10, 4)})
    assert isinstance(source, Mxfp4Source)
    shapes = {name: info.shape for name, info in source.tensors.items()}
    assert shapes == {"norm": (1,), EXPERTS: (3, 128, 10)}
    (remark,) = source.remarks
    assert (remark.code, "1 MXFP4 tensor" in remark.text) == ("dequantised", True)
    assert source.cost.reading_bytes == 10 * 4 * 17 + TILE_BYTES
    with source:
        read_tensor(source, EXPERTS)
        assert sum(kept[2].nbytes + kept[3].nbytes for kept in source._kept.values()) == 10 * 4 * 17
    assert not source._kept


# ---------------------------------------------------------------- what does not fit

W, SCALE = codes((4, 6)), "w_scale"
BLOCKS, SCALES = experts(3, 10, 4).values()
CT = nvfp4("ct")
MISFITS = [
    ({"w": W, SCALE: np.ones(6, np.float32)}, r"w_scale is 6 and w is 4×6; expected one scale"),
    ({"w": codes((256, 256)), SCALE: factors((2, 3))}, "w_scale is 2×3 and w is 256×256"),
    ({"w": W, SCALE: factors(0)}, "w_scale is 0 and w is 4×6"),
    ({"w": codes((2, 4, 6)), SCALE: factors((2, 4))}, "w_scale is 2×4 and w is 2×4×6"),
    ({"w": W, SCALE: np.ones((4, 1), np.uint8)}, "w_scale is U8, not F32"),
    ({"w": W, SCALE: ONE, "w_scale_inv": ONE}, "w has two scales, w_scale_inv and w_scale; remove"),
    *(
        ({f"{EXPERTS}_blocks": b, f"{EXPERTS}_scales": s}, rf"{EXPERTS}_blocks is .*; expected")
        for b, s in ((BLOCKS[..., :8], SCALES), (BLOCKS, SCALES[:, :, :2]), (BLOCKS[0], SCALES[0]))
    ),
    ({**experts(3, 10, 4), EXPERTS: ONE}, rf"has both {EXPERTS} and {EXPERTS}_blocks; remove"),
    ({**CT, "w_scale": CT["w_scale"].astype(np.float32)}, "expected an F8_E4M3 scale"),
    ({**CT, "w": ONE}, "has both w and w_packed; remove"),
    *(
        ({**packed, name: packed[name][:0]}, "expected an F8_E4M3 scale for each 16")
        for packed in map(nvfp4, ENDINGS)
        for name in packed
    ),
]


@pytest.mark.parametrize(("arrays", "message"), MISFITS)
def test_what_does_not_fit_is_refused(arrays, message):
    with pytest.raises(InputError, match=message):
        source_of(arrays)


def test_experts_of_other_models_are_not_guessed():
    with pytest.raises(InputError, match="quantised"):
        source_of(experts(3, 10, 4), {"model_type": "other"})


# ---------------------------------------------------------------- refused by what they are beside

FLOATS, BYTES = np.ones((4, 4), np.float32), np.ones((4, 4), np.uint8)
HALVES = np.ones((4, 4), np.float16)
INTS = np.ones((4, 4), np.int32)
FP8 = np.ones((4, 4), E4M3)

PACKED = {
    "AWQ": ({"qweight": INTS, "qzeros": INTS, "scales": HALVES}, "qweight", "AWQ or GPTQ"),
    "GPTQ": ({"g_idx": INTS, "qweight": INTS, "scales": HALVES}, "g_idx", "GPTQ"),
    "bitsandbytes 4": (
        {"weight": BYTES, "weight.absmax": FLOATS, "weight.quant_map": FLOATS},
        *("weight.absmax", "bitsandbytes"),
    ),
    "bitsandbytes 8": ({"weight": INTS, "SCB": FLOATS}, "SCB", "bitsandbytes"),
    "compressed-tensors": (
        {"weight_packed": INTS, "weight_scale": HALVES, "weight_shape": INTS},
        *("weight_packed", "packed compressed-tensors"),
    ),
    "compressed-tensors int8": (
        {"weight": BYTES.astype(np.int8), "weight_scale": HALVES},
        *("weight", "I8 with scales"),
    ),
    "NVFP4": ({"weight": BYTES, "weight_scale_2": FLOATS}, "weight_scale_2", "NVFP4"),
    "HQQ": ({"W_q": BYTES, "scale": HALVES, "zero": HALVES}, "W_q", "HQQ"),
    "quanto": ({"weight._data": BYTES, "weight._scale": HALVES}, "weight._data", "U8 with"),
    "torchao": ({"weight_qdata": BYTES, "weight_scale": HALVES}, "weight_qdata", "U8 with"),
    "AQLM": ({"codes": INTS, "codebooks": HALVES, "scales": HALVES}, "codes", "I32 with"),
    "VPTQ": ({"centroids.weight": HALVES, "indices": FLOATS}, "centroids.weight", "VPTQ"),
    "MLX": (
        {"weight": INTS.astype(np.uint32), "scales": HALVES, "biases": HALVES},
        *("weight", "U32 with scales"),
    ),
    "OpenAI's own MXFP4": ({"w.blocks": BYTES, "w.scales": BYTES}, "w.blocks", "U8 with"),
    "MXFP4 without scales": (
        {"experts.down_proj_blocks": BYTES},
        *("experts.down_proj_blocks", "MXFP4"),
    ),
    "FP8 with an unknown scale": ({"weight": FP8, "scale": FLOATS}, "weight", "F8_E4M3 with"),
    "ComfyUI's FP8": ({"weight": FP8, "scale_weight": FLOATS}, "weight", "F8_E4M3 with"),
}


@pytest.mark.parametrize("scheme", PACKED)
def test_packed_weights_are_refused_by_what_they_are_beside(scheme):
    tensors, name, kind = PACKED[scheme]
    arrays = {"norm.weight": FLOATS, **{f"l.{name}": array for name, array in tensors.items()}}
    with pytest.raises(
        InputError, match=rf"^l\.{name}: quantised \({kind}.*quantised weights cannot be merged"
    ):
        source_of(arrays)


@pytest.mark.parametrize(
    ("packed", "remedy"),
    [
        ("AWQ", "convert_checkpoint(PACKED, PLAIN, CompressedTensorsDequantizer(PACKED))"),
        ("GPTQ", "gptqmodel.utils.model_dequant.dequantize_model(FOLDER, NEW_FOLDER)"),
        ("bitsandbytes 4", ".dequantize().save_pretrained(NEW_FOLDER, save_original_format=False)"),
        ("bitsandbytes 8", ".dequantize().save_pretrained(NEW_FOLDER, save_original_format=False)"),
    ],
)
def test_the_lines_that_dequantise_are_said(packed, remedy):
    tensors, *_ = PACKED[packed]
    with pytest.raises(InputError, match=re.escape(remedy)):
        source_of({f"l.{name}": array for name, array in tensors.items()})


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
    "top level": {"logit_scale": FLOATS, "scales": FLOATS, "ids": INTS},
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


@pytest.mark.parametrize("method", [*METHODS, None])
def test_a_scheme_with_codes_that_nothing_else_gives_away_is_refused(method):
    config = {"quantization_config": {"quant_method": method}}
    plain = array_source({"l.weight": FLOATS, "l.position_ids": np.arange(4)}, "x")
    assert read_quantised(plain, config) is plain
    for array in (BYTES, INTS, BYTES.astype(np.int8), FP8) if method else ():
        arrays = {"l.B": array, "norm.weight": FLOATS}
        with pytest.raises(InputError, match=rf"^l\.B: quantised \(.* in a quant.*'{method}'\);"):
            source_of(arrays, config)
        with pytest.raises(InputError, match=rf"'{method}'"):
            source_of(arrays, {"text_config": config})


def test_weights_that_are_rounded_in_use_cannot_do_without_their_configuration():
    with pytest.raises(InputError, match=r"quant_method is 'bitnet'; its layers round"):
        source_of({"l.weight": FLOATS}, {"quantization_config": {"quant_method": "bitnet"}})


# ---------------------------------------------------------------- in a merge


def model(folder, config, **tensors):
    save(folder / "model.safetensors", {"norm.weight": FLOATS, **tensors})
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


@pytest.fixture(scope="module")
def gpt_oss():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    counts = {"num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    config = transformers.GptOssConfig(**sizes, **counts, **heads, dtype="bfloat16")
    torch.manual_seed(0)
    return transformers.GptOssForCausalLM(config).to(torch.bfloat16)


def write_packed(folder, model, seed):
    """A model as it is published: experts packed, the rest as it is; and its weights."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    state = {name: value.clone() for name, value in model.state_dict().items()}
    stored = {}
    for name, value in state.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, inputs, outputs = value.shape
            packed = experts(count, outputs, inputs // 32, seed=seed + len(stored), name=name)
            state[name] = convert_moe_packed_tensors(*map(torch.from_numpy, packed.values()))
            stored |= packed
        else:
            stored[name] = value.view(torch.uint16).numpy().view(BF16)
    save(folder / "model.safetensors", stored)
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return state


def test_a_merge_of_packed_models_is_a_model_that_loads(gpt_oss, tmp_path):
    torch = pytest.importorskip("torch")
    base, tuned = (write_packed(tmp_path / n, gpt_oss, s) for n, s in (("base", 1), ("tuned", 90)))
    out, models = tmp_path / "out", [{"file": tmp_path / "tuned", "weight": 0.5}]
    dare.merge(base=tmp_path / "base", models=models, output=out, method="linear", verbose=False)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    loaded, info = type(gpt_oss).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    expected = {
        name: (value.float() + 0.5 * (tuned[name].float() - value.float())).to(torch.bfloat16)
        for name, value in base.items()
    }
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
