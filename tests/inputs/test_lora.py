"""Adapters become the deltas that PEFT would add to the base, and weights that DoRA makes of it."""

import contextlib
import json
import re
import time
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranges import PLACES, Ranged
from safetensors.numpy import load_file, save_file
from writers import write_adapter

import dare
from dare import Request
from dare.errors import InputError, RecipeError
from dare.inputs import adapter_tensors
from dare.inputs.adapter_tensors import DoraMagnitudes, Product
from dare.inputs.arrays import array_source
from dare.inputs.lora import (
    CONFIG_NAME,
    PICKLE_NAME,
    WEIGHTS_NAME,
    ModulePattern,
    looks_like,
    open_adapter,
)
from dare.kernels import core, reference
from helpers import read_elements, read_tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def read_all(source, name):
    assert source.tensors[name].dtype.name == "F32"
    with source:
        return read_elements(source, name).reshape(source.tensors[name].shape)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32) / 8


def merge(folder, base, tensors, prefix="", model_type=None, **config):
    """Merge an adapter onto a base, whose tensors may have a prefix, and read the result."""
    base_folder = folder / "base"
    base_folder.mkdir()
    save_file({prefix + n: v for n, v in base.items()}, base_folder / "model.safetensors")
    if model_type:
        (base_folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    models = [write_adapter(folder / "adapter", tensors, **config)]
    given = {"output": folder / "out", "method": "linear", "verbose": False}
    dare.merge(base=base_folder, models=models, **given)
    return load_file(folder / "out" / "model.safetensors")


A, B = floats(2, 3), floats(4, 2, seed=1)
NAMES = "m.q_proj.lora_A.weight", "m.q_proj.lora_B.weight"
PAIR = dict(zip(NAMES, (A, B), strict=True))

# ---------------------------------------------------------------- products


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
def test_a_delta_is_scaling_times_b_times_a(tmp_path, config, scaling):
    source = open_adapter(write_adapter(tmp_path, PAIR, **config))
    assert set(source.tensors) == {"m.q_proj.weight"}
    assert source.delta_of("m.q_proj.weight").is_change
    assert source.is_partial
    expected = np.float32(scaling) * (B @ A)
    assert read_all(source, "m.q_proj.weight").tolist() == expected.tolist()


def test_convolutions_biases_and_what_is_stored_in_full(tmp_path):
    down, up = floats(2, 3, 3, 3), floats(4, 2, 1, 1, seed=1)
    bias, whole, both = floats(4, seed=5), floats(3, 3), floats(4, 3, seed=7)
    tensors = {
        **{"conv.lora_A.weight": down, "conv.lora_B.weight": up},
        **{**PAIR, "m.q_proj.lora_B.bias": bias, "m.q_proj.base_layer.weight": both},
        **{"lm_head.weight": whole, "m.k_proj.base_layer.bias": bias},
    }
    source = open_adapter(write_adapter(tmp_path, tensors, lora_bias=True))
    found = {name: read_all(source, name).tolist() for name in source.tensors}
    convolution = 2.0 * (up.reshape(4, 2) @ down.reshape(2, -1)).reshape(4, 3, 3, 3)
    changes = {"conv.weight": convolution.tolist(), "m.q_proj.bias": (2.0 * bias).tolist()}
    wholes = {"lm_head.weight": whole.tolist(), "m.k_proj.bias": bias.tolist()}
    wholes["m.q_proj.weight"] = (2.0 * (B @ A) + both).tolist()
    assert found == {**changes, **wholes}
    assert {name for name in found if source.delta_of(name).is_change} == changes.keys()


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


START = {"init_lora_weights": "pissa", "use_rslora": True}


@pytest.mark.parametrize("place", ["adapter/pissa_init", "pissa_init"])
def test_what_was_taken_out_of_the_base_is_subtracted(tmp_path, place):
    base = array_source({"m.q_proj.weight": floats(4, 3)}, "base")
    first = {name: floats(*value.shape, seed=9) for name, value in PAIR.items()}
    folder = write_adapter(tmp_path / "adapter", PAIR, **START)
    with pytest.raises(InputError, match=r"pissa_init, or save it with PEFT's path_initial"):
        open_adapter(folder, base=base)
    write_adapter(tmp_path / place, {NAMES[0]: A})
    with pytest.raises(InputError, match=r"m\.q_proj\.weight; give the adapter as it was"):
        open_adapter(folder, base=base)
    with pytest.raises(InputError, match="dare merge BASE ADAPTER"):
        open_adapter(folder)
    write_adapter(tmp_path / place, first)
    before, after = first[NAMES[1]] @ first[NAMES[0]], B @ A
    expected = np.float32(4 / 2**0.5) * (after.astype(np.float64) - before)
    found = read_all(open_adapter(folder, base=base), "m.q_proj.weight")
    np.testing.assert_allclose(found, expected, atol=1e-6)


CONVOLVED = {"w.lora_A.weight": floats(2, 3, 2, 2), "w.lora_B.weight": floats(5, 2, 1, 1)}
LEFT, RIGHT = floats(5, 2, seed=2) + 1, floats(2, 6, seed=1) + 1
LINEAR = {"w.lora_A.weight": RIGHT, "w.lora_B.weight": LEFT}
EMBEDDING = {"w.lora_embedding_A": RIGHT, "w.lora_embedding_B": LEFT}
MAGNITUDES = {"w.lora_magnitude_vector": 1 + np.abs(floats(5, seed=4))}
TOKENS = {"w.token_adapter.trainable_tokens_delta": floats(3, 6, seed=5)}
INDICES = {"trainable_token_indices": [4, 0, 2]}
HADAMARD = {"w.hada_w1_a": LEFT, "w.hada_w1_b": floats(2, 6, seed=7)}
CUBES = [("w1_a", 5), ("w1_b", 3), ("t1", 2, 2, 2), ("w2_a", 5), ("w2_b", 3), ("t2", 2, 2, 2)]
SHARED = {  # by a vector for each output, and one for each direction
    **{"base_model.vera_A": floats(2, 8, seed=1), "base_model.vera_B": floats(7, 2, seed=2)},
    **{"w.vera_lambda_b": floats(5, seed=3), "w.vera_lambda_d": floats(2, seed=4)},
}
RANGED = {  # factors, settings, the model type and the shape of the base's weight
    "linear": (LINEAR, {}, None, (5, 6)),
    "embedding": (EMBEDDING, {}, None, (6, 5)),
    "convolution": (CONVOLVED, {}, None, (5, 3, 2, 2)),
    "experts": (NESTED, {"r": 1, "target_parameters": FUSED}, None, None),
    "turned experts": (NESTED, {"r": 1, "target_parameters": FUSED}, "gpt_oss", None),
    "saved too": ({**LINEAR, "w.base_layer.weight": floats(5, 6)}, {}, None, (5, 6)),
    "DoRA": ({**LINEAR, **MAGNITUDES}, {"use_dora": True}, None, (5, 6)),
    "DoRA by column": ({**EMBEDDING, **MAGNITUDES}, {"use_dora": True}, None, (6, 5)),
    "tokens": (TOKENS, INDICES, None, (5, 6)),
    "AdaLoRA": (
        {"w.lora_A": RIGHT, "w.lora_B": LEFT, "w.lora_E": floats(2, 1, seed=6)},
        {"peft_type": "ADALORA", "init_r": 2, "r": 8},
        None,
        (5, 6),
    ),
    "LoHa": (
        {**HADAMARD, "w.hada_w2_a": floats(5, 2, seed=8), "w.hada_w2_b": RIGHT},
        {"peft_type": "LOHA", "alpha": 4, "r": 2},
        None,
        (5, 6),
    ),
    "LoHa with a kernel": (
        {f"w.hada_{part}": floats(2, *sides, seed=7 + n) for n, (part, *sides) in enumerate(CUBES)},
        {"peft_type": "LOHA", "alpha": 4, "r": 2},
        None,
        (5, 3, 2, 2),
    ),
    "LoKr": (
        {"w.lokr_w1": floats(2, 3), "w.lokr_w2_a": LEFT, "w.lokr_w2_b": RIGHT},
        {"peft_type": "LOKR", "alpha": 4, "r": 2},
        None,
        None,
    ),
    "LoKr of a line": (
        {"w.lokr_w1": floats(2, 3), "w.lokr_w2": floats(3, 2, 4, seed=8)},
        {"peft_type": "LOKR", "alpha": 4, "r": 2},
        None,
        None,
    ),
    "IA³": (
        {"w.ia3_l": floats(1, 6, seed=9)},
        {"peft_type": "IA3", "feedforward_modules": ["w"]},
        None,
        (5, 6),
    ),
    "VeRA": (SHARED, {"peft_type": "VERA", "r": 2}, None, (5, 6)),
    "VeRA, inputs first": (SHARED, {"peft_type": "VERA", "r": 2}, "gpt2", (6, 5)),
}


@pytest.fixture(scope="module")
def ranged(tmp_path_factory):
    """Adapters of every kind, read in one piece, whose factors need many in tests."""
    found, folder, stack = {}, tmp_path_factory.mktemp("ranged"), contextlib.ExitStack()
    for kind, (tensors, config, model_type, shape) in RANGED.items():
        base = array_source({"w.weight": 1 + floats(*shape, seed=3)}, "base") if shape else None
        given = write_adapter(folder / kind, tensors, **config)
        source = open_adapter(given, {"model_type": model_type}, base=base)
        source.bind({})
        stack.enter_context(source)
        found[kind] = Ranged(source, {name: read_tensor(source, name) for name in source.tensors})
    with stack:
        yield found


@given(st.sampled_from(sorted(RANGED)), PLACES, PLACES, st.integers(1, 40))
def test_any_range_is_the_same_part_of_the_whole(ranged, kind, one, other, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_tensors, "PIECE", piece)
        if kind != "DoRA by column":  # the norms of columns are sums of chunks
            patch.setattr(adapter_tensors, "CHUNK", piece)
        for name in ranged[kind].wholes:
            ranged[kind].check(name, one, other)


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


def test_pickled_factors_are_read_if_the_user_allows_it(tmp_path):
    expected = read_all(open_adapter(write_adapter(tmp_path, PAIR)), "m.q_proj.weight")
    stored = load_file(tmp_path / WEIGHTS_NAME)
    torch.save({k: torch.from_numpy(v) for k, v in stored.items()}, tmp_path / PICKLE_NAME)
    (tmp_path / WEIGHTS_NAME).unlink()
    with pytest.raises(InputError, match=r"--allow-pickle"):
        open_adapter(tmp_path)
    source = open_adapter(tmp_path, allow_pickle=True)
    assert read_all(source, "m.q_proj.weight").tolist() == expected.tolist()


# ---------------------------------------------------------------- whole weights


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    ("factors", "model_type", "axis"),
    [(LINEAR, None, 1), (LINEAR, "gpt2", 0), (EMBEDDING, None, 0), (CONVOLVED, None, (1, 2, 3))],
    ids=["linear", "inputs first", "embedding", "convolution"],
)
def test_dora_brings_the_changed_weights_to_its_magnitudes(
    tmp_path, factors, model_type, axis, prefix
):
    down, up = (np.float64(value).reshape(len(value), -1) for value in factors.values())
    change = 2 * (up @ down)
    change = change.T if axis == 0 else change
    shape = (5, *next(iter(factors.values())).shape[1:]) if axis == (1, 2, 3) else change.shape
    weight, magnitudes = 1 + floats(*shape, seed=3), 1 + np.abs(floats(5, seed=4))
    stored = {**factors, "w.lora_magnitude_vector": magnitudes}
    found = merge(tmp_path, {"w.weight": weight}, stored, prefix, model_type, use_dora=True)
    tuned = weight + change.reshape(shape)
    norms = np.sqrt(np.square(tuned).sum(axis=axis, keepdims=True))
    expected = tuned * magnitudes.reshape(norms.shape) / norms
    np.testing.assert_allclose(found[f"{prefix}w.weight"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("rows", [[4, 0, 2], {"w": [4, 0, 2]}])
def test_rows_of_trained_tokens_replace_those_of_the_base(tmp_path, rows, prefix):
    weight = floats(5, 6)
    found = merge(tmp_path, {"w.weight": weight}, TOKENS, prefix, trainable_token_indices=rows)
    expected = weight.copy()
    expected[[4, 0, 2]] = TOKENS["w.token_adapter.trainable_tokens_delta"]
    result = found[f"{prefix}w.weight"]
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    assert result[[1, 3]].tobytes() == weight[[1, 3]].tobytes()


DORA = {**LINEAR, **MAGNITUDES}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (LINEAR, {"use_dora": True}),
        (MAGNITUDES, {"use_dora": True}),
        ({**DORA, "w.lora_magnitude_vector": floats(6)}, {"use_dora": True}),
        (DORA, {}),
        (TOKENS, {}),
        *(
            (TOKENS, {"trainable_token_indices": rows})
            for rows in ([0, 1, 7], [0, -1, 2], [0, 1], {"w": ["x"]}, {"f": [0, 1, 2]})
        ),
        ({"f.token_adapter.trainable_tokens_delta": floats(1, 4)}, INDICES),
        ({**LINEAR, **TOKENS}, INDICES),
    ],
)
def test_what_does_not_fit_the_base_is_refused(tmp_path, tensors, config):
    with pytest.raises(InputError):
        merge(tmp_path, {"w.weight": floats(5, 6)}, tensors, **config)


