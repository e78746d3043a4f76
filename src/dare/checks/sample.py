"""What a few rows of a few matrices tell before a merge, and what deltas are too large to drop.

**The sample.** Some rows, spread over the model, are enough to tell a fine-tune from another model,
a LoRA's low-rank delta from a full one, and two models from one that is there twice. It takes
milliseconds and proves nothing: only tensors that are not finite are read again, whole.

**Magnitudes** are counted in bins. A bin is the upper 16 bits of a float32's 31 bits without the
sign: it is 2⁻⁸ of its magnitude wide. One element of a million can hold half of a delta's squares,
and says nothing about the others. So sizes are judged without outliers: the thousandth or so of
elements that are far above all others and hold much of the fourth powers. Gaussian, Laplace and
sparse deltas have none.

**A low rank.** Noise of standard deviation s in a matrix of m rows and n columns has singular
values up to about s·(√m + √n), distributed by the law of Marchenko and Pastur. The median of the
singular values tells how strong the noise is: a few strong directions hardly move it. They are
taken out and the noise is estimated again, until their number stays the same. The edge includes two
standard units of the largest one's own fluctuation (Tracy-Widom), which one noise matrix in a
hundred exceeds. A single large element makes a direction of its own, and so does a large row or
column: they are left out (`without_spikes`, `without_lines`).

**Too large to drop.** Random dropping replaces a change by a gamble whose noise is in proportion to
it. With δ̂ᵢ = mᵢ·δᵢ/(1 - p), mᵢ = 1 with probability 1 - p and else 0, the error
‖δ̂ - δ‖² = Σ δᵢ²·ξᵢ, where ξ is (p/(1 - p))² for what is kept and 1 for what is dropped:
E[ξ] = p/(1 - p) and Var[ξ] = p·(2p - 1)²/(1 - p)³. Relative to ‖δ‖² its standard deviation is
√(Var[ξ]/c), where c = (Σδ²)²/Σδ⁴ is the number of elements that carry the change: all n of them if
they have one magnitude, n/3 for a Gaussian, few for heavy tails or many zeros. By Cantelli's
inequality the squared error is with probability 0.95 no more than

    p/(1 - p) + √19·|2p - 1|·√(p/((1 - p)³·c)),

whatever the distribution. It is taken for the inputs of one output (a row of the matrix), relative
to the base. An analysis counts outliers in both sums, each in one row alone. A sample leaves them
out; what it has not seen is held against the output that the largest element reaches.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.checks.inputs import find_copies
from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.words import times
from dare.inputs.sources import Floats, Source, decoded, hold_open
from dare.kernels.linalg import NOISE, Doubles, one_blas_thread, squared_values
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.names import is_embedding

SMALLEST = 32  # matrices with fewer rows or columns say nothing about rank
DOMINANT = 0.5  # share of the energy that the directions of a low rank usually hold at least
CLIFF = 1.5  # how many times as strong the last direction of a low rank is as the next, at least …
FEW = 16  # … unless all that stand out are fewer than this part of the directions
SPIKE = 5.0  # an element so many times what its row and column let expect is left out
NEGLIGIBLE_TAIL = 0.01  # share of the energy outside a low rank that rounding need not explain
LINE = 16.0  # a row or column with so many times the usual energy is left out

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


# The energy that came into a delta when it was stored, and the share of all the energy that a low
# rank holds beside it, at least.
Rounding = tuple[float, float]
UNROUNDED: Rounding = (0.0, DOMINANT)


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
    return (1.1 / 3 * energy, 0.0) if base_bits > bits else (energy, DOMINANT)


def find_low_rank(delta: Floats, rounding: Rounding = UNROUNDED) -> int | None:
    """Return the rank of a matrix's delta if it is low, as a LoRA's is; else None.

    `rounding` is the energy that may have come into it when it was stored.

    >>> full = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    >>> find_low_rank(full), find_low_rank(full[:, :8] @ full[:8])
    (None, 8)
    """
    delta, missed = without_spikes(without_lines(delta, rounding))
    values = singular_values(delta)
    _, outliers = find_outliers(values, max(delta.shape), missed)
    return low_rank_of(values, outliers, rounding) if values.any() else None


def without_lines(delta: Floats, rounding: Rounding) -> Floats:
    """The matrix without rows and columns that are far larger than the others.

    One of them is a direction of its own, whatever the others are; a low rank stays what it is
    without them. The same matrix if there are none, or if the others are only rounding.
    """
    rest = delta
    for axis in (0, 1, 0, 1):
        energies = np.square(rest, dtype=np.float64).sum(axis=1 - axis)
        if (changed := np.sort(energies[energies > 0])).size:
            rest = np.compress(energies <= LINE * changed[changed.size // 2], rest, axis)
    return rest if rest.size < delta.size and _sum_of_squares(rest) > rounding[0] else delta


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
    """The median of the law of Marchenko and Pastur for noise of variance 1.

    >>> round(median_of_noise(1.0), 3)
    0.653
    """
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    angles = (np.arange(4096) + 0.5) * (math.pi / 4096)
    places = low + (high - low) * (1 - np.cos(angles)) / 2
    masses = np.square(np.sin(angles)) / places  # density times the step that an angle makes
    return float(places[np.searchsorted(np.cumsum(masses), masses.sum() / 2)])


def low_rank_of(values: Doubles, outliers: int, rounding: Rounding) -> int | None:
    """The rank, if few directions hold everything but what rounding explains.

    They end where a direction is followed by a much weaker one, the last such place among the
    outliers: rounding of changes that are smaller than a step is no even noise, and some of its
    own directions stand out.
    """
    energies = np.square(values)
    most = min(outliers, values.size // 2)
    cliffs = np.flatnonzero(values[:most] >= CLIFF * values[1 : most + 1])
    few = outliers if outliers <= values.size // FEW else 0
    rank = int(cliffs[-1]) + 1 if cliffs.size else few
    left = np.append(energies[::-1].cumsum()[::-1], 0)
    total, tail = float(left[0]), float(left[rank])
    explained = min(max(rounding[0], NEGLIGIBLE_TAIL * total), (1 - rounding[1]) * total)
    return rank if rank and tail <= explained else None


# ---------------------------------------------------------------- the error of dropping


DEVIATIONS = math.sqrt(0.95 / (1 - 0.95))  # √19, which hold with probability 0.95
# How many times its bound the error may be. It is predicted from parts of a few matrices: of the
# demonstration's models and others with normal, heavy-tailed and low-rank changes these gave 0.98
# to 1.25 times the error that an analysis of the whole model gives.
SAMPLE_MARGIN = 1.5


@dataclass(frozen=True)
class Exposure:
    """The figures of a tensor that decide how much dropping it bears."""

    elements: int
    relative_norm: float  # ‖δ‖ / ‖base‖; infinite if the base is zero
    carriers: float  # elements that carry an output's change: a row's inputs over the kurtosis
    base_square: float = 0.0  # mean of the base's squares; known of samples alone

    @classmethod
    def of(
        cls, elements: int, shape: tuple[int, ...], relative_norm: float, concentration: float
    ) -> Exposure:
        """Return that of a tensor whose changes count as spread evenly over the rows.

        `concentration` is n·Σδ⁴/(Σδ²)², at least 1; 0 if nothing is changed. A row makes one
        output: it has all dimensions but the first. A vector is one row.

        >>> Exposure.of(24, (2, 3, 4), 0.1, 3.0).carriers, Exposure.of(24, (24,), 0.1, 3.0).carriers
        (4.0, 8.0)
        """
        width = elements // shape[0] if len(shape) > 1 and shape[0] else elements
        carriers = width / max(concentration, 1.0) if concentration else 0.0
        return cls(elements, relative_norm, carriers)


def relative_error(drop_rate: float) -> float:
    """Return √(E‖δ̂ - δ‖²) / ‖δ‖, of any delta.

    >>> relative_error(0.5), round(relative_error(0.9), 9)
    (1.0, 3.0)
    """
    return math.sqrt(drop_rate / (1 - drop_rate))


def bounded_error(exposure: Exposure, drop_rate: float) -> float:
    """Return what an output's relative error stays under with probability 0.95 at a drop rate.

    >>> bounded_error(Exposure(10**6, 0.02, 1000.0), 0.8)
    0.0439...
    """
    p = drop_rate
    if not p or not exposure.carriers:
        return 0.0
    kept = (1 / (1 - p) - 1) ** 2
    spread = abs(kept - 1) * math.sqrt(p * (1 - p) / exposure.carriers)
    return exposure.relative_norm * math.sqrt(p + (1 - p) * kept + DEVIATIONS * spread)


def combined_error(tensors: Iterable[tuple[Exposure, float]]) -> float:
    """Return the bounded error of tensors, each with a drop rate, as the root of the mean square.

    Tensors that are unchanged count with an error of 0, those whose base is zero not at all.
    """
    total, squares = 0, 0.0
    for exposure, rate in tensors:
        if math.isfinite(exposure.relative_norm):
            total += exposure.elements
            squares += exposure.elements * bounded_error(exposure, rate) ** 2
    return math.sqrt(squares / total) if total else 0.0


# ---------------------------------------------------------------- after a merge


@dataclass(frozen=True)
class MergedTensor:
    """One tensor of a model, as it came out of a merge."""

    model: int
    tensor: TensorPlan
    largest_delta: float
    over_threshold: int
    survivors: Sequence[int]  # elements left after each delta stage

    @cached_property
    def drop_rates(self) -> tuple[float, float]:
        """The share that was dropped at random, and the share that was asked for.

        The first by what survived each stage; so is the second where a stage has no `drop_rate`.
        """
        drop = self.tensor.drop_of(self.model)
        kept = asked = 1.0 if drop is None else 1.0 - drop.rate
        counts = (self.tensor.elements, *self.survivors)
        settings = self.tensor.settings_of(self.model)
        for position, draw in enumerate(self.tensor.draws_of(self.model)):
            if draw is not None and counts[position]:
                left = counts[position + 1] / counts[position]
                kept *= left
                asked *= 1.0 - settings[position].get("drop_rate", 1.0 - left)
        return 1.0 - kept, 1.0 - max(asked, 1e-9)  # less than everything


def find_largest(merged: Iterable[MergedTensor]) -> tuple[float, str]:
    """Return the largest |δ| of a model, or the first that is NaN, and the tensor that has it."""
    largest, where = 0.0, ""
    for each in merged:
        peak = each.largest_delta
        if peak > largest or (math.isnan(peak) and not math.isnan(largest)):
            largest, where = peak, each.tensor.name
    return largest, where


def find_large_deltas(
    plan: Plan, merged: Sequence[MergedTensor], sampled: Mapping[str, Exposure]
) -> Iterator[Notice]:
    """Yield a notice if a model's deltas are too large for random dropping.

    That is so if elements exceed `delta_threshold` and, where matrices were `sampled`, the
    predicted error is above its bound. A threshold that the user gives warns of every element.
    """
    randomly_dropped = [each for each in merged if each.drop_rates[0] > 0]
    is_given = plan.recipe.has_given_threshold
    counted = merged if is_given else randomly_dropped
    elements = sum(each.tensor.elements for each in counted)
    over = sum(each.over_threshold for each in counted)
    error = _predicted_error(randomly_dropped, sampled) if randomly_dropped else 0.0
    within_bound = error <= SAMPLE_MARGIN * LIMIT.output_error
    if not over or (within_bound and not is_given):
        return
    share, (peak, where) = over / elements, find_largest(merged)
    is_too_large = not within_bound and math.isfinite(error)
    reason, remedy = _reason_and_remedy(randomly_dropped, is_too_large=is_too_large)
    large = [each for each in counted if each.over_threshold]
    most = max(large, key=lambda each: each.over_threshold)
    place = f"the most, {most.over_threshold:,}, in {most.tensor.name}"
    yield notice(
        "large_deltas",
        plan.model_names[merged[0].model],
        threshold=plan.recipe.delta_threshold,
        over=over,
        elements=elements,
        share=share,
        most=f" of {times(len(large), 'tensor')}, {place}" if is_given else "",
        peak=peak,
        where=where,
        reason=reason,
        remedy=remedy,
    )


def _predicted_error(dropped: Sequence[MergedTensor], sampled: Mapping[str, Exposure]) -> float:
    """Return the predicted error of the outputs, relative to the base's; infinite if unknown.

    It is that of all outputs, or of the one that the largest element of a tensor reaches.
    """
    rates = {each.tensor.name: each.drop_rates[1] for each in dropped}
    known = [(e, rates[n]) for n, e in sampled.items() if n in rates and e.relative_norm < math.inf]
    if not known:
        return math.inf
    base = math.sqrt(sum(exposure.base_square for exposure, _ in known) / len(known))
    widths = (math.prod(each.tensor.shape[1:] or each.tensor.shape) for each in dropped)
    sizes = (each.largest_delta * relative_error(each.drop_rates[1]) for each in dropped)
    single = max(size / math.sqrt(width) for size, width in zip(sizes, widths, strict=True))
    return max(combined_error(known), single / base)


def _reason_and_remedy(dropped: Sequence[MergedTensor], *, is_too_large: bool) -> tuple[str, str]:
    """Say why that matters and what to do, where changes are dropped at random."""
    if not dropped:
        return "", ""
    reason = "DARE works best where changes are small"
    if is_too_large:
        elements = sum(each.tensor.elements for each in dropped)
        asked = sum(each.drop_rates[1] * each.tensor.elements for each in dropped) / elements
        reason = (
            f"Dropping {round(100 * asked, 2):g}% of the changes at random is predicted to move "
            f"the layers' outputs by more than {LIMIT.output_error:.0%}"
        )
    names = dict.fromkeys(
        stage.name
        for each in dropped
        for stage, draw in zip(each.tensor.stages, each.tensor.draws_of(each.model), strict=False)
        if draw is not None
    )
    leave = f", or leave {' and '.join(names)} out of the method" if names else ""
    return f". {reason}", f"Compare merges with a lower drop_rate{leave}"


# ---------------------------------------------------------------- the sample


MATRICES, ROWS, COLUMNS = 4, 128, 256  # the most that is sampled
RELATED_ROWS = 64  # of these, the rows by which models are compared with each other
WIDEST_READ_WHOLE = 4096  # rows up to this width are faster read whole, all at once


@dataclass(frozen=True)
class SampledMatrix:
    """Some rows of a matrix: the base's, and a model's delta to it."""

    tensor: TensorPlan
    base: Floats
    delta: Floats

    @cached_property
    def inliers(self) -> Floats:
        """The delta with zeros in place of its outliers."""
        usual = math.sqrt(_sum_of_squares(self.base) / self.base.size)
        if not np.isfinite(usual):
            return self.delta
        bound = bin_edge(outlier_bin(Magnitudes.of(self.delta), self.delta.size, usual))
        return np.where(np.abs(self.delta) < bound, self.delta, np.float32(0))

    @property
    def exposure(self) -> Exposure:
        """The figures that decide how much dropping the matrix bears."""
        squares = np.square(self.inliers, dtype=np.float64)
        total, of_base = float(squares.sum()), _sum_of_squares(self.base)
        ratio = math.sqrt(total / of_base) if of_base else math.inf
        concentration = self.delta.size * _sum_of_squares(squares) / total**2 if total else 0.0
        exposure = Exposure.of(self.tensor.elements, self.tensor.shape, ratio, concentration)
        return replace(exposure, base_square=of_base / self.base.size)


@dataclass(frozen=True)
class SampledModels:
    """The findings of a sample."""

    notices: tuple[Notice, ...] = ()
    exposures: tuple[Mapping[str, Exposure], ...] = ()  # by model, then by matrix
    not_finite: tuple[TensorPlan, ...] = ()  # tensors in which a delta is not finite
    low_ranks: tuple[int | None, ...] = ()  # by model: about the rank of its change, if it is low


def sample_models(plan: Plan, *, finds_rank: bool = False) -> SampledModels:
    """Sample the weights of a planned merge.

    Ranks are sought where dropping may hurt a LoRA, or if `finds_rank` asks for them.
    """
    notices: list[Notice] = []
    exposures: list[Mapping[str, Exposure]] = []
    not_finite: dict[str, TensorPlan] = {}
    ranks: list[int | None] = []
    contents: list[Any] = []  # None where nothing that was sampled is changed
    deltas: dict[str, Mapping[str, Floats]] = {}  # by model, then by matrix: some rows
    with hold_open((plan.base, *plan.models)), np.errstate(invalid="ignore", over="ignore"):
        for model, (name, sample) in enumerate(_read_samples(plan)):
            settings = (table for each in sample for table in each.tensor.settings_of(model))
            rate = max((table.get("drop_rate", 0.0) for table in settings), default=0.0)
            may_hurt = rate > LIMIT.low_rank_rate
            rank = _low_rank(plan.models[model], sample) if finds_rank or may_hurt else None
            notices += _unrelated(name, sample)
            if rank is not None and may_hurt:
                notices.append(notice("low_rank", name, rank=rank, rate=rate))
            ranks.append(rank)
            digests = {each.tensor.name: bytes_digest((each.delta + 0).data) for each in sample}
            contents.append(digests if any(each.delta.any() for each in sample) else None)
            exposures.append({each.tensor.name: each.exposure for each in sample})
            deltas[name] = {each.tensor.name: each.delta[:RELATED_ROWS].copy() for each in sample}
            broken = (each.tensor for each in sample if not np.isfinite(each.delta).all())
            not_finite |= {tensor.name: tensor for tensor in broken}
        notices += find_copies(plan, contents)
        notices += _swapped_base(plan, deltas)
    return SampledModels(tuple(notices), tuple(exposures), tuple(not_finite.values()), tuple(ranks))


def is_unrelated(ratio: float, base_share: float) -> bool:
    """Tell a model that was trained apart from the base by ‖δ‖/‖base‖ and 1 + δ·base/‖base‖².

    A change that is independent of the base leaves all of the base in a model, however large it
    is: the share is about 1. Independent weights have about 0 of it.
    """
    return ratio >= LIMIT.unrelated_ratio and base_share < LIMIT.unrelated_share


def _read_samples(plan: Plan) -> Iterator[tuple[str, list[SampledMatrix]]]:
    """Yield each model's name and its part of some matrices that are spread over the model."""
    matrices = [
        tensor
        for tensor in plan.merged()
        if len(tensor.shape) == 2
        and min(tensor.shape) >= SMALLEST
        and not is_embedding(tensor.name)
    ]
    chosen = [matrices[place] for place in spread(len(matrices), MATRICES)]
    bases = [_read_rows(plan.base, tensor, plan.backend) for tensor in chosen]
    for model, source in enumerate(plan.models):
        sample = []
        for tensor, base in zip(chosen, bases, strict=True):
            if model in tensor.models and tensor.name in source.tensors:
                values = _read_rows(source, tensor, plan.backend)
                delta = values if source.delta_of(tensor.name).is_change else values - base
                sample.append(SampledMatrix(tensor, base, delta))
        yield plan.model_names[model], sample


