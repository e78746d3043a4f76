"""The structure of a delta: magnitudes counted in bins, outliers, and a low rank as a LoRA's.

A bin is the upper 16 bits of a float32's 31 bits without the sign: it is 2⁻⁸ of its magnitude wide.
One element of a million can hold half of a delta's squares, and says nothing about the others. So
deltas are judged without outliers: the thousandth or so of elements that are far above all others
and hold much of the fourth powers. Gaussian, Laplace and sparse deltas have none.

Noise of standard deviation s in a matrix of m rows and n columns has singular values up to about
s·(√m + √n), distributed by the law of Marchenko and Pastur. The median of the singular values tells
how strong the noise is: a few strong directions hardly move it. They are taken out and the noise is
estimated again, until their number stays the same. The edge includes two standard units of the
largest one's own fluctuation (Tracy-Widom), which one noise matrix in a hundred exceeds. A single
large element makes a direction of its own, and is left out (`without_spikes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dare.kernels.linalg import NOISE, Doubles, Floats, squared_values
from dare.tensors.dtypes import STORAGE_TYPES

SMALLEST = 32  # matrices with fewer rows or columns say nothing about rank
DOMINANT = 0.5  # share of the energy that the directions of a low rank hold at least
CLIFF = 1.5  # how many times as strong the last direction of a low rank is as the next, at least …
FEW = 16  # … unless all that stand out are fewer than this part of the directions
SPIKE = 5.0  # an element so many times what its row and column let expect is left out
NEGLIGIBLE_TAIL = 0.01  # share of the energy outside a low rank that rounding need not explain

BIN_SHIFT = 15  # bits of a magnitude that its bin does not tell
BINS = 1 << 16
OCTAVE = 1 << (23 - BIN_SHIFT)  # bins in an octave
PANEL = 1 << 18  # elements of an array that are counted at once
# Share of a tensor's changed elements that may be outliers; one may be, where that is less …
OUTLIERS = 0.002
# … and where few are changed this share of all elements, but no more than that of the changed.
OUTLIERS_OF_ALL, MOST_OUTLIERS = 0.0012, 0.02
BEYOND = 1.75  # how many times the largest magnitude that cannot be one an outlier exceeds …
BEYOND_FEW = 16.0  # … where the share is less than one element, and chance plays a larger part
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
        return cls(int(used[0]), counts[used[0] : used[-1] + 1]) if used.size else NONE

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


NONE = Magnitudes(0, np.zeros(0, np.int64))


def outlier_bin(magnitudes: Magnitudes, elements: int, usual: float = 0.0) -> int:
    """The first bin whose elements are outliers; the bin after the last if there are none.

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
        of_all = min(OUTLIERS_OF_ALL * elements, MOST_OUTLIERS * changed)
        allowed = int(max(OUTLIERS * changed, of_all))
        usual = float(bin_edge(top_bin(magnitudes, max(allowed, 1) + 1) + 1))
        usual *= BEYOND if allowed else BEYOND_FEW
    elif changed > OUTLIERS * elements:
        return end
    with np.errstate(over="ignore"):
        first = (int(np.float32(usual).view(np.uint32)) >> BIN_SHIFT) + 1
    place = max(first - magnitudes.first, 0)
    fourths = counts * magnitudes.middles**4
    if place >= counts.size or fourths[place:].sum() < OUTLIER_FOURTHS * fourths.sum():
        return end
    return magnitudes.first + place


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


# ---------------------------------------------------------------- rank