def test_the_base_of_dora_is_needed_and_must_fit(tmp_path):
    with pytest.raises(InputError, match="dare merge BASE ADAPTER"):
        open_adapter(write_adapter(tmp_path / "lone", DORA, use_dora=True))
    with pytest.raises(InputError, match="give the base that it was trained on"):
        merge(tmp_path, {"w.weight": floats(5, 7)}, DORA, use_dora=True)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "OFT"}, "peft_type is 'OFT', and only these .*LOKR.*merge_and_unload"),
        ({"peft_type": ["LORA"]}, "merge_and_unload"),
        ({"init_lora_weights": "loftq"}, "changes the weights of the base too; merge it with"),
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


@pytest.mark.parametrize(
    "config",
    [
        {"r": 1},
        {"r": 1, "target_parameters": ["experts.a", "experts.b"]},
        {"r": 1, "target_parameters": FUSED[:1]},
        {"r": 3, "target_parameters": FUSED},
        {"r": 0, "target_parameters": FUSED},
        {"target_parameters": FUSED, "rank_pattern": {"down_proj": -1}},
    ],
)
def test_parameters_that_cannot_be_told_apart_are_refused(tmp_path, config):
    with pytest.raises(InputError, match=r"m\.experts"):
        open_adapter(write_adapter(tmp_path, NESTED, **config))