def _read_rows(source: Source, tensor: TensorPlan, backend: str) -> Floats:
    """Read rows from the middle of a matrix, from their first column on."""
    height, width = tensor.shape
    rows, columns = min(ROWS, height), min(COLUMNS, width)
    first, carrier = (height - rows) // 2, source.tensors[tensor.name].dtype.carrier
    if width <= WIDEST_READ_WHOLE:
        raw = np.empty((rows, width), carrier)
        source.read(tensor.name, first * width, raw.reshape(-1))
        raw = np.ascontiguousarray(raw[:, :columns])
    else:
        raw = np.empty((rows, columns), carrier)
        for row, into in enumerate(raw, start=first):
            source.read(tensor.name, row * width, into)
    return decoded(raw.reshape(-1), backend).reshape(rows, columns)


def _sum_of_squares(values: NDArray[np.floating]) -> float:
    # Not np.linalg.norm: the threads of BLAS take longer to start than this.
    return float(np.square(values, dtype=np.float64).sum())


def _unrelated(name: str, sample: Sequence[SampledMatrix]) -> Iterator[Notice]:
    base_norm = math.sqrt(sum(_sum_of_squares(each.base) for each in sample))
    if not base_norm:  # there is nothing that the model could belong to
        return
    ratio = math.sqrt(sum(_sum_of_squares(each.inliers) for each in sample)) / base_norm
    products = (float((each.base * each.delta).sum(dtype=np.float64)) for each in sample)
    if is_unrelated(ratio, held := 1 + sum(products) / base_norm**2):
        yield notice("unrelated", name, ratio=ratio, base_share=held, left_out="")


