"""Everyday work in a Python that has no more than Windows': the same bytes and figures.

On Linux that is made believe; on other systems it is done with what they have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dare
import everyday_work
import like_windows
from helpers import eventually


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the variables of a process as on Windows."""
    if sys.platform != "linux":
        return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    folder = tmp_path_factory.mktemp("windows")
    return {**like_windows.prepare(folder / "bin"), "XDG_CACHE_HOME": str(folder)}


def printed_by(words, environment) -> str:
    command = [sys.executable, *words]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return run.stdout.decode()


def assert_ends(number: str) -> None:
    status = Path("/proc", number, "stat")

    def has_ended() -> None:
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    eventually(has_ended)


def test_everyday_work_is_the_same_without_posix(tmp_path, environment):
    here = tmp_path / "here"
    everyday_work.make_models(here)
    there = shutil.copytree(here, tmp_path / "there")
    expected = everyday_work.merge_and_analyze(here)
    printed = printed_by([everyday_work.__file__, there], environment)
    one, other = (json.dumps(str(folder))[1:-1] for folder in (there, here))
    found, searched, scored = json.loads(printed.replace(one, other))
    assert found == json.loads(json.dumps(expected))
    for output in ("out", "out.safetensors"):
        resumed, refused, is_right, _, is_replaced_right, _ = found[output]
        assert (resumed > 0, refused) == (True, [True])
        assert is_right
        assert is_replaced_right
    assert [name for name in found["left"] if "partial" in name or "replaced" in name] == []
    candidates = dare.Candidates(dare.Request.of(**everyday_work.recipe_in(here), method="sum"))
    for scale in everyday_work.SCALES:
        made = candidates.make({"scale": scale}).arrays["w0"]
        assert searched[str(scale)] == float(np.abs(made).mean())
    failed, measured, (stopped, *_) = scored
    assert failed == ["about to fail"]
    assert measured == {"sizes": 8 * everyday_work.ELEMENTS}
    assert_ends(stopped)


def test_an_evaluator_ends_with_its_parent(environment):
    code = (
        "import os, sys; from dare.run.processes import Watched; "
        f"process = Watched([sys.executable, '-c', {everyday_work.SLEEP!r}]); "
        "process.pump(lambda: process.stdout.endswith(b'\\n'), None); "
        "print(process.stdout.last_line(), flush=True); os._exit(0)"
    )
    assert_ends(printed_by(["-c", code], environment).strip())
