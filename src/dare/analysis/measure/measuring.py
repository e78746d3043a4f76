"""The pass of an analysis over the weights: tasks that any thread can do, a chunk each.

For a chunk the base and all models are read, and one kernel looks at all of them. What it counts is
added up as integers, in any order; what it sums is kept for each chunk and added up in their order
when the last chunk of a tensor is done. So the figures do not depend on threads.

Which elements are in the top 1 % of a tensor is only known when all of it has been seen. Their
overlap is counted in a sample: all of a tensor of up to 524,288 elements; of a larger one so
many runs of 64 elements, one in every 2, 4, 8, …, that about as many are taken. Where the runs lie
depends on their position alone. A share s that is counted on k elements of a sample is right to
√(s(1-s)/k): at an overlap of 0.01 and a layer of 7 large tensors to 0.0007.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.analysis.measure import spectra
from dare.analysis.measure.tallies import (
    BIN_SHIFT,
    BINS,
    NONE,
    Magnitudes,
    Sums,
    statistics_of,
    top_bin,
)
from dare.analysis.results import Kind, Spectrum, Statistics
from dare.inputs.sources import Source
from dare.tensors.chunks import CHUNK, chunk_count, chunk_span, chunk_spans
from dare.tensors.header import TensorInfo

Floats = NDArray[np.float32]
Raw = NDArray[Any]
"""Stored elements, as carriers of their type."""

AS_IS = (np.dtype(np.uint16), np.dtype(np.float32))
"""Carriers of BF16 and F32. The kernel is compiled for these two; it takes seconds for each."""
TOP = 0.01
"""Share of a tensor's elements that count as its top."""
SAMPLE = CHUNK
"""About how many elements of a tensor are looked at for the overlap of the tops."""


