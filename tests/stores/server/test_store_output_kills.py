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
from small_models import digests, recipe

import dare
from dare.errors import OutputError
from dare.output import store_lock

PROGRAM = """
import sys
from pathlib import Path
from small_models import recipe
from dare.planning import parts
import dare
parts.PART_BYTES = parts.MIN_PART_BYTES
report = dare.merge(recipe(Path(sys.argv[1]), sys.argv[2], shard_size=14 << 20))
print(report.resumed_chunks)
"""
HERE = Path(__file__).parent


def start(models: Path, output: str) -> subprocess.Popen[str]:
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, models, output],
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


@pytest.fixture(scope="session")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("expected")
    dare.merge(recipe(models, folder / "out", shard_size=14 << 20))
    return digests(folder / "out")


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_it_comes_to_the_same_end(
    bucket, proxy, models, expected, tmp_path, seed
):
    proxy.bandwidth = 12 << 20  # so that there is time to be killed in
    draw = random.Random(seed)
    for _ in range(6):
        process = start(models, bucket.url("out"))
        most = len(proxy.seen) + draw.randint(3, 25)
        wait_for(lambda most=most: len(proxy.seen) >= most)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if "out/dare-manifest.json" in bucket.keys("out/"):
            break
    proxy.clear()
    if "out/dare-manifest.json" not in bucket.keys("out/"):
        _, errors = start(models, bucket.url("out")).communicate()
        assert errors == ""
    fetched = bucket.download("out/", tmp_path / "out")
    assert digests(fetched) == expected
    assert dare.verify(fetched).ok


def test_ctrl_c_leaves_something_that_goes_on(bucket, proxy, models, expected, tmp_path):
    proxy.bandwidth = 12 << 20
    process = start(models, bucket.url("out"))
    wait_for(lambda: proxy.count("PUT", r"/0000\d\.jsonl") >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert "out.partial/lock" not in bucket.keys("")
    proxy.clear()
    output, errors = start(models, bucket.url("out")).communicate()
    assert (errors, int(output) > 0) == ("", True)
    assert digests(bucket.download("out/", tmp_path / "out")) == expected
    assert bucket.uploads() == []


def test_two_processes_do_not_write_one_output(bucket, proxy, models, expected, tmp_path):
    proxy.bandwidth = 6 << 20
    process = start(models, bucket.url("out"))
    wait_for(lambda: proxy.count("PUT", "partNumber") or process.poll() is not None)
    with pytest.raises(OutputError, match="another process is writing this output"):
        dare.merge(recipe(models, bucket.url("out"), shard_size=14 << 20))
    proxy.bandwidth = 0
    _, errors = process.communicate()
    assert errors == ""
    assert digests(bucket.download("out/", tmp_path / "out")) == expected


def test_a_process_on_another_machine_takes_over_from_a_silent_one(
    bucket, proxy, models, expected, tmp_path, monkeypatch
):
    proxy.bandwidth = 12 << 20
    process = start(models, bucket.url("out"))
    wait_for(lambda: proxy.count("PUT", r"/0000\d\.jsonl") >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGSTOP)  # it hangs, as a machine without a network would
    try:
        proxy.clear()
        monkeypatch.setattr(store_lock, "_machine", lambda: "another")
        with pytest.raises(OutputError, match="another process is writing this output"):
            dare.merge(recipe(models, bucket.url("out"), shard_size=14 << 20))
        monkeypatch.setattr(store_lock, "SILENT_SECONDS", 1.0)
        time.sleep(2)
        report = dare.merge(recipe(models, bucket.url("out"), shard_size=14 << 20))
        assert report.resumed_chunks > 0
    finally:
        process.send_signal(signal.SIGCONT)
    _, errors = process.communicate()
    assert "OutputError" in errors
    assert digests(bucket.download("out/", tmp_path / "out")) == expected
