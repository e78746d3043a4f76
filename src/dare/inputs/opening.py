"""From the paths in a recipe to sources that fit together.

Names from the hub become folders; every form of model becomes a source; names and rows of the
models are brought in line with the base's. `FORMS` lists the forms. Each is a module here with a
subclass of `dare.inputs.sources.Source`, which computes its tensors as they are read: any range
of a tensor, from any thread, and the same bytes whatever the range.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.documents.notices import Notice, notice
from dare.errors import InputError, MismatchError, RecipeError
from dare.inputs.names import Config, compare_meanings, find_tied, match_names, tie
from dare.inputs.shards import components_of
from dare.inputs.sources import (
    TIED,
    Aligned,
    ExtendedSource,
    Opening,
    Source,
    extras_of,
    read_config,
)
from dare.recipe.layers import mean_value
from dare.recipe.options import DEFAULT_MEMORY, USUAL, RunOptions
from dare.recipe.recipe import Recipe
from dare.recipe.settings import with_files
from dare.stores.locations import is_here, is_stored, to_path
from dare.tensors.dtypes import CODE_TYPES, STORAGE_TYPES
from dare.tensors.files import begins_with, is_directory, list_names
from dare.tensors.names import quantised_kind, row_rank

if TYPE_CHECKING:
    from dare.recipe.mergekit import Conversion


def _has_pickles_only(opening: Opening) -> bool:
    names = list_names(opening.path) if is_directory(opening.path) else []
    has_pickles = not {"pytorch_model.bin", "pytorch_model.bin.index.json"}.isdisjoint(names)
    return has_pickles and not any(name.endswith(".safetensors") for name in names)


def _may_be_quantised(opening: Opening) -> bool:
    config, tensors = str(opening.config), opening.stored.tensors
    return (
        any(word in config for word in ("quantization", "compression_config"))
        or any(info.dtype.name in CODE_TYPES for info in tensors.values())
        or any(map(quantised_kind, tensors))
    )


# Names in LoRA files of diffusion models, which have no other names.
_OF_LORA = re.compile(
    r"[._]lora(_linear_layer)?[._]|\.(alpha|dora_scale|diff|diff_b|on_input)$|\.(hada|lokr|oft)_"
)


def _is_left_by_trainer(opening: Opening) -> bool:
    names = list_names(opening.path) if is_directory(opening.path) else [opening.path.name]
    if any(re.fullmatch(r".*\.(safetensors|gguf)|.*model.*\.bin", name) for name in names):
        return False
    from dare.inputs.checkpoints import SIGNS

    return any(map(SIGNS.fullmatch, names))


# The forms of models, each with its sign; the first that fits is taken. A form is a module of this
# folder, imported only when a model has this form; its function `open_form` opens the model.
FORMS: dict[str, Callable[[Opening], bool]] = {
    "lora": lambda opening: (opening.path / "adapter_config.json").is_file(),
    "gguf": lambda opening: opening.path.suffix == ".gguf" or begins_with(opening.path, b"GGUF"),
    "checkpoints": _is_left_by_trainer,
    "torch_bin": lambda opening: (
        opening.path.suffix in (".bin", ".pt", ".pth", ".ckpt") or _has_pickles_only(opening)
    ),
    "lora_files": lambda opening: (
        bool(opening.stored.tensors) and all(map(_OF_LORA.search, opening.stored.tensors))
    ),
    "delta_files": lambda opening: opening.stored.has_note("dare.delta"),
    "quantised": _may_be_quantised,
    "sources": lambda _: True,
}
NEED_BASE = ("lora_files", "delta_files")  # forms that may not open without their base


def form_of(opening: Opening) -> str:
    """Return the form of a model, by the signs in `FORMS`."""
    return next(form for form, fits in FORMS.items() if fits(opening))


def open_model(path: Path, **given: Any) -> Source:
    """Read the headers of a model of any form; `given` are further fields of `Opening`.

    An adapter is read by the configuration of its base, if that is known, and a delta file needs
    its base; it is rescaled for its dropped elements unless `rescales` is false.
    """
    return _open(Opening(path, **given))


def _open(opening: Opening) -> Source:
    if opening.made is not None:
        return opening.made
    opened: Source = import_module(f"dare.inputs.{form_of(opening)}").open_form(opening)
    return opened


def convert_yaml(path: str | PathLike[str]) -> Conversion:
    """Read a mergekit configuration as a recipe, which has no output yet; say how they differ."""
    from dare.recipe.mergekit import convert

    return convert(to_path(path), lambda model: open_model(model).tensors)


@dataclass(frozen=True)
class Inputs:
    """Base and models, opened and in line with each other."""

    names: tuple[str, ...]
    folders: tuple[Path | None, ...]  # of the base and each model, if they have any
    aligned: Aligned
    notes: tuple[Notice, ...]
    config: Mapping[str, Any] = field(default_factory=dict)  # changes to the output's config.json

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
    keeps_scales: bool = False,
    merges: Mapping[str, Source] | None = None,
) -> tuple[Recipe, Inputs]:
    """Open the files of a recipe; also return the recipe with the commits of those from the hub.

    Names on the hub are fetched unless `fetches` is false, or they are addresses. Unless `rescales`
    is false, delta files are rescaled for their dropped elements as they are read. `keeps_scales`
    shows the base's scales of activations, which an output in the base's format needs. `merges` are
    the results of the recipe's merges, which `dare.run.nested` opens.
    """
    if merges is None and (recipe.layers or recipe.merges):
        raise RecipeError("only a merge takes [[layers]] and [merges]; write its output first")
    names = recipe.names
    given = [recipe.base, *(entry.file for entry in recipe.models)]
    made = [(merges or {}).get(str(path)) for path in given]
    if options.require_signed:
        from dare.inputs.signatures import require_covered, require_signatures

        own = [path for path, merge in zip(given, made, strict=True) if merge is None]
        covered = require_signatures(own, options.require_signed)
    for path in given if recipe.output_digest is not None and not any(made) else ():
        if not is_on_hub(path) and not path.exists():
            raise InputError(
                f"{path}: is missing, and it was there when this was merged; if the inputs have "
                "moved, give their paths with --base and --models (their digests are checked)"
            )
    _check_local([p for p, m in zip(given, made, strict=True) if m is None], recipe.allow_pickle)
    resolved = [
        _find(path, verbose=options.verbose, fetches=fetches) if merge is None else (path, path)
        for path, merge in zip(given, made, strict=True)
    ]
    paths = [path for path, _ in resolved]
    pinned = [path for _, path in resolved]
    if pinned != given:
        recipe = with_files(recipe, pinned[0], pinned[1:], recipe.output)
    # at most a quarter of the memory is for reading ahead of stores
    in_stores = sum(is_stored(path) for path in paths)
    ahead = (options.max_memory or DEFAULT_MEMORY) // 4 // max(1, in_stores)
    homes = [p if m is None else m.folder or p for p, m in zip(paths, made, strict=True)]
    first, *others = (
        Opening(path, recipe.allow_pickle, rescales=rescales, most_ahead_bytes=ahead, made=merge)
        for path, merge in zip(homes, made, strict=True)
    )
    base = _open(replace(first, keeps_scales=keeps_scales or recipe.format == "input"))
    if base.is_partial:
        raise InputError(f"{recipe.base}: is an adapter; the base must be a whole model")
    others = [replace(other, base=base, base_config=first.config) for other in others]
    models = [_open(other) for other in others]
    if options.require_signed:
        read = [s.files for s, m in zip((base, *models), made, strict=True) if m is None]
        require_covered(chain.from_iterable(read), covered)
    folders = [source.folder for source in (base, *models)]
    configs = [first.config, *(_config_of(o, f) for o, f in zip(others, folders[1:], strict=True))]
    both = zip((base, *models), configs, strict=True)
    configs = [config if s.tied is None else {**config, TIED: s.tied} for s, config in both]
    notes = [
        replace(remark, subjects=(name, *remark.subjects))
        for name, source in zip(("base", *names), (base, *models), strict=True)
        for remark in source.remarks
    ]
    for name, config in zip(names, configs[1:], strict=True):
        if found := compare_meanings(configs[0], config):
            keys, said = {"keys": float(len(found))}, ", ".join(found)
            notes.append(notice("other_configuration", name, figures=keys, differences=said))
    base, models, more = _in_line(recipe, base, models, homes[0], configs)
    aligned = align_rows(recipe, base, models, folders)
    aligned = replace(aligned, base=take_extras(recipe, aligned.base, aligned.models, names))
    if aligned.token_ids and (moved := [n for n in aligned.base.extras if row_rank(n) is not None]):
        what = "has a row for each token, and the models' tokens differ"
        raise MismatchError(f'{moved[0]}: {what}; set on_extra = "drop"')
    aligned.base.tied = find_tied(base, configs[0])
    return recipe, Inputs(tuple(names), tuple(folders), aligned, (*notes, *more, *aligned.notes))


def _in_line(
    recipe: Recipe, base: Source, models: list[Source], path: Path, configs: Sequence[Config]
) -> tuple[Source, list[Source], list[Notice]]:
    """Bring names and layouts of the models in line with those of the base at a path; say how."""
    names, notes = recipe.names, list[Notice]()
    for place, (name, config) in enumerate(zip(names, configs[1:], strict=True)):
        if config or configs[0] or models[place].tensors.keys() != base.tensors.keys():
            known = {"base_config": configs[0], "model_config": config}
            models[place], remarks = match_names(base, models[place], name, **known)
            notes += remarks
        if _shapes(models[place]) != _shapes(base):
            from dare.inputs.layouts import in_layout_of

            models[place], remarks = in_layout_of(base, models[place], name, path, configs[0])
            notes += remarks
    is_partial = any(model.is_partial for model in models)
    if is_partial or any(configs) or sum(row_rank(n) is not None for n in base.tensors) > 1:
        base, (*models,), tied = tie(base, models, names, configs)
        notes += tied
    if is_partial:
        from dare.inputs.lora import bind_base

        for model in models:
            bind_base(model)
    if base.folder is not None and components_of(base.folder):
        from dare.inputs.pipeline import leave_components

        models, left = leave_components(recipe, base, models, names)
        notes += left
    return base, models, notes


def align_rows(
    recipe: Recipe, base: Source, models: Sequence[Source], folders: Sequence[Path | None]
) -> Aligned:
    """Bring the rows of embeddings into one order, as the recipe says, if they are not yet."""
    aligned = Aligned(base, tuple(models))
    if not _may_differ_in_rows(recipe, aligned, folders):
        return aligned
    from dare.inputs.vocabulary import align

    return align(
        recipe.vocabulary_of,
        base,
        models,
        directories=folders,
        names=recipe.names,
        weights=[mean_value(w) if isinstance(w, list) else w for w in recipe.weights()],
        new_rows=recipe.new_rows,
        pad_to_multiple_of=recipe.pad_to_multiple_of,
        chosen=recipe.token_rows,
    )


def take_extras(
    recipe: Recipe, base: Source, models: Sequence[Source], names: Sequence[str]
) -> Source:
    """Give the base the tensors that only models have, if the recipe asks for that."""
    extras = extras_of(base, models) if recipe.on_extra in ("average", "first") else {}
    for tensor, owners in extras.items():
        first, *others = (models[number].tensors[tensor] for number in owners)
        if any(models[number].delta_of(tensor).is_change for number in owners):
            whose = ", ".join(names[number] for number in owners)
            what = f"is stored as a change in {whose}, and the base lacks it"
            raise MismatchError(f'{tensor}: {what}; set on_extra = "drop"')
        unlike = not first.dtype.is_weight or any(o.shape != first.shape for o in others)
        if recipe.on_extra == "average" and others and unlike:
            forms = ", ".join(f"{names[n]} {models[n].tensors[tensor].described}" for n in owners)
            what = f"cannot be averaged ({forms})"
            raise MismatchError(f'{tensor}: {what}; set on_extra = "first"')
    if recipe.on_extra == "first":
        extras = {tensor: owners[:1] for tensor, owners in extras.items()}
    kind = None if recipe.dtype is None else STORAGE_TYPES["F32"]  # rounded once, at the end
    return ExtendedSource(base, models, extras, kind) if extras else base


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in source.tensors.items()}


def _config_of(opening: Opening, folder: Path | None) -> Mapping[str, Any]:
    """Return the configuration of a model; a delta file has it inside, not beside it."""
    if opening.made is not None or form_of(opening) != "delta_files":
        return opening.config
    return {} if folder is None else read_config(folder)


def _check_local(paths: Sequence[Path], allow_pickle: bool) -> None:
    """Check the models on this machine before others are fetched from the hub."""
    for path in paths if any(map(is_on_hub, paths)) else ():
        if is_on_hub(path) or is_stored(path):
            continue
        opening = Opening(path, allow_pickle)
        if (form := form_of(opening)) == "lora":
            from dare.inputs.lora import check_folder

            check_folder(opening)
        elif form not in NEED_BASE:
            _open(opening)


def is_on_hub(path: Path) -> bool:
    """Return whether a model comes from the hub; refuse a mistyped path."""
    if is_here(path):
        return False
    from dare.inputs.hub import find_name

    return find_name(path) is not None


def _find(path: Path, *, verbose: bool, fetches: bool) -> tuple[Path, Path]:
    """Return the path of a model, and the path that will identify the very same model later."""
    if is_here(path):
        return path, path
    from dare.inputs.hub import resolve

    resolved = resolve(path, verbose=verbose, fetches=fetches)
    return resolved.path, resolved.pinned


def _may_differ_in_rows(recipe: Recipe, opened: Aligned, folders: Sequence[Path | None]) -> bool:
    """Return whether rows of embeddings may have to move; without them no tokenizer is read."""
    may_choose = bool(recipe.tokens) or isinstance(recipe.vocabulary_of, int)
    if recipe.vocabulary == "error" and recipe.on_mismatch == "base" and not may_choose:
        return False  # if rows do not fit, the base's stay
    base, *models = (
        {name: info.shape for name, info in source.tensors.items() if row_rank(name) is not None}
        for source in (opened.base, *opened.models)
    )
    is_plain = recipe.pad_to_multiple_of is None and all(folder is None for folder in folders)
    is_same = is_plain and all(model == base for model in models)
    return bool(base) and (may_choose or not is_same)
