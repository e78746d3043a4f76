"""Analyse models that are to be merged: open them, measure all weights once, sum up."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from os import PathLike
from typing import Any, Literal, get_args

from dare.analysis.document import Analysis
from dare.analysis.judge.prediction import OUTER
from dare.analysis.measure import tallies
from dare.analysis.measure.measuring import (
    Measured,
    MeasureSpectrum,
    MeasureStep,
    PairSums,
    Subject,
    Worker,
    added_magnitudes,
    find_norms,
    kind_of,
    list_steps,
    number_layers,
    workspace_bytes,
)
from dare.analysis.measure.tallies import Sums, statistics_of
from dare.analysis.results import (
    Cell,
    Interference,
    Kind,
    ModelAnalysis,
    Origin,
    Overlap,
    PairAnalysis,
    Spectrum,
    Statistics,
    TensorAnalysis,
)
from dare.checks.sample import NONE, SMALLEST, Magnitudes, spread
from dare.documents.shown import Display, show_progress
from dare.errors import InputError, RecipeError
from dare.inputs.arrays import Arrays, array_source
from dare.inputs.opening import Inputs, open_inputs
from dare.inputs.sources import Source, check_unchanged, hold_open, read_chunks, read_config
from dare.kernels.linalg import one_blas_thread
from dare.planning.cost import check_memory, memory_limit
from dare.planning.make import Form, LeftOut, Misfit, find_extras, fit_tensor, norm_notices
from dare.recipe.options import RunOptions
from dare.recipe.recipe import ModelEntry, Request
from dare.run.cluster import (
    RunPiece,
    Sample,
    check_same_inputs,
    connect,
    sample_inputs,
    task_request,
)
from dare.run.threads import run_steps
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_input_embedding
from dare.tensors.system import available_cores

AnyPath = str | PathLike[str]
# Which matrices' singular values are computed: what is cheap, every one, none.
Result = tuple[MeasureStep, Any]  # a step and what it found
Spectra = Literal["auto", "all", "none"]

# Share of the changed matrices that must be of low rank for a model to count as a LoRA.
NEARLY_ALL = 0.9


def analyze(
    base: AnyPath,
    models: AnyPath | Sequence[AnyPath | ModelEntry],
    *,
    spectra: Spectra = "auto",
    vocabulary: Literal["error", "base", "union"] = "error",
    allow_pickle: bool = False,
    max_memory: int | str | None = None,
    threads: int | None = None,
    cluster: str | None = None,
    verbose: bool = True,
) -> Analysis:
    """Look at all weights of a base and its fine-tunes once, and say what their deltas look like.

    Anything that `merge` reads can be analysed. Tensors that do not fit together are left out and
    listed. With `vocabulary="base"` or `"union"` rows are brought in line first, as for a merge.
    The nodes of a Ray `cluster` do it if one is named.
    """
    started = time.perf_counter()
    settings = {"vocabulary": vocabulary, "allow_pickle": allow_pickle, "verbose": verbose}
    means = {"max_memory": max_memory, "threads": threads, "cluster": cluster}
    request, inputs = open_to_compare(base, models, **settings, **means)
    folder = inputs.folders[0]
    sources = dict(zip(inputs.names, inputs.models, strict=True))
    study = _study(inputs.base, sources, request, spectra)
    merged = [subject.name for subject in study.subjects] if len(sources) > 1 else []
    return study.conclude(
        started,
        str(request.recipe.base),
        [str(entry.file) for entry in request.recipe.models],
        notes=(*inputs.notes, *norm_notices(merged)),
        vocabularies=dict(inputs.aligned.differences),
        tied=_tied(inputs.base, {} if folder is None else read_config(folder)),
    )


def open_to_compare(base: AnyPath, models: Any, **settings: Any) -> tuple[Request, Inputs]:
    """Open a base and models of which not everything has to fit together."""
    loose = {"on_missing": "base", "on_extra": "drop", "on_mismatch": "base"}
    request = Request.of(base=base, models=models, **loose, **settings)
    recipe, inputs = open_inputs(request.recipe, request.options)
    return replace(request, recipe=recipe), inputs


def analyze_arrays(
    base: Arrays,
    models: Sequence[Arrays] | Mapping[str, Arrays],
    *,
    spectra: Spectra = "auto",
    max_memory: int | str | None = None,
    threads: int | None = None,
) -> Analysis:
    """Analyse dicts of NumPy arrays or torch tensors; models may have names.

    >>> import numpy as np
    >>> base = {"w": np.zeros(4, np.float32)}
    >>> analysis = analyze_arrays(base, {"math": {"w": np.array([3, 0, -4, 0], np.float32)}})
    >>> analysis.model("math").total.norm, analysis.model("math").total.zeros
    (5.0, 2)
    """
    started = time.perf_counter()
    if not isinstance(models, Mapping):
        models = {f"model {number}": model for number, model in enumerate(models)}
    request = Request.of(
        base="base", models=list(models), max_memory=max_memory, threads=threads, verbose=False
    )
    sources = {name: array_source(model, name) for name, model in models.items()}
    study = _study(array_source(base, "base"), sources, request, spectra)
    return study.conclude(started, "base", list(models))


@dataclass
class Study:
    """The tensors that a base and models have in common, and what was measured of them."""

    base: Source
    models: Mapping[str, Source]
    subjects: Sequence[Subject]
    left_out: Sequence[LeftOut]
    # True if figures of each tensor are kept, not only those of a layer's tensors of a kind.
    keeps_all: bool = False
    bytes_read: int = 0
    measured: dict[str, Measured] = field(default_factory=dict)
    # By tensor and model.
    statistics: dict[tuple[str, int], Statistics] = field(default_factory=dict)
    spectra: dict[tuple[str, int], Spectrum | None] = field(default_factory=dict)
    # By model, layer and kind.
    magnitudes: dict[tuple[int, int, Kind], Magnitudes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The base and the models."""
        return (self.base, *self.models.values())

    def collect(self, results: Iterable[Result]) -> None:
        """Keep the results of spectra, and of the last step of each tensor."""
        for step, found in results:
            if isinstance(step, MeasureSpectrum):
                self.spectra[step.subject.name, step.model] = found
            else:
                self._add(step.subject, found)

    def _add(self, subject: Subject, found: Measured) -> None:
        for model, sums in found.sums.items():
            magnitudes = found.magnitudes[model]
            self.statistics[subject.name, model] = statistics_of(sums, magnitudes)
            cell = (model, subject.layer, subject.kind)
            with self.lock:
                self.magnitudes[cell] = self.magnitudes.get(cell, NONE) + magnitudes
        kept = found if self.keeps_all else replace(found, magnitudes={})
        self.measured[subject.name] = kept

    def conclude(
        self, started: float, base_file: str, files: Sequence[str], **known: Any
    ) -> Analysis:
        """Make an analysis of what was measured; `known` are other fields of it."""
        tensors = [self.measured[subject.name] for subject in self.subjects]
        layers: dict[int, list[Measured]] = {}
        for subject, found in zip(self.subjects, tensors, strict=True):
            layers.setdefault(subject.layer, []).append(found)
        whole = sum(tensors, Measured())
        by_layer = {layer: sum(layers[layer], Measured()) for layer in sorted(layers)}
        places = zip(self.models, files, strict=True)
        pairs = combinations(enumerate(self.models), 2)
        return Analysis(
            base=base_file,
            base_dtypes=_count_types(self.base.tensors.values()),
            models=tuple(_model(self, number, *place) for number, place in enumerate(places)),
            pairs=tuple(_pair(whole, by_layer, *pair) for pair in pairs),
            together=Interference(
                _cancelled(whole),
                whole.conflicted / whole.shared if whole.shared else 0.0,
                {layer: _cancelled(found) for layer, found in by_layer.items()},
            ),
            left_out=tuple(self.left_out),
            bytes_read=self.bytes_read,
            seconds=time.perf_counter() - started,
            **{"notes": (), "vocabularies": {}, "tied": (), **known},
        )


