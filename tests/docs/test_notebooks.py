"""The notebooks run, and show what is stored in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import LOOKS, ROOT
from test_pages import load

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
OF_THE_MACHINE = re.compile(
    r"(seconds|memory|threads) <b>[^<]*</b>|in [^<]* s</strong> [^<]*|loss [0-9.]+"
)


def shown(cells: list[dict[str, Any]]) -> list[list[str]]:
    """What each cell shows, without drawings and what depends on the machine."""
    texts = []
    for cell in cells:
        outputs = [output.get("data", output) for output in cell.get("outputs", ())]
        parts = [
            "".join(output[kind])
            for output in outputs
            for kind in ("text", "text/html", "text/plain")
            if kind in output
        ]
        texts.append([OF_THE_MACHINE.sub(r"\1", part) for part in parts])
    return texts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_what_is_stored_in_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.name == "training.ipynb":
        pytest.importorskip("transformers", minversion="5")
        pytest.importorskip("accelerate")
    for name, value in {**LOOKS, "COLUMNS": "88"}.items():
        monkeypatch.setenv(name, value)
    cells = json.loads(path.read_text("utf-8"))["cells"]
    done = load(ROOT / "examples" / "run_notebook.py").run_cells(cells, tmp_path, draws=False)
    hint = f"python examples/run_notebook.py examples/{path.name} stores what it shows now"
    assert shown(done) == shown(cells), hint
    assert sum(map(bool, shown(cells))) >= (6 if path.name == "merge.ipynb" else 2)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_one(path: Path) -> None:
    notebook = json.loads(path.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert "<script" not in path.read_text("utf-8")
    drawings = [
        output["data"]["image/svg+xml"][0]
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if "image/svg+xml" in output.get("data", {})
    ]
    assert all(drawing.startswith("<svg") for drawing in drawings)
    assert bool(drawings) == ("plot(" in path.read_text("utf-8"))
