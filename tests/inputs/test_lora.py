"""Adapters become the deltas that PEFT would add to the base."""

import json
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dare import Request, merge, plan
from dare.errors import InputError, RecipeError
from dare.inputs.arrays import array_source
from dare.inputs.lora import CONFIG_NAME, PICKLE_NAME, WEIGHTS_NAME, looks_like, open_adapter
from dare.kernels import core, reference
from helpers import read_elements

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def write_adapter(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {name.rpartition(".lora_")[0]: len(v) for name, v in tensors.items() if "_A" in name}
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    if config.keys().isdisjoint(("r", "rank_pattern")):
        given["rank_pattern"] = ranks
    (folder / CONFIG_NAME).write_text(json.dumps(given))
    save_file(
        {f"base_model.model.{name}": value for name, value in tensors.items()},
        folder / WEIGHTS_NAME,
    )
    return folder


def read_all(source, name):
    assert source.tensors[name].dtype.name == "F32"
    with source:
        return read_elements(source, name).reshape(source.tensors[name].shape)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32) / 8


A, B = floats(2, 3), floats(4, 2, seed=1)
PAIR = {"m.q_proj.lora_A.weight": A, "m.q_proj.lora_B.weight": B}


def test_a_delta_is_scaling_times_b_times_a(tmp_path):
    source = open_adapter(write_adapter(tmp_path, PAIR))
    assert set(source.tensors) == {"m.q_proj.weight"}
    assert source.delta_of("m.q_proj.weight").is_change
    assert source.is_partial
    assert read_all(source, "m.q_proj.weight").tolist() == (2.0 * (B @ A)).tolist()


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 2.0),
        ({"lora_alpha": 16}, 8.0),
        ({"use_rslora": True, "lora_alpha": 2}, 2 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 1}}, 0.5),
        ({"alpha_pattern": {"m.q_proj": 1}}, 0.5),
        ({"alpha_pattern": {"proj": 1}}, 2.0),
        ({"alpha_pattern": {".*_proj": 6, "q_proj": 1}}, 3.0),
        ({"r": 64, "rank_pattern": {"q_proj": 2}}, 2.0),
    ],
)
def test_the_scaling_follows_the_configuration(tmp_path, config, scaling):
    source = open_adapter(write_adapter(tmp_path, PAIR, **config))
    expected = np.float32(scaling) * (B @ A)
    assert read_all(source, "m.q_proj.weight").tolist() == expected.tolist()


def test_convolutions_keep_their_shape(tmp_path):
    down, up = floats(2, 3, 3, 3), floats(4, 2, 1, 1, seed=1)
    pair = {"conv.lora_A.weight": down, "conv.lora_B.weight": up}
    source = open_adapter(write_adapter(tmp_path, pair))
    expected = 2.0 * (up.reshape(4, 2) @ down.reshape(2, -1)).reshape(4, 3, 3, 3)
    assert read_all(source, "conv.weight").tolist() == expected.tolist()


def test_biases_and_saved_modules(tmp_path):
    whole = {"lm_head.weight": floats(3, 3), "m.k_proj.base_layer.bias": floats(4)}
    bias = {"m.q_proj.lora_B.bias": floats(4, seed=5)}
    source = open_adapter(write_adapter(tmp_path, PAIR | whole | bias, lora_bias=True))
    assert not source.delta_of("lm_head.weight").is_change
    assert read_all(source, "lm_head.weight").tolist() == whole["lm_head.weight"].tolist()
    assert source.delta_of("m.q_proj.bias").is_change
    expected = 2.0 * bias["m.q_proj.lora_B.bias"]
    assert read_all(source, "m.q_proj.bias").tolist() == expected.tolist()


def test_what_is_stored_in_full_and_as_a_lora_is_the_sum(tmp_path):
    whole = {"m.q_proj.base_layer.weight": floats(4, 3, seed=7)}
    source = open_adapter(write_adapter(tmp_path, PAIR | whole))
    assert not source.delta_of("m.q_proj.weight").is_change
    expected = 2.0 * (B @ A) + whole["m.q_proj.base_layer.weight"]
    assert read_all(source, "m.q_proj.weight").tolist() == expected.tolist()


