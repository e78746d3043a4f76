"""Whole matrices for stages that cannot work chunk by chunk.

A matrix stage is a pure function of matrices. Its survey gathers them, calls it and leaves the
result as the summary; each chunk is then taken from there. Refine stages are called one after the
other, the first with what the combine stage has made of all chunks. Tensors of more than two
dimensions are matrices of their first dimension by all others. Vectors and scalars are no matrices,
and by default embeddings and heads count as vectors, as in the papers: their rows are tokens, not
directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, Literal

import numpy as np

from dare.errors import NotFiniteError
from dare.kernels import call_with_matrices, matrix_gpu
from dare.stages.blocks import Block, Deltas, Floats, View
from dare.stages.registry import (
    Parameter,
    Settings,
    Stage,
    always,
    combine_stage,
    delta_stage,
    meaning,
    refine_stage,
)
from dare.tensors.names import is_embedding

Embeddings = Annotated[
    Literal["vectors", "matrices"],
    meaning("Treat embeddings and heads like vectors, or like all other matrices."),
]


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor seen as a matrix; a vector is one row.

    >>> as_matrix((4, 3, 2)), as_matrix((5,)), as_matrix(())
    ((4, 6), (1, 5), (1, 1))
    """
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has more than one row and column.

    >>> is_matrix((4, 3)), is_matrix((2, 3, 1)), is_matrix((5,)), is_matrix((1, 5)), is_matrix(())
    (True, True, False, False, False)
    """
    return min(as_matrix(shape)) > 1


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shorter and the longer side of a tensor seen as a matrix.

    >>> sides((4, 3, 2)), sides((7, 2))
    ((4, 6), (2, 7))
    """
    rows, columns = as_matrix(shape)
    return min(rows, columns), max(rows, columns)


def gather(view: View, *, combines: bool, gpu: Any = None) -> tuple[list[Floats], list[float]]:
    """Gather deltas as matrices, of one model or of all in recipe order, and the models' weights.

    All factors are multiplied in. With a GPU the matrices are there, and the blocks are used up.
    """
    size, flat = math.prod(view.shape), list[Floats]()
    weights: list[float] = []
    for found in view():
        blocks, weights = (found.blocks, found.weights) if combines else ([found], [])
        flat = flat or [gpu.empty(size) if gpu else np.empty(size, np.float32) for _ in blocks]
        for matrix, block in zip(flat, blocks, strict=True):
            part = _chunk_of(matrix, block)
            if gpu:
                values = block.delta
                gpu.put(values, part)
            else:
                values = np.multiply(block.values, np.float32(block.factor), out=part)
            if not np.isfinite(values).all():
                raise NotFiniteError(
                    f"{block.tensor}: a model's change has NaN or infinite values, which would "
                    "spread over the whole matrix; check the inputs, or merge this tensor by "
                    "another method"
                )
    return [matrix.reshape(as_matrix(view.shape)) for matrix in flat], list(weights)


def multiply_by_weights(deltas: Sequence[Floats], weights: Sequence[float]) -> None:
    """Multiply each δᵢ by wᵢ, in place."""
    for delta, weight in zip(deltas, weights, strict=True):
        np.multiply(delta, np.float32(weight), out=delta)


# ---------------------------------------------------------------- registering

# Memory by rows, columns and the number of models whose matrices are worked on together.
WorkBytes = Callable[[int, int, int], int]


