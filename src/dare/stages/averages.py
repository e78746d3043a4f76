"""Weighted sums of deltas, or of whole tensors, and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, Literal

import numpy as np

from dare.kernels import call_with_matrices, matrix_gpu
from dare.kernels.linalg import Doubles, panels
from dare.stages.blocks import Deltas, Floats, JointView
from dare.stages.matrices import as_matrix, chunk_of_summary, gather
from dare.stages.ranks import row_length
from dare.stages.registry import Settings, always, combine_stage, meaning

Tensors = Literal["weights", "deltas"]  # what is added up

NO_SUM = 1e-8  # weights whose sum is less than this cancel each other

Normalize = Annotated[bool, meaning("Divide by the sum of the weights, in each tensor.")]
Terms = Annotated[
    Literal["deltas", "weights"], meaning("Add up the models' deltas, or their tensors.")
]


def on_weights(settings: Settings) -> bool:
    """Tell whether a stage works on the models' tensors, which takes the base."""
    return bool(settings["on"] == "weights")


def sum_in(deltas: Deltas, coefficients: Sequence[float], on: Tensors) -> Floats:
    """Return Σ cᵢ·deltaᵢ; of whole tensors the base too, as far as the cᵢ do not add up to 1."""
    excess = math.fsum(coefficients) - 1
    return deltas.sum(coefficients, excess if on == "weights" else 0.0)


@dataclass(frozen=True)
class Lines:
    """Coefficients for each row or column of a matrix."""

    columns: int
    coefficients: Doubles  # models × rows, or models × columns


