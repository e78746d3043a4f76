"""mergekit's whole program on a tiny Llama, against ours on the same directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from side_by_side import assert_same, compares

import dare

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def llama_shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = 32, 48, 101
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (hidden // 2, hidden),
                "self_attn.v_proj": (hidden // 2, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    return shapes


def write_models(folder: Path, dtype: torch.dtype) -> tuple[Path, list[Path]]:
    generator = torch.Generator().manual_seed(0)
    base = {
        name: 0.02 * torch.randn(shape, generator=generator)
        for name, shape in llama_shapes().items()
    }
    tuned = [
        {
            name: tensor + 0.001 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in base.items()
        }
        for _ in range(3)
    ]
    paths = [folder / name for name in ("base", "math", "code", "chat")]
    for path, tensors in zip(paths, (base, *tuned), strict=True):
        path.mkdir()
        stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        kind = str(dtype).removeprefix("torch.")
        (path / "config.json").write_text(json.dumps({**CONFIG, "dtype": kind}))
    return paths[0], paths[1:]


def run_mergekit(folder: Path, configuration: dict[str, object]) -> dict[str, torch.Tensor]:
    """Run mergekit-yaml; JSON is YAML, so the configuration needs no library."""
    file = folder / "mergekit.yaml"
    file.write_text(json.dumps(configuration))
    output = folder / "merged-by-mergekit"
    command = [Path(sys.executable).with_name("mergekit-yaml"), file, output]
    finished = subprocess.run(
        [*command, "--no-copy-tokenizer", "--quiet"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    shards = sorted(output.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def assert_programs_agree(
    folder: Path,
    dtype: torch.dtype,
    recipe: dict[str, object],
    configuration: dict[str, object],
    weights: Sequence[float],
    density: float,
) -> None:
    """Merge the same directories with both programs and compare every tensor."""
    base, models = write_models(folder, dtype)
    shares = list(zip(models, weights, strict=True))
    theirs = run_mergekit(
        folder,
        {
            **configuration,
            "base_model": str(base),
            "models": [
                {"model": str(model), "parameters": {"weight": weight, "density": density}}
                for model, weight in shares
            ],
            "dtype": "float32",
            "out_dtype": str(dtype).removeprefix("torch."),
        },
    )

    entries = [dare.ModelEntry(file=model, weight=weight) for model, weight in shares]
    output = folder / "merged.safetensors"
    dare.merge(dare.Recipe(base=base, models=entries, output=output, verbose=False, **recipe))
    ours = load_file(output)

    assert ours.keys() == theirs.keys() == llama_shapes().keys()
    stored_base = load_file(base / "model.safetensors")
    for name, tensor in ours.items():
        assert not torch.equal(tensor, stored_base[name]), f"{name} was not merged"
        assert_same(tensor, theirs[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@compares("dare_linear", "mergekit program")
def test_dare_linear_that_drops_nothing(tmp_path, dtype):
    assert_programs_agree(
        tmp_path,
        dtype,
        {"method": "dare+linear", "stages": {"dare": {"drop_rate": 0.0}}},
        {"merge_method": "dare_linear"},
        weights=(0.2, 0.3, 0.5),
        density=1.0,
    )


@compares("ties", "mergekit program")
def test_ties(tmp_path):
    """In float32, where deltas neither cancel nor have equal magnitudes at the cut."""
    assert_programs_agree(
        tmp_path,
        torch.float32,
        {"method": "ties", "stages": {"ties": {"keep_ratio": 0.3}}, "scale": 0.7},
        {"merge_method": "ties", "parameters": {"lambda": 0.7}},
        weights=(1.0, 0.5, 2.0),
        density=0.3,
    )
