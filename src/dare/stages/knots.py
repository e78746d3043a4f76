"""Merging in directions that all models share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from dare.kernels.linalg import Numbers, eigen_bytes, factorise, multiply
from dare.stages.blocks import Floats
from dare.stages.matrices import matrix_combine_stage
from dare.stages.registry import meaning

KeepAligned = Annotated[
    float, meaning("Share of each model's aligned part to keep, the largest ones.", gt=0, le=1)
]


def _work_bytes(rows: int, columns: int, models: int) -> int:
    """Count all models' matrices twice, their aligned parts in float64 with votes, the result."""
    rank = min(rows, models * columns)
    aligned = 8 * rank * (3 * models + 5) * columns
    return 4 * (2 * models + 1) * rows * columns + aligned + 16 * rank * rows + eigen_bytes(rank)


@matrix_combine_stage(paper="arXiv:2410.19735", votes=True, work_bytes=_work_bytes)
def knots(
    deltas: Sequence[Floats], weights: Sequence[float], *, keep_ratio: KeepAligned = 0.2
) -> Floats:
    """Vote on signs among the models' parts in directions that all share (KnOTS with TIES).

    [δ₁ … δₙ] = U·S·[V₁ … Vₙ], one decomposition for all models side by side. Each Vᵢ is trimmed to
    the `keep_ratio` of its elements that are largest, the rest as in `ties`: the sign of Σ wᵢ·Vᵢ
    wins for each element, and the weighted mean V of those that agree is taken. The result is
    U·S·V. Made for LoRA adapters, whose changes have few directions; averaging instead of voting
    would be the same as `linear`, so it is not offered. Vectors and scalars are averaged:
    Σ wᵢ·δᵢ / n. To 1e-4 of the norm where no two singular values are equal; where they
    are, their directions are not unique, nor is the result.

    The authors' configurations trim by S·Vᵢ, over all matrices of a model together, and for
    language models not at all (`keep_ratio = 1`).
    """
    joint = factorise(np.concatenate(deltas, axis=1))
    if not joint.values.size:
        return np.zeros_like(deltas[0])
    aligned = [_trimmed(part, keep_ratio) for part in np.split(joint.right, len(deltas), axis=1)]
    return multiply(joint.left * joint.values, _elected(aligned, weights))


def _trimmed(part: Numbers, keep_ratio: float) -> Numbers:
    kept = max(1, int(keep_ratio * part.size))
    magnitudes = np.abs(part)
    cut = np.partition(magnitudes, part.size - kept, axis=None)[part.size - kept]
    return np.where(magnitudes >= cut, part, 0)


def _elected(parts: list[Numbers], weights: Sequence[float]) -> Numbers:
    """Return the weighted mean of the side that outweighs the other, as `ties` does."""
    total = np.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        total += weight * part
    merged, shares = np.zeros_like(total), np.zeros_like(total)
    for part, weight in zip(parts, weights, strict=True):
        agrees = weight * part * total > 0
        merged += np.where(agrees, weight * part, 0)
        shares += np.where(agrees, abs(weight), 0)
    return np.divide(merged, shares, out=merged, where=shares > 0)
