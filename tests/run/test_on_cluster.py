"""A merge on a real cluster of three nodes; what else is tried there is in tests/cluster."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cluster"))
from inside import command, why_not


def test_three_nodes_give_the_bytes_of_one_thread():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    if reason := why_not():
        pytest.skip(f"a cluster would not be alone in its network: {reason}")
    tests = command("-k", "bytes_of_one_thread and linear")
    run = subprocess.run(tests, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
