"""GGUF out: read back by the gguf package and by our own reader, bit for bit."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from encoding import reader
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tiny_models import (
    BY_WORDS,
    BYTES,
    DIGITS,
    EXPERTS,
    HEAD,
    HEADS,
    KEY_HEADS,
    LAYERS,
    MODEL_TYPES,
    PIECES,
    byte_tokenizer,
    config,
    make_directory,
    parts_of,
    piece_tokenizer,
    split,
    weights,
)

import dare
from dare.errors import DareError, InputError, NotFiniteError, OutputError, RecipeError
from dare.formats import gguf as writing
from dare.formats.gguf import model_keys, vocabulary_keys
from dare.inputs.directory import Sidecars
from dare.inputs.gguf import FAMILIES, GgufSource
from dare.output.sink import make_sink
from helpers import read_tensor, save

gguf = pytest.importorskip("gguf")
Kind = gguf.GGMLQuantizationType
LLAMA = parts_of("llama")
WRITTEN = sorted({*MODEL_TYPES, *FAMILIES} - {*MODEL_TYPES.values(), "gemma4"} | {"llama"})


def merge(folder, output, **settings):
    given = {"method": "linear", "verbose": False, **settings}
    return dare.merge(
        base=folder / "base", models=[folder / "tuned"], output=folder / output, **given
    )


def make_pair(folder, model_type, dtype=np.float32, **more):
    """A base and a model that differs from it a little."""
    base = weights(parts_of(model_type), dtype=dtype)
    if model_type == "llama":
        rng = np.random.default_rng(1)
        for part, rows in (("q", HEADS * HEAD), ("k", KEY_HEADS * HEAD)):
            name = f"model.layers.0.self_attn.{part}_proj.bias"
            base[name] = rng.normal(size=rows).astype(dtype)
    tuned = {name: (own * 1.01).astype(dtype) for name, own in base.items()}
    for name, tensors in (("base", base), ("tuned", tuned)):
        make_directory(folder / name, tensors, config(model_type, **more))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


def read_back(path):
    with GgufSource(path) as source:
        assert source.remarks == () or path.name.startswith("rope")
        return {
            name: np.frombuffer(read_tensor(source, name), info.dtype.carrier).reshape(info.shape)
            for name, info in source.tensors.items()
        }


# ---------------------------------------------------------------- tensors


def as_llama_cpp_has_it(name, values, architecture):
    """What llama.cpp's converter makes of a tensor."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return values
    halves = values.reshape(heads, 2, HEAD // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def as_stacks(tensors):
    """Tensors with those of all experts in one, under the names that llama.cpp's converter uses."""
    stacks, rest = {}, {}
    for name, values in tensors.items():
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            stack = name.replace(expert[0], ".experts.")
            if "block_sparse_moe" in name:
                stack = stack.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            stacks.setdefault(stack, {})[int(expert[1])] = values
        else:
            rest[name] = values
    return rest | {name: np.stack([own[n] for n in range(EXPERTS)]) for name, own in stacks.items()}


@pytest.mark.parametrize("model_type", WRITTEN)
def test_every_architecture_is_as_llama_cpp_has_it_and_comes_back(tmp_path, model_type):
    folder = make_pair(tmp_path, model_type)
    merge(folder, "out.gguf", dtype="F32")
    merge(folder, "plain.safetensors", dtype="F32")
    expected, found = load_file(folder / "plain.safetensors"), read_back(folder / "out.gguf")
    architecture = MODEL_TYPES.get(model_type, model_type)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(folder / "out.gguf").tensors}
    one = np.float32(1 if architecture.startswith("gemma") else 0)
    stacked = as_stacks(expected)
    assert len(stored) == len(stacked)
    for name, values in stacked.items():
        theirs = stored[names.get_name(name, (".weight", ".bias"))]
        made = as_llama_cpp_has_it(name, values, architecture)
        assert (theirs.shape, theirs.tobytes()) == (made.shape, made.tobytes()), name
    for name, values in expected.items():
        shifted = (values + one) - one if name.endswith("norm.weight") else values
        assert found[name].tobytes() == shifted.tobytes(), name


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_matrices_have_the_type_and_vectors_are_f32(pair, dtype):
    report = merge(pair, f"{dtype}.gguf", dtype=dtype)
    merge(pair, f"{dtype}.safetensors", dtype=dtype)
    merge(pair, "F32.safetensors", dtype="F32", overwrite=True)
    with dare.inputs.sources.open_source(pair / f"{dtype}.safetensors") as plain:
        stored = {name: read_tensor(plain, name) for name in plain.tensors}
    whole = load_file(pair / "F32.safetensors")
    for name, values in read_back(pair / f"{dtype}.gguf").items():
        assert values.tobytes() == (whole[name].tobytes() if values.ndim < 2 else stored[name])
    assert (report.recoded.format, report.recoded.tensors) == (f"GGUF ({dtype})", {})


