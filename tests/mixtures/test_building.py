"""Mixtures of experts: their tensors, gates and recipes, what loads them and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from dense_models import INNER, LAYERS, WIDTH, WORDS, write_models
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dare
from dare.cli import main
from dare.inputs.opening import open_model
from dare.mixtures.building import (
    LAYOUTS,
    changed_config,
    draw_normal,
    draw_uniform,
    make_gates,
    plan_mixture,
)
from dare.mixtures.mixture import Mixture, load_mixture
from dare.output.targets import read_sealed, seal
from helpers import sha256
from lora.peft_models import pair, product, write_adapter

TARGETS = {"llama": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind in TARGETS:
        write_models(folder / kind, kind, ("base", "code", "prose"))
    return folder


def recipe_of(folder, *names, **settings):
    texts = {"base": "f", "code": "def f x", "prose": "once upon a time", "lora": "return"}
    entries = [
        name if isinstance(name, dict) else {"model": folder / name, "prompts": [texts[name]]}
        for name in names
    ]
    return {"base": folder / "base", "gates": "cheap_embed", "experts": entries, **settings}


def built(output, recipe, **settings):
    """Build a mixture; return its tensors."""
    dare.moe(recipe, output=output, verbose=False, **settings)
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize("kind", TARGETS)
def test_a_mixture_of_the_base_alone_says_what_the_base_says(models, tmp_path, kind):
    expert = {"model": models / kind / "base"}
    shared = [{**expert, "residual_scale": 0.0}] if kind == "qwen2" else []
    recipe = recipe_of(models / kind, expert, expert, gates="random", shared_experts=shared)
    report = dare.moe(recipe, output=tmp_path / "out", verbose=False)
    assert report.method == TARGETS[kind]
    assert [notice.code for notice in report.warnings] == ["same_experts"]
    assert dare.verify(tmp_path / "out").ok

    found, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert found.config.model_type == TARGETS[kind]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("def f x", return_tensors="pt")
    base = AutoModelForCausalLM.from_pretrained(models / kind / "base")
    with torch.no_grad():
        logits = [model(tokens.input_ids).logits for model in (found, base)]
        torch.testing.assert_close(*logits)
        written = found.generate(
            tokens.input_ids, max_new_tokens=3, do_sample=False, pad_token_id=1
        )
    assert 1 <= written.shape[1] - tokens.input_ids.shape[1] <= 3


def test_experts_have_their_models_mlps_and_the_rest_is_the_bases(models, tmp_path):
    folder = models / "llama"
    scaled = {"model": folder / "prose", "prompts": ["a king"], "residual_scale": 0.3}
    found = built(tmp_path / "out", recipe_of(folder, "code", scaled, dtype="BF16"))
    base, code, prose = (
        load_file(folder / name / "model.safetensors") for name in ("base", "code", "prose")
    )
    expected = {name: tensor for name, tensor in base.items() if ".mlp." not in name}
    for layer in range(LAYERS):
        old, new = f"model.layers.{layer}.mlp", f"model.layers.{layer}.block_sparse_moe"
        for part, called in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            scale = np.float32(0.3 if part == "down_proj" else 1)
            expected[f"{new}.experts.0.{called}.weight"] = code[f"{old}.{part}.weight"]
            expected[f"{new}.experts.1.{called}.weight"] = prose[f"{old}.{part}.weight"] * scale
        assert found.pop(f"{new}.gate.weight").shape == (2, WIDTH)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)


def test_an_adapter_is_an_expert_and_noise_is_the_generators(models, tmp_path):
    folder, name = models / "llama", "model.layers.1.mlp.up_proj"
    factors = pair(name, INNER, 2, WIDTH)
    adapter = write_adapter(tmp_path / "lora", factors, r=2, lora_alpha=2)
    experts = [
        {"model": adapter, "prompts": ["def f x"]},
        {"model": folder / "prose", "prompts": ["once"], "noise_scale": 0.5},
    ]
    found = built(tmp_path / "out", recipe_of(folder, *experts, seed=7))
    base, prose = (load_file(folder / n / "model.safetensors") for n in ("base", "prose"))
    place = "model.layers.1.block_sparse_moe.experts"
    added = base[f"{name}.weight"].numpy() + product(factors, name).astype(np.float32)
    np.testing.assert_array_equal(found[f"{place}.0.w3.weight"].numpy(), added)
    assert torch.equal(found[f"{place}.0.w1.weight"], base["model.layers.1.mlp.gate_proj.weight"])
    noise = draw_normal(7, f"{place}.1.w3.weight", 0, INNER * WIDTH).reshape(INNER, WIDTH)
    noisy = prose[f"{name}.weight"].numpy() + np.float32(0.5) * noise
    np.testing.assert_array_equal(found[f"{place}.1.w3.weight"].numpy(), noisy)


def test_a_llama_with_a_shared_expert_becomes_a_qwen2_moe_or_deepseek(models, tmp_path):
    for name, prompts in (("qwen2_moe", ["f"]), ("deepseek", [])):
        shared = [{"model": models / "llama" / "base", "prompts": prompts}]
        recipe = recipe_of(models / "llama", "code", "prose", shared_experts=shared)
        report = dare.moe(recipe, output=tmp_path / name, verbose=False)
        assert report.method == name
    (found,) = report.warnings
    assert (found.code, "qwen2_moe" in found.remedy) == ("remote_code", True)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2_moe", output_loading_info=True)
    assert not any(told.values())


def test_what_decides_the_bytes_decides_whether_a_mixture_resumes(models, tmp_path):
    def fingerprint(**changes):
        scaled = {"model": models / "llama/prose", "prompts": ["once"], "noise_scale": 0.1}
        recipe = recipe_of(models / "llama", "code", scaled | changes, output=tmp_path / "out")
        return plan_mixture(*load_mixture(recipe)).identity.fingerprint

    changes = {"prompts": ["king"]}, {"noise_scale": 0.2}, {"residual_scale": 0.5}
    others = {fingerprint(**change) for change in changes}
    assert len(others - {fingerprint()}) == len(changes)
    assert fingerprint() == fingerprint()


def test_a_mixture_that_exists_stays_unless_told_and_may_have_shards(models, tmp_path):
    recipe = recipe_of(models / "llama", "code", "prose")
    expected = built(tmp_path / "out", recipe)
    with pytest.raises(dare.OutputError, match="exists"):
        dare.moe(recipe, output=tmp_path / "out", verbose=False)
    dare.moe(recipe, output=tmp_path / "out", verbose=False, overwrite=True, shard_size="20kB")
    shards = [load_file(file) for file in (tmp_path / "out").glob("model-*.safetensors")]
    found = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_mixture_is_made_again_from_its_output(models, tmp_path):
    folder = tmp_path / "models"
    shutil.copytree(models / "llama", folder)
    dare.moe(recipe_of(folder, "code", "prose"), output=tmp_path / "out", verbose=False)
    assert main(["moe", str(tmp_path / "out"), "-o", str(tmp_path / "again"), "--quiet"]) == 0
    files = [tmp_path / name / "model.safetensors" for name in ("out", "again")]
    assert sha256(files[0]) == sha256(files[1])
    with pytest.raises(dare.InputError, match="dare moe"):
        dare.merge(tmp_path / "out", output=tmp_path / "merged")
    shutil.copy(folder / "base/model.safetensors", folder / "code/model.safetensors")
    with pytest.raises(dare.VerificationError, match="Nothing was written"):
        dare.moe(tmp_path / "out", output=tmp_path / "other", verbose=False)
    dare.moe(tmp_path / "out", output=tmp_path / "other", verbose=False, seed=1)
    path = tmp_path / "out" / "dare-manifest.json"
    for edit in ({"allow_pickle": True}, {"base": "s3://bucket/bait"}, {"output": "x"}):
        manifest = read_sealed(path)
        changed = {**manifest, "mixture": {**manifest["mixture"], **edit}}
        path.write_bytes(seal(changed, manifest["files"]))
        with pytest.raises(dare.InputError, match=r"(allow_pickle|bait|output): "):
            dare.moe(tmp_path / "out", output=tmp_path / "another")
        path.write_bytes(seal(manifest, manifest["files"]))
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(dare.InputError):
        dare.moe(tmp_path / "out", output=tmp_path / "another")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_base_leaves_unsaid_stays_what_it_means(tmp_path, kind):
    """The defaults of one configuration are not those of another."""
    said = {"model_type": kind, "hidden_size": 64, "intermediate_size": 96}
    said["num_attention_heads"] = 16
    experts = [{"model": name, "prompts": name} for name in ("a", "b")]

    def meanings(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = AutoConfig.from_pretrained(tmp_path)
        keys = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")
        head = getattr(found, "head_dim", None) or 64 // 16
        return [found.rope_parameters["rope_theta"], head, *(getattr(found, key) for key in keys)]

    for name, layout in LAYOUTS.items():
        if kind in layout["bases"] and name != "deepseek":
            changes = changed_config(Mixture(base="base", experts=experts), name, said)
            assert meanings({**said, **changes}) == meanings(said)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "mixtrall"}, "is not supported.*mixtral.*deepseek"),
        ({"architecture": "qwen3_moe"}, "type llama is not supported"),
        ({"shared_experts": [{"model": "a"}] * 2}, "2 shared experts.* 0 to 1"),
        ({"architecture": "qwen2_moe"}, "0 shared experts.* 1 to 1"),
        ({"output": "out.safetensors"}, "folder"),
    ],
)
def test_what_is_not_supported_is_said(models, tmp_path, settings, message):
    recipe = recipe_of(models / "llama", "code", "prose", **{"output": tmp_path / "out"} | settings)
    for entry in recipe.get("shared_experts", ()):
        entry["model"] = models / "llama" / "base"
    with pytest.raises(dare.RecipeError, match=message):
        dare.moe(recipe, verbose=False)
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_are_refused(models, tmp_path):
    write_models(tmp_path, "llama", ("base", "code"), attention_bias=True)
    with pytest.raises(dare.MismatchError, match=r"q_proj\.bias: is not supported"):
        dare.moe(recipe_of(tmp_path, "base", "code"), output=tmp_path / "out", verbose=False)
    wide = transformers.LlamaConfig.from_pretrained(models / "llama" / "base", intermediate_size=40)
    transformers.LlamaForCausalLM(wide).save_pretrained(tmp_path / "wide")
    messages = {
        tmp_path / "wide": r"mlp\.down_proj.*wide is 32×40",
        models / "qwen3" / "prose": "prose: is of type qwen3, .*llama",
    }
    for model, message in messages.items():
        recipe = recipe_of(models / "llama", "code", {"model": model, "prompts": "x"})
        with pytest.raises(dare.MismatchError, match=message):
            dare.moe(recipe, output=tmp_path / "out", verbose=False)
    (tmp_path / "base/config.json").unlink()
    with pytest.raises(dare.InputError, match=r"config\.json"):
        dare.moe(recipe_of(tmp_path, "base", "code"), output=tmp_path / "out", verbose=False)


def test_the_command_shows_what_was_built(models, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    folder = models / "llama"
    recipe.write_text(
        f'base = "{folder / "base"}"\ngates = "uniform_random"\n'
        + "".join(f'[[experts]]\nmodel = "{folder / name}"\n' for name in ("code", "prose"))
    )
    assert main(["moe", str(recipe), "-o", str(tmp_path / "out"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["method"], shown["experts"]) == ("mixtral", ["code", "prose"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- moe" in card
    assert str(tmp_path) not in card


# ---------------------------------------------------------------- gates

NAMES = ("layer 0", "layer 1")


@pytest.fixture(scope="module")
def folder(models):
    return models / "llama" / "base"


def gates(folder, kind, *prompts, **settings):
    experts = [{"model": folder, **entry} for entry in prompts]
    mixture = Mixture(base=folder, experts=experts, gates=kind, **settings)
    return make_gates(mixture, open_model(folder), folder, NAMES, 32)


@given(st.integers(0, 1 << 40), st.integers(0, 300), st.integers(0, 300))
def test_a_draw_is_a_function_of_the_position(start, skip, count):
    whole = draw_normal(1, "gate", start, skip + count)
    assert np.array_equal(whole[skip:], draw_normal(1, "gate", start + skip, count))


def test_draws_are_the_same_everywhere_and_distributed_as_promised():
    normal, uniform = draw_normal(42, "gate", 0, 100_000), draw_uniform(42, "gate", 0, 100_000, 16)
    digests = [hashlib.sha256(drawn.tobytes()).hexdigest()[:16] for drawn in (normal, uniform)]
    assert digests == ["1b7ad6e5da8cda3f", "dbc18e99c7ecaa63"]
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs(np.mean(normal < 1) - 0.8413) < 0.005
    assert uniform.min() >= -0.25
    assert uniform.max() <= 0.25
    assert abs(uniform.std() - 0.25 / np.sqrt(3)) < 0.001
    assert not np.array_equal(normal[:9], draw_normal(43, "gate", 0, 9))
    assert not np.array_equal(normal[:9], draw_normal(42, "other", 0, 9))


@pytest.mark.parametrize("kind", ["random", "uniform_random"])
def test_a_further_expert_leaves_the_others_gates_alone(folder, kind):
    two, three = (gates(folder, kind, *[{}] * count) for count in (2, 3))
    assert three.shape == (2, 3, 32)
    assert np.array_equal(three[:, :2], two)
    assert not np.array_equal(two[0], two[1])


def test_cheap_gates_are_sums_of_embeddings(folder):
    table = load_numpy(folder / "model.safetensors")["model.embed_tokens.weight"].astype(float)

    def direction(*texts):
        total = sum(table[WORDS.index(word)] for text in texts for word in ("<s>", *text.split()))
        return total / np.linalg.norm(total)

    found = gates(
        folder,
        "cheap_embed",
        {"prompts": ["def f", "return x"]},
        {"prompts": ["once upon"], "negative_prompts": ["a king"]},
    )
    other = direction("once upon") - direction("a king")
    expected = [direction("def f", "return x"), other / np.linalg.norm(other)]
    np.testing.assert_allclose(found, [expected, expected], atol=1e-7)


def test_gates_from_hidden_states_begin_with_the_embedding(folder):
    """What enters the first layer is the embedding: of the last token, or the mean of all."""
    table = load_numpy(folder / "model.safetensors")["model.embed_tokens.weight"].astype(float)
    texts = "a king", "x"
    rows = [table[[WORDS.index(word) for word in ("<s>", *text.split())]] for text in texts]
    last, mean = ([row[-1] for row in rows], [row.mean(0) for row in rows])
    for kind, wanted in (("hidden", last), ("hidden_last", last), ("hidden_avg", mean)):
        found = gates(folder, kind, *({"prompts": text} for text in texts))
        unit = [vector / np.linalg.norm(vector) for vector in wanted]
        np.testing.assert_allclose(found[0], unit, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(found[1], axis=1), 1, atol=1e-6)


def test_prompts_that_are_alike_are_noticed(folder, tmp_path):
    texts = ["once upon a time"] * 9, ["once upon a time"] * 8
    experts = [{"model": folder, "prompts": [*text, "king"]} for text in texts]
    recipe = {"base": folder, "experts": experts, "gates": "cheap_embed"}
    report = dare.moe(recipe, output=tmp_path / "out", verbose=False)
    (found,) = (notice for notice in report.warnings if notice.code == "degenerate_gates")
    assert found.subjects == ("2 of 2 layers",)
    assert "negative_prompts" in found.remedy


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path):
    write_models(tmp_path, "llama", ("base",))
    for text in ("{}", None):
        (tmp_path / "base/tokenizer.json").write_text(text or "")
        if text is None:
            (tmp_path / "base/tokenizer.json").unlink()
        with pytest.raises(dare.InputError, match=r"tokenizer\.json"):
            gates(tmp_path / "base", "cheap_embed", {"prompts": "a"}, {"prompts": "x"})


# ---------------------------------------------------------------- the recipe

YAML = """
base_model: base
gate_mode: cheap_embed
dtype: bfloat16
experts_per_token: 1
architecture: qwen
experts:
  - source_model: code
    positive_prompts: ["def f(x):"]
    negative_prompts: [once]
    residual_scale: 0.5
  - source_model: prose
    positive_prompts: [once]
    noise_scale: 0.1
