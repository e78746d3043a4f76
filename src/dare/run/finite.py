"""Inputs with elements that are not finite: a merge refuses them unless the recipe allows it.

They are found for nothing. The figures of every chunk have its largest |δ| and how many results are
NaN; only where these say so, the stored elements are looked at again. An infinity that a model and
the base share is no change, as in a stored causal mask, and is never refused. What overflows on the
way from finite inputs is warned of in the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import NotFiniteError
from dare.inputs.reading import read_chunks
from dare.output.journal import Record
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.stages.blocks import INFINITY
from dare.tensors.chunks import chunk_span

Raw = NDArray[Any]
BASE = -1
"""Stands for the base where models are counted by their places in the recipe."""


def is_suspect(models: Sequence[Sequence[int]], exceptions: tuple[int, int]) -> bool:
    """Whether the figures of a chunk show a |δ| or a result that is not finite."""
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
    if any(_count(plan, tensor, base, values).values()):
        raise NotFiniteError(_refusal(plan, tensor, taking_part))


def check_tensors(plan: Plan, tensors: Iterable[TensorPlan]) -> None:
    """Refuse tensors that have elements which are not finite, unless the recipe allows them."""
    if plan.recipe.allow_not_finite:
        return
    with _opened(plan):
        for tensor in tensors:
            for base, tuned in _chunks(plan, tensor, tensor.models):
                check_chunk(plan, tensor, base, tuned, nans=0)


def check_records(plan: Plan, records: Iterable[Record]) -> None:
    """The same for chunks that were made before: those whose figures say so are read again."""
    if plan.recipe.allow_not_finite:
        return
    tensors = {tensor.name: tensor for tensor in plan.merged()}
    merged = (record for record in records if record.tensor in tensors)
    suspects = [record for record in merged if is_suspect(record.models, record.exceptions)]
    if not suspects:
        return
    with _opened(plan):
        for record in suspects:
            tensor = tensors[record.tensor]
            span = chunk_span(record.chunk, tensor.elements)
            ((base, tuned),) = _chunks(plan, tensor, tensor.models, *span)
            check_chunk(plan, tensor, base, tuned, nans=record.exceptions[1])


@contextmanager
def _opened(plan: Plan) -> Iterator[None]:
    with ExitStack() as stack:
        for source in (plan.base, *plan.models):
            stack.enter_context(source)
        yield


def _chunks(
    plan: Plan, tensor: TensorPlan, models: Sequence[int], start: int = 0, count: int | None = None
) -> Iterator[tuple[Raw, dict[int, Raw]]]:
    """Stored elements of the base and of models, which are open."""
    sources = [plan.base, *(plan.source_of(tensor, model) for model in models)]
    for _, (base, *tuned) in read_chunks(sources, tensor.name, start, count, base_first=True):
        yield base, dict(zip(models, tuned, strict=True))


def _count(plan: Plan, tensor: TensorPlan, base: Raw, tuned: Mapping[int, Raw]) -> dict[int, int]:
    """How many elements of the base and of each model are not finite, where that is a change."""
    origin = _values(base, tensor.base.dtype.numpy_type)
    of_base = np.isnan(origin)
    counts = {}
    for model, raw in tuned.items():
        source = plan.source_of(tensor, model)
        values = _values(raw, source.tensors[tensor.name].dtype.numpy_type)
        is_bad = ~np.isfinite(values)
        if not source.holds_delta(tensor.name):
            is_bad &= np.isfinite(origin)
            of_base |= np.isinf(origin) & (values != origin)
        counts[model] = int(np.count_nonzero(is_bad))
    return {BASE: int(np.count_nonzero(of_base)), **counts}


def _values(raw: Raw, kind: np.dtype[np.generic]) -> NDArray[np.float64]:
    return raw.view(kind).astype(np.float64)


def _refusal(plan: Plan, tensor: TensorPlan, models: Sequence[int]) -> str:
    """What is not finite in all of a tensor, and what to do."""
    totals = dict.fromkeys((BASE, *models), 0)
    for base, tuned in _chunks(plan, tensor, models):
        for model, count in _count(plan, tensor, base, tuned).items():
            totals[model] += count
    parts = [
        f"{'base' if model == BASE else plan.model_names[model]}: {count:,} of {tensor.elements:,} "
        f"elements of {tensor.name} {'is' if count == 1 else 'are'} NaN or infinite"
        for model, count in totals.items()
        if count
    ]
    return (
        f"{', '.join(parts)}, which would spoil the output; `dare analyze` shows every such "
        "tensor. Use a sound copy of the model, or set allow_not_finite = true "
        "(--allow-not-finite) to merge it anyway"
    )
