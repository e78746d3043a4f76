"""Outputs in S3: the same bytes as on a disk, whole or not at all, and never something else's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.errors import OutputError
from dare.recipe.schema import Recipe
from helpers import save

MIB = 1 << 20


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models of 42 MiB with many tensors, so that there are several parts."""
    folder = tmp_path_factory.mktemp("models")
    draw = np.random.default_rng(0)
    shapes = {f"layers.{n}.weight": (1024, 1000 + n) for n in range(10)}
    base = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save(folder / "base.safetensors", base)
    for name in ("math", "code"):
        tuned = {k: v + 0.01 * draw.standard_normal(v.shape, np.float32) for k, v in base.items()}
        save(folder / f"{name}.safetensors", tuned)
    return folder


def recipe(models: Path, output: object, **settings: object) -> Recipe:
    return Recipe(
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


@pytest.mark.parametrize(
    ("name", "settings"),
    [("out.safetensors", {}), ("out", {}), ("out", {"shard_size": 15 * MIB})],
    ids=["file", "directory", "shards"],
)
def test_an_output_in_s3_has_the_bytes_of_a_local_one(bucket, models, tmp_path, name, settings):
    (tmp_path / "local").mkdir()
    dare.merge(recipe(models, tmp_path / "local" / name, **settings))
    report = dare.merge(recipe(models, bucket.url(f"runs/{name}"), **settings))
    assert report.resumed_chunks == 0
    fetched = bucket.download("runs/", tmp_path / "fetched")
    assert digests(fetched) == digests(tmp_path / "local")
    assert dare.verify(fetched / name).ok
    assert dare.verify(bucket.url(f"runs/{name}")).ok
    assert bucket.uploads() == []
    assert not [key for key in bucket.keys("") if ".partial" in key]
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(recipe(models, bucket.url(f"runs/{name}"), **settings))
