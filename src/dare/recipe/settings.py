"""The same merge with some of its settings changed, its files elsewhere, or fewer models.

scale, method, seed …          a field of the recipe
drop_rate                      a parameter, in the table of the one stage that has it
trim.density                   a parameter of that stage
weight.math, drop_rate.math    a value of one model; weight alone: of each
include.math                   true if a model takes part at all

`request_with_settings` sets them for a whole merge, from a command line or from keywords in Python.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dare.documents.words import counted
from dare.errors import RecipeError, did_you_mean
from dare.recipe.document import (
    DARE_TABLE_ALIASES,
    KEYS,
    errors_named,
    lift_recipes,
    read_request,
    request_from_document,
)
from dare.recipe.entries import ModelEntry, TensorRule, find_files, model_names
from dare.recipe.fields import SAME_WEIGHTS
from dare.recipe.layers import mean_value
from dare.recipe.options import RunOptions
from dare.recipe.recipe import RESERVED, Recipe, Request
from dare.stages import IMPLIED, STAGES, Stage, parse_method
from dare.stages.registry import combine_of, load_installed_stages, takers

FIELDS = ("method", "scale", "seed", "embedding_drop_rate", "gathered")
MODEL_SETTINGS = ("weight", "seed")  # settings of each model, beside the parameters of delta stages
INCLUDE = "include."  # prefix of a model's name in the setting that says if it takes part
CALL_ARGUMENTS = ("overwrite", "resume")  # of functions; no settings of the merge
# Settings of each model by keyword or flag; seed alone is the recipe's.
PER_MODEL = {"weight": "weight", "model_seed": "seed"}
DEFAULT_METHOD = Recipe.fields()["method"].default

_Recipe = TypeVar("_Recipe", bound=Recipe)  # or a range of a stack


# ---------------------------------------------------------------- settings of a whole merge


def request_with_settings(
    document: dict[str, Any],
    given: Mapping[str, Any],
    where: str,
    spell: Callable[[str], str] = str,
) -> Request:
    """Build the request of a document with settings laid over it.

    Given are fields of a recipe and options by their names, `PER_MODEL`, and parameters of stages:
    one value for all models, or a list with one for each. `spell` returns a name as users write
    it.
    """
    given = dict(given)
    repeated: dict[str, Any] = {}  # files of a merge that is repeated
    with errors_named(where):
        document, shown = find_files(copy.deepcopy(document))
        document = lift_recipes(document)
        if "output_digest" in document:  # a merge is repeated, perhaps with its files elsewhere
            repeated = {name: given.pop(name) for name in ("base", "models") if name in given}
            outputs = [str(table.get("output")) for table in (document, {**document, **given})]
            others = set(given) - Recipe.marked(SAME_WEIGHTS) - set(RunOptions.fields())
            if others or len({name.endswith(".gguf") for name in outputs}) > 1:
                del document["output_digest"]
        _apply_settings(document, given, spell)
        request = read_request(document, shown)
        if not repeated:
            return request
        recipe = request.recipe
        files = repeated.get("models", [entry.file for entry in recipe.models])
        files = [files] if isinstance(files, str | PathLike) else files
        if len(files) != len(recipe.models):
            found = f"{counted(len(files), 'model')} given, but {len(recipe.models)} were merged"
            raise RecipeError(f"{spell('models')}: {found}; give all of them, in that order")
        base = repeated.get("base", recipe.base)
        return replace(request, recipe=with_files(recipe, base, files, recipe.output))


def _apply_settings(
    document: dict[str, Any], given: dict[str, Any], spell: Callable[[str], str]
) -> None:
    known = (*KEYS, *PER_MODEL, *parameter_names())
    for name in given:
        if name not in known:
            meant = did_you_mean(name, (*known, *CALL_ARGUMENTS))
            raise RecipeError(f"{spell(name)}: not known{meant}")
    # NumPy's numbers become Python's, which can be written to files.
    given = {n: v.item() if isinstance(v, np.generic) else v for n, v in given.items()}
    fields = {name: value for name, value in given.items() if name in KEYS}
    if not isinstance(fields.get("stages", {}), Mapping):
        raise RecipeError(f"{spell('stages')}: must be a dict of stages, each with its parameters")
    if isinstance(fields.get("method"), str):  # drops what the recipe has for another method
        document["method"] = fields["method"]
        _remove_unused(document)
    for stage, table in fields.pop("stages", {}).items():
        document[stage] = {**_as_dict(document.get(stage)), **table}
    document.update(fields)
    for key in DARE_TABLE_ALIASES:
        if key in fields:
            _as_dict(document.get("dare")).pop(key, None)
    for name, key in PER_MODEL.items():
        if name in given:
            value, models = given[name], document.get("models")
            if not isinstance(value, list | tuple):  # one value for all models
                value = [value] * (len(models) if isinstance(models, list | tuple) else 1)
            _set_for_models(document, key, value, spell(name))
    asked = [name for name in parameter_names() if name in given]
    method = document.get("method", DEFAULT_METHOD)
    if not asked or not isinstance(method, str):
        return  # the check of the recipe reports a method that is not text
    chains = list(map(parse_method, _methods(document)))
    for name in asked:
        values = given[name] if isinstance(given[name], list | tuple) else [given[name]]
        takers = (c for c in chains if any(name in stage.parameters for stage in c))
        _set_parameter(document, next(takers, chains[0]), name, list(values), spell(name))


def _methods(document: Mapping[str, Any]) -> list[str]:
    """Return the method of a document, then those of its rules."""
    rules = document.get("tensors", ())
    tables = filter(_as_dict, rules if isinstance(rules, list | tuple) else ())
    named = (table["method"] for table in tables if isinstance(table.get("method"), str))
    return [document.get("method", DEFAULT_METHOD), *named]


def _as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def parameter_names() -> list[str]:
    """List the parameters of all stages, also of installed packages, each once."""
    load_installed_stages()
    return list(dict.fromkeys(name for stage in STAGES.values() for name in stage.parameters))


# ---------------------------------------------------------------- single settings


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe with some of its settings changed, checked like any other.

    Parameters that only stages of another method take are left out with them. A setting without
    effect is refused; see `has_effect`.

    >>> recipe = Recipe(base="b", models=["math", "code"], stages={"dare": {"drop_rate": 0.5}})
    >>> changed = with_settings(recipe, {"method": "trim+ties", "weight.math": 0.7, "scale": 2.0})
    >>> changed.stages, changed.weights(), changed.scale
    ({}, (0.7, 1.0), 2.0)
    >>> with_settings(changed, {"include.math": False}).weights()
    (1.0,)
    """
    document = recipe.to_tables()
    document.pop("output_digest", None)
    document.pop("search", None)
    given = dict(settings)
    if "method" in given:
        document["method"] = given.pop("method")
        _remove_unused(document)
    names = recipe.names
    included = {name: given.pop(name) for name in list(given) if name.startswith(INCLUDE)}
    for name, value in given.items():
        _set_by_name(document, name, value, names)
    for name, value in included.items():
        if name.removeprefix(INCLUDE) not in names or not isinstance(value, bool):
            there = f"{INCLUDE}MODEL is true or false, for {', '.join(names)}"
            raise RecipeError(f"{name} = {value!r}: {there}")
    changed = request_from_document(document, "settings").recipe
    kept = [n for n, name in enumerate(names) if included.get(INCLUDE + name, True)]
    return with_models(changed, kept) if included else changed


