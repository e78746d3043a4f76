"""Merging by least interference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from dare.kernels.linalg import squared_norm
from dare.stages.blocks import Floats
from dare.stages.matrices import matrix_combine_stage, multiply_by_weights
from dare.stages.registry import meaning

Steps = Annotated[int, meaning("Steps of Adam.", ge=0, le=100000)]
Rate = Annotated[float, meaning("Learning rate of Adam.", gt=0, le=1)]

ROWS = 256  # rows that are taken through all steps at a time; they do not depend on one another
FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8


def _work_bytes(rows: int, columns: int, models: int) -> int:
    """Count all models' matrices, a square of the columns for each in float64, and the result."""
    squares = 8 * (models + 3) * columns * columns
    return 4 * (models + 1) * rows * columns + squares + 8 * 8 * ROWS * columns


@matrix_combine_stage(paper="arXiv:2503.08099", work_bytes=_work_bytes)
def wudi(
    deltas: Sequence[Floats], weights: Sequence[float], *, steps: Steps = 300, rate: Rate = 1e-5
) -> Floats:
    """Search for the delta that disturbs each model least where it has learned (WUDI-Merging).

    `steps` steps of Adam from τ = Σ τᵢ, with τᵢ = wᵢ·δᵢ, towards the minimum of
    Σ ‖(τ - τᵢ)·τᵢᵀ‖² / ‖τᵢ‖². An element moves by about `rate` in a step, so that `steps · rate` is
    how far it can get; change `rate` with the size of the deltas.
    The start and the slope there are exact; no random numbers are involved.
    Vectors and scalars are averaged: Σ wᵢ·δᵢ / n; so are embeddings and heads, unless
    `embeddings = "matrices"`.
    A step multiplies rows·columns² pairs for each matrix, however many models there are, and no
    step can be left out: it takes at least `steps`·2·rows·columns² operations. For 0.3 billion
    parameters (hidden size 1024, MLP size 2784, 21 layers) that is 2·10¹⁴, or an hour of processor
    time at 60 billion a second; on 16 cores, 4 minutes. `swudi` has no steps.
    """
    multiply_by_weights(deltas, weights)
    shares = [1 / squared if (squared := squared_norm(m)) else 0.0 for m in deltas]
    curvatures = [share * _columns_gram(m) for m, share in zip(deltas, shares, strict=True)]
    total = curvatures[0].copy()
    for other in curvatures[1:]:
        total += other
    curvature: Floats = (2 * total).astype(np.float32)
    merged = deltas[0].copy()
    for delta in deltas[1:]:
        merged += delta
    for start in range(0, len(merged), ROWS):
        rows = slice(start, start + ROWS)
        slope = np.zeros(merged[rows].shape)
        for delta, own in zip(deltas, curvatures, strict=True):
            slope += 2 * (merged[rows].astype(np.float64) - delta[rows]) @ own
        merged[rows] += _descend(slope.astype(np.float32), curvature, steps, rate)
    return merged


def _columns_gram(matrix: Floats) -> NDArray[np.float64]:
    """Return matrixᵀ·matrix."""
    total = np.zeros((matrix.shape[1], matrix.shape[1]))
    for start in range(0, len(matrix), ROWS):
        panel = matrix[start : start + ROWS].astype(np.float64)
        total += panel.T @ panel
    return total


def _descend(slope: Floats, curvature: Floats, steps: int, rate: float) -> Floats:
    """Run Adam from zero on the paraboloid with this slope at zero and this curvature."""
    change = np.zeros_like(slope)
    first, second = np.zeros_like(slope), np.zeros_like(slope)
    for step in range(1, steps + 1):
        gradient = change @ curvature
        gradient += slope
        first += np.float32(1 - FIRST_DECAY) * (gradient - first)
        second += np.float32(1 - SECOND_DECAY) * (np.square(gradient) - second)
        size = np.sqrt(second / np.float32(1 - SECOND_DECAY**step)) + np.float32(EPSILON)
        change -= np.float32(rate / (1 - FIRST_DECAY**step)) * first / size
    return change
