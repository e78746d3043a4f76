"""The library's functions: plan, merge, merge arrays, in a few lines each.

All of them take what is asked for in any form: a recipe or where to load one from, tables, advice,
or keywords by the names that a recipe and the command line have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack

from dare.checks.inputs import with_base_among_models
from dare.documents.shown import Progress, progress_to
from dare.documents.words import counted
from dare.errors import DareError, RecipeError
from dare.inputs.arrays import Arrays, array_source, is_module, named_arrays, room_like
from dare.inputs.names import tie
from dare.inputs.opening import Inputs, convert_yaml, is_on_hub, take_extras
from dare.inputs.sources import Aligned
from dare.kernels import check_is_there
from dare.output.memory import MemorySink, find_homes
from dare.output.receipt import Report, find_manifest, make_report, repeating_document
from dare.output.targets import refuse_existing
from dare.planning.plan import Plan
from dare.recipe.entries import OTHER_NAMES, read_toml, with_our_names
from dare.recipe.recipe import ModelEntry, Recipe, Request, TensorRule
from dare.recipe.settings import request_with_settings
from dare.run.engine import execute, run, warn
from dare.run.merging import Merge, take_sample
from dare.run.nested import plan_inputs, plan_request
from dare.run.slices import SliceReport, run_finish, run_slice
from dare.stores.locations import AnyPath, is_stored, to_path
from dare.tensors.header import TensorInfo

if TYPE_CHECKING:
    from dare.deltas.restoring import Restoration

YAML_SUFFIXES = (".yaml", ".yml")  # endings of mergekit's configurations


def load_recipe(path: str | PathLike[str]) -> Request:
    """Read a recipe, and how to run it, from a TOML file or a finished output.

    One from an output demands the very inputs that it was made of.
    """
    return make_request(path)


def load_document(path: Path, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the tables that `load_recipe` makes a recipe of, unchecked.

    Given are settings by name that will be laid over them.
    """
    path = to_path(path)  # a command line makes a plain path of an address
    if is_stored(path) and path.scheme == "hf":
        from dare.inputs.hub import resolve

        path = resolve(path, verbose=False).path
    if path.suffix.lower() in YAML_SUFFIXES:
        return convert_yaml(path).recipe.to_document()
    found = find_manifest(path)
    return read_toml(path) if found is None else repeating_document(path, found, given or {})


class HasRecipe(Protocol):
    """A request, an advice, or another result that has a recipe or its tables."""

    @property
    def recipe(self) -> Recipe | Mapping[str, Any]:
        """The recipe; empty tables if nothing is to be merged."""


Written = Mapping[str, Any] | AnyPath  # the tables of a recipe, or where to load it from
AnyRecipe = Recipe | HasRecipe | Written
# One model or several; one that has settings is an entry or a table.
AnyModels = AnyPath | Sequence[AnyPath | ModelEntry | Mapping[str, Any]]

Numbers = float | Sequence[float]  # one for all models, or one for each
Words = str | Sequence[str]


class RunSettings(TypedDict, total=False):
    """How a merge is run: the fields of `RunOptions`."""

    verbose: bool
    max_memory: int | str | None
    threads: int | None
    cluster: str | None
    scratch: AnyPath | None
    device: str | None
    max_gpu_memory: int | str | None
    require_signed: AnyPath | Sequence[AnyPath]


class StageSettings(TypedDict, total=False):
    """Parameters of stages, as `dare methods` explains them; of your own by `stages`."""

    drop_rate: Numbers
    keep_ratio: Numbers
    rescale: bool | str | Sequence[bool | str]
    agree: int
    alpha: Numbers
    boost: float
    choose: Words
    common_share: float
    divide_by: Literal["weights", "signed", "count", "nothing"]
    drop_largest: Numbers
    each: Literal["tensor", "row", "column"]
    embeddings: Words
    epsilon: Numbers
    keep_middle: Numbers
    m: int | Sequence[int]
    max_ratio: float
    max_variance: Numbers
    most: float
    n: int | Sequence[int]
    normalize: bool
    on: Literal["deltas", "weights"]
    per: Words
    q: Numbers
    radius: Numbers
    rank_share: float
    scope: Words
    score_ratio: float
    select_ratio: float
    selectivity: float
    singular_share: Numbers
    t: float
    threshold: float
    time: float
    turn: int | Sequence[int]
    variant: Literal["c", "cts"]
    vote: str  # sum or count
    weighted: bool
    window: Numbers


