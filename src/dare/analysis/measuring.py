"""The pass of an analysis over the weights: steps that any thread can do.

For a chunk the base and all models are read, and one function of the core measures all of them. The
results are added up in the order of the chunks, so that the figures do not depend on threads.

The elements in the top 1% of a tensor are only known when all of it has been seen. Their overlap
is counted in a sample: all of a tensor of up to 524,288 elements; in a larger one, one run of 64
elements in every 2, 4, 8, …, so that the sample has about the same size. The choice of runs depends
only on their position. A share s that is counted on k elements is right to √(s(1-s)/k). If a tensor
has outliers, cosines and cancellation are also those of the sample.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.analysis import tallies
from dare.analysis.results import OUTSIDE, Kind, Spectrum, Statistics
from dare.analysis.tallies import Additive, Sums, Window, statistics_of, with_inliers
from dare.checks.dropping import BIN_SHIFT, BINS, NO_MAGNITUDES, Magnitudes, top_bin
from dare.checks.sample import UNROUNDED, find_rounding
from dare.inputs.sources import Raw, Source, read_chunks, read_floats
from dare.kernels import core, load, matrix_gpu
from dare.kernels.reference import LEAST, SAMPLED
from dare.planning.make import LeftOut
from dare.recipe.layers import count_layers, find_networks, stack_and_layer
from dare.recipe.recipe import Request
from dare.run.threads import Results
from dare.run.worker import Make, Progress, Stopped, Survey
from dare.tensors.chunks import CHUNK, chunk_count, chunk_span
from dare.tensors.header import TensorInfo
from dare.tensors.names import ANY_EMBEDDING, ANY_HEAD, without_projections

MeasuringStep = Make | Survey  # a chunk to be measured, a matrix of one model
Floats = NDArray[np.float32]
# A piece of a chunk: its first index, base and models, and which of these are given by deltas.
Piece = tuple[int, Raw, list[Raw], NDArray[np.bool_]]

TOP = 0.01  # share of a tensor's elements that count as its top
SAMPLE = CHUNK  # about the number of elements in the sample for the overlap of tops
CHUNKS_HELD = 8  # of base and models; with more models, smaller pieces are read
MODELS_HELD = 8  # the most models whose samples are kept for a tensor; else they are read again


def sample_period(elements: int) -> int:
    """Return n if one in n runs of a tensor's elements is sampled."""
    return min(1 << max(0, (elements - 1) // SAMPLE).bit_length(), CHUNK // SAMPLED)


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor, and the models whose deltas for it are measured."""

    base: TensorInfo
    kind: Kind
    layer: int
    models: tuple[int, ...]
    unchanged: tuple[int, ...] = ()  # adapters that do not change it

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def chunks(self) -> int:
        """The number of its chunks; an empty tensor counts as one."""
        return max(1, chunk_count(self.base.elements))

    @property
    def period(self) -> int:
        return sample_period(self.base.elements)


@dataclass(frozen=True)
class PairSums(Additive):
    """Sums over some elements of two models' deltas."""

    dot: float = 0.0
    both: int = 0
    agreeing: int = 0
    tops: int = 0  # elements in the top of the one, and in that of the other, added up
    shared_top: int = 0
    opposed_top: int = 0


@dataclass(frozen=True)
class TensorSums(Additive):
    """All measurements of one tensor, or of some of its chunks; mappings are by model."""

    sums: dict[int, Sums] = field(default_factory=dict)
    magnitudes: dict[int, Magnitudes] = field(default_factory=dict)
    pairs: dict[tuple[int, int], PairSums] = field(default_factory=dict)
    summed_magnitude: float = 0.0  # Σ|Σδ|
    shared: int = 0  # elements that two models or more change
    conflicted: int = 0  # those of them that are changed in both directions
    # Sampled deltas of each chunk, models × elements, if there are two models or more.
    samples: tuple[Floats, ...] = ()


# ---------------------------------------------------------------- kinds and layers by name

_KINDS = tomllib.loads(files("dare.analysis").joinpath("kinds.toml").read_text("utf-8"))
PATTERNS = [
    (Kind(kind), re.compile(pattern.format(head=ANY_HEAD, embedding=ANY_EMBEDDING), re.IGNORECASE))
    for kind, pattern in _KINDS["patterns"]
]


@cache
def kind_of(name: str) -> Kind:
    """Return the kind of a tensor; `other` if its name does not say.

    >>> kind_of("model.layers.3.self_attn.q_proj.weight").value, kind_of("lm_head.weight").value
    ('attention', 'head')
    """
    plain = without_projections(name)
    for kind, pattern in PATTERNS:
        if pattern.search(plain):
            return kind
    return Kind.OTHER


def find_norms(tensors: Iterable[TensorInfo]) -> set[str]:
    """Return the tensors of modules that only normalise: their weight is a vector.

    They are similar even in unrelated models, above all the variances of BatchNorm.
    """
    others = {info.name: info for info in tensors if kind_of(info.name) is Kind.OTHER}
    weights = (info for info in others.values() if info.name.endswith(".weight"))
    modules = {info.name.removesuffix("weight") for info in weights if len(info.shape) == 1}
    return {name for name in others if name[: name.rfind(".") + 1] in modules}


def number_layers(tensors: Iterable[str]) -> dict[str, int]:
    """Return the number of each tensor's layer; -1 outside of layers.

    Several stacks are numbered one after the other: a network of several stacks first, then the
    longest; encoders before decoders.

    >>> number_layers(["encoder.block.0.w", "decoder.block.0.w", "encoder.block.1.w", "norm.w"])
    {'encoder.block.0.w': 0, 'decoder.block.0.w': 2, 'encoder.block.1.w': 1, 'norm.w': -1}
    """
    names = list(tensors)
    counts = count_layers(names)
    firsts: dict[str, int] = {}
    number = 0

    def rank(stacks: list[str]) -> tuple[bool, int, bool, str]:
        layers = sum(counts[stack] for stack in stacks)
        return len(stacks) == 1, -layers, "decoder" in stacks[0], stacks[0]

    for stack in itertools.chain(*sorted(find_networks(counts), key=rank)):
        firsts[stack] = number
        number += counts[stack]
    places = {name: stack_and_layer(name) for name in names}
    return {
        name: OUTSIDE if place is None else firsts[place[0]] + place[1]
        for name, place in places.items()
    }


# ---------------------------------------------------------------- the plan and the tally


@dataclass(frozen=True)
class MeasuringPlan:
    """The common tensors of a base and models, and the figures to compute for them."""

    request: Request
    base: Source
    models: Mapping[str, Source]
    tensors: Mapping[str, ComparedTensor]  # by name
    left_out: Sequence[LeftOut]  # tensors that cannot be compared
    spectra: Mapping[str, bool]  # the matrices with singular values; True for a whole matrix
    threads: int = 1

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The base and the models."""
        return (self.base, *self.models.values())

    def sources_of(self, tensor: ComparedTensor) -> list[Source]:
        """Return the sources of a tensor: the base, then the models that change it."""
        return [self.base, *(self.sources[1 + model] for model in tensor.models)]

    @cached_property
    def steps(self) -> list[MeasuringStep]:
        """All steps; a matrix's singular values come when its bytes have just been read."""
        steps: list[MeasuringStep] = []
        for group, (name, tensor) in enumerate(self.tensors.items(), start=1):
            elements, last = tensor.base.elements, tensor.chunks - 1
            again = elements if len(tensor.models) > MODELS_HELD else 0  # for the sample
            for chunk in range(tensor.chunks):
                size = chunk_span(chunk, elements)[1] + again * (chunk == last)
                steps.append(Make(("make", name, chunk), (), group, size, name, chunk))
            for model in tensor.models if name in self.spectra else ():
                size = self.window_on(tensor).rows * tensor.base.shape[1]
                steps.append(Survey(("survey", name, model), (), group, size, name, model))
        return steps

    def window_on(self, tensor: ComparedTensor) -> Window:
        """Return the part of a matrix whose singular values are computed."""
        return tallies.choose_window(tensor.base.shape, whole=self.spectra[tensor.name])

    @cached_property
    def bytes_read(self) -> int:
        """The bytes that all steps read."""
        return sum(map(self.bytes_read_by, self.steps))

    def bytes_read_by(self, step: MeasuringStep) -> int:
        """Return the bytes that a step reads."""
        sources = self.sources_of(self.tensors[step.tensor])
        if isinstance(step, Survey) and step.model is not None:
            source = self.sources[1 + step.model]
            sources = [source] if source.delta_of(step.tensor).is_change else [self.base, source]
        return step.elements * sum(each.tensors[step.tensor].dtype.itemsize for each in sources)


class Tally:
    """The sink of an analysis: adds up the figures of chunks, and keeps them by tensor.

    Chunks are added in their order, whenever they arrive, so that the figures do not depend on
    threads.
    """

    def __init__(self, *, keeps_all: bool = False) -> None:
        """Create an empty tally.

        With `keeps_all` the magnitudes of each tensor are kept, not only sums by layer and kind.
        """
        self.measured: dict[str, TensorSums] = {}
        # By tensor and model.
        self.statistics: dict[tuple[str, int], Statistics] = {}
        self.spectra: dict[tuple[str, int], Spectrum | None] = {}
        # By model, layer and kind.
        self.magnitudes: dict[tuple[int, int, Kind], Magnitudes] = {}
        self._keeps_all = keeps_all
        # By tensor: the number of chunks added, and their sum. Others wait for earlier chunks.
        self._sums: dict[str, tuple[int, TensorSums]] = {}
        self._waiting: dict[tuple[str, int], TensorSums] = {}
        self._lock = threading.Lock()

    def add(self, tensor: ComparedTensor, chunk: int, found: TensorSums) -> TensorSums | None:
        """Add a chunk to those before it; return the sum if the tensor is complete."""
        with self._lock:
            name = tensor.name
            self._waiting[name, chunk] = found
            added, total = self._sums.pop(name, (0, TensorSums()))
            while (following := self._waiting.pop((name, added), None)) is not None:
                added, total = added + 1, total + following
            if added == tensor.chunks:
                return total
            self._sums[name] = added, total
            return None

    def keep(self, tensor: ComparedTensor, found: TensorSums) -> None:
        """Keep the figures of a whole tensor."""
        for model, sums in found.sums.items():
            magnitudes = found.magnitudes[model]
            self.statistics[tensor.name, model] = statistics_of(sums, magnitudes)
            cell = (model, tensor.layer, tensor.kind)
            with self._lock:
                self.magnitudes[cell] = self.magnitudes.get(cell, NO_MAGNITUDES) + magnitudes
        self.measured[tensor.name] = found if self._keeps_all else replace(found, magnitudes={})


# ---------------------------------------------------------------- doing the steps


class Measurer:
    """Does the steps of an analysis, with its own buffers; the inputs must be open."""

    def __init__(
        self, plan: MeasuringPlan, tally: Tally, progress: Progress, stop: threading.Event
    ) -> None:
        self._plan = plan
        self._tally = tally
        self._progress = progress
        self._stop = stop
        self._span = elements_at_once(plan.sources)
        widest = widest_itemsize(plan.sources)
        self._bytes = [np.empty(self._span * widest, np.uint8) for _ in plan.sources]
        shape = len(plan.models), tallies.WAYS, tallies.COUNTERS
        self._counters = np.zeros(shape, np.uint32)  # empty between chunks
        device = plan.request.options.device
        self._gpu = matrix_gpu(load(device)) if plan.spectra else None

    def prefetch(self, step: MeasuringStep) -> None:
        """Prefetch a chunk's bytes of every input; matrices have just been read anyway."""
        if isinstance(step, Make) and step.elements:
            tensor = self._plan.tensors[step.tensor]
            for source in self._plan.sources_of(tensor):
                source.prefetch(step.tensor, *chunk_span(step.chunk, tensor.base.elements))

    def do(self, steps: Sequence[MeasuringStep], _results: Results) -> Iterator[None]:
        """Do steps; the results go to the tally."""
        for step in steps:
            if self._stop.is_set():
                raise Stopped
            match step:
                case Make(tensor=name, chunk=chunk):
                    tensor = self._plan.tensors[name]
                    total = self._tally.add(tensor, chunk, self._measure(tensor, chunk))
                    if total is not None:
                        self._tally.keep(tensor, self._complete(tensor, total))
                case Survey(tensor=name, model=int(model)):
                    spectrum = self._spectrum(self._plan.tensors[name], model)
                    self._tally.spectra[name, model] = spectrum
            yield
            self._progress(self._plan.bytes_read_by(step))

    # ------------------------------------------------------------ a chunk

    def _measure(self, tensor: ComparedTensor, chunk: int) -> TensorSums:
        models = tensor.models
        pairs = list(combinations(models, 2))
        sums = np.zeros((len(models), tallies.SUMS))
        counts = np.zeros((len(models), tallies.COUNTS), np.int64)
        counts[:, LEAST] = tallies.LEAST_OF_NONE
        dots, pair_counts = np.zeros(len(pairs)), np.zeros((len(pairs), 2), np.int64)
        counters = self._counters[: len(models)]
        shared, samples = np.zeros(2, np.int64), list[Floats]()
        totals = np.zeros(2)
        _, count = chunk_span(chunk, tensor.base.elements)
        for piece in self._read(tensor, chunk):
            results = (sums, counts, dots, pair_counts, shared, totals, counters)
            core.measure(*piece[1:], *results)
            if 1 < len(models) <= MODELS_HELD:
                samples.append(self._sample(tensor, piece))
        base_squares, summed_magnitude = totals.tolist()
        untouched = Sums(count, zeros=count, base_squares=base_squares)
        all_sums, magnitudes = dict[int, Sums](), dict[int, Magnitudes]()
        for place, model in enumerate(models):
            of_model = _sums(count, sums[place].tolist(), counts[place].tolist(), base_squares)
            all_sums[model] = of_model
            magnitudes[model] = _take_magnitudes(counters[place], of_model)
        return TensorSums(
            all_sums | dict.fromkeys(tensor.unchanged, untouched),
            magnitudes | dict.fromkeys(tensor.unchanged, NO_MAGNITUDES),
            {
                pair: PairSums(float(dot), *signs.tolist())
                for pair, dot, signs in zip(pairs, dots, pair_counts, strict=True)
            },
            *(summed_magnitude, int(shared[0]), int(shared[1])),
            tuple(samples),
        )

    def _read(self, tensor: ComparedTensor, chunk: int) -> Iterator[Piece]:
        """Read a chunk piece by piece; each piece overwrites the one before."""
        name, sources = tensor.name, self._plan.sources_of(tensor)
        given = np.array([source.delta_of(name).is_change for source in sources[1:]], np.bool_)
        for start, (base, *tuned) in read_chunks(
            *(sources, name, *chunk_span(chunk, tensor.base.elements)),
            buffers=self._bytes[: len(sources)],
            base_first=True,
            at_once=self._span,
            together=self._span,
        ):
            yield start, base, tuned, given

    def _sample(self, tensor: ComparedTensor, piece: Piece) -> Floats:
        start, base, tuned, given = piece
        period = tensor.period
        runs = -(-base.size // (SAMPLED * period))
        sample = np.empty((len(tuned), SAMPLED * runs), np.float32)
        for raw, is_delta, row in zip(tuned, given, sample, strict=True):
            core.sample(raw, base, is_delta, start, period, row)
        return sample

    # ------------------------------------------------------------ a tensor

    def _complete(self, tensor: ComparedTensor, total: TensorSums) -> TensorSums:
        """Complete a tensor's figures by those that are only known when all of it has been seen."""
        whole = {m: with_inliers(each, total.magnitudes[m]) for m, each in total.sums.items()}
        total = replace(total, sums=whole)
        if not total.pairs:
            return replace(total, summed_magnitude=total_magnitude(total))
        least = [_least_of_top(tensor, total.magnitudes[model]) for model in tensor.models]
        tops, in_both = np.zeros(len(least), np.int64), np.zeros((len(total.pairs), 2), np.int64)
        for part in self._samples(tensor, total):
            core.compare_tops(part, np.array(least, np.uint32), tops, in_both)
        sizes = dict(zip(tensor.models, tops.tolist(), strict=True))
        pairs = dict(total.pairs)
        for ((one, other), sums), counts in zip(total.pairs.items(), in_both.tolist(), strict=True):
            shared, agreeing = counts
            size = sizes[one] + sizes[other] if sizes[one] and sizes[other] else 0
            found_tops = {"tops": size, "shared_top": shared, "opposed_top": shared - agreeing}
            pairs[one, other] = replace(sums, **found_tops)
        total = replace(total, pairs=pairs)
        if any(each.inliers.outliers for each in whole.values()):
            total = _without_outliers(tensor.models, total, self._samples(tensor, total))
        return replace(total, samples=())

    def _samples(self, tensor: ComparedTensor, total: TensorSums) -> Iterator[Floats]:
        """Yield the sample, piece by piece; it is read again unless it was kept."""
        yield from total.samples
        for chunk in () if total.samples else range(tensor.chunks):
            yield from (self._sample(tensor, piece) for piece in self._read(tensor, chunk))

    # ------------------------------------------------------------ a matrix

    def _spectrum(self, tensor: ComparedTensor, model: int) -> Spectrum | None:
        """Return the singular values of a model's delta, or of the window on it."""
        source, name = self._plan.sources[1 + model], tensor.name
        delta = self._read_window(source, tensor)
        rounding = UNROUNDED
        if not source.delta_of(name).is_change:
            base = self._read_window(self._plan.base, tensor)
            delta -= base
            types = (each.tensors[name].dtype.name for each in (self._plan.base, source))
            rounding = find_rounding(base, *types)
        delta[~np.isfinite(delta)] = 0
        return tallies.spectrum_of(delta, rounding, self._gpu)

    def _read_window(self, source: Source, tensor: ComparedTensor) -> Floats:
        name, width, window = tensor.name, tensor.base.shape[1], self._plan.window_on(tensor)
        runs = [
            read_floats(source, name, first * width, rows * width, "cpu").reshape(rows, width)
            for first, rows in window.runs
        ]
        if window.is_whole:
            return runs[0]
        return np.concatenate([run[:, window.columns] for run in runs])


def _least_of_top(tensor: ComparedTensor, magnitudes: Magnitudes) -> int:
    """Return the bits of the smallest magnitude in the top of a model's tensor."""
    wanted = math.ceil(TOP * tensor.base.elements)
    place = top_bin(magnitudes, wanted) if magnitudes.counts.size else BINS - 1
    return max(1, place << BIN_SHIFT)


def total_magnitude(measured: TensorSums) -> float:
    """Return ΣΣ|δ| of all models, without outliers."""
    return sum(each.inliers.magnitude for each in measured.sums.values())


def _without_outliers(
    models: Sequence[int], total: TensorSums, parts: Iterable[Floats]
) -> TensorSums:
    """Replace a tensor's products and sums by those of its sample without outliers.

    Overwrites the outliers in the sample.
    """
    inliers = {model: each.inliers for model, each in total.sums.items()}
    products, apart, together = np.zeros((len(models), len(models))), 0.0, 0.0
    for part in parts:
        for row, model in zip(part, models, strict=True):
            row[~(np.abs(row) <= np.float32(inliers[model].largest))] = 0
        wide = part.astype(np.float64)
        products += wide @ wide.T
        apart += float(np.abs(wide).sum())
        together += float(np.abs(wide.sum(axis=0)).sum())
    lengths = np.sqrt(np.diagonal(products))
    pairs = {}
    for (one, other), sums in total.pairs.items():
        left, right = models.index(one), models.index(other)
        both = lengths[left] * lengths[right]
        cosine = float(products[left, right] / both) if both else 0.0
        length = math.sqrt(inliers[one].squares) * math.sqrt(inliers[other].squares)
        pairs[one, other] = replace(sums, dot=cosine * length)
    summed = together / apart * total_magnitude(total) if apart else 0.0
    return replace(total, pairs=pairs, summed_magnitude=summed)


def _sums(elements: int, sums: list[float], counts: list[int], base_squares: float) -> Sums:
    """Return the library's sums for one model."""
    changed, not_finite, peak, least = counts
    zeros = elements - changed - not_finite
    smallest = float(np.uint32(least + 1).view(np.float32)) if changed else math.inf
    largest = float(np.uint32(peak).view(np.float32))
    figures: list[Any] = [elements, zeros, not_finite, *sums, smallest, largest, base_squares]
    return Sums(*figures)


def _take_magnitudes(counters: NDArray[np.uint32], sums: Sums) -> Magnitudes:
    """Return the counted magnitudes, without the zeros in the first bin, and clear the counters."""
    magnitudes = NO_MAGNITUDES
    if sums.largest:
        extremes = np.array([sums.smallest, sums.largest], np.float32).view(np.uint32)
        low, high = (extremes >> np.uint32(BIN_SHIFT)).tolist()
        used = counters[:, low : high + 1]
        counts = used.sum(axis=0, dtype=np.int64)
        counts[0] -= (sums.zeros + sums.not_finite) * (low == 0)
        magnitudes = Magnitudes(low, counts)
        used[:] = 0
    counters[:, 0] = 0
    return magnitudes


# ---------------------------------------------------------------- memory


def widest_itemsize(sources: Iterable[Source]) -> int:
    """Return the bytes per element of the widest storage type."""
    sizes = (info.dtype.itemsize for source in sources for info in source.tensors.values())
    return max(sizes, default=1)


def elements_at_once(sources: Sequence[Source]) -> int:
    """Return how many elements of each input are read at once: a chunk, or less with many models.

    They contain at least one run of a sample.
    """
    most = max((info.elements for info in sources[0].tensors.values()), default=0)
    span, least = CHUNK, SAMPLED * sample_period(most)
    while span > least and span * len(sources) > CHUNKS_HELD * CHUNK:
        span //= 2
    return span


def workspace_bytes(sources: Sequence[Source]) -> int:
    """Return the bytes of one thread's buffers and its share of the tensors being measured."""
    models = len(sources) - 1
    buffers = elements_at_once(sources) * widest_itemsize(sources) * len(sources)
    counters = (2 * 4 + 8) * BINS * models
    return buffers + counters + 5 * SAMPLE * min(models, MODELS_HELD)
