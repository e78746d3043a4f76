"""Singular values and vectors, as fast as NumPy and its LAPACK allow without giving up digits.

- A matrix of low rank (a LoRA's change, a sum of such) is recognised by a random sketch of fixed
  seed and taken apart there; what the sketch misses is measured, not estimated.
- Any other is taken apart by the eigenvectors of the Gram matrix of its shorter side. In float32,
  if it is large and no direction stands far out: singular values are then right to about 1e-6 of
  the largest, and products of the factors to 1e-5 of their norm, which is what a float32 SVD has.
  A Gram matrix squares values far below the largest; that part is taken apart again by itself,
  in float64. All others are taken apart in float64 as a whole, to 1e-8 and 1e-6.
- Where few directions are wanted, only their vectors are computed: in float32 products of the
  factors are then right to 3e-5 of their norm.

Singular values below 1e-6 of the largest are rounding and count as absent, with their vectors.
BLAS may add in another order with another number of threads or on another machine; results then
agree to about 1e-5 of their norm. `one_blas_thread` takes the first reason away: with the same BLAS
results are then the same bits.

Matrices may be a GPU's, of CuPy. NumPy hands its functions to the library that made an array, and
what is made from nothing is made `like` a matrix, so all is computed where the matrices are. Only
singular values, which are few, are always NumPy's. A GPU that is as fast in float64 takes matrices
apart in float64 only, and finds polar factors by products of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dare.kernels.lapack import Count, LapackError, all_eigen, blas, leading_eigen

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Numbers = NDArray[np.floating[Any]]  # float32 or float64
Array = TypeVar("Array", bound=Numbers)
# The number of directions wanted: as it is, or by all singular values, falling; None: all.
Rank = Count | None

NOISE = 1e-6  # singular values below this share of the largest are rounding, and count as zero
PANEL = 1024  # rows or columns that are widened to float64, or multiplied in float32, at a time
SKETCH = 128  # columns of the sketch that looks for low rank
SKETCHED_FROM = 4 * SKETCH  # the shortest side for which looking is worth it
CORNER = SKETCH + SKETCH // 2  # the side of a corner that shows cheaply that the rank is not low
MISSED = 2e-6  # the share of a matrix's norm that a sketch may miss: what float32 rounds away
SINGLE_FROM = 384  # the shortest side for which float32 is worth it
SMALL = 0.1  # singular values below this share of the largest are not taken from float32
UNSURE = 5e-4  # below this share of the largest, a value in float32 may be zero as well
UNSURE_SHARE = 1e-5  # the most that such values may add to the sum of all
MOST_SMALL = 0.4  # the share of the short side that may be small; else float64 is as fast
OUTSTANDING = 20.0  # the largest squared singular value over their mean, at most
POWER_STEPS = 8  # steps of the power iteration that estimates the largest one
SINGLE_RANGE = 1e-12, 1e12  # largest elements whose squares, and sums of them, float32 has room for
FAST_DOUBLES = 4  # GPUs that take up to so many times as long in float64 compute in nothing else
# Coefficients of polynomials p(x) = ax + bx³ + cx⁵ that take singular values to 1: each is the
# nearest to 1 on all values that those before it make of [0.05, 1]; the second five, of [4e-5, 1].
# No other choice is better (Amsel, Persson, Musco, Gower, arXiv:2505.16932). All are made for
# values that are larger by 0.5%, because one beyond an interval's end would run away. The last ones
# take values down to 1e-5 to 1.
NEWTON = 1.875, -1.25, 0.375  # the limit for values near 1: their distance to 1 is cubed
TO_ONE = (
    (6.7188, -18.0784, 12.9366),
    (2.5310, -1.8545, 0.4325),
    (1.9222, -1.2953, 0.3745),
    NEWTON,
    (8.3677, -24.4985, 17.9840),
    (4.0647, -2.9957, 0.5588),
    (3.6146, -2.6798, 0.5235),
    (2.6471, -1.9497, 0.4428),
    (1.9500, -1.3245, 0.3774),
    *[NEWTON] * 5,
)
IS_ONE = 3e-6  # how far squared singular values may be from 1, as a root of the mean square


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS use the thread it is called in and no other.

    Our threads that each call BLAS would otherwise get in each other's way, and sums would
    depend on the number of cores.
    """
    with blas().limit(limits=1, user_api="blas"):
        yield


@dataclass(frozen=True)
class Factors:
    """A matrix as left·diag(values)·right, values falling, both sides orthonormal."""

    left: Numbers  # rows × rank
    values: Doubles
    right: Numbers  # rank × columns

    def product(self) -> Floats:
        """Return the matrix."""
        return multiply(self.left * beside(self.left, self.values), self.right)


