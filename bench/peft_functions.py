"""DARE with PEFT's merge functions on whole checkpoints, tensor by tensor, in float32.

PEFT applies them to LoRA adapters; the functions themselves take any task tensors. This loop around
them reads one tensor of every model at a time, and holds the merged model in memory to save it.

    python bench/peft_functions.py METHOD merged.safetensors base.safetensors a.safetensors …

METHOD is dare_linear or dare_ties.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
from peft.utils import merge_utils
from safetensors import safe_open
from safetensors.torch import save_file

DENSITY = 0.1
SEED = 42


def merge(method: str, output_file: str, base_file: str, model_files: list[str]) -> None:
    """Merge file by file, tensor by tensor, and store the result as bf16."""
    combine = getattr(merge_utils, method)
    weights = torch.full((len(model_files),), 1 / len(model_files))
    torch.manual_seed(SEED)
    merged = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, "pt")) for f in (base_file, *model_files)]
        for name in files[0].keys():  # noqa: SIM118 (not a dict)
            base, *tuned = (file.get_tensor(name).float() for file in files)
            delta = combine([tensor - base for tensor in tuned], weights, DENSITY)
            merged[name] = (base + delta).bfloat16()
    save_file(merged, output_file)


if __name__ == "__main__":
    method, output, base, *models = sys.argv[1:]
    merge(method, output, base, models)
