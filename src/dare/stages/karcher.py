"""The mean of many models on the sphere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dare.stages.angles import INTERPOLATES, PARALLEL, Space, length_of, on_sphere, sum_in, unit
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.registry import Settings, always, combine_stage

MAX_STEPS = 1000
SHORTEST_STEP = 1e-12  # the length of a step that ends the iteration; the sphere's radius is 1


def survey_mean(view: JointView, *, on: Space) -> list[float]:
    """Find the coefficient of each model from the angles between them."""
    products = view.dots(with_base=on == "weights")
    whole = math.fsum(view.weights)
    return on_sphere(products, [weight / whole for weight in view.weights], _mean_direction)


def weights_fault(_settings: Settings, weights: Sequence[float]) -> str:
    """Say why a mean cannot have such weights: each must be a share of the whole."""
    is_mean = min(weights) >= 0 and sum(weights) > 0
    return "" if is_mean else ": karcher takes a mean, and needs weights of 0 or more, not all 0"


def _mean_direction(
    cosines: NDArray[np.float64], weights: Sequence[float]
) -> NDArray[np.float64] | None:
    """Find the Karcher mean as a sum of the unit vectors; None where it is not defined.

    Newton's usual step: the mean of the others seen from here (their logarithms) is walked along.
    Sums are exact, so that they do not depend on the order of the models.
    """
    shares = [weight / math.fsum(weights) for weight in weights]
    mean = unit(np.array(shares), cosines)
    for _ in range(MAX_STEPS):
        if mean is None:
            return None
        seen = [math.fsum(row) for row in cosines * mean]
        if min(seen) < -PARALLEL:  # every way to the opposite point is as short
            return None
        pulls = [s * _stretch(cosine) for s, cosine in zip(shares, seen, strict=True)]
        back = math.fsum(pull * cosine for pull, cosine in zip(pulls, seen, strict=True))
        step = np.array(pulls) - back * mean
        length = length_of(step, cosines)
        if length < SHORTEST_STEP:
            break
        mean = unit(math.cos(length) * mean + math.sin(length) / length * step, cosines)
    return mean


def _stretch(cosine: float) -> float:
    """Return θ/sin θ, which turns a chord's shadow into the way along the arc."""
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    return angle / math.sin(angle) if angle > 1e-7 else 1.0


@combine_stage(
    paper="arXiv:2603.04972",
    survey=survey_mean,
    is_lazy=always,
    weights_fault=weights_fault,
    **INTERPOLATES,
)
def karcher(deltas: Deltas, *, on: Space = "weights") -> Floats:
    """Average the directions of the models' tensors on the sphere, and their lengths.

    The Karcher mean m minimises Σ wᵢ·∠(m, aᵢ)², where the weights are divided by their sum. The
    result is m, of length Σ wᵢ·‖aᵢ‖. The aᵢ are the whole tensors after the delta stages
    (`on = "weights"`) or their deltas (`on = "deltas"`). A tensor of zeros has no direction and
    counts for the length alone. It is Σ wᵢ·aᵢ, the straight mean, where the
    directions cancel (‖Σ wᵢ·aᵢ/‖aᵢ‖‖ < 10⁻⁵) or one is opposite to m (a cosine below -0.9995).
    """
    return sum_in(deltas, deltas.summary, on)
