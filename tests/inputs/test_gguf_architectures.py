"""Models of transformers in the form that llama.cpp's converter gives them, read back bit for bit.

The names are those of the gguf package; what else the converter does is written down here.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from writers import write_gguf

import dare
from dare.inputs.gguf import GgufSource
from helpers import read_tensor

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS, KEY_HEADS, EXPERTS, LAYERS = 4, 2, 3, 2
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 40,
    "layer_types": ["sliding_attention", "full_attention"],
}
FOR_EXPERTS = {"num_experts": EXPERTS, "moe_intermediate_size": 16}
# By the kind of a model: its architecture in GGUF, its type in transformers, and its settings.
KINDS = {
    "Mixtral": ("llama", "mixtral", {"num_local_experts": EXPERTS}),
    "Qwen2 MoE": (
        "qwen2moe",
        "qwen2_moe",
        {**FOR_EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "Qwen3 MoE": ("qwen3moe", "qwen3_moe", {**FOR_EXPERTS, "head_dim": 8}),
    "Phi-3": ("phi3", "phi3", {}),
    "Gemma 3": ("gemma3", "gemma3_text", {"head_dim": 8}),
    "Gemma 4": ("gemma4", "gemma4_text", {**OF_GEMMA4, "hidden_size_per_layer_input": 8}),
    "Gemma 4, experts": (
        "gemma4",
        "gemma4_text",
        {
            **OF_GEMMA4,
            **FOR_EXPERTS,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
    ),
}
NAMED_AFTER = {".router.scale": "ffn_gate_inp.scale", ".per_expert_scale": "ffn_down_exps.scale"}


def make_model(kind: str, folder: Path, *, original: bool = True):
    """Save a model of random weights, also its norms."""
    _, model_type, settings = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in (*model.parameters(), *model.buffers()):
            if weight.is_floating_point():
                weight.copy_(torch.randn_like(weight))
    model.save_pretrained(folder, save_original_format=original)
    return load_file(folder / "model.safetensors")


def convert(kind: str, tensors: dict[str, np.ndarray], path: Path, factor: float = 1.0) -> Path:
    """Write a model as llama.cpp's converter does."""
    architecture, model_type, _ = KINDS[kind]
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, LAYERS)
    heads = {"q_proj": HEADS, "k_proj": KEY_HEADS} if architecture == "llama" else {}
    made: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, stored in tensors.items():
        values, layer = stored * np.float32(factor), name.partition("layers.")[2].partition(".")[0]
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            stack = name.replace(expert[0], ".experts.")
            if model_type == "mixtral":
                stack = stack[len("model.") :].replace("block_sparse_moe", "feed_forward")
            stacks.setdefault(stack, {})[int(expert[1])] = values
        elif ending := next((own for own in NAMED_AFTER if name.endswith(own)), None):
            made[f"blk.{layer}.{NAMED_AFTER[ending]}"] = values
        else:
            if count := heads.get(name.split(".")[-2]):
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2)
            if architecture == "gemma3" and name.endswith("norm.weight"):
                values = values + np.float32(1)
            lacks = name.endswith("layer_scalar") or (".experts." in name)
            found = names.get_name(name + ".weight" * lacks, (".weight", ".bias"))
            made[found] = np.ascontiguousarray(values.reshape(stored.shape))
    for stack, parts in stacks.items():
        whole = np.stack([parts[expert] for expert in range(EXPERTS)])
        made[names.get_name(stack, (".weight",))] = whole
    counts = {"attention.head_count": HEADS, "attention.head_count_kv": KEY_HEADS}
    counts["expert_count"] = EXPERTS
    keys = {f"{architecture}.{key}": count for key, count in counts.items()}
    extra = {f"rope_factors_{n}.weight": np.ones(4, np.float32) for n in ("long", "short")}
    extra = extra if architecture == "phi3" else {"rope_freqs.weight": np.ones(4, np.float32)}
    return write_gguf(path, {**made, **extra}, architecture, keys)


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_comes_back(tmp_path, kind):
    tensors = make_model(kind, tmp_path)
    with GgufSource(convert(kind, tensors, tmp_path / "m.gguf")) as source:
        assert [remark.code for remark in source.remarks] == ["not_weights"]
        assert source.tensors.keys() == tensors.keys()
        for name, values in tensors.items():
            assert source.tensors[name].shape == values.shape
            one = np.float32(kind == "Gemma 3" and name.endswith("norm.weight"))
            assert read_tensor(source, name) == ((values + one) - one).tobytes(), name


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2 MoE"])
def test_it_is_merged_into_a_directory_in_either_layout(tmp_path, kind, original):
    tensors = make_model(kind, tmp_path / "base", original=True)
    convert(kind, tensors, tmp_path / "tuned.gguf", factor=1.5)
    if not original:  # experts are one tensor of each layer
        fused = make_model(kind, tmp_path / "base", original=False)
        assert not any(re.search(r"experts\.\d", name) for name in fused)
    given = {"base": tmp_path / "base", "models": [tmp_path / "tuned.gguf"], "method": "linear"}
    dare.merge(**given, output=tmp_path / "out", verbose=False)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("base", "out"))
    assert before.keys() == after.keys()
    for name, values in before.items():  # base + (1.5 base - base), rounded twice
        np.testing.assert_allclose(after[name], values * np.float32(1.5), rtol=1e-6)


def test_a_gate_without_its_first_dimension_comes_back(tmp_path):
    """Converters left it out until 2024."""
    name, gate = "model.layers.0.mlp.shared_expert_gate.weight", np.ones(32, np.float32)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_gate_inp_shexp.weight": gate}, "qwen2moe")
    with GgufSource(path) as source:
        assert source.tensors[name].shape == (1, 32)
