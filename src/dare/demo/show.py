"""How the demonstration looks in a terminal, 80 columns wide or 200, in colour or plain."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from dare.demo.results import Curve, Figure, Row, Writing
from dare.demo.tasks import TASKS, Example
from dare.output.terminal import EIGHTHS, can_write, draw_bar, make_table

GOOD, POOR = 80.0, 20.0
"""Percentages from which, and up to which, a cell is set off."""
LONGEST_BAR = 40


def scores_table(rows: Sequence[Row]) -> RenderableType:
    """One row for each model and merge, one column for each task."""
    names = (*(task.name for task in TASKS), "mean", "English")
    title = "Right answers to held-out prompts, in %; English in bits per byte"
    table = _table(title, "", "scale >", *(f"{name} >" for name in names))
    earlier: Row | None = None
    for row in rows:
        if earlier is not None and _kind(earlier) != _kind(row):
            table.add_section()
        earlier = row
        table.add_row(
            row.name,
            "" if row.scale is None else f"{row.scale:g}",
            *(_percentage(row.correct(task.name)) for task in TASKS),
            Text.assemble((_figure(row.mean), "bold" if row.method else "")),
            f"{row.bits_per_byte.mean:.3f}",
        )
    return table


def curves_chart(curves: Sequence[Curve], console: Console) -> RenderableType:
    """Bars: one line for each drop rate, one column for each curve."""
    room = (console.width - 12) // len(curves) - 9
    longest = max(4, min(LONGEST_BAR, room))
    solid = can_write(console, EIGHTHS)
    table = _table(
        "Right answers over drop rates, in %",
        Column("drop\nrate", justify="right", vertical="bottom"),
        *(Column(curve.name, min_width=longest + 6, vertical="bottom") for curve in curves),
    )
    for points in zip(*(curve.points for curve in curves), strict=True):
        table.add_row(
            f"{points[0][0]:g}",
            *(_bar(figure.mean, longest, solid=solid) for _, figure in points),
        )
    return table


def writings_table(
    writings: Sequence[Writing], examples: Sequence[Example], console: Console
) -> RenderableType:
    """What each model writes, right answers marked."""
    mark = "✓" if can_write(console, "✓") else "*"
    title = f"What they write after three held-out prompts ({mark} is right)"
    table = _table(title, "", *(Column(example.prompt) for example in examples))
    for writing in writings:
        cells = []
        for text, example in zip(writing.texts, examples, strict=True):
            right = text == example.answer
            shown = "".join(letter if letter.isprintable() else "·" for letter in text)
            cells.append(
                Text(f"{shown} {mark}", style="green") if right else Text(shown, style="dim")
            )
        table.add_row(writing.name, *cells)
    return table


def _table(title: str, *columns: str | Column) -> Table:
    return make_table(
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )


def _kind(row: Row) -> str:
    return "model" if row.method is None else "dare" if row.drop_rate else "plain"


def _figure(figure: Figure) -> str:
    """A mean with its spread.

    >>> _figure(Figure(92.0, 2.83)), _figure(Figure(92.0, None))
    ('92.0 ±2.8', '92.0     ')
    """
    spread = "" if figure.spread is None else f"±{figure.spread:.1f}"
    return f"{figure.mean:.1f} {spread:<4}"


def _percentage(figure: Figure) -> Text:
    style = "green" if figure.mean >= GOOD else "dim" if figure.mean <= POOR else ""
    return Text(_figure(figure), style=style)


def _bar(percentage: float, longest: int, *, solid: bool) -> Text:
    """A bar and its number.

    >>> _bar(75, 4, solid=True).plain, _bar(40, 4, solid=False).plain
    ('███  75.0', '##   40.0')
    """
    bar = draw_bar(percentage / 100, longest, solid=solid)
    return Text.assemble((bar, "cyan"), f"{percentage:5.1f}")
