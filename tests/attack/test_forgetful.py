"""Merges on a file system that forgets, which confirms what `test_power_cuts.py` works out."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from interposing import CANNOT_MOUNT, HERE, why_not
from scenarios import Scenario

ALONE = ("unshare", "--user", "--map-root-user", "--mount")


def test_a_disk_that_forgets_keeps_the_old_or_the_new(
    scenario: Scenario, tmp_path, attack_size, attack_seed
):
    if attack_size == 1:
        pytest.skip("takes minutes; make test-attack runs it")
    if reason := why_not():
        pytest.skip(reason)
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("there are no user namespaces to mount in")
    program = [sys.executable, HERE / "forgetful.py", tmp_path, scenario.name]
    run = subprocess.run(
        [*ALONE, *program, str(attack_size), str(attack_seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == CANNOT_MOUNT:
        pytest.skip(run.stdout)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
