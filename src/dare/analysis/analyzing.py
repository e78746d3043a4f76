"""Analyse models before a merge: open them, measure all weights once, summarise."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from operator import attrgetter
from typing import Any, Literal, get_args

from dare.analysis import tallies
from dare.analysis.document import Analysis
from dare.analysis.measuring import (
    ComparedTensor,
    Measurer,
    MeasuringPlan,
    MeasuringStep,
    PairSums,
    Tally,
    TensorSums,
    find_norms,
    kind_of,
    number_layers,
    total_magnitude,
    workspace_bytes,
)
from dare.analysis.prediction import OUTER
from dare.analysis.results import (
    Cell,
    Interference,
    Kind,
    ModelAnalysis,
    Origin,
    Overlap,
    PairAnalysis,
    Statistics,
    TensorAnalysis,
)
from dare.analysis.tallies import Sums, statistics_of
from dare.checks.dropping import NO_MAGNITUDES
from dare.checks.sample import MIN_SIDE, evenly_spread
from dare.documents.shown import Display, show_progress
from dare.errors import InputError, RecipeError
from dare.inputs.arrays import Arrays, array_source
from dare.inputs.opening import Inputs, open_inputs
from dare.inputs.sources import (
    Source,
    check_unchanged,
    hold_open,
    read_chunks,
    read_config,
    says_tied,
)
from dare.kernels import find_matrix_gpus
from dare.planning.cost import check_memory, memory_limit
from dare.planning.make import LeftOut, Misfit, StoredForm, find_extras, fit_tensor, norm_notices
from dare.recipe.recipe import ModelEntry, Request
from dare.run.cluster import ClusterJob, RunPiece, connect, sample_inputs, task_request
from dare.run.engine import open_for_threads
from dare.run.threads import run_steps
from dare.run.worker import Progress
from dare.stores.locations import AnyPath
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_input_embedding
from dare.tensors.system import available_cores

# The matrices whose singular values are computed: as many as are cheap, all, none.
Spectra = Literal["auto", "all", "none"]

# Share of the changed matrices that must be of low rank for a model to count as a LoRA.
LORA_SHARE = 0.9


def analyze(
    base: AnyPath,
    models: AnyPath | Sequence[AnyPath | ModelEntry],
    *,
    spectra: Spectra = "auto",
    vocabulary: Literal["error", "base", "union"] = "error",
    allow_pickle: bool = False,
    max_memory: int | str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    cluster: str | None = None,
    verbose: bool = True,
) -> Analysis:
    """Read all weights of a base and its fine-tunes once, and describe their deltas.

    Anything that `merge` reads can be analysed. Tensors that do not fit together are left out and
    listed. With `vocabulary="base"` or `"union"` rows are first put into one order, as for a merge.
    If a Ray `cluster` is named, its nodes do the work. `device` is what computes singular values:
    `"cuda"`, or one GPU, `"cuda:1"`, needs the extra `gpu-matrices`.
    """
    started = time.perf_counter()
    settings = {"vocabulary": vocabulary, "allow_pickle": allow_pickle, "verbose": verbose}
    resources = {"max_memory": max_memory, "threads": threads, "cluster": cluster}
    resources["device"] = device
    request, inputs = open_to_compare(base, models, **settings, **resources)
    folder = inputs.folders[0]
    sources = dict(zip(inputs.names, inputs.models, strict=True))
    plan = plan_measuring(inputs.base, sources, request, spectra)
    merged = plan.tensors if len(sources) > 1 else ()
    return make_analysis(
        plan,
        measure(plan),
        started,
        str(request.recipe.base),
        [str(entry.file) for entry in request.recipe.models],
        notes=(*inputs.notes, *norm_notices(merged)),
        vocabularies=dict(inputs.aligned.differences),
        tied=_tied(inputs.base, {} if folder is None else read_config(folder)),
    )


def open_to_compare(base: AnyPath, models: Any, **settings: Any) -> tuple[Request, Inputs]:
    """Open a base and models, and allow tensors that do not fit together."""
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
    plan = plan_measuring(array_source(base, "base"), sources, request, spectra)
    return make_analysis(plan, measure(plan), started, "base", list(models))


# ---------------------------------------------------------------- before the pass


def plan_measuring(
    base: Source,
    models: Mapping[str, Source],
    request: Request,
    spectra: Spectra = "none",
    selects: Callable[[str], bool] = lambda _name: True,
) -> MeasuringPlan:
    """Plan to measure the common tensors of sources, whose names and rows are already aligned.

    If `selects` is given, only tensors whose names it accepts are measured.
    """
    if spectra not in get_args(Spectra):
        raise RecipeError(f"spectra = {spectra!r}: must be auto, all or none")
    if not models:
        raise RecipeError("no models: name at least one to compare with the base")
    tensors, left_out = find_comparable(base, models)
    tensors = {name: tensor for name, tensor in tensors.items() if selects(name)}
    left_out = [each for each in left_out if selects(each.tensor)]
    if not tensors:
        reasons = map(str, left_out[:1])
        raise InputError(": ".join(["there are no weights to analyse", *reasons]))
    options, per_thread = request.options, workspace_bytes((base, *models.values()))
    check_memory(options.max_memory, per_thread)
    max_memory = memory_limit(options.max_memory, per_thread)
    threads = max(1, min(options.threads or available_cores(), max_memory // per_thread))
    spare_bytes = max_memory // threads - per_thread
    matrices = choose_matrices(list(tensors.values()), spectra, spare_bytes)
    if matrices:
        find_matrix_gpus(options.device)  # or refuse
    return MeasuringPlan(request, base, models, tensors, left_out, matrices, threads)


def find_comparable(
    base: Source, models: Mapping[str, Source]
) -> tuple[dict[str, ComparedTensor], list[LeftOut]]:
    """Return the tensors that can be compared, with their models, and those that cannot."""
    tensors: dict[str, ComparedTensor] = {}
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
            owners, form = differing or tuple(label for label, _ in copies), StoredForm.of(info)
            if owners:
                other_form = form if differing else None
                left_out.append(LeftOut(name, Misfit.NOT_WEIGHTS, owners, form, other_form))
            continue
        unchanged = tuple(
            number for number in fit.absent if named[number][1].treats_as_unchanged(name)
        )
        if fit.fitting or unchanged:
            kind = Kind.NORM if name in norms else kind_of(name)
            tensors[name] = ComparedTensor(info, kind, layers[name], fit.fitting, unchanged)
    left_out += find_extras(base, named)
    if not any(tensor.models for tensor in tensors.values()):
        reason = f": {left_out[0]}" if left_out else ""
        raise InputError(f"base and models have no weights in common{reason}")
    return tensors, left_out


def _differs(name: str, *sources: Source) -> bool:
    """Tell if two sources store different values in a tensor that is not weights."""
    with hold_open(sources):
        pairs = (raws for _, raws in read_chunks(sources, name))
        return any(one.tobytes() != other.tobytes() for one, other in pairs)


def choose_matrices(
    tensors: Sequence[ComparedTensor], which: Spectra, bytes_each: int
) -> dict[str, bool]:
    """Return the matrices whose singular values are computed, with True for a whole matrix.

    `auto` takes all matrices whole if that is cheap, else windows of some, evenly spread.
    """
    if which == "none":
        return {}
    matrices = [
        tensor
        for tensor in tensors
        if tensor.models and len(tensor.base.shape) == 2 and min(tensor.base.shape) >= MIN_SIDE
    ]
    fits = {s.name: tallies.spectrum_bytes(s.base.shape) <= bytes_each for s in matrices}
    if which == "all":
        return fits
    # LoRAs rarely change embeddings and heads, and many of their rows may be unused.
    inner = [tensor for tensor in matrices if tensor.kind not in OUTER] or matrices

    def cost(*, whole: bool) -> float:
        return sum(len(s.models) * tallies.spectrum_cost(s.base.shape, whole=whole) for s in inner)

    if cost(whole=True) <= tallies.WHOLE_COST and all(fits[tensor.name] for tensor in inner):
        return {tensor.name: True for tensor in inner}
    inner.sort(key=lambda tensor: (tensor.layer, tensor.name))
    most = max(1, int(tallies.WINDOWS_COST / (cost(whole=False) / len(inner))))
    return {inner[place].name: False for place in evenly_spread(len(inner), most)}


# ---------------------------------------------------------------- the pass


def measure(plan: MeasuringPlan, *, keeps_all: bool = False) -> Tally:
    """Read everything once: here, or on the cluster in the options.

    With `keeps_all` the magnitudes of each tensor are kept.
    """
    tally, options = Tally(keeps_all=keeps_all), plan.request.options
    with show_progress(plan.bytes_read, "analysing", visible=options.verbose) as display:
        if options.cluster is None:
            measure_steps(plan, plan.steps, tally, display.advance)
        else:
            _measure_on_cluster(plan, options.cluster, tally, display)
    return tally


def measure_steps(
    plan: MeasuringPlan, steps: Sequence[MeasuringStep], tally: Tally, progress: Progress
) -> None:
    """Do steps on the plan's threads."""
    with open_for_threads(plan.sources, uses_blas=True):
        run_steps(steps, partial(Measurer, plan, tally, progress), plan.threads)


