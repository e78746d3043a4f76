"""The recipe of a mixture, and mergekit-moe's."""

from __future__ import annotations

import pytest

import dare
from dare.mixtures.mixture import load_mixture

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