def get_by_name(recipe: Recipe, name: str) -> Any:
    """Return the value of a setting in a recipe; the mean if it differs between models."""
    first, dot, rest = name.partition(".")
    names = recipe.names
    if not dot and name in FIELDS:
        return getattr(recipe, name)
    if dot and first in {stage.name for stage, _ in recipe.chain}:
        return next(s[rest] for stage, s in recipe.chain if stage.name == first)
    chosen = [number for number, model in enumerate(names) if not dot or model == rest]
    if first == "weight" and chosen:
        return float(np.mean([mean_value(recipe.weights()[model]) for model in chosen]))
    joint = [settings for stage, settings in recipe.chain if stage.kind != "delta"]
    values = [
        settings[first]
        for model in chosen
        for settings in (*recipe.settings_for("", model), *joint)
        if first in settings
    ]
    if values and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return float(np.mean(values))
    return values[0] if values else None


def _set_by_name(document: dict[str, Any], name: str, value: Any, models: Sequence[str]) -> None:
    """Set the setting with a name in the tables of a recipe whose models have these names."""
    chain = parse_method(document.get("method", DEFAULT_METHOD))
    first, dot, rest = name.partition(".")
    if not dot and name in FIELDS:
        document[name] = value
    elif not dot and name in MODEL_SETTINGS:
        _set_for_models(document, name, [value] * len(models), name)
    elif not dot:
        _set_parameter(document, chain, name, [value], name)
    elif first in {stage.name for stage in chain}:
        document.setdefault(first, {})[rest] = value
    elif rest in models:
        _set_in_models(document, first, {models.index(rest): value})
    else:
        known = [*(stage.name for stage in chain), *models]
        raise RecipeError(
            f"{name}: there is no stage {first!r} in the method and no model {rest!r}"
            f"{did_you_mean(rest, known)}; write STAGE.PARAMETER or PARAMETER.MODEL; there are "
            f"{', '.join(known)}"
        )