@dataclass(frozen=True)
class Subject:
    """A tensor and the models whose delta to it is looked at."""

    base: TensorInfo
    kind: Kind
    layer: int
    models: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its name."""
        return self.base.name

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.base.elements

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every two of its models."""
        return pairs_of(self.models)

    @property
    def period(self) -> int:
        """One run in so many is sampled."""
        return min(1 << max(0, (self.elements - 1) // SAMPLE).bit_length(), CHUNK // 64)


def pairs_of(models: Sequence[int]) -> list[tuple[int, int]]:
    """Every two of them, in order.

    >>> pairs_of([0, 2, 3])
    [(0, 2), (0, 3), (2, 3)]
    """
    return [(one, other) for place, one in enumerate(models) for other in models[place + 1 :]]


@dataclass(frozen=True)
class PairSums:
    """What two models' deltas have to do with each other, over some elements."""

    dot: float = 0.0
    both: int = 0
    agreeing: int = 0
    tops: int = 0
    """Elements in the top of the one, and in that of the other, added up."""
    shared_top: int = 0
    opposed_top: int = 0

    def __add__(self, other: PairSums) -> PairSums:
        """Over both sets of elements."""
        return PairSums(
            self.dot + other.dot,
            self.both + other.both,
            self.agreeing + other.agreeing,
            self.tops + other.tops,
            self.shared_top + other.shared_top,
            self.opposed_top + other.opposed_top,
        )


@dataclass(frozen=True)
class Measured:
    """All that is known of one tensor."""

    subject: Subject
    sums: Mapping[int, Sums]
    """For each of its models."""
    statistics: Mapping[int, Statistics]
    pairs: Mapping[tuple[int, int], PairSums]
    summed_magnitude: float
    """Σ|Σδ|."""
    shared: int
    """Elements that two models or more change."""
    conflicted: int
    """Those of them that are changed in both directions."""


@dataclass
class Study:
    """What the threads of an analysis share: the inputs, and what is measured of them."""

    base: Source
    models: Sequence[Source]
    kernels: Any
    progress: Callable[[int], None]
    measured: dict[str, Measured] = field(default_factory=dict)
    magnitudes: dict[tuple[int, int, Kind], Magnitudes] = field(default_factory=dict)
    """By model, layer and kind."""
    spectra: dict[tuple[str, int], Spectrum | None] = field(default_factory=dict)
    open: dict[str, OpenTensor] = field(default_factory=dict)
    """Tensors of which some chunks are done."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def opened(self, subject: Subject) -> OpenTensor:
        """The place where the chunks of a tensor leave what they found."""
        with self.lock:
            if subject.name not in self.open:
                self.open[subject.name] = OpenTensor(subject)
            return self.open[subject.name]

    def close(self, tensor: OpenTensor) -> None:
        """Make something of a tensor whose last chunk is done."""
        measured, magnitudes = tensor.finish(self.kernels)
        with self.lock:
            del self.open[tensor.subject.name]
            self._keep(measured, magnitudes)

    def note(self, subject: Subject, sums: Sums, magnitudes: Magnitudes) -> None:
        """Take in what was measured elsewhere of a tensor of the only model."""
        statistics = {0: statistics_of(sums, magnitudes)}
        measured = Measured(subject, {0: sums}, statistics, {}, sums.magnitude, 0, 0)
        self._keep(measured, {0: magnitudes})

    def _keep(self, measured: Measured, magnitudes: Mapping[int, Magnitudes]) -> None:
        subject = measured.subject
        self.measured[subject.name] = measured
        for model, counts in magnitudes.items():
            cell = (model, subject.layer, subject.kind)
            self.magnitudes[cell] = self.magnitudes.get(cell, NONE) + counts


class ChunkSums:
    """What the kernel adds to, for one chunk."""

    def __init__(self, kernels: Any, models: int) -> None:
        pairs = models * (models - 1) // 2
        self.sums = np.zeros((models, kernels.SUMS))
        self.counts = np.zeros((models, kernels.COUNTS), np.int64)
        self.counts[:, kernels.LEAST] = int(kernels.LEAST_OF_NONE)
        self.pair_sums = np.zeros(pairs)
        self.pair_counts = np.zeros((pairs, 2), np.int64)
        self.shared_sums = np.zeros(2)
        self.shared_counts = np.zeros(2, np.int64)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """In the kernel's order."""
        return (
            self.sums,
            self.counts,
            self.pair_sums,
            self.pair_counts,
            self.shared_sums,
            self.shared_counts,
        )


class OpenTensor:
    """A tensor that is being looked at."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        models, period = len(subject.models), subject.period
        chunks = chunk_count(subject.elements)
        self.chunks: list[ChunkSums | None] = [None] * chunks
        self.left = chunks
        self.magnitudes = np.zeros((models, BINS), np.int64)
        size = chunks * CHUNK // period if chunks > 1 else -(-subject.elements // 64) * 64
        self.samples = np.zeros((models if models > 1 else 0, size), np.float32)
        self.lock = threading.Lock()

    def add(self, chunk: int, sums: ChunkSums, counters: NDArray[np.uint32], kernels: Any) -> bool:
        """Take in what a chunk has found, empty the counters; say whether it was the last."""
        with self.lock:
            self.chunks[chunk] = sums
            for place, figures in enumerate(sums.counts):
                low = max(int(figures[kernels.LEAST]) + 1, 0) >> BIN_SHIFT
                high = int(figures[kernels.PEAK]) >> BIN_SHIFT
                for used in (slice(0, 1), slice(max(low, 1), high + 1)):
                    counts = counters[place, :, used]
                    self.magnitudes[place, used] += counts.sum(axis=0, dtype=np.int64)
                    counts[:] = 0
            self.left -= 1
            return self.left == 0

    def finish(self, kernels: Any) -> tuple[Measured, dict[int, Magnitudes]]:
        """Everything about the tensor, and the magnitudes of each model's delta."""
        subject = self.subject
        total = _added([chunk for chunk in self.chunks if chunk is not None], kernels)
        all_sums = [self._sums(total, place) for place in range(len(subject.models))]
        magnitudes = [
            _trimmed(counts, sums) for counts, sums in zip(self.magnitudes, all_sums, strict=True)
        ]
        statistics = map(statistics_of, all_sums, magnitudes)
        measured = Measured(
            subject,
            dict(zip(subject.models, all_sums, strict=True)),
            dict(zip(subject.models, statistics, strict=True)),
            dict(zip(subject.pairs, self._pairs(total, magnitudes, kernels), strict=True)),
            float(total.shared_sums[1]) if len(all_sums) > 1 else all_sums[0].magnitude,
            int(total.shared_counts[0]),
            int(total.shared_counts[1]),
        )
        return measured, dict(zip(subject.models, magnitudes, strict=True))

    def _sums(self, total: ChunkSums, place: int) -> Sums:
        one, two, three, four, magnitude = total.sums[place].tolist()
        changed, not_finite, peak, least = total.counts[place].tolist()
        elements = self.subject.elements
        return Sums(
            elements,
            elements - changed - not_finite,
            not_finite,
            (one, two, three, four),
            magnitude,
            _float_of(least + 1) if changed else math.inf,
            _float_of(peak),
            float(total.shared_sums[0]),
        )

    def _pairs(
        self, total: ChunkSums, magnitudes: Sequence[Magnitudes], kernels: Any
    ) -> list[PairSums]:
        if not self.subject.pairs:
            return []
        tops = self._tops(magnitudes, kernels)
        sizes = [kernels.count_changed(signs) for signs in tops]
        pairs = []
        for number, (one, other) in enumerate(pairs_of(range(len(sizes)))):
            shared, agreeing = kernels.compare_signs(tops[one], tops[other])
            both, same = total.pair_counts[number].tolist()
            pairs.append(
                PairSums(
                    dot=float(total.pair_sums[number]),
                    both=both,
                    agreeing=same,
                    tops=sizes[one] + sizes[other] if sizes[one] and sizes[other] else 0,
                    shared_top=shared,
                    opposed_top=shared - agreeing,
                )
            )
        return pairs

    def _tops(self, magnitudes: Sequence[Magnitudes], kernels: Any) -> NDArray[np.uint64]:
        """The packed signs of each model's largest elements in the sample."""
        top = math.ceil(TOP * self.subject.elements)
        codes = np.zeros(self.samples.shape[1], np.uint8)
        signs = np.zeros((len(magnitudes), codes.size // 32), np.uint64)
        for place, histogram in enumerate(magnitudes):
            if histogram.counts.size:
                least = max(top_bin(histogram, top) << BIN_SHIFT, 1)
                kernels.encode_top(self.samples[place], np.int32(least), codes)
                kernels.pack_signs(codes, signs[place])
        return signs


def _added(chunks: Sequence[ChunkSums], kernels: Any) -> ChunkSums:
    """What all chunks of a tensor found, sums added up in their order."""
    total = ChunkSums(kernels, len(chunks[0].sums))
    for chunk in chunks:
        peak = np.maximum(total.counts[:, kernels.PEAK], chunk.counts[:, kernels.PEAK])
        least = np.minimum(total.counts[:, kernels.LEAST], chunk.counts[:, kernels.LEAST])
        for array, part in zip(total.arrays, chunk.arrays, strict=True):
            np.add(array, part, out=array)
        total.counts[:, kernels.PEAK], total.counts[:, kernels.LEAST] = peak, least
    return total


def _trimmed(counts: NDArray[np.int64], sums: Sums) -> Magnitudes:
    """The bins that are in use; in the first, zeros and what counted as zeros are taken off."""
    counts[0] -= sums.zeros + sums.not_finite
    if not sums.largest:
        return NONE
    low, high = (_bits_of(end) >> BIN_SHIFT for end in (sums.smallest, sums.largest))
    return Magnitudes.of(counts[low : high + 1], low)


def _float_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _bits_of(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


class Worker:
    """One thread's buffers."""

    def __init__(self, study: Study) -> None:
        self.study = study
        widest = widest_of(study.base, study.models)
        self._bytes = [np.empty(CHUNK * widest, np.uint8) for _ in (0, *study.models)]
        self._floats = [
            np.empty(CHUNK, np.float32) for _ in self._bytes
        ]  # untouched, unless needed
        ways = (study.kernels.WAYS, study.kernels.COUNTERS)
        self.counters = np.zeros((len(study.models), *ways), np.uint32)
        """Empty between chunks."""

    def read(self, source: Source, name: str, start: int, count: int, place: int = 0) -> Raw:
        """Read stored elements into a buffer, one of which each model and the base have."""
        dtype = source.tensors[name].dtype
        raw = self._bytes[place][: count * dtype.itemsize].view(dtype.carrier)
        source.read(name, start, raw)
        self.study.progress(raw.nbytes)
        return raw

    def alike(
        self, base: Raw, stored: list[Raw], given: NDArray[np.bool_]
    ) -> tuple[Raw, list[Raw]]:
        """Bring a chunk of base and models to one type, if they do not have one that can stay.

        What is not float32 becomes a delta in float32, which `given` notes.
        """
        if len({raw.dtype for raw in (base, *stored)}) == 1 and base.dtype in AS_IS:
            return base, stored
        changed = list(stored)
        for place, raw in enumerate(stored):
            if raw.dtype != np.float32:
                changed[place] = self._floats[1 + place][: raw.size]
                if given[place]:
                    self.study.kernels.decode(raw, changed[place])
                else:
                    self.study.kernels.subtract(raw, base, changed[place])
                given[place] = True
        decoded = self._floats[0][: base.size]
        self.study.kernels.decode(base, decoded)
        return decoded, changed


def widest_of(base: Source, models: Sequence[Source]) -> int:
    """Bytes per element of the widest storage type."""
    sizes = (info.dtype.itemsize for source in (base, *models) for info in source.tensors.values())
    return max(sizes, default=1)


def workspace_bytes(base: Source, models: Sequence[Source]) -> int:
    """What one thread's buffers take, and its share of the tensors that are being looked at."""
    buffers = CHUNK * (widest_of(base, models) + 4) * (1 + len(models))
    counters = 2 * 4 * BINS * len(models)
    tensor = (8 * BINS + 5 * SAMPLE) * len(models)
    return buffers + counters + tensor


@dataclass(frozen=True)
class MeasureChunk:
    """Look at one chunk of one tensor."""

    study: Study
    subject: Subject
    chunk: int

    @property
    def nbytes(self) -> int:
        """What will be read."""
        count = chunk_span(self.chunk, self.subject.elements)[1]
        return (
            sum(source.tensors[self.subject.name].dtype.itemsize for source in self._sources)
            * count
        )

    @property
    def _sources(self) -> list[Source]:
        return [self.study.base, *(self.study.models[model] for model in self.subject.models)]

    def prefetch(self) -> None:
        """Ask for the chunk's bytes of every input."""
        name, (start, count) = self.subject.name, chunk_span(self.chunk, self.subject.elements)
        for source in self._sources:
            source.prefetch(name, start, count)

    def run(self, worker: Worker) -> None:
        """Look."""
        study, subject, kernels = self.study, self.subject, self.study.kernels
        tensor = study.opened(subject)
        start, count = chunk_span(self.chunk, subject.elements)
        base = worker.read(study.base, subject.name, start, count)
        sources = self._sources[1:]
        given = np.array([source.holds_delta(subject.name) for source in sources])
        stored = [
            worker.read(source, subject.name, start, count, 1 + place)
            for place, source in enumerate(sources)
        ]
        base, stored = worker.alike(base, stored, given)
        sums = ChunkSums(kernels, len(sources))
        addresses = np.array([raw.ctypes.data for raw in stored], np.int64)
        counters = worker.counters[: len(sources)]
        kernels.measure(base, stored[0][:0], addresses, given, *sums.arrays, counters)
        part = slice(start // subject.period, (start + CHUNK) // subject.period)
        for raw, is_delta, sample in zip(stored, given, tensor.samples, strict=False):
            kernels.sample(raw, base, is_delta, start, subject.period, sample[part])
        if tensor.add(self.chunk, sums, counters, kernels):
            study.close(tensor)


@dataclass(frozen=True)
class MeasureEmpty:
    """Note a tensor that has no elements."""

    study: Study
    subject: Subject
    nbytes = 0

    def prefetch(self) -> None:
        """Nothing will be read."""

    def run(self, _worker: Worker) -> None:
        """Note it."""
        models = self.subject.models
        nothing = statistics_of(Sums(), NONE)
        self.study.measured[self.subject.name] = Measured(
            self.subject,
            dict.fromkeys(models, Sums()),
            dict.fromkeys(models, nothing),
            dict.fromkeys(self.subject.pairs, PairSums()),
            0.0,
            0,
            0,
        )


@dataclass(frozen=True)
class MeasureSpectrum:
    """Look at one model's delta of a matrix as a whole, or at a window of it."""

    study: Study
    subject: Subject
    model: int
    whole: bool

    @property
    def nbytes(self) -> int:
        """What will be read."""
        rows, columns = self.subject.base.shape
        window, name = spectra.window_of((rows, columns), whole=self.whole), self.subject.name
        source = self.study.models[self.model]
        size = source.tensors[name].dtype.itemsize
        if not source.holds_delta(name):
            size += self.subject.base.dtype.itemsize
        return window.height * columns * size

    def prefetch(self) -> None:
        """The chunks have been read just before."""

    def run(self, worker: Worker) -> None:
        """Look."""
        rows, columns = self.subject.base.shape
        window = spectra.window_of((rows, columns), whole=self.whole)
        source, name = self.study.models[self.model], self.subject.name
        delta = self._read(worker, source, window)
        rounding = 0.0
        if not source.holds_delta(name):
            base = self._read(worker, self.study.base, window)
            delta -= base
            rounding = spectra.rounding_energy(base, source.tensors[name].dtype.name)
        delta[~np.isfinite(delta)] = 0
        self.study.spectra[name, self.model] = spectra.spectrum_of(delta, rounding)

    def _read(self, worker: Worker, source: Source, window: spectra.Window) -> Floats:
        """A window as float32."""
        if window.is_whole:
            return self._read_rows(worker, source, *window.runs[0])
        return np.concatenate(
            [self._read_rows(worker, source, *run)[:, window.columns] for run in window.runs]
        )

    def _read_rows(self, worker: Worker, source: Source, first: int, count: int) -> Floats:
        name, width = self.subject.name, self.subject.base.shape[1]
        values = np.empty(count * width, np.float32)
        for start, size in chunk_spans(values.size):
            raw = worker.read(source, name, first * width + start, size)
            self.study.kernels.decode(raw, values[start : start + size])
        return values.reshape(count, width)
