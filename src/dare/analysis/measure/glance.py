"""A glance at the weights before a merge: are these fine-tunes of this base, and what kind?

A few rows of a few matrices, spread over the model, are enough to tell a fine-tune from another
model altogether, and a LoRA's low-rank delta from a full one. It takes milliseconds and promises
nothing: what it finds becomes a warning, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dare.analysis.judge.limits import limit
from dare.errors import Concern, Notice
from dare.inputs.reading import decoded
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread, squared_values
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.tensors.names import is_embedding

Floats = NDArray[np.float32]

MATRICES, ROWS, COLUMNS = 4, 128, 256
"""How many matrices are looked at, and how much of each at the most."""
READ_WHOLE = 4096
"""Rows up to this width are read whole, all at once: that is faster than a read for each."""
SMALLEST = 32
"""Matrices with fewer rows or columns say nothing about rank."""

FOREIGN_DELTA = limit("foreign_delta")
FOREIGN_RATIO = limit("foreign_ratio")
LOW_RANK_TAIL = limit("low_rank_tail")
LOW_RANK_RATE = limit("low_rank_rate")


@dataclass(frozen=True)
class Sample:
    """Some rows of one matrix: the base's, and one model's delta to it."""

    tensor: TensorPlan
    base: Floats
    delta: Floats


def glance(plan: Plan) -> list[Notice]:
    """Look at the weights of a planned merge and say what is amiss."""
    chosen = _spread([t for t in plan.merged() if _is_telling(t)])
    notices = []
    with ExitStack() as stack, np.errstate(invalid="ignore", over="ignore"):
        for source in (plan.base, *plan.models):
            stack.enter_context(source)
        bases = [_read_rows(plan.base, tensor) for tensor in chosen]
        for model, name in enumerate(plan.model_names):
            samples = [
                Sample(tensor, base, _read_delta(plan.models[model], tensor, base))
                for tensor, base in zip(chosen, bases, strict=True)
                if model in tensor.models and tensor.name in plan.models[model].tensors
            ]
            notices += [*_foreign(name, samples), *_low_rank(plan, model, samples)]
    return notices


def _is_telling(tensor: TensorPlan) -> bool:
    shape = tensor.shape
    return len(shape) == 2 and min(shape) >= SMALLEST and not is_embedding(tensor.name)


def _spread(tensors: Sequence[TensorPlan]) -> list[TensorPlan]:
    """A few of the tensors, evenly spread."""
    count = min(MATRICES, len(tensors))
    return [tensors[(2 * place + 1) * len(tensors) // (2 * count)] for place in range(count)]


def _read_delta(source: Source, tensor: TensorPlan, base: Floats) -> Floats:
    values = _read_rows(source, tensor)
    return values if source.holds_delta(tensor.name) else values - base


def _read_rows(source: Source, tensor: TensorPlan) -> Floats:
    """Rows from the middle of a matrix, from their first column on."""
    height, width = tensor.shape
    rows, columns = min(ROWS, height), min(COLUMNS, width)
    kind = source.tensors[tensor.name].dtype
    first = (height - rows) // 2
    if width <= READ_WHOLE:
        raw = np.empty((rows, width), kind.carrier)
        source.read(tensor.name, first * width, raw.reshape(-1))
        raw = np.ascontiguousarray(raw[:, :columns])
    else:
        raw = np.empty((rows, columns), kind.carrier)
        for row, into in enumerate(raw, start=first):
            source.read(tensor.name, row * width, into)
    return decoded(raw)


def _foreign(name: str, samples: Sequence[Sample]) -> Iterator[Notice]:
    if not samples:
        return
    deltas = np.concatenate([sample.delta.ravel() for sample in samples])
    bases = np.concatenate([sample.base.ravel() for sample in samples])
    mean = float(np.abs(deltas).mean(dtype=np.float64))
    length = _norm(bases)
    ratio = _norm(deltas) / length if length else 0.0
    if mean >= FOREIGN_DELTA or ratio >= FOREIGN_RATIO:
        yield Notice(
            Concern.NOT_HOMOLOGOUS,
            f"{name}: does not look like a fine-tune of this base: |δ| is {mean:.2g} on average, "
            f"the change {ratio:.0%} of the base in size (seen in parts of matrices). "
            f"DARE works around {limit('usual_delta')} and fails around {FOREIGN_DELTA}; check "
            "that base and model belong together",
        )


def _norm(values: Floats) -> float:
    """Without BLAS, whose threads take longer to start than this."""
    return math.sqrt(np.square(values, dtype=np.float64).sum())


def _low_rank(plan: Plan, model: int, samples: Sequence[Sample]) -> Iterator[Notice]:
    rates = [
        settings["drop_rate"]
        for sample in samples
        for settings in sample.tensor.settings_of(model)
        if "drop_rate" in settings
    ]
    changed = [sample.delta for sample in samples if sample.delta.any()]
    if not changed or max(rates, default=0) <= LOW_RANK_RATE:
        return
    ranks = []
    with one_blas_thread():  # the matrices are small, and more threads take ten times as long
        for delta in changed:
            rank = _rank_if_low(delta)
            if rank is None:  # one is enough: no need to look at the others
                return
            ranks.append(rank)
    yield Notice(
        Concern.LOW_RANK,
        f"{plan.model_names[model]}: its delta has a rank of about {max(ranks)}, as a LoRA's has, "
        f"and drop_rate is {max(rates)}; 0.7 to {LOW_RANK_RATE} is the usual range for LoRAs",
    )


def _rank_if_low(delta: Floats) -> int | None:
    """How many directions hold all but a hundredth of the delta, if few do.

    >>> generator = np.random.default_rng(0)
    >>> full = generator.standard_normal((64, 64), np.float32)
    >>> _rank_if_low(full), _rank_if_low(full[:, :8] @ full[:8])
    (None, 8)
    """
    if not np.isfinite(delta).all():
        return None
    energies = squared_values(delta)
    held = np.cumsum(energies) / energies.sum()
    rank = int(np.searchsorted(held, 1 - LOW_RANK_TAIL)) + 1
    return rank if rank <= len(energies) // 2 else None
