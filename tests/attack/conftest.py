"""The warm process and the place that attacks happen in, one of each for a test process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from interposing import Warm, build, why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "lora"))
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
    """A process with dare imported, under the interposer."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("interposer")
    with Warm(build(folder), folder / "errors") as process:
        yield process


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, warm: Warm):
    """Inputs and a work folder."""
    from scenarios import Place

    return Place(tmp_path_factory.mktemp("attack").resolve(), warm)
