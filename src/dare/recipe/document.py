"""Recipes from TOML tables: files named in one way, inner merges first, then the fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

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
from dare.recipe.options import RunOptions
from dare.recipe.recipe import OTHER_TYPES, Layers, Recipe, Request
from dare.stages import STAGES, parse_method
from dare.stages.registry import combine_of

# Keys that may be in the table [dare] but belong to the whole recipe.
DARE_TABLE_ALIASES = ("delta_threshold", "verbose", "embedding_drop_rate")
# Keys of a recipe's file, beside stages and the other names of files.
KEYS = (*Recipe.fields(), *RunOptions.fields())
# Keys that the ranges of a stack inherit.
INHERITED_BY_LAYERS = (
    *("seed", "dtype", "on_missing", "on_extra", "on_mismatch", "on_integer_mismatch"),
    *("allow_pickle", "allow_not_finite"),
)
# Keys that parts do not have.
TOP_LEVEL_ONLY = ("output", "format", "shard_size", "copy_from", "chat_template", "search")
TOO_DEEP = "too many merges are inside each other; write the output of one, and name that instead"
PASSTHROUGH = "passthrough"

_Entry = TypeVar("_Entry", ModelEntry, TensorRule)
_Merge = TypeVar("_Merge", bound=Recipe)


def request_from_document(document: Mapping[str, Any], where: str) -> Request:
    """Build a request from the tables of its TOML form."""
    with errors_named(where):
        return read_request(*find_files(document))


def read_request(document: Mapping[str, Any], shown: Mapping[str, str]) -> Request:
    """Build a request from a document in our form; `shown` are the names it had for files."""
    request = Request.of(**_read_fields(document, shown))
    _refuse_unused(request.recipe)
    return request


def _refuse_unused(recipe: Recipe) -> None:
    """Refuse merges that nothing uses, like tables of stages that are not in a method."""
    for name in recipe.merges.keys() - recipe.named.keys():
        what = f"no base or model is called {name}"
        raise RecipeError(f"[merges.{name}] would have no effect: {what}")
    for inner in (*recipe.merges.values(), *recipe.layers):
        _refuse_unused(inner)


@contextmanager
def errors_named(where: str) -> Iterator[None]:
    """Add the place to errors in a recipe."""
    try:
        yield
    except ValueError as error:  # a RecipeError is one
        raise RecipeError(f"{where}: {error}") from None
    except RecursionError:
        raise RecipeError(f"{where}: {TOO_DEEP}") from None


def _read_fields(document: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a request: inner merges first, then models, rules and stages."""
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
    """Tell if a method interpolates between models, so that the first can serve as the base."""
    try:
        return combine_of(parse_method(document["method"])).interpolates is not None
    except (RecipeError, LookupError, AttributeError, TypeError):  # reported with the recipe
        return False


def _read_inner_merges(given: dict[str, Any]) -> None:
    """Build the merges inside a document: those with names, and those of a stack."""
    merges, layers = given.get("merges", {}), given.get("layers", ())
    if not isinstance(merges, Mapping) or not isinstance(layers, list | tuple):
        raise RecipeError("[merges.NAME] and [[layers]] hold the keys of recipes")
    built = {name: _read_merge(table, Recipe, f"merges.{name}") for name, table in merges.items()}
    given |= {"merges": built} if built else {}
    if not layers:
        return
    shared = {key: given[key] for key in INHERITED_BY_LAYERS if key in given}
    if str(shared.get("dtype")).upper() in OTHER_TYPES:  # only the whole stack is recoded
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
    """Move the recipes in place of models to the table of merges; read their files.

    >>> lift_recipes({"base": "b", "models": [{"recipe": {"base": "b", "models": ["m"]}}]})
    {'base': 'b', 'models': ['merge 1'], 'merges': {'merge 1': {'base': 'b', 'models': ['m']}}}
    """
    lifted, merges = dict(document), document.get("merges", {})
    if not isinstance(merges, Mapping):
        return lifted  # refused later
    by_name = {name: _lift_inner(table, outer) for name, table in merges.items()}

    def lift(entry: Any) -> Any:
        if not isinstance(entry, Mapping) or "recipe" not in entry:
            return entry
        inner, name = entry["recipe"], f"merge {len(by_name) + 1}"
        if isinstance(inner, str | PathLike):
            path = as_path(inner)
            if path in outer:
                raise RecipeError(f"{path}: contains itself; give it other models")
            name = str(path) if path.stem in by_name else path.stem
            by_name[name] = _lift_inner(read_toml(path), (*outer, path))
        else:
            by_name[name] = _lift_inner(inner, outer)
        rest = {key: value for key, value in entry.items() if key != "recipe"}
        return {"file": name, **rest} if rest else name

    for key in lifted.keys() & {"base", "model"}:
        lifted[key] = lift(lifted[key])
    if isinstance(models := lifted.get("models"), list | tuple):
        lifted["models"] = list(map(lift, models))
    if isinstance(layers := lifted.get("layers"), list | tuple):
        lifted["layers"] = [_lift_inner(entry, outer) for entry in layers]
    return {**lifted, "merges": by_name} if by_name else lifted


def _lift_inner(table: Any, outer: tuple[Path, ...]) -> Any:
    return lift_recipes(in_our_form(table), outer) if isinstance(table, Mapping) else table


def _read_models(document: Mapping[str, Any], shown: Mapping[str, str]) -> Any:
    """Return the models as entries; refuse a document without base or models.

    An unknown key is named if it is probably a misspelling of one of them.
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
    """Refuse a file that is named below a table's heading, and so belongs to the table."""
    for heading, table in document.items():
        for name in table if heading in STAGES and isinstance(table, dict) else ():
            if name in OUR_NAMES:
                remedy = "move it above the first heading in brackets"
                raise RecipeError(f"[{heading}] {name}: belongs at the top level; {remedy}")


def _find_table(parameter: str, method: object) -> str | None:
    """Find the stage whose table has a parameter, first among those of the method."""
    try:
        chain = parse_method(method) if isinstance(method, str) else ()
    except RecipeError:
        chain = ()
    return next((s.name for s in (*chain, *STAGES.values()) if parameter in s.parameters), None)


def _read_entries(given: Sequence[Any], kind: type[_Entry], shown: str) -> list[Any]:
    """Build the entries of a list from their tables; paths of models are not changed."""
    plain = (ModelEntry, str, PathLike) if kind is ModelEntry else (TensorRule,)
    return [
        entry if isinstance(entry, plain) else _read_entry(entry, kind, f"{shown}, number {n}: ")
        for n, entry in enumerate(given, start=1)
    ]


def _read_entry(table: object, kind: type[_Entry], where: str) -> _Entry:
    """Build an entry of a list: keys that are parameters go into its `settings`."""
    if not isinstance(table, Mapping):
        path = "the path of a file or folder, or " if kind is ModelEntry else ""
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
