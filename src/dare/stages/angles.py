"""Tensors as directions: coefficients from the angles between them.

Any point between models on a sphere is a sum of the models with coefficients that follow from their
inner products alone. So one pass over a tensor is enough, however the coefficients are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import Settings, meaning

PARALLEL = 0.9995  # cosine beyond which two tensors count as parallel, and the sphere as flat
CANCELLED = 1e-5  # directions whose mean is shorter than this have none

Doubles = NDArray[np.float64]

Space = Annotated[
    Literal["weights", "deltas"], meaning("Interpolate the models' tensors, or only their deltas.")
]


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


def on_weights(settings: Settings) -> bool:
    """Tell whether a stage works on the models' tensors, which takes the base."""
    return bool(settings["on"] == "weights")


# The declarations of stages that interpolate between whole models.
INTERPOLATES: dict[str, Any] = {
    "sees": "tensor",
    "default_weight": lambda models: 1 / models,
    "interpolates": {"on": "weights"},
    "needs_base": on_weights,
}


def sum_in(deltas: Deltas, coefficients: Sequence[float], on: Space) -> Floats:
    """Return Σ cᵢ·deltaᵢ; of whole tensors the base too, as far as the cᵢ do not add up to 1."""
    excess = math.fsum(coefficients) - 1
    return deltas.sum(coefficients, excess if on == "weights" else 0.0)


@dataclass(frozen=True)
class Lines:
    """Coefficients for each row or column of a matrix."""

    columns: int
    coefficients: Doubles  # models × rows, or models × columns


def sum_lines(deltas: Deltas, lines: Lines, on: Space, *, by_column: bool = False) -> Floats:
    """Return the same sum as `sum_in`, with coefficients for each row, or column."""
    start = deltas.blocks[0].start
    places = np.arange(start, start + deltas.size)
    places = places % lines.columns if by_column else places // lines.columns
    total = np.zeros(deltas.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for block, own in zip(deltas.blocks, lines.coefficients, strict=True):
            total += (own * block.factor).astype(np.float32)[places] * block.values
        if on == "weights":
            excess = lines.coefficients.sum(axis=0) - 1
            total += excess.astype(np.float32)[places] * deltas.base
    return total
