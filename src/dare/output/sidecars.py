"""The files that a model needs besides its weights, in an output directory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dare.errors import Concern, Notice, RecipeError, Strength, did_you_mean
from dare.inputs.directory import (
    CONFIG,
    Changes,
    StopTokens,
    chat_template_of,
    choose_chat_template,
    collect,
    main_type,
    renumber_stop_tokens,
    stop_tokens_of,
)
from dare.inputs.opening import Inputs
from dare.inputs.small_files import is_there
from dare.output.card import NAME as CARD_NAME
from dare.output.card import inherited, model_card
from dare.output.report import Report
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe


def with_sidecars(planned: Plan, inputs: Inputs) -> Plan:
    """Add to a plan what goes beside the weights, if the output is a directory."""
    recipe, aligned = planned.recipe, inputs.aligned
    chosen = _chosen(recipe, inputs.names)
    layout = planned.layout
    if layout is None or not layout.is_directory:
        return planned
    planned = _with_missing_configuration(planned, inputs, chosen)
    home = inputs.folders[chosen]
    if home is None:
        return planned
    keeps_base = aligned.keeps_base_tokenizer and inputs.folders[0] is not None
    tokenizer = 0 if keeps_base else chosen
    template, giver, notes = _template(recipe.chat_template, inputs, chosen, tokenizer)
    tokens = aligned.tokens[0 if keeps_base else 1 + chosen] if aligned.tokens else None
    stop, notices = _stop_tokens(inputs, giver)
    changes = Changes(
        dtype=main_type(t for tensors in layout.files.values() for t in tensors),
        vocab_size=aligned.resized(chosen),
        token_ids=aligned.token_ids[chosen - 1] if chosen and aligned.token_ids else None,
        chat_template=template,
        stop_tokens=None if giver == chosen == tokenizer else stop,
        tokens=tokens,
    )
    found = collect(
        home, changes, tokenizer=inputs.folders[tokenizer], replaced=aligned.tokenizer_files
    )
    return replace(
        planned,
        warnings=(*planned.warnings, *notices),
        notes=(*planned.notes, *found.notes, *notes),
        sidecars=found,
        base_card=inherited(inputs.folders[0]) if inputs.folders[0] else {},
    )


def _template(
    setting: str, inputs: Inputs, chosen: int, tokenizer: int
) -> tuple[str | None, int, tuple[str, ...]]:
    """The template to write, if any; the number of who gives it and its stop tokens; notes.

    `chosen` gives the configuration, and the template if it has one; `tokenizer` the tokenizer.
    """
    templates = [None if home is None else chat_template_of(home) for home in inputs.folders]
    own = tokenizer if templates[chosen] is None else chosen
    home = inputs.folders[own]
    assert home is not None
    models = dict(zip(inputs.names, inputs.folders[1:], strict=True))
    template, notes = choose_chat_template(setting, home, models)
    if template is None and own != tokenizer:
        template = templates[own]
    if template is None:
        return None, chosen if templates[own] is None else own, notes
    named = [1 + inputs.names.index(setting)] if setting in inputs.names else []
    givers = (*named, own, *range(1, len(templates)))
    giver = next((number for number in givers if templates[number] == template), chosen)
    if setting == "auto" and giver != own and (lost := _lost(inputs, giver)):
        text = (
            f"chat template: the one of {inputs.names[giver - 1]} is not used, because it ends a "
            f"text with {lost}, which the output's tokenizer does not have; set vocabulary = "
            '"union" to add it'
        )
        return None, chosen, (text,)
    return template, giver, notes


def _lost(inputs: Inputs, giver: int) -> str:
    """The stop tokens of a model that the output does not have."""
    home, tokens = inputs.folders[giver], inputs.aligned.tokens
    if home is None or not tokens or tokens[0] is None or not inputs.aligned.keeps_base_tokenizer:
        return ""
    own = tokens[1 + giver]
    return ", ".join(sorted(stop_tokens_of(home, own).texts(own) - tokens[0].keys()))


def _stop_tokens(inputs: Inputs, giver: int) -> tuple[StopTokens | None, list[Notice]]:
    """What ends a text in the output, by its ids there, and which models end it otherwise."""
    aligned = inputs.aligned
    tokens = aligned.tokens[1:] or [None] * len(inputs.folders)
    read = [
        None if home is None else stop_tokens_of(home, own)
        for home, own in zip(inputs.folders, tokens, strict=True)
    ]
    stop = read[giver]
    if stop is None:
        return None, []
    texts = [
        frozenset[str]() if found is None else found.texts(own)
        for found, own in zip(read, tokens, strict=True)
    ]
    names = ("base", *inputs.names)
    others = [
        f"{name} with {', '.join(sorted(found))}"
        for name, found in zip(names, texts, strict=True)
        if found and texts[giver] and found != texts[giver]
    ]
    text = (
        f"stop tokens: the output ends a text with {', '.join(sorted(texts[giver]))}, as "
        f"{names[giver]} does, and {'; '.join(others)}; set chat_template to the name of the model "
        "whose template and stop tokens to take"
    )
    notices = [Notice(Concern.STOP_TOKENS, text, Strength.NOTE)] if others else []
    if giver and aligned.token_ids and (ids := aligned.token_ids[giver - 1]) is not None:
        stop = renumber_stop_tokens(stop, ids, names[giver])
    return stop, notices


def _with_missing_configuration(planned: Plan, inputs: Inputs, chosen: int) -> Plan:
    """Say that an output will have no configuration, and which model has one."""
    has_one = [folder is not None and is_there(folder / CONFIG) for folder in inputs.folders]
    if has_one[chosen]:
        return planned
    whose = ("base", *inputs.names)[chosen]
    text = f"{whose}: has no {CONFIG} with its weights, so transformers cannot load the output"
    others = [name for name, has in zip(inputs.names, has_one[1:], strict=True) if has]
    if not others:
        return replace(planned, notes=(*planned.notes, text))
    text += (
        f"; set copy_from = {others[0]!r} to take configuration and tokenizer from that model "
        f"(--copy-from {shlex.quote(others[0])})"
    )
    notice = Notice(Concern.NO_CONFIGURATION, text)
    return replace(planned, warnings=(*planned.warnings, notice))


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
