"""The library's verbs: plan, merge, merge arrays. Each tells its story in a few lines.

All of them take what is asked for in any form: a recipe or where to load one from, tables, advice,
or keywords by the names that a recipe and the command line have.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dare.checks.inputs import check_chunks, check_inputs, is_suspect, with_base_among_models
from dare.checks.sample import SampledModels, sample_models
from dare.documents.notices import LEFTOVERS, Notice, notice
from dare.documents.progress import COMPILING, Display, Meter, show_progress
from dare.documents.words import times
from dare.errors import InputError, OutputError, RecipeError, VerificationError, warn_caller
from dare.inputs.arrays import Arrays, array_source, is_module, like_original, named_arrays
from dare.inputs.names import tie
from dare.inputs.opening import open_inputs
from dare.output.destinations import check_target, clear_leftovers, finished_before, open_output
from dare.output.journal import BusyError
from dare.output.manifest import (
    checked_metadata,
    embedded_manifest,
    find_manifest,
    fingerprint,
    full_manifest,
    inputs_of_output,
    metadata_of,
    repeating_document,
)
from dare.output.report import Digests, Report, make_report
from dare.output.sidecars import sidecar_files, with_sidecars
from dare.output.slices import FinishingOutput, GoneError, SliceOutput, SliceReport
from dare.output.targets import seal
from dare.output.writer import ArraySink, PartialOutput
from dare.planning.data import Layout
from dare.planning.make import make_plan
from dare.planning.plan import Plan, keep_rate
from dare.planning.slices import Division, Slice
from dare.recipe.document import overlaid
from dare.recipe.entries import OTHER_NAMES, read_toml, with_our_names
from dare.recipe.recipe import ModelEntry, Recipe
from dare.run.cluster import check_for_cluster, execute_on_cluster
from dare.run.execute import confirm_inputs, execute
from dare.run.slices import SharedObservations
from dare.stages import find_stage
from dare.stores.locations import to_path
from dare.tensors.chunks import chunk_span
from dare.tensors.header import TensorInfo

if TYPE_CHECKING:
    from dare.deltas.reports import Restoration

YAML_SUFFIXES = (".yaml", ".yml")  # endings of mergekit's configurations


def load_recipe(path: str | PathLike[str]) -> Recipe:
    """Read a recipe from a TOML file, or from a finished output, whose very inputs it demands."""
    return make_recipe(path)


def load_document(path: Path) -> dict[str, Any]:
    """Read the tables that `load_recipe` makes a recipe of, unchecked."""
    path = to_path(path)  # a command line makes a plain path of an address
    if path.suffix.lower() in YAML_SUFFIXES:
        from dare.inputs.opening import convert_yaml

        return convert_yaml(path).recipe.to_document()
    manifest_file = find_manifest(path)
    return read_toml(path) if manifest_file is None else repeating_document(path, manifest_file)


AnyPath = str | PathLike[str]


class HasRecipe(Protocol):
    """An advice, or another result that has the tables of a recipe."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The tables; empty if nothing is to be merged."""


AnyRecipe = Recipe | HasRecipe | Mapping[str, Any] | AnyPath
"""A recipe, its tables, the advice that has them, or where to load one from."""
AnyModels = AnyPath | Sequence[AnyPath | ModelEntry | Mapping[str, Any]]
"""One model or several; one that has settings is an entry or a table."""


def make_recipe(recipe: AnyRecipe | None = None, **settings: Any) -> Recipe:
    """Return a recipe from any form, with settings by name laid over it; None is no setting."""
    given = with_our_names({name: v for name, v in settings.items() if v is not None})
    if isinstance(given.get("base"), Mapping):
        raise RecipeError("base is a dict: arrays are merged by merge_arrays(base, models)")
    if isinstance(tables := getattr(recipe, "recipe", None), Mapping):
        if not tables:
            raise RecipeError("the advice is not to merge any of the models; print it to see why")
        recipe = tables
    if isinstance(recipe, Recipe):
        if not given:
            return recipe
        document, where = recipe.to_tables(), "recipe with arguments"
    elif recipe is None or isinstance(recipe, Mapping):
        document, where = copy.deepcopy(dict(recipe or {})), "recipe" if recipe else "arguments"
    elif not isinstance(recipe, str | PathLike):
        raise RecipeError(
            f"a recipe must be a file, a dict, a Recipe or an Advice, not {type(recipe).__name__}; "
            "advise(analysis) makes an Advice of an Analysis"
        )
    else:
        path = to_path(recipe)
        document, where = load_document(path), str(find_manifest(path) or path)
        where += " with arguments" if given else ""
    return overlaid(document, given, where)


