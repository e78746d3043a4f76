"""Single settings of a recipe by name, laid over its tables.

scale, method, seed …          a field of the recipe
drop_rate                      a parameter, in the table of the one stage that has it
trim.density                   a parameter of that stage
weight.math, drop_rate.math    what is said of one model; weight alone: of each
include.math                   whether a model takes part at all

`overlaid` does it for a whole merge, from a command line or from keywords in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from dare.documents.words import times
from dare.errors import RecipeError, did_you_mean
from dare.recipe.document import LIFTED, recipe_from_document
from dare.recipe.entries import distinct
from dare.recipe.naming import OTHER_NAMES, Files
from dare.recipe.schema import SAME_WEIGHTS, ModelEntry, Recipe
from dare.stages import IMPLIED, STAGES, Stage, parse_method
from dare.stages.methods import load_installed_stages

FIELDS = ("method", "scale", "seed", "embedding_drop_rate")
"""Fields of a recipe that can be set by name."""
OF_MODELS = ("weight", "seed")
"""What is said of each model, beside the parameters of delta stages."""
INCLUDE = "include."
"""Before the name of a model: whether it takes part."""
OF_THE_CALL = ("overwrite", "resume", "backend")
"""What is said to a function, and not of the merge."""
PER_MODEL = {"weight": "weight", "model_seed": "seed"}
"""What is said of each model by keyword or flag; seed alone is the recipe's."""


def overlaid(
    document: dict[str, Any],
    given: Mapping[str, Any],
    where: str,
    spelled: Callable[[str], str] = str,
) -> Recipe:
    """The recipe of a document with what is given by name laid over it; the document changes.

    Given are fields of a recipe by their names, `PER_MODEL`, and parameters of stages: one value
    for all models, or a list with one for each. `spelled` says what users call a name.
    """
    given = dict(given)
    moved: dict[str, Any] = {}
    if "output_digest" in document:  # a merge is repeated, perhaps with its files elsewhere
        moved = {name: given.pop(name) for name in ("base", "models") if name in given}
        if set(given) - SAME_WEIGHTS:
            del document["output_digest"]
    try:
        _lay_over(document, given, spelled)
        recipe = recipe_from_document(document, where)
        return _with_files(recipe, moved, spelled("models")) if moved else recipe
    except RecipeError as error:
        text = str(error)
        raise RecipeError(text if text.startswith(where) else f"{where}: {text}") from None


def _with_files(recipe: Recipe, moved: Mapping[str, Any], shown: str) -> Recipe:
    """A repeated merge whose files lie elsewhere than the manifest says."""
    files = moved.get("models", [entry.file for entry in recipe.models])
    files = [files] if isinstance(files, str | PathLike) else files
    if len(files) != len(recipe.models):
        raise RecipeError(
            f"{shown}: {times(len(files), 'model')} given, and {len(recipe.models)} were merged; "
            "give all of them, in that order"
        )
    return recipe.with_files(moved.get("base", recipe.base), files, recipe.output)


def _lay_over(
    document: dict[str, Any], given: dict[str, Any], spelled: Callable[[str], str]
) -> None:
    _check_known(given, spelled)
    fields = {name: value for name, value in given.items() if name in Recipe.model_fields}
    named = Files.of(document)
    if isinstance(fields.get("method"), str):  # what is given with it must suit it all the same
        document["method"] = fields["method"]
        _leave_out_the_idle(document)
    for name in OTHER_NAMES:
        if name in fields:
            named.set(name, fields.pop(name))
    for stage, table in fields.pop("stages", {}).items():
        document[stage] = {**_table(document.get(stage)), **table}
    document.update(fields)
    for key in LIFTED:
        if key in fields and isinstance(document.get("dare"), dict):
            document["dare"].pop(key, None)
    for name, key in PER_MODEL.items():
        if name in given:
            set_for_models(document, key, _each(given[name], named), spelled(name))
    asked = [name for name in parameter_names() if name in given]
    method = document.get("method", Recipe.model_fields["method"].default)
    if not asked or not isinstance(method, str):
        return  # the check of the recipe says what is wrong with a method that is not text
    chain = parse_method(method)
    for name in asked:
        values = given[name] if isinstance(given[name], list | tuple) else [given[name]]
        set_parameter(document, chain, name, list(values), spelled(name))


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def parameter_names() -> list[str]:
    """Every parameter that a stage has, once; stages of installed packages have theirs too."""
    load_installed_stages()
    return list(dict.fromkeys(name for stage in STAGES.values() for name in stage.parameters))


