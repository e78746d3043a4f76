"""The pass of an analysis over the weights: steps that any thread can do.

For a chunk the base and all models are read, and one function of the core measures all of them. The
results are added up in the order of the chunks, so that the figures do not depend on threads.

Which elements are in the top 1 % of a tensor is only known when all of it has been seen. Their
overlap is counted in a sample: all of a tensor of up to 524,288 elements; of a larger one so many
runs of 64 elements, one in every 2, 4, 8, …, that about as many are taken. Where the runs lie
depends on their position alone. A share s that is counted on k elements is right to √(s(1-s)/k).
Where a tensor has outliers, cosines and cancellation are those of the sample too.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.analysis.measure import tallies
from dare.analysis.measure.tallies import Additive, Sums, with_inside
from dare.analysis.results import OUTSIDE, Kind, Spectrum
from dare.checks.sample import BIN_SHIFT, BINS, NONE, UNROUNDED, Magnitudes, find_rounding, top_bin
from dare.inputs.sources import Raw, Source, read_floats, read_stored
from dare.kernels import core
from dare.kernels.reference import LEAST, SAMPLED
from dare.recipe.layers import count_layers, find_networks, stack_and_layer
from dare.run.threads import Batch, Step
from dare.tensors.chunks import CHUNK, chunk_count, chunk_span
from dare.tensors.header import TensorInfo
from dare.tensors.names import ANY_EMBEDDING, ANY_HEAD, without_projections

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

TOP = 0.01  # share of a tensor's elements that count as its top
SAMPLE = CHUNK  # about how many elements of a tensor are looked at for the overlap of the tops
TOGETHER = 8  # chunks that are added up at once, so that no more of them have to be kept
CHUNKS_HELD = 8  # of base and models; of more models, smaller pieces are read
MODELS_HELD = 8  # whose samples are kept until a tensor has been seen; those of more are read again


def period_of(elements: int) -> int:
    """Return the period of a sample: of so many runs of a tensor one is taken."""
    return min(1 << max(0, (elements - 1) // SAMPLE).bit_length(), CHUNK // SAMPLED)


@dataclass(frozen=True)
class Subject:
    """A tensor and the models whose delta to it is looked at."""

    base: TensorInfo
    kind: Kind
    layer: int
    models: tuple[int, ...]
    unchanged: tuple[int, ...] = ()  # adapters that do not change it

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def period(self) -> int:
        return period_of(self.base.elements)


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
class Measured(Additive):
    """All that is known of one tensor, or of some chunks of it; mappings are by model."""

    sums: dict[int, Sums] = field(default_factory=dict)
    magnitudes: dict[int, Magnitudes] = field(default_factory=dict)
    pairs: dict[tuple[int, int], PairSums] = field(default_factory=dict)
    summed_magnitude: float = 0.0  # Σ|Σδ|
    shared: int = 0  # elements that two models or more change
    conflicted: int = 0  # the elements of those that are changed in both directions
    # Some deltas of each chunk, models × elements, if there are two models or more.
    samples: tuple[Floats, ...] = ()


# ---------------------------------------------------------------- what a name tells

_KINDS = tomllib.loads(files("dare.analysis.measure").joinpath("kinds.toml").read_text("utf-8"))
PATTERNS = [
    (Kind(kind), re.compile(pattern.format(head=ANY_HEAD, embedding=ANY_EMBEDDING), re.IGNORECASE))
    for kind, pattern in _KINDS["patterns"]
]


@cache
def kind_of(name: str) -> Kind:
    """Return what a tensor is for; `other` where its name does not say.

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

    In models that have nothing else in common, these are alike, BatchNorm's variances above all.
    """
    found = {info.name: info for info in tensors if kind_of(info.name) is Kind.OTHER}
    weights = (info for info in found.values() if info.name.endswith(".weight"))
    modules = {info.name.removesuffix("weight") for info in weights if len(info.shape) == 1}
    return {name for name in found if name[: name.rfind(".") + 1] in modules}


def number_layers(tensors: Iterable[str]) -> dict[str, int]:
    """Return the number of the layer that each tensor stands in; -1 outside.

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


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class MeasureStep(Step):
    """A piece of the work on one tensor."""

    subject: Subject
    nbytes: int
    is_last: bool  # True if its result is needed beyond the tensor