def test_q8_0_is_what_the_gguf_package_makes_and_the_loss_is_reported(pair):
    report = merge(pair, "q.gguf", dtype="q8_0")
    merge(pair, "plain.safetensors", dtype="F32", overwrite=True)
    whole, found = load_file(pair / "plain.safetensors"), read_back(pair / "q.gguf")
    losses = report.recoded.tensors
    for name, values in whole.items():
        if values.ndim < 2:
            assert found[name].tobytes() == values.tobytes()
            continue
        if values.shape[-1] % 32:  # as llama.cpp does it
            assert found[name].tobytes() == values.astype(np.float16).tobytes()
            assert name not in losses
            continue
        codes = gguf.quants.quantize(values, Kind.Q8_0)
        stored = gguf.quants.dequantize(codes, Kind.Q8_0)
        assert found[name].tobytes() == stored.tobytes()
        error = np.linalg.norm(stored - values) / np.linalg.norm(values)
        assert losses[name].error == pytest.approx(error, rel=1e-5)
        assert losses[name].largest == pytest.approx(np.abs(stored - values).max(), rel=1e-5)
    worst = max(losses, key=lambda name: losses[name].error)
    assert worst in str(report.recoded)
    assert report.to_dict()["recoded"]["tensors"][worst]["error"] == losses[worst].error
    assert worst in str(report)


@pytest.fixture(scope="module")
def planned(pair):
    given = {"base": pair / "base", "models": [pair / "tuned"], "dtype": "Q8_0"}
    return dare.plan(**given, output=pair / "new.gguf")


@given(st.integers(1, 2000))
def test_pieces_of_any_size_give_the_same_bytes(planned, size):
    name, shape = "model.layers.0.self_attn.k_proj.weight", (16, 32)
    values = np.random.default_rng(0).normal(size=512).astype(np.float32)
    tensor = next((t.name, t.dtype, t.shape) for t in planned.tensors if t.name == name)
    assert tensor[2] == shape

    def encode():
        into = bytearray(16 * 34)

        def put(_name, start, raw):
            into[start : start + raw.size] = raw.tobytes()

        planned.recoding.encode(tensor, reader(values), put)
        return bytes(into)

    with pytest.MonkeyPatch.context() as patch:
        usual = encode()
        patch.setattr(writing, "PIECE_ELEMENTS", size)
        assert encode() == usual


def test_a_value_that_the_type_cannot_hold_is_refused(tmp_path):
    for dtype, limit in {"Q8_0": 127 * 65520, "F16": 65520}.items():
        for value in (limit - 1, limit):
            huge = weights(LLAMA)
            huge["model.embed_tokens.weight"][0, 0] = value
            for name in ("base", "tuned"):
                make_directory(tmp_path / name, huge, config("llama"))
            fails = contextlib.nullcontext()
            if value == limit:
                said = rf"embed_tokens.*{dtype}.*dtype = BF16 or F32"
                fails = pytest.raises(NotFiniteError, match=said)
            with fails:
                merge(tmp_path, f"{value}.gguf", dtype=dtype)
            assert bool(list(tmp_path.glob(f"{value}.gguf*"))) == (value < limit)


def test_a_head_of_its_own_is_written_and_a_tied_one_is_not(tmp_path):
    tensors = weights(LLAMA)
    for tied in (True, False):
        head = tensors["model.embed_tokens.weight"] * (1 if tied else 2)
        settings = config("llama", tie_word_embeddings=tied)
        for name, factor in (("base", 1), ("tuned", 1.01)):
            own = {k: (v * factor).astype(np.float32) for k, v in tensors.items()}
            own["lm_head.weight"] = (head * factor).astype(np.float32)
            make_directory(tmp_path / name, own, settings)
        merge(tmp_path, "out.gguf", overwrite=True)
        assert ("lm_head.weight" in read_back(tmp_path / "out.gguf")) == (not tied)


