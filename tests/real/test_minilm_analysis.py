"""Fine-tunes of all-MiniLM-L6-v2, each made in its own way: the analysis tells how.

They are trained here, shortly, unless DARE_MINILM is a folder that training/minilm.py has filled.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from dare.analysis.judge.advice import advise
from dare.analysis.judge.judgement import Verdict
from dare.analysis.judge.prediction import predict
from dare.analysis.judge.readiness import assess
from dare.analysis.measure.analyzing import analyze
from dare.analysis.results import Kind, Origin

sys.path.append(str(Path(__file__).parents[2] / "training"))

from minilm import Settings, make, make_probe, minilm, save_others
from minilm_data import Examples, docstrings

MODELS = ("docstrings", "lora", "lora-adapter", "overtrained", "reinitialised", "copy", "bf16")
DROP_RATE = 0.9
MERGES = 10


def thinned(task, every):
    """One text in so many, so that it is quickly read."""
    parts = [
        Examples(part.texts[::every], part.targets[::every]) for part in (task.train, task.held_out)
    ]
    return replace(task, train=parts[0], held_out=parts[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if made := os.environ.get("DARE_MINILM"):
        return Path(made)
    output = tmp_path_factory.mktemp("minilm")
    task = thinned(docstrings(), 8)  # the other task's package need not be installed
    probe = make_probe(minilm(), task)
    settings = {
        "docstrings": Settings(12, 2e-4, rows=8),
        "lora": Settings(12, 2e-3, rows=8, lora_rank=8),
        "overtrained": Settings(40, 3e-3, rows=8),
    }
    for name, each in settings.items():
        make(minilm(), output, name, each, task, probe)
    save_others(minilm(), output)
    return output


@pytest.fixture(scope="module")
def found(folder):
    return analyze(minilm(), [folder / name for name in MODELS], verbose=False)


@pytest.fixture(scope="module")
def readiness(found):
    return assess(found)


def rules(readiness, name):
    return {finding.code for finding in readiness.findings if name in finding.subjects}


def test_a_full_fine_tune_is_told_and_fit_to_be_merged(found):
    model = found.model("docstrings")
    assert model.origin is Origin.FULL
    assert model.likely_rank is None
    assert 0 < model.total.relative_norm < 0.15
    alone = assess(replace(found, models=(model,), pairs=()))
    assert alone.verdict is Verdict.NO_DEFECT


def test_rows_of_tokens_that_do_not_occur_are_unchanged(found):
    assert found.model("docstrings").by_kind[Kind.EMBEDDING].sparsity > 0.5


@pytest.mark.parametrize("name", ["lora", "lora-adapter"])
def test_a_lora_is_told_with_its_rank_merged_or_not(found, readiness, name):
    model = found.model(name)
    assert (model.origin, model.likely_rank) == (Origin.LORA, 8)
    assert model.is_adapter == (name == "lora-adapter")
    assert "lora" in rules(readiness, name)


def test_a_lora_and_its_merged_weights_are_the_same_model(readiness):
    pairs = [finding.subjects for finding in readiness.findings if finding.code == "same_model"]
    assert ("lora", "lora-adapter") in pairs


def test_the_copy_is_the_base(found, readiness):
    assert found.model("copy").origin is Origin.UNCHANGED
    assert "equals_base" in rules(readiness, "copy")


def test_fresh_weights_are_unrelated(readiness):
    assert readiness.by_model["reinitialised"] is Verdict.WITH_CHANGES
    assert "unrelated" in rules(readiness, "reinitialised")


def test_what_was_trained_too_far_is_told(readiness):
    assert "large_change" in rules(readiness, "overtrained")
    assert "unrelated" not in rules(readiness, "overtrained")


def test_bfloat16_is_told(readiness):
    assert rules(readiness, "bf16") & {"rounding", "coarser_type"}


def test_the_advice_leaves_out_what_should_not_be_merged(found, readiness):
    recipe = advise(found, readiness).recipe
    files = [entry if isinstance(entry, str) else entry["file"] for entry in recipe["models"]]
    names = {Path(file).name for file in files}
    assert "docstrings" in names
    assert names.isdisjoint({"copy", "reinitialised"})


def test_the_predicted_variance_is_that_of_ten_merges(found, folder, tmp_path):
    base = load_file(minilm() / "model.safetensors")
    weights = [name for name, value in base.items() if value.dtype == np.float32]
    first = dict.fromkeys(weights, 0.0)
    second = dict.fromkeys(weights, 0.0)
    for number in range(MERGES):
        recipe = dare.Request.of(
            base=minilm(),
            models=[folder / "docstrings"],
            output=tmp_path / f"{number}.safetensors",
            method="dare+sum",
            stages={"dare": {"drop_rate": DROP_RATE}},
            seed=1000 + number,
            on_missing="base",
            verbose=False,
        )
        dare.merge(recipe)
        merged = load_file(recipe.recipe.output)
        recipe.recipe.output.unlink()
        for name in weights:
            delta = merged[name].astype(np.float64) - base[name]
            first[name] = first[name] + delta
            second[name] = second[name] + delta * delta
    elements = sum(base[name].size for name in weights)
    spread = sum(float((second[name] - first[name] ** 2 / MERGES).sum()) for name in weights)
    measured = spread / (MERGES - 1) / elements
    predicted = predict(found.model("docstrings").total, DROP_RATE).variance
    assert measured == pytest.approx(predicted, rel=0.01)
