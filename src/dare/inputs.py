"""From the paths in a recipe to sources that fit together, and back to what lies beside them.

Names from the hub become directories; every form of model becomes a source; names and rows of the
models are brought in line with the base's; and an output directory gets the files that a model
needs besides its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dare.card import NAME as CARD_NAME
from dare.card import inherited, model_card
from dare.errors import InputError, RecipeError, did_you_mean
from dare.formats import open_model, read_config
from dare.gradients import mean_value
from dare.hub import Resolved, resolve
from dare.io.sources import Source
from dare.matching import match_names
from dare.planning import Plan
from dare.recipe import Recipe
from dare.report import Report
from dare.sidecars import (
    Changes,
    choose_chat_template,
    collect,
    directory_of,
    main_type,
    write_into,
)
from dare.vocabulary import Aligned, align


@dataclass(frozen=True)
class Inputs:
    """Base and models, opened and in line with each other."""

    names: tuple[str, ...]
    """What the models are called in messages."""
    folders: tuple[Path | None, ...]
    """Where the base and each model lie, if in directories."""
    aligned: Aligned
    notes: tuple[str, ...]

    @property
    def base(self) -> Source:
        """The base, with the rows of the output."""
        return self.aligned.base

    @property
    def models(self) -> tuple[Source, ...]:
        """The models, with the base's names and the rows of the output."""
        return self.aligned.models


def open_inputs(recipe: Recipe) -> tuple[Recipe, Inputs]:
    """Open what a recipe names; also return the recipe with the commits of what the hub gave."""
    names = _distinct([entry.name for entry in recipe.models])
    given = [recipe.base, *(entry.file for entry in recipe.models)]
    places = [resolve(path, verbose=recipe.verbose) for path in given]
    recipe = _pinned(recipe, places)
    paths = [place.path for place in places]
    configs = [read_config(path) for path in paths]
    base, *models = (
        open_model(path, allow_pickle=recipe.allow_pickle, base_config=configs[0]) for path in paths
    )
    if base.is_partial:
        raise InputError(f"{recipe.base}: is an adapter, and a base must be a whole model")
    matched = [
        match_names(base, model, name, base_config=configs[0], model_config=config)
        for model, name, config in zip(models, names, configs[1:], strict=True)
    ]
    folders = tuple(map(directory_of, paths))
    aligned = _aligned(recipe, base, [model.source for model in matched], names, folders)
    opened = zip(("base", *names), (base, *models), strict=True)
    notes = [
        *(f"{name}: {remark}" for name, source in opened for remark in source.remarks),
        *(note for model in matched for note in model.notes),
        *aligned.notes,
    ]
    return recipe, Inputs(tuple(names), folders, aligned, tuple(notes))


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once."""
    return [
        f"{name} ({index + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _pinned(recipe: Recipe, places: Sequence[Resolved]) -> Recipe:
    if all(place.commit is None for place in places):
        return recipe
    base, *files = (place.pinned for place in places)
    return recipe.with_files(base, files, recipe.output)


def _aligned(
    recipe: Recipe,
    base: Source,
    models: Sequence[Source],
    names: Sequence[str],
    folders: Sequence[Path | None],
) -> Aligned:
    """Bring the rows into one order, unless the recipe keeps the base's whatever does not fit."""
    if recipe.vocabulary == "error" and recipe.on_mismatch == "base":
        return Aligned(base, tuple(models))
    return align(
        recipe.vocabulary,
        base,
        models,
        directories=folders,
        names=names,
        weights=[mean_value(weight) for weight in recipe.weights()],
        pad_to_multiple_of=recipe.pad_to_multiple_of,
    )


def with_sidecars(planned: Plan, inputs: Inputs) -> Plan:
    """Add to a plan what goes beside the weights, if the output is a directory."""
    recipe, aligned = planned.recipe, inputs.aligned
    chosen = _chosen(recipe, inputs.names)
    home = inputs.folders[chosen]
    if planned.layout is None or not planned.layout.is_directory or home is None:
        return planned
    tokenizer = (inputs.folders[0] if aligned.keeps_base_tokenizer else None) or home
    template, notes = choose_chat_template(
        recipe.chat_template, tokenizer, dict(zip(inputs.names, inputs.folders[1:], strict=True))
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
        base_card=inherited(inputs.folders[0]) if inputs.folders[0] else {},
    )


def _chosen(recipe: Recipe, names: Sequence[str]) -> int:
    """The number of the model that `copy_from` names; 0 is the base."""
    if recipe.copy_from is None:
        return 0
    if recipe.copy_from not in names:
        raise RecipeError(
            f"copy_from = {recipe.copy_from!r}: there is no such model"
            f"{did_you_mean(recipe.copy_from, names)}; there are {', '.join(names)}"
        )
    return 1 + names.index(recipe.copy_from)


def write_sidecars(folder: Path, planned: Plan, report: Report) -> None:
    """Write what goes beside the weights, and a card that says how they were made."""
    if planned.sidecars is not None:
        card = model_card(planned, report, planned.base_card)
        write_into(folder, {**planned.sidecars.files, CARD_NAME: card})