def _measure_on_cluster(plan: MeasuringPlan, address: str, tally: Tally, display: Display) -> None:
    options = plan.request.options
    shapes = (plan.tensors[name].base.shape for name in plan.spectra)
    least = workspace_bytes(plan.sources) + max(map(tallies.spectrum_bytes, shapes), default=0)
    limit = memory_limit(options.max_memory, least)
    display.announce(f"analysing on the cluster {address}")
    with connect(address, verbose=options.verbose) as cluster:
        cluster.size_tasks(least, limit, options.max_memory, options.threads)
        request = task_request(plan.request.recipe, options, cluster.task_memory)
        job = MeasuringJob(request, sample_inputs(plan.sources), plan.tensors, plan.spectra)
        for _, (measured, spectra), nbytes in cluster.run(job, cut_into_pieces(plan)):
            for name, found in measured.items():
                tally.keep(plan.tensors[name], found)
            tally.spectra |= spectra
            display.advance(nbytes)
    check_unchanged(plan.sources)


PIECE_BYTES = 256 << 20  # the most bytes that a piece reads, unless a single tensor has more


@dataclass(frozen=True)
class MeasuringJob(ClusterJob):
    """An analysis under way; a piece is the steps of some tensors."""

    tensors: Mapping[str, ComparedTensor]
    spectra: Mapping[str, bool]

    def open(self, stack: ExitStack) -> RunPiece:
        _, inputs = open_inputs(self.request.recipe, self.request.options)
        models = dict(zip(inputs.names, inputs.models, strict=True))
        plan = MeasuringPlan(self.request, inputs.base, models, self.tensors, (), self.spectra)
        self.hold_inputs(stack, self.request.recipe, plan.sources)

        def run(steps: Sequence[MeasuringStep], _common: None) -> tuple[Any, int]:
            tally, read = Tally(keeps_all=True), list[int]()
            measure_steps(plan, steps, tally, read.append)
            return (tally.measured, tally.spectra), sum(read)

        return run


