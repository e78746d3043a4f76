"""Tensors as directions: interpolation along arcs, and means on the sphere.

Any point between models on a sphere is a sum of the models with coefficients that follow from their
inner products alone. So one pass over a tensor is enough, however the coefficients are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from dare.kernels.linalg import Doubles
from dare.stages.averages import Lines, Tensors, on_weights, sum_in, sum_lines, weights_fault
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.matrices import as_matrix
from dare.stages.registry import Settings, always, combine_stage, meaning

PARALLEL = 0.9995  # cosine beyond which two tensors count as parallel, and the sphere as flat
CANCELLED = 1e-5  # directions whose mean is shorter than this have none

Space = Annotated[Tensors, meaning("Interpolate the models' tensors, or only their deltas.")]


def arc_between(
    product: float, first_squared: float, second_squared: float, t: float
) -> tuple[float, float]:
    """Return the coefficients of two tensors at `t` on the arc between them.

    It is straight where they are (anti)parallel or one is zero.

    >>> arc_between(6.0, 4.0, 9.0, 0.25)
    (0.75, 0.25)
    """
    norms = math.sqrt(first_squared) * math.sqrt(second_squared)
    cosine = product / norms if norms else 1.0
    if not abs(cosine) <= PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def on_sphere(
    products: Sequence[Sequence[float]],
    weights: Sequence[float],
    find: Callable[[Doubles, Sequence[float]], Doubles | None],
) -> list[float]:
    """Return the coefficients of the sum that has a mean direction, and the mean of the lengths.

    The direction is found as a sum of unit vectors, by their cosines and weights. Zeros have none.
    The coefficients are the weights, straight, where it is None, a length is not finite, or fewer
    than two tensors have a direction.
    """
    lengths = [math.sqrt(row[i]) for i, row in enumerate(products)]
    taken = [i for i, length in enumerate(lengths) if length > 0 and weights[i] != 0]
    if not all(map(math.isfinite, lengths)) or len(taken) < 2:
        return list(weights)
    cosines = np.array([[products[i][j] / (lengths[i] * lengths[j]) for j in taken] for i in taken])
    direction = find(cosines, [weights[i] for i in taken])
    if direction is None:
        return list(weights)
    length = math.fsum(w * n for w, n in zip(weights, lengths, strict=True))
    found = [0.0] * len(weights)
    for i, along in zip(taken, direction, strict=True):
        found[i] = length * along / lengths[i]
    return found


def length_of(vector: Doubles, cosines: Doubles) -> float:
    """Return the length of a sum of unit vectors."""
    squared = math.fsum((np.outer(vector, vector) * cosines).reshape(-1))
    return math.sqrt(max(0.0, squared))


def unit(vector: Doubles, cosines: Doubles) -> Doubles | None:
    """Return a sum of unit vectors over its length; None where they cancel."""
    length = length_of(vector, cosines)
    return vector / length if length >= CANCELLED else None


# The declarations of stages that interpolate between whole models.
INTERPOLATES: dict[str, Any] = {
    "sees": "tensor",
    "default_weight": lambda models: 1 / models,
    "interpolates": {"on": "weights"},
    "needs_base": on_weights,
}


Fraction = Annotated[
    float, meaning("Where on the arc: 0 is the first model, 1 the second.", ge=0, le=1)
]


def survey_angle(view: JointView, *, t: float, on: Space) -> tuple[float, float]:
    """Find the two coefficients from the angle between the tensors."""
    (one, both), (_, two) = view.dots(with_base=on == "weights")
    return arc_between(both, one, two, t)


@combine_stage(
    survey=survey_angle, models=2, is_lazy=always, **INTERPOLATES | {"default_weight": None}
)
def slerp(deltas: Deltas, *, t: Fraction = 0.5, on: Space = "weights") -> Floats:  # noqa: ARG001
    """Interpolate along the arc between two models' tensors: t = 0 is the first, 1 the second.

    a·sin((1 - t)·Ω)/sin Ω + b·sin(t·Ω)/sin Ω with Ω the angle between a and b, which are the
    whole tensors after DARE (`on = "weights"`) or their deltas (`on = "deltas"`). Interpolates in a
    straight line where they are (anti)parallel (|cos Ω| > 0.9995) or zero.
    """
    return sum_in(deltas, deltas.summary, on)


Each = Annotated[
    Literal["tensor", "row", "column"],
    meaning("What has an angle of its own: a tensor, each row, or each column."),
]


def survey_lines(view: JointView, *, each: Each, on: Space) -> tuple[float, float] | Lines:
    """Find the coefficients of both models, for the tensor or for each of its rows or columns."""
    whole = math.fsum(view.weights)
    t = view.weights[1] / whole if whole else 0.5  # halfway if the weights cancel
    if each == "tensor" or len(view.shape) < 2:
        return survey_angle(view, t=t, on=on)
    _, columns = as_matrix(view.shape)
    sums = view.line_dots(columns, by_column=each == "column", with_base=on == "weights")
    found = [arc_between(both, one, two, t) for one, both, two in sums.T.tolist()]
    return Lines(columns, np.array(found).reshape(-1, 2).T)


@combine_stage(survey=survey_lines, models=2, **INTERPOLATES)
def nuslerp(deltas: Deltas, *, each: Each = "tensor", on: Space = "deltas") -> Floats:
    """Interpolate along the arc between two models' deltas, at the second's share of the weights.

    Like `slerp`, at t = w₂/(w₁ + w₂). With `each = "row"` every row of a matrix has its own angle,
    with `each = "column"` every column; in a tensor with more than two dimensions a row is all
    that shares a first index, and a vector is taken as a whole. `on = "weights"` interpolates the
    models' tensors instead of their deltas, and is the default where one of them is the base.
    Interpolates in a straight line where the two are (anti)parallel (|cos Ω| > 0.9995) or zero;
    halfway where w₁ + w₂ = 0.
    """
    found: tuple[float, float] | Lines = deltas.summary
    if not isinstance(found, Lines):
        return sum_in(deltas, found, on)
    return sum_lines(deltas, found, on, by_column=each == "column")


Normalized = Annotated[bool, meaning("Divide the weights by their sum, in each tensor.")]


def survey_direction(view: JointView, *, on: Space, normalize: bool) -> list[float]:
    """Find the coefficient of each model from the angles between them."""
    weights, whole = view.weights, math.fsum(view.weights)
    if len(weights) == 1:
        return [1.0]
    shares = [weight / whole for weight in weights] if normalize else weights
    products = view.dots(with_base=on == "weights")
    return on_sphere(products, shares, lambda cosines, own: unit(np.array(own), cosines))


@combine_stage(survey=survey_direction, is_lazy=always, weights_fault=weights_fault, **INTERPOLATES)
def multislerp(
    deltas: Deltas,
    *,
    on: Space = "weights",
    normalize: Normalized = True,  # noqa: ARG001 (read by the survey)
) -> Floats:
    """Take the weighted mean of the models' directions, and of their lengths.

    The result has the direction of m = Σ wᵢ·aᵢ/‖aᵢ‖ and the length Σ wᵢ·‖aᵢ‖, where the weights
    are divided by their sum unless `normalize = false`. The aᵢ are the whole tensors after the
    delta stages (`on = "weights"`) or their deltas (`on = "deltas"`); a single model is taken as it
    is. Where the directions cancel (‖m‖ < 10⁻⁵), the result is Σ wᵢ·aᵢ. mergekit's `multislerp` is
    the same: it takes a step from m in its tangent space, but seen from their mean the directions
    cancel, and the step is 0. `karcher` goes on to the mean on the sphere.
    """
    return sum_in(deltas, deltas.summary, on)


MAX_STEPS = 1000
SHORTEST_STEP = 1e-12  # the length of a step that ends the iteration; the sphere's radius is 1


def survey_mean(view: JointView, *, on: Space) -> list[float]:
    """Find the coefficient of each model from the angles between them."""
    products = view.dots(with_base=on == "weights")
    whole = math.fsum(view.weights)
    return on_sphere(products, [weight / whole for weight in view.weights], _mean_direction)


def _mean_fault(_settings: Settings, weights: Sequence[float]) -> str:
    """Say why a mean cannot have such weights: each must be a share of the whole."""
    is_mean = min(weights) >= 0 and sum(weights) > 0
    return "" if is_mean else ": karcher takes a mean, and needs weights of 0 or more, not all 0"


def _mean_direction(cosines: Doubles, weights: Sequence[float]) -> Doubles | None:
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
    weights_fault=_mean_fault,
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
