"""Every code block in the documentation runs, or says why it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from doc_blocks import ROOT, Block, Session, find_blocks
from doc_models import write_models

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if find_blocks(p)], ids=page_name)
def test_page(page: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = find_blocks(page)
    if any(not block.is_left_alone for block in blocks):
        shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    session = Session(tmp_path)
    session.write_files(blocks)
    for block in blocks:
        session.run(block)


def test_every_reason_is_given() -> None:
    for page in PAGES:
        for block in find_blocks(page):
            for mark in ("not run", "run by", "needs", "exit"):
                assert block.marks.get(mark, "-"), f"{block.where}: {mark} says nothing"
            runner = block.marks.get("run by")
            assert runner is None or (ROOT / runner).is_file(), f"{block.where}: no {runner}"


# ---------------------------------------------------------------- the runner itself


def make_page(folder: Path, text: str) -> list[Block]:
    page = ROOT / "docs" / "example.md"
    (folder / "example.md").write_text(text)
    found = find_blocks(folder / "example.md")
    return [Block(page, b.line, b.language, b.text, b.marks) for b in found]


def run_text(folder: Path, text: str) -> None:
    session = Session(folder)
    for block in make_page(folder, text):
        session.run(block)


@pytest.mark.parametrize(
    "text",
    [
        "```\nmake\n```",
        "```yaml\na: 1\n```",
        "```python\nraise ValueError\n```",
        "```python\n>>> 1 + 1\n3\n```",
        "```python\nprint(1)\n```\n\n```text\n2\n```",
        "```bash\nfalse\ntrue\n```",
        "```console\n$ echo a\nb\n```",
        "```console\n$ false\n$ true\n```",
        "<!-- exit: 1 -->\n```bash\ntrue\n```",
        "```toml\nmethod = 'dare+linear'\n```",
        "<!-- part of a recipe -->\n```toml\nmethod = 'no_such'\n```",
    ],
)
def test_a_wrong_block_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        run_text(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: takes an hour -->\n```bash\nfalse\n```",
        "```python\na = 1\n```\n\n```python\nassert a == 1\nprint(a)\n```\n\n```text\n1\n```",
        "```python\n>>> a = 2\n>>> a\n2\n```\n\n```python\nassert a == 2\n```",
        "```console\n$ echo a; echo b >&2\na\n...b\n$ echo c \\\n  d\nc d\n```",
        "<!-- exit: 3 -->\n```console\n$ echo a; exit 3\na\n```",
        "<!-- part of a recipe -->\n```toml\nmethod = 'dare+ties'\n```",
        "<!-- needs: no_such_module -->\n```python\nimport no_such_module\n```",
    ],
)
def test_a_right_block_passes(tmp_path: Path, text: str) -> None:
    run_text(tmp_path, text)
