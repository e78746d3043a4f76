"""Recipes as TOML tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from dare.errors import InputError, RecipeError, did_you_mean
from dare.recipe.schema import ModelEntry, Recipe, TensorRule
from dare.stages import STAGES, Stage, parse_method


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a recipe from a TOML file."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read the recipe: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: a recipe must be text in UTF-8, and byte {error.start} is not"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None


LIFTED = ("delta_threshold", "verbose", "embedding_drop_rate")
"""Keys that may stand in the table [dare] but belong to the whole recipe."""

FILE_KEYS = {"base_file": "base", "merge_files": "models", "output_file": "output"}


def recipe_from_document(document: Mapping[str, Any], where: str) -> Recipe:
    """Build a recipe from the tables of its TOML form."""
    given = dict(document)
    try:
        files = _table(given.pop("models", {}), "models")
        for key in files:
            if key not in FILE_KEYS:
                raise RecipeError(f"[models] {key}: not known{did_you_mean(key, FILE_KEYS)}")
        for key, field_name in FILE_KEYS.items():
            if key in files:
                given[field_name] = files[key]
        for key in ("base_file", "merge_files"):
            if key not in files:
                raise RecipeError(f"[models] {key} is missing")
        if isinstance(given["models"], list):
            given["models"] = [
                entry
                if isinstance(entry, str | PathLike)
                else _built(entry, ModelEntry, f"[models] merge_files, number {number}: ")
                for number, entry in enumerate(given["models"], start=1)
            ]
        elif not isinstance(given["models"], str | PathLike):
            raise RecipeError(
                "[models] merge_files: must be a list, "
                'as in ["math.safetensors", "code.safetensors"]'
            )
        if "tensors" in given:
            if not isinstance(given["tensors"], list):
                raise RecipeError("tensors: must be a list of tables, as in [[tensors]]")
            given["tensors"] = [
                _built(rule, TensorRule, f"[[tensors]], number {number}: ")
                for number, rule in enumerate(given["tensors"], start=1)
            ]
        if "stages" in given:
            raise RecipeError("stages: a stage's parameters stand in a table of its name: [dare]")
        stages = {name: dict(given.pop(name)) for name in list(given) if _is_stage(name, given)}
        for key in given:
            if key in STAGES:
                raise RecipeError(f"{key}: must be a table, as in [{key}]")
            owner = _owner(key, given.get("method"))
            if owner is not None and key not in Recipe.model_fields:
                raise RecipeError(f"{key}: belongs in the table of its stage, as in [{owner.name}]")
        for key in LIFTED:
            if key in stages.get("dare", {}):
                given[key] = stages["dare"].pop(key)
        for key in stages.get("dare", {}):
            if key not in STAGES["dare"].parameters:
                known = [*STAGES["dare"].parameters, *LIFTED]
                raise RecipeError(f"[dare] {key}: not known{did_you_mean(key, known)}")
        return Recipe(**given, stages=stages)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _is_stage(name: str, document: Mapping[str, Any]) -> bool:
    return isinstance(document[name], dict) and name not in Recipe.model_fields


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecipeError(f"{name}: must be a table, as in [{name}]")
    return value


_Entry = TypeVar("_Entry", ModelEntry, TensorRule)


def _owner(parameter: str, method: object) -> Stage | None:
    """The stage whose table a parameter belongs in: one of the method's, if that has it."""
    try:
        chain = parse_method(method) if isinstance(method, str) else ()
    except RecipeError:
        chain = ()
    return next((s for s in (*chain, *STAGES.values()) if parameter in s.parameters), None)


def _built(table: object, kind: type[_Entry], where: str) -> _Entry:
    if not isinstance(table, Mapping):
        path = "the path of a file or directory, or " if kind is ModelEntry else ""
        raise RecipeError(f"{where}must be {path}a table")
    try:
        return kind(**_nested(table, kind))
    except RecipeError as error:
        raise RecipeError(f"{where}{error}") from None


def _nested(entry: Mapping[str, Any], kind: type[ModelEntry | TensorRule]) -> dict[str, Any]:
    """Move the parameters among an entry's keys into its `settings`."""
    parameters = {name for stage in STAGES.values() for name in stage.parameters}
    fields = set(kind.model_fields) - {"settings"}
    for key in entry:
        if key not in fields | parameters:
            raise RecipeError(f"{key}: not known here{did_you_mean(key, fields | parameters)}")
    nested: dict[str, Any] = {key: entry[key] for key in fields if key in entry}
    nested["settings"] = {key: value for key, value in entry.items() if key not in fields}
    return nested
