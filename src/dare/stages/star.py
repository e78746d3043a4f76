"""Spectral truncation and rescaling."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from dare.kernels.linalg import Numbers, eigen_bytes, project, spectrum
from dare.stages.blocks import Floats
from dare.stages.matrices import matrix_delta_stage
from dare.stages.registry import meaning

SingularShare = Annotated[
    float, meaning("Share of the sum of singular values to keep, largest first.", gt=0, le=1)
]


@matrix_delta_stage(
    paper="arXiv:2502.10339",
    work_bytes=lambda m, n, _models: 4 * 5 * m * n + eigen_bytes(min(m, n)),
    acts_when=lambda settings: settings["singular_share"] < 1,
)
def star(matrix: Floats, *, singular_share: SingularShare = 0.4) -> Floats:
    """Keep each matrix's leading singular directions, rescaled to its nuclear norm (STAR).

    δ = Σ σⱼ·uⱼ·vⱼᵀ becomes (Σ σⱼ / Σ_{j≤r} σⱼ) · Σ_{j≤r} σⱼ·uⱼ·vⱼᵀ, where r is the least rank with
    Σ_{j≤r} σⱼ ≥ singular_share · Σ σⱼ. Vectors and scalars have one direction and stay as they are;
    so do embeddings and heads, unless `embeddings = "matrices"`.
    The result is within 3e-5 of its norm of that of an exact decomposition, unless
    σᵣ and σᵣ₊₁ are equal, when either may be kept.
    """
    total = 0.0

    def rank(values: Numbers) -> int:
        nonlocal total
        held = np.cumsum(values)
        total = held[-1]
        return int(np.searchsorted(held, singular_share * total)) + 1

    kept = spectrum(matrix, rank)
    if not kept.values.size:
        return matrix
    return project(matrix, kept.vectors, np.full(len(kept.values), total / kept.values.sum()))
