"""Recipes as TOML tables, and single settings laid over them by name.

scale, method, seed …          a field of the recipe
drop_rate                      a parameter, in the table of the one stage that has it
trim.density                   a parameter of that stage
weight.math, drop_rate.math    a value of one model; weight alone: of each
include.math                   true if a model takes part at all

`overlaid` sets them for a whole merge, from a command line or from keywords in Python.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dare.documents.words import times
from dare.errors import RecipeError, did_you_mean
from dare.recipe.entries import (
    OUR_NAMES,
    ModelEntry,
    TensorRule,
    as_path,
    find_files,
    in_our_form,
    read_toml,
)
from dare.recipe.fields import SAME_WEIGHTS
from dare.recipe.layers import mean_value
from dare.recipe.moving import with_files, with_models
from dare.recipe.options import RunOptions
from dare.recipe.recipe import OTHER_TYPES, Layers, Recipe, Request
from dare.stages import IMPLIED, STAGES, Stage, parse_method
from dare.stages.registry import combine_of, load_installed_stages, takers

# Keys that may stand in the table [dare] but belong to the whole recipe.
DARE_TABLE_ALIASES = ("delta_threshold", "verbose", "embedding_drop_rate")
# Keys of a recipe's file, beside stages and the other names of files.
KEYS = (*Recipe.fields(), *RunOptions.fields())
FIELDS = ("method", "scale", "seed", "embedding_drop_rate", "gathered")
# Keys that the ranges of a stack take over.
SHARED_WITH_LAYERS = (
    *("seed", "dtype", "on_missing", "on_extra", "on_mismatch", "on_integer_mismatch"),
    *("allow_pickle", "allow_not_finite"),
)
# Keys that parts do not have.
TOP_LEVEL_ONLY = ("output", "format", "shard_size", "copy_from", "chat_template", "search")
TOO_DEEP = "too many merges are inside each other; write the output of one, and name that instead"
PASSTHROUGH = "passthrough"
MODEL_SETTINGS = ("weight", "seed")  # settings of each model, beside the parameters of delta stages
INCLUDE = "include."  # prefix of a model's name in the setting that says if it takes part
CALL_ARGUMENTS = ("overwrite", "resume")  # of functions; no settings of the merge
# Settings of each model by keyword or flag; seed alone is the recipe's.
PER_MODEL = {"weight": "weight", "model_seed": "seed"}
DEFAULT_METHOD = Recipe.fields()["method"].default

_Entry = TypeVar("_Entry", ModelEntry, TensorRule)
_Merge = TypeVar("_Merge", bound=Recipe)


def request_from_document(document: Mapping[str, Any], where: str) -> Request:
    """Build a request from the tables of its TOML form."""
    with naming(where):
        return _read_request(*find_files(document))


def _read_request(document: Mapping[str, Any], shown: Mapping[str, str]) -> Request:
    request = Request.of(**_read_fields(document, shown))
    _refuse_unused(request.recipe)
    return request


def _refuse_unused(recipe: Recipe) -> None:
    """Refuse merges that nothing names, as tables of stages are that are not in a method."""
    for name in recipe.merges.keys() - recipe.named.keys():
        what = f"no base or model is called {name}"
        raise RecipeError(f"[merges.{name}] would have no effect: {what}")
    for inner in (*recipe.merges.values(), *recipe.layers):
        _refuse_unused(inner)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Name the place of what is wrong with a recipe."""
    try:
        yield
    except ValueError as error:  # a RecipeError is one
        raise RecipeError(f"{where}: {error}") from None
    except RecursionError:
        raise RecipeError(f"{where}: {TOO_DEEP}") from None


