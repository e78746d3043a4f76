"""Tables and bars in a terminal: how they look is said here, for all commands.

Names come from files that somebody else has made. What is printed by a `SafeConsole` holds nothing
that a terminal would act on, but for its own styles; `shown` also keeps a name on its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os.path import commonprefix
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from dare.errors import printable

EIGHTHS = " ▏▎▍▌▋▊▉"
ELLIPSIS = "…"


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


# ---------------------------------------------------------------- names that fit a column


def shorten(names: Iterable[str], width: int) -> dict[str, str]:
    """How names are shown in a column: whole where they fit, and never two in the same way.

    Long ones lose their middle. If two would look alike then, all lose what they have in common.

    >>> list(shorten(["math", "llama-8b-instruct-math", "llama-8b-instruct-code"], 12).values())
    ['math', 'llama-…-math', 'llama-…-code']
    >>> list(shorten(["tuned-math-final", "tuned-code-final"], 9).values())
    ['…math-fi…', '…code-fi…']
    """
    every = list(dict.fromkeys(names))
    printed = {name: printable(name) for name in every}
    long = [text for text in printed.values() if cell_len(text) > width]
    alike = commonprefix(long)  # noqa: RUF071 (of letters, as meant)
    ways: list[Callable[[str], str]] = [
        lambda text: cut_middle(text, width),
        lambda text: cut_end(ELLIPSIS + text.removeprefix(alike), width),
    ]
    for cut in ways:
        shown = [cut(text) if cell_len(text) > width else text for text in printed.values()]
        if len(set(shown)) == len(every):
            return dict(zip(every, shown, strict=True))
    return {
        name: f"{cut_end(text, width - len(str(number)) - 1)}#{number}"
        for number, (name, text) in enumerate(printed.items(), start=1)
    }


def cut_end(text: str, width: int) -> str:
    """A text without its end, if it is too long.

    >>> cut_end("a long name", 7), cut_end("short", 7)
    ('a long…', 'short')
    """
    return text if cell_len(text) <= width else _beginning(text, width - 1) + ELLIPSIS


def cut_middle(text: str, width: int) -> str:
    """A text without its middle, if it is too long.

    >>> cut_middle("models/base.safetensors", 12)
    'models…nsors'
    """
    if cell_len(text) <= width:
        return text
    first = width // 2
    last = _beginning(text[::-1], width - 1 - first)[::-1]
    return f"{_beginning(text, first)}{ELLIPSIS}{last}"


def _beginning(text: str, width: int) -> str:
    return chop_cells(text, width)[0] if width > 0 and text else ""
