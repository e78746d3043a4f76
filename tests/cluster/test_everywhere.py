"""One recipe, one SHA-256: threads, a cluster that loses a node, slices, and a store in and out."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from conftest import CLUSTER, chunks_done, wait_for
from helpers import sha256

sys.path.insert(0, str(Path(__file__).parents[1] / "stores"))

from servers import PYTHON, SwiftServer

METHOD = ["--method", "trim+ties", "--scope", "model", "--quiet"]


@pytest.mark.skipif(
    not PYTHON.exists(), reason="there is no store; make test-everywhere installs it"
)
def test_one_sha256_wherever_it_is_merged(cluster, models, tmp_path):
    files = [str(models / f"{name}.safetensors") for name in ("base", "math", "code")]

    def merge(output: Path | str, *more: str) -> list[str]:
        base, *tuned = files
        whole = ["merge", "--base", base, "--merge", *tuned, "--output", str(output)]
        return [*whole, *METHOD, *more]

    def run(*arguments: str, environment: Mapping[str, str] = {}) -> None:
        assert cluster.dare(*arguments, environment=environment) == (0, "")

    found = {}
    for threads in ("1", "16"):
        name = f"{threads}-threads.safetensors"
        run(*merge(tmp_path / name, "--threads", threads))
        found[name] = sha256(tmp_path / name)

    name = "four-slices.safetensors"
    for number in (2, 4, 1, 3):
        run(*merge(tmp_path / name, "--slice", f"{number}/4"))
    found[name] = sha256(tmp_path / name)

    name = "cluster.safetensors"
    process = cluster.begin(*merge(tmp_path / name, "--cluster", CLUSTER))
    wait_for(lambda: chunks_done(tmp_path / name) >= 3)
    assert process.poll() is None
    cluster.nodes["127.0.0.4"].kill()
    process.communicate(timeout=300)
    assert process.returncode == 0
    found[name] = sha256(tmp_path / name)

    with (
        tempfile.TemporaryDirectory(prefix="dare-swift-") as folder,
        SwiftServer(Path(folder)) as server,
    ):
        client = server.s3.client()
        client.create_bucket(Bucket="models")
        for file in files:
            client.upload_file(file, "models", os.path.basename(file))
        files = [f"s3://models/{os.path.basename(file)}" for file in files]
        run(*merge("s3://models/merged.safetensors"), environment=server.s3.environment)
        name = "store.safetensors"
        client.download_file("models", "merged.safetensors", str(tmp_path / name))
        found[name] = sha256(tmp_path / name)

    assert len(set(found.values())) == 1, found
    print(f"\none SHA-256, {found[name]}, for {', '.join(found)}")