class Settings(RunSettings, StageSettings, total=False):
    """All that may be set by name beside files and method: also the fields of a `Recipe`."""

    weight: Numbers
    model_seed: int | Sequence[int]
    seed: int
    scale: float
    dtype: str | None
    format: Literal["input", "dcp"] | None
    embedding_drop_rate: float | None
    stages: Mapping[str, Mapping[str, Any]]
    tensors: Sequence[TensorRule | Mapping[str, Any]]
    merges: Mapping[str, Recipe | Mapping[str, Any]]
    layers: Sequence[Mapping[str, Any]]
    gathered: AnyPath | None
    on_missing: Literal["error", "base"]
    on_extra: Literal["error", "drop", "average", "first"]
    on_mismatch: Literal["error", "base"]
    on_integer_mismatch: Literal["error", "base"]
    vocabulary: str
    tokens: Mapping[str, Any]
    new_rows: Literal["mean", "merge", "merge_all"]
    pad_to_multiple_of: int | None
    copy_from: str | None
    chat_template: str
    allow_pickle: bool
    allow_not_finite: bool
    delta_threshold: float
    shard_size: int | str | None
    input_digests: Sequence[str] | None
    output_digest: str | None
    search: Mapping[str, Any] | None


def make_request(recipe: AnyRecipe | None = None, **settings: Any) -> Request:
    """Return a request from any form, with settings by name laid over it; None is no setting."""
    given = with_our_names({name: v for name, v in settings.items() if v is not None})
    if isinstance(given.get("base"), Mapping):
        raise RecipeError("base is a dict: arrays are merged by merge_arrays(base, models)")
    if isinstance(tables := getattr(recipe, "recipe", None), Mapping):
        if not tables:
            raise RecipeError("the advice is not to merge any of the models; print it to see why")
        recipe = tables
    if isinstance(recipe, Recipe):
        recipe = Request(recipe)
    if isinstance(recipe, Request):
        if not given:
            return recipe
        document, where = recipe.to_tables(), "recipe with arguments"
    elif recipe is None or isinstance(recipe, Mapping):
        document, where = dict(recipe or {}), "recipe" if recipe else "arguments"
    elif not isinstance(recipe, str | PathLike):
        raise RecipeError(
            f"a recipe must be a file, a dict, a Recipe or an Advice, not {type(recipe).__name__}; "
            "advise(analysis) makes an Advice of an Analysis"
        )
    else:
        path = to_path(recipe)
        document = load_document(path, given)
        where = str(path if is_stored(path) else find_manifest(path) or path)
        where += " with arguments" if given else ""
    return request_with_settings(document, given, where)


def plan(
    recipe: AnyRecipe | None = None,
    *,
    base: AnyPath | None = None,
    models: AnyModels | None = None,
    output: AnyPath | None = None,
    method: str | None = None,
    fetches: bool = False,
    **settings: Unpack[Settings],
) -> Plan:
    """Read the headers and say what a merge would do, without reading or writing weights.

    What to merge is given as in `merge`. Models on the hub stay there, and a merge of the plan
    reads them from there, unless `fetches` is true: then they are fetched into the hub's cache
    first, as `merge` does it.
    """
    files = {"base": base, "models": models, "output": output}
    request = make_request(recipe, **files, method=method, **settings)
    return plan_request(request, fetches=fetches)


