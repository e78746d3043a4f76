"""The progress bar: bytes read, on stderr, and only on a terminal.

A program that calls the package can show progress elsewhere: `progress_shown_by`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

COMPILING = "compiling kernels (once; a few seconds)"


@dataclass(frozen=True)
class Display:
    """The receiver of progress."""

    advance: Callable[[int], None]
    announce: Callable[[str], None]


Show = Callable[[int, str], AbstractContextManager[Display]]
"""A function that opens a display for a number of bytes and a verb."""
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


@contextmanager
def show_progress(total_bytes: int, verb: str, *, visible: bool) -> Iterator[Display]:
    """Show a bar if `visible` and stderr is a terminal; announcements need no terminal.

    The bar is named by a verb, such as `merging`.
    """
    if (show := _elsewhere.get()) is not None:
        with show(total_bytes, verb) as display:
            yield display
        return
    if not visible:
        yield Display(lambda _nbytes: None, lambda _text: None)
        return
    if not sys.stderr.isatty():
        yield Display(lambda _nbytes: None, lambda text: print(text, file=sys.stderr))
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn(verb),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task(verb, total=total_bytes)
        yield Display(lambda nbytes: bar.advance(task, nbytes), bar.console.print)
