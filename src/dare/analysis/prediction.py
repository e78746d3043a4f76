"""The error that dropping will cause in a delta, from its measured moments.

With δ̂ᵢ = mᵢ·δᵢ/(1 - p), mᵢ = 1 with probability 1 - p and else 0:

    bias      E[δ̂] - δ = 0
    variance  Var[δ̂ᵢ] = p/(1 - p)·δᵢ²
    error     E‖δ̂ - δ‖²/‖δ‖² = p/(1 - p)

An output of a layer is y = Σ (wⱼ + δⱼ)·xⱼ. If the inputs x prefer no direction, the error of all
outputs relative to the base's is that of δ̂ times ‖δ‖/‖w‖. Real inputs do prefer some directions,
and the effect of an error on answers depends on the kind of model: this is only an order of
magnitude (docs/evidence.md).

That is the mean. `dare.checks.dropping` says how far one mask can be from it. Errors of
different layers are independent and their variances add up, so squares are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dare.analysis.results import Kind, ModelAnalysis, Statistics, ratio
from dare.checks.dropping import Exposure, combined_error, relative_error
from dare.documents.notices import LIMIT
from dare.tensors.mask import check_drop_rate

STEPS = 100  # recommended drop rates are hundredths
OUTER = (Kind.EMBEDDING, Kind.HEAD)  # kinds of tensors whose rows are tokens


@dataclass(frozen=True)
class Prediction:
    """The expected effect of dropping at a rate."""

    drop_rate: float
    relative_error: float  # √E‖δ̂ - δ‖² / ‖δ‖
    # The same for a layer's outputs, relative to the base's, for inputs that prefer no direction;
    # infinite if the base is zero.
    output_error: float
    variance: float  # mean over the elements of Var[δ̂ᵢ]


def predict(statistics: Statistics, drop_rate: float) -> Prediction:
    """Predict the effect of dropping on a delta with these statistics."""
    p = check_drop_rate(drop_rate)
    error, size = relative_error(p), ratio(statistics.norm, statistics.base_norm)
    output_error = error * size if error and size else 0.0
    return Prediction(p, error, output_error, p / (1 - p) * mean_square(statistics))


def mean_square(statistics: Statistics) -> float:
    """Return the mean of δ²; elements that are not finite do not count."""
    finite = statistics.elements - statistics.not_finite
    return statistics.norm**2 / finite if finite else 0.0


# ---------------------------------------------------------------- tolerated drop rates


def exposures_of(model: ModelAnalysis) -> list[Exposure]:
    """Return a model's exposures, without embeddings and head if there are other tensors."""
    inner = [tensor for tensor in model.tensors if tensor.kind not in OUTER]
    return [exposure_of(tensor.statistics, tensor.shape) for tensor in inner or model.tensors]


def exposure_of(statistics: Statistics, shape: tuple[int, ...]) -> Exposure:
    """Return a tensor's exposure, with its outliers.

    Their share of the error is a sum of squares like that of other elements. An outlier is in only
    one row, and all that is known of their fourth powers is Σδ⁴ ≤ max δ²·Σδ².
    """
    known, whole = statistics.inliers, statistics.norm or 1.0
    inside = min((known.norm / whole) ** 2, 1.0)
    rows = shape[0] or 1 if len(shape) > 1 else 1  # without outliers, `inside` is 1
    outer = statistics.elements / rows * (statistics.largest / whole) ** 2 * (1 - inside)
    size = ratio(statistics.norm, statistics.base_norm)
    return Exposure.of(statistics.elements, shape, size, known.concentration * inside**2 + outer)


def tolerated_drop_rate(
    exposures: Iterable[Exposure],
    bound: float = LIMIT.output_error,
    highest: float = LIMIT.highest_rate,
) -> float:
    """Return the largest drop rate, in hundredths, that changed tensors tolerate together.

    At that rate the bounded error of their outputs (root of the mean square, by elements) is at
    most `bound`, and the rate is at most `highest`: 0.05 and 0.95 by default. Tensors whose base is
    zero have no relative error and do not count; if there are no others, it is the rate at which
    enough carriers survive. 0 if nothing is changed: there is nothing to drop.

    >>> tolerated_drop_rate([Exposure(10**6, 0.02, 1000.0)])
    0.83
    """
    changed = [exposure for exposure in exposures if exposure.carriers > 0]
    if not changed:
        return 0.0
    if not any(math.isfinite(exposure.relative_norm) for exposure in changed):
        elements = sum(exposure.elements for exposure in changed)
        carriers = elements / sum(exposure.elements / exposure.carriers for exposure in changed)
        surviving = math.floor(STEPS * (1 - LIMIT.survivors / carriers) + 1e-9) / STEPS
        return min(max(0.0, surviving), highest)
    rates = [step / STEPS for step in range(STEPS - 1, 0, -1) if step / STEPS <= highest]
    return next((rate for rate in rates if mean_bounded_error(changed, rate) <= bound), 0.0)


def mean_bounded_error(exposures: Sequence[Exposure], drop_rate: float) -> float:
    """Return the bounded error of several tensors' outputs, as the root of the mean square.

    Unchanged tensors count with an error of 0; tensors whose base is zero do not count.
    """
    return combined_error((exposure, drop_rate) for exposure in exposures)