def plan(
    recipe: AnyRecipe | None = None,
    *,
    base: AnyPath | None = None,
    models: AnyModels | None = None,
    output: AnyPath | None = None,
    method: str | None = None,
    backend: str = "cpu",
    fetches: bool = False,
    **settings: Any,
) -> Plan:
    """Read the headers and say what a merge would do, without reading or writing weights.

    What to merge is given as in `merge`. Models on the hub stay there, and a merge of the plan
    reads them from there, unless `fetches` is true: then they are fetched into the hub's cache
    first, as `merge` does it. `backend` says what will compute: `cpu`, or `reference`, which
    defines the results and is slow.
    """
    recipe = make_recipe(recipe, base=base, models=models, output=output, method=method, **settings)
    recipe, inputs = open_inputs(recipe, rescales=False, fetches=fetches)
    recipe = check_inputs(recipe, inputs.base, inputs.models, inputs_of_output)
    planned = make_plan(
        recipe, inputs.base, inputs.models, inputs.names, inputs.notes, backend=backend
    )
    return with_sidecars(planned, inputs)


def merge(
    recipe: AnyRecipe | Plan | None = None,
    *,
    base: AnyPath | None = None,
    models: AnyModels | None = None,
    output: AnyPath | None = None,
    method: str | None = None,
    overwrite: bool = False,
    resume: bool = True,
    backend: str = "cpu",
    **settings: Any,
) -> Report:
    """Merge models: write the merged one and say what was done.

    `merge(base="base", models=["math", "code"], output="merged", drop_rate=0.5)` is all that it
    takes. Settings are the fields of a `Recipe`, the parameters of stages (`drop_rate`, `t`, …),
    `weight` and `model_seed`: one value, or a list with one for each model. Or give a recipe, its
    tables, a file, an output to repeat, the advice of `advise` or a plan; settings change what it
    says, but a plan is complete.

    A merge that was interrupted resumes, unless `resume` is false. An existing output is only
    replaced with `overwrite`; an input never is. `backend` is as in `plan`; a plan has one already.
    """
    started = time.perf_counter()
    given = {"base": base, "models": models, "output": output, "method": method, **settings}
    planned = _planned(recipe, backend, given)
    is_local, verbose = planned.recipe.cluster is None, planned.recipe.verbose
    check_for_cluster(planned)
    layout, finished = _find_finished(planned, overwrite=overwrite, resume=resume)
    if finished is not None:
        return finished
    begun, announced = time.perf_counter(), list[str]()
    sample = _sample(planned)
    _final_documents(planned, layout, make_report(planned, ()))
    identity = _output_of(planned, layout)
    with (
        open_output(*identity, resume=resume, overwrite=overwrite) as partial,
        show_progress(planned.cost.bytes_read, "merging", visible=verbose) as display,
    ):
        noticed, meter = _accept_resumed(planned, partial, display)
        how: dict[str, Any] = {"done": partial.resumed, "progress": meter.advance}

        def announce(text: str = COMPILING) -> None:
            announced.append(text)
            display.announce(text)

        if is_local:
            records = execute(planned, partial, announce=announce, **how)
        else:
            records = execute_on_cluster(planned, partial, identity[1], announce=announce, **how)
        figures = time.perf_counter() - started, meter.bytes_read, len(partial.resumed)
        report = make_report(planned, records, sample, noticed, *figures)
        report = _publish(planned, partial, report, [*sample.notices, *noticed])
    if is_local and not (announced or partial.resumed):
        keep_rate(planned, time.perf_counter() - begun)
    return report


def _planned(
    recipe: AnyRecipe | Plan | None, backend: str, given: Mapping[str, Any] | None = None
) -> Plan:
    given = {name: value for name, value in (given or {}).items() if value is not None}
    if not isinstance(recipe, Plan):
        return plan(recipe, backend=backend, fetches=True, **given)
    if given:
        remedy = "give them to plan(…), or to merge(plan.recipe, …)"
        raise RecipeError(f"{', '.join(given)}: a plan is complete and takes no settings; {remedy}")
    return recipe


