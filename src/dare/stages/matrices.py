"""Whole matrices for stages that cannot work chunk by chunk.

A survey gathers the matrix, computes, and leaves its result as the summary; the stage then takes
each chunk from there. Tensors of more than two dimensions are matrices of their first dimension
by all others.
"""

from __future__ import annotations

import math

import numpy as np

from dare.stages.blocks import Block, Deltas, Floats, Walk


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix; a vector is one row.

    >>> as_matrix((4, 3, 2)), as_matrix((5,)), as_matrix(())
    ((4, 6), (1, 5), (1, 1))
    """
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def gather_delta(walk: Walk) -> Floats:
    """One model's delta as a matrix, all factors multiplied in."""
    flat = np.empty(math.prod(walk.shape), np.float32)
    for block in walk():
        _put(flat, block)
    return flat.reshape(as_matrix(walk.shape))


def gather_deltas(walk: Walk) -> list[Floats]:
    """All models' deltas as matrices, in recipe order."""
    flat: list[Floats] = []
    for deltas in walk():
        flat = flat or [np.empty(math.prod(walk.shape), np.float32) for _ in deltas.blocks]
        for values, block in zip(flat, deltas.blocks, strict=True):
            _put(values, block)
    return [values.reshape(as_matrix(walk.shape)) for values in flat]


def _put(flat: Floats, block: Block) -> None:
    part = flat[block.start : block.start + block.size]
    np.multiply(block.values, np.float32(block.factor), out=part)


def take_chunk(block: Block) -> None:
    """Replace a block's values by those of the matrix in its summary."""
    matrix: Floats = block.summary
    block.values[:] = matrix.reshape(-1)[block.start : block.start + block.size]
    block.factor = 1.0


def chunk_of(deltas: Deltas) -> Floats:
    """The part of the matrix in the summary that belongs to this chunk."""
    matrix: Floats = deltas.summary
    start = deltas.blocks[0].start
    return matrix.reshape(-1)[start : start + deltas.size]
