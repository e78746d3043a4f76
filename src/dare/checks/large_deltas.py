"""Deltas that are too large to drop at random: the predicted error, and the notice after a merge.

Random dropping replaces a change by a gamble whose noise is in proportion to it. With
δ̂ᵢ = mᵢ·δᵢ/(1 - p), mᵢ = 1 with probability 1 - p and else 0, the error ‖δ̂ - δ‖² = Σ δᵢ²·ξᵢ, where
ξ is (p/(1 - p))² for what is kept and 1 for what is dropped: E[ξ] = p/(1 - p) and
Var[ξ] = p·(2p - 1)²/(1 - p)³. Relative to ‖δ‖² its standard deviation is √(Var[ξ]/c), where
c = (Σδ²)²/Σδ⁴ is the number of elements that carry the change: all n of them if they have one
magnitude, n/3 for a Gaussian, few for heavy tails or many zeros. By Cantelli's inequality the
squared error is with probability 0.95 no more than

    p/(1 - p) + √19·|2p - 1|·√(p/((1 - p)³·c)),

whatever the distribution. It is taken for the inputs of one output (a row of the matrix), relative
to the base, without outliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dare.documents.notices import LIMIT, Notice, Severity, notice
from dare.documents.words import times
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan

DEVIATIONS = math.sqrt(0.95 / (1 - 0.95))  # √19, which hold with probability 0.95
# A share of large elements that is no reason to warn. In a Gaussian delta with so many above the
# threshold, |δ| is on average half of the threshold.
FEWEST_LARGE = 0.1
MOSTLY_LARGE = 0.5  # from here on it is severe: |δ| is above the threshold on average too
# How many times its bound the error may be. It is predicted from parts of a few matrices: of the
# demonstration's models and others with normal, heavy-tailed and low-rank changes these gave 0.98
# to 1.25 times the error that an analysis of the whole model gives.
SAMPLE_MARGIN = 1.5


@dataclass(frozen=True)
class Exposure:
    """The figures of a tensor that decide how much dropping it bears."""

    elements: int
    relative_norm: float  # ‖δ‖ / ‖base‖ without outliers; infinite if the base is zero
    carriers: float  # elements that carry an output's change: a row's inputs over the kurtosis

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

    plan: Plan
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
        for position, draw in enumerate(self.tensor.draws_of(self.plan.stages, self.model)):
            if draw is not None and counts[position]:
                left = counts[position + 1] / counts[position]
                kept *= left
                asked *= 1.0 - settings[position].get("drop_rate", 1.0 - left)
        return 1.0 - kept, 1.0 - asked


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

    That is so if many elements exceed `delta_threshold` and, where matrices were `sampled`, the
    predicted error is above its bound. A threshold that the user gives warns of every element.
    """
    gambled = {each.tensor.name: each for each in merged if each.drop_rates[0] > 0}
    is_given = plan.recipe.has_given_threshold
    counted = merged if is_given else list(gambled.values())
    elements = sum(each.tensor.elements for each in counted)
    over = sum(each.over_threshold for each in counted)
    if not over or (not is_given and over < FEWEST_LARGE * elements):
        return
    exposed = [
        (exposure, gambled[name].drop_rates[0])
        for name, exposure in sampled.items()
        if name in gambled and exposure.carriers and math.isfinite(exposure.relative_norm)
    ]
    is_small = bool(exposed) and combined_error(exposed) <= SAMPLE_MARGIN * LIMIT.output_error
    is_borne = not gambled or is_small
    if is_borne and not is_given:
        return
    share, (peak, where) = over / elements, find_largest(merged)
    is_too_large = bool(exposed) and not is_borne
    reason, remedy = _reason_and_remedy(list(gambled.values()), is_too_large=is_too_large)
    large = [each for each in counted if each.over_threshold]
    most = max(large, key=lambda each: each.over_threshold)
    place = f"the most, {most.over_threshold:,}, in {most.tensor.name}"
    yield notice(
        "large_deltas",
        plan.model_names[merged[0].model],
        severity=Severity.SEVERE if share >= MOSTLY_LARGE and not is_borne else Severity.WARNING,
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


def _reason_and_remedy(gambled: Sequence[MergedTensor], *, is_too_large: bool) -> tuple[str, str]:
    """Say why that matters and what to do, where changes are dropped at random."""
    if not gambled:
        return "", ""
    reason = "DARE works best where changes are small"
    if is_too_large:
        elements = sum(each.tensor.elements for each in gambled)
        asked = sum(each.drop_rates[1] * each.tensor.elements for each in gambled) / elements
        reason = (
            f"Relative to the base these changes are too large to drop {round(100 * asked, 2):g}% "
            "of them at random: the predicted error of its layers' outputs is above the bound of "
            f"{LIMIT.output_error:.0%}"
        )
    first = gambled[0]
    draws = first.tensor.draws_of(first.plan.stages, first.model)
    stages = zip(first.plan.stages, draws, strict=False)
    names = [stage.name for stage, draw in stages if draw is not None]
    leave = f", or leave {' and '.join(names)} out of the method" if names else ""
    return f". {reason}", f"Lower drop_rate{leave}"
