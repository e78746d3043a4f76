"""Models of some parts, and what comes of merging them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from dare.recipe.recipe import Request
from helpers import save


def make_models(folder: Path) -> Path:
    """A base and two models of 24 MiB: five parts of the least size that S3 takes."""
    draw = np.random.default_rng(0)
    shapes = {f"layers.{n}.weight": (1024, 1000 + n) for n in range(6)}
    base = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save(folder / "base.safetensors", base)
    for name in ("math", "code"):
        tuned = {k: v + 0.01 * draw.standard_normal(v.shape, np.float32) for k, v in base.items()}
        save(folder / f"{name}.safetensors", tuned)
    return folder


def recipe(models: Path, output: object, **settings: object) -> Request:
    return Request.of(
        base=models / "base.safetensors",
        models=[models / "math.safetensors", models / "code.safetensors"],
        output=output,
        verbose=False,
        **{"method": "dare+linear", "seed": 7, **settings},
    )


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "manifest" not in path.name  # which has a time in it
    }