def merge_slice(
    recipe: AnyRecipe | Plan,
    slice: str,  # noqa: A002 (it is the word for it)
    *,
    overwrite: bool = False,
    wait: float = 600,
    backend: str = "cpu",
) -> SliceReport:
    """Do one part of a merge, such as `3/16`, the third of sixteen, counted from 1.

    Each part is for a process of its own, on any machine that shares the files. The last one that
    is done publishes the output and has its report. A slice that ranks the elements of whole models
    needs what the others find in their tensors: it waits for those that run, so many seconds if
    there is no news, and does the others' looking itself.
    """
    started = time.perf_counter()
    part = Slice.parse(slice)
    planned = _planned(recipe, backend)
    layout, finished = _find_shared(planned, overwrite=overwrite)
    if finished is not None:
        return SliceReport(slice, 0, 0, 0, 0.0, (), finished)
    sample = _sample(planned)
    _final_documents(planned, layout, make_report(planned, ()))
    noticed: list[Notice] = []
    done = _do_slice(planned, layout, part, noticed, overwrite=overwrite, wait=wait)
    report = None
    if not done.unfinished:
        # Another slice may have come as far at the same moment, and publishes it.
        with suppress(GoneError, BusyError):
            report = _finish(planned, layout, sample, noticed, overwrite=overwrite, wait=wait)
    return replace(done, seconds=time.perf_counter() - started, report=report)


def _do_slice(
    planned: Plan,
    layout: Layout,
    part: Slice,
    noticed: list[Notice],
    *,
    overwrite: bool,
    wait: float,
) -> SliceReport:
    """Make the chunks of a slice, and see which slices are not complete then."""
    division = Division(planned, part.of)
    share = division.share(part.number)
    total = planned.cost.bytes_read * division.nbytes(share) // division.total
    with (
        SliceOutput(part, share, *_output_of(planned, layout), overwrite=overwrite) as output,
        show_progress(total, f"slice {part}", visible=planned.recipe.verbose) as display,
    ):
        found, meter = _accept_resumed(planned, output, display)
        noticed += found
        identity = f"{fingerprint(planned)} {planned.stamps}"
        of = planned, part, division, output.folder, identity, wait
        known = SharedObservations(*of, meter.advance, display.announce).conclusions()
        how: dict[str, Any] = {"done": output.resumed, "progress": meter.advance, "known": known}
        execute(planned, output, announce=lambda: display.announce(COMPILING), share=share, **how)
        output.end(meter.bytes_read)
    chunks, resumed = sum(map(len, share.values())), len(output.resumed)
    return SliceReport(str(part), chunks, resumed, meter.bytes_read, 0.0, output.unfinished(), None)


def finish(recipe: AnyRecipe | Plan, *, overwrite: bool = False, backend: str = "cpu") -> Report:
    """Publish an output whose slices are all done; raise OutputError if something is missing."""
    planned = _planned(recipe, backend)
    layout, finished = _find_shared(planned, overwrite=overwrite)
    return finished or _finish(planned, layout, _sample(planned), [], overwrite=overwrite)


def _finish(
    planned: Plan,
    layout: Layout,
    sample: SampledModels,
    noticed: list[Notice],
    *,
    overwrite: bool,
    wait: float = 0,
) -> Report:
    with (
        FinishingOutput(*_output_of(planned, layout), overwrite=overwrite, wait=wait) as output,
        show_progress(0, "finishing", visible=planned.recipe.verbose) as display,
    ):
        noticed = [*noticed, *_accept_resumed(planned, output, display)[0]]
        output.check_complete(planned)
        output.adopt()
        figures = output.seconds, output.bytes_read, output.resumed_chunks
        report = make_report(planned, output.resumed, sample, noticed, *figures)
        return _publish(planned, output, report, [*sample.notices, *noticed])


def _find_shared(planned: Plan, *, overwrite: bool) -> tuple[Layout, Report | None]:
    """Do the same for an output that slices can write to."""
    if planned.recipe.cluster is not None:
        cluster = planned.recipe.cluster
        raise RecipeError(f'cluster = "{cluster}": slices run without one; leave it out')
    if planned.layout is not None and planned.layout.is_sent:
        remedy = "merge without --slice, or copy the output there afterwards"
        raise OutputError(f"{planned.layout.target}: slices cannot write to a store; {remedy}")
    return _find_finished(planned, overwrite=overwrite, resume=True)


def _find_finished(planned: Plan, *, overwrite: bool, resume: bool) -> tuple[Layout, Report | None]:
    """Return the layout, and the report if this very merge was completed before."""
    layout, finished = checked_layout(planned, overwrite=overwrite, resume=resume)
    if finished is not None:
        clear_leftovers(layout)
    return layout, finished


def _output_of(planned: Plan, layout: Layout) -> tuple[Layout, dict[str, str], str, str]:
    """Return the arguments of an output: layout, metadata, fingerprint and stamps."""
    metadata = metadata_of(embedded_manifest(planned))
    return layout, metadata, fingerprint(planned), planned.stamps