@dataclass(frozen=True)
class OneSidedFactors:
    """Singular values and one side's vectors; the other side's follow from the matrix."""

    vectors: Numbers  # short side × rank; in the precision they were found in
    values: Doubles
    # The other side's vectors of the last few values, where the matrix gives too few digits.
    far: Floats

    @property
    def plain(self) -> int:
        """The number of directions whose other side's vectors follow from the matrix itself."""
        return len(self.values) - len(self.far)


def spectrum(matrix: Floats, rank: Rank = None) -> OneSidedFactors:
    """Return all singular values but noise, and the singular vectors of the shorter side.

    Only the first `rank`, if that is given; or as many as it says, if it is a function of all.

    >>> spectrum(np.array([[0, 3, 0], [4, 0, 0]], np.float32)).values.tolist()
    [4.0, 3.0]
    """
    wide = _widened(matrix)
    return _take_apart(wide, _low_rank_basis(wide), rank)


def _take_apart(wide: Floats, basis: Doubles | None, rank: Rank) -> OneSidedFactors:
    if 0 in wide.shape:
        return OneSidedFactors(np.zeros((len(wide), 0), like=wide), np.zeros(0), _no_rows(wide))
    takes_double = basis is not None or _has_fast_doubles(wide)
    single = None if takes_double else _in_single(wide, rank)
    return single or _in_double(wide, basis, rank)


def _is_few(rank: Rank, short: int) -> bool:
    """Tell whether so few directions are wanted that the others are not worth their time."""
    is_few = 2 * rank <= short if isinstance(rank, int) else rank is not None
    return short >= SINGLE_FROM and is_few


def _in_double(wide: Floats, basis: Doubles | None, rank: Rank) -> OneSidedFactors:
    """Decompose the Gram matrix in float64, of all rows or within a basis of the columns."""

    def count(energies: Numbers) -> int:
        known = int(np.count_nonzero(energies > NOISE**2 * energies[0]))
        if callable(rank):
            return rank(np.sqrt(energies[:known])) if known else 0
        return known if rank is None else min(rank, known)

    few = (count if callable(rank) else rank) if _is_few(rank, len(wide)) else None
    symmetric = gram(wide if basis is None else _times(basis.T, wide))
    if isinstance(few, int) and few > len(symmetric):  # LAPACK would print that it is too many
        few = None
    energies, vectors = falling_eigen(symmetric, few)
    wanted = len(energies) if callable(few) else count(energies)
    vectors = vectors[:, :wanted] if basis is None else basis @ vectors[:, :wanted]
    return OneSidedFactors(vectors, np.sqrt(energies[:wanted]), _no_rows(wide))


def _in_single(wide: Floats, rank: Rank) -> OneSidedFactors | None:
    """Decompose the Gram matrix in float32; None if that is no faster or not good enough."""
    short = len(wide)
    peak = max(float(wide.max()), -float(wide.min()))
    is_in_range = SINGLE_RANGE[0] < peak < SINGLE_RANGE[1]
    if short < SINGLE_FROM or not is_in_range or _stands_out(wide):
        return None
    symmetric = gram(wide, np.float32).astype(np.float32)
    if callable(rank) or _is_few(rank, short):
        return _few_in_single(symmetric, rank, _no_rows(wide))
    energies, vectors = falling_eigen(symmetric)
    large = int(np.count_nonzero(energies > SMALL**2 * energies[0]))
    values = np.sqrt(energies[:large].astype(np.float64))
    if large == short or (rank is not None and rank <= large):
        return OneSidedFactors(vectors[:, :large][:, :rank], values[:rank], _no_rows(wide))
    if short - large > MOST_SMALL * short:
        return None
    small, small_values, far = _small_part(wide, vectors[:, :large], values, vectors[:, large:])
    values = np.concatenate([values, small_values])[:rank]
    near = np.concatenate([vectors[:, :large], small], axis=1)[:, :rank]
    return OneSidedFactors(near, values, far[: len(values) - large])


