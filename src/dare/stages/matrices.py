"""Whole matrices for stages that cannot work chunk by chunk.

A matrix stage is a pure function of matrices. Its survey gathers them, calls it and leaves the
result as the summary; each chunk is then taken from there. Tensors of more than two dimensions are
matrices of their first dimension by all others. Vectors and scalars are no matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from dare.errors import InputError
from dare.stages.blocks import Block, Deltas, Floats, Walk
from dare.stages.registry import Settings, SurveyBytes, combine_stage, delta_stage


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


def _gather_delta(walk: Walk) -> Floats:
    """One model's delta as a matrix, all factors multiplied in."""
    flat = np.empty(math.prod(walk.shape), np.float32)
    for block in walk():
        _put(flat, block)
    return flat.reshape(as_matrix(walk.shape))


def _gather_deltas(walk: Walk) -> tuple[list[Floats], list[float]]:
    """All models' deltas as matrices, in recipe order, and the models' weights."""
    flat: list[Floats] = []
    weights: list[float] = []
    for deltas in walk():
        flat = flat or [np.empty(math.prod(walk.shape), np.float32) for _ in deltas.blocks]
        weights = list(deltas.weights)
        for values, block in zip(flat, deltas.blocks, strict=True):
            _put(values, block)
    return [values.reshape(as_matrix(walk.shape)) for values in flat], weights


def _put(flat: Floats, block: Block) -> None:
    part = flat[block.start : block.start + block.size]
    np.multiply(block.values, np.float32(block.factor), out=part)
    if not np.isfinite(part).all():
        raise InputError(
            f"{block.tensor}: a model's change has NaN or infinite values, which would spread over "
            "the whole matrix; check the inputs, or merge this tensor by another method"
        )


def multiply_by_weights(deltas: Sequence[Floats], weights: Sequence[float]) -> None:
    """δᵢ becomes wᵢ·δᵢ, in place."""
    for delta, weight in zip(deltas, weights, strict=True):
        np.multiply(delta, np.float32(weight), out=delta)


# ---------------------------------------------------------------- registering

WorkBytes = Callable[[int, int, int], int]
"""Memory by rows, columns and the number of models whose matrices are worked on together."""


def matrix_delta_stage(
    *,
    work_bytes: WorkBytes,
    paper: str = "",
    acts_when: Callable[[Settings], bool] = lambda _settings: True,
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register a function from one model's matrix to another as a delta stage.

    `work_bytes` counts the matrix, the result and all in between; `acts_when` says for which
    parameters the stage changes anything. Vectors and scalars stay as they are.
    """

    def register(function: Callable[..., Floats]) -> Callable[..., Floats]:
        def survey(walk: Walk, **settings: Any) -> Floats | None:
            return function(_gather_delta(walk), **settings) if is_matrix(walk.shape) else None

        @wraps(function)
        def apply(block: Block, **_settings: Any) -> None:
            if block.summary is not None:
                block.values[:] = _chunk_of(block.summary, block)
                block.factor = 1.0
                block.leave_nonzero()

        delta_stage(
            sees="matrix",
            paper=paper,
            survey=survey,
            surveys_when=acts_when,
            survey_bytes=_of_matrices(work_bytes),
            kept_bytes=_of_matrices(lambda rows, columns, _models: 4 * rows * columns),
        )(apply)
        return function

    return register


def matrix_combine_stage(
    *, work_bytes: WorkBytes, paper: str = "", votes: bool = False
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register a function from all models' matrices and their weights to one as a combine stage.

    The matrices are the function's own, to be changed at will. Vectors and scalars are averaged:
    Σ wᵢ·δᵢ / n.
    """

    def register(function: Callable[..., Floats]) -> Callable[..., Floats]:
        def survey(walk: Walk, **settings: Any) -> Floats | None:
            return function(*_gather_deltas(walk), **settings) if is_matrix(walk.shape) else None

        @wraps(function)
        def apply(deltas: Deltas, **_settings: Any) -> Floats:
            if deltas.summary is None:
                return deltas.sum([weight / len(deltas.blocks) for weight in deltas.weights])
            return _chunk_of(deltas.summary, deltas.blocks[0])

        combine_stage(
            sees="matrix",
            paper=paper,
            votes=votes,
            survey=survey,
            survey_bytes=_of_matrices(work_bytes),
            kept_bytes=_of_matrices(lambda rows, columns, _models: 4 * rows * columns),
        )(apply)
        return function

    return register


def _of_matrices(work_bytes: WorkBytes) -> SurveyBytes:
    def survey_bytes(shape: tuple[int, ...], models: int) -> int:
        return work_bytes(*as_matrix(shape), models) if is_matrix(shape) else 0

    return survey_bytes


def _chunk_of(matrix: Floats, block: Block) -> Floats:
    """The part of a matrix that belongs to a block."""
    return matrix.reshape(-1)[block.start : block.start + block.size]