def matrix_delta_stage(
    *, work_bytes: WorkBytes, acts_when: Callable[[Settings], bool] = always, **declared: Any
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register a function from one model's matrix to another as a delta stage.

    `work_bytes` counts the matrix, the result and all in between; `acts_when` says for which
    parameters the stage changes anything. Vectors and scalars stay as they are, and embeddings and
    heads too unless the parameter `embeddings`, which every matrix stage has, says otherwise.
    """

    def register(function: Callable[..., Floats]) -> Callable[..., Floats]:
        def work(view: View, **settings: Any) -> Any:
            gpu = matrix_gpu(view.kernels) if declared.get("on_gpu") else None
            matrix = gather(view, combines=False, gpu=gpu)[0][0]
            return call_with_matrices(gpu, function, matrix, **settings)

        @wraps(function)
        def apply(block: Block, **_settings: Any) -> None:
            if block.summary is not None:
                block.values[:] = _chunk_of(block.summary, block)
                block.factor = 1.0
                block.leave_nonzero()

        declared["is_identity"] = lambda settings: not acts_when(settings)
        delta_stage(**_survey(work, work_bytes), surveys_when=acts_when, **declared)(apply)
        return function

    return register


def matrix_combine_stage(
    *, work_bytes: WorkBytes, **declared: Any
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register a function from all models' matrices and their weights to one as a combine stage.

    The matrices are the function's own, to be changed at will. Vectors and scalars are averaged:
    Σ wᵢ·δᵢ / n; embeddings and heads too, unless the parameter `embeddings` says otherwise.
    """

    def register(function: Callable[..., Floats]) -> Callable[..., Floats]:
        def work(view: View, **settings: Any) -> Any:
            gpu = matrix_gpu(view.kernels) if declared.get("on_gpu") else None
            given = gather(view, combines=True, gpu=gpu)
            return call_with_matrices(gpu, function, *given, **settings)

        @wraps(function)
        def apply(deltas: Deltas, **_settings: Any) -> Floats:
            if deltas.summary is None:
                return deltas.sum([weight / len(deltas.blocks) for weight in deltas.weights])
            return chunk_of_summary(deltas)

        combine_stage(**_survey(work, work_bytes), **declared)(apply)
        return function

    return register


def matrix_refine_stage(
    *, work_bytes: WorkBytes, **declared: Any
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register a function of the merged matrix, all models' and their weights as a refine stage.

    It leaves its matrices as they are. Vectors and scalars stay as combined.
    """

    def register(function: Callable[..., Floats]) -> Callable[..., Floats]:
        return refine_stage(**_survey(function, work_bytes), **declared)(function)

    return register


def refine(
    view: View,
    combine: Callable[[Deltas], Floats],
    stages: Iterable[tuple[Stage, Settings]],
) -> Floats:
    """Combine the deltas of a matrix chunk by chunk, and take the result through refine stages."""
    flat = np.empty(math.prod(view.shape), np.float32)

    def combined() -> Iterator[Deltas]:
        for deltas in view():
            yield deltas  # gathered before it is combined, which may change its values
            _chunk_of(flat, deltas.blocks[0])[:] = combine(deltas)

    matrices, weights = gather(replace(view, walk=combined), combines=True)
    merged = flat.reshape(as_matrix(view.shape))
    for stage, settings in stages:
        assert stage.survey is not None  # as every refine stage has one
        gpu = matrix_gpu(view.kernels) if stage.on_gpu else None
        given = merged, matrices, weights
        merged = call_with_matrices(gpu, stage.survey, *given, **settings)
    return merged


def chunk_of_summary(deltas: Deltas) -> Floats:
    """Return the part of the whole matrix in the summary that the deltas are of."""
    return _chunk_of(deltas.summary, deltas.blocks[0])


def _survey(work: Callable[..., Floats], work_bytes: WorkBytes) -> dict[str, Any]:
    """Declare a survey of matrices only."""

    def survey(*given: Any, embeddings: Embeddings, **settings: Any) -> Floats:  # noqa: ARG001
        return work(*given, **settings)

    def survey_bytes(shape: tuple[int, ...], models: int) -> int:
        return work_bytes(*as_matrix(shape), models)

    def kept_bytes(shape: tuple[int, ...], _models: int) -> int:
        return 4 * math.prod(shape)

    def surveys_tensor(settings: Settings, tensor: str, shape: tuple[int, ...]) -> bool:
        takes_all = settings["embeddings"] == "matrices"
        return is_matrix(shape) and (takes_all or not is_embedding(tensor))

    return {
        "sees": "matrix",
        "parameters": {"embeddings": Parameter("embeddings", "vectors", Embeddings)},
        "survey": survey,
        "surveys_tensor": surveys_tensor,
        "survey_bytes": survey_bytes,
        "kept_bytes": kept_bytes,
    }


def _chunk_of(matrix: Floats, block: Block) -> Floats:
    return matrix.reshape(-1)[block.start : block.start + block.size]