def _few_in_single(symmetric: Floats, rank: Rank, far: Floats) -> OneSidedFactors | None:
    """Decompose a Gram matrix in float32 as far as wanted; None if small values count in that.

    A function of all values may add them up, but for a few that float32 does not tell from zero.
    """

    def count(energies: Numbers) -> int:
        values = np.sqrt(energies.astype(np.float64))
        unsure = UNSURE * values[0] * np.count_nonzero(values < UNSURE * values[0])
        return rank(values) if callable(rank) and unsure < UNSURE_SHARE * values.sum() else 0

    energies, vectors = falling_eigen(symmetric, count if callable(rank) else rank)
    if not len(energies) or energies[-1] < SMALL**2 * energies[0]:
        return None
    # LAPACK leaves the vectors of neighbours orthogonal to 1e-4 only.
    vectors = 1.5 * vectors - 0.5 * vectors @ (vectors.T @ vectors)
    return OneSidedFactors(vectors, np.sqrt(energies.astype(np.float64)), far)


def _small_part(
    wide: Floats, large: Floats, values: Doubles, rest: Floats
) -> tuple[Floats, Doubles, Floats]:
    """Take apart the span of `rest`: its vectors on this side, values, and far side.

    `rest` is orthogonal to the large directions to float32 only, and these are so much larger that
    they have to be taken out on the far side once more.
    """
    part = _times(rest.T.astype(np.float64), wide)
    inverse = np.divide(large, beside(large, values.astype(np.float32)))
    products = np.zeros(rest.T.shape, np.float32, like=wide)
    for columns in panels(wide.shape[1]):
        products += part[:, columns].astype(np.float32) @ wide[:, columns].T
    along = multiply(multiply(products, inverse), inverse.T)
    for columns in panels(wide.shape[1]):
        part[:, columns] -= multiply(along, wide[:, columns])
    energies, vectors = falling_eigen(gram(part))
    known = int(np.count_nonzero(energies > (NOISE * values[0]) ** 2))
    roots = np.sqrt(energies[:known])
    far = multiply((vectors[:, :known] / beside(vectors, roots)).T, part)
    return multiply(rest, vectors[:, :known]), roots, far


def factorise(matrix: Floats, rank: Rank = None) -> Factors:
    """Take a matrix apart: all singular triples but noise, or the first `rank` of them.

    >>> parts = factorise(np.array([[0, 3, 0], [4, 0, 0]], np.float32), rank=1)
    >>> parts.product().tolist()
    [[0.0, 0.0, 0.0], [4.0, 0.0, 0.0]]
    """
    parts = spectrum(matrix, rank)
    near, values = parts.vectors, parts.values
    inverse = near[:, : parts.plain] / beside(near, values[: parts.plain])
    inverse = inverse.astype(near.dtype)
    far = _times(inverse.T, _widened(matrix))
    if len(parts.far):
        far = np.concatenate([far, parts.far])
    if _is_tall(matrix):
        return Factors(far.T, values, near.T)
    return Factors(near, values, far)


def project(matrix: Floats, vectors: Numbers, shares: Doubles) -> Floats:
    """Multiply each direction of the shorter side, a column of `vectors`, by its positive share.

    That is vectors·diag(shares)·vectorsᵀ·matrix for a matrix that is not taller than wide, and the
    same from the other side for one that is. In the precision of the vectors.
    """
    short, count = vectors.shape
    if 2 * count >= short:
        half = (vectors * beside(vectors, np.sqrt(shares))).astype(vectors.dtype)
        return _turn(matrix, half @ half.T)
    wide = _times(vectors.T, _widened(matrix))
    projected = multiply(vectors * beside(vectors, shares), wide)
    return projected.T.copy() if _is_tall(matrix) else projected


def _turn(matrix: Floats, operator: Numbers) -> Floats:
    """Multiply a matrix by a symmetric one from its shorter side, in the precision of that."""
    wide = _widened(matrix)
    turned = np.empty(wide.shape, np.float32, like=wide)
    for columns in panels(wide.shape[1]):
        turned[:, columns] = operator @ wide[:, columns].astype(operator.dtype, copy=False)
    return turned.T.copy() if _is_tall(matrix) else turned


def polar(matrix: Floats) -> tuple[Floats, float]:
    """Return the matrix with all singular values set to 1 but absent ones; and the mean of these.

    >>> turned, mean = polar(np.array([[0, 3, 0], [4, 0, 0]], np.float32))
    >>> turned.tolist(), mean
    ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], 3.5)
    """
    wide = _widened(matrix)
    basis = _low_rank_basis(wide)
    if basis is None and _has_fast_doubles(wide):
        symmetric = gram(wide)
        if (root := inverse_root_by_products(symmetric)) is not None:
            return _turn(matrix, root), float((root * symmetric).sum()) / len(wide)
    parts = _take_apart(wide, basis, None)
    near, plain = parts.vectors, parts.plain
    turned = project(matrix, near[:, :plain], 1 / parts.values[:plain])
    if len(parts.far):
        small = multiply(near[:, plain:], parts.far)
        turned += small.T if _is_tall(matrix) else small
    return turned, float(parts.values.mean()) if parts.values.size else 0.0


