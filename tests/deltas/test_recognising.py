from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dare.deltas.recognising import LowRank, describe_adapter, recognise_lora
from dare.demo.merges import BASE, TUNED
from dare.inputs.arrays import array_source
from dare.inputs.formats import open_model

NAMES = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(6)]
SHAPE = (192, 320)


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def low_rank(seed, rank, size, shape=SHAPE):
    factors = gaussian(seed, shape[0], rank), gaussian(seed + 1000, rank, shape[1])
    return np.float32(size / math.sqrt(rank)) * (factors[0] @ factors[1])


def falling_off(seed, power, size):
    """A change of full rank whose singular values fall like a power of their number."""
    left, right = (np.linalg.qr(gaussian(seed + s, n, SHAPE[0]))[0] for s, n in enumerate(SHAPE))
    change = (left * np.arange(1.0, SHAPE[0] + 1) ** -power) @ right.T
    return (size / np.sqrt(np.square(change).mean()) * change).astype(np.float32)


def models(change, dtype, names=NAMES, shape=SHAPE):
    """A base, and the model that a change of each matrix makes of it."""
    base = {name: (0.02 * gaussian(i, *shape)).astype(dtype) for i, name in enumerate(names)}
    tuned = {
        name: (weights.astype(np.float32) + change(100 + number)).astype(dtype)
        for number, (name, weights) in enumerate(base.items())
    }
    return base, tuned


def recognise(base, tuned):
    return recognise_lora(array_source(base, "base"), array_source(tuned, "model"))


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("size", [1e-3, 2e-4])  # half a step of bfloat16 is 6e-5 at 0.02
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_merged_lora_is_recognised(rank, size, dtype):
    found = recognise(*models(lambda seed: low_rank(seed, rank, size), dtype))
    assert found == LowRank(rank, 6, 0, 2 * 6 * rank * (192 + 320))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1e-4, 5e-5])
def test_a_full_change_is_no_lora(size, dtype):
    assert recognise(*models(lambda seed: size * gaussian(seed, *SHAPE), dtype)) is None


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("size", [1e-3, 1e-4, 5e-5])
def test_a_change_that_falls_off_fast_is_no_lora(size, power, dtype):
    assert recognise(*models(lambda seed: falling_off(seed, power, size), dtype)) is None


@pytest.mark.parametrize("name", TUNED)
def test_the_demonstrations_models_are_no_loras(name):
    assert recognise_lora(open_model(BASE), open_model(TUNED[name])) is None


def test_an_unchanged_model_is_no_lora():
    base, _ = models(lambda _seed: np.float32(0), np.float32)
    assert recognise(base, base) is None


@pytest.mark.parametrize(("full", "is_lora"), [(1, True), (2, False)])
def test_nine_in_ten_matrices_have_to_agree(full, is_lora):
    names = [f"layers.{number}.w" for number in range(10)]
    base, tuned = models(lambda seed: low_rank(seed, 4, 1e-3), np.float32, names)
    for number, name in enumerate(names[:full]):
        tuned[name] = base[name] + 1e-3 * gaussian(number, *SHAPE)
    assert (recognise(base, tuned) is not None) is is_lora


def test_large_matrices_are_seen_through_windows():
    shape = (2048, 512)
    names = NAMES[:1]
    found = recognise(
        *models(lambda seed: low_rank(seed, 8, 2e-4, shape), ml_dtypes.bfloat16, names, shape)
    )
    assert found == LowRank(8, 1, 0, 2 * 8 * (2048 + 512))


def test_what_no_lora_holds_is_counted_in_full():
    base, tuned = models(lambda seed: low_rank(seed, 4, 1e-3), np.float32)
    unchanged = {"model.layers.9.mlp.up_proj.weight": gaussian(7, *SHAPE)}
    others = {"model.norm.weight": np.ones(64, np.float32), "lm_head.weight": gaussian(8, 50, 64)}
    found = recognise(
        base | unchanged | others,
        tuned | unchanged | {name: 2 * values for name, values in others.items()},
    )
    assert found == LowRank(4, 6, 2, 2 * (6 * 4 * 512 + 64 + 50 * 64))


def test_the_advice_is_a_command_that_can_be_typed():
    found = LowRank(4, 6, 0, 24_576)
    assert found.advice("base", "my model", "adapter") == (
        "my model: looks like a LoRA of rank 4 that was merged into its base; an adapter of "
        "6 matrices takes about 24.6 kB: dare lora extract --base base --model 'my model' "
        "--output adapter --rank 4 --dtype BF16"
    )
    with_others = LowRank(4, 1, 2, 1000).advice("base", "model", "adapter")
    assert "1 matrix and 2 other tensors" in with_others
    assert with_others.endswith("--save-others")


def test_an_adapter_is_told_what_it_is(tmp_path):
    factors = {
        "base_model.model.w.lora_A.weight": gaussian(1, 4, 8),
        "base_model.model.w.lora_B.weight": gaussian(2, 8, 4),
    }
    safetensors.numpy.save_file(factors, tmp_path / "adapter_model.safetensors")
    config = '{"peft_type": "LORA", "r": 4, "lora_alpha": 4}'
    (tmp_path / "adapter_config.json").write_text(config)
    size = len(config) + (tmp_path / "adapter_model.safetensors").stat().st_size
    assert describe_adapter(open_model(tmp_path)) == (
        f"it is already stored as an adapter, which takes {size} bytes; keep it as it is"
    )


def test_a_whole_model_is_no_adapter():
    assert describe_adapter(open_model(BASE)) is None
    assert describe_adapter(array_source({"w": np.zeros(3, np.float32)}, "model")) is None
