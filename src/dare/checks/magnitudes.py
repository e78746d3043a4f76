"""Magnitudes of changes, counted in bins, and the outliers among them.

A bin is the upper 16 bits of a float32's 31 bits without the sign: it is 2⁻⁸ of its magnitude wide.

One element of a million can hold half of a delta's squares, and says nothing about the others. So
sizes are judged without outliers: the thousandth or so of elements that are far above all others
and hold much of the fourth powers. Gaussian, Laplace and sparse deltas have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BIN_SHIFT = 15  # bits of a magnitude that its bin does not tell
BINS = 1 << 16
OCTAVE = 1 << (23 - BIN_SHIFT)  # bins in an octave
PANEL = 1 << 18  # elements of an array that are counted at once
# Share of a tensor's changed elements that may be outliers; one may be, where that is less …
OUTLIER_SHARE = 0.002
# … and where few are changed this share of all elements, but no more than that of the changed.
OUTLIER_SHARE_OF_ALL, MOST_OUTLIERS = 0.0012, 0.02
# How many times the largest magnitude that cannot be one an outlier exceeds …
OUTLIER_RATIO = 1.75
OUTLIER_RATIO_OF_FEW = (
    16.0  # … where the share is less than one element: chance plays a larger part
)
FEW_CHANGED = 32  # fewer changed elements are compared with the base's weights instead
OUTLIER_FOURTHS = 0.05  # share of Σδ⁴ from which outliers matter


@dataclass(frozen=True)
class Magnitudes:
    """The number of elements, neither zero nor infinite, with a magnitude in each bin."""

    first: int  # the bin of the first count
    counts: NDArray[np.int64]  # neither the first nor the last is zero

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> Magnitudes:
        """Count an array; what is below 2⁻¹³⁴ counts as zero."""
        counts = np.zeros(BINS, np.int64)
        bits = np.abs(values).reshape(-1).view(np.uint32)
        for start in range(0, bits.size, PANEL):
            bins = bits[start : start + PANEL] >> np.uint32(BIN_SHIFT)
            counts += np.bincount(bins, minlength=BINS)
        counts[0] = counts[255 * OCTAVE :] = 0
        (used,) = np.nonzero(counts)
        return cls(int(used[0]), counts[used[0] : used[-1] + 1]) if used.size else NO_MAGNITUDES

    @property
    def middles(self) -> NDArray[np.float64]:
        """The magnitude in the middle of each bin."""
        edges = bin_edge(self.first + np.arange(self.counts.size + 1))
        return (edges[:-1] + edges[1:]) / 2

    def __add__(self, other: Magnitudes) -> Magnitudes:
        """Return the counts of both sets together."""
        if not self.counts.size or not other.counts.size:
            return self if self.counts.size else other
        first = min(self.first, other.first)
        last = max(self.first + self.counts.size, other.first + other.counts.size)
        counts = np.zeros(last - first, np.int64)
        for part in (self, other):
            start = part.first - first
            counts[start : start + part.counts.size] += part.counts
        return Magnitudes(first, counts)


NO_MAGNITUDES = Magnitudes(0, np.zeros(0, np.int64))


def outlier_bin(magnitudes: Magnitudes, elements: int, usual: float = 0.0) -> int:
    """Return the first bin whose elements are outliers; the bin after the last if there are none.

    Where next to nothing is changed, that is what exceeds `usual`, the size of the base's weights.

    >>> even = np.full(1000, 10)
    >>> outlier_bin(Magnitudes(32000, even), 10_000) - 32000
    1000
    >>> outlier_bin(Magnitudes(32000, np.append(even, [0] * 1000 + [1])), 10_001) - 32000
    1195
    """
    counts = magnitudes.counts
    end, changed = magnitudes.first + counts.size, int(counts.sum())
    if changed >= FEW_CHANGED:
        of_all = min(OUTLIER_SHARE_OF_ALL * elements, MOST_OUTLIERS * changed)
        allowed = int(max(OUTLIER_SHARE * changed, of_all))
        usual = float(bin_edge(top_bin(magnitudes, max(allowed, 1) + 1) + 1))
        usual *= OUTLIER_RATIO if allowed else OUTLIER_RATIO_OF_FEW
    elif changed > OUTLIER_SHARE * elements:
        return end
    with np.errstate(over="ignore"):
        first = (int(np.float32(usual).view(np.uint32)) >> BIN_SHIFT) + 1
    place = max(first - magnitudes.first, 0)
    fourths = counts * magnitudes.middles**4
    if place >= counts.size or fourths[place:].sum() < OUTLIER_FOURTHS * fourths.sum():
        return end
    return magnitudes.first + place


def top_bin(magnitudes: Magnitudes, count: int) -> int:
    """Return the lowest of the fewest upper bins that hold `count` elements, or all there are.

    >>> top_bin(Magnitudes(7, np.array([5, 1, 2])), 3), top_bin(Magnitudes(7, np.array([2])), 3)
    (8, 7)
    """
    reached = np.cumsum(magnitudes.counts[::-1])
    place = min(int(np.searchsorted(reached, count)), reached.size - 1)
    return magnitudes.first + reached.size - 1 - place


def bin_edge(place: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the least magnitude of a bin.

    >>> float(bin_edge(127 * OCTAVE)), float(bin_edge(127 * OCTAVE + 1))
    (1.0, 1.00390625)
    """
    bits = np.asarray(place).astype(np.uint32) << np.uint32(BIN_SHIFT)
    edge: NDArray[np.float64] = bits.view(np.float32).astype(np.float64)
    return edge


def sum_of_squares(values: NDArray[np.floating]) -> float:
    """Return Σx² in float64, without BLAS, whose threads take longer to start than this."""
    return float(np.square(values, dtype=np.float64).sum())
