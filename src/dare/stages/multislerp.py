"""The mean direction of many models."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from dare.stages.angles import INTERPOLATES, Space, on_sphere, sum_in, unit
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.linear import weights_fault
from dare.stages.registry import always, combine_stage, meaning

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
