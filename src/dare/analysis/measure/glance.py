"""A glance at the weights before a merge: are these fine-tunes of this base, and what kind?

A few rows of a few matrices, spread over the model, are enough to tell a fine-tune from another
model altogether, a LoRA's low-rank delta from a full one, and two models from one that is there
twice. It takes milliseconds and promises nothing: what it finds becomes a warning. Only elements
that are not finite are worth a second look (`Glance.suspects`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dare.analysis.judge.limits import limit
from dare.analysis.measure.spectra import SMALLEST, spread, without_spikes
from dare.analysis.measure.tallies import Magnitudes, bin_edge, outlier_bin
from dare.errors import Concern, Notice, Strength
from dare.inputs.reading import decoded
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread, squared_values
from dare.output.report import same_model
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.tensors.names import is_embedding

Floats = NDArray[np.float32]
Sample = tuple[TensorPlan, Floats, Floats]
"""Some rows of one matrix: the base's, and one model's delta to it."""

MATRICES, ROWS, COLUMNS = 4, 128, 256
"""How many matrices are looked at, and how much of each at the most."""
READ_WHOLE = 4096
"""Rows up to this width are read whole, all at once: that is faster than a read for each."""


@dataclass(frozen=True)
class Change:
    """How a model changes one matrix, as far as was seen."""

    tensor: TensorPlan
    relative_norm: float
    """‖δ‖ / ‖base‖ without outliers; infinite if the base is zero."""
    concentration: float
    """n·Σδ⁴/(Σδ²)²: 1 if all magnitudes are equal, 3 for a Gaussian; 0 if nothing is changed."""


@dataclass(frozen=True)
class Glance:
    """What was seen."""

    notices: tuple[Notice, ...] = ()
    changes: tuple[tuple[Change, ...], ...] = ()
    """Of each model, for each matrix that was looked at."""
    suspects: tuple[TensorPlan, ...] = ()
    """Tensors in which a delta is not finite."""
    low_ranks: tuple[int | None, ...] = ()
    """Of each model about the rank of its change, if that is low, as a LoRA's is."""


def glance(plan: Plan, *, asks_rank: bool = False) -> Glance:
    """Look at the weights of a planned merge and say what is amiss.

    Ranks are sought where dropping may hurt a LoRA, or if they are asked for.
    """
    telling = [
        tensor
        for tensor in plan.merged()
        if len(tensor.shape) == 2
        and min(tensor.shape) >= SMALLEST
        and not is_embedding(tensor.name)
    ]
    with ExitStack() as stack, np.errstate(invalid="ignore", over="ignore"):
        for source in (plan.base, *plan.models):
            stack.enter_context(source)
        chosen = [telling[place] for place in spread(len(telling), MATRICES)]
        bases = [_read_rows(plan.base, tensor) for tensor in chosen]
        samples: list[list[Sample]] = [[] for _ in plan.models]
        for model, source in enumerate(plan.models):
            for tensor, base in zip(chosen, bases, strict=True):
                if model in tensor.models and tensor.name in source.tensors:
                    values = _read_rows(source, tensor)
                    delta = values if source.holds_delta(tensor.name) else values - base
                    samples[model].append((tensor, base, delta))
        rates = [_highest_rate(model, seen) for model, seen in enumerate(samples)]
        ranks = tuple(
            _low_rank(seen) if asks_rank or rate > limit("low_rank_rate") else None
            for rate, seen in zip(rates, samples, strict=True)
        )
        notices = [
            notice
            for model, seen in enumerate(samples)
            for notice in (
                *_foreign(plan, model, seen),
                *_dropped_lora(plan.model_names[model], ranks[model], rates[model]),
            )
        ]
        changes = tuple(tuple(_change(*sample) for sample in seen) for seen in samples)
    suspects = {
        tensor.name: tensor
        for seen in samples
        for tensor, _, delta in seen
        if not np.isfinite(delta).all()
    }
    return Glance((*notices, *_twins(plan, samples)), changes, tuple(suspects.values()), ranks)


