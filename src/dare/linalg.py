"""Singular values and vectors, as fast as NumPy alone allows without giving up digits.

- A matrix of low rank (a LoRA's change, a sum of such) is recognised by a random sketch of fixed
  seed and taken apart there; what the sketch misses is measured, not estimated.
- Any other is taken apart by the eigenvectors of the Gram matrix of its shorter side, in float64.
  That costs less than an SVD, half for wide ones, and of float32 it loses next to nothing: singular
  values are right to about 1e-8 of the largest, products of the factors to 1e-6 of their norm.

Singular values below 1e-6 of the largest are rounding and count as absent, with their vectors.
BLAS may add in another order with another number of threads or on another machine; results then
agree to about 1e-5 of their norm. With the same BLAS they are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

NOISE = 1e-6
"""Singular values below this share of the largest are rounding, and count as zero."""
PANEL = 1024
"""Rows or columns that are widened to float64 at a time."""
SKETCH = 128
"""Columns of the sketch that looks for low rank."""
SKETCHED_FROM = 4 * SKETCH
"""The shortest side for which looking is worth it."""
MISSED = 2e-6
"""The share of a matrix's norm that a sketch may miss: what float32 rounds away."""


@dataclass(frozen=True)
class Factors:
    """A matrix as left·diag(values)·right, values falling, both sides orthonormal."""

    left: Doubles
    """Rows × rank."""
    values: Doubles
    right: Doubles
    """Rank × columns."""

    def product(self) -> Floats:
        """The matrix."""
        return multiply(self.left * self.values, self.right)


@dataclass(frozen=True)
class Spectrum:
    """Singular values and one side's vectors; the other side's follow from the matrix."""

    vectors: Doubles
    """Short side × rank."""
    values: Doubles


def spectrum(matrix: Floats) -> Spectrum:
    """All singular values but noise, and the singular vectors of the shorter side.

    >>> spectrum(np.array([[0, 3, 0], [4, 0, 0]], np.float32)).values.tolist()
    [4.0, 3.0]
    """
    wide = _widened(matrix)
    if 0 in wide.shape:
        return Spectrum(np.zeros((wide.shape[0], 0)), np.zeros(0))
    basis = _low_rank_basis(wide)
    energies, vectors = np.linalg.eigh(gram(wide if basis is None else _times(basis.T, wide)))
    energies, vectors = np.maximum(energies[::-1], 0), vectors[:, ::-1]
    rank = int(np.count_nonzero(energies > NOISE**2 * energies[0]))
    vectors = vectors[:, :rank] if basis is None else basis @ vectors[:, :rank]
    return Spectrum(vectors, np.sqrt(energies[:rank]))


def factorise(matrix: Floats, rank: int | None = None) -> Factors:
    """Take a matrix apart: all singular triples but noise, or the first `rank` of them.

    >>> found = factorise(np.array([[0, 3, 0], [4, 0, 0]], np.float32), rank=1)
    >>> found.product().tolist()
    [[0.0, 0.0, 0.0], [4.0, 0.0, 0.0]]
    """
    found = spectrum(matrix)
    near, values = found.vectors[:, :rank], found.values[:rank]
    far = _times((near / values).T, _widened(matrix))
    if _is_tall(matrix):
        return Factors(far.T, values, near.T)
    return Factors(near, values, far)


def project(matrix: Floats, vectors: Doubles, shares: Doubles) -> Floats:
    """Multiply each direction of the shorter side, a column of `vectors`, by its positive share.

    That is vectors·diag(shares)·vectorsᵀ·matrix for a matrix that is not taller than wide, and the
    same from the other side for one that is.
    """
    wide = _widened(matrix)
    short, count = vectors.shape
    if 2 * count < short:
        projected = multiply(vectors * shares, _times(vectors.T, wide))
    else:
        projected = np.empty(wide.shape, np.float32)
        half = vectors * np.sqrt(shares)
        operator = half @ half.T
        for columns in _panels(wide.shape[1]):
            projected[:, columns] = operator @ wide[:, columns].astype(np.float64)
    return np.ascontiguousarray(projected.T) if _is_tall(matrix) else projected


