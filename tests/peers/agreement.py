"""What the comparisons of a run found: for each method and peer, how far apart the two are at most.

A test says what it compares by `@pytest.mark.compares(method, peer)`. Whatever the assertions of
`side_by_side` measure while it runs is put down here. A test whose name begins with
`test_difference` holds a difference that is meant, and its docstring, or its name, says which.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from configurations import Configuration


@dataclass(frozen=True)
class Subject:
    """What a test compares."""

    method: str
    peer: str


@dataclass(frozen=True)
class Measurement:
    """The largest difference of two tensors."""

    subject: Subject
    case: str
    absolute: float
    relative: float
    """To the largest magnitude of the peer's result."""


@dataclass(frozen=True)
class Row:
    """What is known of one method and peer."""

    method: str
    peer: str
    cases: int
    absolute: float
    relative: float
    deliberate: tuple[str, ...]
    """The differences that are meant."""


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration."""

    given: Configuration
    verdict: str
    apart: float | None
    """The largest difference of a tensor, as a share of its norm."""


@dataclass
class Agreement:
    """All that a run has measured."""

    outcomes: list[Outcome] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    reasons: list[tuple[Subject, str]] = field(default_factory=list)
    running: tuple[Subject, str] | None = None
    """What the test that runs now compares, and its name."""

    def measure(self, ours: Tensor, theirs: Tensor) -> None:
        """Put down how far apart two results are, if the test that runs compares any."""
        if self.running is None or not ours.numel():
            return
        mine, other = ours.detach().double(), theirs.detach().double()
        apart = (mine - other).abs()
        absolute = torch.where(mine == other, 0, apart).max().item()
        largest = other.abs().max().item()
        relative = absolute / largest if largest else absolute
        self.measurements.append(Measurement(*self.running, absolute, relative))

    def rows(self) -> list[Row]:
        """One row for each method and peer, in alphabetical order."""
        told = [m.subject for m in self.measurements] + [subject for subject, _ in self.reasons]
        subjects = sorted(set(told), key=lambda subject: (subject.method, subject.peer))
        return [self._row(subject) for subject in subjects]

    def _row(self, subject: Subject) -> Row:
        own = [m for m in self.measurements if m.subject == subject]
        return Row(
            subject.method,
            subject.peer,
            len({m.case for m in own}),
            max((m.absolute for m in own), default=0.0),
            max((m.relative for m in own), default=0.0),
            tuple(dict.fromkeys(why for about, why in self.reasons if about == subject)),
        )


AGREEMENT = Agreement()


# ---------------------------------------------------------------- to be shown

HEADS = ("method", "peer", "cases", "largest difference", "relative", "meant")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text; without a case there is nothing measured."""
    measured = (_shown(row.absolute), _shown(row.relative)) if row.cases else ("–", "–")
    meant = str(len(row.deliberate) or "")
    return (row.method, row.peer, str(row.cases), *measured, meant)


def _shown(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}"


def as_lines(table: Sequence[tuple[str, ...]]) -> list[str]:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def outcome_cells(outcome: Outcome) -> tuple[str, ...]:
    """A configuration's row."""
    apart = "" if outcome.apart is None else _shown(outcome.apart)
    return (outcome.given.name, outcome.verdict, apart, outcome.given.why)


def outcomes_as_markdown(outcomes: Sequence[Outcome]) -> str:
    """The table of configurations, with how many there are of each verdict."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    lines = [f"{len(outcomes)} configurations: " + ", ".join(f"{n} {v}" for v, n in counts.items())]
    lines += ["", "| configuration | verdict | apart | why |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(outcome_cells(outcome)) + " |" for outcome in outcomes]
    return "\n".join(lines) + "\n"


def as_markdown(rows: Sequence[Row]) -> str:
    """The table and the differences that are meant, for the documentation."""

    def line(texts: Iterable[str]) -> str:
        return f"| {' | '.join(texts)} |"

    lines = [line(HEADS), "|" + "---|" * len(HEADS), *(line(cells(row)) for row in rows)]
    for row in rows:
        if row.deliberate:
            lines += ["", f"**{row.method}, {row.peer}**", ""]
            lines += [f"- {reason}" for reason in row.deliberate]
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Row], versions: dict[str, Any]) -> str:
    """All of it as plain values."""
    return json.dumps({"versions": versions, "rows": [asdict(row) for row in rows]}, indent=1)