def _read_rows(source: Source, tensor: TensorPlan) -> Floats:
    """Rows from the middle of a matrix, from their first column on."""
    height, width = tensor.shape
    rows, columns = min(ROWS, height), min(COLUMNS, width)
    first, carrier = (height - rows) // 2, source.tensors[tensor.name].dtype.carrier
    if width <= READ_WHOLE:
        raw = np.empty((rows, width), carrier)
        source.read(tensor.name, first * width, raw.reshape(-1))
        raw = np.ascontiguousarray(raw[:, :columns])
    else:
        raw = np.empty((rows, columns), carrier)
        for row, into in enumerate(raw, start=first):
            source.read(tensor.name, row * width, into)
    return decoded(raw)


def _without_outliers(base: Floats, delta: Floats) -> Floats:
    usual = math.sqrt(float(np.square(base, dtype=np.float64).mean()))
    bound = bin_edge(outlier_bin(Magnitudes.of(delta), delta.size, usual))
    return np.where(np.abs(delta) < bound, delta, np.float32(0)) if np.isfinite(usual) else delta


def _change(tensor: TensorPlan, base: Floats, delta: Floats) -> Change:
    delta = _without_outliers(base, delta)
    squares = np.square(delta, dtype=np.float64)
    total, of_base = float(squares.sum()), float(np.square(base, dtype=np.float64).sum())
    size = math.sqrt(total / of_base) if of_base else math.inf
    fourths = float(np.square(squares).sum())
    return Change(tensor, size, delta.size * fourths / total**2 if total else 0.0)


def _twins(plan: Plan, samples: Sequence[Sequence[Sample]]) -> Iterator[Notice]:
    """Models whose changes are the same, wherever they were looked at and there are any."""
    for (one, first), (other, second) in itertools.combinations(enumerate(samples), 2):
        is_changed = any(delta.any() for _, _, delta in first)
        if is_changed and len(first) == len(second) and all(map(_is_same, first, second)):
            yield same_model(plan, one, other)


def _is_same(sample: Sample, other: Sample) -> bool:
    return sample[0] is other[0] and np.array_equal(sample[2], other[2])


def _foreign(plan: Plan, model: int, samples: Sequence[Sample]) -> Iterator[Notice]:
    if not samples:
        return
    bases = np.concatenate([base.ravel() for _, base, _ in samples])
    deltas = np.concatenate([_without_outliers(*pair).ravel() for _, *pair in samples])
    mean = float(np.abs(deltas).mean(dtype=np.float64))
    # Not np.linalg.norm: the threads of BLAS take longer to start than this.
    norm, base_norm = (
        math.sqrt(np.square(values, dtype=np.float64).sum()) for values in (deltas, bases)
    )
    if not base_norm:  # there is nothing that the model could belong to
        return
    ratio = norm / base_norm
    if mean >= limit("foreign_delta") or ratio >= limit("foreign_ratio"):
        yield Notice(
            Concern.NOT_HOMOLOGOUS,
            f"{plan.model_names[model]}: does not look like a fine-tune of this base: |δ| is "
            f"{mean:.2g} on average, the change {ratio:.0%} of the base in size (seen in parts of "
            f"matrices). DARE works around {limit('usual_delta')} and fails around "
            f"{limit('foreign_delta')}; check that base and model belong together",
            Strength.STRONG,
        )


def _highest_rate(model: int, samples: Sequence[Sample]) -> float:
    settings = (settings for tensor, _, _ in samples for settings in tensor.settings_of(model))
    return max((table["drop_rate"] for table in settings if "drop_rate" in table), default=0.0)


def _low_rank(samples: Sequence[Sample]) -> int | None:
    """The largest rank of the changes of a model, if each of them is low and there are any."""
    changed = [clean for _, _, delta in samples if (clean := without_spikes(delta)[0]).any()]
    largest = None
    with one_blas_thread():  # the matrices are small, and more threads take ten times as long
        for delta in changed:
            rank = _rank_if_low(delta)
            if rank is None:  # one is enough: no need to look at the others
                return None
            largest = max(rank, largest or 0)
    return largest


def _dropped_lora(name: str, rank: int | None, drop_rate: float) -> Iterator[Notice]:
    usual = limit("low_rank_rate")
    if rank is not None and drop_rate > usual:
        yield Notice(
            Concern.LOW_RANK,
            f"{name}: its delta has a rank of about {rank}, as a LoRA's has, and drop_rate is "
            f"{drop_rate}; 0.7 to {usual} is the usual range for LoRAs",
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
    rank = int(np.searchsorted(held, 1 - limit("low_rank_tail"))) + 1
    return rank if rank <= len(energies) // 2 else None
