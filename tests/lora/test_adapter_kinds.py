"""Adapters of other kinds than LoRA change a model as PEFT's merge_and_unload does."""

import copy
import json

import numpy as np
import pytest
from peft_models import quiet, weights
from safetensors.numpy import load_file, save_file

import dare
from dare.errors import DareError, InputError
from dare.inputs.lora import CONFIG_NAME, WEIGHTS_NAME, open_adapter
from dare.lora import merge_adapters

with quiet():
    peft = pytest.importorskip("peft")
    from architectures import build, torch

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"
BOTH = ["q_proj", "down_proj"]
STEPS = {"total_step": 10, "init_r": 4}


class Convolutions(torch.nn.Module):
    """Convolutions of every kind, with groups and without, and a layer with a bias."""

    def __init__(self):
        super().__init__()
        self.plane = torch.nn.Conv2d(4, 10, 3)
        self.point = torch.nn.Conv2d(6, 6, 1)
        self.grouped = torch.nn.Conv2d(6, 4, 3, groups=2)
        self.line = torch.nn.Conv1d(6, 10, 3)
        self.head = torch.nn.Linear(6, 3)


def model_of(name):
    if name != "convolutions":
        return build(name)[0]
    torch.manual_seed(0)
    return Convolutions()


def case(kind, model, **config):
    return pytest.param(kind, model, config, id=f"{kind} {model[:4]} {' '.join(config)}")


PLANES, ALL = ["plane", "point", "grouped", "head"], ["plane", "point", "grouped", "line", "head"]
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 5}}
CASES = [
    case("AdaLora", LLAMA, target_modules=BOTH, lora_alpha=6, **STEPS),
    case("AdaLora", LLAMA, target_modules=BOTH, lora_alpha=0, modules_to_save=["norm"], **STEPS),
    case("AdaLora", GPT2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **STEPS),
    case("AdaLora", "convolutions", target_modules=["plane", "head"], **STEPS),
    case("LoHa", LLAMA, target_modules=BOTH, r=3, alpha=6),
    case("LoHa", LLAMA, target_modules=BOTH, r=3, **PATTERNS),
    case("LoHa", LLAMA, target_modules="all-linear", r=4, init_weights=False),
    case("LoHa", "convolutions", target_modules=ALL, r=2),
    case("LoHa", "convolutions", target_modules=ALL, r=2, use_effective_conv2d=True),
    case("LoKr", LLAMA, target_modules=BOTH, r=1, alpha=3, decompose_both=True),
    case("LoKr", LLAMA, target_modules=BOTH, r=1, decompose_factor=2, **PATTERNS),
    case("LoKr", LLAMA, target_modules=BOTH, r=9, decompose_factor=4, init_weights="lycoris"),
    case("LoKr", "convolutions", target_modules=ALL, r=8),
    case("LoKr", "convolutions", target_modules=ALL, r=1, decompose_factor=2),
    case("LoKr", "convolutions", target_modules=ALL, r=2, use_effective_conv2d=True),
    case("IA3", LLAMA, target_modules=BOTH, feedforward_modules=["down_proj"]),
    case("IA3", LLAMA, target_modules=BOTH, feedforward_modules=r".*\.(up|down)_proj"),
    case("IA3", LLAMA, target_modules=BOTH, feedforward_modules=[], modules_to_save=["norm"]),
    case("IA3", GPT2, target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"]),
    case("IA3", "convolutions", target_modules=PLANES, feedforward_modules=[]),
    case("IA3", "convolutions", target_modules=PLANES, feedforward_modules=PLANES),
    case("Vera", LLAMA, target_modules=BOTH, r=5, d_initial=0.5),
    case("Vera", GPT2, target_modules=["c_attn", "c_proj"], r=4, fan_in_fan_out=True, bias="all"),
]


def train(folder, kind, name, config):
    """Save a base and an adapter with random weights; return what PEFT merges them to."""
    base = model_of(name)
    with quiet():
        tuned = peft.get_peft_model(copy.deepcopy(base), getattr(peft, f"{kind}Config")(**config))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        tuned.save_pretrained(folder / "adapter")
        if name == "convolutions":
            (folder / "base").mkdir()
            tensors = {key: value.numpy() for key, value in base.state_dict().items()}
            save_file(tensors, folder / "base" / "model.safetensors")
        else:
            base.save_pretrained(folder / "base")
        loaded = peft.PeftModel.from_pretrained(base, folder / "adapter")
        return weights(loaded.merge_and_unload())


def merge(folder, base="base", **settings):
    """Merge the adapter into the base, and read both."""
    given = {"base": folder / base, "models": [folder / "adapter"], "output": folder / "out"}
    dare.merge(**given, method="linear", verbose=False, overwrite=True, **settings)
    return (load_file(folder / name / "model.safetensors") for name in (base, "out"))


@pytest.mark.parametrize(("kind", "name", "config"), CASES)
def test_a_merge_is_that_of_peft(tmp_path, kind, name, config):
    expected = train(tmp_path, kind, name, config)
    plain, found = merge(tmp_path)
    for tensor, value in found.items():
        np.testing.assert_allclose(value, expected[tensor], rtol=1e-5, atol=3e-6, err_msg=tensor)
    changed = {tensor for tensor in plain if np.any(plain[tensor] != found[tensor])}
    assert changed == {t for t in plain if np.any(np.abs(plain[t] - expected[t]) > 1e-7)}
    assert len(changed) >= 2
