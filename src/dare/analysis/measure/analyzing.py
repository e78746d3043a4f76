"""Analyze models that are to be merged: open them, look at all weights once, say what was found."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any, Literal, TypeVar

from dare.analysis.measure import spectra as spectrum_costs
from dare.analysis.measure.kinds import kind_of, layer_of
from dare.analysis.measure.measuring import (
    MeasureChunk,
    Measured,
    MeasureEmpty,
    MeasureSpectrum,
    PairSums,
    Study,
    Subject,
    Worker,
    pairs_of,
    workspace_bytes,
)
from dare.analysis.measure.tallies import NONE, Sums, add_magnitudes, add_sums, statistics_of
from dare.analysis.results import (
    Analysis,
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
from dare.errors import InputError, RecipeError
from dare.inputs.arrays import array_source
from dare.inputs.formats import read_config
from dare.inputs.opening import open_inputs
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread
from dare.planning.machine import available_cores
from dare.recipe.schema import ModelEntry, Recipe
from dare.run.progress import show_progress
from dare.run.threads import run_tasks
from dare.tensors.chunks import chunk_count
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_input_embedding

AnyPath = str | PathLike[str]
Spectra = Literal["auto", "all", "none"]
"""Which matrices' singular values are computed: what is cheap, every one, none."""

COMPILING = "compiling kernels (once; ten seconds or so)"
OUTER = (Kind.EMBEDDING, Kind.HEAD)
"""What LoRAs rarely change, and where many rows may be unused: it says little about an origin."""
NEARLY_ALL = 0.9
"""Share of the changed matrices that must be of low rank for a model to count as a LoRA."""

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


def analyze(
    base: AnyPath,
    models: AnyPath | Sequence[AnyPath | ModelEntry],
    *,
    spectra: Spectra = "auto",
    vocabulary: Literal["error", "base", "union"] = "error",
    allow_pickle: bool = False,
    max_memory: int | str = 1 << 30,
    threads: int | None = None,
    verbose: bool = True,
) -> Analysis:
    """Look at all weights of a base and its fine-tunes once, and say what their deltas look like.

    Anything that `merge` reads can be analyzed. Tensors that do not fit together are left out and
    listed. With `vocabulary="base"` or `"union"` rows are brought in line first, as for a merge.
    """
    started = time.perf_counter()
    recipe = Recipe(
        base=base,
        models=models,
        method="linear",
        on_missing="base",
        on_extra="drop",
        on_mismatch="base",
        vocabulary=vocabulary,
        allow_pickle=allow_pickle,
        max_memory=max_memory,
        threads=threads,
        verbose=verbose,
    )
    recipe, inputs = open_inputs(recipe)
    return analyze_sources(
        inputs.base,
        dict(zip(inputs.names, inputs.models, strict=True)),
        base_file=str(recipe.base),
        files=[str(entry.file) for entry in recipe.models],
        config=read_config(inputs.folders[0]) if inputs.folders[0] is not None else {},
        notes=inputs.notes,
        spectra=spectra,
        max_memory=recipe.max_memory,
        threads=threads,
        verbose=verbose,
        started=started,
    )


def analyze_arrays(
    base: Mapping[str, Any],
    models: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]],
    *,
    spectra: Spectra = "auto",
    max_memory: int | str = 1 << 30,
    threads: int | None = None,
) -> Analysis:
    """Analyze dicts of NumPy arrays or torch tensors; models may have names.

    >>> import numpy as np
    >>> base = {"w": np.zeros(4, np.float32)}
    >>> analysis = analyze_arrays(base, {"math": {"w": np.array([3, 0, -4, 0], np.float32)}})
    >>> analysis.model("math").total.norm, analysis.model("math").total.zeros
    (5.0, 2)
    """
    if not isinstance(models, Mapping):
        models = {f"model {number}": model for number, model in enumerate(models)}
    recipe = Recipe(base="base", models=list(models), max_memory=max_memory, threads=threads)
    return analyze_sources(
        array_source(base, "base"),
        {name: array_source(model, name) for name, model in models.items()},
        base_file="base",
        files=list(models),
        spectra=spectra,
        max_memory=recipe.max_memory,
        threads=threads,
        verbose=False,
    )


