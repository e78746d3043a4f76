"""Fine-tunes of all-MiniLM-L6-v2, each made in its own way: the analysis tells how."""

import ast
import inspect
import shutil
import subprocess
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from torch.nn import functional
from training import minilm
from transformers import AutoConfig, AutoModel, AutoTokenizer

import dare
from dare.analysis.advice import advise
from dare.analysis.analyzing import analyze
from dare.analysis.prediction import predict
from dare.analysis.readiness import Verdict, assess
from dare.analysis.results import Kind, Origin

MODELS = ("docstrings", "lora", "lora-adapter", "overtrained", "reinitialised", "copy", "bf16")
DROP_RATE = 0.9
MERGES = 10
ROWS = 8


def docstrings():
    """Docstrings of some of Python's modules, and whether each is a class's."""
    trees = [
        ast.parse(inspect.getsource(m)) for m in (ast, inspect, subprocess, textwrap, threading)
    ]
    nodes = [n for tree in trees for n in ast.walk(tree)]
    nodes = [n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return [(doc, isinstance(n, ast.ClassDef)) for n in nodes if (doc := ast.get_docstring(n))]


def train(model, steps, rate):
    """Teach a model and a linear head on the mean of its tokens to tell the docstrings apart."""
    torch.manual_seed(0)
    tokenizer, examples = AutoTokenizer.from_pretrained(minilm()), docstrings()
    head = torch.nn.Linear(model.config.hidden_size, 2)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [{"params": trained}, {"params": head.parameters(), "lr": 10 * rate}]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
    for _ in range(steps):
        texts, labels = zip(
            *(examples[i] for i in torch.randperm(len(examples))[:ROWS]), strict=True
        )
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
        mask = tokens["attention_mask"][..., None]
        means = (model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
        optimizer.zero_grad()
        functional.cross_entropy(head(means), torch.tensor(labels).long()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return model


def read(folder, dtype=torch.float32):
    return AutoModel.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp("minilm")
    train(read(minilm()), 12, 2e-4).save_pretrained(output / "docstrings")
    train(read(minilm()), 40, 3e-3).save_pretrained(output / "overtrained")
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value", "dense"])
    torch.manual_seed(0)
    adapted = train(get_peft_model(read(minilm()), config), 12, 2e-3)
    adapted.save_pretrained(output / "lora-adapter")
    adapted.merge_and_unload().save_pretrained(output / "lora")
    shutil.copytree(minilm(), output / "copy")
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(minilm()), dtype=torch.float32)
    fresh.save_pretrained(output / "reinitialised")
    read(output / "docstrings", torch.bfloat16).save_pretrained(output / "bf16")
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
    assert model.by_kind[Kind.EMBEDDING].sparsity > 0.5  # rows of tokens that do not occur
    alone = assess(replace(found, models=(model,), pairs=()))
    assert alone.verdict is Verdict.NO_DEFECT


@pytest.mark.parametrize("name", ["lora", "lora-adapter"])
def test_a_lora_is_told_with_its_rank_merged_or_not(found, readiness, name):
    model = found.model(name)
    assert (model.origin, model.likely_rank) == (Origin.LORA, 8)
    assert model.is_adapter == (name == "lora-adapter")
    assert "lora" in rules(readiness, name)


def test_every_model_is_told_by_its_change(found, readiness):
    pairs = [finding.subjects for finding in readiness.findings if finding.code == "same_model"]
    assert ("lora", "lora-adapter") in pairs
    assert found.model("copy").origin is Origin.UNCHANGED
    assert "equals_base" in rules(readiness, "copy")
    assert readiness.by_model["reinitialised"] is Verdict.WITH_CHANGES
    assert "unrelated" in rules(readiness, "reinitialised")
    assert "large_change" in rules(readiness, "overtrained")
    assert "unrelated" not in rules(readiness, "overtrained")
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
