"""Tables and bars in a terminal: how they look is said here, for all commands.

Names come from files that somebody else has made. What is printed by a `SafeConsole` holds nothing
that a terminal would act on, but for its own styles; `shown` also keeps a name on its line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from dare.errors import printable

EIGHTHS = " ▏▎▍▌▋▊▉"


class SafeConsole(Console):
    """A console whose texts are made printable, whatever they are part of."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Every piece that is printed, line ends apart."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)


def shown(text: str, style: str = "") -> Text:
    """A text that may hold names from outside, on one line."""
    return Text(printable(text), style)


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
    return Column(shown(name), justify="left" if name == column else "right", overflow="fold")


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
