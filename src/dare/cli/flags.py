"""The flags: those that commands share, and those that describe a recipe.

The latter are made from the recipe's schema and the registry of stages: what a field or parameter
means is said there, and a new stage brings its flags along. `recipe_from_flags` lays what was given
over the tables of a recipe file, so that both ways of asking end in the same checks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from dare.api import load_document
from dare.cli import UsageError
from dare.errors import RecipeError
from dare.recipe.document import FILE_KEYS, LIFTED, recipe_from_document
from dare.recipe.schema import SAME_WEIGHTS, Recipe
from dare.recipe.settings import read_value, set_for_models, set_parameter
from dare.stages import STAGES, parse_method
from dare.stages.outside import load_installed_stages
from dare.tensors.sizes import times

FILES = Group("Files", sort_key=1)
METHOD = Group("Method", sort_key=2)
STAGE_PARAMETERS = Group(
    "Parameters of stages",
    help="One value, or for delta stages one for each model.",
    sort_key=3,
)
MISFITS = Group("What does not fit together", sort_key=4)
RESOURCES = Group("Resources", sort_key=5)
RUN = Group("This run", sort_key=6)
OUTPUT = Group("What is shown", sort_key=7)


def switch(text: str, *names: str, **place: Any) -> Parameter:
    """A flag that is off unless it is given."""
    return Parameter(name=names or None, negative="", show_default=False, help=text, **place)


Verbose = Annotated[
    bool,
    switch(
        "Show plan, progress and report, even if the recipe says otherwise.",
        "--verbose",
        "-v",
        group=OUTPUT,
    ),
]
Quiet = Annotated[bool, switch("Show errors only.", "--quiet", "-q", group=OUTPUT)]
Json = Annotated[
    bool, switch("One JSON document on stdout; everything else goes to stderr.", group=OUTPUT)
]
Debug = Annotated[bool, switch("With an error, show where it came from.", group=OUTPUT)]
Overwrite = Annotated[bool, switch("Replace an existing output.", group=RUN)]
Config = Annotated[
    Path | None,
    Parameter(
        name=["--config", "--recipe", "-c"],
        group=FILES,
        help="A recipe in TOML, or a finished output to repeat. Flags override it.",
    ),
]
StageFiles = Annotated[
    list[Path] | None,
    Parameter(
        name="--stage",
        metavar="FILE",
        negative="",
        group=METHOD,
        help="A Python file that registers a stage of your own. It is run: trust it first.",
    ),
]


@dataclass(frozen=True)
class Flag:
    """How something that a recipe says is given on the command line."""

    kind: Any
    group: Group
    names: tuple[str, ...] = ()
    metavar: str | None = None
    help: str = ""
    """What it means; else what the recipe's schema says of the field."""

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter that a command gets for it."""
        flag = Parameter(
            name=self.names or None,
            group=self.group,
            help=self.help or Recipe.model_fields[name].description,
            metavar=self.metavar,
            negative="",
            consume_multiple=(1, None),
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        annotation = Annotated[self.kind | None, flag]  # type: ignore[name-defined]
        return inspect.Parameter(name, kind, default=None, annotation=annotation)


FIELDS: dict[str, Flag] = {
    "base": Flag(Path, FILES, ("--base", "-b")),
    "models": Flag(list[Path], FILES, ("--merge", "-m"), "PATH..."),
    "output": Flag(Path, FILES, ("--output", "-o")),
    "copy_from": Flag(str, FILES, metavar="MODEL"),
    "chat_template": Flag(str, FILES),
    "allow_pickle": Flag(bool, FILES),
    "allow_not_finite": Flag(bool, FILES),
    "input_digests": Flag(list[str], FILES),
    "output_digest": Flag(str, FILES),
    "method": Flag(str, METHOD),
    "seed": Flag(int, METHOD),
    "scale": Flag(float, METHOD),
    "dtype": Flag(str, METHOD),
    "embedding_drop_rate": Flag(float, METHOD),
    "tensors": Flag(
        list[str],
        METHOD,
        metavar="RULE...",
        help="Parameters for tensors by name, as in '*.mlp.*: drop_rate=0.5, rescale=l1'.",
    ),
    "vocabulary": Flag(str, MISFITS, metavar="error|base|union"),
    "pad_to_multiple_of": Flag(int, MISFITS),
    "on_missing": Flag(str, MISFITS, metavar="error|base"),
    "on_extra": Flag(str, MISFITS, metavar="error|drop"),
    "on_mismatch": Flag(str, MISFITS, metavar="error|base"),
    "on_integer_mismatch": Flag(str, MISFITS, metavar="error|base"),
    "threads": Flag(int, RESOURCES),
    "max_memory": Flag(str, RESOURCES, metavar="SIZE"),
    "shard_size": Flag(str, RESOURCES, metavar="SIZE"),
    "cluster": Flag(str, RESOURCES, metavar="auto|ADDRESS"),
    "cluster_log": Flag(Path, RESOURCES, metavar="FILE"),
    "delta_threshold": Flag(float, OUTPUT),
}
"""The fields of a recipe, in the order of `--help`."""

PER_MODEL: dict[str, Flag] = {
    "weight": Flag(list[float], METHOD, help="Each model's share, one value for each."),
    "model_seed": Flag(list[int], METHOD, help="Each model's own seed, one for each."),
}
"""What is said of each model."""


def takes_recipe(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command a flag for all that a recipe can say, in place of its `**flags`."""
    signature = inspect.signature(command, eval_str=True)
    flags = FIELDS | PER_MODEL
    for name in stage_parameter_names():
        flags[name] = Flag(list[str], STAGE_PARAMETERS, (), "VALUE...", _stage_help(name))
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [flag.parameter(name) for name, flag in flags.items()]
    parameters.sort(key=lambda p: p.kind)
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    return command