def _read_fields(document: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a request from a document in our form; `shown` are names for files."""
    given = dict(document)
    _check_places(given)
    _read_inner_merges(given)
    models = given.get("models")
    if "base" not in given and models and isinstance(models, list | tuple) and interpolates(given):
        first = models[0].get("file") if isinstance(models[0], Mapping) else models[0]
        given["base"] = getattr(first, "file", first)
    given |= {"models": _read_models(given, shown)}
    if "tensors" in given:
        if not isinstance(given["tensors"], list | tuple):
            raise RecipeError("tensors: must be a list of tables, as in [[tensors]]")
        given["tensors"] = _read_entries(given["tensors"], TensorRule, "[[tensors]]")
    if "stages" in given:
        raise RecipeError("stages: put a stage's parameters in a table with its name: [dare]")
    is_table = {key for key in given if isinstance(given[key], dict)} - set(KEYS)
    stages = {key: dict(given.pop(key)) for key in document if key in is_table}
    for key in given:
        if key in STAGES:
            raise RecipeError(f"{key}: must be a table, as in [{key}]")
        if key not in KEYS and (owner := _find_table(key, given.get("method"))):
            raise RecipeError(f"{key}: belongs in the table of its stage, as in [{owner}]")
    of_dare = stages.get("dare", {})
    given |= {key: of_dare.pop(key) for key in DARE_TABLE_ALIASES if key in of_dare}
    for key in of_dare:
        if key not in STAGES["dare"].parameters:
            known = [*STAGES["dare"].parameters, *DARE_TABLE_ALIASES]
            raise RecipeError(f"[dare] {key}: not known{did_you_mean(key, known)}")
    return {**given, "stages": stages}


def interpolates(document: Mapping[str, Any]) -> bool:
    """Tell if a merge goes from model to model, so that the first can stand for the base."""
    try:
        return combine_of(parse_method(document["method"])).interpolates is not None
    except (RecipeError, LookupError, AttributeError, TypeError):  # said when the recipe is made
        return False


def _read_inner_merges(given: dict[str, Any]) -> None:
    """Build the merges inside a document: those that have names, and those of a stack."""
    merges, layers = given.get("merges", {}), given.get("layers", ())
    if not isinstance(merges, Mapping) or not isinstance(layers, list | tuple):
        raise RecipeError("[merges.NAME] and [[layers]] hold the keys of recipes")
    built = {name: _read_merge(table, Recipe, f"merges.{name}") for name, table in merges.items()}
    given |= {"merges": built} if built else {}
    if not layers:
        return
    shared = {key: given[key] for key in SHARED_WITH_LAYERS if key in given}
    if str(shared.get("dtype")).upper() in OTHER_TYPES:  # which the whole is recoded to
        shared["dtype"] = "F32"
    stack = [
        _read_merge(entry, Layers, f"[[layers]], number {number}", shared)
        for number, entry in enumerate(layers, start=1)
    ]
    usual = {"base": stack[0].base, "models": (), "method": PASSTHROUGH}
    given |= {**{key: value for key, value in usual.items() if key not in given}, "layers": stack}


def _read_merge(
    table: Any, kind: type[_Merge], where: str, shared: Mapping[str, Any] | None = None
) -> _Merge:
    if isinstance(table, kind):
        return table
    if not isinstance(table, Mapping):
        raise RecipeError(f"{where}: must be a table with the keys of a recipe")
    for key in table.keys() & {*TOP_LEVEL_ONLY, *RunOptions.fields()}:
        raise RecipeError(f"{where}: {key} is for the whole merge; move it to the top level")
    try:
        document, shown = find_files({**(shared or {}), **table})
        if "model" in document:
            document["base"] = document.pop("model")
        if "models" not in document:
            document = {"method": PASSTHROUGH, **document, "models": ()}
        return kind(**_read_fields(document, shown))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def lift_recipes(document: Mapping[str, Any], outer: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Move the recipes that stand in place of models to the table of merges; read their files.

    >>> lift_recipes({"base": "b", "models": [{"recipe": {"base": "b", "models": ["m"]}}]})
    {'base': 'b', 'models': ['merge 1'], 'merges': {'merge 1': {'base': 'b', 'models': ['m']}}}
    """
    lifted, merges = dict(document), document.get("merges", {})
    if not isinstance(merges, Mapping):
        return lifted  # which is refused later
    found = {name: _lift_inner(table, outer) for name, table in merges.items()}

    def lift(entry: Any) -> Any:
        if not isinstance(entry, Mapping) or "recipe" not in entry:
            return entry
        inner, name = entry["recipe"], f"merge {len(found) + 1}"
        if isinstance(inner, str | PathLike):
            path = as_path(inner)
            if path in outer:
                raise RecipeError(f"{path}: contains itself; give it other models")
            name = str(path) if path.stem in found else path.stem
            found[name] = _lift_inner(read_toml(path), (*outer, path))
        else:
            found[name] = _lift_inner(inner, outer)
        rest = {key: value for key, value in entry.items() if key != "recipe"}
        return {"file": name, **rest} if rest else name

    for key in lifted.keys() & {"base", "model"}:
        lifted[key] = lift(lifted[key])
    if isinstance(models := lifted.get("models"), list | tuple):
        lifted["models"] = list(map(lift, models))
    if isinstance(layers := lifted.get("layers"), list | tuple):
        lifted["layers"] = [_lift_inner(entry, outer) for entry in layers]
    return {**lifted, "merges": found} if found else lifted


def _lift_inner(table: Any, outer: tuple[Path, ...]) -> Any:
    return lift_recipes(in_our_form(table), outer) if isinstance(table, Mapping) else table


def _read_models(document: Mapping[str, Any], shown: Mapping[str, str]) -> Any:
    """Return the models as entries; refuse a document without base or models.

    An unknown key is named if it is probably meant for one of them.
    """
    for field in ("base", "models"):
        if field not in document:
            unknown = [key for key in document if key not in (*KEYS, *STAGES)]
            guesses = ((key, did_you_mean(key, [shown[field]])) for key in unknown)
            typos = (f"{key}: not known{guess}" for key, guess in guesses if guess)
            raise RecipeError(next(typos, f"{shown[field]} is missing"))
    models, name = document["models"], shown["models"]
    if isinstance(models, list | tuple):
        return _read_entries(models, ModelEntry, name)
    if not isinstance(models, str | PathLike):
        raise RecipeError(f'{name}: must be a list, like ["math.safetensors", "code.safetensors"]')
    return models


def _check_places(document: Mapping[str, Any]) -> None:
    """Refuse a file that is named below a table's heading, which makes it a part of the table."""
    for heading, table in document.items():
        for name in table if heading in STAGES and isinstance(table, dict) else ():
            if name in OUR_NAMES:
                remedy = "move it above the first heading in brackets"
                raise RecipeError(f"[{heading}] {name}: belongs at the top level; {remedy}")


def _find_table(parameter: str, method: object) -> str | None:
    """Find the stage whose table a parameter belongs in: one of the method's, if that has it."""
    try:
        chain = parse_method(method) if isinstance(method, str) else ()
    except RecipeError:
        chain = ()
    return next((s.name for s in (*chain, *STAGES.values()) if parameter in s.parameters), None)


def _read_entries(given: Sequence[Any], kind: type[_Entry], shown: str) -> list[Any]:
    """Build the entries of a list from their tables; paths of models are left as they are."""
    plain = (ModelEntry, str, PathLike) if kind is ModelEntry else (TensorRule,)
    return [
        entry if isinstance(entry, plain) else _read_entry(entry, kind, f"{shown}, number {n}: ")
        for n, entry in enumerate(given, start=1)
    ]


def _read_entry(table: object, kind: type[_Entry], where: str) -> _Entry:
    """Build an entry of a list: the parameters among its keys go into its `settings`."""
    if not isinstance(table, Mapping):
        path = "the path of a file or directory, or " if kind is ModelEntry else ""
        raise RecipeError(f"{where}must be {path}a table")
    fields = set(kind.fields()) - {"settings"}
    known = fields.union(*(stage.parameters for stage in STAGES.values()))
    for key in table:
        if key not in known:
            raise RecipeError(f"{where}{key}: not known here{did_you_mean(key, known)}")
    settings = {key: value for key, value in table.items() if key not in fields}
    try:
        return kind(**{key: table[key] for key in fields & set(table)}, settings=settings)
    except RecipeError as error:
        raise RecipeError(f"{where}{error}") from None


# ---------------------------------------------------------------- settings of a whole merge


def overlaid(
    document: dict[str, Any],
    given: Mapping[str, Any],
    where: str,
    spelled: Callable[[str], str] = str,
) -> Request:
    """Build the request of a document with settings laid over it.

    Given are fields of a recipe and options by their names, `PER_MODEL`, and parameters of stages:
    one value for all models, or a list with one for each. `spelled` returns a name as users write
    it.
    """
    given = dict(given)
    repeated: dict[str, Any] = {}  # files of a merge that is repeated
    with naming(where):
        document, shown = find_files(copy.deepcopy(document))
        document = lift_recipes(document)
        if "output_digest" in document:  # a merge is repeated, perhaps with its files elsewhere
            repeated = {name: given.pop(name) for name in ("base", "models") if name in given}
            outputs = [str(table.get("output")) for table in (document, {**document, **given})]
            others = set(given) - Recipe.marked(SAME_WEIGHTS) - set(RunOptions.fields())
            if others or len({name.endswith(".gguf") for name in outputs}) > 1:
                del document["output_digest"]
        _lay_over(document, given, spelled)
        request = _read_request(document, shown)
        if not repeated:
            return request
        recipe = request.recipe
        files = repeated.get("models", [entry.file for entry in recipe.models])
        files = [files] if isinstance(files, str | PathLike) else files
        if len(files) != len(recipe.models):
            found = f"{times(len(files), 'model')} given, but {len(recipe.models)} were merged"
            raise RecipeError(f"{spelled('models')}: {found}; give all of them, in that order")
        base = repeated.get("base", recipe.base)
        return replace(request, recipe=with_files(recipe, base, files, recipe.output))


def _lay_over(
    document: dict[str, Any], given: dict[str, Any], spelled: Callable[[str], str]
) -> None:
    known = (*KEYS, *PER_MODEL, *parameter_names())
    for name in given:
        if name not in known:
            meant = did_you_mean(name, (*known, *CALL_ARGUMENTS))
            raise RecipeError(f"{spelled(name)}: not known{meant}")
    # A number of NumPy's is one of Python's, or no file could say it.
    given = {n: v.item() if isinstance(v, np.generic) else v for n, v in given.items()}
    fields = {name: value for name, value in given.items() if name in KEYS}
    if not isinstance(fields.get("stages", {}), Mapping):
        raise RecipeError(
            f"{spelled('stages')}: must be a dict of stages, each with its parameters"
        )
    if isinstance(fields.get("method"), str):  # what is given with it must suit it all the same
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
            if not isinstance(value, list | tuple):  # one for all
                value = [value] * (len(models) if isinstance(models, list | tuple) else 1)
            set_for_models(document, key, value, spelled(name))
    asked = [name for name in parameter_names() if name in given]
    method = document.get("method", DEFAULT_METHOD)
    if not asked or not isinstance(method, str):
        return  # the check of the recipe says what is wrong with a method that is not text
    chains = list(map(parse_method, _methods(document)))
    for name in asked:
        values = given[name] if isinstance(given[name], list | tuple) else [given[name]]
        takers = (c for c in chains if any(name in stage.parameters for stage in c))
        set_parameter(document, next(takers, chains[0]), name, list(values), spelled(name))


def _methods(document: Mapping[str, Any]) -> list[str]:
    """Return the method of a document, then those of its rules."""
    rules = document.get("tensors", ())
    tables = filter(_as_dict, rules if isinstance(rules, list | tuple) else ())
    named = (table["method"] for table in tables if isinstance(table.get("method"), str))
    return [document.get("method", DEFAULT_METHOD), *named]


def _as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def parameter_names() -> list[str]:
    """List every parameter that a stage has, once; those of installed packages too."""
    load_installed_stages()
    return list(dict.fromkeys(name for stage in STAGES.values() for name in stage.parameters))


# ---------------------------------------------------------------- single settings


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe with some of its settings changed, checked like any other.

    Parameters that only the stages of another method take are left out with them. A setting that
    has no effect is refused; `applies` tells.

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
        set_by_name(document, name, value, names)
    for name, value in included.items():
        if name.removeprefix(INCLUDE) not in names or not isinstance(value, bool):
            there = f"{INCLUDE}MODEL is true or false, for {', '.join(names)}"
            raise RecipeError(f"{name} = {value!r}: {there}")
    changed = request_from_document(document, "settings").recipe
    kept = [n for n, name in enumerate(names) if included.get(INCLUDE + name, True)]
    return with_models(changed, kept) if included else changed


def get_by_name(recipe: Recipe, name: str) -> Any:
    """Return the value of a setting in a recipe; of several models, the mean."""
    first, dot, rest = name.partition(".")
    names = recipe.names
    if not dot and name in FIELDS:
        return getattr(recipe, name)
    if dot and first in {stage.name for stage, _ in recipe.chain}:
        return next(s[rest] for stage, s in recipe.chain if stage.name == first)
    chosen = [number for number, own in enumerate(names) if not dot or own == rest]
    if first == "weight" and chosen:
        return float(np.mean([mean_value(recipe.weights()[model]) for model in chosen]))
    joint = [settings for stage, settings in recipe.chain if stage.kind != "delta"]
    values = [
        own[first]
        for model in chosen
        for own in (*recipe.settings_for("", model), *joint)
        if first in own
    ]
    if values and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return float(np.mean(values))
    return values[0] if values else None


def set_by_name(document: dict[str, Any], name: str, value: Any, models: Sequence[str]) -> None:
    """Set what a name stands for in the tables of a recipe whose models have these names."""
    chain = parse_method(document.get("method", DEFAULT_METHOD))
    first, dot, rest = name.partition(".")
    if not dot and name in FIELDS:
        document[name] = value
    elif not dot and name in MODEL_SETTINGS:
        set_for_models(document, name, [value] * len(models), name)
    elif not dot:
        set_parameter(document, chain, name, [value], name)
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


def applies(name: str, method: str) -> bool:
    """Return whether a setting has an effect in a method.

    >>> names = ("scale", "drop_rate", "keep_ratio", "trim.keep_ratio")
    >>> [applies(name, "trim+ties") for name in names]
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
    if not any(applies("embedding_drop_rate", method) for method in methods):
        document.pop("embedding_drop_rate", None)
    rules = document.get("tensors", [])
    entries = [*_model_tables(document), *(rules if isinstance(rules, list | tuple) else [])]
    for entry in (e for e in entries if isinstance(e, dict) and "method" not in e):
        is_rule = "file" not in entry
        for key in list(entry):
            of_stage = any(key in stage.parameters for stage in STAGES.values())
            asked = key if is_rule or not of_stage else f"{key}.model"
            if (of_stage or key == "weight") and not any(applies(asked, m) for m in methods):
                del entry[key]


def set_parameter(
    document: dict[str, Any], chain: Sequence[Stage], name: str, values: list[Any], shown: str
) -> None:
    """Set a stage's parameter for all models, or for each its own; `shown` is its name to users."""
    owner = _find_owner(chain, name, shown)
    if not isinstance(document.setdefault(owner.name, {}), dict):
        return  # the check of the recipe will say it
    if len(values) == 1:
        document[owner.name][name] = values[0]
        if isinstance(document.get("models"), list | tuple):
            document["models"] = [  # no model has a value of its own any longer
                {key: entry[key] for key in entry if key != name}
                if isinstance(entry, dict)
                else entry
                for entry in _model_tables(document)
            ]
    elif owner.kind != "delta":
        raise RecipeError(f"{shown}: {owner.name} takes one value for all, not {len(values)}")
    else:
        set_for_models(document, name, values, shown)


def _find_owner(chain: Sequence[Stage], name: str, shown: str) -> Stage:
    owners = [
        stage
        for stage in takers(chain, name)
        if STAGES.get(IMPLIED.get((stage.name, name), "")) not in chain  # else that one's is meant
    ]
    method = "+".join(stage.name for stage in chain)
    if not owners:
        parameters = [n for stage in chain for n in stage.parameters]
        spelled = [f"--{n.replace('_', '-')}" if shown.startswith("--") else n for n in parameters]
        takes = ", ".join(spelled) or "no parameters"
        raise RecipeError(f"{shown} would have no effect: method {method!r} takes {takes}")
    if len(owners) > 1:
        both = " and ".join(stage.name for stage in owners)
        raise RecipeError(f"{shown}: {both} both have it; set it in the table of the stage")
    return owners[0]


def set_for_models(document: dict[str, Any], key: str, values: Sequence[Any], shown: str) -> None:
    """Write a value into each model's table."""
    if len(values) != len(entries := _model_tables(document)):
        models = times(len(entries), "model")
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


def read_value(text: str) -> Any:
    """Read a number, `true` or `false`; anything else is text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