def has_effect(name: str, method: str) -> bool:
    """Return whether a setting has an effect in a method.

    >>> names = ("scale", "drop_rate", "keep_ratio", "trim.keep_ratio")
    >>> [has_effect(name, "trim+ties") for name in names]
    [True, False, True, True]
    """
    chain = parse_method(method)
    first, dot, rest = name.partition(".")
    if name == "embedding_drop_rate":
        return any("drop_rate" in stage.parameters for stage in chain if stage.kind == "delta")
    if first in MODEL_SETTINGS and (dot or first == "weight"):
        return first == "seed" or combine_of(chain).default_weight is not None
    if name in FIELDS or name.startswith(INCLUDE):
        return True
    if dot and first in STAGES:
        return any(stage.name == first and rest in stage.parameters for stage in chain)
    # a model has settings of delta stages only
    return any(first in s.parameters for s in chain if not dot or s.kind == "delta")


def _remove_unused(document: dict[str, Any]) -> None:
    methods = _methods(document)
    used = {stage.name for method in methods for stage in parse_method(method)}
    for name in [name for name in document if name in STAGES and name not in used]:
        table = _as_dict(document.pop(name))
        document.update({key: table[key] for key in DARE_TABLE_ALIASES if key in table})
    if not any(has_effect("embedding_drop_rate", method) for method in methods):
        document.pop("embedding_drop_rate", None)
    rules = document.get("tensors", [])
    entries = [*_model_tables(document), *(rules if isinstance(rules, list | tuple) else [])]
    for entry in (e for e in entries if isinstance(e, dict) and "method" not in e):
        is_rule = "file" not in entry
        for key in list(entry):
            of_stage = any(key in stage.parameters for stage in STAGES.values())
            asked = key if is_rule or not of_stage else f"{key}.model"
            if (of_stage or key == "weight") and not any(has_effect(asked, m) for m in methods):
                del entry[key]


def _set_parameter(
    document: dict[str, Any], chain: Sequence[Stage], name: str, values: list[Any], shown: str
) -> None:
    """Set a stage's parameter for all models, or for each one; `shown` is its name for users."""
    owner = _find_owner(chain, name, shown)
    if not isinstance(document.setdefault(owner.name, {}), dict):
        return  # the check of the recipe will report it
    if len(values) == 1:
        document[owner.name][name] = values[0]
        if isinstance(document.get("models"), list | tuple):
            document["models"] = [  # models lose their own values
                {key: entry[key] for key in entry if key != name}
                if isinstance(entry, dict)
                else entry
                for entry in _model_tables(document)
            ]
    elif owner.kind != "delta":
        raise RecipeError(f"{shown}: {owner.name} takes one value for all, not {len(values)}")
    else:
        _set_for_models(document, name, values, shown)


def _find_owner(chain: Sequence[Stage], name: str, shown: str) -> Stage:
    owners = [
        stage
        for stage in takers(chain, name)
        if STAGES.get(IMPLIED.get((stage.name, name), "")) not in chain  # else that stage has it
    ]
    method = "+".join(stage.name for stage in chain)
    if not owners:
        parameters = [n for stage in chain for n in stage.parameters]
        spell = [f"--{n.replace('_', '-')}" if shown.startswith("--") else n for n in parameters]
        takes = ", ".join(spell) or "no parameters"
        raise RecipeError(f"{shown} would have no effect: method {method!r} takes {takes}")
    if len(owners) > 1:
        both = " and ".join(stage.name for stage in owners)
        raise RecipeError(f"{shown}: {both} both have it; set it in the table of the stage")
    return owners[0]


