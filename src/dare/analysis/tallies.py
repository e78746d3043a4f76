"""Statistics of a delta from sums over its elements, and from its singular values.

`Sums` hold everything that `Statistics` need and can be added up: counts, power sums in float64 and
extremes; in addition, magnitudes are counted in bins (`dare.checks.dropping`). A quantile is the
middle of its bin, so it is off by 0.2% at most (more below 2⁻¹²⁶, where float32 itself is coarse).
Sums without outliers are computed from the bins, to 0.4%; without outliers they are exact.

Singular values are right to about 1e-8 of the largest. If a matrix is too large to be taken whole,
a window of evenly spread rows and columns is used. It has the same low rank, and on average the
same share of directions in all other figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.analysis.results import Histogram, Inliers, Quantiles, Spectrum, Statistics
from dare.checks.dropping import (
    BIN_SHIFT,
    BINS,
    OCTAVE,
    Magnitudes,
    bin_edge,
    outlier_bin,
    top_bin,
)
from dare.checks.sample import (
    UNROUNDED,
    Rounding,
    evenly_spread,
    find_low_rank,
    find_noise_edge,
    low_rank_of,
    singular_values,
    without_lines,
    without_spikes,
)

NEGLIGIBLE = 0.01  # share of the largest magnitude under which an element counts as negligible
# Relative error of power sums; a variance below this share of the mean square counts as zero.
ROUNDING = 1e-6

WAYS = 2  # rows of counters that take turns, because equal magnitudes often follow each other
COUNTERS = BINS + 16  # length of such a row: not a power of two, or they would share cache sets
SUMS = 6  # Σδ, Σδ², Σδ³, Σδ⁴, Σ|δ|, Σδ·base
COUNTS = 4  # elements that are not zero, those that are not finite, and the bits of the extremes
LEAST_OF_NONE = 0xFFFFFFFF  # instead of the smallest magnitude's bits - 1, if there is none

WINDOW = (256, 1024)  # the shorter and the longer side of a window, at the most
RUN = 16  # rows of a window that are read together
KEPT = 64  # singular values that are kept to be shown
# The highest cost of taking all matrices whole (see `spectrum_cost`), about 5 s; else windows.
WHOLE_COST = 1e11
WINDOWS_COST = 2e10  # the most that all windows together may cost: about 1 s of one core


# ---------------------------------------------------------------- sums


class Additive:
    """A frozen dataclass of figures of a set; the sum of two describes both sets together.

    Numbers add up, mappings by their keys, extremes stay extremes.
    """

    def __add__(self, other: Self) -> Self:
        """Return the figures of both sets."""
        theirs = vars(other)
        return type(self)(*(_added(name, ours, theirs[name]) for name, ours in vars(self).items()))


def _added(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        both = {key: value + other[key] for key, value in one.items() if key in other}
        return {**one, **other, **both}
    extreme = {"smallest": min, "largest": max}.get(name)
    return extreme(one, other) if extreme else one + other


@dataclass(frozen=True)
class InlierSums(Additive):
    """Sums over the elements of a set that are not outliers of their tensors."""

    outliers: int = 0
    magnitude: float = 0.0
    squares: float = 0.0
    fourths: float = 0.0
    largest: float = 0.0  # a bound that no magnitude exceeds


@dataclass(frozen=True)
class Sums(Additive):
    """Sums over a set of elements."""

    elements: int = 0
    zeros: int = 0
    not_finite: int = 0
    total: float = 0.0  # Σδ; the next three are of its second, third and fourth powers
    squares: float = 0.0
    cubes: float = 0.0
    fourths: float = 0.0
    magnitude: float = 0.0  # Σ|δ|
    base_product: float = 0.0  # Σδ·base
    smallest: float = math.inf  # the smallest magnitude above zero
    largest: float = 0.0
    base_squares: float = 0.0
    inliers: InlierSums = InlierSums()  # known when all of a tensor has been counted

    @property
    def finite(self) -> int:
        """The number of finite elements."""
        return self.elements - self.not_finite


def with_inliers(sums: Sums, magnitudes: Magnitudes) -> Sums:
    """Complete a whole tensor's sums by those over its elements that are not outliers."""
    base_size = math.sqrt(sums.base_squares / sums.elements) if sums.elements else 0.0
    counts, middles = magnitudes.counts, magnitudes.middles
    place = outlier_bin(magnitudes, sums.elements, base_size) - magnitudes.first
    outliers = int(counts[place:].sum())
    power_sums, largest = (sums.magnitude, sums.squares, sums.fourths), sums.largest
    if outliers:
        one, two, four = (float(counts[:place] @ middles[:place] ** k) for k in (1, 2, 4))
        power_sums, used_bins = (one, two, four), np.flatnonzero(counts[:place])
        largest = float(bin_edge(magnitudes.first + used_bins[-1] + 1)) if used_bins.size else 0.0
    return replace(sums, inliers=InlierSums(outliers, *power_sums, largest))


