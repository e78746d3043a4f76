"""Spherical interpolation between two models."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from dare.stages.blocks import Block, Deltas, Floats, Walk
from dare.stages.registry import combine_stage

PARALLEL = 0.9995
"""Cosine beyond which two tensors count as parallel, and the sphere as flat."""

Fraction = Annotated[
    float, Field(ge=0, le=1, description="Where on the arc: 0 is the first model, 1 the second.")
]
Space = Annotated[
    Literal["weights", "deltas"],
    Field(description="Interpolate the models' tensors, or only their deltas."),
]


def survey_angle(walk: Walk, *, t: float, on: Space) -> tuple[float, float]:
    """Find the two coefficients from the angle between the tensors."""
    first_squared = second_squared = product = 0.0
    for deltas in walk():
        origin = deltas.base if on == "weights" else np.zeros(deltas.size, np.float32)
        first, second = (_added(deltas, origin, block) for block in deltas.blocks)
        first_squared += deltas.kernels.sum_products(first, first)
        second_squared += deltas.kernels.sum_products(second, second)
        product += deltas.kernels.sum_products(first, second)

    norms = math.sqrt(first_squared) * math.sqrt(second_squared)
    cosine = product / norms if norms else 1.0
    if not abs(cosine) <= PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _added(deltas: Deltas, origin: Floats, block: Block) -> Floats:
    tensor = np.empty(deltas.size, np.float32)
    deltas.kernels.add_onto(origin, block.values, np.float32(block.factor), tensor)
    return tensor


@combine_stage(survey=survey_angle, default_weight=None, models=2)
def slerp(deltas: Deltas, *, t: Fraction = 0.5, on: Space = "weights") -> Floats:  # noqa: ARG001
    """Interpolate along the arc between two models' tensors: t = 0 is the first, 1 the second.

    a·sin((1 - t)·Ω)/sin Ω + b·sin(t·Ω)/sin Ω with Ω the angle between a and b, which are the
    whole tensors after DARE (`on = "weights"`) or their deltas (`on = "deltas"`). Straight
    interpolation where they are (anti)parallel (|cos Ω| > 0.9995) or zero.
    """
    coefficients: tuple[float, float] = deltas.summary
    total = deltas.sum(coefficients)
    excess = coefficients[0] + coefficients[1] - 1
    if on == "weights" and excess:
        deltas.kernels.add_scaled(total, deltas.base, np.float32(excess))
    return total
