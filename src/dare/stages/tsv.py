"""Task singular vectors."""

from __future__ import annotations

import numpy as np

from dare.kernels.linalg import eigen_bytes, factorise, orthogonal_product
from dare.stages.blocks import Deltas, Floats, Walk
from dare.stages.matrices import average, chunk_of, gather_deltas, is_matrix, sides
from dare.stages.registry import combine_stage


def survey_merged(walk: Walk) -> Floats | None:
    """Merge the matrices; None for what is not a matrix."""
    if not is_matrix(walk.shape):
        return None
    matrices = gather_deltas(walk, weighted=True)
    rank = max(1, min(matrices[0].shape) // len(matrices))
    parts = [factorise(matrix, rank) for matrix in matrices]
    return orthogonal_product(parts, np.concatenate([part.values for part in parts]))


def survey_bytes(shape: tuple[int, ...], models: int) -> int:
    """All models' matrices, their triples in float64, and the result."""
    if not is_matrix(shape):
        return 0
    short, long = sides(shape)
    triples = max(short, models)
    matrices = 4 * (models + 1) * short * long
    factors = 12 * 2 * triples * (short + long)
    return matrices + factors + 2 * eigen_bytes(triples)


@combine_stage(paper="arXiv:2412.00081", survey=survey_merged, survey_bytes=survey_bytes)
def tsv(deltas: Deltas) -> Floats:
    """Give each model an equal share of the rank, and make the shares orthogonal (TSV-Merge).

    Of each wᵢ·δᵢ the first ⌊r/n⌋ singular triples are taken (at least one), r being the shorter
    side and n the number of models. U has all left vectors as columns, V all right ones as rows, S
    all singular values. The result is P(U)·S·P(V), where P is the nearest orthogonal matrix: that
    of the Procrustes problem. Singular values below 1e-6 of a matrix's largest are left out with
    their vectors. Vectors and scalars are averaged: Σ wᵢ·δᵢ / n.
    The authors' code averages tensors of more than two dimensions too, which are matrices here, and
    gives no direction to a model where n > r.
    To 1e-4 of the norm for models whose directions are not all but parallel.
    """
    return average(deltas) if deltas.summary is None else chunk_of(deltas)
