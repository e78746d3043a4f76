"""The progress bar: bytes read, on stderr, and only where somebody is looking."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

COMPILING = "compiling kernels (once; a few seconds)"
"""What is announced when that is so."""


@dataclass(frozen=True)
class Display:
    """Where progress goes."""

    advance: Callable[[int], None]
    announce: Callable[[str], None]


class Meter:
    """Counts the bytes that threads have read, and shows them."""

    def __init__(self, display: Display) -> None:
        self.bytes_read = 0
        self._display = display
        self._counting = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """So many more."""
        with self._counting:
            self.bytes_read += nbytes
        self._display.advance(nbytes)


@contextmanager
def show_progress(total_bytes: int, verb: str, *, visible: bool) -> Iterator[Display]:
    """Show a bar if `visible` and stderr is a terminal; announcements need no terminal.

    The bar is named by a verb, such as `merging`.
    """
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