@dataclass(frozen=True)
class MeasureChunk(MeasureStep):
    """Look at one chunk."""

    chunk: int


@dataclass(frozen=True)
class AddUp(MeasureStep):
    """Add up what was found of the chunks so far."""


@dataclass(frozen=True)
class MeasureSpectrum(MeasureStep):
    """Look at one model's delta of a matrix as a whole, or at a window of it."""

    model: int
    window: tallies.Window


def list_steps(
    models: Sequence[Source], subjects: Iterable[Subject], matrices: Mapping[str, bool]
) -> Iterator[MeasureStep]:
    """All steps; a matrix's spectrum comes when its bytes have just been read."""
    for subject in subjects:
        name = subject.name
        sizes = {model: models[model].tensors[name].dtype.itemsize for model in subject.models}
        base_size = subject.base.dtype.itemsize
        together = base_size + sum(sizes.values())
        again = subject.base.elements * together if len(sizes) > MODELS_HELD else 0
        before: tuple[Any, ...] = ()
        chunks = chunk_count(subject.base.elements)
        for first in range(0, max(chunks, 1), TOGETHER):
            last = min(first + TOGETHER, chunks)
            for chunk in range(first, last):
                count = chunk_span(chunk, subject.base.elements)[1]
                is_all, nbytes = chunks == 1, count * together + again * (chunks == 1)
                yield MeasureChunk((name, chunk), (), 0, count, subject, nbytes, is_all, chunk)
            if chunks == 1:
                break
            needs = (*before, *((name, chunk) for chunk in range(first, last)))
            before = ((name, "up to", last),)
            is_last = last == chunks
            yield AddUp(before[0], needs, 0, 0, subject, again * is_last, is_last)
        if name in matrices:
            rows, columns = subject.base.shape
            window = tallies.window_of((rows, columns), whole=matrices[name])
            for model, size in sizes.items():
                both = size + base_size * (not models[model].delta_of(name).is_change)
                seen = sum(count for _, count in window.runs) * columns
                yield MeasureSpectrum(
                    *((name, "of", model), (), 0, seen, subject, seen * both, True, model, window)
                )