def inverse_root_by_products(symmetric: Doubles) -> Doubles | None:
    """Return symmetric^(-1/2), by products of matrices alone; None if it is nearly singular.

    With A·Aᵀ = G a polynomial p(A) = q(G)·A, so that q of all steps, multiplied, is the root.
    `inside` is that of each step: q·G·q, which comes to 1.
    """
    one = np.zeros_like(symmetric)
    one.reshape(-1)[:: len(one) + 1] = 1
    bound = float(np.linalg.norm(symmetric @ symmetric)) ** 0.5  # of the largest eigenvalue
    if not bound:
        return None
    root: Doubles = one * bound**-0.5
    inside, distance = symmetric * (1 / bound), np.inf
    for step in TO_ONE:
        first, third, fifth = NEWTON if distance < 1 else step
        factor = one * first + inside * third + inside @ inside * fifth
        root, inside = factor @ root, factor @ inside @ factor
        distance = float(np.linalg.norm(inside - one))
        if distance < IS_ONE * len(inside) ** 0.5:
            return root
    return None


def orthogonal_product(parts: list[Factors], values: Doubles) -> Floats:
    """P(U)·diag(values)·P(V): U all left vectors side by side, V all right ones, P the nearest
    matrix with orthonormal columns or rows (the polar factor, Procrustes).

    Directions in which U or V has less than 1e-6 of its largest singular value are absent. The
    list is emptied, so that no factor is held twice.
    """
    left = np.concatenate([part.left for part in parts], axis=1)
    right = np.concatenate([part.right for part in parts], axis=0)
    parts.clear()
    if len(values) < SINGLE_FROM:
        left, right = left.astype(np.float64), right.astype(np.float64)
        scaled = _inverse_root(left.T @ left) * beside(left, values)
        middle = scaled @ _inverse_root(right @ right.T)
        return multiply(left @ middle, right)
    left = left.astype(np.float32, copy=False)
    turned = polar(left)[0]
    del left
    turned *= beside(turned, values.astype(np.float32))
    return turned @ polar(right.astype(np.float32, copy=False))[0]


def _inverse_root(symmetric: Doubles) -> Doubles:
    """Return symmetric^(-1/2), zero where there is nothing to invert."""
    energies, vectors = np.linalg.eigh(symmetric)
    energies = on_host(energies)
    kept = energies[energies > NOISE**2 * np.maximum(energies[-1:], 0)]
    half: Doubles = vectors[:, len(energies) - len(kept) :] * beside(vectors, kept**-0.25)
    return half @ half.T


def without(matrix: Floats, left: Numbers) -> Floats:
    """Return the rest of a matrix outside the span of orthonormal columns."""
    outside = np.empty(matrix.shape, np.float32, like=matrix)
    for columns in panels(matrix.shape[1]):
        panel = matrix[:, columns].astype(left.dtype)
        outside[:, columns] = panel - left @ (left.T @ panel)
    return outside


def multiply(left: Numbers, right: Numbers) -> Floats:
    """Return left·right in float32."""
    product: Floats = left.astype(np.float32, copy=False) @ right.astype(np.float32, copy=False)
    return product


def gram(wide: Numbers, kind: type[np.floating[Any]] = np.float64) -> Doubles:
    """Return wide·wideᵀ by products of a type, a panel of columns at a time, summed in float64."""
    total = np.zeros((wide.shape[0], wide.shape[0]), like=wide)
    for columns in panels(wide.shape[1]):
        panel = wide[:, columns].astype(kind, copy=False)
        total += panel @ panel.T
    return total


def squared_values(matrix: Floats) -> Doubles:
    """Return all squared singular values, falling; by the Gram matrix in float64.

    >>> squared_values(np.array([[0, 3, 0], [4, 0, 0]], np.float32)).tolist()
    [16.0, 9.0]
    """
    energies: Doubles = on_host(np.linalg.eigvalsh(gram(_widened(matrix))))[::-1]
    return np.maximum(energies, 0)


def falling_eigen(symmetric: Numbers, count: Count | None = None) -> tuple[Numbers, Numbers]:
    """Return eigenvalues of a matrix that has none below zero, falling, and its eigenvectors.

    Only the first `count` of both, if that is given; or as many as it says of all eigenvalues.
    """
    of_all = count if not callable(count) else lambda values: count(np.maximum(values, 0))
    values, rows = _rising_eigen(symmetric, of_all)
    return np.maximum(values[::-1], 0), rows[::-1].T.copy()