def stage_parameter_names() -> list[str]:
    """Every parameter that a stage has, once; stages of installed packages have theirs too."""
    load_installed_stages()
    return list(dict.fromkeys(name for stage in STAGES.values() for name in stage.parameters))


def _stage_help(name: str) -> str:
    owners = {
        stage.name: stage.parameters[name] for stage in STAGES.values() if name in stage.parameters
    }
    first = next(iter(owners.values()))
    defaults = ", ".join(f"{stage} {toml_word(p.default)}" for stage, p in owners.items())
    return rf"{first.description} {first.range} \[default: {defaults}]"  # else it is markup


def toml_word(value: object) -> str:
    """How people see a value: `true`, `0.9`, `none`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def recipe_from_flags(
    config: Path | None,
    flags: Mapping[str, Any],
    *,
    start: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> Recipe:
    """Lay the flags that were given over a recipe file, over a document, or over nothing."""
    given = {name: value for name, value in flags.items() if value is not None}
    if config is None and start is None:
        missing = [FIELDS[name].names[0] for name in ("base", "models") if name not in given]
        if missing:
            raise UsageError(
                f"{' and '.join(missing)} missing: give --base, --merge and --output, "
                "or a recipe with --config"
            )
    document = copy.deepcopy(dict(start or {})) if config is None else load_document(config)
    where = "command line" if config is None else str(config)
    if config is not None and given:
        where += " with flags"
    moved: dict[str, Any] = {}
    if "output_digest" in document:  # a merge is repeated, perhaps with its files elsewhere
        moved = {name: given.pop(name) for name in ("base", "models") if name in given}
        if set(given) - SAME_WEIGHTS:
            del document["output_digest"]
    try:
        _lay_over(document, given, fixed)
        return _with_files(recipe_from_document(document, where), moved)
    except RecipeError as error:
        text = str(error)
        raise RecipeError(text if text.startswith(where) else f"{where}: {text}") from None


def _with_files(recipe: Recipe, moved: Mapping[str, Any]) -> Recipe:
    """A repeated merge whose files lie elsewhere than the manifest says."""
    files = moved.get("models", [entry.file for entry in recipe.models])
    if len(files) != len(recipe.models):
        raise RecipeError(
            f"--merge: {times(len(files), 'model')} given, and "
            f"{len(recipe.models)} were merged; give all of them, in that order"
        )
    return recipe.with_files(moved.get("base", recipe.base), files, recipe.output)


def _lay_over(document: dict[str, Any], given: dict[str, Any], fixed: Mapping[str, Any]) -> None:
    files = document.setdefault("models", {})
    if not isinstance(files, dict):
        return  # which is what the recipe's own check will say
    fields = {name: given[name] for name in FIELDS if name in given} | dict(fixed)
    if "tensors" in fields:
        fields["tensors"] = [read_rule(text) for text in fields["tensors"]]
    for key, name in FILE_KEYS.items():
        if name in fields:
            paths = fields.pop(name)
            files[key] = str(paths) if isinstance(paths, Path) else [str(path) for path in paths]
    document.update(fields)
    for key in LIFTED:
        if key in fields and isinstance(document.get("dare"), dict):
            document["dare"].pop(key, None)

    for name in (name for name in PER_MODEL if name in given):
        set_for_models(files, name.removeprefix("model_"), given[name], _flag(name))
    asked = [name for name in stage_parameter_names() if name in given]
    method = document.get("method", Recipe.model_fields["method"].default)
    if not asked or not isinstance(method, str):
        return  # a method that is no text is for the recipe's own check too
    chain = parse_method(method)
    for name in asked:
        values = [read_value(text) for text in given[name]]
        set_parameter(document, chain, name, values, _flag(name))


def read_rule(text: str) -> dict[str, Any]:
    """Read `PATTERN: name=value, name=value`.

    >>> read_rule("*.mlp.*: drop_rate=0.5, rescale=l1")
    {'match': '*.mlp.*', 'drop_rate': 0.5, 'rescale': 'l1'}
    """
    pattern, _, settings = text.partition(":")
    pairs = [pair.partition("=") for pair in settings.split(",")]
    named = all(name.strip() not in ("", "match") and value.strip() for name, _, value in pairs)
    if not pattern.strip() or not named:
        raise RecipeError(
            f"--tensors {text!r}: write PATTERN: name=value, as in '*.mlp.*: drop_rate=0.5'"
        )
    return {"match": pattern.strip()} | {
        name.strip(): read_value(value.strip()) for name, _, value in pairs
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