def _check_known(given: Mapping[str, Any], spelled: Callable[[str], str]) -> None:
    known = (*Recipe.model_fields, *PER_MODEL, *parameter_names())
    for name in given:
        if name not in known:
            meant = did_you_mean(name, (*known, *OF_THE_CALL))
            raise RecipeError(f"{spelled(name)}: not known{meant}")


def _each(value: Any, named: Files) -> Sequence[Any]:
    """A value for each model, where one may be given for all."""
    if isinstance(value, list | tuple):
        return value
    models = named.get("models")
    return [value] * (len(models) if isinstance(models, list | tuple) else 1)


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with some of its settings changed, checked like any other.

    What only the stages of another method take is left out with them. A setting that has no effect
    is refused; `applies` tells.

    >>> recipe = Recipe(base="b", models=["math", "code"], stages={"dare": {"drop_rate": 0.5}})
    >>> changed = with_settings(recipe, {"method": "trim+ties", "weight.math": 0.7, "scale": 2.0})
    >>> changed.stages, changed.weights(), changed.scale
    ({}, (0.7, 1.0), 2.0)
    >>> with_settings(changed, {"include.math": False}).weights()
    (1.0,)
    """
    document = recipe.to_document()
    document.pop("output_digest", None)
    document.pop("search", None)
    given = dict(settings)
    if "method" in given:
        document["method"] = given.pop("method")
        _leave_out_the_idle(document)
    names = distinct([entry.name for entry in recipe.models])
    included = {name: given.pop(name) for name in list(given) if name.startswith(INCLUDE)}
    for name, value in given.items():
        set_by_name(document, name, value, names)
    changed = recipe_from_document(document, "settings")
    return _with_some(changed, included, names) if included else changed


def _with_some(recipe: Recipe, included: Mapping[str, Any], models: Sequence[str]) -> Recipe:
    """The same recipe for some of its models; rules go on being for the same ones."""
    for name, value in included.items():
        if name.removeprefix(INCLUDE) not in models or not isinstance(value, bool):
            there = f"{INCLUDE}MODEL is true or false, for {', '.join(models)}"
            raise RecipeError(f"{name} = {value!r}: {there}")
    kept = {n: e for n, e in enumerate(recipe.models) if included.get(INCLUDE + models[n], True)}
    rules = []
    for rule, places in recipe.rules:
        files = tuple(str(kept[place].file) for place in places or () if place in kept)
        if places is None or files:
            rules.append(rule if places is None else rule.model_copy(update={"model": files}))
    changed = {"models": tuple(kept.values()), "tensors": tuple(rules), "input_digests": None}
    return recipe.model_copy(update=changed)


def set_by_name(document: dict[str, Any], name: str, value: Any, models: Sequence[str]) -> None:
    """Set what a name stands for in the tables of a recipe whose models have these names."""
    chain = parse_method(document.get("method", Recipe.model_fields["method"].default))
    first, dot, rest = name.partition(".")
    if not dot and name in FIELDS:
        document[name] = value
    elif not dot and name in OF_MODELS:
        set_for_models(document, name, [value] * len(models), name)
    elif not dot:
        set_parameter(document, chain, name, [value], name)
    elif first in {stage.name for stage in chain}:
        document.setdefault(first, {})[rest] = value
    elif rest in models:
        set_for_model(document, first, value, models.index(rest))
    else:
        known = [*(stage.name for stage in chain), *models]
        raise RecipeError(
            f"{name}: there is no stage {first!r} in the method and no model {rest!r}"
            f"{did_you_mean(rest, known)}; write STAGE.PARAMETER or PARAMETER.MODEL; there are "
            f"{', '.join(known)}"
        )


def applies(name: str, method: str) -> bool:
    """Whether a setting has an effect in a method.

    >>> names = ("scale", "drop_rate", "keep_ratio", "trim.keep_ratio")
    >>> [applies(name, "trim+ties") for name in names]
    [True, False, True, True]
    """
    chain = parse_method(method)
    first, dot, rest = name.partition(".")
    if name == "embedding_drop_rate":
        return any("drop_rate" in stage.parameters for stage in chain[:-1])
    if name.startswith(INCLUDE):
        return True
    if first in OF_MODELS and (dot or first == "weight"):
        return first == "seed" or chain[-1].default_weight is not None
    if name in FIELDS:
        return True
    if dot and first in STAGES:
        return any(stage.name == first and rest in stage.parameters for stage in chain)
    takers = chain[:-1] if dot else chain  # a model has settings of delta stages only
    return any(first in stage.parameters for stage in takers)


def _leave_out_the_idle(document: dict[str, Any]) -> None:
    """Take out what the stages of the method do not have."""
    method = document["method"]
    chain = {stage.name for stage in parse_method(method)}
    for name in [name for name in document if name in STAGES and name not in chain]:
        table = _table(document.pop(name))
        document.update({key: table[key] for key in LIFTED if key in table})
    if not applies("embedding_drop_rate", method):
        document.pop("embedding_drop_rate", None)
    rules = document.get("tensors", [])
    told = [*_entries(document), *(rules if isinstance(rules, list | tuple) else [])]
    for entry in (entry for entry in told if isinstance(entry, dict)):
        is_rule = "file" not in entry
        for key in list(entry):
            of_stage = any(key in stage.parameters for stage in STAGES.values())
            asked = key if is_rule or not of_stage else f"{key}.model"
            if (of_stage or key == "weight") and not applies(asked, method):
                del entry[key]


def set_parameter(
    document: dict[str, Any], chain: Sequence[Stage], name: str, values: list[Any], shown: str
) -> None:
    """Set a stage's parameter for all models, or for each its own; `shown` is its name to users."""
    owner = _owner(chain, name, shown)
    if not isinstance(document.setdefault(owner.name, {}), dict):
        return  # the check of the recipe will say it
    if len(values) == 1:
        document[owner.name][name] = values[0]
        _forget_for_models(document, name)
    elif owner.kind == "combine":
        raise RecipeError(f"{shown}: {owner.name} takes one value for all, not {len(values)}")
    else:
        set_for_models(document, name, values, shown)


