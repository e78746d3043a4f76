"""all-MiniLM-L6-v2 and a model with three more tokens: united, or cut to the base's vocabulary."""

import json
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file
from training import minilm
from transformers import AutoModel, AutoTokenizer

import dare

WORDS = "embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    model, tokenizer = AutoModel.from_pretrained(minilm()), AutoTokenizer.from_pretrained(minilm())
    tokenizer.add_tokens(["<math>", "plusplus"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.get_input_embeddings().weight.data += 0.001
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def merged(tuned, output, **settings):
    """The merged directory; its embedding, those of the base and of the model."""
    recipe = dare.Request.of(
        base=minilm(),
        models=[tuned],
        output=output,
        method="linear",
        on_missing="base",
        verbose=False,
        **settings,
    )
    dare.merge(recipe)
    folders = (output, minilm(), tuned)
    return [load_file(folder / "model.safetensors")[WORDS] for folder in folders]


def load(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)


def test_a_union_loads_and_has_the_right_rows(tuned, tmp_path):
    rows, before, after = merged(tuned, tmp_path / "out", vocabulary="union")
    expected = np.concatenate([before + (after[:30522] - before), after[30522:]])
    np.testing.assert_array_equal(rows, expected)
    tokenizer, model = load(tmp_path / "out")
    ids = tokenizer("a <math> plusplus <|tool|> b", padding=False)["input_ids"]
    assert ids == [101, 1037, 30522, 30523, 30524, 1038, 102]
    assert tokenizer.decode([1037, 30524, 1038], skip_special_tokens=True) == "a b"
    assert model.config.vocab_size == 30525
    np.testing.assert_array_equal(model.get_input_embeddings().weight.detach().numpy(), rows)


def test_a_models_vocabulary_and_chosen_rows_load(tuned, tmp_path):
    tokens = {
        "plusplus": {"model": "base", "token": "plus", "force": True},
        "<|new|>": {"model": tuned.name, "token": "<math>"},
    }
    settings = {"vocabulary": tuned.name, "tokens": tokens, "pad_to_multiple_of": 64}
    rows, before, after = merged(tuned, tmp_path / "out", **settings)
    tokenizer, model = load(tmp_path / "out")
    ids = tokenizer("a <math> plusplus <|new|> b")["input_ids"]
    assert ids == [101, 1037, 30522, 30523, 30525, 1038, 102]
    plus = tokenizer.convert_tokens_to_ids("plus")
    np.testing.assert_array_equal(rows[:30522], before + (after[:30522] - before))
    expected = [after[30522], before[plus], after[30524], after[30522]]
    np.testing.assert_array_equal(rows[30522:30526], expected)
    assert rows.shape[0] == model.config.vocab_size == 30528
    assert not rows[30526:].any()


def test_the_base_keeps_its_vocabulary(tuned, tmp_path):
    settings = {"vocabulary": "base", "copy_from": tuned.name}
    rows, before, after = merged(tuned, tmp_path / "out", **settings)
    np.testing.assert_array_equal(rows, before + (after[:30522] - before))
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["vocab_size"] == 30522
    tokenizer = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert tokenizer == (minilm() / "tokenizer.json").read_bytes()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 30522


def test_a_difference_is_named(tuned):
    recipe = dare.Request.of(base=minilm(), models=[tuned], on_missing="base", verbose=False)
    with pytest.raises(dare.MismatchError, match=r"3 of its tokens .*: '<math>' 30522, 'plusplus'"):
        dare.plan(recipe)
