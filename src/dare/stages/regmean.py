"""Layers that come as close as they can to each model's outputs on the inputs of its task."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from dare.kernels.linalg import Doubles, panels
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.matrices import as_matrix, chunk_of_summary, gather
from dare.stages.registry import combine_stage, meaning

RIDGE = 1e-6  # of the mean of the diagonal, which is added to it

Alpha = Annotated[float, meaning("Factor on what is not on a Gram matrix's diagonal.", ge=0, le=1)]


def survey_layers(view: JointView, *, alpha: Alpha) -> Floats:
    """Find the change for which Σ |Xᵢ·(δ - δᵢ)ᵀ|² is least, in float64.

    Rows are independent of each other. They are worked on by panels, in place of the first model's.
    """
    assert view.grams is not None  # else the layer is not surveyed
    grams = [_shrunk(gram, alpha) for gram in view.grams.read()]
    inverse = np.linalg.inv(sum(grams[1:], grams[0]))
    matrices, _ = gather(view, combines=True)
    turned = [matrix.T if view.grams.axis == 0 else matrix for matrix in matrices]
    for rows in panels(len(turned[0])):
        pairs = zip(turned, grams, strict=True)
        right = [np.matmul(delta[rows], gram, dtype=np.float64) for delta, gram in pairs]
        turned[0][rows] = sum(right[1:], right[0]) @ inverse
    return matrices[0]


def _shrunk(gram: Floats, alpha: float) -> Doubles:
    """Return a Gram matrix with a trace of 1, with less beside the diagonal and a little on it."""
    shrunk = gram.astype(np.float64)
    diagonal = shrunk.diagonal() / (shrunk.trace() or 1.0)
    shrunk *= alpha / (shrunk.trace() or 1.0)
    np.fill_diagonal(shrunk, diagonal + RIDGE / len(gram))
    return shrunk


def _survey_bytes(shape: tuple[int, ...], models: int) -> int:
    """Count all models' matrices of outputs × inputs, their Gram matrices, the sum and a factor."""
    rows, columns = as_matrix(shape)
    return 4 * models * rows * columns + (8 * models + 24) * columns**2


@combine_stage(
    paper="arXiv:2212.09849",
    sees="matrix",
    survey=survey_layers,
    survey_bytes=_survey_bytes,
    kept_bytes=lambda shape, _models: 4 * as_matrix(shape)[0] * as_matrix(shape)[1],
    default_weight=None,
    takes_grams=True,
)
def regmean(deltas: Deltas, *, alpha: Alpha = 0.9) -> Floats:  # noqa: ARG001
    """Merge linear layers by least squares, from inputs of the models' tasks (RegMean).

    δ = (Σ δᵢ·Gᵢ)·(Σ Gᵢ)⁻¹ for a layer of outputs × inputs. Gᵢ is the Gram matrix XᵢᵀXᵢ of the
    layer's inputs in model i on examples of its task, multiplied by `alpha` beside the diagonal,
    divided by its trace, plus 1e-6/d on the diagonal, where d is the number of inputs. The recipe
    names the file of the Gram matrices as `gathered`. Everything without such a matrix is averaged:
    Σ δᵢ / n.
    The solution is the same for whole weights as for deltas. It is computed in float64.
    """
    if deltas.summary is None:
        count = len(deltas.blocks)
        return deltas.sum([1 / count] * count)
    return chunk_of_summary(deltas)
