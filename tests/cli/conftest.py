"""Small models in a folder of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from calling import base_arrays, tuned_arrays

from helpers import save


@pytest.fixture(scope="session")
def some_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three fine-tunes of it, in files that no test changes."""
    folder = tmp_path_factory.mktemp("models")
    base = base_arrays()
    save(folder / "base.safetensors", base)
    for seed, name in enumerate(("math", "code", "german"), start=1):
        save(folder / f"{name}.safetensors", tuned_arrays(base, seed))
    return folder


@pytest.fixture
def folder(some_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the models, in the current directory."""
    place = tmp_path / "here"
    shutil.copytree(some_models, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where measured rates are kept
    # The JavaScript of the real page takes seconds to make; tests/analysis/page has it.
    monkeypatch.setattr("dare.documents.page.drawing_bundle", lambda _version: "/* library */")
    for variable in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    return place
