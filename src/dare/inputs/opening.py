"""From the paths in a recipe to sources that fit together.

Names from the hub become directories; every form of model becomes a source; names and rows of the
models are brought in line with the base's. `FORMS` lists the forms. Each is a module here with a
subclass of `dare.inputs.sources.Source`, which computes what it presents as it is read: any range
of a tensor, from any thread, the same bytes whatever the range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.documents.notices import Notice
from dare.errors import InputError
from dare.inputs.names import match_names, tie
from dare.inputs.sources import Aligned, Opening, Source, read_config
from dare.recipe.entries import distinct
from dare.recipe.layers import mean_value
from dare.recipe.options import DEFAULT_MEMORY, USUAL, RunOptions
from dare.recipe.recipe import Recipe
from dare.stores.locations import is_here, is_stored, parse_name, to_path
from dare.tensors.dtypes import CODE_TYPES
from dare.tensors.files import begins_with
from dare.tensors.names import quantised_kind, row_rank

if TYPE_CHECKING:
    from dare.recipe.mergekit import Conversion


def _has_pickles_only(opening: Opening) -> bool:
    has_safetensors = any(name.endswith(".safetensors") for name in opening.names)
    pickles = {"pytorch_model.bin", "pytorch_model.bin.index.json"}
    return bool(opening.names & pickles) and not has_safetensors


def _may_be_quantised(opening: Opening) -> bool:
    config, tensors = str(opening.config), opening.stored.tensors
    return (
        any(word in config for word in ("quantization", "compression_config"))
        or any(info.dtype.name in CODE_TYPES for info in tensors.values())
        or any(map(quantised_kind, tensors))
    )


# The forms of models, each with the sign it is known by; the first that fits is taken. A form is a
# module of this folder, imported only when a model has it, whose `open_form` opens one.
FORMS: dict[str, Callable[[Opening], bool]] = {
    "lora": lambda opening: (opening.path / "adapter_config.json").is_file(),
    "gguf": lambda opening: opening.path.suffix == ".gguf" or begins_with(opening.path, b"GGUF"),
    "torch_bin": lambda opening: (
        opening.path.suffix in (".bin", ".pt", ".pth", ".ckpt") or _has_pickles_only(opening)
    ),
    "delta_files": lambda opening: opening.stored.has_note("dare.delta"),
    "quantised": _may_be_quantised,
    "sources": lambda _: True,
}


def form_of(opening: Opening) -> str:
    """Return the form of a model, by the cheapest sign."""
    return next(form for form, fits in FORMS.items() if fits(opening))


def open_model(path: Path, **given: Any) -> Source:
    """Read the headers of a model, whatever form it has; `Opening` says what may be given.

    An adapter is read by the configuration of its base, where that is known, and a delta file
    needs its base; its dropped elements are made up for unless `rescales` is false.
    """
    return _open(Opening(path, **given))


def _open(opening: Opening) -> Source:
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
    folders: tuple[Path | None, ...]  # of the base and each model, if they are in some
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
    found = [_find(path, verbose=options.verbose, fetches=fetches) for path in given]
    if any(pinned != path for (_, pinned), path in zip(found, given, strict=True)):
        pinned_base, *pinned = (path for _, path in found)
        recipe = recipe.with_files(pinned_base, pinned, recipe.output)
    paths = [path for path, _ in found]
    # no more than a quarter of the memory is for what is read ahead of stores
    in_stores = sum(is_stored(path) for path in paths)
    most_ahead = (options.max_memory or DEFAULT_MEMORY) // 4 // max(1, in_stores)
    first, *others = (
        Opening(path, recipe.allow_pickle, rescales=rescales, most_ahead_bytes=most_ahead)
        for path in paths
    )
    base = _open(first)
    if base.is_partial:
        raise InputError(f"{recipe.base}: is an adapter; the base must be a whole model")
    others = [replace(other, base=base, base_config=first.config) for other in others]
    models = [_open(other) for other in others]
    folders = [source.folder for source in (base, *models)]
    configs = [first.config, *(_config_of(o, f) for o, f in zip(others, folders[1:], strict=True))]
    notes = [
        replace(remark, subjects=(name, *remark.subjects))
        for name, source in zip(("base", *names), (base, *models), strict=True)
        for remark in source.remarks
    ]
    for place, (name, config) in enumerate(zip(names, configs[1:], strict=True)):
        if config or configs[0] or models[place].tensors.keys() != base.tensors.keys():
            models[place], remarks = match_names(
                base, models[place], name, base_config=configs[0], model_config=config
            )
            notes += remarks
        if models[place].is_partial:
            from dare.inputs.loaded import under_stored_names

            models[place] = under_stored_names(models[place], base, paths[0], configs[0])
    is_partial = any(model.is_partial for model in models)
    if is_partial or any(configs) or sum(row_rank(n) is not None for n in base.tensors) > 1:
        base, (*models,), tied = tie(base, models, names, configs)
        notes += tied
    aligned = Aligned(base, tuple(models))
    if _may_differ_in_rows(recipe, aligned, folders):
        from dare.inputs.vocabulary import align

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


def _config_of(opening: Opening, folder: Path | None) -> Mapping[str, Any]:
    """Return the configuration of a model; a delta file has it inside, not beside it."""
    if form_of(opening) != "delta_files":
        return opening.config
    return {} if folder is None else read_config(folder)


def _find(path: Path, *, verbose: bool, fetches: bool) -> tuple[Path, Path]:
    """Return the path of a model, and the path that stands for the very same model later."""
    if is_here(path):
        return path, path
    from dare.inputs.hub import resolve

    found = resolve(path, verbose=verbose, fetches=fetches)
    return found.path, found.pinned


def _may_differ_in_rows(recipe: Recipe, opened: Aligned, folders: Sequence[Path | None]) -> bool:
    """Return whether rows of embeddings may have to move; without them no tokenizer is read."""
    if recipe.vocabulary == "error" and recipe.on_mismatch == "base":
        return False  # rows that do not fit stay the base's
    base, *models = (
        {name: info.shape for name, info in source.tensors.items() if row_rank(name) is not None}
        for source in (opened.base, *opened.models)
    )
    is_plain = recipe.pad_to_multiple_of is None and all(folder is None for folder in folders)
    return bool(base) and not (is_plain and all(model == base for model in models))
