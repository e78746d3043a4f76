"""Task singular vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dare.kernels.linalg import eigen_bytes, factorise, orthogonal_product
from dare.stages.blocks import Floats
from dare.stages.matrices import matrix_combine_stage, multiply_by_weights


def _work_bytes(rows: int, columns: int, models: int) -> int:
    """Count all models' matrices while the first is factorised, or later the float64 triples."""
    triples = max(min(rows, columns), models)
    matrix = 4 * triples * max(rows, columns)
    return max(models + 3, 6) * matrix + 24 * triples**2 + 2 * eigen_bytes(triples)


@matrix_combine_stage(paper="arXiv:2412.00081", work_bytes=_work_bytes)
def tsv(deltas: list[Floats], weights: Sequence[float]) -> Floats:
    """Give each model an equal share of the rank, and make the shares orthogonal (TSV-Merge).

    Of each wᵢ·δᵢ the first ⌊r/n⌋ singular triples are taken (at least one), where r is the length
    of the shorter side and n the number of models. U has all left vectors as columns, V all right
    ones as rows, S all singular values. The result is P(U)·S·P(V), where P is the nearest
    orthogonal matrix: that of the Procrustes problem. Singular values below 1e-6 of a matrix's
    largest are left out with their vectors. Vectors and scalars are averaged: Σ wᵢ·δᵢ / n; so are
    embeddings and heads, unless `embeddings = "matrices"`.
    The authors' code also averages tensors of more than two dimensions, here read as matrices, and
    gives no direction to a model where n > r.
    Accurate to 1e-4 of the norm, unless the models' directions are nearly parallel: for deltas that
    differ by a thousandth, only to a tenth.
    """
    multiply_by_weights(deltas, weights)
    rank = max(1, min(deltas[0].shape) // len(deltas))
    parts = []
    while deltas:  # each gives way to its factors
        parts.append(factorise(deltas.pop(0), rank))
    return orthogonal_product(parts, np.concatenate([part.values for part in parts]))
