"""What random dropping does to the outputs of layers, and which changes are too large for it.

Dropping at random adds noise to a change, in proportion to it. With δ̂ᵢ = mᵢ·δᵢ/(1 - p), mᵢ = 1
with probability 1 - p and else 0, the error is ‖δ̂ - δ‖² = Σ δᵢ²·ξᵢ, where ξ is (p/(1 - p))² for
what is kept and 1 for what is dropped:
E[ξ] = p/(1 - p) and Var[ξ] = p·(2p - 1)²/(1 - p)³. Relative to ‖δ‖² its standard deviation is
√(Var[ξ]/c), where c = (Σδ²)²/Σδ⁴ is the number of elements that carry the change: all n of them if
they have one magnitude, n/3 for a Gaussian, few for heavy tails or many zeros. By Cantelli's
inequality the squared error is with probability 0.95 no more than

    p/(1 - p) + √19·|2p - 1|·√(p/((1 - p)³·c)),

whatever the distribution. It is taken for the inputs of one output (a row of the matrix), relative
to the base. An analysis counts outliers in both sums, each in one row alone. A sample leaves them
out; what it has not seen is judged by the output that the largest element reaches.

One element of a million can hold half of a delta's squares, and says nothing about the others. So
sizes are judged without outliers: the thousandth or so of elements that are far above all others
and hold much of the fourth powers. Gaussian, Laplace and sparse deltas have none. They are found by
magnitudes counted in bins: the upper 16 bits of a float32's 31 bits without the sign, 2⁻⁸ of the
magnitude wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.words import counted
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan

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


def outlier_bin(magnitudes: Magnitudes, elements: int, base_size: float = 0.0) -> int:
    """Return the first bin whose elements are outliers; the bin after the last if there are none.

    Where next to nothing is changed, outliers are changes larger than `base_size`, the usual size
    of the base's weights.

    >>> even = np.full(1000, 10)
    >>> outlier_bin(Magnitudes(32000, even), 10_000) - 32000
    1000
    >>> outlier_bin(Magnitudes(32000, np.append(even, [0] * 1000 + [1])), 10_001) - 32000
    1195
    """
    counts = magnitudes.counts
    end, changed = magnitudes.first + counts.size, int(counts.sum())
    limit = base_size
    if changed >= FEW_CHANGED:
        of_all = min(OUTLIER_SHARE_OF_ALL * elements, MOST_OUTLIERS * changed)
        allowed = int(max(OUTLIER_SHARE * changed, of_all))
        highest_ordinary = top_bin(magnitudes, max(allowed, 1) + 1)
        limit = float(bin_edge(highest_ordinary + 1))
        limit *= OUTLIER_RATIO if allowed else OUTLIER_RATIO_OF_FEW
    elif changed > OUTLIER_SHARE * elements:
        return end
    with np.errstate(over="ignore"):
        first = (int(np.float32(limit).view(np.uint32)) >> BIN_SHIFT) + 1
    place = max(first - magnitudes.first, 0)
    fourths = counts * magnitudes.middles**4
    if place >= counts.size or fourths[place:].sum() < OUTLIER_FOURTHS * fourths.sum():
        return end
    return magnitudes.first + place


def top_bin(magnitudes: Magnitudes, count: int) -> int:
    """Return the lowest of the top bins needed to hold `count` elements, or all there are.

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


# ---------------------------------------------------------------- what dropping does


# √19: by so many standard deviations the error exceeds its mean with a probability of 0.05 at most.
DEVIATIONS = math.sqrt(0.95 / (1 - 0.95))
# How many times its bound the error may be. It is predicted from parts of a few matrices: of the
# demonstration's models and others with normal, heavy-tailed and low-rank changes these gave 0.98
# to 1.25 times the error that an analysis of the whole model gives.
SAMPLE_MARGIN = 1.5


@dataclass(frozen=True)
class Exposure:
    """The figures of a tensor that decide how much dropping it tolerates."""

    elements: int
    relative_norm: float  # ‖δ‖ / ‖base‖; infinite if the base is zero
    carriers: float  # elements that carry an output's change: a row's inputs over the kurtosis
    base_square: float = 0.0  # mean of the base's squares; known of samples alone

    @classmethod
    def of(
        cls, elements: int, shape: tuple[int, ...], relative_norm: float, concentration: float
    ) -> Exposure:
        """Return the figures of a tensor whose changes count as spread evenly over its rows.

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

        The first is counted by what survived each stage. So is the second, where a stage has no
        `drop_rate`.
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
    concerned = merged if is_given else randomly_dropped
    elements = sum(each.tensor.elements for each in concerned)
    over = sum(each.over_threshold for each in concerned)
    error = _predicted_error(randomly_dropped, sampled) if randomly_dropped else 0.0
    within_bound = error <= SAMPLE_MARGIN * LIMIT.output_error
    if not over or (within_bound and not is_given):
        return
    share, (peak, where) = over / elements, find_largest(merged)
    is_too_large = not within_bound and math.isfinite(error)
    reason, remedy = _reason_and_remedy(randomly_dropped, is_too_large=is_too_large)
    large = [each for each in concerned if each.over_threshold]
    most = max(large, key=lambda each: each.over_threshold)
    place = f"the most, {most.over_threshold:,}, in {most.tensor.name}"
    yield notice(
        "large_deltas",
        plan.model_names[merged[0].model],
        threshold=plan.recipe.delta_threshold,
        over=over,
        elements=elements,
        share=share,
        most=f" of {counted(len(large), 'tensor')}, {place}" if is_given else "",
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
    """Return why large deltas matter and what to do, where changes are dropped at random."""
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
