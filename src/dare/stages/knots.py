"""Merging in directions that all models share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from dare.kernels.linalg import eigen_bytes, factorise, multiply
from dare.stages.blocks import Floats
from dare.stages.matrices import matrix_combine_stage, multiply_by_weights
from dare.stages.registry import meaning

KeepAligned = Annotated[
    float, meaning("Share of each model's aligned part to keep, the largest ones.", gt=0, le=1)
]


def _work_bytes(rows: int, columns: int, models: int) -> int:
    """Count all matrices twice while they are joined; later vectors, aligned parts and votes."""
    rank = min(rows, models * columns)
    aligned = (12 * models + 28) * rank * columns + 16 * rank * rows
    return 8 * models * rows * columns + max(eigen_bytes(rank), aligned)


@matrix_combine_stage(paper="arXiv:2410.19735", votes=True, work_bytes=_work_bytes)
def knots(
    deltas: list[Floats], weights: Sequence[float], *, keep_ratio: KeepAligned = 0.2
) -> Floats:
    """Vote on signs among the models' parts, in directions that all share (KnOTS with TIES).

    [δ₁ … δₙ] = U·S·[V₁ … Vₙ], one decomposition for all models side by side. Each Vᵢ is trimmed to
    its largest elements, the share `keep_ratio`. The rest is as in `ties`: the sign of Σ wᵢ·Vᵢ
    wins for each element, and the weighted mean V of those that agree is taken. The result is
    U·S·V. Made for LoRA adapters, whose changes have few directions; averaging instead of voting
    would be the same as `linear`, so it is not offered. Vectors and scalars are averaged:
    Σ wᵢ·δᵢ / n; so are embeddings and heads, unless `embeddings = "matrices"`. Accurate to 1e-4 of
    the norm where no two singular values are equal; where they are, their directions are not
    unique, nor is the result.

    The authors' configurations trim by S·Vᵢ, over all matrices of a model together, and for
    language models not at all (`keep_ratio = 1`).
    """
    shape, joined = deltas[0].shape, np.concatenate(deltas, axis=1)
    deltas.clear()
    joint = factorise(joined)
    if not joint.values.size:
        return np.zeros(shape, np.float32)
    aligned = np.split(joint.right.astype(np.float32, copy=False), len(weights), axis=1)
    for part in aligned:
        _trim(part, keep_ratio)
    return multiply(joint.left * joint.values, _elected(aligned, weights))


def _trim(part: Floats, keep_ratio: float) -> None:
    kept = max(1, int(keep_ratio * part.size))
    magnitudes = np.abs(part)
    cut = np.partition(magnitudes, part.size - kept, axis=None)[part.size - kept]
    part[magnitudes < cut] = 0


def _elected(parts: list[Floats], weights: Sequence[float]) -> Floats:
    """Return the weighted mean of the side that outweighs the other, as `ties` does.

    The parts are changed.
    """
    multiply_by_weights(parts, weights)
    total = sum(parts[1:], start=parts[0])
    merged, shares = np.zeros_like(total), np.zeros_like(total)
    for part, weight in zip(parts, weights, strict=True):
        agrees = part * total > 0
        np.add(merged, part, out=merged, where=agrees)
        np.add(shares, np.float32(abs(weight)), out=shares, where=agrees)
    return np.divide(merged, shares, out=merged, where=shares > 0)
