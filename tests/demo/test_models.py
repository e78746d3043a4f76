"""The demonstration's models: their files, and what is broken in those that spoil merges."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dare.cli import main
from dare.demo.llama import Llama, read_weights
from dare.demo.merges import BASE, BROKEN, CONFIG, NAN_AT, TIMES_TOO_FAR, TUNED, write_models
from dare.errors import OutputError
from dare.inputs.sources import open_source

ALL = [BASE, *TUNED.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    assert write_models(folder) == ["base", "add", "sort", "say", *BROKEN]
    return folder


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_configuration_and_tokenizer_fit_the_weights(path):
    config, tokenizer, generation = (
        json.loads((path / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "tokenizer", "generation_config")
    )
    tensors = open_source(path).tensors
    assert {info.dtype.name for info in tensors.values()} == {"BF16"}
    shape = (config["vocab_size"], config["hidden_size"])
    assert tensors["model.embed_tokens.weight"].shape == shape
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in tensors)
    vocabulary = tokenizer["model"]["vocab"]  # a token is a byte
    assert sorted(vocabulary.values()) == list(range(256))
    assert all(vocabulary[chr(byte)] == byte for byte in range(33, 127))
    assert [vocabulary[name] for name in "ĠĊ"] == list(b" \n")
    assert generation["eos_token_id"] == ord("\n")


@pytest.mark.parametrize("name", TUNED)
def test_a_fine_tune_changes_matrices_by_little(name):
    base, tuned = read_weights(BASE), read_weights(TUNED[name])
    assert base.keys() == tuned.keys()
    for tensor, weights in base.items():
        assert np.any(weights != tuned[tensor]) == ("proj" in tensor), tensor
        assert np.abs(weights - tuned[tensor]).mean() < 0.005


def test_the_permuted_base_computes_what_the_base_computes(folder):
    tokens = np.frombuffer(b"In the beginning God created", np.uint8).astype(np.intp)[None]
    plain, permuted = Llama(BASE, CONFIG), Llama(folder / "base-permuted", CONFIG)
    assert np.abs(plain.logits(tokens) - permuted.logits(tokens)).max() < 1e-4
    name = "model.layers.0.mlp.up_proj.weight"
    base, other = read_weights(BASE)[name], read_weights(folder / "base-permuted")[name]
    assert sorted(map(bytes, base)) == sorted(map(bytes, other))
    assert (base != other).mean() > 0.9


def test_one_weight_is_not_a_number_and_one_change_went_too_far(folder):
    base, tuned, broken, far = (
        read_weights(path) for path in (BASE, TUNED["add"], folder / "add-nan", folder / "add-far")
    )
    for name, origin in base.items():
        wanted = origin + TIMES_TOO_FAR * (tuned[name] - origin)
        assert np.abs(far[name] - wanted).max() <= np.abs(wanted).max() / 256
        places = [NAN_AT[1]] if name == NAN_AT[0] else []
        assert np.flatnonzero(broken[name] != tuned[name]).tolist() == places
    assert np.isnan(broken[NAN_AT[0]]).any()


def test_models_are_written_once_and_never_over_others(folder, tmp_path, capsys):
    assert write_models(folder) == ["base", "add", "sort", "say", *BROKEN]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("mine")
    with pytest.raises(OutputError, match=r"config.json: .*empty folder"):
        write_models(tmp_path)
    assert main(["demo", "--models", str(folder)]) == 0
    assert "--method sum" in capsys.readouterr().out
