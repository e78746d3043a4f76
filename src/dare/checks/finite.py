"""Inputs with elements that are not finite: a merge refuses them unless the recipe allows it.

Finding them costs nothing: the figures of every chunk hold its largest |δ| and the number of NaN
results, and only where these say so are the stored elements read again. An infinity that a model
and the base share, as in a stored causal mask, is no change and never refused. Overflow of finite
inputs is a notice in the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dare.errors import NotFiniteError
from dare.inputs.reading import hold_open, read_chunks
from dare.inputs.sources import Raw
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.stages.blocks import INFINITY
from dare.tensors.chunks import chunk_span

BASE = -1  # the base's number where models are counted by their places in the recipe


def is_suspect(models: Sequence[Sequence[int]], exceptions: tuple[int, int]) -> bool:
    """Tell if the figures of a chunk show a |δ| or a result that is not finite."""
    return exceptions[1] > 0 or any(figures[0] >= INFINITY for figures in models)


def check_chunk(
    plan: Plan, tensor: TensorPlan, base: Raw, tuned: Mapping[int, Raw], *, nans: int
) -> None:
    """Refuse a tensor if these stored elements of it are not finite; `nans` results are NaN.

    A model without weight is left alone as long as nothing of it reaches the result. The inputs
    must be open.
    """
    weights = dict(zip(tensor.models, tensor.weights, strict=True))
    taking_part = [model for model in tuned if weights[model] or nans]
    values = {model: tuned[model] for model in taking_part}
    if any(_count_not_finite(plan, tensor, base, values).values()):
        raise NotFiniteError(_refusal(plan, tensor, taking_part))


def check_chunks(plan: Plan, chunks: Sequence[tuple[str, int, int]]) -> None:
    """Refuse chunks with elements that are not finite, unless the recipe allows them.

    A chunk is given by its tensor, its number, and how many of its results are NaN.
    """
    if plan.recipe.allow_not_finite or not chunks:
        return
    tensors = {tensor.name: tensor for tensor in plan.merged()}
    with hold_open((plan.base, *plan.models)):
        for name, number, nans in chunks:
            span = chunk_span(number, tensors[name].elements)
            ((base, tuned),) = _stored(plan, tensors[name], tensors[name].models, *span)
            check_chunk(plan, tensors[name], base, tuned, nans=nans)


def _stored(
    plan: Plan, tensor: TensorPlan, models: Sequence[int], start: int = 0, count: int | None = None
) -> Iterator[tuple[Raw, dict[int, Raw]]]:
    sources = [plan.base, *(plan.source_of(tensor, model) for model in models)]
    for _, (base, *tuned) in read_chunks(sources, tensor.name, start, count, base_first=True):
        yield base, dict(zip(models, tuned, strict=True))


def _count_not_finite(
    plan: Plan, tensor: TensorPlan, base: Raw, tuned: Mapping[int, Raw]
) -> dict[int, int]:
    """Count elements of the base and of each model that are not finite, where it is a change."""
    origin = base.view(tensor.base.dtype.numpy_type).astype(np.float64)
    of_base = np.isnan(origin)
    counts = {}
    for model, raw in tuned.items():
        source = plan.source_of(tensor, model)
        values = raw.view(source.tensors[tensor.name].dtype.numpy_type).astype(np.float64)
        is_bad = ~np.isfinite(values)
        if not source.holds_delta(tensor.name):
            is_bad &= np.isfinite(origin)
            of_base |= np.isinf(origin) & (values != origin)
        counts[model] = int(np.count_nonzero(is_bad))
    return {BASE: int(np.count_nonzero(of_base)), **counts}


def _refusal(plan: Plan, tensor: TensorPlan, models: Sequence[int]) -> str:
    """Return how much of a tensor is not finite in which inputs, and what to do."""
    totals = dict.fromkeys((BASE, *models), 0)
    for base, tuned in _stored(plan, tensor, models):
        for model, count in _count_not_finite(plan, tensor, base, tuned).items():
            totals[model] += count
    found = [
        f"{'base' if model == BASE else plan.model_names[model]}: {count:,} of {tensor.elements:,} "
        f"elements of {tensor.name} {'is' if count == 1 else 'are'} NaN or infinite"
        for model, count in totals.items()
        if count
    ]
    return (
        f"{', '.join(found)}, which would spoil the output; `dare analyze` shows every such "
        "tensor. Use a sound copy of the model, or set allow_not_finite = true "
        "(--allow-not-finite) to merge it anyway"
    )
