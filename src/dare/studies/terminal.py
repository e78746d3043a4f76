"""A study in a terminal, 80 columns wide or more, and a search while it runs.

Names and messages come from outside: `shown` and `printable` keep a terminal from acting on them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from dare.documents.terminal import EIGHTHS, can_write, draw_bar, make_table, print_titled, shown
from dare.documents.words import NOTHING, number, share, times
from dare.errors import printable
from dare.studies.results import (
    Conclusion,
    Difference,
    Ranked,
    StudyData,
    Trial,
    settings_text,
    value_text,
)
from dare.studies.words import VERDICTS, counted, state_text, summarize, time_text

TONES = {"ready": "green", "change": "yellow", "stop": "red", "note": "bold"}
LEAST_LABEL = 12
MOST_LABEL = 25
"""Columns that labels get before scores do, if they are long."""
BESIDE = 3
"""Columns between two others."""
LEAST_SCORE = 7
OF_A_COUNT = 8
OF_A_VERDICT = 62
"""Columns of a difference with its interval and of what is said of it."""
LONGEST_BAR = 24
MOST_MESSAGES = 5
LOOK_SECONDS = 1.0
"""Between two looks at what the trials of a running search show."""


def show_study(
    console: Console,
    data: StudyData,
    conclusion: Conclusion,
    *,
    rows: int = 12,
    failed: bool = False,
) -> None:
    """Show what was found, against what, and how sure it is; `failed` adds what failed printed."""
    _show_summary(console, data, conclusion)
    _show_differences(console, conclusion.against, "The best compared with the others")
    if conclusion.holdout is not None:
        title = "The same on held-out data"
        _show_differences(console, conclusion.holdout.against, title)
    _show_importance(console, conclusion)
    _show_ranked(console, data, conclusion.baselines, "Baselines")
    count = len(conclusion.ranking)
    title = f"The best {rows} of {count} settings" if count > rows else "Settings, best first"
    _show_ranked(console, data, conclusion.ranking[:rows], title)
    _show_failed(console, data.failed, outputs=failed)
    for remark in (*conclusion.remarks, *data.remarks):
        console.print(Text.assemble(("Note", "bold"), f"  {printable(remark)}"))


# ---------------------------------------------------------------- while it runs

Look = Callable[[], tuple[StudyData, Conclusion]]


class Display:
    """Where progress goes: a bar if there is one, else a line for each thing if it is visible."""

    def __init__(self, *, visible: bool = False, bar: Progress | None = None) -> None:
        self._visible, self._bar = visible, bar
        self._task = None if bar is None else bar.add_task("", total=None)
        self._planned = self._done = self._first = 0
        self._began = self._looked = time.monotonic()
        self._turn = threading.Lock()

    def say(self, text: str) -> None:
        """Say what is being done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=escape(printable(text)))
        else:
            self.announce(text)

    def announce(self, text: str) -> None:
        """Say something that is not to go away."""
        if self._bar is not None:
            self._bar.console.print(escape(printable(text)), highlight=False)
        elif self._visible:
            print(printable(text), file=sys.stderr, flush=True)

    def begin(self, planned: int, done: int) -> None:
        """So many trials are planned, and so many are done."""
        self._planned, self._done, self._first = planned, done, done
        self._began = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=planned, completed=done, description="")

    def scored(self, trial: Trial, look: Look) -> None:
        """A trial has ended; `look` tells what all of them show, and takes a while."""
        with self._turn:
            self._done += 1
            now = time.monotonic()
            if self._bar is None or self._task is None:
                self.say(f"trial {self._done} of {self._planned}: {trial_line(trial)}")
                return
            self._bar.advance(self._task)
            if now - self._looked > LOOK_SECONDS:
                each = (now - self._began) / (self._done - self._first)
                self.say(live_line(*look(), each * (self._planned - self._done)))
                self._looked = time.monotonic()


@contextmanager
def show_search(*, visible: bool) -> Iterator[Display]:
    """Follow a search if `visible`, on stderr: by a bar on a terminal, else line by line."""
    if not visible or not sys.stderr.isatty():
        yield Display(visible=visible)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Display(visible=True, bar=bar)


def trial_line(trial: Trial) -> str:
    """A trial in a line: what was tried, and what came of it."""
    found = "" if trial.objective is None else f" {trial.objective:.4g}"
    message = f" ({trial.message})" if trial.message else ""
    state = "" if trial.is_done else f" {trial.state}"
    tried = f"{settings_text(trial.settings)} seed={trial.seed}"
    return f"{tried}:{state}{found}{message}, {trial.seconds:.1f} s"


def live_line(data: StudyData, conclusion: Conclusion, seconds_left: float) -> str:
    """One line for the progress display: trials, the best so far, time left."""
    best = conclusion.best
    found = [] if best is None else [f"best {best.objective} {best.label}"]
    return printable(" · ".join([counted(data), *found, f"{time_text(seconds_left)} left"]))


# ---------------------------------------------------------------- what decides


