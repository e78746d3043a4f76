"""A sample of the weights, which shows surprising properties before a merge.

A few rows, spread over the model, are enough to distinguish a fine-tune from an unrelated model, a
LoRA's low-rank delta from a full one, and two models from one that is given twice. It takes
milliseconds and proves nothing: only tensors that are not finite are read again, whole.

A low rank, as of a LoRA, must be recognised among the noise of rounding. Noise of standard
deviation s in a matrix of m rows and n columns has singular values up to about s·(√m + √n),
distributed by the law of Marchenko and Pastur. The median of the singular values shows how strong
the noise is: a few strong directions hardly change it. They are removed and the noise is estimated
again, until their number stays the same. The edge includes two standard units of the fluctuation of
the largest value (Tracy-Widom), which one noise matrix in a hundred exceeds. A single large element
is a direction by itself, and so is a large row or column: they are left out (`without_spikes`,
`without_lines`).
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from dare.checks.dropping import Exposure, Magnitudes, bin_edge, outlier_bin, sum_of_squares
from dare.checks.inputs import find_copies
from dare.documents.notices import LIMIT, Notice, notice
from dare.inputs.sources import Floats, Source, decoded, hold_open
from dare.kernels import call_with_matrices
from dare.kernels.linalg import NOISE, Doubles, one_blas_thread, squared_values
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.names import is_embedding

MATRICES, ROWS, COLUMNS = 4, 128, 256  # the most that is sampled
RELATED_ROWS = 64  # of these, the rows by which models are compared with each other
WIDEST_READ_WHOLE = 4096  # rows up to this width are faster read whole, all at once


def evenly_spread(length: int, most: int) -> list[int]:
    """Return at most `most` places in a length, each in the middle of its part.

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
        base_size = math.sqrt(sum_of_squares(self.base) / self.base.size)
        if not np.isfinite(base_size):
            return self.delta
        bound = bin_edge(outlier_bin(Magnitudes.of(self.delta), self.delta.size, base_size))
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
    bases = [_read_rows(plan.base, tensor, plan.device) for tensor in chosen]
    for model, source in enumerate(plan.models):
        sample = []
        for tensor, base in zip(chosen, bases, strict=True):
            if model in tensor.models and tensor.name in source.tensors:
                values = _read_rows(source, tensor, plan.device)
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
                "command": shlex.join(["dare", file, base, *rest, "-o", "OUTPUT"]),
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


# ---------------------------------------------------------------- is it a LoRA


MIN_SIDE = 32  # matrices with fewer rows or columns say nothing about rank
LOW_RANK_SHARE = 0.5  # the least share of the energy that the directions of a low rank usually hold
CLIFF = 1.5  # the last direction of a low rank is at least this times as strong as the next …
FEW_PART = 16  # … unless fewer than one in this many directions stand out
SPIKE = 5.0  # an element above this times the prediction by its row and column is left out
NEGLIGIBLE_TAIL = 0.01  # share of the energy outside a low rank that rounding need not explain
LINE = 16.0  # a row or column with more than this times the median energy is left out

# The energy that came into a delta when it was stored, and the share of all the energy that a low
# rank holds beside it, at least.
Rounding = tuple[float, float]
UNROUNDED: Rounding = (0.0, LOW_RANK_SHARE)


def find_rounding(weights: Floats, base: str, stored: str) -> Rounding:
    """Return what rounding these weights to a storage type can put into a delta: Σ(ulp/2)².

    Where the base's type is finer, rounding is uniform noise, with a third of that energy. The sum
    is off by 1.4% in a matrix of 64 × 64 and by less in others, so 10% are added. It is known so
    well that a low rank need not hold most of the energy.

    >>> find_rounding(np.array([1.5], np.float32), "BF16", "BF16") == ((2.0**-7 / 2) ** 2, 0.5)
    True
    """
    bits, base_bits = (STORAGE_TYPES[name].mantissa_bits for name in (stored, base))
    exponents = (weights.reshape(-1).view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)
    counts = np.bincount(exponents, minlength=256)[1:255]  # neither tiny nor infinite
    energy = float(counts @ np.square(np.ldexp(1.0, np.arange(-126, 128) - 1 - bits)))
    return (1.1 / 3 * energy, 0.0) if base_bits > bits else (energy, LOW_RANK_SHARE)


def find_low_rank(delta: Floats, rounding: Rounding = UNROUNDED) -> int | None:
    """Return the rank of a matrix's delta if it is low, as a LoRA's is; else None.

    `rounding` is the energy that may have come into it when it was stored.

    >>> full = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    >>> find_low_rank(full), find_low_rank(full[:, :8] @ full[:8])
    (None, 8)
    """
    delta, missed = without_spikes(without_lines(delta, rounding))
    values = singular_values(delta)
    _, outliers = find_noise_edge(values, max(delta.shape), missed)
    return low_rank_of(values, outliers, rounding) if values.any() else None


