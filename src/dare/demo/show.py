"""How the demonstration looks in a terminal, 80 columns wide or 200, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

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

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart."""
MARKS = ("o", "s", "^", "D")


def scores_table(rows: Sequence[Row]) -> RenderableType:
    """One row for each model and merge, one column for each task."""
    names = (*(task.name for task in TASKS), "mean", "English")
    title = "Right answers to held-out prompts, in %; English in bits per byte"
    table = _table(title, "", "scale >", *(f"{name} >" for name in names))
    for _, alike in groupby(rows, lambda row: (row.method is None, row.drop_rate > 0)):
        table.add_section()
        for row in alike:
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
            shown = "".join(letter if letter.isprintable() else "·" for letter in text)
            is_right = text == example.answer
            cells.append(Text(f"{shown} {mark}", "green") if is_right else Text(shown, "dim"))
        table.add_row(writing.name, *cells)
    return table


def draw_curves(curves: Sequence[Curve], caption: str, file: Path) -> None:
    """Draw the curves with their spread over seeds, as PNG, SVG or whatever the name ends in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve, colour, mark in zip(curves, COLOURS, MARKS, strict=False):
        rates = [rate for rate, _ in curve.points]
        means = [point.mean for _, point in curve.points]
        spreads = [point.spread or 0.0 for _, point in curve.points]
        axes.plot(rates, means, color=colour, marker=mark, linewidth=2, label=curve.name)
        axes.fill_between(
            rates,
            [mean - spread for mean, spread in zip(means, spreads, strict=True)],
            [min(100.0, mean + spread) for mean, spread in zip(means, spreads, strict=True)],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    axes.set(xlabel="drop rate p", ylabel="right answers to held-out prompts (%)")
    axes.set(xlim=(-0.02, 1), ylim=(0, 103))
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    axes.set_title(caption, loc="left", fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Software": "dare demo"})


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
