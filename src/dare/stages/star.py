"""Spectral truncation and rescaling."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from dare.kernels.linalg import eigen_bytes, project, spectrum
from dare.stages.blocks import Block, Floats, Walk
from dare.stages.matrices import gather_delta, is_matrix, sides, take_chunk
from dare.stages.registry import delta_stage

SingularShare = Annotated[
    float,
    Field(gt=0, le=1, description="Share of the sum of singular values to keep, largest first."),
]


def survey_truncated(walk: Walk, *, singular_share: float) -> Floats | None:
    """Truncate and rescale the matrix; None for what is not a matrix."""
    if not is_matrix(walk.shape):
        return None
    matrix = gather_delta(walk)
    found = spectrum(matrix)
    if not found.values.size:
        return matrix
    held = np.cumsum(found.values)
    rank = int(np.searchsorted(held, singular_share * held[-1])) + 1
    factors = np.full(rank, held[-1] / held[rank - 1])
    return project(matrix, found.vectors[:, :rank], factors)


def survey_bytes(shape: tuple[int, ...], _models: int) -> int:
    """The matrix, its result and the part in between, and the eigenvectors of the shorter side."""
    if not is_matrix(shape):
        return 0
    short, long = sides(shape)
    return 4 * 5 * short * long + eigen_bytes(short)


@delta_stage(
    paper="arXiv:2502.10339",
    survey=survey_truncated,
    surveys_when=lambda settings: settings["singular_share"] < 1,
    survey_bytes=survey_bytes,
)
def star(block: Block, *, singular_share: SingularShare = 0.4) -> None:
    """Keep each matrix's leading singular directions, rescaled to its nuclear norm (STAR).

    δ = Σ σⱼ·uⱼ·vⱼᵀ becomes (Σ σⱼ / Σ_{j≤r} σⱼ) · Σ_{j≤r} σⱼ·uⱼ·vⱼᵀ, where r is the least rank with
    Σ_{j≤r} σⱼ ≥ singular_share · Σ σⱼ. Vectors and scalars have one direction and stay as they are.
    The result is within 1e-5 of its norm of that of an exact decomposition, unless
    σᵣ and σᵣ₊₁ are equal, when either may be kept.
    """
    if singular_share < 1 and block.summary is not None:
        take_chunk(block)