def statistics_of(sums: Sums, magnitudes: Magnitudes) -> Statistics:
    """Return the figures of a set from its sums."""
    mean, deviation, kurtosis = _moments(sums)
    inliers, count = sums.inliers, sums.finite - sums.inliers.outliers
    return Statistics(
        elements=sums.elements,
        zeros=sums.zeros,
        not_finite=sums.not_finite,
        mean=mean,
        std=deviation,
        mean_magnitude=sums.magnitude / sums.finite if sums.finite else 0.0,
        smallest=sums.smallest if sums.largest else 0.0,
        largest=sums.largest,
        quantiles=Quantiles(*_quantiles(sums, magnitudes)),
        negligible=share_below(NEGLIGIBLE * sums.largest, sums, magnitudes),
        norm=math.sqrt(sums.squares),
        base_norm=math.sqrt(sums.base_squares),
        base_product=sums.base_product,
        excess_kurtosis=kurtosis,
        histogram=Histogram(*_octaves(magnitudes)),
        inliers=Inliers(
            outliers=inliers.outliers,
            norm=math.sqrt(inliers.squares),
            mean_magnitude=inliers.magnitude / count if count else 0.0,
            largest=inliers.largest,
            negligible=share_below(NEGLIGIBLE * inliers.largest, sums, magnitudes),
            concentration=count * inliers.fourths / inliers.squares**2 if inliers.squares else 0.0,
        ),
    )


def share_below(threshold: float, sums: Sums, magnitudes: Magnitudes) -> float:
    """Return the share of finite elements below a magnitude; 1 if none is changed.

    The elements in the threshold's bin are assumed to be spread evenly.
    """
    if not sums.largest or threshold > sums.largest:
        return 1.0 if sums.finite else 0.0
    counts = magnitudes.counts
    bin_ = int(np.float32(threshold).view(np.uint32)) >> BIN_SHIFT
    place = bin_ - magnitudes.first
    below = float(sums.zeros + counts[: max(place, 0)].sum())
    if 0 <= place < counts.size:
        low, high = float(bin_edge(bin_)), float(bin_edge(bin_ + 1))
        below += float(counts[place]) * (threshold - low) / (high - low)
    return below / sums.finite


def _moments(sums: Sums) -> tuple[float, float, float]:
    """Return mean, standard deviation and excess kurtosis; 0 where there is none."""
    if not sums.finite:
        return 0.0, 0.0, 0.0
    powers = (sums.total, sums.squares, sums.cubes, sums.fourths)
    mean, square, cube, fourth = (power / sums.finite for power in powers)
    variance = square - mean * mean
    if variance <= ROUNDING * square:
        return mean, 0.0, 0.0
    central = fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4
    return mean, math.sqrt(variance), central / variance / variance - 3


