"""Spherical interpolation between two models."""

from __future__ import annotations

from typing import Annotated

from dare.stages.angles import INTERPOLATES, Space, arc_between, sum_in
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.registry import always, combine_stage, meaning

Fraction = Annotated[
    float, meaning("Where on the arc: 0 is the first model, 1 the second.", ge=0, le=1)
]


def survey_angle(view: JointView, *, t: float, on: Space) -> tuple[float, float]:
    """Find the two coefficients from the angle between the tensors."""
    products = view.dots(with_base=on == "weights")
    return arc_between(products[0][1], products[0][0], products[1][1], t)


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