def _set_for_models(document: dict[str, Any], key: str, values: Sequence[Any], shown: str) -> None:
    """Write a value into each model's table."""
    if len(values) != len(entries := _model_tables(document)):
        models = counted(len(entries), "model")
        raise RecipeError(f"{shown}: {len(values)} given for {models}; give one for each")
    _set_in_models(document, key, dict(enumerate(values)))


def _set_in_models(document: dict[str, Any], key: str, values: Mapping[int, Any]) -> None:
    """Write values into the tables of some models, by their numbers."""
    entries = _model_tables(document)
    for place, value in values.items():
        entry = entries[place]
        entries[place] = {**(entry if isinstance(entry, dict) else {"file": entry}), key: value}
    document["models"] = entries


def _model_tables(document: dict[str, Any]) -> list[Any]:
    """List the models of a document, those with settings as tables."""
    models = document.get("models")
    if not isinstance(models, list | tuple):
        models = [] if models is None else [models]
    return [entry.to_tables() if isinstance(entry, ModelEntry) else entry for entry in models]


# ---------------------------------------------------------------- other files, fewer models


def with_files(recipe: _Recipe, base: Path, files: Sequence[Path], output: Path | None) -> _Recipe:
    """Return the recipe with its files elsewhere; words that name a model are adjusted."""
    entries = tuple(
        entry.changed(file=file) for entry, file in zip(recipe.models, files, strict=True)
    )
    rules = _rules_of(recipe, dict(enumerate(files)))
    changed = {"base": base, "models": entries, "output": output, "tensors": rules}
    changed |= _renamed(recipe, ("base", *model_names(entries)))
    return recipe.changed(**changed, output_digest=recipe.output_digest)


def moved(recipe: _Recipe, move: Callable[[Path], Path], output: Path | None = None) -> _Recipe:
    """Return the recipe with all files that it reads elsewhere, and another output."""

    def place(file: Path) -> Path:
        return file if str(file) in recipe.merges else move(file)

    inner: dict[str, Any] = {
        "merges": {name: moved(merge, place) for name, merge in recipe.merges.items()},
        "layers": tuple(moved(entry, place) for entry in recipe.layers),
        **({"gathered": place(recipe.gathered)} if recipe.gathered else {}),
    }
    files = [place(entry.file) for entry in recipe.models]
    outer = with_files(recipe, place(recipe.base), files, output)
    return outer.changed(**inner, output_digest=recipe.output_digest)


def _renamed(recipe: Recipe, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that name inputs, with new names for them."""

    def named(word: str | None) -> str | None:
        if word is None or word in RESERVED or "{" in word:
            return word
        number = recipe.find_input(word, word)
        name = word if number is None else names[number]
        return f"./{name}" if number and name in RESERVED else name

    rows = {t: row.changed(model=named(row.model)) for t, row in recipe.tokens.items()}
    fields = ("vocabulary", "copy_from", "chat_template")
    changed = {"tokens": rows} | {name: named(getattr(recipe, name)) for name in fields}
    return {name: value for name, value in changed.items() if value != getattr(recipe, name)}


def _rules_of(recipe: Recipe, files: Mapping[int, Path]) -> tuple[TensorRule, ...]:
    """Return the rules for some models, given by number with their new files."""
    rules = []
    for rule, indices in recipe.rules:
        models = tuple(str(files[index]) for index in indices or () if index in files)
        if indices is None or models:
            rules.append(rule if indices is None else rule.changed(model=models))
    return tuple(rules)


def with_models(recipe: Recipe, kept: Iterable[int]) -> Recipe:
    """Return the recipe with some of its models, by number."""
    models = {number: recipe.models[number] for number in kept}
    rules = _rules_of(recipe, {number: entry.file for number, entry in models.items()})
    changed = {"models": tuple(models.values()), "tensors": rules, "input_digests": None}
    return recipe.changed(**changed, **rows_without(recipe, models.values()))


def rows_without(recipe: Recipe, kept: Iterable[ModelEntry]) -> dict[str, Any]:
    """Return the fields for tokens, without the models that are not kept."""
    files = {entry.file for entry in kept}
    gone = {1 + n for n, entry in enumerate(recipe.models) if entry.file not in files}
    rows = {t: row for t, (number, row) in recipe.token_rows.items() if number not in gone}
    vocabulary = "union" if recipe.vocabulary_of in gone else recipe.vocabulary
    return {"tokens": rows, "vocabulary": vocabulary} if gone else {}
