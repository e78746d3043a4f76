"""The library's verbs: plan, merge, merge arrays. Each tells its story in a few lines."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from dare.analysis.glance import glance
from dare.arrays import array_source, like_original
from dare.card import NAME as CARD_NAME
from dare.card import model_card
from dare.chunks import chunk_span
from dare.errors import Concern, DareWarning, InputError, Notice, RecipeError, did_you_mean
from dare.formats import open_model, read_config
from dare.gradients import mean_value
from dare.hub import Resolved, resolve
from dare.io.digest import bytes_digest
from dare.io.header import TensorInfo
from dare.io.layout import Layout
from dare.io.writer import ArraySink, PartialOutput, Record, check_target
from dare.manifest import (
    FORMAT,
    checked_metadata,
    embedded_manifest,
    find_manifest,
    full_manifest,
    metadata_of,
    read_manifest,
)
from dare.mask import MASK_VERSION
from dare.matching import match_names
from dare.mergekit import looks_like_yaml, recipe_from_yaml
from dare.planning import Plan, make_plan
from dare.progress import show_progress
from dare.recipe import ModelEntry, Recipe, read_toml, recipe_from_document
from dare.report import Report, make_report
from dare.run import execute
from dare.sidecars import (
    Changes,
    choose_chat_template,
    collect,
    directory_of,
    main_type,
    write_into,
)
from dare.vocabulary import Aligned, align

COMPILING = "compiling kernels (once; a few seconds)"


def load_recipe(path: str | PathLike[str]) -> Recipe:
    """Read a recipe from a TOML file, or from the manifest of a finished merge.

    A finished output stands for its manifest; its recipe demands the very same inputs.
    """
    path = Path(path)
    return recipe_from_document(load_document(path), str(find_manifest(path) or path))


def load_document(path: Path) -> dict[str, Any]:
    """Read the tables that `load_recipe` makes a recipe of, unchecked."""
    if looks_like_yaml(path):
        return recipe_from_yaml(path).to_document()
    manifest_file = find_manifest(path)
    if manifest_file is None:
        return read_toml(path)
    if path != manifest_file and not manifest_file.exists():
        raise InputError(
            f"{path}: is no recipe, and was not made by dare (there is no {manifest_file}); "
            "models are given with --base and --merge"
        )
    manifest = read_manifest(manifest_file)
    for key, ours in (("format", FORMAT), ("mask", MASK_VERSION)):
        if manifest.get(key) != ours:
            raise InputError(
                f"{manifest_file}: its {key} is {manifest.get(key)!r}, and this version of dare "
                f"repeats only {ours!r}; use the version that wrote it ({_writer(manifest)})"
            )
    try:
        digests = [manifest["base"], *(model["digest"] for model in manifest["models"])]
        return {**manifest["recipe"], "input_digests": digests}
    except KeyError as error:
        raise InputError(f"{manifest_file}: the manifest is damaged: it has no {error}") from None
    except TypeError as error:
        raise InputError(f"{manifest_file}: the manifest is damaged: {error}") from None


def _writer(manifest: dict[str, Any]) -> str:
    versions = manifest.get("versions")
    return f"dare {versions.get('dare')}" if isinstance(versions, dict) else "unknown"


AnyRecipe = Recipe | str | PathLike[str]
"""A recipe, or where to load one from."""


def plan(recipe: AnyRecipe) -> Plan:
    """Read the headers and say what a merge would do, without reading or writing weights."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    names = _distinct([entry.name for entry in recipe.models])
    places = [resolve(path, verbose=recipe.verbose) for path in _paths(recipe)]
    recipe = _pinned(recipe, places)
    found = _open_all(recipe, [place.path for place in places], names)
    planned = make_plan(recipe, found.base, found.models, names, notes=found.notes)
    return _with_sidecars(planned, found)


def _paths(recipe: Recipe) -> list[Path]:
    """Where base and models are said to be, the base first."""
    return [recipe.base, *(entry.file for entry in recipe.models)]


def _pinned(recipe: Recipe, places: Sequence[Resolved]) -> Recipe:
    """The recipe with the commit of every model that came from the hub."""
    entries = tuple(
        entry.model_copy(update={"file": place.pinned})
        for entry, place in zip(recipe.models, places[1:], strict=True)
    )
    return recipe.model_copy(update={"base": places[0].pinned, "models": entries})


