"""SmolLM2 and real fine-tunes of it, merged: loads, generates, and equals a merge in torch."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from training import (
    TEXTS,
    fine_tune,
    fine_tune_lora,
    lora_deltas,
    merged_state,
    save_smollm2,
    smollm2_gguf,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import dare
from dare.inputs.opening import convert_yaml
from dare.tensors.mask import keep_mask

DROP_RATE = 0.5
SEED = 42
PROMPT = "def wrap(text, width):"
PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    base = save_smollm2(folder / "base")
    return {
        "base": base,
        "code": fine_tune(base, folder / "code", TEXTS["code"]),
        "prose": fine_tune(base, folder / "prose", TEXTS["prose"]),
        "code-lora": fine_tune_lora(base, folder / "code-lora", TEXTS["code"]),
        "prose-lora": fine_tune_lora(base, folder / "prose-lora", TEXTS["prose"]),
    }


def stored(path):
    """What a file holds: the head is the embedding, and not stored twice."""
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    return {name: value.clone() for name, value in state.items() if name != "lm_head.weight"}


@pytest.fixture(scope="session")
def base_state(models):
    return stored(models["base"])


@pytest.fixture(scope="session")
def deltas(models, base_state):
    found = {}
    for name in ("code", "prose"):
        tuned = stored(models[name])
        found[name] = {tensor: tuned[tensor] - base_state[tensor] for tensor in base_state}
        found[f"{name}-lora"] = lora_deltas(models["base"], models[f"{name}-lora"])
    return found


def mask(model, name, like):
    kept = keep_mask(name, like.numel(), DROP_RATE, SEED + model)
    return torch.from_numpy(np.asarray(kept)).reshape(like.shape)


def differing(found, expected):
    """The share of elements that differ by more than float32's rounding."""
    wrong = total = 0
    for name, tensor in expected.items():
        wrong += int((~torch.isclose(found[name], tensor, rtol=1e-5, atol=2e-6)).sum())
        total += tensor.numel()
    return wrong / total


