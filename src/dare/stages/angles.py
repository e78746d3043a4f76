"""Tensors as directions: coefficients from the angles between them.

Any point between models on a sphere is a sum of the models with coefficients that follow from their
inner products alone. So one pass over a tensor is enough, however the coefficients are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import meaning

PARALLEL = 0.9995  # cosine beyond which two tensors count as parallel, and the sphere as flat

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


def sum_in(deltas: Deltas, coefficients: Sequence[float], on: Space) -> Floats:
    """Return Σ cᵢ·deltaᵢ; of whole tensors the base too, as far as the cᵢ do not add up to 1."""
    excess = math.fsum(coefficients) - 1
    return deltas.sum(coefficients, excess if on == "weights" else 0.0)