def _open_all(recipe: Recipe, paths: Sequence[Path], names: Sequence[str]) -> Aligned:
    """Open base and models, and bring names and rows of the models in line with the base's."""
    base_config, *model_configs = map(read_config, paths)
    base, *models = (
        open_model(path, allow_pickle=recipe.allow_pickle, base_config=base_config)
        for path in paths
    )
    if base.is_partial:
        raise InputError(f"{recipe.base}: is an adapter, and a base must be a whole model")
    matched = [
        match_names(base, model, name, base_config=base_config, model_config=model_config)
        for model, name, model_config in zip(models, names, model_configs, strict=True)
    ]
    aligned = Aligned(base, tuple(model.source for model in matched))
    folders = tuple(map(directory_of, paths))
    if recipe.vocabulary != "error" or recipe.on_mismatch != "base":
        aligned = align(
            recipe.vocabulary,
            base,
            aligned.models,
            directories=folders,
            names=names,
            weights=[mean_value(weight) for weight in recipe.weights()],
            pad_to_multiple_of=recipe.pad_to_multiple_of,
        )
    opened = zip(("base", *names), (base, *models), strict=True)
    notes = [f"{name}: {remark}" for name, source in opened for remark in source.remarks]
    notes += [note for model in matched for note in model.notes]
    return replace(aligned, notes=(*notes, *aligned.notes), folders=folders)


def _with_sidecars(planned: Plan, aligned: Aligned) -> Plan:
    """Find what goes beside the weights, if the output is a directory."""
    recipe, names, folders = planned.recipe, list(planned.model_names), aligned.folders
    chosen = 0
    if recipe.copy_from is not None:
        if recipe.copy_from not in names:
            raise RecipeError(
                f"copy_from = {recipe.copy_from!r}: there is no such model"
                f"{did_you_mean(recipe.copy_from, names)}; there are {', '.join(names)}"
            )
        chosen = 1 + names.index(recipe.copy_from)
    home = folders[chosen]
    if planned.layout is None or not planned.layout.is_directory or home is None:
        return planned
    tokenizer = (folders[0] if aligned.keeps_base_tokenizer else None) or home
    template, notes = choose_chat_template(
        recipe.chat_template, tokenizer, dict(zip(names, folders[1:], strict=True))
    )
    changes = Changes(
        dtype=main_type(t for tensors in planned.layout.files.values() for t in tensors),
        vocab_size=aligned.resized(chosen),
        dequantised=True,
        token_ids=aligned.token_ids[chosen - 1] if chosen and aligned.token_ids else None,
        chat_template=template,
    )
    found = collect(home, changes, tokenizer=tokenizer, replaced=aligned.tokenizer_files)
    return replace(
        planned,
        notes=(*planned.notes, *found.notes, *notes),
        sidecars=found,
        base_folder=folders[0],
    )


def merge(
    recipe: AnyRecipe | Plan, *, overwrite: bool = False, resume: bool = True, backend: str = "cpu"
) -> Report:
    """Carry out a recipe or a plan: write the merged model and say what was done.

    A merge that was interrupted goes on where it stopped, unless `resume` is false. An existing
    output is only replaced with `overwrite`; an input never is.
    """
    started = time.perf_counter()
    planned = recipe if isinstance(recipe, Plan) else plan(recipe)
    recipe = planned.recipe
    layout = checked_layout(planned, overwrite=overwrite)
    noticed = glance(planned)
    _warn(recipe, [*planned.warnings, *noticed])

    bytes_read = 0
    counting = threading.Lock()
    metadata = metadata_of(embedded_manifest(planned))
    with (
        PartialOutput(layout, metadata, _fingerprint(planned), resume=resume) as output,
        show_progress(planned.bytes_read, "merging", visible=recipe.verbose) as display,
    ):
        if output.started_over:
            text = f"{output.folder}: was left by another merge, and is not used"
            noticed.append(Notice(Concern.OTHER_PARTIAL, text))
            _warn(recipe, noticed[-1:])

        def advance(nbytes: int) -> None:
            nonlocal bytes_read
            with counting:
                bytes_read += nbytes
            display.advance(nbytes)

        display.advance(_bytes_taken_over(planned, output.resumed))
        records = execute(
            planned,
            output,
            backend=backend,
            done=output.resumed,
            progress=advance,
            announce=lambda: display.announce(COMPILING),
        )
        report = make_report(
            planned,
            records,
            seconds=time.perf_counter() - started,
            bytes_read=bytes_read,
            resumed_chunks=len(output.resumed),
            noticed=noticed,
        )
        _check_inputs(recipe, report)
        digests = report.digests
        embedded = embedded_manifest(planned, digests.base, digests.models, digests.output)
        beside = json.dumps(full_manifest(planned, report, embedded), indent=1)
        if planned.sidecars is not None:
            card = model_card(planned, report, planned.base_folder)
            write_into(output.folder, {**planned.sidecars.files, CARD_NAME: card})
        output.finish(
            checked_metadata(layout, embedded),
            beside.encode() + b"\n",
            overwrite=overwrite,
        )
    _warn(recipe, report.warnings[len(planned.warnings) + len(noticed) :])
    return report


