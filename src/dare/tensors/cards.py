"""Results as notebooks show them: a heading, a table, facts and remarks, in HTML.

Names of models and tensors come from files and may be hostile: every text is escaped. There are no
scripts and no colours but the notebook's, so that a card can be read in light and dark ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dare.errors import printable

MOST_ROWS = 20
"""Of a table; so many more are counted."""
_LINE = "1px solid rgba(128, 128, 128, 0.4)"
_CELL = f"padding: 0.15em 0.8em; border: 0; border-bottom: {_LINE};"
_SHAPE = f"border: {_LINE}; border-radius: 6px; padding: 0.6em 0.9em; max-width: 62em;"


def card(heading: str, *parts: str) -> str:
    """A card; the parts are what the functions below make, and empty ones are left out.

    >>> "&lt;b&gt;" in card("a model called <b>")
    True
    """
    inside = "".join(part for part in parts if part)
    return f'<div style="{_SHAPE}"><strong>{_text(heading)}</strong>{inside}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a column whose name ends in ` >` is of numbers, and aligned to the right."""
    rows = list(rows)
    if not rows:
        return ""
    sides = ["right" if name.endswith(" >") else "left" for name in columns]
    head = _row("th", [name.removesuffix(" >") for name in columns], sides)
    body = "".join(_row("td", row, sides) for row in rows[:MOST_ROWS])
    more = len(rows) - MOST_ROWS
    rest = f'<div style="opacity: 0.7;">and {more:,} more</div>' if more > 0 else ""
    looks = "border-collapse: collapse; margin: 0.5em 0; width: auto;"
    return f'<table style="{looks}"><thead>{head}</thead><tbody>{body}</tbody></table>{rest}'


def facts(values: Mapping[str, str]) -> str:
    """Names with their values, one after the other on a line."""
    shown = " · ".join(f"{_text(name)} <b>{_text(value)}</b>" for name, value in values.items())
    return f'<div style="margin: 0.3em 0;">{shown}</div>' if shown else ""


def remarks(texts: Iterable[tuple[str, str]]) -> str:
    """A list of sentences, each after its label."""
    lines = "".join(f"<li><b>{_text(label)}</b> {_text(text)}</li>" for label, text in texts)
    return f'<ul style="margin: 0.4em 0; padding-left: 1.4em;">{lines}</ul>' if lines else ""


def folded(summary: str, text: str) -> str:
    """A text of several lines that is shown on request."""
    looks = "margin: 0.3em 0; white-space: pre-wrap;"
    code = f'<pre style="{looks}">{escape(printable(text, keep=chr(10)))}</pre>'
    return f"<details><summary>{_text(summary)}</summary>{code}</details>" if text else ""


def value(given: float | Sequence[float]) -> str:
    """A number, or numbers from the first layer to the last.

    >>> value(1 / 3), value([0.5, 0.9])
    ('0.3333', '0.5 … 0.9')
    """
    numbers = given if isinstance(given, Sequence) else [given]
    return " … ".join(f"{number:.4g}" for number in numbers)


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    shown = "".join(
        f'<{tag} style="{_CELL} text-align: {side};">{_text(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{shown}</tr>"


def _text(text: str) -> str:
    return escape(printable(text))
