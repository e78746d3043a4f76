"""Recipes as TOML tables."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar

from dare.errors import RecipeError, did_you_mean
from dare.recipe.naming import OUR_NAMES, Files
from dare.recipe.schema import ModelEntry, Recipe, TensorRule
from dare.recipe.toml import read_toml
from dare.stages import STAGES, parse_method

__all__ = ["LIFTED", "read_toml", "recipe_from_document"]

LIFTED = ("delta_threshold", "verbose", "embedding_drop_rate")
"""Keys that may stand in the table [dare] but belong to the whole recipe."""

_Entry = TypeVar("_Entry", ModelEntry, TensorRule)


def recipe_from_document(document: Mapping[str, Any], where: str) -> Recipe:
    """Build a recipe from the tables of its TOML form."""
    try:
        return Recipe(**_fields(document))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _fields(document: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(document)
    _check_places(given)
    files = _files(Files.of(given))
    given = {key: value for key, value in given.items() if key not in OUR_NAMES} | files
    if "tensors" in given:
        if not isinstance(given["tensors"], list | tuple):
            raise RecipeError("tensors: must be a list of tables, as in [[tensors]]")
        given["tensors"] = [
            rule
            if isinstance(rule, TensorRule)
            else _built(rule, TensorRule, f"[[tensors]], number {number}: ")
            for number, rule in enumerate(given["tensors"], start=1)
        ]
    if "stages" in given:
        raise RecipeError("stages: a stage's parameters stand in a table of its name: [dare]")
    is_table = {key for key in given if isinstance(given[key], dict)} - set(Recipe.model_fields)
    stages = {key: dict(given.pop(key)) for key in document if key in is_table}
    for key in given:
        if key in STAGES:
            raise RecipeError(f"{key}: must be a table, as in [{key}]")
        if key not in Recipe.model_fields and (owner := _owner(key, given.get("method"))):
            raise RecipeError(f"{key}: belongs in the table of its stage, as in [{owner}]")
    of_dare = stages.get("dare", {})
    given |= {key: of_dare.pop(key) for key in LIFTED if key in of_dare}
    for key in of_dare:
        if key not in STAGES["dare"].parameters:
            known = [*STAGES["dare"].parameters, *LIFTED]
            raise RecipeError(f"[dare] {key}: not known{did_you_mean(key, known)}")
    return {**given, "stages": stages}


def _files(named: Files) -> dict[str, Any]:
    """The fields that name files, from where the document names them."""
    for field in ("base", "models"):
        if named.get(field) is None:
            raise _missing(named, field)
    files = {field: named.get(field) for field in named.keys if named.get(field) is not None}
    shown, models = named.shown("models"), files["models"]
    if isinstance(models, list | tuple):
        files["models"] = [
            entry
            if isinstance(entry, str | PathLike | ModelEntry)
            else _built(entry, ModelEntry, f"{shown}, number {number}: ")
            for number, entry in enumerate(models, start=1)
        ]
    elif not isinstance(models, str | PathLike):
        raise RecipeError(f'{shown}: must be a list, like ["math.safetensors", "code.safetensors"]')
    return files


def _check_places(document: Mapping[str, Any]) -> None:
    """Refuse a file that is named below a table's heading, which makes it a part of the table."""
    for heading, table in document.items():
        if heading in STAGES and isinstance(table, dict):
            for name in table:
                if name in OUR_NAMES:
                    raise RecipeError(
                        f"[{heading}] {name}: belongs at the top level; move it above the first "
                        "heading in brackets"
                    )


def _missing(named: Files, field: str) -> RecipeError:
    """Say that a field is missing, or which unknown key is probably meant for it."""
    for key in named.table:
        if key not in (*OUR_NAMES, *Recipe.model_fields, *STAGES):
            guess = did_you_mean(key, [named.keys[field]])
            if guess:
                return RecipeError(f"{key}: not known{guess}")
    return RecipeError(f"{named.shown(field)} is missing")


def _owner(parameter: str, method: object) -> str | None:
    """The stage whose table a parameter belongs in: one of the method's, if that has it."""
    try:
        chain = parse_method(method) if isinstance(method, str) else ()
    except RecipeError:
        chain = ()
    return next((s.name for s in (*chain, *STAGES.values()) if parameter in s.parameters), None)


def _built(table: object, kind: type[_Entry], where: str) -> _Entry:
    """An entry of a list: the parameters among its keys go into its `settings`."""
    if not isinstance(table, Mapping):
        path = "the path of a file or directory, or " if kind is ModelEntry else ""
        raise RecipeError(f"{where}must be {path}a table")
    fields = set(kind.model_fields) - {"settings"}
    known = fields.union(*(stage.parameters for stage in STAGES.values()))
    for key in table:
        if key not in known:
            raise RecipeError(f"{where}{key}: not known here{did_you_mean(key, known)}")
    settings = {key: value for key, value in table.items() if key not in fields}
    try:
        return kind(**{key: table[key] for key in fields & set(table)}, settings=settings)
    except RecipeError as error:
        raise RecipeError(f"{where}{error}") from None
