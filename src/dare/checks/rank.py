"""Ranks of changes: whether one is low, as a LoRA's is, among the noise of rounding.

Noise of standard deviation s in a matrix of m rows and n columns has singular values up to about
s·(√m + √n), distributed by the law of Marchenko and Pastur. The median of the singular values tells
how strong the noise is: a few strong directions hardly move it. They are taken out and the noise is
estimated again, until their number stays the same. The edge includes two standard units of the
largest one's own fluctuation (Tracy-Widom), which one noise matrix in a hundred exceeds. A single
large element makes a direction of its own, and so does a large row or column: they are left out
(`without_spikes`, `without_lines`).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from dare.checks.magnitudes import Magnitudes, bin_edge, outlier_bin, sum_of_squares
from dare.inputs.sources import Floats
from dare.kernels.linalg import NOISE, Doubles, squared_values
from dare.tensors.dtypes import STORAGE_TYPES

MIN_SIDE = 32  # matrices with fewer rows or columns say nothing about rank
LOW_RANK_SHARE = 0.5  # of the energy: what the directions of a low rank usually hold at least
CLIFF = 1.5  # how many times as strong the last direction of a low rank is as the next, at least …
FEW_PART = 16  # … unless all that stand out are fewer than this part of the directions
SPIKE = 5.0  # an element so many times what its row and column predict is left out
NEGLIGIBLE_TAIL = 0.01  # share of the energy outside a low rank that rounding need not explain
LINE = 16.0  # a row or column with so many times the usual energy is left out

# The energy that came into a delta when it was stored, and the share of all the energy that a low
# rank holds beside it, at least.
Rounding = tuple[float, float]
UNROUNDED: Rounding = (0.0, LOW_RANK_SHARE)


def find_rounding(weights: Floats, base: str, stored: str) -> Rounding:
    """Return what rounding these weights to a storage type can put into a delta: Σ(ulp/2)².

    Where the base's type is finer, rounding is uniform noise, with a third of that energy. The sum
    is off by 1.4 % in a matrix of 64 × 64 and by less in others, so 10 % are added. It is known so
    well that a low rank need not hold most of the energy.

    >>> find_rounding(np.array([1.5], np.float32), "BF16", "BF16") == ((2.0**-7 / 2) ** 2, 0.5)
    True
    """
    bits, base_bits = (STORAGE_TYPES[name].mantissa_bits for name in (stored, base))
    exponents = (weights.reshape(-1).view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)
    counts = np.bincount(exponents, minlength=256)[1:255]  # neither tiny nor infinite
    energy = float(counts @ np.square(np.ldexp(1.0, np.arange(-126, 128) - 1 - bits)))
    return (1.1 / 3 * energy, 0.0) if base_bits > bits else (energy, LOW_RANK_SHARE)


def find_low_rank(delta: Floats, rounding: Rounding = UNROUNDED) -> int | None:
    """Return the rank of a matrix's delta if it is low, as a LoRA's is; else None.

    `rounding` is the energy that may have come into it when it was stored.

    >>> full = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    >>> find_low_rank(full), find_low_rank(full[:, :8] @ full[:8])
    (None, 8)
    """
    delta, missed = without_spikes(without_lines(delta, rounding))
    values = singular_values(delta)
    _, outliers = find_noise_edge(values, max(delta.shape), missed)
    return low_rank_of(values, outliers, rounding) if values.any() else None


def without_lines(delta: Floats, rounding: Rounding) -> Floats:
    """Return the matrix without rows and columns that are far larger than the others.

    One of them is a direction of its own, whatever the others are; a low rank stays what it is
    without them. The same matrix if there are none, or if the others are only rounding.
    """
    rest = delta
    for axis in (0, 1, 0, 1):
        energies = np.square(rest, dtype=np.float64).sum(axis=1 - axis)
        if (changed := np.sort(energies[energies > 0])).size:
            rest = np.compress(energies <= LINE * changed[changed.size // 2], rest, axis)
    return rest if rest.size < delta.size and sum_of_squares(rest) > rounding[0] else delta


def singular_values(matrix: Floats) -> Doubles:
    """Return all singular values, falling, right to about 1e-8 of the largest."""
    scale = float(np.abs(matrix).max(initial=0)) or 1.0
    values: Doubles = scale * np.sqrt(squared_values(matrix / np.float32(scale)))
    return values


def without_spikes(delta: Floats) -> tuple[Floats, float]:
    """Return the matrix without single elements that stand out.

    Beside it is the largest singular value that their absence may add. A matrix of low rank may
    have heavy rows and columns, so an element is compared with what its row and column predict.
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


def find_noise_edge(values: Doubles, long: int, least: float = 0.0) -> tuple[float, int]:
    """Return the edge of the noise, `least` or more, and how many singular values lie above it."""
    short = values.size
    outliers = 0
    while True:
        edge = _edge(values[outliers:], max(long - outliers, 1))
        edge = max(edge, NOISE * float(values[0]), least)
        count = int(np.count_nonzero(values > edge))
        if count <= outliers or count > short // 2:
            return edge, count
        outliers = count


def _edge(noise: Doubles, long: int) -> float:
    """Return the end of the singular values of noise, by their median."""
    short = noise.size
    # Not np.median, which imports numpy.ma.
    median = float(np.sort(noise)[(short - 1) // 2 : short // 2 + 1].mean())
    deviation = median / math.sqrt(long * median_of_noise(short / long))
    center = (math.sqrt(short) + math.sqrt(long)) ** 2
    unit = math.sqrt(center) * (1 / math.sqrt(short) + 1 / math.sqrt(long)) ** (1 / 3)
    return deviation * math.sqrt(center + 2 * unit)


@cache
def median_of_noise(ratio: float) -> float:
    """Return the median of the law of Marchenko and Pastur for noise of variance 1.

    >>> round(median_of_noise(1.0), 3)
    0.653
    """
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    angles = (np.arange(4096) + 0.5) * (math.pi / 4096)
    places = low + (high - low) * (1 - np.cos(angles)) / 2
    masses = np.square(np.sin(angles)) / places  # density times the step that an angle makes
    return float(places[np.searchsorted(np.cumsum(masses), masses.sum() / 2)])


def low_rank_of(values: Doubles, outliers: int, rounding: Rounding) -> int | None:
    """Return the rank, if few directions hold everything but what rounding explains.

    They end where a direction is followed by a much weaker one, the last such place among the
    outliers: rounding of changes that are smaller than a step is no even noise, and some of its
    own directions stand out.
    """
    energies = np.square(values)
    most = min(outliers, values.size // 2)
    cliffs = np.flatnonzero(values[:most] >= CLIFF * values[1 : most + 1])
    few = outliers if outliers <= values.size // FEW_PART else 0
    rank = int(cliffs[-1]) + 1 if cliffs.size else few
    left = np.append(energies[::-1].cumsum()[::-1], 0)
    total, tail = float(left[0]), float(left[rank])
    explained = min(max(rounding[0], NEGLIGIBLE_TAIL * total), (1 - rounding[1]) * total)
    return rank if rank and tail <= explained else None
