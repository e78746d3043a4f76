"""The demonstration's numbers: what each model scored, and how that spreads over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A mean, and the standard deviation over seeds where there are several.

    >>> Figure.of([90.0, 94.0])
    Figure(mean=92.0, spread=2.8284271247461903)
    """

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        """Sum up the values of several seeds."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Score:
    """What one set of weights achieves."""

    correct: Mapping[str, float]
    """By task, the percentage of held-out prompts that are answered exactly right."""
    bits_per_byte: float
    """Of held-out English; less is better. NaN where it was not asked for."""

    @property
    def mean(self) -> float:
        """The percentage over all tasks."""
        return fmean(self.correct.values())


@dataclass(frozen=True)
class Row:
    """A model, or a merge with one setting under several seeds."""

    name: str
    scores: tuple[Score, ...]
    method: str | None = None
    drop_rate: float = 0.0
    scale: float | None = None

    def correct(self, task: str) -> Figure:
        """The percentage right on one task."""
        return Figure.of([score.correct[task] for score in self.scores])

    @property
    def mean(self) -> Figure:
        """The percentage right over all tasks."""
        return Figure.of([score.mean for score in self.scores])

    @property
    def bits_per_byte(self) -> Figure:
        """Bits for a byte of held-out English."""
        return Figure.of([score.bits_per_byte for score in self.scores])


@dataclass(frozen=True)
class Curve:
    """Percentage right over drop rates."""

    name: str
    points: tuple[tuple[float, Figure], ...]


@dataclass(frozen=True)
class Writing:
    """What one set of weights writes after the same few prompts."""

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class DemoResult:
    """All numbers of a demonstration."""

    parameters: int
    prompts: Mapping[str, int]
    """How many held-out prompts were scored, by task."""
    seeds: tuple[int, ...]
    mean_change: Mapping[str, float]
    """The mean |delta| of each fine-tune."""
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    writings: tuple[Writing, ...]
    picture: str | None
    output: str | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts and lists, for JSON."""
        return asdict(self)
