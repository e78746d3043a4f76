"""Prints what the run has found, and writes it with --agreement FILE (.json or .md)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from agreement import (
    AGREEMENT,
    HEADS,
    Subject,
    as_json,
    as_lines,
    as_markdown,
    cells,
    outcome_cells,
    outcomes_as_markdown,
)

WRITTEN = {"mergekits": "mergekit's", "peft": "PEFT", "elements own": "element's own"}
"""What the name of a function cannot hold."""
MARK = "<!-- written by: pytest tests/peers/test_yaml.py --configurations=FILE -->"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--agreement", type=Path, metavar="FILE", help="write the table as JSON or Markdown"
    )
    parser.addoption(
        "--configurations", type=Path, metavar="FILE", help="write the configurations as Markdown"
    )


def pytest_configure(config: pytest.Config) -> None:
    text = "compares(method, peer): what a test compares, for the table of agreement"
    config.addinivalue_line("markers", text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("compares")
    if marker is None:
        return (yield)
    subject = Subject(*marker.args)
    if item.name.startswith("test_difference"):
        result = yield
        AGREEMENT.reasons.append((subject, _reason(item)))
        return result
    AGREEMENT.running = (subject, item.nodeid)
    try:
        return (yield)
    finally:
        AGREEMENT.running = None


def _reason(item: pytest.Item) -> str:
    """What is different: from the name of the test, and from its docstring if it has one."""
    name = re.sub(r"\[.*", "", item.name).removeprefix("test_difference_").replace("_", " ")
    for spoken, written in WRITTEN.items():
        name = re.sub(rf"\b{spoken}\b", written, name)
    text = (getattr(item, "obj", None).__doc__ or "").partition("\n")[0].strip()
    return f"{name}." + (f" {text}" if text else "")


def with_table(page: str, table: str) -> str:
    """The page, up to its mark, and the table."""
    return page.partition(MARK)[0] + MARK + "\n\n" + table


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = AGREEMENT.rows()
    if outcomes := AGREEMENT.outcomes:
        terminalreporter.section("configurations")
        for line in as_lines(list(map(outcome_cells, outcomes))):
            terminalreporter.write_line(line)
        if target := config.getoption("--configurations"):
            target.write_text(with_table(target.read_text(), outcomes_as_markdown(outcomes)))
    if not rows:
        return
    terminalreporter.section("agreement")
    for line in as_lines([HEADS, *map(cells, rows)]):
        terminalreporter.write_line(line)
    terminalreporter.write_line("")
    for row in rows:
        for reason in row.deliberate:
            terminalreporter.write_line(f"meant: {row.method}, {row.peer}: {reason}")
    target = config.getoption("--agreement")
    if target is not None:
        versions = {name: version(name) for name in ("mergekit", "peft", "torch", "dare-merge")}
        versions["python"] = sys.version.split()[0]
        is_json = target.suffix == ".json"
        target.write_text(as_json(rows, versions) if is_json else as_markdown(rows))