# ---------------------------------------------------------------- a GGUF base


def test_a_gguf_base_gives_its_keys_and_types_again(pair, tmp_path):
    for name in ("base", "tuned"):
        dare.merge(
            base=pair / name, models=[], method="passthrough", output=tmp_path / f"{name}.gguf",
            dtype="Q8_0", verbose=False,
        )  # fmt: skip
    merge_files = {"base": tmp_path / "base.gguf", "models": [tmp_path / "tuned.gguf"]}
    dare.merge(**merge_files, output=tmp_path / "out.gguf", method="linear", verbose=False)
    before, after = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("base", "out"))
    assert {t.name: t.tensor_type for t in after.tensors} == {
        t.name: t.tensor_type for t in before.tensors
    }
    keys = [key for key in before.fields if key != "general.name"]
    assert list(after.fields) == list(before.fields)
    assert all(after.fields[k].contents() == before.fields[k].contents() for k in keys)
    with pytest.raises(RecipeError, match=r"embed_tokens.weight.*vocabulary.*llama.cpp"):
        dare.plan(**merge_files, output=tmp_path / "no.gguf", pad_to_multiple_of=64)


def test_what_llama_cpp_computes_is_copied_back(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = make_pair(tmp_path, "llama", rope_parameters=rope)
    merge(folder, "rope.gguf")
    again = {"base": folder / "rope.gguf", "models": [folder / "tuned"], "verbose": False}
    dare.merge(**again, output=folder / "rope2.gguf", method="linear")
    factors = []
    for power in range(4):  # as llama.cpp's converter says it
        wave = 2 * math.pi * 10000.0 ** (2 * power / 8)
        smooth = (64 / wave - 1) / 3
        middle = 1 / ((1 - smooth) / 8 + smooth)
        factors.append(1 if wave < 16 else 8 if wave > 64 else middle)
    for name in ("rope.gguf", "rope2.gguf"):
        found = {t.name: t.data for t in gguf.GGUFReader(folder / name).tensors}
        np.testing.assert_allclose(found["rope_freqs.weight"], factors, rtol=1e-6)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_stacks_of_experts_are_written_again(tmp_path, model_type):
    folder = make_pair(tmp_path, model_type)
    for name in ("base", "tuned"):
        alone = {"base": folder / name, "models": [], "method": "passthrough", "dtype": "Q8_0"}
        dare.merge(alone, output=folder / f"{name}.gguf", verbose=False)
    files = {"base": folder / "base.gguf", "models": [folder / "tuned.gguf"]}
    dare.merge(**files, output=folder / "out.gguf", method="linear", verbose=False)
    tuned, out = (
        {t.name: (t.tensor_type, t.data) for t in gguf.GGUFReader(folder / f"{name}.gguf").tensors}
        for name in ("tuned", "out")
    )
    assert tuned["blk.1.ffn_down_exps.weight"][1].shape[0] == EXPERTS
    assert tuned["blk.1.ffn_gate_inp.weight"][0] == Kind.F32  # as in llama.cpp
    assert {name: (kind, data.shape) for name, (kind, data) in out.items()} == {
        name: (kind, data.shape) for name, (kind, data) in tuned.items()
    }
    read = {name: read_back(folder / f"{name}.gguf") for name in ("tuned", "out")}
    for name, values in read["tuned"].items():  # base + (tuned - base), quantised again
        np.testing.assert_allclose(read["out"][name], values, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("count", [EXPERTS + 1, EXPERTS - 1, 1 << 21])
def test_a_missing_expert_is_refused(tmp_path, count):
    folder = make_pair(tmp_path, "mixtral", num_local_experts=count)
    match = rf"3 of {count} experts for blk\.0\.ffn_\w+_exps\.weight"
    with pytest.raises(InputError, match=match):
        merge(folder, "out.gguf")


def test_a_worker_opens_the_file_for_every_expert(tmp_path):
    folder = make_pair(tmp_path, "mixtral")
    files = {"base": folder / "base", "models": [folder / "tuned"]}
    layout = dare.plan(**files, output=tmp_path / "out.gguf").layout
    sink = make_sink(tmp_path, layout, {})
    for expert in range(EXPERTS):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
        assert sink.files_of(name) == {"out.gguf"}


# ---------------------------------------------------------------- keys


def test_keys_of_a_directory(pair):
    merge(pair, "keys.gguf", dtype="BF16")
    fields = gguf.GGUFReader(pair / "keys.gguf").fields
    found = {key: field.contents() for key, field in fields.items()}
    tokens = [*PIECES, "[PAD10]", "[PAD11]"]
    expected = {
        "general.architecture": "llama",
        "general.file_type": 32,
        "llama.block_count": LAYERS,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 5, 5],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": "{{ x }}",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["tokenizer.ggml.scores"][7:10] == [0, -1, -2]  # in the order of merges
    eps = fields["llama.attention.layer_norm_rms_epsilon"]
    assert eps.types == [gguf.GGUFValueType.FLOAT32]
    assert fields["llama.block_count"].types == [gguf.GGUFValueType.UINT32]


def vocabulary(tokenizer, **more):
    settings = config("llama", **more)
    files = {"config.json": settings, "tokenizer.json": tokenizer, "tokenizer_config.json": {}}
    written = {name: json.dumps(document).encode() for name, document in files.items()}
    return vocabulary_keys(Sidecars(Path("m"), dict(written)), 12)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("steps", "looks_up", "name"),
    [
        ([BY_WORDS], False, "gpt-2"),
        ([DIGITS, BY_WORDS], False, "smollm"),
        ([split(LLAMA3), BYTES], True, "llama-bpe"),
        ([split(LLAMA3.replace("{1,3}", "")), BYTES], False, "qwen2"),
    ],
)
def test_the_way_to_split_text_is_recognised(steps, looks_up, name):
    found = vocabulary(byte_tokenizer(*steps, ignore_merges=looks_up))
    assert found["tokenizer.ggml.pre"] == name
    assert found["tokenizer.ggml.tokens"][:3] == ["<|end|>", "x y", "a"]
    assert found["tokenizer.ggml.token_type"][:3] == [3, 4, 1]
    assert found["tokenizer.ggml.merges"] == ["a b", "Ġ ab"]
    with pytest.raises(InputError, match=r"convert_hf_to_gguf"):
        vocabulary(byte_tokenizer(*steps, ignore_merges=not looks_up))


def changed(tokenizer, path, value):
    *parents, last = path
    table = tokenizer
    for key in parents:
        table = table[key]
    table[last] = value
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        {},
        byte_tokenizer(split(r"\w+"), BYTES),
        byte_tokenizer({**BY_WORDS, "add_prefix_space": True}),
        byte_tokenizer(BY_WORDS, type="Unigram"),
        changed(byte_tokenizer(BY_WORDS), ["normalizer"], {"type": "Lowercase"}),
        changed(byte_tokenizer(BY_WORDS), ["model", "vocab", "a"], 12),
        changed(byte_tokenizer(BY_WORDS), ["model", "vocab", "a"], -13),
        changed(piece_tokenizer(), ["pre_tokenizer"], {"type": "Whitespace"}),
        changed(piece_tokenizer(), ["normalizer"], None),
        changed(piece_tokenizer(), ["model", "merges"], [["a", "b"], ["▁", "ab"]]),
    ],
)
def test_a_tokenizer_that_llama_cpp_may_not_have_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"convert_hf_to_gguf"):
        vocabulary(tokenizer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)
