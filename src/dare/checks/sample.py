"""A sample of the weights before a merge.

A few rows of a few matrices, spread over the model, are enough to tell a fine-tune from another
model, a LoRA's low-rank delta from a full one, and two models from one that is there twice. It
takes milliseconds and proves nothing: only tensors that are not finite are read again, whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dare.checks.large_deltas import Exposure
from dare.checks.same_model import find_copies
from dare.checks.structure import (
    SMALLEST,
    Magnitudes,
    bin_edge,
    find_low_rank,
    outlier_bin,
    rounding_energy,
    spread,
)
from dare.documents.notices import LIMIT, Notice, notice
from dare.inputs.reading import Floats, decoded, hold_open
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.tensors.digest import bytes_digest
from dare.tensors.names import is_embedding

MATRICES, ROWS, COLUMNS = 4, 128, 256  # the most that is sampled
WIDEST_READ_WHOLE = 4096  # rows up to this width are faster read whole, all at once


@dataclass(frozen=True)
class SampledMatrix:
    """Some rows of a matrix: the base's, and a model's delta to it."""

    tensor: TensorPlan
    base: Floats
    delta: Floats

    @cached_property
    def inliers(self) -> Floats:
        """The delta with zeros in place of its outliers."""
        usual = math.sqrt(_sum_of_squares(self.base) / self.base.size)
        if not np.isfinite(usual):
            return self.delta
        bound = bin_edge(outlier_bin(Magnitudes.of(self.delta), self.delta.size, usual))
        return np.where(np.abs(self.delta) < bound, self.delta, np.float32(0))

    @property
    def exposure(self) -> Exposure:
        """The figures that decide how much dropping the matrix bears."""
        squares = np.square(self.inliers, dtype=np.float64)
        total, of_base = float(squares.sum()), _sum_of_squares(self.base)
        ratio = math.sqrt(total / of_base) if of_base else math.inf
        concentration = self.delta.size * _sum_of_squares(squares) / total**2 if total else 0.0
        return Exposure.of(self.tensor.elements, self.tensor.shape, ratio, concentration)


@dataclass(frozen=True)
class SampledModels:
    """The findings of a sample."""

    notices: tuple[Notice, ...] = ()
    exposures: tuple[Mapping[str, Exposure], ...] = ()  # by model, then by matrix
    not_finite: tuple[TensorPlan, ...] = ()  # tensors in which a delta is not finite
    low_ranks: tuple[int | None, ...] = ()  # by model: about the rank of its change, if it is low


def sample_models(plan: Plan, *, finds_rank: bool = False) -> SampledModels:
    """Sample the weights of a planned merge.

    Ranks are sought where dropping may hurt a LoRA, or if `finds_rank` asks for them.
    """
    with hold_open((plan.base, *plan.models)), np.errstate(invalid="ignore", over="ignore"):
        samples = _read_samples(plan)
        rates = [_highest_rate(model, sample) for model, sample in enumerate(samples)]
        ranks = tuple(
            _low_rank(source, sample) if finds_rank or rate > LIMIT.low_rank_rate else None
            for source, rate, sample in zip(plan.models, rates, samples, strict=True)
        )
        notices: list[Notice] = []
        for name, rank, rate, sample in zip(plan.model_names, ranks, rates, samples, strict=True):
            notices += _far_from_base(name, sample)
            if rank is not None and rate > LIMIT.low_rank_rate:
                notices.append(notice("low_rank", name, rank=rank, rate=rate))
        contents = [  # None where nothing that was sampled is changed
            tuple((each.tensor.name, bytes_digest((each.delta + 0).data)) for each in sample)
            if any(each.delta.any() for each in sample)
            else None
            for sample in samples
        ]
        notices += find_copies(plan, contents)
        exposures = tuple({each.tensor.name: each.exposure for each in s} for s in samples)
    not_finite = {
        each.tensor.name: each.tensor
        for sample in samples
        for each in sample
        if not np.isfinite(each.delta).all()
    }
    return SampledModels(tuple(notices), exposures, tuple(not_finite.values()), ranks)


def is_far_from_base(mean: float, ratio: float) -> bool:
    """Tell a model that is no fine-tune of the base by its mean |δ| and ‖δ‖/‖base‖."""
    return bool(mean >= LIMIT.foreign_delta or ratio >= LIMIT.foreign_ratio)


def _read_samples(plan: Plan) -> list[list[SampledMatrix]]:
    """Read for each model its part of some matrices that are spread over the model."""
    matrices = [
        tensor
        for tensor in plan.merged()
        if len(tensor.shape) == 2
        and min(tensor.shape) >= SMALLEST
        and not is_embedding(tensor.name)
    ]
    chosen = [matrices[place] for place in spread(len(matrices), MATRICES)]
    bases = [_read_rows(plan.base, tensor) for tensor in chosen]
    samples: list[list[SampledMatrix]] = []
    for model, source in enumerate(plan.models):
        samples.append([])
        for tensor, base in zip(chosen, bases, strict=True):
            if model in tensor.models and tensor.name in source.tensors:
                values = _read_rows(source, tensor)
                delta = values if source.holds_delta(tensor.name) else values - base
                samples[-1].append(SampledMatrix(tensor, base, delta))
    return samples


def _read_rows(source: Source, tensor: TensorPlan) -> Floats:
    """Read rows from the middle of a matrix, from their first column on."""
    height, width = tensor.shape
    rows, columns = min(ROWS, height), min(COLUMNS, width)
    first, carrier = (height - rows) // 2, source.tensors[tensor.name].dtype.carrier
    if width <= WIDEST_READ_WHOLE:
        raw = np.empty((rows, width), carrier)
        source.read(tensor.name, first * width, raw.reshape(-1))
        raw = np.ascontiguousarray(raw[:, :columns])
    else:
        raw = np.empty((rows, columns), carrier)
        for row, into in enumerate(raw, start=first):
            source.read(tensor.name, row * width, into)
    return decoded(raw)


def _sum_of_squares(values: NDArray[np.floating]) -> float:
    # Not np.linalg.norm: the threads of BLAS take longer to start than this.
    return float(np.square(values, dtype=np.float64).sum())


def _far_from_base(name: str, sample: Sequence[SampledMatrix]) -> Iterator[Notice]:
    size = sum(each.delta.size for each in sample)
    base_norm = math.sqrt(sum(_sum_of_squares(each.base) for each in sample))
    if not base_norm:  # there is nothing that the model could belong to
        return
    deltas = [each.inliers for each in sample]
    mean = sum(float(np.abs(delta).sum(dtype=np.float64)) for delta in deltas) / size
    ratio = math.sqrt(sum(map(_sum_of_squares, deltas))) / base_norm
    if is_far_from_base(mean, ratio):
        yield notice("far_from_base", name, mean=mean, ratio=ratio)


def _highest_rate(model: int, sample: Sequence[SampledMatrix]) -> float:
    settings = (settings for each in sample for settings in each.tensor.settings_of(model))
    return max((table["drop_rate"] for table in settings if "drop_rate" in table), default=0.0)


def _low_rank(source: Source, sample: Sequence[SampledMatrix]) -> int | None:
    """Return the largest rank of the changes of a model, if each of them is low."""
    largest = None
    with one_blas_thread():  # the matrices are small, and more threads take ten times as long
        for each in (each for each in sample if each.delta.any()):
            if not (np.isfinite(each.delta).all() and np.isfinite(each.base).all()):
                return None
            info = source.tensors[each.tensor.name]
            is_exact = source.holds_delta(info.name)
            rounding = 0.0 if is_exact else rounding_energy(each.base, info.dtype.name)
            rank = find_low_rank(each.delta, rounding)
            if rank is None:  # one is enough: no need to try the others
                return None
            largest = max(rank, largest or 0)
    return largest