def _study(base: Source, models: Mapping[str, Source], request: Request, spectra: Spectra) -> Study:
    """Measure what sources have in common, whose names and rows are in line."""
    if spectra not in get_args(Spectra):
        raise RecipeError(f"spectra = {spectra!r}: must be auto, all or none")
    if not models:
        raise RecipeError("no models: name at least one to compare with the base")
    study = Study(base, models, *find_subjects(base, models))
    measure(study, spectra, request)
    return study


def measure(study: Study, spectra: Spectra = "none", request: Request | None = None) -> None:
    """Read everything once: here, or on the cluster that is asked for."""
    base, *models = study.sources
    per_thread = workspace_bytes(base, models)
    options = request.options if request else RunOptions(verbose=False)
    check_memory(options.max_memory, per_thread)
    max_memory = memory_limit(options.max_memory, per_thread)
    threads = max(1, min(options.threads or available_cores(), max_memory // per_thread))
    matrices = choose_matrices(study.subjects, spectra, max_memory // threads - per_thread)
    steps = list(list_steps(models, study.subjects, matrices))
    study.bytes_read = sum(step.nbytes for step in steps)
    with show_progress(study.bytes_read, "analysing", visible=options.verbose) as display:
        if request is not None and options.cluster is not None:
            _measure_there(study, steps, request, options.cluster, display)
            return
        with ExitStack() as stack:
            _open(stack, study.sources)
            _run(steps, study.sources, threads, display.advance, study.collect)


def _measure_there(
    study: Study, steps: Sequence[MeasureStep], request: Request, address: str, display: Display
) -> None:
    shapes = [s.subject.base.shape for s in steps if isinstance(s, MeasureSpectrum)]
    least = workspace_bytes(study.base, study.sources[1:])
    least += max((tallies.bytes_of(shape) for shape in shapes), default=0)
    options = request.options
    limit = memory_limit(options.max_memory, least)
    display.announce(f"analysing on the cluster {address}")
    with connect(address, verbose=options.verbose) as cluster:
        cluster.share_out(least, limit, options.max_memory, options.threads)
        there = task_request(request.recipe, options, cluster.task_memory)
        job = AnalysisJob(there, sample_inputs(study.sources))
        for _, found, nbytes in cluster.run(job, cut(steps)):
            study.collect(found)
            display.advance(nbytes)


def _open(stack: ExitStack, sources: Iterable[Source]) -> None:
    for source in sources:
        stack.enter_context(source)
    stack.enter_context(one_blas_thread())


def _run(
    steps: Sequence[MeasureStep],
    sources: Sequence[Source],
    threads: int,
    progress: Callable[[int], None],
    collect: Callable[[Iterable[Result]], None],
) -> None:
    """Do steps on sources that are open, and make sure that nobody changed these meanwhile.

    What is needed beyond its tensor is collected: spectra, and the last sums of each.
    """
    base, *models = sources

    def keep(steps: Sequence[MeasureStep], results: Sequence[Any]) -> None:
        pairs = zip(steps, results, strict=True)
        collect([pair for pair in pairs if pair[0].is_last])

    run_steps(steps, lambda _stop: Worker(base, models, progress), threads, collect=keep)
    check_unchanged(sources)


# ---------------------------------------------------------------- before the pass


def find_subjects(
    base: Source, models: Mapping[str, Source]
) -> tuple[list[Subject], list[LeftOut]]:
    """Return the tensors that can be compared, with their models, and those that cannot."""
    subjects: list[Subject] = []
    left_out: list[LeftOut] = []
    named = list(models.items())
    layers, norms = number_layers(base.tensors), find_norms(base.tensors.values())
    for name, info in sorted(base.tensors.items()):
        fit = fit_tensor(info, named)
        left_out += [each for each in fit.misfits if each.reason is Misfit.UNLIKE_BASE]
        if not info.dtype.is_weight:
            copies = [named[number] for number in fit.fitting]
            compared = () if info.is_counter else copies
            differing = tuple(label for label, model in compared if _differs(name, base, model))
            owners, form = differing or tuple(label for label, _ in copies), Form.of(info)
            if owners:
                found = form if differing else None
                left_out.append(LeftOut(name, Misfit.NOT_WEIGHTS, owners, form, found))
            continue
        unchanged = tuple(number for number in fit.absent if named[number][1].leaves(name))
        if fit.fitting or unchanged:
            kind = Kind.NORM if name in norms else kind_of(name)
            subjects.append(Subject(info, kind, layers[name], fit.fitting, unchanged))
    left_out += find_extras(base, named)
    if not any(subject.models for subject in subjects):
        reason = f": {left_out[0]}" if left_out else ""
        raise InputError(f"base and models have no weights in common{reason}")
    return subjects, left_out


def _differs(name: str, *sources: Source) -> bool:
    """Tell if two sources store different values in a tensor that is not weights."""
    with hold_open(sources):
        pairs = (raws for _, raws in read_chunks(sources, name))
        return any(one.tobytes() != other.tobytes() for one, other in pairs)


def choose_matrices(
    subjects: Sequence[Subject], which: Spectra, bytes_each: int
) -> dict[str, bool]:
    """The matrices whose spectrum is computed, and whether of the whole.

    `auto` takes all, whole, if that is cheap; else windows of matrices that are evenly spread.
    """
    if which == "none":
        return {}
    matrices = [
        subject
        for subject in subjects
        if subject.models and len(subject.base.shape) == 2 and min(subject.base.shape) >= SMALLEST
    ]
    fits = {s.name: tallies.bytes_of(s.base.shape) <= bytes_each for s in matrices}
    if which == "all":
        return fits
    # LoRAs rarely change embeddings and heads, and many of their rows may be unused.
    inner = [subject for subject in matrices if subject.kind not in OUTER] or matrices

    def cost(*, whole: bool) -> float:
        return sum(len(s.models) * tallies.cost_of(s.base.shape, whole=whole) for s in inner)

    if cost(whole=True) <= tallies.WHOLE_COST and all(fits[subject.name] for subject in inner):
        return {subject.name: True for subject in inner}
    inner.sort(key=lambda subject: (subject.layer, subject.name))
    most = max(1, int(tallies.WINDOWS_COST / (cost(whole=False) / len(inner))))
    return {inner[place].name: False for place in spread(len(inner), most)}


# ---------------------------------------------------------------- after the pass


def _model(study: Study, number: int, name: str, file: str) -> ModelAnalysis:
    source = study.models[name]
    compared = [s for s in study.subjects if number in (*s.models, *s.unchanged)]
    cells: dict[tuple[int, Kind], Sums] = {}
    for subject in compared:
        cell = subject.layer, subject.kind
        cells[cell] = cells.get(cell, Sums()) + study.measured[subject.name].sums[number]

    def over(layer: int | None = None, kind: Kind | None = None) -> Statistics:
        chosen = [cell for cell in cells if layer in (None, cell[0]) and kind in (None, cell[1])]
        return statistics_of(
            sum((cells[cell] for cell in chosen), Sums()),
            sum((study.magnitudes[number, *cell] for cell in chosen), NONE),
        )

    analyzed = tuple(
        TensorAnalysis(
            subject.name,
            subject.kind,
            subject.layer,
            subject.base.shape,
            source.tensors.get(subject.name, subject.base).dtype.name,
            study.statistics[subject.name, number],
            study.spectra.get((subject.name, number)),
        )
        for subject in compared
    )
    origin, rank = find_origin(analyzed)
    return ModelAnalysis(
        name=name,
        file=file,
        total=over(),
        by_kind={kind: over(kind=kind) for kind in Kind if any(kind is k for _, k in cells)},
        by_layer={layer: over(layer) for layer in sorted({layer for layer, _ in cells})},
        cells=tuple(Cell(*cell, over(*cell)) for cell in sorted(cells)),
        tensors=analyzed,
        origin=origin,
        likely_rank=rank,
        missing=tuple(
            name
            for name, info in sorted(study.base.tensors.items())
            if info.dtype.is_weight and name not in source.tensors
            if not name.startswith(source.unchanged)
        ),
        dtypes=_count_types(source.tensors[t.name] for t in analyzed if t.name in source.tensors),
        is_adapter=source.is_partial,
        was_dropped=any(source.delta_of(tensor).is_rescaled for tensor in source.tensors),
    )


def find_origin(tensors: Sequence[TensorAnalysis]) -> tuple[Origin, int | None]:
    """Return how a model's delta was made, and the rank if by a LoRA, from the spectra."""
    if not any(tensor.statistics.norm or tensor.statistics.not_finite for tensor in tensors):
        return Origin.UNCHANGED, None
    seen = [(tensor.kind, tensor.spectrum.low_rank) for tensor in tensors if tensor.spectrum]
    inner = [each for each in seen if each[0] not in OUTER] or seen
    if not inner:
        return Origin.UNKNOWN, None
    ranks = [rank for _, rank in inner if rank is not None]
    if len(ranks) >= NEARLY_ALL * len(inner):
        return Origin.LORA, max(ranks)
    return Origin.FULL, None


def _pair(
    whole: Measured, by_layer: Mapping[int, Measured], one: tuple[int, str], other: tuple[int, str]
) -> PairAnalysis:
    pair = one[0], other[0]

    def overlap(found: Measured) -> Overlap:
        total = found.pairs.get(pair, PairSums())
        norms = [math.sqrt(found.sums.get(each, Sums()).inside.squares) for each in pair]
        length = norms[0] * norms[1]
        return Overlap(
            cosine=min(1.0, max(-1.0, total.dot / length)) if length else 0.0,
            agreeing=total.agreeing / total.both if total.both else 0.0,
            both=total.both,
            top_conflict=total.opposed_top / total.shared_top if total.shared_top else 0.0,
            top_overlap=2 * total.shared_top / total.tops if total.tops else 0.0,
        )

    squares = whole.sums.get(pair[0], Sums()).inside.squares
    dot = whole.pairs.get(pair, PairSums()).dot
    overlaps = {layer: overlap(found) for layer, found in by_layer.items()}
    ratio = dot / squares if squares else 0.0
    return PairAnalysis(one[1], other[1], overlap(whole), overlaps, ratio)


def _cancelled(found: Measured) -> float:
    """Return the share of all change that is lost when the models are added up."""
    apart = added_magnitudes(found)
    return max(0.0, 1 - found.summed_magnitude / apart) if apart else 0.0


def _count_types(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for info in tensors:
        counts[info.dtype.name] += info.elements
    return dict(counts.most_common())


def _tied(base: Source, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The input embedding, if the configuration makes it the head too and no head is stored."""
    heads = [name for name in base.tensors if kind_of(name) is Kind.HEAD]
    if config.get("tie_word_embeddings") is not True or any("lm_head" in name for name in heads):
        return ()
    return tuple(name for name in sorted(base.tensors) if is_input_embedding(name))


# ---------------------------------------------------------------- on a cluster

PIECE_BYTES = 256 << 20  # the most bytes that a piece reads, unless a single tensor has more


@dataclass(frozen=True)
class AnalysisJob:
    """Models to look at, and what they look like to the driver; a piece is some tensors."""

    request: Request
    inputs: tuple[Sample, ...]

    def open(self, stack: ExitStack) -> RunPiece:
        """Open the inputs; refuse others than the driver has."""
        _, inputs = open_inputs(self.request.recipe, self.request.options)
        sources = (inputs.base, *inputs.models)
        _open(stack, sources)
        check_same_inputs(self.request.recipe, sources, self.inputs)

        def do(steps: Sequence[MeasureStep], _common: None) -> tuple[list[Any], int]:
            found: list[Result] = []
            read: list[int] = []
            _run(steps, sources, 1, read.append, found.extend)
            return found, sum(read)

        return do


def cut(steps: Iterable[MeasureStep]) -> Iterator[list[MeasureStep]]:
    """Pieces of whole tensors: sums of chunks are large, and added up in their order."""
    piece: list[MeasureStep] = []
    for step in steps:
        is_new = piece and piece[-1].subject.name != step.subject.name
        if is_new and sum(before.nbytes for before in piece) >= PIECE_BYTES:
            yield piece
            piece = []
        piece.append(step)
    if piece:
        yield piece
