"""The progress of a run while it works, and its result afterwards, as people see them.

Progress is a bar on stderr, in bytes read, and only on a terminal; a program that calls the package
can show it elsewhere: `progress_shown_by`. A result shows itself as text, in notebooks, as charts
and as JSON.
"""

from __future__ import annotations

import json
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from dare.documents.document import Document


@dataclass(frozen=True)
class Display:
    """The receiver of progress."""

    advance: Callable[[int], None]
    announce: Callable[[str], None]


# A function that opens a display for a number of bytes and a verb.
Show = Callable[[int, str], AbstractContextManager[Display]]
_elsewhere: ContextVar[Show | None] = ContextVar("progress_shown_by", default=None)


@contextmanager
def progress_shown_by(show: Show) -> Iterator[None]:
    """Have all progress in here shown by `show`, also of what is to be silent, and no bar.

    A display is called by threads, once for each chunk that is read.
    """
    token = _elsewhere.set(show)
    try:
        yield
    finally:
        _elsewhere.reset(token)


# A function that is told how many bytes are read, and how many there are in all.
Progress = Callable[[int, int], None]


@contextmanager
def progress_to(callback: Progress | None) -> Iterator[None]:
    """Have a callback told of all progress in here, in place of a bar; None changes nothing."""

    def show(total_bytes: int, _verb: str) -> AbstractContextManager[Display]:
        counting, done = threading.Lock(), 0

        def advance(nbytes: int) -> None:
            nonlocal done
            with counting:  # one call at a time, so that the figures only grow
                done += nbytes
                if callback is not None:
                    callback(done, total_bytes)

        return nullcontext(Display(advance, print_aside))

    with nullcontext() if callback is None else progress_shown_by(show):
        yield


def print_aside(text: str) -> None:
    """Print on stderr."""
    print(text, file=sys.stderr)


class Meter:
    """Counts the bytes that threads have read, and shows them."""

    def __init__(self, display: Display) -> None:
        self.bytes_read = 0
        self._display = display
        self._counting = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Count bytes that were just read."""
        with self._counting:
            self.bytes_read += nbytes
        self._display.advance(nbytes)


def show_progress(total_bytes: int, verb: str, *, visible: bool) -> AbstractContextManager[Display]:
    """Show a bar if `visible` and stderr is a terminal; announcements need no terminal.

    The bar is named by a verb, such as `merging`.
    """
    if (show := _elsewhere.get()) is not None:
        return show(total_bytes, verb)
    if visible and sys.stderr.isatty():
        return _show_bar(total_bytes, verb)

    announce = print_aside if visible else lambda _text: None
    return nullcontext(Display(lambda _nbytes: None, announce))


@contextmanager
def _show_bar(total_bytes: int, verb: str) -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(verb), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(verb, total=total_bytes)
        yield Display(lambda nbytes: bar.advance(task, nbytes), bar.console.print)


# ---------------------------------------------------------------- results


def json_ready(value: Any) -> Any:
    """Return a value with NaN and infinities as the strings that `float` takes: JSON has none.

    >>> json_ready({"largest": float("inf"), "shares": (0.5, float("nan"))})
    {'largest': 'inf', 'shares': [0.5, 'nan']}
    """
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            ready = {key: json_ready(item) for key, item in value.items()}
            return value if all(ready[key] is item for key, item in value.items()) else ready
        case list() | tuple():
            items = [json_ready(item) for item in value]
            return value if all(map(operator.is_, items, value)) else items
        case _:
            return value


class Shown:
    """A result that makes a document of itself, and so has a view in notebooks and as a page."""

    def document(self) -> Document:
        """Return everything that is to be shown."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, ready for JSON."""
        return dict(json_ready(asdict(self)))  # type: ignore[call-overload]

    def to_json(self) -> str:
        """Return all of it as JSON; a number that is not finite becomes a string."""
        return json.dumps(json_ready(self.to_dict()), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """Return the document as a terminal shows it, without colours."""
        from dare.documents.terminal import render_text

        return render_text(self.document())

    def _repr_html_(self) -> str:
        from dare.documents.page import render_card

        return render_card(self.document())

    def plot(self, figure: str | None = None) -> Any:
        """Return a figure as an Altair chart, by the name that the page saves it by.

        Without a name it is the first one.
        """
        from dare.documents.page import make_chart

        return make_chart(self.document(), figure)
