"""Rows that figures are drawn from, and tables of numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
"""What a figure is drawn from; a value that is not finite is None there, and is left out."""


def finite(value: float) -> float | None:
    """The value, to five digits, if it is a number.

    >>> finite(0.1234567), finite(float("inf"))
    (0.12346, None)
    """
    return float(f"{value:.5g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class Table:
    """Numbers as text; the first of every row says whose they are."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Columns = Mapping[str, Callable[[Any], str]]
"""Columns by name, each with what it says of an item."""


def listing(items: Iterable[Any], columns: Columns) -> Table:
    """A row for each item, a column for each thing that is said of it."""
    cells = columns.values()
    return Table(tuple(columns), tuple(tuple(cell(item) for cell in cells) for item in items))


def bar_lengths(values: Sequence[float]) -> list[str]:
    """Lengths in per cent of the longest; what is not finite has none.

    >>> bar_lengths([1.0, float("nan"), 4.0])
    ['25.0', '0.0', '100.0']
    """
    drawable = [value if math.isfinite(value) else 0.0 for value in values]
    longest = max(drawable, default=0.0) or 1.0
    return [f"{100 * value / longest:.1f}" for value in drawable]