FUSED = ["experts.gate_up_proj", "experts.down_proj"]
NESTED = {  # two experts, of rank 1; the innermost is for the parameter that the module has first
    "m.experts.base_layer.lora_A.weight": floats(2, 3, seed=2),
    "m.experts.base_layer.lora_B.weight": floats(8, 2, seed=3),
    "m.experts.lora_A.weight": floats(2, 4, seed=4),
    "m.experts.lora_B.weight": floats(3, 2, seed=5),
}


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_factors_of_experts_are_for_one_expert_each(tmp_path, is_turned):
    config = {"r": 1, "alpha_pattern": {"m.experts.down_proj": 3}, "target_parameters": FUSED}
    folder = write_adapter(tmp_path, NESTED, **config)
    source = open_adapter(folder, {"model_type": "gpt_oss"} if is_turned else {})
    for name, level, scaling in (("gate_up_proj", ".base_layer", 4), ("down_proj", "", 3)):
        down, up = (NESTED[f"m.experts{level}.lora_{letter}.weight"] for letter in "AB")
        expected = [scaling * np.outer(up[:, e], down[e]) for e in (0, 1)]
        expected = np.array([each.T if is_turned else each for each in expected])
        assert source.delta_of(f"m.experts.{name}").is_change
        assert read_all(source, f"m.experts.{name}").tolist() == expected.tolist()


def test_parameters_that_cannot_be_told_apart_are_refused(tmp_path):
    for config in (
        {"r": 1},
        {"r": 1, "target_parameters": ["experts.a", "experts.b"]},
        {"r": 1, "target_parameters": FUSED[:1]},
        {"r": 3, "target_parameters": FUSED},
        {"r": 0, "target_parameters": FUSED},
        {"target_parameters": FUSED, "rank_pattern": {"down_proj": -1}},
    ):
        with pytest.raises(InputError, match=r"m\.experts"):
            open_adapter(write_adapter(tmp_path, NESTED, **config))


START = {"init_lora_weights": "pissa", "use_rslora": True}


@pytest.mark.parametrize("place", ["adapter/pissa_init", "pissa_init"])
def test_what_was_taken_out_of_the_base_is_subtracted(tmp_path, place):
    base = array_source({"m.q_proj.weight": floats(4, 3)}, "base")
    first = {name: floats(*value.shape, seed=9) for name, value in PAIR.items()}
    write_adapter(tmp_path / place, first)
    source = open_adapter(write_adapter(tmp_path / "adapter", PAIR, **START), base=base)
    before, after = first["m.q_proj.lora_B.weight"] @ first["m.q_proj.lora_A.weight"], B @ A
    expected = np.float32(4 / 2**0.5) * (after.astype(np.float64) - before)
    np.testing.assert_allclose(read_all(source, "m.q_proj.weight"), expected, atol=1e-6)


def test_a_start_that_cannot_be_subtracted_is_refused(tmp_path):
    base = array_source({"m.q_proj.weight": floats(4, 3)}, "base")
    folder = write_adapter(tmp_path / "adapter", PAIR, **START)
    with pytest.raises(InputError, match=r"pissa_init, or save it with PEFT's path_initial"):
        open_adapter(folder, base=base)
    write_adapter(tmp_path / "pissa_init", {"m.q_proj.lora_A.weight": A})
    with pytest.raises(InputError, match=r"m\.q_proj\.weight; give the adapter as it was"):
        open_adapter(folder, base=base)
    with pytest.raises(InputError, match="dare merge BASE ADAPTER"):
        open_adapter(folder)


sizes = st.integers(1, 9)


@settings(deadline=None)
@given(sizes, sizes, sizes, st.integers(0, 2**32 - 1), st.data())
def test_both_kernels_give_the_same_bits(rows, rank, columns, seed, data):
    generator = np.random.default_rng(seed)
    left = generator.standard_normal((rows, rank), np.float32)
    right = generator.standard_normal((rank, columns), np.float32)
    first = data.draw(st.integers(0, rows * columns - 1))
    count = data.draw(st.integers(0, rows * columns - first))
    outs = [np.full(count, np.nan, np.float32) for _ in range(2)]
    for backend, out in zip((reference, core), outs, strict=True):
        backend.low_rank(left, right, first, np.float32(0.7), out)
    assert outs[0].tobytes() == outs[1].tobytes()
    exact = 0.7 * (left.astype(np.float64) @ right.astype(np.float64)).reshape(-1)
    assert np.allclose(outs[0], exact[first : first + count], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA' adapters can be merged"),
        (
            {"init_lora_weights": "loftq"},
            "which changes the weights of the base too; merge it with",
        ),
        ({"layer_replication": [[0, 2]]}, "its base has repeated layers"),
        ({"lora_alpha": "4"}, "'4' is text"),
        ({"alpha_pattern": {"q_proj": "4"}}, "'4' is text"),
        ({"r": "2"}, "'2' is text"),
        ({"r": None}, "not valid"),
        ({"r": 0}, "m.q_proj has 2 rows, and its rank here is 0; set r"),
        ({"r": 4}, "m.q_proj has 2 rows, and its rank here is 4; set r"),
        ({"r": 2, "rank_pattern": {"q_proj": 1}}, "its rank here is 1; set r and rank_pattern"),
        ({"alpha_pattern": [1]}, "not valid"),
        ({"alpha_pattern": {"q(": 1}}, r"'q\(': not a regular expression: missing \)"),
        ({"alpha_pattern": {r"(q+)*": 1}}, r"name the modules"),
    ],
)
def test_what_is_not_plain_lora_is_refused_with_the_reason(tmp_path, config, message):
    with pytest.raises(InputError, match=message):
        open_adapter(write_adapter(tmp_path, PAIR, **config))


