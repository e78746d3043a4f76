"""Single settings of a recipe by name, laid over its tables.

scale, method, seed …          a field of the recipe
drop_rate                      a parameter, in the table of the one stage that has it
trim.density                   a parameter of that stage
weight.math, drop_rate.math    what is said of one model; weight alone: of each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dare.errors import RecipeError, did_you_mean
from dare.recipe.document import LIFTED, recipe_from_document
from dare.recipe.entries import distinct
from dare.recipe.schema import Recipe
from dare.stages import IMPLIED, STAGES, Stage, parse_method
from dare.tensors.sizes import times

FIELDS = ("method", "scale", "seed", "embedding_drop_rate")
"""Fields of a recipe that can be set by name."""
OF_MODELS = ("weight", "seed")
"""What is said of each model, beside the parameters of delta stages."""


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with some of its settings changed, checked like any other.

    What only the stages of another method take is left out with them. A setting that has no effect
    is refused; `applies` tells.

    >>> recipe = Recipe(base="b", models=["math", "code"], stages={"dare": {"drop_rate": 0.5}})
    >>> changed = with_settings(recipe, {"method": "trim+ties", "weight.math": 0.7, "scale": 2.0})
    >>> changed.stages, changed.weights(), changed.scale
    ({}, (0.7, 1.0), 2.0)
    """
    document = recipe.to_document()
    document.pop("output_digest", None)
    document.pop("search", None)
    given = dict(settings)
    if "method" in given:
        document["method"] = given.pop("method")
        _leave_out_the_idle(document)
    names = distinct([entry.name for entry in recipe.models])
    for name, value in given.items():
        set_by_name(document, name, value, names)
    return recipe_from_document(document, "settings")


def set_by_name(document: dict[str, Any], name: str, value: Any, models: Sequence[str]) -> None:
    """Set what a name stands for in the tables of a recipe whose models have these names."""
    chain = parse_method(document.get("method", Recipe.model_fields["method"].default))
    first, dot, rest = name.partition(".")
    if not dot and name in FIELDS:
        document[name] = value
    elif not dot and name in OF_MODELS:
        set_for_models(document["models"], name, [value] * len(models), name)
    elif not dot:
        set_parameter(document, chain, name, [value], name)
    elif first in {stage.name for stage in chain}:
        document.setdefault(first, {})[rest] = value
    elif rest in models:
        set_for_model(document["models"], first, value, models.index(rest))
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
        lifted = {key: document[name][key] for key in LIFTED if key in document[name]}
        document.update(lifted)
        del document[name]
    if not applies("embedding_drop_rate", method):
        document.pop("embedding_drop_rate", None)
    entries = [e for e in document["models"]["merge_files"] if isinstance(e, dict)]
    for entry in [*entries, *document.get("tensors", [])]:
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
        return  # which is what the recipe's own check will say
    if len(values) == 1:
        document[owner.name][name] = values[0]
        entries = document["models"].get("merge_files")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                entry.pop(name, None)
    elif owner.kind == "combine":
        raise RecipeError(
            f"{shown}: {owner.name} sees all models at once and takes one value, not {len(values)}"
        )
    else:
        set_for_models(document["models"], name, values, shown)


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
        raise RecipeError(
            f"{shown} would have no effect: method {method!r} takes "
            f"{', '.join(spelled) or 'no parameters'}"
        )
    if len(owners) > 1:
        raise RecipeError(
            f"{shown}: {' and '.join(stage.name for stage in owners)} both have it; "
            "set it in a recipe, in the table of the stage"
        )
    return owners[0]


def set_for_models(files: dict[str, Any], key: str, values: Sequence[Any], shown: str) -> None:
    """Write a value into each model's table."""
    entries = files.get("merge_files", [])
    if not isinstance(entries, list):
        entries = files["merge_files"] = [entries]
    if len(values) != len(entries):
        raise RecipeError(
            f"{shown}: {len(values)} given for {times(len(entries), 'model')}; give one for "
            "each, in the order of the models"
        )
    for place, value in enumerate(values):
        set_for_model(files, key, value, place)


def set_for_model(files: dict[str, Any], key: str, value: Any, place: int) -> None:
    """Write a value into one model's table."""
    entry = files["merge_files"][place]
    own = entry if isinstance(entry, dict) else {"file": entry}
    files["merge_files"][place] = {**own, key: value}


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