def _accept_resumed(
    planned: Plan, output: PartialOutput, display: Display
) -> tuple[list[Notice], Meter]:
    """Take over an earlier try, as far as it was made of these inputs; say what is not used."""
    noticed = []
    output.announce = display.announce
    if output.started_over:
        noticed.append(notice(LEFTOVERS, str(output.folder), what=output.started_over))
        _warn(planned.recipe, noticed)
    confirm_inputs(planned, output, display)
    suspects = [r for r in output.resumed if is_suspect(r.models, r.exceptions)]
    check_chunks(planned, [(r.tensor, r.chunk, r.exceptions[1]) for r in suspects])
    elements = {tensor.name: tensor.elements for tensor in planned.tensors}
    done = sum(chunk_span(r.chunk, elements[r.tensor])[1] for r in output.resumed)
    meter = Meter(display)
    display.advance(planned.cost.bytes_read * done // max(sum(elements.values()), 1))
    return noticed, meter


def _publish(
    planned: Plan, output: PartialOutput, report: Report, noticed: Collection[Notice]
) -> Report:
    """Put the last files beside the weights, give the output its name, show the new warnings."""
    check_digests(planned, report.digests)
    sidecars, metadata, manifest = _final_documents(planned, output.layout, report)
    output.add_files(sidecars)
    problems = output.finish(metadata, manifest)
    target = output.layout.target
    late = [notice(LEFTOVERS, what=f"{target} is complete, but {fault}") for fault in problems]
    shown = {*planned.warnings, *noticed}
    _warn(planned.recipe, [*(n for n in report.warnings if n not in shown), *late])
    return replace(report, warnings=(*report.warnings, *late))


def _finished_before(planned: Plan, layout: Layout) -> Report | None:
    """Return the report of this very merge, if it was complete when its process died."""
    found = finished_before(layout)
    if found is None or found.fingerprint != fingerprint(planned):
        return None
    if {stamps for stamps, _ in found.records.values()} - {planned.stamps}:
        return None  # whether the inputs are still the same is not known
    records = [record for _, record in found.records.values()]
    target = str(planned.recipe.output)
    noticed = [notice(LEFTOVERS, target, what="Already complete; removed temporary files")]
    return make_report(planned, records, sample_models(planned), noticed, 0.0, 0, len(records))


def _final_documents(
    planned: Plan, layout: Layout, report: Report
) -> tuple[dict[str, bytes | Path], dict[str, dict[str, str]], dict[str, Any]]:
    """Return the files beside the weights, the headers' metadata and the manifest.

    They are also made of an empty report before a merge, so that nothing fails at the end.
    """
    embedded = embedded_manifest(planned, report.digests)
    manifest = full_manifest(planned, report, embedded)
    seal(manifest, {})
    report.to_json()
    return sidecar_files(planned, report), checked_metadata(layout, embedded), manifest


def checked_layout(planned: Plan, *, overwrite: bool, resume: bool) -> tuple[Layout, Report | None]:
    """Refuse an output that is not named, is an input, or exists and is not this merge's own.

    Return its layout, and the report if this very merge was completed before.
    """
    if planned.layout is None:
        raise RecipeError("output is missing: add --output PATH, or output = PATH in the recipe")
    finished = _finished_before(planned, planned.layout) if resume else None
    if finished is None:
        clear_leftovers(planned.layout)
        check_target(planned.layout, planned.input_files, overwrite=overwrite)
    return planned.layout, finished


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
    from dare.deltas.restoring import open_delta, restore

    file = open_delta(delta)
    if file.notes.scheme == "lossless":
        flags = {"overwrite": overwrite, "resume": resume, "verbose": verbose}
        return restore(base, file, to_path(output), **flags, **settings)
    notes = file.notes
    entry = ModelEntry(file=delta, seed=notes.seed)
    method, stages = find_stage(adds_up=True).name, {}
    if notes.scheme == "random":
        dropping = find_stage(keeps="random").name
        method = f"{dropping}+{method}"
        if {tensor.drop_rate for tensor in notes.tensors.values()} == {notes.drop_rate}:
            stages = {dropping: {"drop_rate": notes.drop_rate}}
    recipe = Recipe(
        base=base,
        models=[entry],
        output=output,
        method=method,
        stages=stages,
        copy_from=entry.name if any(f.kind != "header" for f in notes.files.values()) else None,
        verbose=verbose,
        **settings,
    )
    return merge(recipe, overwrite=overwrite, resume=resume)


def merge_arrays(
    base: Arrays,
    models: Sequence[Arrays],
    *,
    weights: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    model_settings: Sequence[Mapping[str, Any]] | None = None,
    backend: str = "cpu",
    **settings: Any,
) -> tuple[dict[str, Any], Report]:
    """Merge dicts of NumPy arrays or torch tensors; the result is of the base's kind.

    A torch module stands for its `state_dict()`; the result is a dict all the same. Other byte
    orders are converted; arrays that are not dense, such as sparse tensors, are refused.

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
        raise RecipeError("models must be a list of dicts, also if there is one: [model]")
    for name in settings.keys() & {"output", *OTHER_NAMES["output"]}:
        raise RecipeError(f"{name}: arrays are returned, not written; leave it out")
    names = [f"model {index}" for index in range(len(models))]
    originals = named_arrays(base, "base")
    recipe = _array_recipe(names, weights, seeds, model_settings, settings)
    if any(model is base for model in models):
        recipe = with_base_among_models(recipe)
    sources = [array_source(model, name) for model, name in zip(models, names, strict=True)]
    tied, tuned, notes = tie(array_source(originals, "base"), sources, names)
    planned = make_plan(recipe, tied, tuned, names, notes, backend=backend)
    sample = _sample(planned)
    written = [TensorInfo(t.name, t.dtype, t.shape, 0) for t in planned.tensors]
    sink = ArraySink(written)
    records = execute(planned, sink)
    seconds = time.perf_counter() - started
    report = make_report(planned, records, sample, (), seconds, planned.cost.bytes_read, 0)
    shown = {*planned.warnings, *sample.notices}
    _warn(recipe, [notice for notice in report.warnings if notice not in shown])
    merged = {
        info.name: like_original(originals[info.name], info, sink.arrays[info.name])
        for info in written
    }
    return {name: merged[name] for name in originals}, report


def _array_recipe(
    names: list[str],
    weights: Sequence[float] | None,
    seeds: Sequence[int] | None,
    model_settings: Sequence[Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
) -> Recipe:
    per_model = {"weights": weights, "seeds": seeds, "model_settings": model_settings}
    for word, given in per_model.items():
        if given is not None and len(given) != len(names):
            raise RecipeError(f"{word}: {len(given)} given for {times(len(names), 'model')}")
    listed = {"weight": weights, "model_seed": seeds}
    lists = {name: list(values) for name, values in listed.items() if values is not None}
    for name in lists.keys() & settings.keys():
        raise RecipeError(f"{name} is given twice; leave one of them out")
    recipe = make_recipe({"base": "base", "models": names}, **settings, **lists)
    if model_settings is None:
        return recipe
    entries = [
        entry.model_copy(update={"settings": {**entry.settings, **parameters}})
        for entry, parameters in zip(recipe.models, model_settings, strict=True)
    ]
    return recipe.model_copy(update={"models": entries})


def _sample(planned: Plan) -> SampledModels:
    """Sample the weights; refuse what is not finite, and warn of what was noticed."""
    sample = sample_models(planned)
    check_chunks(planned, [(t.name, n, 0) for t in sample.not_finite for n in range(t.chunks)])
    _warn(planned.recipe, [*planned.warnings, *sample.notices])
    return sample


def _warn(recipe: Recipe, notices: Sequence[Notice]) -> None:
    if recipe.verbose:
        for notice in dict.fromkeys(notices):
            warn_caller(str(notice))


def check_digests(planned: Plan, digests: Digests) -> None:
    """A delta file is for one base, and a recipe from a manifest for those inputs and no others."""
    recipe = planned.recipe
    found = (digests.base, *digests.models)
    files = (recipe.base, *(entry.file for entry in recipe.models))
    for model, entry in zip(planned.models, recipe.models, strict=True):
        for name in model.tensors.keys() & digests.base_tensors.keys():
            if model.delta_of(name).base_digest not in (None, digests.base_tensors[name]):
                differs = f"{name} differs from the one in {recipe.base}; give the base it is for"
                raise InputError(f"{entry.file}: is a delta file for another base: {differs}")
    for file, expected, digest in zip(files, recipe.input_digests or (), found, strict=False):
        if digest != expected:
            raise InputError(
                f"{file}: is not what it was when the manifest was written "
                f"(digest {digest}, then {expected}); to merge it all the same, write the recipe "
                "out with `dare init --config` and take input_digests out of it"
            )
    if recipe.output_digest not in (None, digests.output):
        raise VerificationError(
            f"{recipe.output}: the merge gives other weights than its manifest says (digest "
            f"{digests.output}, then {recipe.output_digest}); the manifest was edited, or "
            "written by another version. Nothing was written"
        )
