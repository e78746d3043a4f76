"""How a search is followed while it runs: on stderr, a live line where somebody is looking."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dare.errors import printable
from dare.studies.results import Conclusion, StudyData, Trial

EVERY_SECONDS = 1.0
"""Between two looks at what the trials show by now."""

Look = Callable[[], tuple[StudyData, Conclusion]]


class Display:
    """Where progress goes; here, nowhere."""

    def say(self, text: str) -> None:
        """Say what is being done."""

    def announce(self, text: str) -> None:
        """Say something that is not to go away."""

    def begin(self, planned: int, done: int) -> None:
        """So many trials are planned, and so many are done."""

    def scored(self, trial: Trial, look: Look) -> None:
        """A trial has ended; `look` tells what all of them show, and takes a while."""


class Lines(Display):
    """A line for each thing that happens."""

    def __init__(self) -> None:
        self._planned = self._done = 0

    def say(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def announce(self, text: str) -> None:
        self.say(text)

    def begin(self, planned: int, done: int) -> None:
        self._planned, self._done = planned, done

    def scored(self, trial: Trial, look: Look) -> None:  # noqa: ARG002
        self._done += 1
        self.say(f"trial {self._done} of {self._planned}: {told(trial)}")


class Live(Display):
    """A bar, and below it the best so far."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)
        self._looked = 0.0
        self._began = time.monotonic()
        self._first = 0
        self._turn = threading.Lock()

    def say(self, text: str) -> None:
        self._bar.update(self._task, description=_escaped(text))

    def announce(self, text: str) -> None:
        self._bar.console.print(_escaped(text), highlight=False)

    def begin(self, planned: int, done: int) -> None:
        self._bar.update(self._task, total=planned, completed=done, description="")
        self._began, self._first = time.monotonic(), done

    def scored(self, trial: Trial, look: Look) -> None:  # noqa: ARG002
        self._bar.advance(self._task)
        with self._turn:
            if time.monotonic() - self._looked < EVERY_SECONDS:
                return
            from dare.studies.terminal import live_line

            data, conclusion = look()
            task = self._bar.tasks[0]
            done = task.completed - self._first
            spent = time.monotonic() - self._began
            left = spent / done * (task.total - task.completed) if done else None
            self._bar.update(self._task, description=_escaped(live_line(data, conclusion, left)))
            self._looked = time.monotonic()


def told(trial: Trial) -> str:
    """A trial in a line: what was tried, and what came of it."""
    from dare.studies.page.words import settings_text

    found = "" if trial.objective is None else f" {trial.objective:.4g}"
    message = f" ({trial.message})" if trial.message else ""
    state = "" if trial.is_done else f" {trial.state}"
    tried = f"{settings_text(trial.settings)} seed={trial.seed}"
    return f"{tried}:{state}{found}{message}, {trial.seconds:.1f} s"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))


@contextmanager
def show_search(*, visible: bool) -> Iterator[Display]:
    """Follow a search if `visible`: by a bar on a terminal, else line by line."""
    if not visible:
        yield Display()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            yield Live(bar)