TWICE = [  # names of tensors for one and the same
    ("m.lora_A.x.weight", "m.lora_A.y.weight"),
    ("m.lora_A.weight", "base_model.model.m.lora_A.weight"),
    ("m.modules_to_save.x.weight", "m.modules_to_save.y.weight"),
    ("n.weight", "base_model.model.n.weight"),
    ("n.base_layer.weight", "n.weight"),
]
EMBEDDED = {"m.q_proj.lora_embedding_A": A, "m.q_proj.lora_embedding_B": B}
EMPTY = {NAMES[0]: np.ones((0, 2), np.float32), NAMES[1]: np.ones((2, 0), np.float32)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({NAMES[1]: None}, r"m\.q_proj has no lora_B; the adapter is damaged"),
        ({NAMES[1]: floats(4, 3)}, "lora_A is 2×3, lora_B 4×3"),
        ({"m.q_proj.lora_magnitude_vector": B[:, 0].copy()}, "magnitude_vector is not a known"),
        ({NAMES[0]: np.array(1, np.float32)}, "is a single number"),
        ({"m.q_proj.lora_A.bias": floats(2)}, "is not a known kind"),
        (EMPTY, "lora_A is 0×2, lora_B 2×0"),
        (EMBEDDED, r"m\.q_proj\.weight .*twice"),
        *(({name: A, other: A + 1}, "are for the same tensor") for name, other in TWICE),
        *(
            ({name: PAIR[name].astype(kind)}, "types: F64, F32")
            for name in NAMES
            for kind in (np.uint8, np.bool_, np.int8, np.int64, np.uint16)
        ),
    ],
)
def test_damaged_factors_are_refused(tmp_path, changed, message):
    tensors = {name: value for name, value in {**PAIR, **changed}.items() if value is not None}
    folder = write_adapter(tmp_path, {}, rank_pattern={})
    save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(InputError, match=message) as error:
        open_adapter(folder)
    assert "same tensor" not in message or all(name in str(error.value) for name in changed)


