"""DARE as one writes it in a few lines of torch: everything in memory, in float32.

This is what tutorials show, and what a merge costs without a tool. At its peak it holds the base,
every model's dropped delta and one that is being dropped: 4·(models + 2) bytes for each parameter.

    python bench/plain_torch.py merged.safetensors base.safetensors a.safetensors b.safetensors
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file

DROP_RATE = 0.9
SEED = 42

State = dict[str, torch.Tensor]


def drop(delta: State, seed: int) -> State:
    """Drop most of each tensor at random and rescale what is left."""
    generator = torch.Generator().manual_seed(seed)
    keep_probability = 1 - DROP_RATE
    return {
        name: values
        * torch.bernoulli(torch.full_like(values, keep_probability), generator=generator)
        / keep_probability
        for name, values in delta.items()
    }


def subtract(model: State, base: State) -> State:
    """Return a model's delta."""
    return {name: model[name].float() - tensor for name, tensor in base.items()}


def merge(base_file: str, model_files: list[str], output_file: str) -> None:
    """Average the dropped deltas, add them to the base and store the sum as bf16."""
    base = {name: tensor.float() for name, tensor in load_file(base_file).items()}
    deltas = [
        drop(subtract(load_file(file), base), SEED + index)
        for index, file in enumerate(model_files)
    ]
    merged = {
        name: (tensor + sum(delta[name] for delta in deltas) / len(deltas)).bfloat16()
        for name, tensor in base.items()
    }
    save_file(merged, output_file)


if __name__ == "__main__":
    output, base, *models = sys.argv[1:]
    merge(base, models, output)
