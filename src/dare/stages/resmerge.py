"""Merging of what is left beside each change's leading direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from dare.kernels import linalg
from dare.kernels.linalg import Doubles, gram, squared_norm
from dare.stages.blocks import Floats
from dare.stages.matrices import matrix_combine_stage, multiply_by_weights
from dare.stages.registry import meaning

Ratio = Annotated[float, meaning("Largest size of the leading part, relative to the rest.", ge=0)]
Exponent = Annotated[float, meaning("Power of the agreement where models agree fully.", ge=0, le=1)]

BLOCK, STEPS, ROUNDS = 8, 8, 12  # vectors that are iterated together, how often, and restarts
ITERATED_FROM = 256  # the shortest side for which iterating is worth it
ROWS = 64  # rows of all matrices that are multiplied at a time
RESIDUAL = 1e-5  # of the largest singular value: how well a leading direction must be known


def _work_bytes(rows: int, columns: int, models: int) -> int:
    """Count all models' matrices twice, the result, and the vectors of an iteration."""
    iteration = 8 * 3 * BLOCK * (STEPS + 1) * (rows + columns)
    exact = linalg.eigen_bytes(min(rows, columns)) + 16 * rows * columns
    return 4 * (2 * models + 3) * rows * columns + iteration + exact


@matrix_combine_stage(paper="arXiv:2606.02252", work_bytes=_work_bytes)
def resmerge(
    deltas: list[Floats],
    weights: Sequence[float],
    *,
    head_ratio: Ratio = 0.2,
    min_exponent: Exponent = 0.7,
) -> Floats:
    """Merge all but each model's leading direction, and add a little of that back (ResMerge).

    wᵢ·δᵢ = Hᵢ + Rᵢ, where Hᵢ is the first singular triple. qᵢ = Rᵢ/‖Rᵢ‖, q = Σ qᵢ/‖Σ qᵢ‖, and c is
    the mean cosine of the qᵢ with q. A = c^β·(mean of ‖Rᵢ‖)·q with β = 1 - (1 - min_exponent)·s,
    s = ((p + 1)/2 + (c + 1)/2)/2 and p the mean cosine of two of the Rᵢ; A is the mean of the Rᵢ
    where c ≤ 1/√n, that is, p ≤ 0. The result is A + head_ratio·a·‖A‖·H/‖H‖, where H = Σ Hᵢ and
    a is the mean of the cosines of two of the Hᵢ, negative ones counting as 0.
    Made for models trained by reinforcement learning. A single model does not stay as it
    is: of its leading direction, a part as large as head_ratio of the rest remains. Changes of rank
    one are lost. The authors' code has s = 0 in matrices that belong neither to attention nor to an
    MLP; here all matrices are treated alike. Vectors and scalars are averaged: Σ wᵢ·δᵢ / n;
    so are embeddings and heads, unless `embeddings = "matrices"`. In our trials, none of them with
    such models, it beat the plain average on 22 of 125 sets and lost on 48; tuned, it stayed
    below the tuned average. The leading direction comes from an iteration that ends when it is
    known to 1e-5 of its singular value; the result is then within 1e-4 of its norm, unless the
    first two singular values are equal, when either direction may be taken, or p is 0, where A
    jumps. No matrix is decomposed: it takes half of `tsv`'s time on random numbers, and less
    where a direction stands out.
    """
    multiply_by_weights(deltas, weights)
    rests = np.stack(deltas)
    deltas.clear()
    values, left, right = (np.stack(part) for part in zip(*map(_leading, rests), strict=True))
    left *= values[:, None]
    for rest, column, row in zip(rests, left, right, strict=True):
        before = squared_norm(rest)
        np.subtract(rest, np.outer(column, row), out=rest)
        if squared_norm(rest) <= linalg.NOISE**2 * before:  # only rounding
            rest[:] = 0
    products = _products(rests)
    shares = _shares(products, min_exponent)
    merged = np.tensordot(shares.astype(np.float32), rests, axes=1)
    size = head_ratio * math.sqrt(max(0.0, float(shares @ products @ shares)))
    merged += _common_head(left, right, size)
    return merged


def _leading(matrix: Floats) -> tuple[np.float32, Floats, Floats]:
    """Return the largest singular value and its vectors; zeros if there is none.

    Powers of a block of vectors, and the best combination of them all; if that does not settle,
    a decomposition.
    """
    block: Floats = np.random.default_rng(0).standard_normal((matrix.shape[1], BLOCK), np.float32)
    for _ in range(ROUNDS if min(matrix.shape) >= ITERATED_FROM and matrix.any() else 0):
        blocks = [np.linalg.qr(block)[0]]
        for _ in range(STEPS):
            far = np.linalg.qr(matrix @ blocks[-1])[0]
            blocks.append(np.linalg.qr(matrix.T @ far)[0])
        basis = np.linalg.qr(np.concatenate(blocks, axis=1))[0]
        energies, turn = linalg.falling_eigen(gram((matrix @ basis).T))
        block = (basis @ turn[:, :BLOCK]).astype(np.float32)
        value = np.float32(np.sqrt(energies[0]))
        right = block[:, 0]
        left = matrix @ right / value
        if np.linalg.norm(matrix.T @ left - value * right) <= RESIDUAL * value:
            return value, left, right
    exact = linalg.factorise(matrix, 1)
    if not exact.values.size:
        return np.float32(0), np.zeros(len(matrix), np.float32), np.zeros_like(block[:, 0])
    first = exact.left[:, 0].astype(np.float32), exact.right[0].astype(np.float32)
    return np.float32(exact.values[0]), *first


def _products(matrices: Floats) -> Doubles:
    """Return the inner products of all matrices, summed in float64."""
    total = np.zeros((len(matrices), len(matrices)))
    for start in range(0, matrices.shape[1], ROWS):
        part = matrices[:, start : start + ROWS].reshape(len(matrices), -1).astype(np.float64)
        total += part @ part.T
    return total


def _shares(products: Doubles, min_exponent: float) -> Doubles:
    """Return what each Rᵢ is multiplied by in A; `products` are their inner products."""
    count, norms = len(products), np.sqrt(np.diag(products))
    inverse = np.divide(1, norms, out=np.zeros(count), where=norms > 0)
    cosines = products * np.outer(inverse, inverse)
    squared = float(cosines.sum())  # of the length of Σ qᵢ; c is the length divided by n
    if squared <= count * (1 + 1e-9):
        return np.full(count, 1 / count)
    pairs = (squared - float(np.trace(cosines))) / (count * (count - 1))
    length = np.sqrt(squared)
    score = ((pairs + 1) / 2 + (length / count + 1) / 2) / 2
    kept = (length / count) ** (1 - (1 - min_exponent) * score)
    return np.asarray(kept * norms.mean() / length * inverse)


def _common_head(left: Floats, right: Floats, size: float) -> Floats:
    """Return the sum of outer products, made `size` long times their agreement in direction."""
    products = gram(left) * gram(right)
    present = np.diag(products) > 0
    norms = np.sqrt(np.diag(products)[present])
    cosines = products[present][:, present] / np.outer(norms, norms)
    pairs = cosines[np.triu_indices(len(cosines), 1)]
    agreement = float(np.maximum(pairs, 0).mean()) if pairs.size else 1.0
    factor = size * agreement / math.sqrt(squared) if (squared := products.sum()) > 0 else 0.0
    return linalg.multiply(left.T * factor, right)