def test_pickled_factors_are_read_if_the_user_allows_it(tmp_path):
    expected = read_all(open_adapter(write_adapter(tmp_path, PAIR)), "m.q_proj.weight")
    stored = load_file(tmp_path / WEIGHTS_NAME)
    torch.save({k: torch.from_numpy(v) for k, v in stored.items()}, tmp_path / PICKLE_NAME)
    (tmp_path / WEIGHTS_NAME).unlink()
    with pytest.raises(InputError, match=r"--allow-pickle"):
        open_adapter(tmp_path)
    source = open_adapter(tmp_path, allow_pickle=True)
    assert read_all(source, "m.q_proj.weight").tolist() == expected.tolist()


def test_damaged_adapters_are_refused(tmp_path):
    half = {"m.q_proj.lora_A.weight": A}
    with pytest.raises(InputError, match=r"m\.q_proj has no lora_B; the adapter is damaged"):
        open_adapter(write_adapter(tmp_path / "half", half))
    torn = PAIR | {"m.q_proj.lora_B.weight": floats(4, 3)}
    with pytest.raises(InputError, match="lora_A is 2×3, lora_B 4×3"):
        open_adapter(write_adapter(tmp_path / "torn", torn))
    odd = PAIR | {"m.q_proj.lora_magnitude_vector": floats(4)}
    with pytest.raises(InputError, match="lora_magnitude_vector is not a known kind"):
        open_adapter(write_adapter(tmp_path / "odd", odd))
    (tmp_path / "half" / CONFIG_NAME).write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        open_adapter(tmp_path / "half")
    (tmp_path / "torn" / WEIGHTS_NAME).unlink()
    with pytest.raises(InputError, match=r"has no adapter_model"):
        open_adapter(tmp_path / "torn")
    assert looks_like(tmp_path / "torn")
    assert not looks_like(tmp_path)


# ---------------------------------------------------------------- memory


def large(folder, seed, rank=512, size=1024):
    down = np.random.default_rng(seed).standard_normal((rank, size), np.float32)
    factors = {"w.lora_A.weight": down, "w.lora_B.weight": np.ascontiguousarray(down.T)}
    return write_adapter(folder, factors, r=rank)


def test_factors_are_planned_for_and_no_more_memory_is_taken(tmp_path):
    base = tmp_path / "base.safetensors"
    save_file({"w.weight": np.zeros((1024, 1024), np.float16)}, base)
    given = {"base": base, "models": [large(tmp_path / str(n), n) for n in (0, 1)]}
    given |= {"output": tmp_path / "out.safetensors", "method": "linear", "verbose": False}
    with pytest.raises(RecipeError, match="one thread needs") as refusal:
        plan(Request.of(**given, max_memory="10MB"))
    enough = str(refusal.value).split("allow at least ")[1]
    for threads, memory in ((1, enough), (2, "150MB")):
        planned = plan(Request.of(**given, max_memory=memory, threads=threads))
        assert planned.cost.threads == threads
        tracemalloc.start()
        merge(planned, overwrite=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < planned.cost.threads * planned.cost.workspace_bytes + (2 << 20)
        assert planned.cost.threads * planned.cost.workspace_bytes <= planned.options.max_memory


# ---------------------------------------------------------------- PEFT's own merge


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "config"),
    [
        (llama, {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 6}),
        (
            llama,
            {
                "target_modules": "all-linear",
                "r": 3,
                "rank_pattern": {"v_proj": 5},
                "alpha_pattern": {"v_proj": 9, "layers.0.mlp.up_proj": 2},
                "use_rslora": True,
            },
        ),
        (llama, {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    ],
)
def test_the_deltas_are_those_that_peft_merges(tmp_path, build, config):
    plain = {name: value.clone() for name, value in build().state_dict().items()}
    tuned = get_peft_model(build(), LoraConfig(**config))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tuned.save_pretrained(tmp_path)
    merged = tuned.merge_and_unload().state_dict()
    source = open_adapter(tmp_path)
    changed = {n for n in plain if not torch.equal(plain[n], merged[n])}
    assert set(source.tensors) >= changed
    for name in source.tensors:
        found = read_all(source, name)
        if source.delta_of(name).is_change:
            expected = (merged[name] - plain[name]).numpy()
            np.testing.assert_allclose(found, expected, atol=2e-6)
        else:
            np.testing.assert_allclose(found, merged[name].numpy(), atol=2e-6)
    assert load_file(tmp_path / WEIGHTS_NAME)
