"""The singular values of a matrix's delta, and what they say about how it was made.

Singular values are the roots of the eigenvalues of the Gram matrix of the shorter side, in float64:
right to about 1e-8 of the largest. A matrix that is too large to be taken whole is looked at
through a window of evenly spread rows and columns. A low rank is the same there, and so is the
share of the directions that any other figure speaks of, on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dare.analysis.results import Spectrum
from dare.checks.structure import (
    find_outliers,
    low_rank_of,
    singular_values,
    spread,
    without_spikes,
)

Floats = NDArray[np.float32]

WINDOW = (256, 1024)
"""The shorter and the longer side of a window, at the most."""
RUN = 16
"""Rows of a window that are read together."""
KEPT = 64
"""Singular values that are kept for a look at them."""
WHOLE_COST = 1e11
"""What taking all matrices whole may cost (see `cost_of`); else windows are used. About 5 s."""
WINDOWS_COST = 2e10
"""What all windows together may cost: about 1 s of one core."""


@dataclass(frozen=True)
class Window:
    """The part of a matrix that is looked at."""

    runs: tuple[tuple[int, int], ...]
    """Its rows: the first of a run and how many."""
    columns: NDArray[np.intp]
    is_whole: bool

    @property
    def height(self) -> int:
        """How many rows it has."""
        return sum(count for _, count in self.runs)


def window_of(shape: tuple[int, int], *, whole: bool) -> Window:
    """All of a matrix, or evenly spread runs of rows and evenly spread columns.

    >>> window = window_of((64, 4096), whole=False)
    >>> window.runs, window.columns.size, window.columns[:3].tolist()
    (((0, 64),), 1024, [2, 6, 10])
    >>> window_of((4096, 64), whole=False).runs[:2]
    ((24, 16), (88, 16))
    """
    rows, columns = shape
    if whole:
        return Window(((0, rows),), np.arange(columns), is_whole=True)
    height, width = WINDOW if rows <= columns else WINDOW[::-1]
    runs = tuple((place - RUN // 2, RUN) for place in spread(rows, height // RUN))
    if rows <= height:
        runs = ((0, rows),)
    return Window(runs, np.array(spread(columns, width), np.intp), is_whole=False)


def cost_of(shape: Sequence[int], *, whole: bool) -> float:
    """About what a spectrum takes, in units of 50 ps of one core of 2020."""
    short, long = sorted(shape)
    if not whole:
        short, long = min(short, WINDOW[0]), min(long, WINDOW[1])
    return float(short * short * long + 8 * short**3)


def bytes_of(shape: Sequence[int]) -> int:
    """About what it takes in memory to look at a whole matrix."""
    short, long = sorted(shape)
    return 20 * short * long + 4 * 8 * short * short


def spectrum_of(delta: Floats, rounding: float = 0.0) -> Spectrum | None:
    """The singular values of a finite matrix; None for one that is zero.

    `rounding` is the energy that may have come into it when it was stored.

    >>> example = spectrum_of(np.diag(np.array([4, 2, 2, 0], np.float32)))
    >>> example.values, round(example.stable_rank, 6), example.rank_99
    ((4.0, 2.0, 2.0, 0.0), 1.5, 3)
    """
    delta, missed = without_spikes(delta)
    values = singular_values(delta)
    energies = np.square(values)
    total = float(energies.sum())
    if total == 0:
        return None
    short = values.size
    edge, outliers = find_outliers(values, max(delta.shape), missed)
    shares = values[values > 0] / values.sum()
    held = np.cumsum(energies) / total
    ranks = np.linspace(0, short - 1, min(short, KEPT)).round().astype(np.intp)
    return Spectrum(
        rows=delta.shape[0],
        columns=delta.shape[1],
        values=tuple(values[ranks].tolist()),
        ranks=tuple((ranks + 1).tolist()),
        effective_rank=float(np.exp(-(shares * np.log(shares)).sum())),
        stable_rank=total / float(energies[0]),
        rank_99=min(int(np.searchsorted(held, 0.99)) + 1, short),
        tail_share=float(energies[(short + 1) // 2 :].sum()) / total,
        bulk_edge=edge,
        outliers=outliers,
        outlier_share=float(energies[:outliers].sum()) / total,
        low_rank=low_rank_of(values, outliers, rounding),
    )
