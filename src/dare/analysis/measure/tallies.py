"""Sums over sets of elements that can be added up, and the statistics that follow from them.

A tally holds everything that `Statistics` need: counts, power sums in float64, extremes, and how
many elements have which magnitude, in bins of the upper 16 bits of a float32's 31 bits without the
sign: a bin is 2⁻⁸ of its magnitude wide. A quantile is given as the middle of the bin that it
falls in, so it is off by 0.2 % at the most (more below 2⁻¹²⁶, where float32 itself is coarse).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dare.analysis.results import Histogram, Quantiles, Statistics

BIN_SHIFT = 15
"""Bits of a magnitude that its bin does not tell.

Whoever changes this must also touch kernels.py, which is all that Numba's cache looks at.
"""
BINS = 1 << 16
OCTAVE = 1 << (23 - BIN_SHIFT)
"""Bins in an octave."""
NEGLIGIBLE = 0.01
"""Share of the largest magnitude under which an element counts as negligible."""
ROUNDING = 1e-6
"""Relative error of power sums; a variance below this share of the mean square is none."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Magnitudes:
    """How many elements that are neither zero nor infinite have a magnitude in which bin."""

    first: int
    """The bin of the first count."""
    counts: Counts
    """Neither the first nor the last is zero."""

    def __add__(self, other: Magnitudes) -> Magnitudes:
        """Of both sets together."""
        if not self.counts.size or not other.counts.size:
            return self if self.counts.size else other
        first = min(self.first, other.first)
        last = max(self.first + self.counts.size, other.first + other.counts.size)
        counts = np.zeros(last - first, np.int64)
        for part in (self, other):
            start = part.first - first
            counts[start : start + part.counts.size] += part.counts
        return Magnitudes(first, counts)


NONE = Magnitudes(0, np.zeros(0, np.int64))


@dataclass(frozen=True)
class Sums:
    """Of a set of elements."""

    elements: int = 0
    zeros: int = 0
    not_finite: int = 0
    powers: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Σδ, Σδ², Σδ³, Σδ⁴."""
    magnitude: float = 0.0
    """Σ|δ|."""
    smallest: float = math.inf
    """Of the magnitudes that are not zero."""
    largest: float = 0.0
    base_squares: float = 0.0

    @property
    def finite(self) -> int:
        """How many elements are finite."""
        return self.elements - self.not_finite

    def __add__(self, other: Sums) -> Sums:
        """Of both sets together."""
        one, two, three, four = (a + b for a, b in zip(self.powers, other.powers, strict=True))
        return Sums(
            self.elements + other.elements,
            self.zeros + other.zeros,
            self.not_finite + other.not_finite,
            (one, two, three, four),
            self.magnitude + other.magnitude,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
            self.base_squares + other.base_squares,
        )


def statistics_of(sums: Sums, magnitudes: Magnitudes) -> Statistics:
    """What the sums of a set say about it."""
    mean, deviation, kurtosis = _moments(sums.powers, sums.finite)
    return Statistics(
        elements=sums.elements,
        zeros=sums.zeros,
        not_finite=sums.not_finite,
        mean=mean,
        std=deviation,
        mean_magnitude=sums.magnitude / sums.finite if sums.finite else 0.0,
        smallest=sums.smallest if sums.largest else 0.0,
        largest=sums.largest,
        quantiles=_quantiles(sums, magnitudes),
        negligible=share_below(NEGLIGIBLE * sums.largest, sums, magnitudes),
        norm=math.sqrt(sums.powers[1]),
        base_norm=math.sqrt(sums.base_squares),
        excess_kurtosis=kurtosis,
        histogram=_octaves(magnitudes),
    )


def share_below(threshold: float, sums: Sums, magnitudes: Magnitudes) -> float:
    """The share of finite elements under a magnitude; 1 if none is changed.

    In the bin that the threshold falls in, elements count as spread evenly.
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


def top_bin(magnitudes: Magnitudes, count: int) -> int:
    """The lowest bin of the fewest upper bins that hold `count` elements, or all that there are.

    >>> top_bin(Magnitudes(7, np.array([5, 1, 2])), 3), top_bin(Magnitudes(7, np.array([2])), 3)
    (8, 7)
    """
    reached = np.cumsum(magnitudes.counts[::-1])
    place = min(int(np.searchsorted(reached, count)), reached.size - 1)
    return magnitudes.first + reached.size - 1 - place


def bin_edge(place: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """The least magnitude of a bin.

    >>> float(bin_edge(127 * OCTAVE)), float(bin_edge(127 * OCTAVE + 1))
    (1.0, 1.00390625)
    """
    bits = np.asarray(place).astype(np.uint32) << np.uint32(BIN_SHIFT)
    edge: NDArray[np.float64] = bits.view(np.float32).astype(np.float64)
    return edge


def _moments(powers: tuple[float, float, float, float], count: int) -> tuple[float, float, float]:
    """Mean, standard deviation and excess kurtosis from power sums; 0 where there is none."""
    if not count:
        return 0.0, 0.0, 0.0
    mean, square, cube, fourth = (power / count for power in powers)
    variance = square - mean * mean
    if variance <= ROUNDING * square:
        return mean, 0.0, 0.0
    central = fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4
    return mean, math.sqrt(variance), central / variance / variance - 3


def _quantiles(sums: Sums, magnitudes: Magnitudes) -> Quantiles:
    """Of the magnitudes of all finite elements: of n the ⌈share·n⌉-th, counted from the least."""
    reached = sums.zeros + np.cumsum(magnitudes.counts)

    def at(share: float) -> float:
        rank = max(1, math.ceil(share * sums.finite))
        if rank <= sums.zeros or not reached.size:
            return 0.0
        place = magnitudes.first + min(int(np.searchsorted(reached, rank)), reached.size - 1)
        middle = float(bin_edge(place) + bin_edge(place + 1)) / 2
        return min(max(middle, sums.smallest), sums.largest)

    return Quantiles(*map(at, (0.01, 0.05, 0.5, 0.95, 0.99)))


def _octaves(magnitudes: Magnitudes) -> Histogram:
    """Counts by octave; what is below 2⁻¹²⁶ counts as of the octave under that."""
    if not magnitudes.counts.size:
        return Histogram(0, ())
    octaves = (magnitudes.first + np.arange(magnitudes.counts.size)) // OCTAVE
    lowest = int(octaves[0])
    counts = np.bincount(octaves - lowest, magnitudes.counts).astype(np.int64)
    return Histogram(lowest - 127, tuple(counts.tolist()))
