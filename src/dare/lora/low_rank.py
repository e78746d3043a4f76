"""Low-rank forms of a change: from its factors, from the matrix itself, or in a common space.

Three ways, all with the same result to rounding where the matrix has the rank that is asked for:

- from factors (`truncate_product`): QR of both and an SVD of the small core, in float64; the matrix
  is never formed;
- exact (`truncate_matrix`, small matrices and large ranks): eigenvectors of the Gram matrix of the
  shorter side, in float64, which resolves singular values down to about 1e-8 of the largest;
- sketched (`truncate_matrix`, ranks that are small beside the matrix): a randomised block Krylov
  space of fixed seed, in float32. The error of what comes out is within a hundredth of the least
  that is possible, and it is measured on the matrix, not estimated.

BLAS may add in another order with another number of threads, so products left·right agree between
machines to about 1e-5 of their norm, and not bit for bit.

Core Space (arXiv:2509.17786) represents adapters as small matrices in the space they all span:
U has the left singular vectors of [B₁ … Bₙ], V the right ones of [A₁; …; Aₙ], and Bᵢ·Aᵢ is U·Mᵢ·V
with Mᵢ = Uᵀ·Bᵢ·Aᵢ·Vᵀ. Nothing is lost, Mᵢ has no more rows and columns than the ranks add up to,
and any stage that needs no base merges the Mᵢ. Whole matrices are never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError, RecipeError
from dare.inputs.sources import Floats, Raw, SourceView
from dare.kernels.linalg import (
    NOISE,
    PANEL,
    Doubles,
    beside,
    falling_eigen,
    gram,
    random_like,
    squared_norm,
)
from dare.lora.reading import AdapterFile, LoraModule

Numbers = NDArray[np.floating[Any]]

OVERSAMPLING = 16
DEPTH = 2  # times that a sketch is multiplied by the matrix and its transpose
SKETCH_RATIO = 3  # a sketch's basis is at least this many times smaller than the matrix
FIRST_WIDTH = 64  # rank that is tried first where an energy is asked for


@dataclass(frozen=True)
class Wanted:
    """The part of a matrix to keep: at most `rank` directions, as few as hold `energy` of it.

    >>> Wanted(rank=8).energy is None, Wanted(rank=None, energy=0.9).rank is None
    (True, True)
    """

    rank: int | None = None
    energy: float | None = None

    def __post_init__(self) -> None:
        if self.rank is None and self.energy is None:
            raise RecipeError("rank and energy: one of them is needed, as in rank = 16")
        if self.rank is not None and self.rank < 1:
            raise RecipeError(f"rank = {self.rank}: must be at least 1")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise RecipeError(f"energy = {self.energy}: must be above 0 and at most 1")

    def choose(self, energies: Numbers, total: float) -> int:
        """Return the number of leading directions to take; 0 only where there is nothing.

        >>> Wanted(energy=0.9).choose(np.array([8.0, 1.5, 0.5]), 10.0)
        2
        """
        if not total or not energies.size:
            return 0
        rank = int(np.count_nonzero(energies > NOISE**2 * energies[0]))
        if self.energy is not None:
            held = np.cumsum(energies)
            rank = min(rank, int(np.count_nonzero(held < self.energy * total)) + 1)
        return rank if self.rank is None else min(rank, self.rank)


class LowRank(NamedTuple):
    """A matrix as left·right, the root of each singular value in either, and what that loses."""

    left: Floats  # rows × rank
    right: Floats  # rank × columns
    squared: float  # the squared Frobenius norm of the matrix
    lost: float  # the squared Frobenius norm of what left·right lacks

    @property
    def rank(self) -> int:
        """The number of directions."""
        return int(self.left.shape[1])

    @property
    def error(self) -> float:
        """The relative Frobenius error; 0 where there was nothing to lose."""
        return sqrt(self.lost / self.squared) if self.squared else 0.0


def truncate_product(left: Floats, right: Floats, wanted: Wanted, where: str) -> LowRank:
    """Truncate left·right (rows × k times k × columns) without forming it."""
    check_finite(left, right, where=where)
    basis, rows = np.linalg.qr(left.astype(np.float64))
    other_basis, columns = np.linalg.qr(right.T.astype(np.float64))
    return truncate_core(basis, rows @ columns.T, other_basis.T, wanted)


def truncate_core(left: Doubles, core: Doubles, right: Doubles, wanted: Wanted) -> LowRank:
    """Truncate left·core·right, whose outer factors are orthonormal."""
    inner, values, other_inner = np.linalg.svd(core, full_matrices=False)
    energies = values**2
    rank = wanted.choose(energies, float(energies.sum()))
    roots = np.sqrt(values[:rank])
    tall = left @ (inner[:, :rank] * roots)
    wide = (roots[:, None] * other_inner[:rank]) @ right
    lost = float(energies[rank:].sum())
    return LowRank(*_oriented(tall, wide), float(energies.sum()), lost)


def join_experts(parts: Sequence[LowRank]) -> LowRank:
    """Put the factors of several experts into one pair, as PEFT stores them, of the largest rank.

    lora_A has the directions of one expert after those of another, lora_B has the first direction
    of all experts, then the second.
    """
    rank = max(part.rank for part in parts)
    lefts = [np.pad(part.left, ((0, 0), (0, rank - part.rank))) for part in parts]
    rights = [np.pad(part.right, ((0, rank - part.rank), (0, 0))) for part in parts]
    left = np.stack(lefts, axis=2).reshape(len(lefts[0]), -1)
    sums = (sum(part.squared for part in parts), sum(part.lost for part in parts))
    return LowRank(left, np.concatenate(rights), *sums)


def truncate_matrix(matrix: Floats, wanted: Wanted, where: str) -> LowRank:
    """Truncate a matrix that is in memory; `where` names it in errors."""
    height = max(1, PANEL * PANEL // max(matrix.shape[1], 1))
    panels = [slice(start, start + height) for start in range(0, len(matrix), height)]
    squared = sum(squared_norm(matrix[rows]) for rows in panels)
    check_finite(squared, where=where)
    is_tall = matrix.shape[0] > matrix.shape[1]
    left, right = _leading(matrix.T if is_tall else matrix, wanted, squared)
    left, right = _oriented(right.T, left.T) if is_tall else _oriented(left, right)
    lost = sum(squared_norm(matrix[rows] - left[rows] @ right) for rows in panels)
    return LowRank(left, right, squared, lost)


def working_bytes(shape: tuple[int, int], wanted: Wanted) -> int:
    """Estimate the most memory that `truncate_matrix` takes, with the matrix itself."""
    short, long = min(shape), max(shape)
    exact = 4 * short * short * 8 + short * PANEL * 8
    sketch = _basis_width(wanted.rank or FIRST_WIDTH) * (short + 3 * long) * 8
    is_exact = wanted.energy is not None or not _sketches(short, wanted.rank)
    return short * long * 4 + (max(exact, sketch) if is_exact else sketch)


# ---------------------------------------------------------------- the leading directions


def _leading(wide: Floats, wanted: Wanted, squared: float) -> tuple[Numbers, Numbers]:
    """Return both factors of a matrix that is not taller than wide."""
    short = wide.shape[0]
    width = wanted.rank if wanted.energy is None else min(wanted.rank or short, FIRST_WIDTH)
    while _sketches(short, width):
        assert width is not None  # or there would be no sketch
        basis = _krylov_basis(wide, width + OVERSAMPLING)
        pair = _within(wide, basis, wanted, squared)
        held_enough = wanted.energy is None or width == wanted.rank or pair[0].shape[1] <= width
        if held_enough:
            return pair
        width = min(2 * width, wanted.rank or short)
    return _within(wide, None, wanted, squared)


def _sketches(short: int, width: int | None) -> bool:
    return width is not None and SKETCH_RATIO * _basis_width(width) <= short


def _basis_width(width: int) -> int:
    return (width + OVERSAMPLING) * (DEPTH + 1)


def _krylov_basis(wide: Floats, width: int) -> Floats:
    """Return an orthonormal basis that all but contains the leading left singular vectors."""
    blocks = [np.linalg.qr(wide @ random_like(wide, wide.shape[1], width))[0]]
    for _ in range(DEPTH):
        across = np.linalg.qr(wide.T @ blocks[-1])[0]
        blocks.append(np.linalg.qr(wide @ across)[0])
    basis: Floats = np.linalg.qr(np.concatenate(blocks, axis=1))[0]
    return basis


def _within(
    wide: Floats, basis: Floats | None, wanted: Wanted, squared: float
) -> tuple[Numbers, Numbers]:
    """Return the best factors whose columns are in the basis; None means all directions."""
    projected = wide if basis is None else basis.T @ wide
    energies, vectors = falling_eigen(gram(projected))
    rank = wanted.choose(energies, squared)
    roots = beside(vectors, np.sqrt(np.sqrt(energies[:rank])))
    vectors = vectors[:, :rank]
    right = (vectors / roots).T.astype(np.float32) @ projected
    left = vectors if basis is None else basis @ vectors
    return left * roots, right


def _oriented(left: Numbers, right: Numbers) -> tuple[Floats, Floats]:
    """Fix the signs, which a decomposition leaves open: a column's largest entry is positive."""
    places = np.abs(left).argmax(axis=0)[None]
    signs = np.where(np.take_along_axis(left, places, 0)[0] < 0, -1.0, 1.0)
    left, right = left * signs, right * signs[:, None]
    with np.errstate(over="ignore"):  # what is too large is refused where it is stored
        return left.astype(np.float32, order="C"), right.astype(np.float32, order="C")