def cut_into_pieces(plan: MeasuringPlan) -> Iterator[list[MeasuringStep]]:
    """Cut the steps into pieces of whole tensors, because sums of chunks are large."""
    piece, nbytes = list[MeasuringStep](), 0
    for _, steps in itertools.groupby(plan.steps, key=attrgetter("group")):
        if nbytes >= PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
        added = list(steps)
        piece += added
        nbytes += sum(map(plan.bytes_read_by, added))
    yield piece


# ---------------------------------------------------------------- after the pass


def make_analysis(
    plan: MeasuringPlan,
    tally: Tally,
    started: float,
    base_file: str,
    files: Sequence[str],
    **known: Any,
) -> Analysis:
    """Make an analysis from the tally; `known` has its other fields."""
    layers: dict[int, list[TensorSums]] = {}
    for name, tensor in plan.tensors.items():
        layers.setdefault(tensor.layer, []).append(tally.measured[name])
    whole = sum((tally.measured[name] for name in plan.tensors), TensorSums())
    by_layer = {layer: sum(layers[layer], TensorSums()) for layer in sorted(layers)}
    places = zip(plan.models, files, strict=True)
    pairs = combinations(enumerate(plan.models), 2)
    return Analysis(
        base=base_file,
        base_dtypes=_count_types(plan.base.tensors.values()),
        models=tuple(_model(plan, tally, number, *place) for number, place in enumerate(places)),
        pairs=tuple(_pair(whole, by_layer, *pair) for pair in pairs),
        together=Interference(
            _cancelled(whole),
            whole.conflicted / whole.shared if whole.shared else 0.0,
            {layer: _cancelled(found) for layer, found in by_layer.items()},
        ),
        left_out=tuple(plan.left_out),
        bytes_read=plan.bytes_read,
        seconds=time.perf_counter() - started,
        **{"notes": (), "vocabularies": {}, "tied": (), **known},
    )