def _show_summary(console: Console, data: StudyData, conclusion: Conclusion) -> None:
    summary = summarize(data, conclusion)
    style = f"bold {TONES[summary.tone]}".replace("bold bold", "bold")
    console.print(Text.assemble((summary.headline, style), f"  {printable(counted(data))}"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for place, (label, text) in enumerate(summary.facts):
        table.add_row(label, shown(text, "" if place else "bold"))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))


def _show_differences(console: Console, against: Sequence[Difference], title: str) -> None:
    if not against:
        return
    table = make_table(
        _label_column("other", max_width=max(LEAST_LABEL, console.width - OF_A_VERDICT)),
        Column("difference", justify="right", no_wrap=True),
        Column("verdict", no_wrap=True),
    )
    for item in against:
        verdict = Text(item.verdict, TONES[VERDICTS.get(item.verdict, "note")])
        table.add_row(shown(item.other), f"{item.estimate:+}", verdict)
    print_titled(console, title, table)


def _show_importance(console: Console, conclusion: Conclusion) -> None:
    known = conclusion.importance
    if not known:
        return
    table = make_table(_label_column("setting"), "importance >", "")
    solid, longest = can_write(console, EIGHTHS), max(known.values()) or 1.0
    for name, value in sorted(known.items(), key=lambda pair: -pair[1]):
        bar = draw_bar(value / longest, LONGEST_BAR, solid=solid)
        table.add_row(shown(name), share(value), Text(bar, "blue"))
    print_titled(console, "Which settings matter", table)


# ---------------------------------------------------------------- tables


def _show_ranked(console: Console, data: StudyData, ranked: Sequence[Ranked], title: str) -> None:
    if not ranked:
        return
    columns: dict[str, Callable[[Ranked], str | Text]] = {}
    longest = max(len(item.label) for item in ranked)
    if longest > MOST_LABEL:  # which is cut: the number tells which one it is
        columns["trial"] = lambda item: str(item.trials[0])
    if any(len(item.trials) > 1 for item in ranked):
        columns["seeds"] = lambda item: str(len(item.trials))
    if any(item.broken for item in ranked):
        columns["guards"] = lambda item: Text("broken", "red") if item.broken else Text("kept")
    names = data.score_names
    of_objective = max(9, *(len(value_text(item.objective.value)) for item in ranked))
    of_interval = max(12, *(len(item.objective.interval() or NOTHING) for item in ranked))
    of_score = max([LEAST_SCORE, *(len(_score(item, name)) for item in ranked for name in names)])
    room = console.width - of_objective - of_interval - 2 * BESIDE - OF_A_COUNT * len(columns)
    names_shown = names[: max(0, (room - min(longest, MOST_LABEL)) // (of_score + BESIDE))]
    room -= (of_score + BESIDE) * len(names_shown)
    table = make_table(
        _label_column("setting", max_width=max(LEAST_LABEL, room - 2)),
        Column("objective", justify="right", no_wrap=True),
        Column("95% interval", justify="right", no_wrap=True),
        *(_label_column(name, justify="right", max_width=of_score) for name in names_shown),
        *(f"{name} >" for name in columns),
    )
    for item in ranked:
        table.add_row(
            shown(item.label),
            value_text(item.objective.value),
            (item.objective.interval() or NOTHING),
            *(_score(item, name) for name in names_shown),
            *(cell(item) for cell in columns.values()),
        )
    hidden = len(names) - len(names_shown)
    more = f" ({times(hidden, 'more score')})" if hidden else ""
    print_titled(console, f"{title}{more}", table)


def _score(item: Ranked, name: str) -> str:
    return number(item.scores.get(name))


def _label_column(name: str, **looks: Any) -> Column:
    """A column of names, which are cut rather than wrapped."""
    return Column(shown(name), overflow="ellipsis", no_wrap=True, **looks)


def _show_failed(console: Console, trials: Sequence[Trial], *, outputs: bool) -> None:
    if not trials:
        return
    console.print(Text(f"{times(len(trials), 'trial')} failed", "bold red"))
    if outputs:
        for trial in trials:
            _show_output(console, trial)
        console.print()
        return
    alike: dict[str, list[Trial]] = {}
    for trial in trials:
        alike.setdefault(trial.message, []).append(trial)
    for message, same in list(alike.items())[:MOST_MESSAGES]:
        names = same[0].label if len(same) == 1 else times(len(same), "trial")
        console.print(Padding(shown(f"{names}: {message or NOTHING}"), (0, 0, 0, 2), expand=False))
    if len(alike) > MOST_MESSAGES:
        console.print(f"  and {times(len(alike) - MOST_MESSAGES, 'other message')}")
    console.print()


def _show_output(console: Console, trial: Trial) -> None:
    """One failed trial with its settings and the last lines of its evaluator."""
    head = f"{trial.label} {settings_text(trial.settings)} seed={trial.seed}"
    console.print(Padding(shown(head, "bold"), (0, 0, 0, 2), expand=False))
    console.print(Padding(shown(trial.message or state_text(trial)), (0, 0, 0, 4), expand=False))
    for line in trial.output.splitlines():
        console.print(Padding(shown(line, "dim"), (0, 0, 0, 4), expand=False))
