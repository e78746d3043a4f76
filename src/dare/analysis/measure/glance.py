"""Warnings of a merge: a glance at the weights before it, and at the size of the deltas after it.

A few rows of a few matrices, spread over the model, are enough to tell a fine-tune from another
model altogether, a LoRA's low-rank delta from a full one, and two models from one that is there
twice. It takes milliseconds and promises nothing: what it finds becomes a warning. Only elements
that are not finite are worth a second look (`Glance.suspects`).

Large deltas matter where they are dropped at random: that replaces a change by a gamble whose noise
is in proportion to it. How much that is to a layer depends on the size of the change relative to
the base and on the drop rate, not on |δ| alone. So a model is warned of if many of its elements
exceed the recipe's `delta_threshold` and, where matrices were looked at, the predicted error is
above its bound. A threshold that the user gives warns of every element that exceeds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.analysis.measure.spectra import SMALLEST, find_low_rank, rounding_energy, spread
from dare.analysis.measure.tallies import Magnitudes, bin_edge, outlier_bin
from dare.documents.notices import LIMIT, Notice, Severity, notice
from dare.documents.words import times
from dare.inputs.reading import decoded
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread
from dare.output.report import Report, same_model
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
FEW = 0.1
"""A share of large elements that is no reason to warn. In a Gaussian delta with so many above the
threshold, |δ| is on average half of the threshold."""
MOST = 0.5
"""The share from which a warning is strong: |δ| is then above the threshold on average too."""
MARGIN = 1.5
"""How many times its bound the error may be. It is predicted from parts of a few matrices: of the
demonstration's models and others with normal, heavy-tailed and low-rank changes these gave 0.98 to
1.25 times the error that an analysis of the whole model gives."""


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
            _low_rank(source, seen) if asks_rank or rate > LIMIT.low_rank_rate else None
            for source, rate, seen in zip(plan.models, rates, samples, strict=True)
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
    if mean >= LIMIT.foreign_delta or ratio >= LIMIT.foreign_ratio:
        yield notice("far_from_base", plan.model_names[model], mean=mean, ratio=ratio)


def _highest_rate(model: int, samples: Sequence[Sample]) -> float:
    settings = (settings for tensor, _, _ in samples for settings in tensor.settings_of(model))
    return max((table["drop_rate"] for table in settings if "drop_rate" in table), default=0.0)


def _low_rank(source: Source, samples: Sequence[Sample]) -> int | None:
    """The largest rank of the changes of a model, if each of them is low and there are any."""
    largest = None
    with one_blas_thread():  # the matrices are small, and more threads take ten times as long
        for tensor, base, delta in (sample for sample in samples if sample[2].any()):
            stored, given = source.tensors[tensor.name].dtype.name, source.holds_delta(tensor.name)
            finite = bool(np.isfinite(delta).all() and np.isfinite(base).all())
            rounding = rounding_energy(base, stored) if finite and not given else 0.0
            rank = find_low_rank(delta, rounding) if finite else None
            if rank is None:  # one is enough: no need to look at the others
                return None
            largest = max(rank, largest or 0)
    return largest


def _dropped_lora(name: str, rank: int | None, drop_rate: float) -> Iterator[Notice]:
    if rank is not None and drop_rate > LIMIT.low_rank_rate:
        yield notice("low_rank", name, rank=rank, rate=drop_rate)


# ---------------------------------------------------------------- after a merge


class Part(NamedTuple):
    """One tensor of a model, as it came out of a merge."""

    tensor: TensorPlan
    over_threshold: int
    drop_rate: float
    """The share that random stages have dropped of it."""
    asked_rate: float
    """The share that they were asked to drop."""


def with_size_warnings(plan: Plan, report: Report, seen: Glance) -> Report:
    """The report with a notice for each model whose deltas are too large for random dropping.

    `seen` is what a glance showed of the models' matrices.
    """
    notices = [
        notice
        for model, changes in enumerate(seen.changes)
        for notice in _size_warnings(plan, report, model, changes)
    ]
    return replace(report, warnings=(*report.warnings, *notices))


def _size_warnings(
    plan: Plan, report: Report, model: int, changes: Sequence[Change]
) -> Iterator[Notice]:
    parts = [
        Part(tensor, figures.over_threshold[place], *rates)
        for tensor, figures in zip(plan.merged(), report.tensors, strict=True)
        if model in tensor.models
        for place in [tensor.models.index(model)]
        for rates in [_random_rates(plan, tensor, model, figures.survivors[place])]
    ]
    gambled = {part.tensor.name: part for part in parts if part.drop_rate > 0}
    is_given = plan.recipe.has_given_threshold
    counted = parts if is_given else list(gambled.values())
    elements = sum(part.tensor.elements for part in counted)
    over = sum(part.over_threshold for part in counted)
    if not over or (not is_given and over < FEW * elements):
        return
    seen = [
        (change, gambled[change.tensor.name].drop_rate)
        for change in changes
        if change.tensor.name in gambled
        and change.concentration > 0
        and math.isfinite(change.relative_norm)
    ]
    is_small = bool(seen) and _predicted_error(seen) <= MARGIN * LIMIT.output_error
    is_borne = not gambled or is_small
    if is_borne and not is_given:
        return
    share, figures = over / elements, report.models[model]
    is_too_large = bool(seen) and not is_borne
    reason, remedy = _remedy(plan, model, list(gambled.values()), is_too_large=is_too_large)
    yield notice(
        "large_deltas",
        plan.model_names[model],
        severity=Severity.SEVERE if share >= MOST and not is_borne else Severity.WARNING,
        threshold=plan.recipe.delta_threshold,
        over=over,
        elements=elements,
        share=share,
        most=_most_of(counted) if is_given else "",
        peak=figures.largest_delta,
        where=figures.largest_delta_in,
        reason=reason,
        remedy=remedy,
    )


def _most_of(parts: Sequence[Part]) -> str:
    """Say where the elements above the threshold are."""
    found = [part for part in parts if part.over_threshold]
    most = max(found, key=lambda part: part.over_threshold)
    place = f"{most.over_threshold:,}, in {most.tensor.name}"
    return f" of {times(len(found), 'tensor')}, most of them, {place}"


def _remedy(
    plan: Plan, model: int, gambled: Sequence[Part], *, is_too_large: bool
) -> tuple[str, str]:
    """Say why that matters and what to do, where changes are dropped at random."""
    if not gambled:
        return "", ""
    reason = "DARE works best where changes are small"
    if is_too_large:
        elements = sum(part.tensor.elements for part in gambled)
        asked = sum(part.asked_rate * part.tensor.elements for part in gambled) / elements
        reason = (
            f"Relative to the base these changes are too large to drop {round(100 * asked, 2):g}% "
            "of them at random: the predicted error of its layers' outputs is above the bound of "
            f"{LIMIT.output_error:.0%}"
        )
    draws = gambled[0].tensor.draws_of(plan.stages, model)
    names = [s.name for s, draw in zip(plan.stages, draws, strict=False) if draw is not None]
    leave = f", or leave {' and '.join(names)} out of the method" if names else ""
    return f". {reason}", f"Lower drop_rate{leave}"


def _random_rates(
    plan: Plan, tensor: TensorPlan, model: int, survivors: Sequence[int]
) -> tuple[float, float]:
    """The share of a model's tensor that was dropped at random, and the share that was asked for.

    The first by what survived each stage; so is the second where a stage has no `drop_rate`.
    """
    drop = tensor.drop_of(model)
    kept = asked = 1.0 if drop is None else 1.0 - drop.rate
    counts = (tensor.elements, *survivors)
    settings = tensor.settings_of(model)
    for position, draw in enumerate(tensor.draws_of(plan.stages, model)):
        if draw is not None and counts[position]:
            left = counts[position + 1] / counts[position]
            kept *= left
            asked *= 1.0 - settings[position].get("drop_rate", 1.0 - left)
    return 1.0 - kept, 1.0 - asked


def _predicted_error(changes: Sequence[tuple[Change, float]]) -> float:
    """What the error of a model's outputs is predicted to be, at the rates of its tensors."""
    from dare.analysis.judge.prediction import Exposure, combined_error, row_width

    exposures = []
    for change, rate in changes:
        elements, shape = change.tensor.elements, change.tensor.shape
        carriers = row_width(elements, shape) / change.concentration
        exposures.append((Exposure(elements, change.relative_norm, carriers), rate))
    return combined_error(exposures)