def check_finite(*figures: Numbers | float, where: str) -> None:
    """Refuse a change with NaN or infinite values."""
    if not all(np.isfinite(figure).all() for figure in figures):
        raise InputError(f"{where}: the change has values that are not finite; check the inputs")


# ---------------------------------------------------------------- the core space


@dataclass(frozen=True)
class Core:
    """The space of one module, and the adapters' matrices in it; all are stacks, by expert."""

    left: Doubles  # experts × rows × p
    right: Doubles  # experts × q × columns
    matrices: Mapping[int, Floats]  # experts × p × q, by the adapter's number

    def expand(self, merged: Floats, wanted: Wanted | None, where: str) -> Iterator[LowRank]:
        """Yield each expert's factors of the change that a merged matrix represents."""
        shape = len(self.left), self.left.shape[2], self.right.shape[1]
        cores = merged.reshape(shape).astype(np.float64)
        check_finite(cores, where=where)
        wanted = wanted or Wanted(rank=max(1, cores.size))
        for left, core, right in zip(self.left, cores, self.right, strict=True):
            yield truncate_core(left, core, right, wanted)


def _find_core(factors: Mapping[int, tuple[Floats, Floats, float]], where: str) -> Core:
    """Find the space of a module from each adapter's lora_A, lora_B and scaling."""
    check_finite(*(factor for *pair, _ in factors.values() for factor in pair), where=where)
    downs = [down.astype(np.float64) for down, _, _ in factors.values()]
    ups = [up.astype(np.float64) for _, up, _ in factors.values()]
    left = np.linalg.svd(np.concatenate(ups, axis=2), full_matrices=False)[0]
    right = np.linalg.svd(np.concatenate(downs, axis=1), full_matrices=False)[2]
    inward, outward = left.transpose(0, 2, 1), right.transpose(0, 2, 1)
    with np.errstate(over="ignore"):  # what is too large for float32 is refused later
        matrices = {
            number: (scaling * (inward @ up) @ (down @ outward)).astype(np.float32)
            for (number, (*_, scaling)), down, up in zip(factors.items(), downs, ups, strict=True)
        }
    return Core(left, right, matrices)


