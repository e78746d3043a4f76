"""`dare compress` and `dare apply`, as a user types them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from calling import dare, dare_succeeds

from dare.deltas.restoring import open_delta
from helpers import save, sha256

MODELS = ("base.safetensors", "math.safetensors")
DELTA = "math.delta.safetensors"
pytestmark = pytest.mark.usefixtures("folder")


def test_a_model_there_and_back() -> None:
    said = dare_succeeds("compress", *MODELS, "-o", DELTA, "--lossless")
    assert "every bit of the model" in said.out
    assert f"dare apply BASE {DELTA}" in said.out
    assert "Intact" in dare_succeeds("verify", DELTA).out
    said = dare_succeeds("apply", MODELS[0], DELTA, "-o", "again.safetensors")
    assert "bit for bit" in said.out
    assert sha256(Path("again.safetensors")) == sha256(Path(MODELS[1]))
    assert dare("apply", MODELS[0], DELTA, "-o", "again.safetensors").status == 1
    dare_succeeds("apply", MODELS[0], DELTA, "-o", "again.safetensors", "--overwrite")


def test_settings_reach_the_file() -> None:
    rates = ("--drop-rate", 0.8, "--embedding-drop-rate", 0.5, "--tensors", "*.norm.*: 0.1")
    more = ("--bits", 4, "--seed", 7, "--threads", 1, "--max-memory", "200MB")
    report = dare_succeeds("compress", *MODELS, "-o", DELTA, *rates, *more, "--json").json
    assert (report["bits"], report["drop_rate"], report["seed"]) == (4, 0.8, 7)
    assert report["bytes_written"] == Path(DELTA).stat().st_size
    tensors = open_delta(DELTA).notes.tensors
    assert {name: tensor.drop_rate for name, tensor in tensors.items()} == {
        "model.embed_tokens.weight": 0.5,
        "model.layers.0.mlp.weight": 0.8,
        "model.layers.0.norm.weight": 0.1,
        "model.position_ids": 0.0,
    }
    report = dare_succeeds("apply", MODELS[0], DELTA, "-o", "math", "--json").json
    assert report["method"] == "dare+sum"
    assert report["models"][0]["seed"] == 7
    assert dare_succeeds("compress", *MODELS, "-o", "q.delta.safetensors", "--quiet").out == ""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--lossless", "--bits", 4), 2, "leave out --drop-rate and --bits"),
        (("--tensors", "*.mlp.*"), 2, "PATTERN: RATE"),
        (("--drop-rate", 1), 1, "drop_rate = 1"),
        (("--bits", 8), 2, "bits"),
    ],
)
def test_what_cannot_be_is_said(arguments: tuple[object, ...], status: int, words: str) -> None:
    outcome = dare("compress", *MODELS, "-o", DELTA, *arguments)
    assert (outcome.status, words in outcome.err) == (status, True), outcome.err
    assert not Path(DELTA).exists()


def test_a_merged_lora_is_offered_as_one() -> None:
    generator = np.random.default_rng(1)
    base = {"q.weight": generator.standard_normal((96, 64), np.float32)}
    down, up = (generator.standard_normal(shape, np.float32) for shape in ((4, 64), (96, 4)))
    save(Path("b.safetensors"), base)
    save(Path("lora.safetensors"), {"q.weight": base["q.weight"] + 0.01 * up @ down})
    said = dare_succeeds("compress", "b.safetensors", "lora.safetensors", "-o", DELTA).out
    command = "dare lora extract --base b.safetensors --model lora.safetensors"
    assert f"{command} --output lora-lora --rank 4" in " ".join(said.split())


def test_a_delta_file_is_merged_like_a_model() -> None:
    dare_succeeds("compress", *MODELS, "-o", DELTA, "--drop-rate", 0.9)
    for model, output in ((DELTA, "a.safetensors"), (MODELS[1], "b.safetensors")):
        models = (model, "code.safetensors")
        dare_succeeds("--base", MODELS[0], "--merge", *models, "-o", output)
    assert sha256(Path("a.safetensors")) == sha256(Path("b.safetensors"))
    assert dare("analyze", MODELS[0], DELTA).status == 0
    outcome = dare("--base", DELTA, "--merge", MODELS[1], "-o", "x.safetensors")
    assert outcome.status == 1
    assert "dare apply BASE DELTA" in outcome.err
