"""Models that are in a merge by mistake: the base, the same file again, an earlier output of it.

A pattern such as `*.safetensors` catches them all. Files are known by device and inode, so that a
link is known for what it leads to. Whoever means it says so: a model with a weight, a seed or
parameters of its own is taken as it is. The base belongs there only in an interpolation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from dare.errors import DareError, RecipeError
from dare.inputs.sources import Source
from dare.output.manifest import output_of, read_manifest
from dare.output.places import found
from dare.output.targets import MANIFEST_NAME, manifest_path
from dare.recipe.document import recipe_from_document
from dare.recipe.naming import written_models
from dare.recipe.schema import ModelEntry, Recipe
from dare.recipe.toml import write_value
from dare.stores.locations import StorePath

Identity = tuple[int, int] | str
SHORT_LIST = 6
"""Up to so many models are written out in a message."""


def check_inputs(recipe: Recipe, base: Source, models: Sequence[Source]) -> Recipe:
    """Refuse a model that is the base, another model of the recipe, or a merge of these.

    Where models are interpolated the base may be one of them. Return the recipe with the settings
    that this takes.
    """
    if recipe.input_digests is not None:  # these very inputs were merged before
        return recipe
    known_base, *known = (_files_of(source) for source in (base, *models))
    entries = zip(recipe.models, known, strict=True)
    bases = [entry for entry, files in entries if files and files == known_base]
    recipe = with_base_among_models(recipe) if bases else recipe
    if not recipe.interpolates and not all(map(_is_meant, bases)):
        raise _base_among_models(recipe, bases)
    for (one, files), (other, others) in itertools.combinations(
        zip(recipe.models, known, strict=True), 2
    ):
        if files and files == others and not _is_meant(one) and not _is_meant(other):
            again = "is among the models twice"
            if one.file != other.file:
                again = f"is the file {one.file}, which is among the models too"
            remedy = "take one of them out, or give each a seed if two masks of it are meant"
            raise RecipeError(f"{other.file}: {again}; {remedy}")
    for entry in recipe.models:
        rest = [other for other in recipe.models if other is not entry and other not in bases]
        if not _is_meant(entry) and (merged := _merged_here(recipe, entry, rest)):
            meant = "weight" if recipe.chain[-1][0].default_weight else "seed"
            raise RecipeError(
                f"{entry.file}: was made by dare from this base and {' and '.join(merged)}; take "
                f"this output out of models, or give it a {meant} if that is meant"
            )
    return recipe


def with_base_among_models(recipe: Recipe) -> Recipe:
    """The recipe for models of which one is the base: they are interpolated themselves.

    The delta of the base is zero, and has no direction. What the recipe says of it stays.
    """
    stage, _ = recipe.chain[-1]
    if stage.interpolates is None or recipe.interpolates:
        return recipe
    table = {**stage.interpolates, **recipe.stages.get(stage.name, {})}
    return recipe.model_copy(update={"stages": {**recipe.stages, stage.name: table}})


def _base_among_models(recipe: Recipe, bases: Sequence[ModelEntry]) -> RecipeError:
    stage, _ = recipe.chain[-1]
    others = [entry.file for entry in recipe.models if entry not in bases]
    if stage.interpolates is not None:
        settings = [f"{name} = {write_value(value)}" for name, value in stage.interpolates.items()]
        remedy = f"to interpolate whole models set {', '.join(settings)} in [{stage.name}]"
    else:
        is_short = 0 < len(others) <= SHORT_LIST
        remedy = f"take it out of models{f': {written_models(others)}' if is_short else ''}"
    return RecipeError(
        f"{bases[0].file}: is the base, and stands among the models too; {remedy}; to stay nearer "
        "to the base, lower scale"
    )


def _is_meant(entry: ModelEntry) -> bool:
    return entry.weight is not None or entry.seed is not None or bool(entry.settings)


def _files_of(source: Source) -> frozenset[Identity]:
    return frozenset(map(_identity, source.files))


def _identity(path: Path) -> Identity:
    if isinstance(path, StorePath):
        return str(path)
    try:
        status = path.stat()
    except (OSError, ValueError):
        return str(path)
    return status.st_dev, status.st_ino


def _merged_here(recipe: Recipe, entry: ModelEntry, others: Sequence[ModelEntry]) -> list[str]:
    """Those of the others that a model is a merge of, by its manifest, on the same base."""
    for manifest in _manifests_of(entry.file):
        output = output_of(manifest)
        try:
            earlier = recipe_from_document(read_manifest(manifest)["recipe"], str(manifest))
        except (DareError, TypeError, ValueError, AttributeError, RecursionError):
            continue  # what is no manifest says nothing
        if not _is_same(earlier.base, recipe.base, output):
            continue
        return [
            other.name
            for other in others
            if any(_is_same(model.file, other.file, output) for model in earlier.models)
        ]
    return []


def _manifests_of(path: Path) -> Iterator[Path]:
    """Where the manifest of an output lies, if a path is one, or is the weights of one."""
    if isinstance(path, StorePath):
        return
    for manifest in (manifest_path(path), path.parent / MANIFEST_NAME):
        if manifest.is_file():
            yield manifest


def _is_same(told: Path, given: Path, output: Path) -> bool:
    """Whether what a manifest tells of an input is a file of the recipe; it may tell the name."""
    if isinstance(given, StorePath) or isinstance(told, StorePath):
        return str(told) == str(given)
    if len(told.parts) == 1 and told.name == given.name:
        return True
    return _identity(found(str(told), output)) == _identity(given)
