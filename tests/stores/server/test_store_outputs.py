"""Outputs in S3 and in Azure's store: the same bytes as on a disk, and never something else's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load, load_file
from small_models import digests, recipe
from swift_server import SECRET_KEY

import dare
from dare.errors import OutputError
from dare.stores.reading import forget

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "settings"),
    [("out.safetensors", {}), ("out", {}), ("out", {"shard_size": 10 * MIB})],
    ids=["file", "directory", "shards"],
)
def test_an_output_in_s3_has_the_bytes_of_a_local_one(
    bucket, models, scratch, tmp_path, name, settings
):
    (tmp_path / "local").mkdir()
    dare.merge(recipe(models, tmp_path / "local" / name, **settings))
    report = dare.merge(recipe(models, bucket.url(f"runs/{name}"), **settings))
    assert report.resumed_chunks == 0
    fetched = bucket.download("runs/", tmp_path / "fetched")
    local = dare.verify(tmp_path / "local" / name)
    for place in (fetched / name, bucket.url(f"runs/{name}")):
        found = dare.verify(place)
        assert (found.ok, found.sha256) == (True, local.sha256)
    if not settings:
        assert digests(fetched) == digests(tmp_path / "local")
    assert bucket.uploads() == []
    assert list(scratch.iterdir()) == []
    with pytest.raises(OutputError, match="overwrite"):
        dare.merge(recipe(models, bucket.url(f"runs/{name}"), **settings))
    dare.merge(recipe(models, bucket.url("runs/out"), seed=9), overwrite=True)
    assert {"runs/out/dare-manifest.json", "runs/out/model.safetensors"} >= set(
        bucket.keys("runs/out/")
    )


def test_the_program_merges_from_s3_to_s3_and_verifies(bucket, models, tmp_path):
    """One recipe, one SHA-256: files to a file, S3 to S3; and safetensors loads what is there."""
    here = [str(models / f"{name}.safetensors") for name in ("base", "math", "code")]
    there = [bucket.put(f"in/{Path(file).name}", Path(file)) for file in here]
    local, stored = tmp_path / "local.safetensors", bucket.url("out.safetensors")
    for (base, *tuned), output in ((here, str(local)), (there, stored)):
        dare_program("--base", base, "--merge", *tuned, "--output", output, "--seed", "7")
    assert bucket.get("out.safetensors") == local.read_bytes()
    assert dare_program("verify", stored).startswith("Intact  6 tensors")
    assert set(load_file(local)) == set(load(bucket.get("out.safetensors")))
    scratch = str(tmp_path / "scratch")
    printed = dare_program("merge", "--recipe", stored, "--overwrite", "--scratch", scratch)
    assert bucket.get("out.safetensors") == local.read_bytes()
    for text in (printed, bucket.get("out.safetensors.manifest.json").decode()):
        assert SECRET_KEY not in text
        assert bucket.s3.access_key not in text
        assert f'"{scratch}' not in text


def test_an_output_in_azures_store_is_read_back(container, models, tmp_path, monkeypatch):
    dare.merge(recipe(models, tmp_path / "local", shard_size=14 * MIB))
    dare.merge(recipe(models, f"{container}/runs/out", shard_size=14 * MIB))
    forget()
    found = dare.verify(f"{container}/runs/out")
    assert (found.ok, found.sha256) == (True, dare.verify(tmp_path / "local").sha256)
    with pytest.raises(OutputError, match="overwrite"):
        dare.merge(recipe(models, f"{container}/runs/out"))
    monkeypatch.setattr("dare.stores.objects._is_same", lambda *_: False)
    with pytest.raises(OutputError, match="run the merge again"):
        dare.merge(recipe(models, f"{container}/another"))
    with pytest.raises(OutputError, match=r"no-such-container.*make it first"):
        dare.merge(recipe(models, "az://no-such-container/out"))


def test_only_merges_are_written_to_stores(bucket, models):
    with pytest.raises(OutputError, match="choose a path on this machine"):
        dare.compress(
            models / "base.safetensors",
            models / "math.safetensors",
            bucket.url("math.delta.safetensors"),
            drop_rate=0.9,
            verbose=False,
        )
    assert bucket.keys("") == []


def dare_program(*arguments: str) -> str:
    command = [sys.executable, "-m", "dare", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
