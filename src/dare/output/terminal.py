"""Tables and bars in a terminal: how they look is said here, for all commands."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

EIGHTHS = " ▏▎▍▌▋▊▉"


def make_table(*columns: str | Column, **looks: Any) -> Table:
    """A table; a column whose name ends in > is aligned to the right.

    >>> table = make_table("model", "weight >")
    >>> [(str(column.header), column.justify) for column in table.columns]
    [('model', 'left'), ('weight', 'right')]
    """
    usual = {"box": SIMPLE_HEAD, "pad_edge": False, "header_style": "dim"}
    return Table(*map(_column, columns), **{**usual, **looks})


def _column(column: str | Column) -> Column:
    if isinstance(column, Column):
        return column
    name = column.removesuffix(" >")
    return Column(Text(name), justify="left" if name == column else "right", overflow="fold")


def print_titled(console: Console, title: str, table: Table) -> None:
    """A table below its title."""
    console.print(Text(title, "bold"))
    console.print(table)


def draw_bar(part: float, cells: int, *, solid: bool) -> str:
    """A bar of at most so many cells, in eighths of a cell where they can be written.

    >>> draw_bar(0.5, 5, solid=True), draw_bar(0.5, 5, solid=False), draw_bar(0.0001, 5, solid=True)
    ('██▌  ', '##   ', '▏    ')
    """
    part = min(max(part, 0.0), 1.0)
    if not solid:
        return f"{'#' * round(part * cells):{cells}}"
    eighths = max(round(part * cells * 8), 1 if part else 0)
    whole, rest = divmod(eighths, 8)
    return f"{'█' * whole + (EIGHTHS[rest] if rest else ''):{cells}}"


def can_write(console: Console, text: str) -> bool:
    """Say whether the terminal's encoding has all the letters."""
    try:
        text.encode(console.encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True
