"""The files that the documentation speaks of, small enough to be made for every page."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

MODELS = ("math", "code", "german")
LARGEST_DELTA = 0.0015

SHAPES = {
    "model.embed_tokens.weight": (96, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    "model.norm.weight": (32,),
    "lm_head.weight": (96, 32),
}


def write_models(folder: Path) -> None:
    """Write base.safetensors, math.safetensors, … in bfloat16, as fine-tunes of the base."""
    generator = np.random.default_rng(0)
    base = {name: 0.02 * generator.standard_normal(shape) for name, shape in SHAPES.items()}
    _save(folder / "base.safetensors", base)
    for model in MODELS:
        changes = {
            name: np.clip(0.0005 * generator.standard_normal(shape), -LARGEST_DELTA, LARGEST_DELTA)
            for name, shape in SHAPES.items()
        }
        _save(folder / f"{model}.safetensors", {n: base[n] + changes[n] for n in base})


def _save(path: Path, weights: dict[str, np.ndarray]) -> None:
    save_file({name: value.astype(ml_dtypes.bfloat16) for name, value in weights.items()}, path)
