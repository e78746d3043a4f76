"""The warm process and the place that attacks happen in, one of each for a test process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from interposing import Warm, build, why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "lora"))


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