shared_experts:
  - source_model: base
    positive_prompts: [the]
"""
TOML = """
base = "base"
gates = "cheap_embed"
dtype = "BF16"
experts_per_token = 1
architecture = "qwen2_moe"
threads = 2
[[experts]]
model = "code"
prompts = "def f(x):"
negative_prompts = ["once"]
residual_scale = 0.5
[[experts]]
model = "prose"
prompts = ["once"]
noise_scale = 0.1
[[shared_experts]]
model = "base"
prompts = ["the"]
"""


def load(tmp_path, text, suffix="toml", **settings):
    (tmp_path / f"recipe.{suffix}").write_text(text)
    return load_mixture(tmp_path / f"recipe.{suffix}", **settings)


def test_mergekits_configuration_says_the_same_as_ours(tmp_path):
    theirs, _ = load(tmp_path, YAML, "yml")
    ours, options = load(tmp_path, TOML)
    assert theirs == ours
    assert options.threads == 2
    assert ours.to_tables() == load_mixture(ours.to_tables())[0].to_tables()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('prompts = "def', 'prompt = "def', "prompt: not known.*prompts"),
        ("experts_per_token = 1", "experts_per_token = 3", "2 experts given"),
        ('\nprompts = ["once"]', "", "prose: has no prompts.*random"),
        ("gates", "gate", "gate: not known.*gates"),
        ("cheap_embed", "cheap", "gates = 'cheap'"),
        ('"BF16"', '"BF17"', "BF17"),
        ('model = "prose"', "", "model is missing"),
        ("noise_scale = 0.1", "noise_scale = -1", "noise_scale = -1"),
    ],
)
def test_mistakes_are_named_with_the_file(tmp_path, old, new, message):
    with pytest.raises(dare.RecipeError, match=rf"recipe\.toml: .*{message}"):
        load(tmp_path, TOML.replace(old, new, 1))


def test_experts_with_the_same_prompts_are_refused(tmp_path):
    text = TOML.replace('negative_prompts = ["once"]', "").replace('"def f(x):"', '"once"')
    with pytest.raises(dare.RecipeError, match="same for all"):
        load(tmp_path, text)
    load(tmp_path, text, gates="random")


def test_mistakes_in_yaml_are_named_with_their_lines(tmp_path):
    with pytest.raises(dare.RecipeError, match="source_model is missing"):
        load(tmp_path, YAML.replace("  - source_model: prose\n    pos", "  - pos", 1), "yaml")
    with pytest.warns(dare.DareWarning, match=r"noise \(line 14\).*noise_scale"):
        load(tmp_path, YAML.replace("noise_scale", "noise", 1), "yaml")


def test_an_output_that_is_no_mixture_is_refused(tmp_path):
    with pytest.raises(dare.InputError):
        load_mixture(tmp_path)
