"""Gates: by chance and from prompts."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from dense_models import WORDS, write_models
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import dare
from dare.inputs.opening import open_model
from dare.mixtures.building import draw_normal, draw_uniform, make_gates
from dare.mixtures.mixture import Mixture

NAMES = ("layer 0", "layer 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, "llama", ("base",))
    return folder / "base"


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
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(float)

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
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(float)
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