def _owner(chain: Sequence[Stage], name: str, shown: str) -> Stage:
    """The stage of the chain that a parameter belongs to."""
    owners = [
        stage
        for stage in chain
        if name in stage.parameters
        and STAGES.get(IMPLIED.get((stage.name, name), "")) not in chain  # else that one's is meant
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
    entries = _entries(document)
    if len(values) != len(entries):
        models = times(len(entries), "model")
        raise RecipeError(f"{shown}: {len(values)} given for {models}; give one for each")
    for place, value in enumerate(values):
        set_for_model(document, key, value, place)


def set_for_model(document: dict[str, Any], key: str, value: Any, place: int) -> None:
    """Write a value into one model's table."""
    entries = _entries(document)
    entry = entries[place]
    table = entry if isinstance(entry, dict) else {"file": entry}
    entries[place] = {**table, key: value}
    Files.of(document).set("models", entries)


def _forget_for_models(document: dict[str, Any], key: str) -> None:
    """Take a value out of each model's table."""
    named = Files.of(document)
    if isinstance(named.get("models"), list | tuple):
        for place, entry in enumerate(entries := _entries(document)):
            if isinstance(entry, dict):
                entries[place] = {name: entry[name] for name in entry if name != key}
        named.set("models", entries)


def _entries(document: dict[str, Any]) -> list[Any]:
    """The models of a document as a list of its own, those with settings as tables."""
    models = Files.of(document).get("models")
    if not isinstance(models, list | tuple):
        models = [] if models is None else [models]
    return [entry.to_table() if isinstance(entry, ModelEntry) else entry for entry in models]


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
