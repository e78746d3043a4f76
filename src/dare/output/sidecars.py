"""The files that a model needs besides its weights, in an output directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dare.errors import RecipeError, did_you_mean
from dare.inputs.directory import Changes, choose_chat_template, collect, main_type
from dare.inputs.opening import Inputs
from dare.output.card import NAME as CARD_NAME
from dare.output.card import inherited, model_card
from dare.output.report import Report
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe


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


def sidecar_files(planned: Plan, report: Report) -> dict[str, bytes | Path]:
    """What goes beside the weights, and a card that says how they were made."""
    if planned.sidecars is None:
        return {}
    card = model_card(planned, report, planned.base_card)
    return {**planned.sidecars.files, CARD_NAME: card}