def _model(plan: MeasuringPlan, tally: Tally, number: int, name: str, file: str) -> ModelAnalysis:
    source = plan.models[name]
    compared = [s for s in plan.tensors.values() if number in (*s.models, *s.unchanged)]
    cells: dict[tuple[int, Kind], Sums] = {}
    for tensor in compared:
        cell = tensor.layer, tensor.kind
        cells[cell] = cells.get(cell, Sums()) + tally.measured[tensor.name].sums[number]

    def over(layer: int | None = None, kind: Kind | None = None) -> Statistics:
        chosen = [cell for cell in cells if layer in (None, cell[0]) and kind in (None, cell[1])]
        return statistics_of(
            sum((cells[cell] for cell in chosen), Sums()),
            sum((tally.magnitudes[number, *cell] for cell in chosen), NO_MAGNITUDES),
        )

    analyzed = tuple(
        TensorAnalysis(
            tensor.name,
            tensor.kind,
            tensor.layer,
            tensor.base.shape,
            source.tensors.get(tensor.name, tensor.base).dtype.name,
            tally.statistics[tensor.name, number],
            tally.spectra.get((tensor.name, number)),
        )
        for tensor in compared
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
            for name, info in sorted(plan.base.tensors.items())
            if info.dtype.is_weight and name not in source.tensors
            if not name.startswith(source.unchanged)
        ),
        dtypes=_count_types(source.tensors[t.name] for t in analyzed if t.name in source.tensors),
        is_adapter=source.is_partial,
        was_dropped=any(source.delta_of(tensor).is_rescaled for tensor in source.tensors),
    )


def find_origin(tensors: Sequence[TensorAnalysis]) -> tuple[Origin, int | None]:
    """Tell from the spectra how a model's delta was made; also return the rank of a LoRA."""
    if not any(tensor.statistics.norm or tensor.statistics.not_finite for tensor in tensors):
        return Origin.UNCHANGED, None
    seen = [(tensor.kind, tensor.spectrum.low_rank) for tensor in tensors if tensor.spectrum]
    inner = [each for each in seen if each[0] not in OUTER] or seen
    if not inner:
        return Origin.UNKNOWN, None
    ranks = [rank for _, rank in inner if rank is not None]
    if len(ranks) >= LORA_SHARE * len(inner):
        return Origin.LORA, max(ranks)
    return Origin.FULL, None


def _pair(
    whole: TensorSums,
    by_layer: Mapping[int, TensorSums],
    one: tuple[int, str],
    other: tuple[int, str],
) -> PairAnalysis:
    pair = one[0], other[0]

    def overlap(found: TensorSums) -> Overlap:
        total = found.pairs.get(pair, PairSums())
        norms = [math.sqrt(found.sums.get(each, Sums()).inliers.squares) for each in pair]
        length = norms[0] * norms[1]
        return Overlap(
            cosine=min(1.0, max(-1.0, total.dot / length)) if length else 0.0,
            agreeing=total.agreeing / total.both if total.both else 0.0,
            both=total.both,
            top_conflict=total.opposed_top / total.shared_top if total.shared_top else 0.0,
            top_overlap=2 * total.shared_top / total.tops if total.tops else 0.0,
        )

    squares = whole.sums.get(pair[0], Sums()).inliers.squares
    dot = whole.pairs.get(pair, PairSums()).dot
    overlaps = {layer: overlap(found) for layer, found in by_layer.items()}
    ratio = dot / squares if squares else 0.0
    return PairAnalysis(one[1], other[1], overlap(whole), overlaps, ratio)


def _cancelled(found: TensorSums) -> float:
    """Return the share of all changes that is lost when the models are added up."""
    apart = total_magnitude(found)
    return max(0.0, 1 - found.summed_magnitude / apart) if apart else 0.0


def _count_types(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for info in tensors:
        counts[info.dtype.name] += info.elements
    return dict(counts.most_common())


def _tied(base: Source, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the input embedding, if the configuration uses it as the head and none is stored."""
    heads = [name for name in base.tensors if kind_of(name) is Kind.HEAD]
    if says_tied(config) is not True or any("lm_head" in name for name in heads):
        return ()
    return tuple(name for name in sorted(base.tensors) if is_input_embedding(name))