@pytest.mark.parametrize("method", ["dare+linear", "dare+ties"])
@pytest.mark.parametrize(
    "names", [("code", "prose"), ("code-lora", "prose-lora"), ("code", "prose-lora")]
)
def test_the_merge_is_that_of_torch(models, base_state, deltas, tmp_path, method, names):
    recipe = dare.Request.of(
        base=models["base"],
        models=[models[name] for name in names],
        output=tmp_path / "merged",
        method=method,
        stages={"dare": {"drop_rate": DROP_RATE}},
        seed=SEED,
        verbose=False,
    )
    dare.merge(recipe)
    assert dare.verify(recipe.recipe.output).ok

    merged = AutoModelForCausalLM.from_pretrained(recipe.recipe.output, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(recipe.recipe.output)
    elects = method == "dare+ties"
    expected = merged_state(
        base_state, [deltas[name] for name in names], mask, DROP_RATE, elects=elects
    )
    found = {n: v for n, v in merged.state_dict().items() if n != "lm_head.weight"}
    assert found.keys() == expected.keys()
    # A sum that is zero but for rounding elects either sign, so single elements may differ.
    assert differing(found, expected) <= (1e-6 if elects else 0)

    tokens = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = merged(**tokens).logits
        reference = AutoModelForCausalLM.from_pretrained(models["base"], dtype=torch.float32)
        reference.load_state_dict(expected, strict=False)
        torch.testing.assert_close(logits, reference(**tokens).logits, rtol=1e-3, atol=1e-3)
        written = merged.generate(**tokens, max_new_tokens=8, do_sample=False)
    assert written.shape[1] == tokens.input_ids.shape[1] + 8
    assert tokenizer.decode(written[0]).startswith(PROMPT)


def test_a_gguf_file_is_a_base_like_any_other(models, tmp_path):
    """The same numbers from GGUF and from safetensors give the same weights."""
    outputs = []
    for number, base in enumerate((models["base"], smollm2_gguf())):
        recipe = dare.Request.of(
            base=base,
            models=[models["code"]],
            output=tmp_path / f"{number}.safetensors",
            dtype="BF16",
            verbose=False,
        )
        outputs.append(dare.merge(recipe).digests.output_tensors)
    assert outputs[0] == outputs[1]


STACK = """
merge_method: passthrough
dtype: float32
slices:
  - sources: [{model: code, layer_range: [0, 20]}]
  - sources: [{model: prose, layer_range: [10, 30]}]
"""
TWO_STAGES = """
name: both
merge_method: linear
dtype: float32
models:
  - {model: code, parameters: {weight: 0.4}}
  - {model: prose, parameters: {weight: 0.6}}
---
merge_method: slerp
base_model: base
dtype: float32
models:
  - model: base
  - model: both
parameters: {t: [0.3, 0.9]}
"""


@pytest.mark.parametrize("text", [STACK, TWO_STAGES], ids=["stack", "two stages"])
def test_a_configuration_gives_mergekits_model(models, tmp_path, monkeypatch, text):
    monkeypatch.chdir(models["base"].parent)
    file, theirs = tmp_path / "their.yml", tmp_path / "theirs"
    file.write_text(text)
    named = "tied" in " ".join(convert_yaml(file).differences)
    assert named == (text is STACK)
    dare.merge(file, output=tmp_path / "ours", verbose=False)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokenizer = AutoTokenizer.from_pretrained(models["base"])  # which the fine-tunes have not
    tokens = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        written = ours.generate(**tokens, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(written[0]).startswith(PROMPT)
    assert ours.config.num_hidden_layers == (40 if text is STACK else 30)

    program = PEERS / ("mergekit-multi" if text is TWO_STAGES else "mergekit-yaml")
    if not program.exists():
        pytest.skip("mergekit is not installed; make test-peers installs it")
    more = ["--out-path", theirs, "-I", tmp_path] if text is TWO_STAGES else [theirs]
    flags = ["--quiet", "--no-copy-tokenizer", "--no-write-model-card"]
    command = [PEERS / "python", program, file, *more, *flags]
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    found = AutoModelForCausalLM.from_pretrained(theirs).state_dict()
    assert ours.state_dict().keys() == found.keys()
    if text is STACK:  # its head is that of the model whose layers come last, not of the first
        prose = AutoModelForCausalLM.from_pretrained(models["prose"]).to(torch.float32)
        assert not ours.config.tie_word_embeddings
        assert torch.equal(ours.lm_head.weight, prose.lm_head.weight)
        found["lm_head.weight"] = ours.lm_head.weight
    assert differing(ours.state_dict(), found) == 0


@pytest.mark.parametrize("gates", ["cheap_embed", "hidden"])
def test_a_mixture_of_fine_tunes_generates(models, tmp_path, gates):
    """Two experts that a token both goes through are near the base, as both are."""
    prompts = {"code": ["def wrap(text, width):", "import re"], "prose": ["Once upon a time"]}
    experts = [{"model": models[name], "prompts": texts} for name, texts in prompts.items()]
    recipe = {"base": models["base"], "experts": experts, "gates": gates}
    report = dare.moe(recipe, output=tmp_path / "mixture", dtype="F32", verbose=False)
    assert report.method == "mixtral"
    assert dare.verify(report.output).ok

    mixture, told = AutoModelForCausalLM.from_pretrained(report.output, output_loading_info=True)
    assert not any(told.values())
    tokenizer = AutoTokenizer.from_pretrained(report.output)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = mixture(**tokens).logits
        base = AutoModelForCausalLM.from_pretrained(models["base"])(**tokens).logits
        written = mixture.generate(**tokens, max_new_tokens=8, do_sample=False)
    assert 0 < ((logits - base).norm() / base.norm()).item() < 0.2
    assert tokenizer.decode(written[0]).startswith(PROMPT)