def checked_layout(planned: Plan, *, overwrite: bool) -> Layout:
    """Refuse an output that is missing from the recipe, an input, or there already."""
    if planned.layout is None:
        raise RecipeError("output is missing: say where the merged model shall go")
    inputs = [file for source in (planned.base, *planned.models) for file in source.files]
    check_target(planned.layout, inputs, overwrite=overwrite)
    return planned.layout


def merge_arrays(
    base: Mapping[str, Any],
    models: Sequence[Mapping[str, Any]],
    *,
    weights: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    backend: str = "cpu",
    **settings: Any,
) -> tuple[dict[str, Any], Report]:
    """Merge dicts of NumPy arrays or torch tensors; the result is of the base's kind.

    Weights and seeds are one for each model; settings are those of a `Recipe`.

    >>> import numpy as np
    >>> base = {"w": np.zeros(4, np.float32)}
    >>> tuned = {"w": np.array([1, 2, 3, 4], np.float32)}
    >>> merge_arrays(base, [tuned], method="sum", scale=0.5, verbose=False)[0]["w"]
    array([0.5, 1. , 1.5, 2. ], dtype=float32)
    """
    started = time.perf_counter()
    names = [f"model {index}" for index in range(len(models))]
    for word, given in (("weights", weights), ("seeds", seeds)):
        if given is not None and len(given) != len(models):
            raise RecipeError(f"{word}: {len(given)} given for {len(models)} models")
    unset = [None] * len(models)
    entries = [
        ModelEntry(file=name, weight=weight, seed=seed)
        for name, weight, seed in zip(names, weights or unset, seeds or unset, strict=True)
    ]
    recipe = Recipe(base="base", models=entries, **settings)
    sources = [array_source(model, name) for model, name in zip(models, names, strict=True)]
    planned = make_plan(recipe, array_source(base, "base"), sources, names)
    _warn(recipe, planned.warnings)
    written = [TensorInfo(t.name, t.dtype, t.shape, 0) for t in planned.tensors]
    sink = ArraySink(written)
    records = execute(planned, sink, backend=backend)
    report = make_report(
        planned,
        records,
        seconds=time.perf_counter() - started,
        bytes_read=planned.bytes_read,
        resumed_chunks=0,
    )
    _warn(recipe, report.warnings[len(planned.warnings) :])
    merged = {
        info.name: like_original(base[info.name], info, sink.arrays[info.name]) for info in written
    }
    return {name: merged[name] for name in base}, report


def _warn(recipe: Recipe, notices: Sequence[Notice]) -> None:
    if recipe.verbose:
        for notice in notices:
            warnings.warn(notice.text, DareWarning, stacklevel=3)


def _bytes_taken_over(planned: Plan, resumed: Sequence[Record]) -> int:
    """What an interrupted run has read already, as far as the progress bar is concerned."""
    elements = {tensor.name: tensor.elements for tensor in planned.tensors}
    done = sum(chunk_span(record["chunk"], elements[record["tensor"]])[1] for record in resumed)
    return planned.bytes_read * done // max(sum(elements.values()), 1)


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once."""
    return [
        f"{name} ({index + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _fingerprint(planned: Plan) -> str:
    """What must be the same for the chunks of an earlier try to be of use."""
    described = [
        embedded_manifest(planned),
        [source.fingerprint() for source in (planned.base, *planned.models)],
        [[t.name, t.fate, t.dtype.name, t.models] for t in planned.tensors],
        list(planned.layout.files) if planned.layout else [],
        planned.recipe.delta_threshold,
    ]
    return bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())


def _check_inputs(recipe: Recipe, report: Report) -> None:
    """A recipe from a manifest is for those inputs and no others."""
    if recipe.input_digests is None:
        return
    found = (report.digests.base, *report.digests.models)
    files = (recipe.base, *(entry.file for entry in recipe.models))
    for file, expected, digest in zip(files, recipe.input_digests, found, strict=True):
        if digest != expected:
            raise InputError(
                f"{file}: is not what it was when the manifest was written "
                f"(digest {digest}, then {expected}); to merge it all the same, write the recipe "
                "out with `dare init --config` and take input_digests out of it"
            )
