"""A mean of models that is drawn to the base, as far as their directions differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from dare.stages.angles import Lines, sum_lines
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.ranks import row_length
from dare.stages.registry import combine_stage, meaning

Each = Annotated[
    Literal["tensor", "row"], meaning("What has an angle of its own: a tensor, or each row.")
]


def survey_cosines(view: JointView, *, each: Each) -> float | Lines:
    """Find how far to go from the base to the mean, t, from the angles between the deltas.

    For rows, the coefficients of all models are found from their t.
    """
    count = len(view.weights)
    if each == "tensor" or len(view.shape) < 2:
        products = view.dots(with_base=False)
        return _distance(count, [x for i, row in enumerate(products) for x in row[i:]])
    columns = row_length(view.shape)
    sums = view.line_dots(columns, by_column=False, with_base=False)
    shares = (_distance(count, products.tolist()) / count for products in sums.T)
    own = np.fromiter(shares, np.float64, sums.shape[1])
    return Lines(columns, np.broadcast_to(own, (count, own.size)))


def _distance(count: int, products: Sequence[float]) -> float:
    """Return t from the products of all pairs: 00, 01, … 11, …."""
    rest = iter(products)
    of = {(i, j): next(rest) for i in range(count) for j in range(i, count)}
    lengths = [math.sqrt(of[i, i]) for i in range(count)]
    cosines = [
        of[j, i] / (lengths[i] * lengths[j]) if lengths[i] * lengths[j] else 0.0
        for i in range(count)
        for j in range(i)
    ]
    cosine = math.fsum(cosines) / len(cosines) if cosines else 1.0
    if math.isnan(cosine):
        return 1.0
    cosine = min(1.0, max(0.0, cosine))
    return count * cosine / (1 + (count - 1) * cosine)


@combine_stage(
    paper="arXiv:2403.19522",
    sees="tensor",
    survey=survey_cosines,
    default_weight=None,
    is_lazy=lambda settings: settings["each"] == "tensor",
)
def model_stock(deltas: Deltas, *, each: Each = "tensor") -> Floats:  # noqa: ARG001
    """Go from the base towards the mean of the models: the more they agree, the farther.

    t·Σ δ̂ᵢ/n with t = n·cos θ / (1 + (n - 1)·cos θ), for each tensor, where cos θ is the mean
    cosine of two models' deltas; that of a delta of zeros to any other is 0. t is 1 where all
    are parallel, there is one model or one is not finite, and 0, the base, where cos θ ≤ 0.
    With `each = "row"` every row, which is the last dimension, has its own t; a vector is one row.
    """
    found: float | Lines = deltas.summary
    if isinstance(found, Lines):
        return sum_lines(deltas, found, "deltas")
    count = len(deltas.blocks)
    return deltas.sum([found / count] * count)
