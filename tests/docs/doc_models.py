"""The files that the documentation speaks of, small enough to be made for every page."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Weights = dict[str, np.ndarray]

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


ADDED = ("<think>", "</think>")
"""Tokens that the model `thinker` has and the others have not."""


def write_models(folder: Path) -> None:
    """Write base.safetensors, math.safetensors, … in bfloat16, as fine-tunes of the base.

    The directories `base` or `llama`, `math`, `code` and `thinker` are the same as a hub has them.
    """
    generator = np.random.default_rng(0)
    base = {name: 0.02 * generator.standard_normal(shape) for name, shape in SHAPES.items()}
    _save(folder / "base.safetensors", base)
    for name in ("base", "llama"):
        _save_directory(folder / name, base)
    for model in MODELS:
        changes = {
            name: np.clip(0.0005 * generator.standard_normal(shape), -LARGEST_DELTA, LARGEST_DELTA)
            for name, shape in SHAPES.items()
        }
        tuned = {n: base[n] + changes[n] for n in base}
        _save(folder / f"{model}.safetensors", tuned)
        _save_directory(folder / model, tuned)
    _save_directory(folder / "thinker", base, ADDED)


def _save_directory(folder: Path, weights: Weights, added: tuple[str, ...] = ()) -> None:
    """Write a model with its configuration and a tokenizer of words, with rows for added ones."""
    folder.mkdir()
    rows = SHAPES["lm_head.weight"][0]
    more = 0.02 * np.ones((len(added), SHAPES["lm_head.weight"][1]))
    grown = {
        name: np.concatenate([value, more]) if len(value) == rows else value
        for name, value in weights.items()
    }
    _save(folder / "model.safetensors", grown)
    config = {"model_type": "llama", "vocab_size": rows + len(added), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": rows + number, "content": token, "special": True}
            for number, token in enumerate(added)
        ],
        "model": {
            "type": "WordLevel",
            "vocab": {f"word{number}": number for number in range(rows)},
            "unk_token": "word0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _save(path: Path, weights: Weights) -> None:
    save_file({name: value.astype(ml_dtypes.bfloat16) for name, value in weights.items()}, path)