def _quantiles(sums: Sums, magnitudes: Magnitudes) -> list[float]:
    """Return quantiles of all finite magnitudes: the ⌈share·n⌉-th smallest of n."""
    changed = int(magnitudes.counts.sum())

    def at(share: float) -> float:
        rank = max(1, math.ceil(share * sums.finite)) - sums.zeros
        if rank <= 0 or not changed:
            return 0.0
        place = top_bin(magnitudes, changed - rank + 1)
        middle = float(bin_edge(place) + bin_edge(place + 1)) / 2
        return min(max(middle, sums.smallest), sums.largest)

    return [at(share) for share in (0.01, 0.05, 0.5, 0.95, 0.99)]


def _octaves(magnitudes: Magnitudes) -> tuple[int, tuple[int, ...]]:
    """Return the lowest octave and all counts; everything below 2⁻¹²⁶ is in one octave."""
    if not magnitudes.counts.size:
        return 0, ()
    octaves = (magnitudes.first + np.arange(magnitudes.counts.size)) // OCTAVE
    lowest = int(octaves[0])
    counts = np.bincount(octaves - lowest, magnitudes.counts).astype(np.int64)
    return lowest - 127, tuple(counts.tolist())


# ---------------------------------------------------------------- matrices


@dataclass(frozen=True)
class Window:
    """The part of a matrix whose singular values are computed."""

    runs: tuple[tuple[int, int], ...]  # its rows: the first of a run and how many
    columns: NDArray[np.intp]
    is_whole: bool

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return sum(count for _, count in self.runs)


def choose_window(shape: Sequence[int], *, whole: bool) -> Window:
    """Return all of a matrix, or evenly spread runs of rows and evenly spread columns.

    >>> window = choose_window((64, 4096), whole=False)
    >>> window.runs, window.columns.size, window.columns[:3].tolist()
    (((0, 64),), 1024, [2, 6, 10])
    >>> choose_window((4096, 64), whole=False).runs[:2]
    ((24, 16), (88, 16))
    """
    rows, columns = shape
    if whole:
        return Window(((0, rows),), np.arange(columns), is_whole=True)
    height, width = WINDOW if rows <= columns else WINDOW[::-1]
    runs = tuple((place - RUN // 2, RUN) for place in evenly_spread(rows, height // RUN))
    if rows <= height:
        runs = ((0, rows),)
    return Window(runs, np.array(evenly_spread(columns, width), np.intp), is_whole=False)


def spectrum_cost(shape: Sequence[int], *, whole: bool) -> float:
    """Return about how long a spectrum takes, in units of 50 ps of one core of 2020."""
    short, long = sorted(shape)
    if not whole:
        short, long = min(short, WINDOW[0]), min(long, WINDOW[1])
    return float(short * short * long + 8 * short**3)


def spectrum_bytes(shape: Sequence[int]) -> int:
    """Return about how much memory the spectrum of a whole matrix takes."""
    short, long = sorted(shape)
    return 20 * short * long + 4 * 8 * short * short


def spectrum_of(
    delta: NDArray[np.float32], rounding: Rounding = UNROUNDED, gpu: Any = None
) -> Spectrum | None:
    """Return the singular values of a finite matrix; None for one that is zero.

    `rounding` is the energy that may have come into it when it was stored. A GPU may compute them.

    >>> example = spectrum_of(np.diag(np.array([4, 2, 2, 0], np.float32)))
    >>> example.values, round(example.stable_rank, 6), example.rank_99
    ((4.0, 2.0, 2.0, 0.0), 1.5, 3)
    """
    clean, missed = without_spikes(delta)
    values = singular_values(clean, gpu)
    energies = np.square(values)
    total = float(energies.sum())
    if total == 0:
        return None
    short = values.size
    edge, outliers = find_noise_edge(values, max(delta.shape), missed)
    rank, rest = low_rank_of(values, outliers, rounding), without_lines(delta, rounding)
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
        low_rank=rank if rest is delta else find_low_rank(rest, rounding),
    )
