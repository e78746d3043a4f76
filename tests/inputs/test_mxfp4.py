"""MXFP4 experts are read bit for bit as transformers dequantises them, and make a whole model."""

import json
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from ranges import PLACES, Ranged

import dare
from dare.errors import InputError
from dare.inputs.arrays import array_source
from dare.inputs.quantised import TILE_BYTES, Mxfp4Source, unpack_mxfp4
from dare.recipe.recipe import Request
from helpers import read_elements, read_tensor, save

DOWN = "layers.0.mlp.experts.down_proj"
SHAPE = (3, 10, 4)
"""Experts, outputs, groups of 32 inputs."""


def packed(*shape, seed=0, name=DOWN):
    """Any codes, under scales that keep values in the range of BF16."""
    generator = np.random.default_rng(seed)
    return {
        f"{name}_blocks": generator.integers(0, 256, (*shape, 16), np.uint8),
        f"{name}_scales": generator.integers(110, 126, shape, np.uint8),
    }


def presented(arrays):
    source = unpack_mxfp4(array_source(arrays, "x"), {})
    info = source.tensors[DOWN]
    assert info.dtype.name == "BF16"
    return np.frombuffer(read_tensor(source, DOWN), ml_dtypes.bfloat16).reshape(info.shape)


def test_values_computed_by_hand():
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, 0, 0, 0] = 0x21  # 0.5 and 1
    blocks[0, 1, 0, 15] = 0xF7  # 6 and −6
    scales = np.array([[[127], [129]]], np.uint8)  # 1 and 4
    found = presented({f"{DOWN}_blocks": blocks, f"{DOWN}_scales": scales})
    assert found.shape == (1, 32, 2)
    assert found[0, :3, 0].tolist() == [0.5, 1, 0]
    assert found[0, 29:, 1].tolist() == [0, 24, -24]


def test_every_code_under_every_scale_is_what_transformers_makes_of_it():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 1, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 256, 1), 16, 2)
    for b, s in ((blocks, scales), packed(*SHAPE).values()):
        expected = theirs.convert_moe_packed_tensors(torch.from_numpy(b), torch.from_numpy(s))
        found = presented({f"{DOWN}_blocks": b, f"{DOWN}_scales": s})
        assert found.shape == tuple(expected.shape)
        assert np.array_equal(found.view(np.uint16), expected.view(torch.uint16).numpy())


@given(PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(one, other):
    source = unpack_mxfp4(array_source(packed(*SHAPE), "x"), {})
    Ranged(source, {DOWN: read_tensor(source, DOWN)}).check(DOWN, one, other)


def test_many_tiles_are_the_same_from_many_threads():
    source = unpack_mxfp4(array_source(packed(2, 700, 8), "x"), {})
    whole, size = read_tensor(source, DOWN), 2 * 700 * 256

    def read(begin):
        return read_elements(source, DOWN, begin, min(90_001, size - begin)).tobytes()

    with ThreadPoolExecutor(4) as pool:
        assert b"".join(pool.map(read, range(0, size, 90_001))) == whole


def test_what_is_presented_and_what_it_takes():
    norm = np.ones(3, np.float32)
    source = unpack_mxfp4(array_source({"norm": norm, **packed(*SHAPE)}, "x"), {})
    assert isinstance(source, Mxfp4Source)
    assert {name: info.shape for name, info in source.tensors.items()} == {
        "norm": (3,),
        DOWN: (3, 128, 10),
    }
    (remark,) = source.remarks
    assert (remark.code, "1 MXFP4 tensor" in remark.text) == ("dequantised", True)
    assert source.cost.reading_bytes == 10 * 4 * 17 + TILE_BYTES
    assert read_tensor(source, "norm") == norm.tobytes()
    with source:
        read_tensor(source, DOWN)
        assert sum(kept[2].nbytes + kept[3].nbytes for kept in source._kept.values()) == 10 * 4 * 17
    assert not source._kept


def test_other_models_and_other_layouts_are_not_guessed():
    plain = array_source(packed(*SHAPE), "x")
    assert unpack_mxfp4(plain, {"model_type": "other"}) is plain
    blocks, scales = packed(*SHAPE).values()
    for b, s in ((blocks[..., :8], scales), (blocks, scales[:, :, :2]), (blocks[0], scales[0])):
        with pytest.raises(InputError, match=rf"{DOWN}_blocks is .*; expected experts ×"):
            unpack_mxfp4(array_source({f"{DOWN}_blocks": b, f"{DOWN}_scales": s}, "x"), {})
    both = {**packed(*SHAPE), DOWN: np.ones(3, np.float32)}
    with pytest.raises(InputError, match=rf"has both {DOWN} and {DOWN}_blocks; remove one"):
        unpack_mxfp4(array_source(both, "x"), {})


# ---------------------------------------------------------------- a whole model


@pytest.fixture(scope="module")
def gpt_oss():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["full_attention"],
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    return transformers.GptOssForCausalLM(config).to(torch.bfloat16)


def write_packed(folder, model, seed):
    """A model as it is published: experts packed, the rest as it is; and its weights."""
    import torch

    state = {name: value.clone() for name, value in model.state_dict().items()}
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state[name].shape
        codes |= packed(experts, outputs, inputs // 32, seed=seed, name=name)
        pair = [torch.from_numpy(codes[f"{name}_{part}"]) for part in ("blocks", "scales")]
        state[name] = convert_moe_packed_tensors(*pair)
        seed += 1
    rest = {
        name: value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        for name, value in state.items()
        if f"{name}_blocks" not in codes
    }
    save(folder / "model.safetensors", {**rest, **codes})
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return state


def test_a_merge_of_packed_models_is_a_model_that_loads(gpt_oss, tmp_path):
    torch = pytest.importorskip("torch")
    base, tuned = (write_packed(tmp_path / n, gpt_oss, s) for n, s in (("base", 1), ("tuned", 9)))
    out = tmp_path / "out"
    models = [{"file": tmp_path / "tuned", "weight": 0.5}]
    dare.merge(
        Request.of(
            base=tmp_path / "base", models=models, output=out, method="linear", verbose=False
        )
    )
    assert "quantization_config" not in json.loads((out / "config.json").read_text())

    loaded, info = type(gpt_oss).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    expected = {
        name: (value.float() + 0.5 * (tuned[name].float() - value.float())).to(torch.bfloat16)
        for name, value in base.items()
    }
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    gpt_oss.load_state_dict(expected)
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, gpt_oss.eval()(tokens).logits)