FindCore = Callable[[LoraModule], Core]


def keep_last(adapters: Sequence[AdapterFile]) -> FindCore:
    """Return a search for the core space of modules; it keeps the last one that it found."""

    @lru_cache(maxsize=1)
    def find(module: LoraModule) -> Core:
        pairs = zip(module.owners, module.pairs, strict=True)
        factors = {n: (*adapters[n].read_pair(module.name), pair.scaling) for n, pair in pairs}
        return _find_core(factors, module.name)

    return find


def core_bytes(module: LoraModule) -> int:
    """Estimate the memory of finding the space of a module: factors and vectors, each twice."""
    rank = sum(module.ranks)
    one = 4 * 8 * rank * sum(module.shape) + 16 * len(module.ranks) * rank**2
    return module.experts * one


class CoreSource(SourceView):
    """An adapter whose modules are presented as their matrices in the core space."""

    def __init__(
        self,
        number: int,
        adapters: Sequence[AdapterFile],
        modules: Sequence[LoraModule],
        find: FindCore,
    ) -> None:
        adapter = adapters[number]
        self._modules = {m.tensor: m for m in modules if number in m.owners}
        self._number, self._find = number, find
        tensors = {f"{name}.bias": adapter.tensors[f"{name}.bias"] for name in adapter.biases}
        for name, module in self._modules.items():
            tensors[name] = replace(adapter.tensors[name], shape=module.core_shape)
        super().__init__(adapter, tensors, computed=self._modules, opened=adapters)
        most = max(map(core_bytes, modules)) // len(adapters)  # one finds it for all
        self.cost = self.cost.with_reading(most)

    def compute(self, name: str, start: int, into: Raw) -> None:
        matrix = self._find(self._modules[name]).matrices[self._number]
        into[:] = matrix.reshape(-1)[start : start + into.size]
