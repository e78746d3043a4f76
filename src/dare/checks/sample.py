"""A sample of the weights, which shows before a merge what would surprise its user.

Some rows, spread over the model, are enough to tell a fine-tune from another model, a LoRA's
low-rank delta from a full one, and two models from one that is there twice. It takes milliseconds
and proves nothing: only tensors that are not finite are read again, whole.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dare.checks.dropping import Exposure
from dare.checks.inputs import find_copies
from dare.checks.magnitudes import Magnitudes, bin_edge, outlier_bin, sum_of_squares
from dare.checks.rank import MIN_SIDE, UNROUNDED, find_low_rank, find_rounding
from dare.documents.notices import LIMIT, Notice, notice
from dare.inputs.sources import Floats, Source, decoded, hold_open
from dare.kernels.linalg import one_blas_thread
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.tensors.chunks import bytes_digest
from dare.tensors.names import is_embedding

MATRICES, ROWS, COLUMNS = 4, 128, 256  # the most that is sampled
RELATED_ROWS = 64  # of these, the rows by which models are compared with each other
WIDEST_READ_WHOLE = 4096  # rows up to this width are faster read whole, all at once


def evenly_spread(length: int, most: int) -> list[int]:
    """Return at most so many places in a length, each in the middle of its part.

    >>> evenly_spread(100, 4), evenly_spread(3, 4)
    ([12, 37, 62, 87], [0, 1, 2])
    """
    count = min(length, most)
    return [(2 * part + 1) * length // (2 * count) for part in range(count)]


@dataclass(frozen=True)
class SampledMatrix:
    """Some rows of a matrix: the base's, and a model's delta to it."""

    tensor: TensorPlan
    base: Floats
    delta: Floats

    @cached_property
    def inliers(self) -> Floats:
        """The delta with zeros in place of its outliers."""
        usual = math.sqrt(sum_of_squares(self.base) / self.base.size)
        if not np.isfinite(usual):
            return self.delta
        bound = bin_edge(outlier_bin(Magnitudes.of(self.delta), self.delta.size, usual))
        return np.where(np.abs(self.delta) < bound, self.delta, np.float32(0))

    @property
    def exposure(self) -> Exposure:
        """The figures that decide how much dropping the matrix tolerates."""
        squares = np.square(self.inliers, dtype=np.float64)
        total, of_base = float(squares.sum()), sum_of_squares(self.base)
        ratio = math.sqrt(total / of_base) if of_base else math.inf
        concentration = self.delta.size * sum_of_squares(squares) / total**2 if total else 0.0
        exposure = Exposure.of(self.tensor.elements, self.tensor.shape, ratio, concentration)
        return replace(exposure, base_square=of_base / self.base.size)


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
    notices: list[Notice] = []
    exposures: list[Mapping[str, Exposure]] = []
    not_finite: dict[str, TensorPlan] = {}
    ranks: list[int | None] = []
    contents: list[Any] = []  # None where nothing that was sampled is changed
    deltas: dict[str, Mapping[str, Floats]] = {}  # by model, then by matrix: some rows
    with hold_open((plan.base, *plan.models)), np.errstate(invalid="ignore", over="ignore"):
        for model, (name, sample) in enumerate(_read_samples(plan)):
            settings = (table for each in sample for table in each.tensor.settings_of(model))
            rate = max((table.get("drop_rate", 0.0) for table in settings), default=0.0)
            may_hurt = rate > LIMIT.low_rank_rate
            rank = _low_rank(plan.models[model], sample) if finds_rank or may_hurt else None
            notices += _unrelated(name, sample)
            if rank is not None and may_hurt:
                notices.append(notice("low_rank", name, rank=rank, rate=rate))
            ranks.append(rank)
            digests = {each.tensor.name: bytes_digest((each.delta + 0).data) for each in sample}
            contents.append(digests if any(each.delta.any() for each in sample) else None)
            exposures.append({each.tensor.name: each.exposure for each in sample})
            deltas[name] = {each.tensor.name: each.delta[:RELATED_ROWS].copy() for each in sample}
            broken = (each.tensor for each in sample if not np.isfinite(each.delta).all())
            not_finite |= {tensor.name: tensor for tensor in broken}
        notices += find_copies(plan, contents)
        notices += _swapped_base(plan, deltas)
    return SampledModels(tuple(notices), tuple(exposures), tuple(not_finite.values()), tuple(ranks))


def is_unrelated(ratio: float, base_share: float) -> bool:
    """Tell a model that was trained apart from the base by ‖δ‖/‖base‖ and 1 + δ·base/‖base‖².

    A change that is independent of the base leaves all of the base in a model, however large it
    is: the share is about 1. Independent weights have about 0 of it.
    """
    return ratio >= LIMIT.unrelated_ratio and base_share < LIMIT.unrelated_share


def _read_samples(plan: Plan) -> Iterator[tuple[str, list[SampledMatrix]]]:
    """Yield each model's name and its part of some matrices that are spread over the model."""
    matrices = [
        tensor
        for tensor in plan.merged()
        if len(tensor.shape) == 2
        and min(tensor.shape) >= MIN_SIDE
        and not is_embedding(tensor.name)
    ]
    chosen = [matrices[place] for place in evenly_spread(len(matrices), MATRICES)]
    bases = [_read_rows(plan.base, tensor, plan.backend) for tensor in chosen]
    for model, source in enumerate(plan.models):
        sample = []
        for tensor, base in zip(chosen, bases, strict=True):
            if model in tensor.models and tensor.name in source.tensors:
                values = _read_rows(source, tensor, plan.backend)
                delta = values if source.delta_of(tensor.name).is_change else values - base
                sample.append(SampledMatrix(tensor, base, delta))
        yield plan.model_names[model], sample


