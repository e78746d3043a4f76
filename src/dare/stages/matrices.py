"""Whole matrices for stages that cannot work chunk by chunk.

A survey gathers the matrix, computes, and leaves its result as the summary; the stage then takes
each chunk from there. Tensors of more than two dimensions are matrices of their first dimension
by all others. Vectors and scalars are no matrices: the stages say what they do with them.
"""

from __future__ import annotations

import math

import numpy as np

from dare.errors import InputError
from dare.stages.blocks import Block, Deltas, Floats, Walk


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix; a vector is one row.

    >>> as_matrix((4, 3, 2)), as_matrix((5,)), as_matrix(())
    ((4, 6), (1, 5), (1, 1))
    """
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether a tensor has more than one row and column.

    >>> is_matrix((4, 3)), is_matrix((2, 3, 1)), is_matrix((5,)), is_matrix((1, 5)), is_matrix(())
    (True, True, False, False, False)
    """
    return min(as_matrix(shape)) > 1


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shorter and the longer side of a tensor seen as a matrix.

    >>> sides((4, 3, 2)), sides((7, 2))
    ((4, 6), (2, 7))
    """
    rows, columns = as_matrix(shape)
    return min(rows, columns), max(rows, columns)


def gather_delta(walk: Walk) -> Floats:
    """One model's delta as a matrix, all factors multiplied in."""
    flat = np.empty(math.prod(walk.shape), np.float32)
    for block in walk():
        _put(flat, block, 1.0)
    return flat.reshape(as_matrix(walk.shape))


def gather_deltas(walk: Walk, *, weighted: bool = False) -> list[Floats]:
    """All models' deltas as matrices, in recipe order; multiplied by their weights if asked."""
    flat: list[Floats] = []
    for deltas in walk():
        flat = flat or [np.empty(math.prod(walk.shape), np.float32) for _ in deltas.blocks]
        weights = deltas.weights if weighted else [1.0] * len(flat)
        for values, block, weight in zip(flat, deltas.blocks, weights, strict=True):
            _put(values, block, weight)
    return [values.reshape(as_matrix(walk.shape)) for values in flat]


def _put(flat: Floats, block: Block, weight: float) -> None:
    part = flat[block.start : block.start + block.size]
    np.multiply(block.values, np.float32(weight * block.factor), out=part)
    if not np.isfinite(part).all():
        raise InputError(
            f"{block.tensor}: a model's change has NaN or infinite values, which would spread over "
            "the whole matrix; check the inputs, or merge this tensor by another method"
        )


def take_chunk(block: Block) -> None:
    """Replace a block's values by those of the matrix in its summary."""
    matrix: Floats = block.summary
    block.values[:] = matrix.reshape(-1)[block.start : block.start + block.size]
    block.factor = 1.0
    block.leave_nonzero()


def chunk_of(deltas: Deltas) -> Floats:
    """The part of the matrix in the summary that belongs to this chunk."""
    matrix: Floats = deltas.summary
    start = deltas.blocks[0].start
    return matrix.reshape(-1)[start : start + deltas.size]


def average(deltas: Deltas) -> Floats:
    """Σ wᵢ·δᵢ / n: what becomes of vectors and scalars where only matrices are taken apart."""
    return deltas.sum([weight / len(deltas.blocks) for weight in deltas.weights])
