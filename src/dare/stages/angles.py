"""Tensors as directions: inner products over a whole tensor, and coefficients from the angles.

Any point between models on a sphere is a sum of the models with coefficients that follow from their
inner products alone. So one pass over a tensor is enough, however the coefficients are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from dare.stages.blocks import Deltas, Floats, Walk
from dare.stages.registry import meaning

PARALLEL = 0.9995
"""Cosine beyond which two tensors count as parallel, and the sphere as flat."""

Space = Annotated[
    Literal["weights", "deltas"], meaning("Interpolate the models' tensors, or only their deltas.")
]


def tensors_in(deltas: Deltas, on: Space) -> list[Floats]:
    """Turn deltas into the models' chunks of a tensor: base + delta, or the delta alone.

    For surveys only, whose deltas are used once.
    """
    origin = deltas.base if on == "weights" else np.zeros(deltas.size, np.float32)
    for block in deltas.blocks:
        if on == "weights" or block.factor != 1:  # else it would only turn -0 into 0
            deltas.kernels.add_onto(origin, block.values, np.float32(block.factor), block.values)
    return [block.values for block in deltas.blocks]


def inner_products(walk: Walk, on: Space) -> tuple[list[list[float]], Sequence[float]]:
    """Return the product of every model's tensor with every other's, and the models' weights.

    Summed in float64 in a fixed order: within a chunk as the kernel does, then chunk after chunk.
    """
    products: list[list[float]] = []
    weights: Sequence[float] = ()
    for deltas in walk():
        weights = deltas.weights
        products = products or [[0.0] * len(weights) for _ in weights]
        tensors = tensors_in(deltas, on)
        for row, left in enumerate(tensors):
            for column in range(row, len(tensors)):
                products[row][column] += deltas.kernels.sum_products(left, tensors[column])
    for row in range(len(products)):
        for column in range(row):
            products[row][column] = products[column][row]
    return products, weights


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


def sum_in(deltas: Deltas, coefficients: Sequence[float], on: Space) -> Floats:
    """Return Σ cᵢ·deltaᵢ; of whole tensors the base too, as far as the cᵢ do not add up to 1."""
    total = deltas.sum(coefficients)
    excess = math.fsum(coefficients) - 1
    if on == "weights" and excess:
        deltas.kernels.add_scaled(total, deltas.base, np.float32(excess))
    return total
