"""A mean of models that is drawn to the base, as far as their directions differ."""

from __future__ import annotations

import math

from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.registry import always, combine_stage


def survey_cosines(view: JointView) -> float:
    """Find how far to go from the base to the mean, t, from the angles between the deltas."""
    products = view.dots(with_base=False)
    lengths = [math.sqrt(row[i]) for i, row in enumerate(products)]
    count = len(view.weights)
    cosines = [
        products[i][j] / (lengths[i] * lengths[j]) if lengths[i] * lengths[j] else 0.0
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
    is_lazy=always,
)
def model_stock(deltas: Deltas) -> Floats:
    """Go from the base towards the mean of the models, the farther the more they agree.

    t·Σ δ̂ᵢ/n with t = n·cos θ / (1 + (n - 1)·cos θ), for each tensor, where cos θ is the mean
    cosine of two models' deltas; that of a delta of zeros to any other is 0. t is 1 where all
    are parallel, there is one model or one is not finite, and 0, the base, where cos θ ≤ 0.
    """
    count = len(deltas.blocks)
    return deltas.sum([deltas.summary / count] * count)
