"""A document: what an analysis, a study, a plan or a report has to say, as data.

Whatever has results makes a `Document` of itself by a method `document()`; `terminal`, `page` and
`notebook` show any of them. Nothing else formats for people.

    Document
    ├── title, tone, lead          the verdict: what was found, how good the news is, of what
    ├── facts, tiles, code         what decides: labelled sentences, large numbers, the recipe
    ├── sections: Section          tables, figures, texts, notices, code
    ├── notices                    problems and notes, with remedies
    └── steps                      the commands that come next
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from typing import Any

from dare.documents.notices import Notice, Severity

Spec = dict[str, Any]  # a chart as Vega-Lite, without colours
# Values that a figure is drawn from; one that is not finite is None there, and is left out.
Row = dict[str, Any]


class Tone(StrEnum):
    """The quality of the news; pages and terminals have a colour for each."""

    GOOD = "good"
    FAIR = "fair"
    POOR = "poor"
    PLAIN = "plain"


BARS = "bars"  # the bars of a table, where it names what a narrow terminal may leave out
TONES = {Severity.NOTE: Tone.PLAIN, Severity.WARNING: Tone.FAIR, Severity.SEVERE: Tone.POOR}


@dataclass(frozen=True)
class Table:
    """Numbers and words as text; the first cell of every row says whose they are.

    A column whose name ends in ` >` is of numbers, and aligned to the right.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    hint: str = ""  # a sentence below it that says how to read it
    # The tone of cells with these texts, such as verdicts.
    tones: Mapping[str, Tone] = field(default_factory=dict)
    # Columns that a narrow terminal leaves out, the first of them last; `bars` are these.
    optional: tuple[str, ...] = ()
    # For each row the length of a bar below its first number; see `bar_lengths`.
    bars: tuple[float, ...] = ()
    of_models: bool = False  # True if rows are of models, which a page can bring out
    most: int | None = None  # rows that a terminal shows; all if None


@dataclass(frozen=True)
class SortableTable:
    """Many rows that a page sorts, filters and compares; other renderers leave it out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[float | str | None, ...], ...]
    comparable: tuple[bool, ...]  # True if a row has values to compare with another's
    title: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart with what has to be said about it."""

    name: str
    title: str
    caption: str  # the content of the figure, and how to read it
    description: str  # for those who do not see it: what is drawn, and the most telling numbers
    spec: Spec
    table: Table
    models: tuple[str, ...] = ()  # the models that it shows, if not all
    width: float = 1.0  # the share of the page's width that it needs
    zooms: bool = False
    folded: bool = False  # True if it waits until somebody asks for it


@dataclass(frozen=True)
class Code:
    """A text to copy or to read verbatim, such as a recipe."""

    title: str
    name: str
    text: str
    hint: str = ""
    command: str = ""  # a command that does the same, without a file


@dataclass(frozen=True)
class Facts:
    """Labels with sentences."""

    items: tuple[tuple[str, str], ...]
    title: str = ""


@dataclass(frozen=True)
class Listing:
    """Sentences or names, one to a line."""

    title: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Folded:
    """Parts that are shown on request; a terminal leaves them out."""

    title: str
    parts: tuple[Any, ...]


# A piece of a section; a text is a paragraph. Figures are put in when a page is made.
Part = str | Table | SortableTable | Figure | Code | Facts | Listing | Folded | Notice


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading."""

    name: str
    title: str
    parts: tuple[Part, ...] = ()
    # The names of its figures, or how they begin, in the order of the page.
    figures: tuple[str, ...] = ()
    is_brief: bool = False  # True if terminal and notebook show it too
    on_page: bool = True  # True if pages show it; they may have figures of the same


@dataclass(frozen=True)
class Document:
    """Everything to show of a result."""

    title: str
    kind: str  # the page's brand: `merge report`, `search`
    tone: Tone = Tone.PLAIN
    lead: str = ""  # a phrase after the title: of what, how many, how fast
    facts: tuple[tuple[str, str], ...] = ()
    # Label, value and remark of the most telling numbers; for pages.
    tiles: tuple[tuple[str, str, str], ...] = ()
    code: Code | None = None  # things to take along, such as the recipe; for pages and notebooks
    sections: tuple[Section, ...] = ()
    notices: tuple[Notice, ...] = ()
    # The commands that come next, by a word for each.
    steps: Mapping[str, str] = field(default_factory=dict)
    done: str = ""  # a line before the steps: where the result is
    footer: str = ""
    models: tuple[str, ...] = ()  # names that a page lets one pick from
    # Draws all figures, which takes packages and time that only pages and plots need.
    draw: Callable[[], Sequence[Figure]] = tuple


# ---------------------------------------------------------------- tables

Columns = Mapping[str, Callable[[Any], str]]


def tabulate(items: Iterable[Any], columns: Columns, **looks: Any) -> Table:
    """Return a table with a row for each item; columns without any text are left out."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    filled = [any(cells) for cells in zip(*rows, strict=True)] or [True] * len(columns)
    filled[0] = True
    kept = tuple(tuple(compress(row, filled)) for row in rows)
    return Table(tuple(compress(columns, filled)), kept, **looks)


def finite(value: float) -> float | None:
    """Return the value to five digits, or None if it is not a number.

    >>> finite(0.1234567), finite(float("inf"))
    (0.12346, None)
    """
    return float(f"{value:.5g}") if math.isfinite(value) else None


MANY_TIMES = 10  # largest over smallest value from which a scale is logarithmic


def spans_decades(values: Iterable[float]) -> bool:
    """Tell if values need a logarithmic scale; zeros and what is not finite do not count.

    >>> spans_decades([0.01, 0.0, 1.29]), spans_decades([0.5, 1.29])
    (True, False)
    """
    drawable = [value for value in values if value > 0 and math.isfinite(value)]
    return bool(drawable) and max(drawable) >= MANY_TIMES * min(drawable)


def bar_lengths(values: Sequence[float]) -> tuple[float, ...]:
    """Return lengths in per cent of the longest; a value that is not finite has none.

    Where values span decades the lengths follow their logarithms, from a third of the smallest.

    >>> bar_lengths([1.0, float("nan"), 4.0]), bar_lengths([0.3, 0.0, 30.0])
    ((25.0, 0.0, 100.0), (19.3, 0.0, 100.0))
    """
    drawable = [value if math.isfinite(value) else 0.0 for value in values]
    if spans_decades(drawable):
        least = min(value for value in drawable if value > 0) / 3
        drawable = [math.log(value / least) if value > 0 else 0.0 for value in drawable]
    longest = max(drawable, default=0.0) or 1.0
    return tuple(round(100 * value / longest, 1) for value in drawable)