def analyze_sources(
    base: Source,
    models: Mapping[str, Source],
    *,
    base_file: str,
    files: Sequence[str],
    config: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    spectra: Spectra = "auto",
    max_memory: int = 1 << 30,
    threads: int | None = None,
    verbose: bool = True,
    started: float | None = None,
) -> Analysis:
    """Analyze sources whose names and rows are in line."""
    started = time.perf_counter() if started is None else started
    if spectra not in ("auto", "all", "none"):
        raise RecipeError(f"spectra = {spectra!r}: must be auto, all or none")
    if not models:
        raise RecipeError("no models: name at least one to be compared with the base")
    sources = tuple(models.values())
    subjects, left_out = find_subjects(base, models)
    threads = _thread_count(base, sources, max_memory, threads)
    spare = max_memory // threads - workspace_bytes(base, sources)
    matrices = choose_matrices(subjects, spectra, spare)
    study, bytes_read = _look(base, sources, subjects, matrices, threads, verbose=verbose)
    return conclude(
        study,
        subjects,
        tuple(models),
        base_file=base_file,
        files=files,
        notes=tuple(notes),
        left_out=tuple(left_out),
        tied=_tied(base, config or {}),
        bytes_read=bytes_read,
        seconds=time.perf_counter() - started,
    )


def conclude(
    study: Study,
    subjects: Sequence[Subject],
    names: Sequence[str],
    *,
    base_file: str,
    files: Sequence[str],
    **more: Any,
) -> Analysis:
    """Make an analysis of what was measured; `more` are fields of it."""
    measured = [study.measured[subject.name] for subject in subjects]
    return Analysis(
        base=base_file,
        base_dtypes=_count_types(study.base.tensors.values()),
        models=tuple(
            _model(study, measured, number, name, file, study.base)
            for number, (name, file) in enumerate(zip(names, files, strict=True))
        ),
        pairs=tuple(_pair(measured, pair, names) for pair in pairs_of(range(len(names)))),
        together=_together(measured),
        **more,
    )


# ---------------------------------------------------------------- before the pass


def find_subjects(base: Source, models: Mapping[str, Source]) -> tuple[list[Subject], list[str]]:
    """The tensors that can be compared, with their models; and those that cannot, with reasons."""
    subjects, left_out = [], []
    for name, info in sorted(base.tensors.items()):
        holders = [
            (number, label, source.tensors[name])
            for number, (label, source) in enumerate(models.items())
            if name in source.tensors
        ]
        if not info.dtype.is_weight:
            if holders:
                left_out.append(f"{name}: {info.dtype.name} is no type of weights")
            continue
        fitting = [
            number
            for number, _, held in holders
            if held.shape == info.shape and held.dtype.is_weight
        ]
        left_out += [
            f"{name}: base is {_described(info)}, {label} is {_described(held)}"
            for number, label, held in holders
            if number not in fitting
        ]
        if fitting:
            subjects.append(Subject(info, kind_of(name), layer_of(name), tuple(fitting)))
    owners: dict[str, list[str]] = defaultdict(list)
    for label, source in models.items():
        for name in source.tensors.keys() - base.tensors.keys():
            owners[name].append(label)
    left_out += [
        f"{name}: in {', '.join(labels)}, not in the base"
        for name, labels in sorted(owners.items())
    ]
    if not subjects:
        reason = f": {left_out[0]}" if left_out else ""
        raise InputError(f"base and models have no weights in common{reason}")
    return subjects, left_out


def _described(info: TensorInfo) -> str:
    shape = "×".join(map(str, info.shape)) or "a scalar"
    return f"{shape} {info.dtype.name}"