def _rising_eigen(symmetric: Numbers, count: Count | None) -> tuple[Numbers, Numbers]:
    """Return eigenvalues and eigenvectors as rows, by `numpy.linalg` if LAPACK cannot be had."""
    is_here = isinstance(symmetric, np.ndarray)
    with suppress(LapackError):
        if is_here and count is not None:
            return leading_eigen(symmetric, count)
        if is_here and symmetric.dtype == np.float32:
            return all_eigen(symmetric)
    values, columns = np.linalg.eigh(symmetric)
    values = on_host(values)
    wanted = count(values[::-1]) if callable(count) else count
    first = 0 if wanted is None else len(values) - wanted
    return values[first:], columns.T[first:]


def squared_norm(matrix: Floats) -> float:
    """Return the squared Frobenius norm, in float64."""
    return sum(
        float(np.square(matrix[rows], dtype=np.float64).sum()) for rows in panels(matrix.shape[0])
    )


def eigen_bytes(short: int) -> int:
    """Return the memory that a Gram matrix and its eigenvectors take while being computed."""
    return 5 * short * short * 8


# ---------------------------------------------------------------- where matrices are


def beside(matrix: Any, few: Array) -> Array:
    """Return a few numbers where a matrix is, to be computed with it."""
    return np.asarray(few, like=matrix)  # type: ignore[return-value]


def on_host(few: Any) -> Any:
    """Return a few numbers as NumPy's, wherever they are."""
    return few if isinstance(few, np.ndarray) else few.get()


def random_like(matrix: Floats, *shape: int) -> Floats:
    """Return the same normal numbers each time, where a matrix is."""
    return beside(matrix, np.random.default_rng(0).standard_normal(shape, np.float32))


def _has_fast_doubles(matrix: Any) -> bool:
    """Tell whether a matrix is on a GPU that computes in float64 about as fast as in float32."""
    if isinstance(matrix, np.ndarray):
        return False
    ratio = matrix.device.attributes.get("SingleToDoublePrecisionPerfRatio", np.inf)
    return bool(ratio <= FAST_DOUBLES)


# ---------------------------------------------------------------- pieces


def _is_tall(matrix: Floats) -> bool:
    rows, columns = matrix.shape
    return bool(rows > columns)


def _widened(matrix: Floats) -> Floats:
    return matrix.T if _is_tall(matrix) else matrix


def panels(length: int) -> Iterator[slice]:
    """Yield panels of so many rows or columns."""
    return (slice(start, start + PANEL) for start in range(0, length, PANEL))


def _no_rows(wide: Floats) -> Floats:
    return np.zeros((0, wide.shape[1]), np.float32, like=wide)


def _times(left: Numbers, wide: Floats) -> Numbers:
    """Return left·wide in the precision of `left`, a panel of columns at a time."""
    product = np.empty((left.shape[0], wide.shape[1]), left.dtype, like=wide)
    for columns in panels(wide.shape[1]):
        product[:, columns] = left @ wide[:, columns].astype(left.dtype, copy=False)
    return product


def _stands_out(wide: Floats) -> bool:
    """Tell whether the largest singular value is far above the others, by power iteration."""
    vector = random_like(wide, len(wide))
    for _ in range(POWER_STEPS):
        vector = wide @ (wide.T @ (vector / np.linalg.norm(vector)))
    return float(np.linalg.norm(vector)) > OUTSTANDING * squared_norm(wide) / len(wide)


def _low_rank_basis(wide: Floats) -> Doubles | None:
    """Return an orthonormal basis of all columns, if a few directions hold them."""
    if wide.shape[0] < SKETCHED_FROM:
        return None
    squared = squared_norm(wide)
    # No singular value of a part is larger than that of the whole with the same number.
    if squared_values(wide[:CORNER, :CORNER])[SKETCH] > MISSED**2 * squared:
        return None
    basis = np.linalg.qr(wide @ random_like(wide, wide.shape[1], SKETCH))[0]
    inside = basis.T @ wide
    if squared - squared_norm(inside) > 1e-5 * squared:  # quick; the next test is exact
        return None
    missed = sum(
        float(np.square(wide[:, c] - basis @ inside[:, c], dtype=np.float64).sum())
        for c in panels(wide.shape[1])
    )
    if missed > MISSED**2 * squared:
        return None
    return np.linalg.qr(basis.astype(np.float64))[0]
