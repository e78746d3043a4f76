from __future__ import annotations

import json

import numpy as np
import pytest

from dare.demo.llama import read_weights
from dare.demo.merges import BASE, TUNED
from dare.inputs.sources import open_source

ALL = [BASE, *TUNED.values()]


@pytest.mark.parametrize("folder", ALL, ids=lambda folder: folder.name)
def test_config_fits_the_weights(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = open_source(folder).tensors
    assert {info.dtype.name for info in tensors.values()} == {"BF16"}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], hidden)
    assert "lm_head.weight" not in tensors
    assert config["tie_word_embeddings"]
    last = f"model.layers.{config['num_hidden_layers'] - 1}"
    assert tensors[f"{last}.mlp.down_proj.weight"].shape == (hidden, inner)
    assert f"model.layers.{config['num_hidden_layers']}.mlp.down_proj.weight" not in tensors


@pytest.mark.parametrize("folder", ALL, ids=lambda folder: folder.name)
def test_a_token_is_a_byte(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert all(vocabulary[chr(byte)] == byte for byte in range(33, 127))
    assert vocabulary["Ġ"] == ord(" ")
    assert vocabulary["Ċ"] == ord("\n")
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == ord("\n")


@pytest.mark.parametrize("name", TUNED)
def test_a_fine_tune_changes_matrices_by_little(name):
    base, tuned = read_weights(BASE), read_weights(TUNED[name])
    assert base.keys() == tuned.keys()
    for tensor, weights in base.items():
        is_trained = "proj" in tensor
        assert np.any(weights != tuned[tensor]) == is_trained, tensor
        assert np.abs(weights - tuned[tensor]).mean() < 0.005