def sum_lines(deltas: Deltas, lines: Lines, on: Tensors, *, by_column: bool = False) -> Floats:
    """Return the same sum as `sum_in`, with coefficients for each row, or column."""
    start = deltas.blocks[0].start
    places = np.arange(start, start + deltas.size)
    places = places % lines.columns if by_column else places // lines.columns
    total = np.zeros(deltas.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for block, own in zip(deltas.blocks, lines.coefficients, strict=True):
            total += (own * block.factor).astype(np.float32)[places] * block.values
        if on == "weights":
            excess = lines.coefficients.sum(axis=0) - 1
            total += excess.astype(np.float32)[places] * deltas.base
    return total


def _is_sum(settings: Settings) -> bool:
    return not (settings["normalize"] or on_weights(settings))


_DECLARED: dict[str, Any] = {
    "is_identity": always,
    "is_lazy": always,
    "needs_base": on_weights,
    "is_sum": _is_sum,
}


def weights_fault(settings: Settings, weights: Sequence[float]) -> str:
    """Say why weights that cancel each other cannot be divided by their sum."""
    if not settings["normalize"] or not _cancel(weights):
        return ""
    return " add up to 0, which they are divided by; give other weights, or set normalize = false"


@combine_stage(default_weight=lambda models: 1 / models, weights_fault=weights_fault, **_DECLARED)
def linear(deltas: Deltas, *, normalize: Normalize = False, on: Terms = "deltas") -> Floats:
    """Average the deltas: Σ wᵢ·δ̂ᵢ, where each weight is 1/n unless given.

    `normalize` divides the weights by their sum, which must not be 0. `on = "weights"` averages the
    models' tensors: the result is Σ wᵢ·(base + δ̂ᵢ), and the base counts only if it is also listed
    as a model, with a weight.
    """
    return _add_up(deltas, normalize, on)


@combine_stage(paper="arXiv:2212.04089", adds_up=True, **_DECLARED)
def sum(  # noqa: A001
    deltas: Deltas, *, normalize: Normalize = False, on: Terms = "deltas"
) -> Floats:
    """Add the deltas up (task arithmetic): Σ wᵢ·δ̂ᵢ, where each weight is 1 unless given.

    `normalize` divides the weights by their sum, unless that is 0. `on = "weights"` adds up the
    models' tensors: the result is Σ wᵢ·(base + δ̂ᵢ).
    """
    return _add_up(deltas, normalize and not _cancel(deltas.weights), on)


def _cancel(weights: Sequence[float]) -> bool:
    return abs(math.fsum(weights)) < NO_SUM


def _add_up(deltas: Deltas, normalize: bool, on: Terms) -> Floats:
    divisor = math.fsum(deltas.weights) if normalize else 1.0
    return sum_in(deltas, [weight / divisor for weight in deltas.weights], on)


@combine_stage(default_weight=None, models=0, is_lazy=always)
def passthrough(deltas: Deltas) -> Floats:
    """Copy the base, which may be a stack of layers: no models are merged into it."""
    return deltas.sum(())


Each = Annotated[
    Literal["tensor", "row"], meaning("What has an angle of its own: a tensor, or each row.")
]


def survey_cosines(view: JointView, *, each: Each) -> float | Lines:
    """Find how far to go from the base to the mean, t, from the angles between the deltas.

    For rows, the coefficients of all models are found from their t.
    """
    count = len(view.weights)
    if each == "tensor" or len(view.shape) < 2:
        products = view.dots(with_base=False)
        return _distance(count, [x for i, row in enumerate(products) for x in row[i:]])
    columns = row_length(view.shape)
    sums = view.line_dots(columns, by_column=False, with_base=False)
    shares = (_distance(count, products.tolist()) / count for products in sums.T)
    own = np.fromiter(shares, np.float64, sums.shape[1])
    return Lines(columns, np.broadcast_to(own, (count, own.size)))


def _distance(count: int, products: Sequence[float]) -> float:
    """Return t from the products of all pairs: 00, 01, … 11, …."""
    rest = iter(products)
    of = {(i, j): next(rest) for i in range(count) for j in range(i, count)}
    lengths = [math.sqrt(of[i, i]) for i in range(count)]
    cosines = [
        of[j, i] / (lengths[i] * lengths[j]) if lengths[i] * lengths[j] else 0.0
        for i in range(count)
        for j in range(i)
    ]
    cosine = math.fsum(cosines) / len(cosines) if cosines else 1.0
    if math.isnan(cosine):
        return 1.0
    cosine = min(1.0, max(0.0, cosine))
    return count * cosine / (1 + (count - 1) * cosine)


@combine_stage(
    paper="arXiv:2403.19522",
    sees="tensor",
    survey=survey_cosines,
    default_weight=None,
    is_lazy=lambda settings: settings["each"] == "tensor",
)
def model_stock(deltas: Deltas, *, each: Each = "tensor") -> Floats:  # noqa: ARG001
    """Go from the base towards the mean of the models: the more they agree, the farther.

    t·Σ δ̂ᵢ/n with t = n·cos θ / (1 + (n - 1)·cos θ), for each tensor, where cos θ is the mean
    cosine of two models' deltas; that of a delta of zeros to any other is 0. t is 1 where all
    are parallel, there is one model or one is not finite, and 0, the base, where cos θ ≤ 0.
    With `each = "row"` every row, which is the last dimension, has its own t; a vector is one row.
    """
    found: float | Lines = deltas.summary
    if isinstance(found, Lines):
        return sum_lines(deltas, found, "deltas")
    count = len(deltas.blocks)
    return deltas.sum([found / count] * count)


RIDGE = 1e-6  # of the mean of the diagonal, which is added to it

Alpha = Annotated[float, meaning("Factor on what is not on a Gram matrix's diagonal.", ge=0, le=1)]


def survey_layers(view: JointView, *, alpha: Alpha) -> Floats:
    """Find the change for which Σ |Xᵢ·(δ - δᵢ)ᵀ|² is least, in float64."""
    assert view.grams is not None  # else the layer is not surveyed
    gpu, grams = matrix_gpu(view.kernels), list(view.grams.read())
    matrices, _ = gather(view, combines=True, gpu=gpu)
    given = matrices, grams, view.grams.axis, alpha
    found: Floats = call_with_matrices(gpu, _least_squares, *given)
    return found


def _least_squares(matrices: list[Floats], grams: list[Floats], axis: int, alpha: float) -> Floats:
    """Solve for the rows, which are independent of each other, in place of the first model's."""
    shrunk = [_shrunk(grams.pop(0), alpha) for _ in matrices]
    inverse = np.linalg.inv(reduce(np.add, shrunk))
    turned = [matrix.T if axis == 0 else matrix for matrix in matrices]
    for rows in panels(len(turned[0])):
        right = [delta[rows] @ gram for delta, gram in zip(turned, shrunk, strict=True)]
        turned[0][rows] = reduce(np.add, right) @ inverse
    return matrices[0]


def _shrunk(gram: Floats, alpha: float) -> Doubles:
    """Return a Gram matrix with a trace of 1, with less beside the diagonal and a little on it."""
    shrunk = gram.astype(np.float64)
    diagonal, total = shrunk.reshape(-1)[:: len(gram) + 1], float(shrunk.trace()) or 1.0
    own = diagonal / total + RIDGE / len(gram)
    shrunk *= alpha / total
    diagonal[:] = own
    return shrunk


def _regmean_bytes(shape: tuple[int, ...], models: int) -> int:
    """Count all models' matrices of outputs × inputs, their Gram matrices, the sum and a factor."""
    rows, columns = as_matrix(shape)
    return 4 * models * rows * columns + (8 * models + 24) * columns**2


@combine_stage(
    paper="arXiv:2212.09849",
    sees="matrix",
    survey=survey_layers,
    survey_bytes=_regmean_bytes,
    kept_bytes=lambda shape, _models: 4 * as_matrix(shape)[0] * as_matrix(shape)[1],
    default_weight=None,
    takes_grams=True,
    on_gpu=True,
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