def _read_rows(source: Source, tensor: TensorPlan, backend: str) -> Floats:
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
    return decoded(raw.reshape(-1), backend).reshape(rows, columns)


def _unrelated(name: str, sample: Sequence[SampledMatrix]) -> Iterator[Notice]:
    base_norm = math.sqrt(sum(sum_of_squares(each.base) for each in sample))
    if not base_norm:  # there is nothing that the model could belong to
        return
    ratio = math.sqrt(sum(sum_of_squares(each.inliers) for each in sample)) / base_norm
    products = (float((each.base * each.delta).sum(dtype=np.float64)) for each in sample)
    if is_unrelated(ratio, held := 1 + sum(products) / base_norm**2):
        yield notice("unrelated", name, ratio=ratio, base_share=held, left_out="")


def _swapped_base(plan: Plan, deltas: Mapping[str, Mapping[str, Floats]]) -> Iterator[Notice]:
    """Warn if a model may be the real base, unless the recipe interpolates whole models."""
    relations, norms = {}, dict[str, float]()
    for name, sample in deltas.items():
        norms[name] = math.sqrt(sum(map(sum_of_squares, sample.values())))
    for (first, one), (second, other) in itertools.combinations(deltas.items(), 2):
        products = (one[n] * other[n] for n in one.keys() & other.keys())
        product = sum(float(each.sum(dtype=np.float64)) for each in products)
        cosine = product / (norms[first] * norms[second] or math.inf)
        if abs(cosine) < LIMIT.same_cosine:  # others are copies or multiples, or not finite
            relations[first, second] = cosine, product / (norms[first] ** 2 or math.inf)
    entries = zip(plan.model_names, plan.recipe.models, strict=True)
    files = {name: str(entry.file) for name, entry in entries}
    found = find_real_base(str(plan.recipe.base), files, relations)
    if found and not plan.recipe.interpolates:
        yield notice("contained", *found["concerns"], **found)


def find_real_base(
    base: str, files: Mapping[str, str], relations: Mapping[tuple[str, str], tuple[float, float]]
) -> dict[str, Any]:
    """Return the sign that models were trained from one of them, not from the base; empty if none.

    Let A be the given base, B a model, and C one that was trained from B. Then C - A is B - A and
    what C has learnt, which does not know of B - A: its projection onto B - A is 1. `files` are
    those of the models, and `relations` for two models the cosine of their deltas and the multiple
    of the first one's delta that is nearest to the second one's.
    """
    for name, file in files.items():
        shares: dict[str, tuple[float, float]] = {}
        for ends, (cosine, ratio) in relations.items():
            if name in ends and set(ends) <= files.keys():
                share = ratio if name == ends[0] else cosine * cosine / (ratio or math.inf)
                shares[ends[name == ends[0]]] = share, cosine
        if shares and all(_is_whole(*share) for share in shares.values()):
            other, is_one = next(iter(shares)), len(shares) == 1
            rest = (own for model, own in files.items() if model != name)
            return {
                "concerns": (name,),
                "who": f"{other} contains" if is_one else "All other models contain",
                "they": f"{other} was" if is_one else "the others were",
                "command": shlex.join(["dare", file, base, *rest]),
                "ratios": {f"share.{other}": share for other, (share, _) in shares.items()},
            }
    return {}


def _is_whole(share: float, cosine: float) -> bool:
    """Tell if a model contains so much of another's delta that it was made from it.

    Two that were made from a third share less than the whole of either: no more than the cosine.
    """
    off = min(LIMIT.whole_step, (1 - cosine) / 4)
    return abs(share - 1) <= off and cosine > LIMIT.apart_cosine


def _low_rank(source: Source, sample: Sequence[SampledMatrix]) -> int | None:
    """Return the largest rank of the changes of a model, if each of them is low."""
    largest = None
    with one_blas_thread():  # the matrices are small, and more threads take ten times as long
        for each in (each for each in sample if each.delta.any()):
            info, base = source.tensors[each.tensor.name], each.tensor.base.dtype.name
            is_exact = source.delta_of(info.name).is_change
            rounding = UNROUNDED if is_exact else find_rounding(each.base, base, info.dtype.name)
            is_finite = np.isfinite(each.delta).all() and np.isfinite(each.base).all()
            rank = find_low_rank(each.delta, rounding) if is_finite else None
            if rank is None:  # one is enough: no need to try the others
                return None
            largest = max(rank, largest or 0)
    return largest