PATHS = [
    *(["model", key] for key in ("type", "vocab", "merges", "unk_token", "byte_fallback")),
    *([key] for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")),
    ["added_tokens", 0],
    ["normalizer", "normalizers"],
]


@given(st.sampled_from(PATHS), JSON)
def test_hostile_tokenizers_are_refused_or_understood(path, value):
    with contextlib.suppress(DareError):
        writing._packed(vocabulary(changed(piece_tokenizer(), path, value)))


@given(
    st.sampled_from(sorted(config("gemma2"))), JSON, st.sampled_from(["llama", "gemma2", "phi3"])
)
def test_hostile_configurations_are_refused_or_understood(key, value, model_type):
    with contextlib.suppress(DareError):
        keys, _ = model_keys(config(model_type) | {key: value, "rope_scaling": value})
        writing._packed(keys)


FACTORS = {"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.5, 2.0, 2.5]}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("model_type", "more", "fault"),
    [
        ("gemma4_text", {}, "gemma4_text"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "phi3"),
        ("phi3", {"rope_scaling": {"type": "su", **FACTORS}, ORIGINAL: 0}, "phi3"),
        ("phi3", {"rope_scaling": {"type": "su", **FACTORS, "long_factor": [1]}}, "phi3"),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, "dynamic"),
        ("qwen2", {"rope_parameters": {"rope_type": "llama3"}}, "llama3"),
        ("qwen2", {"hidden_act": "relu"}, "relu"),
        ("gemma3_text", {"layer_types": ["full_attention"] * LAYERS}, "window"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar 99"),
        ("llama", {"num_hidden_layers": "many"}, "llama"),
        ("llama", {"num_attention_heads": None}, "llama"),
        ("llama", {"rope_parameters": [1]}, "llama"),
        ("llama", {"vocab_size": 10**12}, "vocab_size"),
        ("llama", {"head_dim": -8}, "head_dim"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(model_type, more, fault):
    with pytest.raises(InputError, match=fault):
        model_keys(config(model_type, **more))


def test_long_positions_of_phi3():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **FACTORS}
    found, tensors = model_keys(config("phi3", rope_parameters=rope, **{ORIGINAL: 32}))
    keys = {"dimension_count": 8, "scaling.original_context_length": 32, "freq_base": 1e4}
    assert {key: found[f"phi3.rope.{key}"] for key in keys} == keys
    # sqrt(1 + ln(128 / 32) / ln(32)), as ln(4) / ln(32) = 2 / 5
    assert found["phi3.rope.scaling.attn_factor"] == pytest.approx(math.sqrt(1.4))
    assert found["phi3.attention.sliding_window"] == 16
    assert {name: values.tolist() for name, values in tensors.items()} == {
        "rope_factors_long.weight": FACTORS["long_factor"],
        "rope_factors_short.weight": FACTORS["short_factor"],
    }
    half = {**rope, "partial_rotary_factor": 0.5, "rope_type": "default"}
    assert model_keys(config("phi3", rope_parameters=half))[0]["phi3.rope.dimension_count"] == 4


@pytest.mark.parametrize("name", ["num_local_experts", "num_experts"])
def test_keys_of_experts(name):
    given = {"num_local_experts": None, "num_experts": None, name: EXPERTS}
    found, _ = model_keys(config("qwen2_moe", **given))
    counts = {"count": 3, "used_count": 2, "feed_forward_length": 24}
    counts["shared_feed_forward_length"] = 40
    assert {key: found[f"qwen2moe.expert_{key}"] for key in counts} == counts


def test_scaled_positions():
    yarn = {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "rope_theta": 5e5}
    found, tensors = model_keys(config("qwen2", rope_scaling=yarn))
    keys = {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 32.0, "original_context_length": 128}
    assert {key: found[f"qwen2.rope.scaling.{key}"] for key in keys} == keys
    assert found["qwen2.rope.freq_base"] == 5e5
    assert tensors == {}
    both = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    found, _ = model_keys(config("gemma3_text", rope_parameters=both))
    assert (found["gemma3.rope.freq_base"], found["gemma3.rope.freq_base_swa"]) == (1e6, 1e4)


def test_a_stack_of_layers_has_its_number_of_layers(pair, tmp_path):
    ranges = [{"model": str(pair / "base"), "range": span} for span in ([0, 2], [1, 2])]
    given = {"layers": ranges, "output": str(tmp_path / "out.gguf"), "dtype": "Q8_0"}
    dare.merge(given, verbose=False)
    with GgufSource(tmp_path / "out.gguf") as found:
        assert found.metadata["llama.block_count"] == 3
        name = "model.layers.{}.self_attn.q_proj.weight"
        assert read_tensor(found, name.format(2)) == read_tensor(found, name.format(1))


@pytest.mark.parametrize("suffix", ["", ".gguf"])
def test_the_head_of_a_stack_is_its_last_models_embedding(pair, tmp_path, suffix):
    for name in ("base", "tuned"):
        alone = {"base": pair / name, "models": [], "method": "passthrough", "dtype": "F32"}
        dare.merge(alone, output=tmp_path / f"{name}.gguf", verbose=False)
    home = tmp_path if suffix else pair
    ranges = [{"model": str(home / f"{n}{suffix}"), "range": [0, 1]} for n in ("base", "tuned")]
    given = {"base": str(pair / "base"), "layers": ranges, "dtype": "F32", "verbose": False}
    dare.merge(given, output=tmp_path / "out.gguf")
    base, tuned, out = (
        {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}
        for name in ("base", "tuned", "out")
    )
    assert np.array_equal(out["token_embd.weight"], base["token_embd.weight"])
    assert np.array_equal(out["output.weight"], tuned["token_embd.weight"])


def test_a_gemma_with_a_head_of_its_own_is_refused(tmp_path):
    folder = make_pair(tmp_path, "gemma2")
    ranges = [{"model": str(folder / name), "range": [0, 1]} for name in ("base", "tuned")]
    with pytest.raises(InputError, match=r"lm_head\.weight.*folder"):
        dare.plan({"layers": ranges}, output=tmp_path / "out.gguf")


def test_a_gguf_without_a_head_is_tied(pair, tmp_path):
    alone = {"base": pair / "tuned", "models": [], "method": "passthrough", "dtype": "F32"}
    dare.merge(alone, output=tmp_path / "tuned.gguf", verbose=False)
    untied = {**load_file(pair / "base" / "model.safetensors")}
    untied["lm_head.weight"] = -untied["model.embed_tokens.weight"]
    make_directory(tmp_path / "base", untied, config("llama", tie_word_embeddings=False))
    given = {"base": tmp_path / "base", "models": [tmp_path / "tuned.gguf"], "method": "linear"}
    dare.merge(given, output=tmp_path / "out.safetensors", verbose=False)
    out = load_file(tmp_path / "out.safetensors")
    np.testing.assert_allclose(out["lm_head.weight"], out["model.embed_tokens.weight"], rtol=1e-5)


def test_a_folder_from_a_gguf_base_says_whom_to_copy_the_configuration_from(pair, tmp_path):
    base = tmp_path / "base.gguf"
    dare.merge(base=pair / "base", models=[], method="passthrough", output=base, verbose=False)
    given = {"base": base, "models": [pair / "tuned"], "output": tmp_path / "out"}
    found = {notice.code: notice.remedy for notice in dare.plan(**given).warnings}
    assert "--copy-from tuned" in found["no_configuration"]
    dare.merge(**given, copy_from="tuned", method="linear", verbose=False)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


# ---------------------------------------------------------------- what does not go together


def test_outputs_that_cannot_be_gguf_are_refused(pair, tmp_path):
    files = {"base": pair / "base", "models": [pair / "tuned"]}
    with pytest.raises(RecipeError, match=r"F64.*Q8_0"):
        dare.plan(**files, output=tmp_path / "a.gguf", dtype="F64")
    for output in (tmp_path / "a.safetensors", tmp_path / "a", None):
        with pytest.raises(RecipeError, match=r"Q8_0.*\.gguf"):
            dare.plan(**files, output=output, dtype="Q8_0")
    with pytest.raises(RecipeError, match="format"):
        dare.plan(**files, output=tmp_path / "a.gguf", format="input")
    with pytest.raises(OutputError, match=r"s3://bucket/a.gguf: .*copy"):
        dare.plan(**files, output="s3://bucket/a.gguf")
    alone = save(tmp_path / "base.safetensors", load_file(pair / "base/model.safetensors"))
    with pytest.raises(InputError, match=r"a.gguf: .*copy_from"):
        dare.plan(base=alone, models=[pair / "tuned"], output=tmp_path / "a.gguf")
    given = {"base": alone, "models": [pair / "tuned"], "copy_from": "tuned"}
    assert dare.plan(**given, output=tmp_path / "a.gguf").recoding.format == "GGUF (F16)"
    odd = {**load_file(pair / "base/model.safetensors"), "vision.weight": np.ones((2, 2), "f4")}
    make_directory(tmp_path / "odd", odd, config("llama"))
    with pytest.raises(InputError, match=r"vision.weight: .*convert_hf_to_gguf"):
        dare.plan(
            base=tmp_path / "odd", models=[], method="passthrough", output=tmp_path / "a.gguf"
        )


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_matrices_are_f16_unless_asked(tmp_path, kind):
    folder = make_pair(tmp_path, "qwen2", kind)
    files = {"base": folder / "base", "models": [folder / "tuned"]}
    planned = dare.plan(**files, output=folder / "out.gguf")
    assert planned.recoding.format == planned.to_dict()["format"] == "GGUF (F16)"
    assert "GGUF (F16)" in str(planned)
