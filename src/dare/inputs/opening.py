"""From the paths in a recipe to sources that fit together.

Names from the hub become directories; every form of model becomes a source; names and rows of the
models are brought in line with the base's. Each form is a module with a subclass of
`dare.inputs.sources.Source`, which computes what it presents as it is read: any range of a tensor,
from any thread, the same bytes whatever the range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.documents.notices import Notice
from dare.errors import InputError
from dare.inputs import gguf, lora, torch_bin
from dare.inputs.delta_files import DeltaFile, DeltaSource, is_delta_file
from dare.inputs.directory import read_config
from dare.inputs.hub import resolve
from dare.inputs.loaded import under_stored_names
from dare.inputs.names import match_names, tie
from dare.inputs.quantised import read_quantised
from dare.inputs.sources import Source, open_source
from dare.inputs.vocabulary import Aligned, align
from dare.recipe.entries import distinct
from dare.recipe.layers import mean_value
from dare.recipe.options import DEFAULT_MEMORY, USUAL, RunOptions
from dare.recipe.recipe import Recipe
from dare.stores.locations import parse_name, to_path

if TYPE_CHECKING:
    from dare.recipe.mergekit import Conversion


def open_model(
    path: Path,
    *,
    allow_pickle: bool = False,
    base_config: Mapping[str, Any] | None = None,
    base: Source | None = None,
    rescales: bool = True,
) -> Source:
    """Read the headers of a model, whatever form it has.

    An adapter is read by the configuration of its base, where that is known, and a delta file
    needs its base; its dropped elements are made up for unless `rescales` is false.
    """
    if lora.looks_like(path):
        return lora.open_adapter(path, base_config)
    if gguf.looks_like(path):
        return gguf.GgufSource(path)
    if not torch_bin.looks_like(path):
        source = open_source(path)
        if not is_delta_file(source):
            return read_quantised(source, read_config(path))
        if base is None:
            raise InputError(f"{path}: is a delta file; first run `dare apply BASE DELTA -o OUT`")
        return DeltaSource(DeltaFile(source), base, rescales=rescales)
    if not allow_pickle:
        raise InputError(
            f"{path}: stores its weights as a pickle, which can contain programs; save it as "
            "safetensors, or set allow_pickle = true (--allow-pickle)"
        )
    return read_quantised(torch_bin.TorchSource(path), read_config(path))


def convert_yaml(path: str | PathLike[str]) -> Conversion:
    """Read a mergekit configuration as a recipe, which has no output yet; say how they differ."""
    from dare.recipe.mergekit import convert

    return convert(to_path(path), lambda model: open_model(model).tensors)


@dataclass(frozen=True)
class Inputs:
    """Base and models, opened and in line with each other."""

    names: tuple[str, ...]
    folders: tuple[Path | None, ...]  # of the base and each model, if they are in some
    aligned: Aligned
    notes: tuple[Notice, ...]

    @property
    def base(self) -> Source:
        """The base, with the rows of the output."""
        return self.aligned.base

    @property
    def models(self) -> tuple[Source, ...]:
        """The models, with the base's names and the rows of the output."""
        return self.aligned.models


def open_inputs(
    recipe: Recipe,
    options: RunOptions = USUAL,
    *,
    rescales: bool = True,
    fetches: bool = True,
) -> tuple[Recipe, Inputs]:
    """Open the files of a recipe; also return the recipe with the commits of those from the hub.

    Names on the hub are fetched unless `fetches` is false, or they are addresses. Unless `rescales`
    is false, the dropped elements of delta files are made up for as they are read.
    """
    names = distinct([entry.name for entry in recipe.models])
    given = [recipe.base, *(entry.file for entry in recipe.models)]
    for path in given if recipe.output_digest is not None else ():
        is_on_hub = parse_name(path.as_posix()) is not None or str(path).startswith("hf://")
        if not is_on_hub and not path.exists():
            raise InputError(
                f"{path}: is missing, and it was there when this was merged; if the inputs have "
                "moved, give their paths with --base and --models (their digests are checked)"
            )
    places = [resolve(path, verbose=options.verbose, fetches=fetches) for path in given]
    if any(place.commit is not None for place in places):
        pinned_base, *pinned = (place.pinned for place in places)
        recipe = recipe.with_files(pinned_base, pinned, recipe.output)
    paths = [place.path for place in places]
    configs = [read_config(path) for path in paths]
    allow_pickle = recipe.allow_pickle
    base = open_model(paths[0], allow_pickle=allow_pickle, base_config=configs[0])
    if base.is_partial:
        raise InputError(f"{recipe.base}: is an adapter; the base must be a whole model")
    open_tuned = partial(open_model, base_config=configs[0], base=base, rescales=rescales)
    models = [open_tuned(path, allow_pickle=allow_pickle) for path in paths[1:]]
    in_stores = [source for source in (base, *models) if source.ahead_bytes]
    for source in in_stores:  # no more than a quarter of the memory is for what they read ahead
        source.limit_ahead((options.max_memory or DEFAULT_MEMORY) // 4 // len(in_stores))
    folders = [path if path.is_dir() else None for path in paths]
    for place, model in enumerate(models, start=1):
        if isinstance(model, DeltaSource):
            found = folders[place] = model.folder(folders[0])
            configs[place] = {} if found is None else read_config(found)
    notes = [
        replace(remark, subjects=(name, *remark.subjects))
        for name, source in zip(("base", *names), (base, *models), strict=True)
        for remark in source.remarks
    ]
    matched = [
        match_names(base, model, name, base_config=configs[0], model_config=config)
        for model, name, config in zip(models, names, configs[1:], strict=True)
    ]
    notes += [note for _, found in matched for note in found]
    models = [under_stored_names(model, base, paths[0], configs[0]) for model, _ in matched]
    base, (*models,), tied = tie(base, models, names, configs)
    notes += tied
    if recipe.vocabulary == "error" and recipe.on_mismatch == "base":
        aligned = Aligned(base, tuple(models))  # rows that do not fit stay the base's
    else:
        aligned = align(
            recipe.vocabulary,
            base,
            models,
            directories=folders,
            names=names,
            weights=[mean_value(w) if isinstance(w, list) else w for w in recipe.weights()],
            pad_to_multiple_of=recipe.pad_to_multiple_of,
        )
    return recipe, Inputs(tuple(names), tuple(folders), aligned, (*notes, *aligned.notes))
