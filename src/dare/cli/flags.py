"""What commands share: flags, those that describe a recipe, and results on the screen.

The flags of a recipe are listed in help.toml; those of stages are made from the registry, so that a
new stage brings its flags along. `recipe_from_flags` lays what was given over the tables of a
recipe file, so that both ways of asking end in the same checks. A flag of one command alone is
explained in that command's docstring.

Nothing heavy is imported before it is needed: `--help` reads this, too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dare.cli import DONE, HELP, UsageError
from dare.cli.parsing import OUTPUT, Command, Flag, Option, read_options, takes_stage_flags

if TYPE_CHECKING:
    from dare.documents.console import Console
    from dare.documents.shown import Shown
    from dare.recipe.recipe import Request

FILES = "Files"
METHOD = "Method"
STAGE_PARAMETERS = "Parameters of stages"
MISFITS = "What does not fit together"
RESOURCES = "Resources"
RUN = "This run"


def switch(*names: str, **place: Any) -> Flag:
    """A flag that is off unless it is given."""
    return Flag(names, shows_default=False, **place)


def output_flag(text: str, **place: Any) -> Flag:
    """The flag for the place of the result."""
    return Flag(("--output", "-o"), help=text, **place)


_shown = partial(switch, group=OUTPUT)
_EVERYTHING = "Show plan, progress and report: the default."
Verbose = Annotated[bool, _shown("--verbose", "-v", help=_EVERYTHING)]
Quiet = Annotated[bool, _shown("--quiet", "-q", help="Show errors only.")]
Json = Annotated[bool, _shown(help="JSON on stdout, everything else on stderr.")]
Switch = Annotated[bool, switch()]
RunSwitch = Annotated[bool, switch(group=RUN)]
RunPath = Annotated[Path | None, Flag(group=RUN)]
Overwrite = Annotated[bool, switch(group=RUN, help="Replace an existing output.")]
Resume = Annotated[bool, switch(group=RUN, help="Resume an earlier run.", has_negative=True)]
_CONFIG = Flag(("--config", "--recipe", "-c"), group=FILES, help="A recipe, or an output.")
Config = Annotated[Path | None, _CONFIG]
_TRUST = "A Python file that registers a stage. It is run, so trust it first."
StageFiles = Annotated[
    list[Path] | None, Flag(("--stage",), metavar="FILE", group=METHOD, help=_TRUST)
]


def show_result(console: Console, found: Shown, *, as_json: bool) -> int:
    """Show a result to people, and if it is asked for, to programs; return the exit status."""
    from dare.documents.terminal import print_document

    print_document(console, found.document())
    if as_json:
        print_json(found.to_json())
    return DONE


def print_json(values: Any) -> None:
    """Write values, or a text of JSON, to stdout in letters that leave a terminal alone."""
    from dare.tensors.header import printable_json

    is_text = isinstance(values, str)
    print(printable_json(values if is_text else dumps(values, indent=2, ensure_ascii=False)))


# ---------------------------------------------------------------- what a recipe can say


FLAG_TYPES: dict[str, Any] = {"path": Path, "text": str, "whole": int, "number": float}
FLAG_TYPES |= {"switch": bool, "paths": list[Path], "texts": list[str]}
# The fields of a recipe: the kind of value and the flag, in the order of `--help`.
FIELDS: dict[str, tuple[Any, Flag]] = {
    name: (FLAG_TYPES[kind], Flag(tuple(names), group, text, form, least=1))
    for group, fields in HELP["flags"].items()
    for name, (kind, text, form, *names) in fields.items()
}
PER_MODEL: dict[str, tuple[Any, Flag]] = {
    "weight": (list[float], Flag((), METHOD, "Each model's share, one value for each.", least=1)),
    "model_seed": (list[int], Flag((), METHOD, "Each model's seed, one value for each.", least=1)),
}
# Listed by `--help`, and so known without importing the stages.
DROP_RATE = (list[str], Flag((), METHOD, HELP["drop_rate"], "VALUE...", least=1))
DECLARED = {**FIELDS, **PER_MODEL, "drop_rate": DROP_RATE}

# Flags of every command that takes a recipe, which are not part of one.
NOT_IN_RECIPE = {"config": Config, "stage": StageFiles}


def takes_recipe(command: Command) -> Command:
    """Give a command a flag for all that a recipe can say, beside its `**flags` for stages."""
    shared = [_keyword(name, kind, None) for name, kind in NOT_IN_RECIPE.items()]
    return _declare(command, command, [*shared, *map(flag_for, DECLARED)])


def flag_for(name: str) -> inspect.Parameter:
    """The parameter that a command gets for something that a recipe can say."""
    kind, flag = DECLARED[name]
    return _keyword(name, Annotated[kind | None, flag], None)


def stage_options() -> list[Option]:
    """A flag for each parameter that a stage has; the drop rate stands with the method."""
    from dare.recipe.settings import parameter_names
    from dare.stages import STAGES

    known = [found for stage in STAGES.values() for found in stage.parameters.values()]
    switches = {found.name for found in known if isinstance(found.default, bool)}

    def option(name: str) -> Option:
        group = METHOD if name == "drop_rate" else STAGE_PARAMETERS
        flag = Flag((), group, _stage_help(name), "VALUE...", 0 if name in switches else 1)
        return Option(name, str, flag, flag.help, None, is_list=True)

    return [option(name) for name in parameter_names()]


def every_option(command: Command) -> list[Option]:
    """Return what a command takes with the flags of stages, each with its meaning."""
    options = read_options(command)
    if not takes_stage_flags(command):
        return options
    staged = stage_options()
    names, known = {option.name for option in staged}, field_help()
    own = (option for option in options if option.name not in names)
    return [*(replace(own, help=own.help or known.get(own.name, "")) for own in own), *staged]


def field_help() -> dict[str, str]:
    """Return what the fields of a recipe and of a search mean, as they say it themselves."""
    from dare.recipe.options import RunOptions, Search
    from dare.recipe.recipe import Recipe

    fields = Search.fields() | Recipe.fields() | RunOptions.fields()
    return {name: field.description or "" for name, field in fields.items()}


# A function whose result can be shown, and those of its arguments that are not as flags give them.
Work = tuple[Callable[..., Any], dict[str, Any]]


def runs(declared: Callable[..., Work], more: Sequence[inspect.Parameter] = ()) -> Command:
    """Make a command of a declaration of flags: a function is called, and its result shown.

    The declaration checks its flags, and returns the function with the arguments that it takes in
    another form. It gets `more` flags among its `**flags`.
    """

    @wraps(declared)
    def run(*given: Any, quiet: bool = False, json: bool = False, **flags: Any) -> int:
        from dare.documents.console import make_console
        from dare.errors import DareWarning

        asked = inspect.signature(declared).bind(*given, **flags)
        asked.apply_defaults()
        work, changed = declared(*asked.args, **asked.kwargs)
        if "verbose" in inspect.signature(work).parameters:
            changed["verbose"] = not quiet
        console = make_console(json=json, quiet=quiet)
        with warnings.catch_warnings(action="ignore", category=DareWarning):  # in the report
            found = work(*asked.args, **asked.kwargs | changed)
        return show_result(console, found, as_json=json)

    shared = [_keyword("quiet", Quiet, False), _keyword("json", Json, False)]
    return _declare(run, declared, [*shared, *more])


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _declare(command: Command, declared: Command, more: Sequence[inspect.Parameter]) -> Command:
    """Give a command the declared flags, and more."""
    signature = inspect.signature(declared, eval_str=True)
    parameters = sorted([*signature.parameters.values(), *more], key=lambda p: p.kind)
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _stage_help(name: str) -> str:
    """Return what a parameter means, for each stage that has its own meaning of it."""
    from dare.documents.words import exact_text
    from dare.stages import STAGES

    meanings: dict[str, list[str]] = {}
    for stage in (stage for stage in STAGES.values() if name in stage.parameters):
        found = stage.parameters[name]
        default = f"{stage.name} {exact_text(found.default)}"
        meanings.setdefault(f"{found.description} {found.range}", []).append(default)
    return "\n".join([f"{text} [default: {', '.join(its)}]" for text, its in meanings.items()])


def recipe_from_flags(
    config: Path | None,
    flags: Mapping[str, Any],
    *,
    start: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> Request:
    """Lay the flags that were given over a recipe file, over a document, or over nothing."""
    from dare.api import load_document
    from dare.recipe.document import errors_named, interpolates
    from dare.recipe.settings import request_with_settings

    given = {n: v for n, v in flags.items() if n not in NOT_IN_RECIPE and v is not None}
    if config is None and start is None:
        needed = ("models",) if interpolates(given) else ("base", "models")
        missing = [f"--{name}" for name in needed if name not in given]
        if missing:
            remedy = "give --base, --models and --output, or a recipe with --config"
            raise UsageError(f"{' and '.join(missing)} missing: {remedy}")
    document = dict(start or {}) if config is None else load_document(config, given)
    where = "command line" if config is None else str(config)
    if config is not None and given:
        where += " with flags"
    with errors_named(where):
        values = {name: read_flag(name, value) for name, value in given.items()}
    return request_with_settings(
        document, values | fixed, where, lambda name: f"--{name.replace('_', '-')}"
    )


def read_flag(name: str, value: Any) -> Any:
    """Return the value of a flag, with numbers, rules and truths read from their texts."""
    if name == "tensors":
        return [read_rule(text) for text in value]
    if name in FIELDS or name in PER_MODEL:
        return value
    return [read_value(text) for text in value] or [True]


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


def read_rule(text: str) -> dict[str, Any]:
    """Read `PATTERN: name=value, name=value`.

    >>> read_rule("*.mlp.*: drop_rate=0.5, rescale=l1")
    {'match': '*.mlp.*', 'drop_rate': 0.5, 'rescale': 'l1'}
    """
    from dare.errors import RecipeError

    pattern, _, settings = text.partition(":")
    pairs = [pair.partition("=") for pair in settings.split(",")]
    named = all(name.strip() not in ("", "match") and value.strip() for name, _, value in pairs)
    if not pattern.strip() or not named:
        example = "'*.mlp.*: drop_rate=0.5'"
        raise RecipeError(f"--tensors {text!r}: write PATTERN: name=value, as in {example}")
    values = {name.strip(): read_value(value.strip()) for name, _, value in pairs}
    return {"match": pattern.strip()} | values