def _thread_count(
    base: Source, models: Sequence[Source], max_memory: int, wanted: int | None
) -> int:
    per_thread = workspace_bytes(base, models)
    if per_thread > max_memory:
        raise RecipeError(
            f"max_memory = {max_memory}: one thread needs {per_thread} bytes; "
            f"allow at least {-(-per_thread // 1000) / 1000:.3f} MB"
        )
    return max(1, min(wanted or available_cores(), max_memory // per_thread))


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
        if len(subject.base.shape) == 2 and min(subject.base.shape) >= spectrum_costs.SMALLEST
    ]

    def cost(subject: Subject, *, whole: bool) -> float:
        return len(subject.models) * spectrum_costs.cost_of(subject.base.shape, whole=whole)

    def fits(subject: Subject) -> bool:
        return spectrum_costs.bytes_of(subject.base.shape) <= bytes_each

    if which == "all":
        return {subject.name: fits(subject) for subject in matrices}
    inner = [subject for subject in matrices if subject.kind not in OUTER] or matrices
    if not inner:
        return {}
    whole = sum(cost(subject, whole=True) for subject in inner)
    if whole <= spectrum_costs.WHOLE_COST and all(map(fits, inner)):
        return {subject.name: True for subject in inner}
    inner.sort(key=lambda subject: (subject.layer, subject.name))
    mean_cost = sum(cost(subject, whole=False) for subject in inner) / len(inner)
    count = min(len(inner), max(1, int(spectrum_costs.WINDOWS_COST / mean_cost)))
    places = [(2 * place + 1) * len(inner) // (2 * count) for place in range(count)]
    return {inner[place].name: False for place in places}


# ---------------------------------------------------------------- the pass


def _look(
    base: Source,
    models: Sequence[Source],
    subjects: Sequence[Subject],
    matrices: Mapping[str, bool],
    threads: int,
    *,
    verbose: bool,
) -> tuple[Study, int]:
    """Read everything once; return what was found, and how many bytes were read."""
    from dare.analysis.measure import kernels
    from dare.kernels.cpu import announcing

    bytes_read = 0
    counting = threading.Lock()
    with ExitStack() as stack:
        for source in (base, *models):
            stack.enter_context(source)
        stack.enter_context(one_blas_thread())
        stack.enter_context(announcing(lambda: display.announce(COMPILING)))

        def advance(nbytes: int) -> None:
            nonlocal bytes_read
            with counting:
                bytes_read += nbytes
            display.advance(nbytes)

        study = Study(base, models, kernels, advance)
        tasks = _tasks(study, subjects, matrices)
        total = sum(task.nbytes for task in tasks)
        display = stack.enter_context(show_progress(total, "analyzing", visible=verbose))
        run_tasks(tasks, lambda _stop: Worker(study), threads)
        for source in (base, *models):
            source.check_unchanged()
    return study, bytes_read


def _tasks(study: Study, subjects: Sequence[Subject], matrices: Mapping[str, bool]) -> list[Any]:
    """All tasks; a matrix's spectrum comes when its bytes have just been read."""
    tasks: list[Any] = []
    for subject in subjects:
        chunks = range(chunk_count(subject.elements))
        tasks += [MeasureChunk(study, subject, chunk) for chunk in chunks]
        if not chunks:
            tasks.append(MeasureEmpty(study, subject))
        if subject.name in matrices:
            whole = matrices[subject.name]
            tasks += [MeasureSpectrum(study, subject, model, whole) for model in subject.models]
    return tasks


# ---------------------------------------------------------------- after the pass


def _model(
    study: Study, measured: Sequence[Measured], number: int, name: str, file: str, base: Source
) -> ModelAnalysis:
    changed = [tensor for tensor in measured if number in tensor.sums]
    source = study.models[number]
    cells = _grouped(changed, lambda tensor: (tensor.subject.layer, tensor.subject.kind))
    sums = {cell: add_sums(t.sums[number] for t in tensors) for cell, tensors in cells.items()}

    def over(wanted: Callable[[tuple[int, Kind]], bool]) -> Statistics:
        chosen = [cell for cell in sums if wanted(cell)]
        magnitudes = (study.magnitudes.get((number, *cell), NONE) for cell in chosen)
        return statistics_of(add_sums(sums[cell] for cell in chosen), add_magnitudes(magnitudes))

    tensors = tuple(_tensor(study, tensor, number) for tensor in changed)
    origin, rank = find_origin(tensors)
    return ModelAnalysis(
        name=name,
        file=file,
        total=over(lambda _cell: True),
        by_kind={
            kind: over(lambda cell, kind=kind: cell[1] is kind)  # type: ignore[misc]
            for kind in Kind
            if any(own_kind is kind for _, own_kind in sums)
        },
        by_layer={
            layer: over(lambda cell, layer=layer: cell[0] == layer)  # type: ignore[misc]
            for layer in sorted({layer for layer, _ in sums})
        },
        cells=tuple(
            Cell(*cell, over(lambda other, cell=cell: other == cell))  # type: ignore[misc]
            for cell in sorted(sums)
        ),
        tensors=tensors,
        origin=origin,
        likely_rank=rank,
        missing=tuple(
            name
            for name, info in sorted(base.tensors.items())
            if info.dtype.is_weight and name not in source.tensors
        ),
        dtypes=_count_types(source.tensors[tensor.name] for tensor in tensors),
        is_adapter=source.is_partial,
    )


def _tensor(study: Study, measured: Measured, number: int) -> TensorAnalysis:
    subject = measured.subject
    return TensorAnalysis(
        subject.name,
        subject.kind,
        subject.layer,
        subject.base.shape,
        study.models[number].tensors[subject.name].dtype.name,
        measured.statistics[number],
        study.spectra.get((subject.name, number)),
    )


def find_origin(tensors: Sequence[TensorAnalysis]) -> tuple[Origin, int | None]:
    """How a model's delta was made, and the rank if by a LoRA, from the spectra there are."""
    if not any(tensor.statistics.norm or tensor.statistics.not_finite for tensor in tensors):
        return Origin.UNCHANGED, None
    seen = [tensor for tensor in tensors if tensor.spectrum is not None]
    inner = [tensor for tensor in seen if tensor.kind not in OUTER] or seen
    if not inner:
        return Origin.UNKNOWN, None
    low_ranks = [tensor.spectrum.low_rank for tensor in inner if tensor.spectrum is not None]
    ranks = [rank for rank in low_ranks if rank is not None]
    if len(ranks) >= NEARLY_ALL * len(low_ranks):
        return Origin.LORA, max(ranks)
    return Origin.FULL, None


def _pair(
    measured: Sequence[Measured], pair: tuple[int, int], names: Sequence[str]
) -> PairAnalysis:
    layers = _grouped(measured, lambda tensor: tensor.subject.layer)
    squares = add_sums(tensor.sums.get(pair[0], Sums()) for tensor in measured).powers[1]
    dot = sum(tensor.pairs.get(pair, PairSums()).dot for tensor in measured)
    return PairAnalysis(
        names[pair[0]],
        names[pair[1]],
        _overlap(measured, pair),
        {layer: _overlap(layers[layer], pair) for layer in sorted(layers)},
        dot / squares if squares else 0.0,
    )


def _overlap(measured: Sequence[Measured], pair: tuple[int, int]) -> Overlap:
    total = sum((tensor.pairs.get(pair, PairSums()) for tensor in measured), start=PairSums())
    norms = [
        math.sqrt(add_sums(tensor.sums.get(model, Sums()) for tensor in measured).powers[1])
        for model in pair
    ]
    length = norms[0] * norms[1]
    return Overlap(
        cosine=min(1.0, max(-1.0, total.dot / length)) if length else 0.0,
        agreeing=total.agreeing / total.both if total.both else 0.0,
        both=total.both,
        top_conflict=total.opposed_top / total.shared_top if total.shared_top else 0.0,
        top_overlap=2 * total.shared_top / total.tops if total.tops else 0.0,
    )


def _together(measured: Sequence[Measured]) -> Interference:
    def cancelled(tensors: Iterable[Measured]) -> float:
        apart = together = 0.0
        for tensor in tensors:
            apart += sum(sums.magnitude for sums in tensor.sums.values())
            together += tensor.summed_magnitude
        return max(0.0, 1 - together / apart) if apart else 0.0

    layers = _grouped(measured, lambda tensor: tensor.subject.layer)
    shared = sum(tensor.shared for tensor in measured)
    return Interference(
        cancelled(measured),
        sum(tensor.conflicted for tensor in measured) / shared if shared else 0.0,
        {layer: cancelled(layers[layer]) for layer in sorted(layers)},
    )


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


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
