"""DARE and TIES by sd-mecha, computed in float32.

The recipe is written as its documentation does it, with all cores at work.

python bench/sd_mecha_merge.py merged.safetensors base.safetensors a.safetensors …
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import sd_mecha
import torch

DROP_RATE = 0.9
SEED = 42


def merge(output_file: str, base_file: str, model_files: list[str]) -> None:
    """Merge with as many threads as there are cores, and store the result as bf16."""
    recipe = sd_mecha.add_ties_with_dare(
        sd_mecha.model(Path(base_file)),
        *(sd_mecha.model(Path(file)) for file in model_files),
        probability=DROP_RATE,
        seed=SEED,
    )
    sd_mecha.merge(
        recipe,
        merge_dtype=torch.float32,
        output_dtype=torch.bfloat16,
        threads=os.cpu_count(),
        output=output_file,
    )


if __name__ == "__main__":
    output, base, *models = sys.argv[1:]
    merge(output, base, models)