def test_a_folder_without_weights_or_settings_is_refused(tmp_path):
    folder = write_adapter(tmp_path / "torn", PAIR)
    (folder / CONFIG_NAME).write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        open_adapter(folder)
    write_adapter(folder, PAIR)
    (folder / WEIGHTS_NAME).unlink()
    with pytest.raises(InputError, match=r"has no adapter_model"):
        open_adapter(folder)
    assert looks_like(folder)
    assert not looks_like(tmp_path)


# ---------------------------------------------------------------- patterns for modules

MODULES = [
    *("q_proj", "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj"),
    *("transformer.h.1.attn.c_attn", "ab.abab.b", ""),
]
PATTERNS = [
    *("q_proj", "model.layers.0.self_attn.q_proj", "proj", "^q_proj", r"^model\.layers\.0.*"),
    *(r"layers\.(0|1)\..*", r"(?:q|k|v)_proj", r"layers\.\d+\.mlp\.(up|down)_proj", r"[]a-z]+"),
    *(r"h\.\d{1,2}\..*attn", r"(?!.*mlp).*proj", "a{2}|b", "(q_proj$)", r"\.?b", "((b))?"),
    *(r".*\.layers\.[0-9]+\.(self_attn\.[qkv]_proj|mlp\..*)$", r"(a)\1*", "[[q]_proj"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_pattern_matches_as_in_peft(pattern):
    for module in MODULES:
        expected = re.match(rf"(.*\.)?({pattern})$", module) is not None
        assert ModulePattern(pattern).matches(module) is expected


PIECES = st.sampled_from(
    [*"ab.()|*+?[]^", r"\.", "(?:", "{2}", "{1,}", "[ab]", "(a|a)", "a?", ".*"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_whatever_pattern_is_taken_is_fast(pattern):
    started = time.process_time()
    with contextlib.suppress(ValueError):
        ModulePattern(pattern).matches("a" * 40 + "." + "b" * 20)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "pattern",
    [
        *("q(", "*", "a" * 1001),
        *(r"([\w.]+)+!", "(.*)*!", "(a|aa)+!", "(((.+)+)+)+!", "(.{0,9}){9}!", "((.?){60}){60}!"),
        *(".*" * 40 + "!", "(a|a)" * 60 + "!", "a?" * 60 + "a" * 60, "(?=.*.*.*.*)" * 4 + "!"),
    ],
)
def test_a_pattern_that_may_take_long_or_is_none_is_refused(pattern):
    with pytest.raises(ValueError, match=r"name the modules|not a regular expression"):
        ModulePattern(pattern).matches("model.layers." * 4 + "aaaa")


# ---------------------------------------------------------------- memory


def expert_factors(experts, rows, rank, columns, transposed):
    """Factors as PEFT stores them: lora_A by expert and direction, lora_B the other way."""
    generator = np.random.default_rng(0)
    left = generator.standard_normal((experts, rows, rank)).astype(np.float16)
    right = generator.standard_normal((experts, rank, columns)).astype(np.float16)
    ups = right.transpose(0, 2, 1) if transposed else left
    downs = left.transpose(0, 2, 1) if transposed else right
    up = ups.transpose(1, 2, 0).reshape(-1, rank * experts)
    down = downs.reshape(rank * experts, -1)
    kept = {"left": down if transposed else up, "right": up if transposed else down}
    source = array_source({n: v.copy() for n, v in kept.items()}, "adapter")
    return source, left.astype(np.float32), right.astype(np.float32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("sides", "experts"),
    [
        ((900, 256, 1000), 1),
        ((30, 64, 9000), 1),
        ((8, 1024, 900), 1),
        ((9000, 1024, 8), 1),
        ((300, 64, 200), 4),
        ((20, 8, 3000), 8),
    ],
)
def test_memory_is_what_is_said(sides, experts, transposed, monkeypatch):
    monkeypatch.setattr(adapter_tensors, "PIECE", 1 << 16)
    monkeypatch.setattr(adapter_tensors, "CHUNK", 1 << 16)
    rows, _, columns = sides
    source, _, _ = expert_factors(experts, *sides, transposed)
    product = Product("left", "right", transposed, 1.0, experts)
    into = np.empty(min(1 << 16, rows * columns), np.float32)
    product.fill(source, 0, into[:1])  # fills caches
    tracemalloc.start()
    product.fill(source, rows * columns - into.size, into)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    others = 64 << 10  # other threads of the test run allocate, too
    assert peak < product.reading_bytes(source) + others


@pytest.mark.parametrize("by_column", [False, True])
def test_magnitudes_take_the_memory_that_is_said(by_column):
    rows, columns = 3000, 700
    source = array_source({"m": floats(columns if by_column else rows)}, "adapter")
    made = DoraMagnitudes("m", rows, columns, by_column)
    into = np.empty(adapter_tensors.CHUNK, np.float32)
    made.fill(lambda _, block: block.fill(1), source, 0, into[:1])  # fills caches
    made = DoraMagnitudes("m", rows, columns, by_column)
    tracemalloc.start()
    made.fill(lambda _, block: block.fill(1), source, 5, into)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < made.reading_bytes + 8 * rows * 8


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
        dare.plan(Request.of(**given, max_memory="10MB"))
    enough = str(refusal.value).split("allow at least ")[1]
    for threads, memory in ((1, enough), (2, "150MB")):
        planned = dare.plan(Request.of(**given, max_memory=memory, threads=threads))
        assert planned.cost.threads == threads
        tracemalloc.start()
        dare.merge(planned, overwrite=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < planned.cost.threads * planned.cost.workspace_bytes + (2 << 20)
        assert planned.cost.threads * planned.cost.workspace_bytes <= planned.options.max_memory


# ---------------------------------------------------------------- PEFT's own merge


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **counts))


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8))


PATTERNED = {
    "rank_pattern": {"v_proj": 5},
    "alpha_pattern": {"v_proj": 9, "layers.0.mlp.up_proj": 2},
    "use_rslora": True,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "config"),
    [
        (llama, {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 6}),
        (llama, {"target_modules": "all-linear", "r": 3, **PATTERNED}),
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
    assert set(source.tensors) >= {n for n in plain if not torch.equal(plain[n], merged[n])}
    for name in source.tensors:
        is_change = source.delta_of(name).is_change
        expected = merged[name] - plain[name] if is_change else merged[name]
        np.testing.assert_allclose(read_all(source, name), expected.numpy(), atol=2e-6)