def merge(
    recipe: AnyRecipe | Plan | None = None,
    *,
    base: AnyPath | None = None,
    models: AnyModels | None = None,
    output: AnyPath | None = None,
    method: str | None = None,
    overwrite: bool = False,
    resume: bool = True,
    measured: str = "",
    scores: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
    **settings: Unpack[Settings],
) -> Report:
    """Merge models: write the merged one and say what was done.

    `merge(base="base", models=["math", "code"], output="merged", drop_rate=0.5)` is all that it
    takes. Settings are the fields of a `Recipe` and of `RunOptions`, the parameters of stages
    (`drop_rate`, `t`, …), `weight` and `model_seed`: one value, or a list with one for each model.
    Or give a recipe, its tables, a file, an output to repeat, the advice of `advise` or a plan;
    settings change what it says, but a plan is complete.

    A merge that was interrupted resumes, unless `resume` is false. An existing output is only
    replaced with `overwrite`; an input never is. The model card has `measured`, which is Markdown,
    and `scores`, the results of a `model-index` but for their task; a `SearchResult` has both.
    `progress(bytes_done, bytes_in_all)` is called while weights are read, in place of a bar.
    """
    if progress is not None and not callable(progress):
        raise RecipeError(f"progress = {progress!r}: must be a function of two numbers")
    files = {"base": base, "models": models, "output": output}
    planned = plan_to_run(recipe, overwrite=overwrite, **files, method=method, **settings)
    planned = replace(planned, measured=measured, scores=tuple(scores))
    with progress_to(progress):
        return run(Merge(planned), overwrite=overwrite, resume=resume)


