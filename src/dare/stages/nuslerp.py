"""Spherical interpolation by weights, of whole tensors or row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from dare.stages.angles import INTERPOLATES, Lines, Space, arc_between, sum_in, sum_lines
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.matrices import as_matrix
from dare.stages.registry import combine_stage, meaning

Each = Annotated[
    Literal["tensor", "row", "column"],
    meaning("What has an angle of its own: a tensor, each row, or each column."),
]


def survey_lines(view: JointView, *, each: Each, on: Space) -> tuple[float, float] | Lines:
    """Find the coefficients of both models, for the tensor or for each of its rows or columns."""
    t, with_base = _fraction(view.weights), on == "weights"
    if each == "tensor" or len(view.shape) < 2:
        products = view.dots(with_base=with_base)
        return arc_between(products[0][1], products[0][0], products[1][1], t)
    _, columns = as_matrix(view.shape)
    sums = view.line_dots(columns, by_column=each == "column", with_base=with_base)
    found = [arc_between(both, one, two, t) for one, both, two in sums.T.tolist()]
    return Lines(columns, np.array(found).reshape(-1, 2).T)


def _fraction(weights: Sequence[float]) -> float:
    """Return the second model's share; halfway if the weights cancel."""
    whole = math.fsum(weights)
    return weights[1] / whole if whole else 0.5


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
