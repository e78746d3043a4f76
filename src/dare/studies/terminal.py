"""A study in a terminal, 80 columns wide or more: what decides comes first, then the tables.

Names and messages come from outside: `shown` and `printable` keep a terminal from acting on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from dare.errors import printable
from dare.output.page.words import NOTHING, number, share
from dare.output.terminal import EIGHTHS, can_write, draw_bar, make_table, print_titled, shown
from dare.studies.page import series
from dare.studies.page.words import (
    VERDICTS,
    counted,
    difference_text,
    interval_text,
    settings_text,
    state_text,
    summarize,
    time_text,
    trial_name,
    value_text,
)
from dare.studies.results import Conclusion, Difference, Ranked, StudyData, Trial
from dare.tensors.sizes import times

TONES = {"ready": "green", "change": "yellow", "stop": "red", "note": "bold"}
LEAST_LABEL = 12
MOST_LABEL = 20
"""Columns that labels get before scores do, if they are long."""
BESIDE = 3
"""Columns between two others."""
LEAST_SCORE = 7
OF_A_COUNT = 8
OF_A_VERDICT = 62
"""Columns of a difference with its interval and of what is said of it."""
LONGEST_BAR = 24
MOST_STEPS = 20
"""Values of a setting in the chart."""
MOST_MESSAGES = 5


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
    _show_curve(console, data, conclusion)
    _show_ranked(console, data, conclusion.baselines, "Baselines")
    count = len(conclusion.ranking)
    title = f"The best {rows} of {count} settings" if count > rows else "Settings, best first"
    _show_ranked(console, data, conclusion.ranking[:rows], title)
    _show_failed(console, series.failed_trials(data), outputs=failed)
    for remark in (*conclusion.remarks, *data.remarks):
        console.print(Text.assemble(("Note", "bold"), f"  {printable(remark)}"))


def live_line(data: StudyData, conclusion: Conclusion, seconds_left: float | None) -> str:
    """One line for the progress display: trials, the best so far, what matters, time left."""
    best = conclusion.best
    parts = [counted(data)]
    if best is not None:
        parts.append(f"best {best.objective} {best.label}")
    telling = sorted(conclusion.importance.items(), key=lambda pair: -pair[1])
    known = [f"{name} {share(value)}" for name, value in telling[:2] if value > 0]
    if known:
        parts.append(f"most important: {', '.join(known)}")
    if seconds_left is not None and math.isfinite(seconds_left):
        parts.append(f"{time_text(seconds_left)} left")
    return printable(" · ".join(parts))


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
    if conclusion.noise is not None:
        noise = f"two scorings of the same weights differ by {value_text(conclusion.noise)}"
        table.add_row("Noise", noise)
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
        table.add_row(shown(item.other), difference_text(item), verdict)
    print_titled(console, title, table)


def _show_importance(console: Console, conclusion: Conclusion) -> None:
    known = {n: v for n, v in conclusion.importance.items() if math.isfinite(v)}
    if not known:
        return
    table = make_table(_label_column("setting"), "share of variation >", "")
    solid, longest = can_write(console, EIGHTHS), max(known.values()) or 1.0
    for name, value in sorted(known.items(), key=lambda pair: -pair[1]):
        bar = draw_bar(value / longest, LONGEST_BAR, solid=solid)
        table.add_row(shown(name), share(value), Text(bar, "blue"))
    print_titled(console, "Which settings matter", table)


# ---------------------------------------------------------------- a curve


def _show_curve(console: Console, data: StudyData, conclusion: Conclusion) -> None:
    """The objective over the one setting that is a number, a line of text for each value."""
    names = series.numeric_settings(data)
    if len(names) != 1:
        return
    found = series.curves_over(data, conclusion, names[0])
    if not found.means or len(found.means) > MOST_STEPS:
        return
    near, _ = series.level_rows(
        conclusion,
        min(row["low"] for row in found.means),
        max(row["high"] for row in found.means),
    )
    marks = found.means + [
        dict.fromkeys(("low", "objective", "high"), row["level"]) for row in near
    ]
    low, high = min(row["low"] for row in marks), max(row["high"] for row in marks)
    cells = max(16, min(48, console.width - 46))
    draw = _scale(low, high, cells, plain=not can_write(console, "─●"))
    edges = f"{value_text(low)}{value_text(high):>{cells - len(value_text(low))}}"
    table = make_table(f"{names[0]} >", "mean >", Column(edges, no_wrap=True), "seeds >", "with")
    for row in found.means:
        band = Text(draw(row["low"], row["objective"], row["high"]), "blue")
        mean, seeds = value_text(row["objective"]), str(row["seeds"])
        table.add_row(value_text(row["x"]), mean, band, seeds, shown(row["group"]))
    for row in sorted(near, key=lambda row: -row["level"]):
        level = row["level"]
        mark = Text(draw(level, level, level), "dim")
        table.add_row("", value_text(level), mark, "", shown(row["label"], "dim"))
    print_titled(console, f"Objective over {printable(names[0])}, with its 95% interval", table)


def _scale(low: float, high: float, cells: int, *, plain: bool) -> Callable[..., str]:
    """A function that draws an interval with its middle, in so many cells from low to high.

    >>> draw = _scale(0.0, 1.0, 11, plain=True)
    >>> draw(0.2, 0.5, 0.6)
    '  ---o-    '
    """
    line, dot = ("-", "o") if plain else ("─", "●")

    def place(value: float) -> int:
        part = (value - low) / (high - low) if high > low else 0.5
        return round(part * (cells - 1))

    def draw(start: float, middle: float, end: float) -> str:
        first, last = place(start), place(end)
        text = [line if first <= cell <= last else " " for cell in range(cells)]
        text[place(middle)] = dot
        return "".join(text)

    return draw


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
    names = series.score_names(data)
    of_objective = max(9, *(len(value_text(item.objective.value)) for item in ranked))
    of_interval = max(12, *(len(interval_text(item.objective)) for item in ranked))
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
            interval_text(item.objective),
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
        names = trial_name(same[0]) if len(same) == 1 else times(len(same), "trial")
        console.print(Padding(shown(f"{names}: {message or NOTHING}"), (0, 0, 0, 2), expand=False))
    if len(alike) > MOST_MESSAGES:
        console.print(f"  and {times(len(alike) - MOST_MESSAGES, 'other message')}")
    console.print()


def _show_output(console: Console, trial: Trial) -> None:
    """One failed trial with its settings and the last lines of its evaluator."""
    head = f"{trial_name(trial)} {settings_text(trial.settings)} seed={trial.seed}"
    console.print(Padding(shown(head, "bold"), (0, 0, 0, 2), expand=False))
    console.print(Padding(shown(trial.message or state_text(trial)), (0, 0, 0, 4), expand=False))
    for line in trial.output.splitlines():
        console.print(Padding(shown(line, "dim"), (0, 0, 0, 4), expand=False))
