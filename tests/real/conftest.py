"""Writes what the run has found into the tables of the documentation: --architectures=FILE.

A test adds a row by `record_property(TABLE, (cells, …))`, whichever process it runs in. The table
follows the mark in the file; what stands before it is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

HEADS = {
    "architectures": (
        "architecture",
        "tensors",
        "the second fine-tune is stored",
        "dare+linear",
        "trim+ties",
        "slerp",
    ),
}
"""For each table its columns. The name of the table is that of the option."""
MARK = "<!-- written by: pytest tests/real --{}=FILE -->"


def pytest_addoption(parser: pytest.Parser) -> None:
    for table in HEADS:
        parser.addoption(f"--{table}", type=Path, metavar="FILE", help=f"write the {table}")


def with_table(page: str, table: str, rows: list[tuple[str, ...]]) -> str:
    """The page up to the mark, and the table."""
    mark = MARK.format(table)
    lines = [HEADS[table], ("---",) * len(HEADS[table]), *rows]
    shown = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{page.partition(mark)[0]}{mark}\n\n{shown}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reports = terminalreporter.getreports("passed")
    for table in HEADS:
        rows = [row for each in reports for name, row in each.user_properties if name == table]
        if rows:
            terminalreporter.section(table)
            for row in rows:
                terminalreporter.write_line("  ".join(row))
        if rows and (target := config.getoption(f"--{table}")):
            target.write_text(with_table(target.read_text(), table, rows))