def spread(length: int, most: int) -> list[int]:
    """Places in so many, each in the middle of its part, or all if they are no more than `most`.

    >>> spread(100, 4), spread(3, 4)
    ([12, 37, 62, 87], [0, 1, 2])
    """
    count = min(length, most)
    return [(2 * part + 1) * length // (2 * count) for part in range(count)]


def rounding_energy(weights: Floats, dtype: str) -> float:
    """The most that rounding these weights to a storage type can put into a delta: Σ(ulp/2)².

    >>> rounding_energy(np.array([1.5], np.float32), "BF16") == (2.0**-7 / 2) ** 2
    True
    """
    exponents = (weights.reshape(-1).view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)
    counts = np.bincount(exponents, minlength=256)[1:255]  # neither tiny nor infinite
    halves = np.ldexp(1.0, np.arange(-126, 128) - 1 - STORAGE_TYPES[dtype].mantissa_bits)
    return float(counts @ np.square(halves))


def find_low_rank(delta: Floats, rounding: float = 0.0) -> int | None:
    """Return the rank of a matrix's delta if it is low, as a LoRA's is; else None.

    `rounding` is the energy that may have come into it when it was stored.

    >>> full = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    >>> find_low_rank(full), find_low_rank(full[:, :8] @ full[:8])
    (None, 8)
    """
    delta, missed = without_spikes(delta)
    values = singular_values(delta)
    _, outliers = find_outliers(values, max(delta.shape), missed)
    return low_rank_of(values, outliers, rounding) if values.any() else None


def singular_values(matrix: Floats) -> Doubles:
    """Return all singular values, falling, right to about 1e-8 of the largest."""
    scale = float(np.abs(matrix).max(initial=0)) or 1.0
    values: Doubles = scale * np.sqrt(squared_values(matrix / np.float32(scale)))
    return values


def without_spikes(delta: Floats) -> tuple[Floats, float]:
    """The matrix without single elements that stand out, and how large their absence may be.

    That is the largest singular value that it may add. A matrix of low rank may have heavy rows and
    columns, so an outlier is held against what its row and its column let expect.
    """
    sizes, magnitudes = np.abs(delta), Magnitudes.of(delta)
    bound = float(bin_edge(outlier_bin(magnitudes, delta.size)))
    is_outlier = sizes >= bound
    rows, columns = np.nonzero(is_outlier)
    if not rows.size or not magnitudes.counts.size:
        return delta, 0.0
    squares = np.square(np.where(is_outlier, 0, sizes / np.float32(bound)))
    by_row, by_column = (squares.mean(axis=axis, dtype=np.float64) for axis in (1, 0))
    expected = bound * np.sqrt(by_row[rows] * by_column[columns] / (float(by_row.mean()) or 1.0))
    is_spike = sizes[rows, columns] > SPIKE * expected
    rows, columns, expected = rows[is_spike], columns[is_spike], expected[is_spike]
    if not rows.size:
        return delta, 0.0
    clean = delta.copy()
    clean[rows, columns] = 0
    together = max(int(np.bincount(line).max()) for line in (rows, columns))
    return clean, SPIKE * float(expected.max()) * math.sqrt(together)


def find_outliers(values: Doubles, long: int, least: float = 0.0) -> tuple[float, int]:
    """The edge of the noise, `least` or more, and how many singular values lie above it."""
    short = values.size
    outliers = 0
    while True:
        bulk = values[outliers:]
        edge = _edge(float(np.median(bulk)), short - outliers, max(long - outliers, 1))
        edge = max(edge, NOISE * float(values[0]), least)
        count = int(np.count_nonzero(values > edge))
        if count <= outliers or count > short // 2:
            return edge, count
        outliers = count


def _edge(median: float, short: int, long: int) -> float:
    """Return the end of the singular values of noise whose median is known."""
    deviation = median / math.sqrt(long * median_of_noise(short / long))
    center = (math.sqrt(short) + math.sqrt(long)) ** 2
    unit = math.sqrt(center) * (1 / math.sqrt(short) + 1 / math.sqrt(long)) ** (1 / 3)
    return deviation * math.sqrt(center + 2 * unit)


@cache
def median_of_noise(ratio: float) -> float:
    """The median of the law of Marchenko and Pastur for noise of variance 1.

    >>> round(median_of_noise(1.0), 3)
    0.653
    """
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    angles = (np.arange(4096) + 0.5) * (math.pi / 4096)
    places = low + (high - low) * (1 - np.cos(angles)) / 2
    masses = np.square(np.sin(angles)) / places  # density times the step that an angle makes
    return float(places[np.searchsorted(np.cumsum(masses), masses.sum() / 2)])


def low_rank_of(values: Doubles, outliers: int, rounding: float) -> int | None:
    """The rank, if few directions hold everything but what rounding explains.

    They end where a direction is followed by a much weaker one, the last such place among the
    outliers: rounding of changes that are smaller than a step is no even noise, and some of its
    own directions stand out.
    """
    short = values.size
    energies = np.square(values)
    left = np.append(energies[::-1].cumsum()[::-1], 0)
    most = min(outliers, short // 2)
    cliffs = np.flatnonzero(values[:most] >= CLIFF * values[1 : most + 1])
    if cliffs.size:
        rank = int(cliffs[-1]) + 1
    elif 0 < outliers <= short // FEW:
        rank = outliers
    else:
        return None
    total, tail = float(left[0]), float(left[rank])
    explained = max(rounding, NEGLIGIBLE_TAIL * total)
    return rank if tail <= explained and tail <= (1 - DOMINANT) * total else None
