"""Processes that write to S3 are killed at any moment; others go on, and the bytes are the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dare

SHARD = 5 << 20
PROGRAM = """
import sys
from pathlib import Path
from small_models import recipe
from dare.stores import objects
import dare
objects.PART_BYTES = 5 << 20
report = dare.merge(recipe(Path(sys.argv[1]), sys.argv[2], shard_size=int(sys.argv[3])))
print(report.resumed_chunks)
"""
HERE = Path(__file__).parent


def start(models: Path, output: str) -> subprocess.Popen[str]:
    paths = [str(HERE.parent), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, models, output, str(SHARD)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def wait_for(condition, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def check(bucket, tmp_path, expected) -> None:
    found = dare.verify(bucket.download("out/", tmp_path / "out"))
    assert (found.ok, found.sha256) == (True, expected)


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_it_comes_to_the_same_end(
    bucket, proxy, models, expected, scratch, tmp_path, seed
):
    proxy.bandwidth = 8 << 20  # so that there is time to be killed in
    draw = random.Random(seed)
    for _ in range(6):
        process = start(models, bucket.url("out"))
        most = len(proxy.seen) + draw.randint(3, 15)
        wait_for(lambda: len(proxy.seen) >= most or process.poll() is not None)  # noqa: B023
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if "out/dare-manifest.json" in bucket.keys("out/"):
            break
    proxy.clear()
    _, errors = start(models, bucket.url("out")).communicate()
    assert errors == "" or "exists already" in errors
    assert not list(scratch.iterdir())
    check(bucket, tmp_path, expected)


def test_ctrl_c_leaves_something_that_goes_on(bucket, proxy, models, expected, tmp_path):
    proxy.bandwidth = 8 << 20
    process = start(models, bucket.url("out"))
    wait_for(lambda: proxy.count("HEAD", "safetensors") >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    proxy.clear()
    output, errors = start(models, bucket.url("out")).communicate()
    assert (errors, int(output) > 0) == ("", True)
    check(bucket, tmp_path, expected)