def without_lines(delta: Floats, rounding: Rounding) -> Floats:
    """Return the matrix without rows and columns that are far larger than the others.

    Each of them is a direction by itself; without them, a low rank stays the same. Return the same
    matrix if there are none, or if the others are only rounding.
    """
    rest = delta
    for axis in (0, 1, 0, 1):
        energies = np.square(rest, dtype=np.float64).sum(axis=1 - axis)
        if (changed := np.sort(energies[energies > 0])).size:
            rest = np.compress(energies <= LINE * changed[changed.size // 2], rest, axis)
    return rest if rest.size < delta.size and sum_of_squares(rest) > rounding[0] else delta


def singular_values(matrix: Floats, gpu: Any = None) -> Doubles:
    """Return all singular values, falling, right to about 1e-8 of the largest."""
    scale = float(np.abs(matrix).max(initial=0)) or 1.0
    squared = call_with_matrices(gpu, squared_values, matrix / np.float32(scale))
    values: Doubles = scale * np.sqrt(squared)
    return values


def without_spikes(delta: Floats) -> tuple[Floats, float]:
    """Return the matrix without single elements that stand out.

    Beside it is the largest singular value that their absence may add. A matrix of low rank may
    have heavy rows and columns, so an element is compared with what its row and column predict.
    """
    sizes, magnitudes = np.abs(delta), Magnitudes.of(delta)
    bound = float(bin_edge(outlier_bin(magnitudes, delta.size)))
    is_outlier = sizes >= bound
    rows, columns = np.nonzero(is_outlier)
    if not rows.size or not magnitudes.counts.size:
        return delta, 0.0
    squares = np.square(np.where(is_outlier, 0, sizes / np.float32(bound)))
    by_row, by_column = (squares.mean(axis=axis, dtype=np.float64) for axis in (1, 0))
    expected = bound * np.sqrt(by_row[rows] * by_column[columns] / (float(by_row.mean()) or 1.0))
    is_spike = sizes[rows, columns] > SPIKE * expected
    rows, columns, expected = rows[is_spike], columns[is_spike], expected[is_spike]
    if not rows.size:
        return delta, 0.0
    clean = delta.copy()
    clean[rows, columns] = 0
    together = max(int(np.bincount(line).max()) for line in (rows, columns))
    return clean, SPIKE * float(expected.max()) * math.sqrt(together)


def find_noise_edge(values: Doubles, long: int, least: float = 0.0) -> tuple[float, int]:
    """Return the edge of the noise, `least` or more, and how many singular values lie above it."""
    short = values.size
    outliers = 0
    while True:
        edge = _edge(values[outliers:], max(long - outliers, 1))
        edge = max(edge, NOISE * float(values[0]), least)
        count = int(np.count_nonzero(values > edge))
        if count <= outliers or count > short // 2:
            return edge, count
        outliers = count


def _edge(noise: Doubles, long: int) -> float:
    """Return the end of the singular values of noise, by their median."""
    short = noise.size
    # Not np.median, which imports numpy.ma.
    median = float(np.sort(noise)[(short - 1) // 2 : short // 2 + 1].mean())
    deviation = median / math.sqrt(long * median_of_noise(short / long))
    center = (math.sqrt(short) + math.sqrt(long)) ** 2
    unit = math.sqrt(center) * (1 / math.sqrt(short) + 1 / math.sqrt(long)) ** (1 / 3)
    return deviation * math.sqrt(center + 2 * unit)


@cache
def median_of_noise(ratio: float) -> float:
    """Return the median of the law of Marchenko and Pastur for noise of variance 1.

    >>> round(median_of_noise(1.0), 3)
    0.653
    """
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    angles = (np.arange(4096) + 0.5) * (math.pi / 4096)
    places = low + (high - low) * (1 - np.cos(angles)) / 2
    masses = np.square(np.sin(angles)) / places  # density times the step that an angle makes
    return float(places[np.searchsorted(np.cumsum(masses), masses.sum() / 2)])


def low_rank_of(values: Doubles, outliers: int, rounding: Rounding) -> int | None:
    """Return the rank, if few directions hold everything but what rounding explains.

    They end where a direction is followed by a much weaker one, the last such place among the
    outliers: rounding of changes that are smaller than a step is no even noise, and some of its
    own directions stand out.
    """
    energies = np.square(values)
    most = min(outliers, values.size // 2)
    cliffs = np.flatnonzero(values[:most] >= CLIFF * values[1 : most + 1])
    few = outliers if outliers <= values.size // FEW_PART else 0
    rank = int(cliffs[-1]) + 1 if cliffs.size else few
    left = np.append(energies[::-1].cumsum()[::-1], 0)
    total, tail = float(left[0]), float(left[rank])
    explained = min(max(rounding[0], NEGLIGIBLE_TAIL * total), (1 - rounding[1]) * total)
    return rank if rank and tail <= explained else None
