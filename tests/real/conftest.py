"""Writes what the run has found into the tables of the documentation: --tables=FILE.

A test adds a row by `add_row(TABLE, cells, …)`, whichever process it runs in. A table follows its
mark in the file; all else is kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

# The columns of each table.
HEADS = {
    "architectures": (
        "architecture",
        "tensors",
        "the second fine-tune is stored",
        "dare+linear",
        "trim+ties",
        "slerp",
    ),
    "adapters": ("model", "adapter", "difference"),
    "formats": ("format", "loaded by", "model", "difference"),
}
MARK = "<!-- table: {} -->\n\n"


@pytest.fixture
def add_row(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function that adds a row to a table; a figure in it is shown by its size."""

    def add(table: str, *cells: str | float) -> None:
        record_property(
            table, [c if isinstance(c, str) else f"{c:.0e}" if c else "0" for c in cells]
        )

    return add


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tables", type=Path, metavar="FILE", help="write the tables of a page")


def with_table(page: str, table: str, rows: list[tuple[str, ...]]) -> str:
    """Return a page with another table behind its mark."""
    mark = MARK.format(table)
    lines = [HEADS[table], ("---",) * len(HEADS[table]), *rows]
    shown = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return re.sub(rf"{re.escape(mark)}(\|.*\n)*", lambda _: mark + shown, page)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reports = terminalreporter.getreports("passed")
    for table in HEADS:
        properties = (found for each in reports for found in each.user_properties)
        rows = sorted(row for name, row in properties if name == table)
        if rows:
            terminalreporter.section(table)
            for row in rows:
                terminalreporter.write_line("  ".join(row))
        if rows and (target := config.getoption("--tables")):
            target.write_text(with_table(target.read_text(), table, rows))