def _swapped_base(plan: Plan, deltas: Mapping[str, Mapping[str, Floats]]) -> Iterator[Notice]:
    """Warn if a model may be the real base, unless the recipe interpolates whole models."""
    relations, norms = {}, dict[str, float]()
    for name, sample in deltas.items():
        norms[name] = math.sqrt(sum(map(_sum_of_squares, sample.values())))
    for (first, one), (second, other) in itertools.combinations(deltas.items(), 2):
        products = (one[n] * other[n] for n in one.keys() & other.keys())
        product = sum(float(each.sum(dtype=np.float64)) for each in products)
        cosine = product / (norms[first] * norms[second] or math.inf)
        if abs(cosine) < LIMIT.same_cosine:  # others are copies or multiples, or not finite
            relations[first, second] = cosine, product / (norms[first] ** 2 or math.inf)
    entries = zip(plan.model_names, plan.recipe.models, strict=True)
    files = {name: str(entry.file) for name, entry in entries}
    found = find_real_base(str(plan.recipe.base), files, relations)
    if found and not plan.recipe.interpolates:
        yield notice("contained", *found["concerns"], **found)


def find_real_base(
    base: str, files: Mapping[str, str], relations: Mapping[tuple[str, str], tuple[float, float]]
) -> dict[str, Any]:
    """Return the sign that models were trained from one of them, not from the base; empty if none.

    Let A be the given base, B a model, and C one that was trained from B. Then C - A is B - A and
    what C has learnt, which does not know of B - A: its projection onto B - A is 1. `files` are
    those of the models, and `relations` for two models the cosine of their deltas and the multiple
    of the first one's delta that is nearest to the second one's.
    """
    for name, file in files.items():
        shares: dict[str, tuple[float, float]] = {}
        for ends, (cosine, ratio) in relations.items():
            if name in ends and set(ends) <= files.keys():
                share = ratio if name == ends[0] else cosine * cosine / (ratio or math.inf)
                shares[ends[name == ends[0]]] = share, cosine
        if shares and all(_is_whole(*share) for share in shares.values()):
            other, is_one = next(iter(shares)), len(shares) == 1
            rest = (own for model, own in files.items() if model != name)
            return {
                "concerns": (name,),
                "who": f"{other} contains" if is_one else "All other models contain",
                "they": f"{other} was" if is_one else "the others were",
                "command": shlex.join(["dare", file, base, *rest]),
                "ratios": {f"share.{other}": share for other, (share, _) in shares.items()},
            }
    return {}


def _is_whole(share: float, cosine: float) -> bool:
    """Tell if a model contains so much of another's delta that it was made from it.

    Two that were made from a third share less than the whole of either: no more than the cosine.
    """
    off = min(LIMIT.whole_step, (1 - cosine) / 4)
    return abs(share - 1) <= off and cosine > LIMIT.apart_cosine


def _low_rank(source: Source, sample: Sequence[SampledMatrix]) -> int | None:
    """Return the largest rank of the changes of a model, if each of them is low."""
    largest = None
    with one_blas_thread():  # the matrices are small, and more threads take ten times as long
        for each in (each for each in sample if each.delta.any()):
            info, base = source.tensors[each.tensor.name], each.tensor.base.dtype.name
            is_exact = source.delta_of(info.name).is_change
            rounding = UNROUNDED if is_exact else find_rounding(each.base, base, info.dtype.name)
            is_finite = np.isfinite(each.delta).all() and np.isfinite(each.base).all()
            rank = find_low_rank(each.delta, rounding) if is_finite else None
            if rank is None:  # one is enough: no need to try the others
                return None
            largest = max(rank, largest or 0)
    return largest
