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


MANY_TIMES = 10
"""Largest over smallest value from which a scale is logarithmic."""


def spans_decades(values: Iterable[float]) -> bool:
    """Whether values need a logarithmic scale; zeros and what is not finite do not count.

    >>> spans_decades([0.01, 0.0, 1.29]), spans_decades([0.5, 1.29])
    (True, False)
    """
    drawable = [value for value in values if value > 0 and math.isfinite(value)]
    return bool(drawable) and max(drawable) >= MANY_TIMES * min(drawable)


def bar_lengths(values: Sequence[float]) -> list[str]:
    """Lengths in per cent of the longest; what is not finite has none.

    Where values span decades the lengths follow their logarithms, from a third of the smallest.

    >>> bar_lengths([1.0, float("nan"), 4.0]), bar_lengths([0.3, 0.0, 30.0])
    (['25.0', '0.0', '100.0'], ['19.3', '0.0', '100.0'])
    """
    drawable = [value if math.isfinite(value) else 0.0 for value in values]
    if spans_decades(drawable):
        least = min(value for value in drawable if value > 0) / 3
        drawable = [math.log(value / least) if value > 0 else 0.0 for value in drawable]
    longest = max(drawable, default=0.0) or 1.0
    return [f"{100 * value / longest:.1f}" for value in drawable]
