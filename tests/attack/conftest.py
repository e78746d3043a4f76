"""The warm process and the place that attacks happen in, one of each for a test process."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from interposing import Warm

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("lora", "formats")]
MEMORY = "/dev/shm"
SHORT_RUN = 2
"""How many scenarios each attack is tried on at size 1."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Attack all scenarios, or those that a test's module names; at size 1 a few, by seed."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "scenario" not in metafunc.fixturenames or any("scenario" in mark.args[0] for mark in marks):
        return
    from scenarios import SCENARIOS

    scenarios = list(getattr(metafunc.module, "SCENARIOS", SCENARIOS))
    if metafunc.config.getoption("--attack-size") == 1:
        seed = metafunc.config.getoption("--attack-seed"), metafunc.function.__name__
        scenarios = random.Random(repr(seed)).sample(scenarios, SHORT_RUN)
    metafunc.parametrize("scenario", scenarios, ids=lambda scenario: scenario.name)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process with dare imported."""
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc is Linux's")
    with Warm(tmp_path_factory.mktemp("warm") / "errors") as process:
        yield process


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm: Warm):
    """Inputs and a work folder; in memory at size 1, because every merge waits for the disk."""
    from scenarios import Place

    is_short = request.config.getoption("--attack-size") == 1
    if is_short and os.access(MEMORY, os.W_OK):
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            yield Place(Path(folder), warm)
    else:
        yield Place(tmp_path_factory.mktemp("attack").resolve(), warm)