def orthogonal_product(parts: Sequence[Factors], values: Doubles) -> Floats:
    """P(U)·diag(values)·P(V): U all left vectors side by side, V all right ones, P the nearest
    matrix with orthonormal columns or rows (the polar factor, Procrustes).

    Directions in which U or V has less than 1e-6 of its largest singular value are absent.
    """
    left = np.concatenate([part.left for part in parts], axis=1)
    right = np.concatenate([part.right for part in parts], axis=0)
    middle = (_inverse_root(left.T @ left) * values) @ _inverse_root(right @ right.T)
    return multiply(left @ middle, right)


def _inverse_root(symmetric: Doubles) -> Doubles:
    """symmetric^(-1/2), zero where there is nothing to invert."""
    energies, vectors = np.linalg.eigh(symmetric)
    kept = energies > NOISE**2 * energies.max(initial=0)
    roots = energies[kept] ** -0.25
    half = vectors[:, kept] * roots
    inverse: Doubles = half @ half.T
    return inverse


def without(matrix: Floats, left: Doubles) -> Floats:
    """What is left of a matrix outside the span of orthonormal columns."""
    outside = np.empty(matrix.shape, np.float32)
    for columns in _panels(matrix.shape[1]):
        panel = matrix[:, columns].astype(np.float64)
        outside[:, columns] = panel - left @ (left.T @ panel)
    return outside


def multiply(left: Doubles, right: Doubles) -> Floats:
    """left·right in float32."""
    product: Floats = left.astype(np.float32) @ right.astype(np.float32)
    return product


def gram(wide: NDArray[np.floating]) -> Doubles:
    """wide·wideᵀ in float64, a panel of columns at a time."""
    total = np.zeros((wide.shape[0], wide.shape[0]))
    for columns in _panels(wide.shape[1]):
        panel = wide[:, columns].astype(np.float64)
        total += panel @ panel.T
    return total


def squared_norm(matrix: Floats) -> float:
    """The squared Frobenius norm, in float64."""
    return sum(
        float(np.square(matrix[rows], dtype=np.float64).sum()) for rows in _panels(matrix.shape[0])
    )


def eigen_bytes(short: int) -> int:
    """What a Gram matrix and its eigenvectors take while they are computed."""
    return 5 * short * short * 8


# ---------------------------------------------------------------- pieces


def _is_tall(matrix: Floats) -> bool:
    rows, columns = matrix.shape
    return bool(rows > columns)


def _widened(matrix: Floats) -> Floats:
    return matrix.T if _is_tall(matrix) else matrix


def _panels(length: int) -> Iterator[slice]:
    return (slice(start, start + PANEL) for start in range(0, length, PANEL))


def _times(left: Doubles, wide: Floats) -> Doubles:
    """left·wide in float64, a panel of columns at a time."""
    product = np.empty((left.shape[0], wide.shape[1]))
    for columns in _panels(wide.shape[1]):
        product[:, columns] = left @ wide[:, columns].astype(np.float64)
    return product


def _low_rank_basis(wide: Floats) -> Doubles | None:
    """An orthonormal basis of all columns, if a few directions hold them."""
    if wide.shape[0] < SKETCHED_FROM:
        return None
    start = np.random.default_rng(0).standard_normal((wide.shape[1], SKETCH), np.float32)
    basis = np.linalg.qr(wide @ start)[0]
    inside = basis.T @ wide
    squared = squared_norm(wide)
    if squared - squared_norm(inside) > 1e-5 * squared:  # a glance; what follows is exact
        return None
    missed = sum(
        float(np.square(wide[:, c] - basis @ inside[:, c], dtype=np.float64).sum())
        for c in _panels(wide.shape[1])
    )
    if missed > MISSED**2 * squared:
        return None
    return np.linalg.qr(basis.astype(np.float64))[0]