class Worker:
    """Does the steps of an analysis, with buffers of its own; the inputs must be open."""

    def __init__(
        self, base: Source, models: Sequence[Source], progress: Callable[[int], None]
    ) -> None:
        self._base = base
        self._models = models
        self._progress = progress
        widest = widest_of(base, models)
        self._span = span_of(base, models)
        self._bytes = [np.empty(self._span * widest, np.uint8) for _ in (base, *models)]
        # Empty between chunks.
        self._counters = np.zeros((len(models), tallies.WAYS, tallies.COUNTERS), np.uint32)

    def prefetch(self, step: MeasureStep) -> None:
        """Ask for a chunk's bytes of every input; spectra are of what has just been read."""
        if isinstance(step, MeasureChunk):
            start, count = chunk_span(step.chunk, step.subject.base.elements)
            for source in self._sources(step.subject):
                source.prefetch(step.subject.name, start, count)

    def run_batch(self, batch: Batch[MeasureStep]) -> Iterator[Measured | Spectrum | None]:
        """Do the steps of a batch."""
        for step in batch.steps:
            if isinstance(step, AddUp):
                yield self._add_up(step, [batch.results[need] for need in step.needs])
            elif isinstance(step, MeasureSpectrum):
                yield self._spectrum(step)
            elif isinstance(step, MeasureChunk):
                found = self._measure(step.subject, step.chunk)
                yield self._add_up(step, [found]) if step.is_last else found
            self._progress(step.nbytes)

    def _sources(self, subject: Subject) -> list[Source]:
        return [self._base, *(self._models[model] for model in subject.models)]

    # ------------------------------------------------------------ a chunk

    def _measure(self, subject: Subject, chunk: int) -> Measured:
        models = subject.models
        pairs = list(combinations(models, 2))
        sums = np.zeros((len(models), tallies.SUMS))
        counts = np.zeros((len(models), tallies.COUNTS), np.int64)
        counts[:, LEAST] = tallies.LEAST_OF_NONE
        dots, pair_counts = np.zeros(len(pairs)), np.zeros((len(pairs), 2), np.int64)
        counters = self._counters[: len(models)]
        shared, samples = np.zeros(2, np.int64), list[Floats]()
        totals = np.zeros(2)
        _, count = chunk_span(chunk, subject.base.elements)
        for start, base, tuned, given in self._read(subject, chunk):
            found = (sums, counts, dots, pair_counts, shared, totals, counters)
            core.measure(base, tuned, given, *found)
            if 1 < len(models) <= MODELS_HELD:
                samples.append(self._sample(subject, start, base, tuned, given))
        base_squares, summed_magnitude = totals.tolist()
        untouched = Sums(count, zeros=count, base_squares=base_squares)
        all_sums, magnitudes = dict.fromkeys(subject.unchanged, untouched), {}
        for place, model in enumerate(models):
            own = _sums(count, sums[place].tolist(), counts[place].tolist(), base_squares)
            all_sums[model] = own
            magnitudes[model] = _take_magnitudes(counters[place], own)
        return Measured(
            all_sums,
            dict.fromkeys(subject.unchanged, NONE) | magnitudes,
            {
                pair: PairSums(float(dot), *signs.tolist())
                for pair, dot, signs in zip(pairs, dots, pair_counts, strict=True)
            },
            *(summed_magnitude, int(shared[0]), int(shared[1])),
            tuple(samples),
        )

    def _read(self, subject: Subject, chunk: int) -> Iterator[tuple[int, Raw, list[Raw], Flags]]:
        """Yield pieces of a chunk: the first index, base and models, and which of them are deltas.

        The next piece takes their place.
        """
        sources, (first, count) = self._sources(subject), chunk_span(chunk, subject.base.elements)
        for start in range(first, first + count, self._span):
            size = min(self._span, first + count - start)
            base, *tuned = (
                read_stored(source, subject.name, start, size, buffer)
                for source, buffer in zip(sources, self._bytes, strict=False)
            )
            given = np.array([s.delta_of(subject.name).is_change for s in sources[1:]], np.bool_)
            yield start, base, tuned, given

    def _sample(
        self, subject: Subject, start: int, base: Raw, tuned: list[Raw], given: Flags
    ) -> Floats:
        period = subject.period
        runs = -(-base.size // (SAMPLED * period))
        sample = np.empty((len(tuned), SAMPLED * runs), np.float32)
        for raw, is_delta, row in zip(tuned, given, sample, strict=True):
            core.sample(raw, base, is_delta, start, period, row)
        return sample

    # ------------------------------------------------------------ a tensor

    def _add_up(self, step: MeasureStep, found: Iterable[Measured]) -> Measured:
        subject = step.subject
        everyone = (*subject.models, *subject.unchanged)
        nothing = Measured(dict.fromkeys(everyone, Sums()), dict.fromkeys(everyone, NONE))
        total = sum(found, nothing)  # of a tensor without elements there are no parts
        if not step.is_last:
            return total
        whole = {m: with_inside(each, total.magnitudes[m]) for m, each in total.sums.items()}
        total = replace(total, sums=whole)
        if not total.pairs:
            return replace(total, summed_magnitude=added_magnitudes(total))
        least = [_least_of_top(subject, total.magnitudes[model]) for model in subject.models]
        tops, in_both = np.zeros(len(least), np.int64), np.zeros((len(total.pairs), 2), np.int64)
        for part in self._samples(subject, total):
            core.compare_tops(part, np.array(least, np.uint32), tops, in_both)
        sizes = dict(zip(subject.models, tops.tolist(), strict=True))
        pairs = dict(total.pairs)
        for ((one, other), sums), counts in zip(total.pairs.items(), in_both.tolist(), strict=True):
            shared, agreeing = counts
            size = sizes[one] + sizes[other] if sizes[one] and sizes[other] else 0
            found_tops = {"tops": size, "shared_top": shared, "opposed_top": shared - agreeing}
            pairs[one, other] = replace(sums, **found_tops)
        total = replace(total, pairs=pairs)
        if any(each.inside.outliers for each in whole.values()):
            total = _without_outliers(subject.models, total, self._samples(subject, total))
        return replace(total, samples=())

    def _samples(self, subject: Subject, total: Measured) -> Iterator[Floats]:
        """Yield the sample, piece by piece; it is read again unless it was kept."""
        yield from total.samples
        for chunk in () if total.samples else range(chunk_count(subject.base.elements)):
            for piece in self._read(subject, chunk):
                yield self._sample(subject, *piece)

    def _spectrum(self, step: MeasureSpectrum) -> Spectrum | None:
        source, name = self._models[step.model], step.subject.name
        delta = self._read_window(source, step)
        rounding = UNROUNDED
        if not source.delta_of(name).is_change:
            base = self._read_window(self._base, step)
            delta -= base
            types = (each.tensors[name].dtype.name for each in (self._base, source))
            rounding = find_rounding(base, *types)
        delta[~np.isfinite(delta)] = 0
        return tallies.spectrum_of(delta, rounding)

    def _read_window(self, source: Source, step: MeasureSpectrum) -> Floats:
        name, window, width = step.subject.name, step.window, step.subject.base.shape[1]
        runs = [
            read_floats(source, name, first * width, rows * width, "cpu").reshape(rows, width)
            for first, rows in window.runs
        ]
        if window.is_whole:
            return runs[0]
        return np.concatenate([run[:, window.columns] for run in runs])


def _least_of_top(subject: Subject, magnitudes: Magnitudes) -> int:
    """Return the bits of the least magnitude that is among a model's largest, in its tensor."""
    wanted = math.ceil(TOP * subject.base.elements)
    place = top_bin(magnitudes, wanted) if magnitudes.counts.size else BINS - 1
    return max(1, place << BIN_SHIFT)


def added_magnitudes(measured: Measured) -> float:
    """Return ΣΣ|δ| of all models, without outliers."""
    return sum(each.inside.magnitude for each in measured.sums.values())


def _without_outliers(models: Sequence[int], total: Measured, parts: Iterable[Floats]) -> Measured:
    """The products and the sum of a tensor's deltas as its sample has them without outliers.

    Overwrites the outliers in the sample.
    """
    inside = {model: each.inside for model, each in total.sums.items()}
    products, apart, together = np.zeros((len(models), len(models))), 0.0, 0.0
    for part in parts:
        for row, model in zip(part, models, strict=True):
            row[~(np.abs(row) <= np.float32(inside[model].largest))] = 0
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
        length = math.sqrt(inside[one].squares) * math.sqrt(inside[other].squares)
        pairs[one, other] = replace(sums, dot=cosine * length)
    summed = together / apart * added_magnitudes(total) if apart else 0.0
    return replace(total, pairs=pairs, summed_magnitude=summed)


def _sums(elements: int, sums: list[float], counts: list[int], base_squares: float) -> Sums:
    """Return what the kernel has found of one model."""
    changed, not_finite, peak, least = counts
    zeros = elements - changed - not_finite
    smallest = float(np.uint32(least + 1).view(np.float32)) if changed else math.inf
    largest = float(np.uint32(peak).view(np.float32))
    found: list[Any] = [elements, zeros, not_finite, *sums, smallest, largest, base_squares]
    return Sums(*found)


def _take_magnitudes(counters: NDArray[np.uint32], sums: Sums) -> Magnitudes:
    """Empty the counters; in the first bin, zeros and what counted as zeros are taken off."""
    magnitudes = NONE
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


def widest_of(base: Source, models: Sequence[Source]) -> int:
    """Bytes per element of the widest storage type."""
    sizes = (info.dtype.itemsize for source in (base, *models) for info in source.tensors.values())
    return max(sizes, default=1)


def span_of(base: Source, models: Sequence[Source]) -> int:
    """Return how many elements of each input are read at once: a chunk, or of many models less.

    There is at least one run of a sample in it.
    """
    most = max((info.elements for info in base.tensors.values()), default=0)
    span, least = CHUNK, SAMPLED * period_of(most)
    while span > least and span * (1 + len(models)) > CHUNKS_HELD * CHUNK:
        span //= 2
    return span


def workspace_bytes(base: Source, models: Sequence[Source]) -> int:
    """Return the bytes of one thread's buffers and its share of the tensors being measured."""
    buffers = span_of(base, models) * widest_of(base, models) * (1 + len(models))
    counters = (2 * 4 + 8) * BINS * len(models)
    return buffers + counters + 5 * SAMPLE * min(len(models), MODELS_HELD)
