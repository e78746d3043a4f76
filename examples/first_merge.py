"""Merge three models and look at what was done.

The models are made up here, Llama-shaped with random weights, so this shows the tool and not what
merging does to a model's abilities.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import dare

HIDDEN, LAYERS, VOCABULARY = 512, 4, 8000


def make_models(folder: Path) -> list[Path]:
    """Write a base and three fine-tunes of it, in bfloat16; return their files."""
    generator = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            shapes[f"model.layers.{layer}.mlp.{name}.weight"] = (4 * HIDDEN, HIDDEN)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (HIDDEN, 4 * HIDDEN)
    base = {name: 0.02 * generator.standard_normal(s, np.float32) for name, s in shapes.items()}

    files = []
    for name in ("base", "math", "code", "german"):
        change = 0.0 if name == "base" else 0.0005
        weights = {
            tensor: (value + change * generator.standard_normal(value.shape, np.float32)).astype(
                ml_dtypes.bfloat16
            )
            for tensor, value in base.items()
        }
        files.append(folder / f"{name}.safetensors")
        save_file(weights, files[-1])
    return files


def main() -> None:
    """Make models, plan, merge, verify."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, *models = make_models(folder)
        recipe = dare.Recipe(
            base=base,
            models=models,
            output=folder / "merged.safetensors",
            method="dare+ties",
            stages={"dare": {"drop_rate": 0.9}},
            embedding_drop_rate=0.5,
            delta_threshold=0.005,
        )
        print("The recipe:\n")
        print(recipe.to_toml())
        print("The plan:\n")
        print(dare.plan(recipe))
        print("\nThe merge:\n")
        print(dare.merge(recipe))
        print("\nThe check:\n")
        print(dare.verify(recipe.output))


if __name__ == "__main__":
    main()