def plan_to_run(
    recipe: AnyRecipe | Plan | None, *, overwrite: bool = True, **settings: Any
) -> Plan:
    """Return a plan whose models are fetched; before that, an output in the way is refused."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(recipe, Plan):
        request = make_request(recipe, **given)
        asked = request.recipe
        files = {asked.base, *(entry.file for entry in asked.models)} - set(map(Path, asked.merges))
        if not overwrite and any(map(is_on_hub, files)):
            refuse_existing(asked.output)
        return plan(request, fetches=True)
    if given:
        remedy = "give them to plan(…)"
        raise RecipeError(f"{', '.join(given)}: a plan is complete and takes no settings; {remedy}")
    return recipe


def merge_slice(
    recipe: AnyRecipe | Plan,
    slice: str,  # noqa: A002 (it is the word for it)
    *,
    overwrite: bool = False,
    wait: float = 600,
    device: str | None = None,
) -> SliceReport:
    """Do one part of a merge, such as `3/16`, the third of sixteen, counted from 1.

    Each part is for a process of its own, on any machine that shares the files. The last one that
    is done publishes the output and has its report; it waits at most so many seconds for others
    that are about to end.
    """
    return run_slice(plan_to_run(recipe, device=device), slice, overwrite=overwrite, wait=wait)


def finish(
    recipe: AnyRecipe | Plan, *, overwrite: bool = False, device: str | None = None
) -> Report:
    """Publish an output whose slices are all done; raise OutputError if something is missing."""
    return run_finish(plan_to_run(recipe, device=device), overwrite=overwrite)


def apply_delta(
    base: str | PathLike[str],
    delta: str | PathLike[str],
    output: str | PathLike[str],
    *,
    overwrite: bool = False,
    resume: bool = True,
    verbose: bool = True,
    **settings: Any,
) -> Report | Restoration:
    """Make a model of a delta file and its base.

    A lossless file gives the model's own files again. Any other gives what merging that one model
    by `dare+sum` (or `trim+sum`) would, with its drop rate and seed; settings are those of a
    `Recipe`.
    """
    from dare.deltas.restoring import open_delta, request_for, restore

    file = open_delta(delta)
    settings |= {"base": base, "output": output, "verbose": verbose}
    if file.notes.scheme == "lossless":
        return restore(file, overwrite=overwrite, resume=resume, **settings)
    request = request_for(file, delta, **settings)
    return merge(request, overwrite=overwrite, resume=resume)


def merge_arrays(
    base: Arrays,
    models: Sequence[Arrays],
    *,
    weights: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    model_settings: Sequence[Mapping[str, Any]] | None = None,
    method: str | None = None,
    **settings: Unpack[Settings],
) -> tuple[dict[str, Any], Report]:
    """Merge dicts of NumPy arrays or torch tensors; the result is of the base's kind.

    A torch module stands for its `state_dict()`; the result is a dict all the same. Other byte
    orders are converted; arrays that are not dense, such as sparse tensors, are refused.

    Tensors of one NVIDIA GPU are merged where they are, into tensors there, if all of them can be;
    this takes the extra `gpu`. With `device="cuda"` the processor merges the rest. Give arrays of
    CuPy or JAX as `torch.from_dlpack(array)`; `cupy.from_dlpack(tensor)` leads back.

    Settings are as in `merge`. Weights, seeds and parameters of delta stages (`model_settings`) can
    also be given as lists, one for each model. Rules call the models "model 0", "model 1", ….

    >>> import numpy as np
    >>> base = {"w": np.zeros(4, np.float32)}
    >>> tuned = {"w": np.array([1, 2, 3, 4], np.float32)}
    >>> merge_arrays(base, [tuned], method="sum", scale=0.5, verbose=False)[0]["w"]
    array([0.5, 1. , 1.5, 2. ], dtype=float32)
    >>> merge_arrays(base, [tuned], drop_rate=0.5, seed=0, verbose=False)[0]["w"]
    array([0., 0., 0., 8.], dtype=float32)
    """
    started = time.perf_counter()
    if isinstance(models, Mapping) or is_module(models):
        raise RecipeError("models must be a list of dicts, even for only one: [model]")
    for name in settings.keys() & {"output", *OTHER_NAMES["output"]}:
        raise RecipeError(f"{name}: arrays are returned, not written; leave it out")
    if settings.get("require_signed"):
        raise RecipeError("require_signed: arrays have no signatures; merge files")
    names, originals = [f"model {n}" for n in range(len(models))], named_arrays(base, "base")
    request = _array_request(names, weights, seeds, model_settings, {"method": method, **settings})
    recipe = request.recipe
    if any(model is base for model in models):
        recipe = with_base_among_models(recipe)
    sources = [array_source(model, name) for model, name in zip(models, names, strict=True)]
    tied, tuned, notes = tie(array_source(originals, "base"), sources, names)
    aligned = Aligned(take_extras(recipe, tied, tuned, names), tuned)
    inputs = Inputs(tuple(names), (None,) * (1 + len(names)), aligned, notes)
    planned = _where_inputs_are(plan_inputs(recipe, inputs, request.options))
    sample = take_sample(planned)
    kin = {**originals, **dict.fromkeys(planned.base.extras, next(iter(originals.values()), None))}
    written = {t.name: TensorInfo(t.name, t.dtype, t.shape, 0) for t in planned.tensors}
    merged = {name: room_like(original, written[name]) for name, original in kin.items()}
    homes = find_homes(planned, merged, {name: name for name in merged})
    records = execute(planned, MemorySink(homes))
    seconds = time.perf_counter() - started
    report = make_report(planned, records, sample, (), seconds, planned.cost.bytes_read, 0)
    shown = {*planned.warnings, *sample.notices}
    warn(planned, [notice for notice in report.warnings if notice not in shown])
    return merged, report


def _where_inputs_are(plan: Plan) -> Plan:
    """Return the plan for the GPU that the base is on; by default only if it merges everything."""
    kind, there = plan.device, filter(None, map(plan.base.on_gpu, plan.base.tensors))
    if kind not in ("auto", "cuda") or (first := next(there, None)) is None:
        return plan
    moved = replace(plan, options=plan.options.changed(device=f"{kind}:{first.gpu}"))
    if kind == "auto" and not moved.cost.is_all_on_gpu:
        return plan
    with suppress(DareError):  # the processor merges what this GPU cannot
        check_is_there(moved.device)
        moved.cost.check()
        return moved
    return plan


def _array_request(
    names: list[str],
    weights: Sequence[float] | None,
    seeds: Sequence[int] | None,
    model_settings: Sequence[Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
) -> Request:
    per_model = {"weights": weights, "seeds": seeds, "model_settings": model_settings}
    for word, given in per_model.items():
        if given is not None and len(given) != len(names):
            raise RecipeError(f"{word}: {len(given)} given for {counted(len(names), 'model')}")
    listed = {"weight": weights, "model_seed": seeds}
    lists = {name: list(values) for name, values in listed.items() if values is not None}
    for name in lists.keys() & settings.keys():
        raise RecipeError(f"{name} is given twice; leave one of them out")
    request = make_request({"base": "base", "models": names}, **settings, **lists)
    if model_settings is None:
        return request
    entries = [
        entry.changed(settings={**entry.settings, **parameters})
        for entry, parameters in zip(request.recipe.models, model_settings, strict=True)
    ]
    return replace(request, recipe=request.recipe.changed(models=entries))
