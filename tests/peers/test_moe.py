"""Mixtures of experts: the same configuration for mergekit-moe and for us, tensor by tensor."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial

import pytest
import torch
import yaml
from dense_models import write_models
from safetensors.torch import load_file
from side_by_side import assert_near, assert_same, compares
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

import dare

with warnings.catch_warnings(action="ignore"):
    from mergekit.moe import router
    from mergekit.moe.config import MoEMergeConfig
    from mergekit.options import MergeOptions
    from mergekit.scripts.moe import build

pytestmark = compares("moe", "mergekit")

CASES = {
    "mixtral": ("llama", "", None),
    "deepseek": ("mistral", "deepseek", {}),
    "qwen2_moe": ("qwen2", "", {"positive_prompts": ["a king"]}),
    "qwen2_moe of llama": ("llama", "qwen", {"positive_prompts": ["a king"]}),
    "qwen3_moe": ("qwen3", "", None),
}
GATES = r"(\.mlp\.gate|shared_expert_gate)\.weight$"


def configuration(folder, case, gates):
    kind, architecture, shared = CASES[case]
    write_models(folder, kind, ("base", "code", "prose"))
    experts = {
        "code": {"positive_prompts": ["def f x"], "negative_prompts": ["once", "a king"]},
        "prose": {"positive_prompts": ["once upon a time", "king"], "residual_scale": 0.5},
    }
    document = {
        "base_model": str(folder / "base"),
        "gate_mode": gates,
        "dtype": "float32",
        "experts_per_token": 1,
        "experts": [{"source_model": str(folder / n), **own} for n, own in experts.items()],
    }
    document |= {"architecture": architecture} if architecture else {}
    if shared is not None:
        document["shared_experts"] = [{"source_model": str(folder / "base"), **shared}]
    return document


def as_theirs(ours):
    """Fuse the experts of a layer, as mergekit writes those of some architectures."""
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "block_sparse_moe": "mlp"}
    words = ([parts.get(word, word) for word in name.split(".")] for name in ours)
    fused = dict(zip(map(".".join, words), ours.values(), strict=True))
    for layer in {m[1] for name in fused if (m := re.match(r"(.*\.mlp\.experts)\.0\.", name))}:
        gate, up, down = (
            [fused.pop(f"{layer}.{n}.{part}_proj.weight") for n in (0, 1)]
            for part in ("gate", "up", "down")
        )
        fused[f"{layer}.gate_up_proj"] = torch.stack([*map(torch.cat, zip(gate, up, strict=True))])
        fused[f"{layer}.down_proj"] = torch.stack(down)
    return fused


def build_both(folder, document):
    """Build a mixture with dare and one with mergekit; return our report."""
    (folder / "moe.yml").write_text(yaml.safe_dump(document))
    with warnings.catch_warnings(action="ignore"):
        config = MoEMergeConfig.model_validate(document)
        build(config, str(folder / "theirs"), MergeOptions(), device="cpu")
    return dare.moe(folder / "moe.yml", output=folder / "ours", verbose=False)


@pytest.mark.parametrize("gates", ["cheap_embed", "hidden", "random"])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_mergekits(tmp_path, monkeypatch, case, gates):
    load = partial(load_in_float32, router.AutoModelForCausalLM.from_pretrained)
    monkeypatch.setattr(router.AutoModelForCausalLM, "from_pretrained", load)
    # transformers would split the words of a tokenizer beside a Qwen2 as that model's own does
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", PreTrainedTokenizerFast.from_pretrained)
    report = build_both(tmp_path, configuration(tmp_path, case, gates))
    assert different_settings(tmp_path, case) == {}
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("ours", "theirs"))
    assert report.method == case.split()[0]
    if case.startswith(("mixtral", "qwen3")):
        ours = as_theirs(ours)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if not re.search(GATES, name):
            assert_same(ours[name], tensor)
        elif gates != "random":
            assert_near(ours[name], tensor, 2e-6)


def different_settings(folder, case):
    folders = (folder / name for name in ("ours", "theirs"))
    if case == "deepseek":  # which only code on the hub can load
        ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in folders)
    else:
        ours, theirs = (AutoConfig.from_pretrained(folder).to_dict() for folder in folders)
    aside = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    return {k: v for k, v in ours.items() if theirs.get(k) != v and k not in aside}


def load_in_float32(load, *given, **how):
    """Load a model for hidden states, which mergekit computes in bfloat16."""
    return load(*given, **how | {"torch_dtype": torch.float32})


def test_difference_random_gates_are_drawn_by_another_generator(tmp_path):
    """They are a function of seed, name and position, and the same on every machine."""
    build_both(tmp_path, configuration(tmp_path, "mixtral", "random"))
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    gates = ours["model.layers.0.block_sparse_moe.gate.weight"]
    assert not torch.equal(gates, theirs["model.layers.0.mlp.gate.weight"])
