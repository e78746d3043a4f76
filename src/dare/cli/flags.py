"""What commands share: flags, those that describe a recipe, and results on the screen.

The flags of a recipe are made from its schema and the registry of stages: what a field or parameter
means is said there, and a new stage brings its flags along. `recipe_from_flags` lays what was given
over the tables of a recipe file, so that both ways of asking end in the same checks. A flag of one
command alone is explained in that command's docstring.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console

from dare.api import load_document
from dare.cli import DONE, HELP, UsageError
from dare.documents.shown import Shown
from dare.documents.terminal import make_console, print_document
from dare.documents.words import exact_text
from dare.errors import DareWarning, RecipeError
from dare.recipe.document import interpolates, naming, overlaid, parameter_names, read_value
from dare.recipe.entries import FLAGS
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe, Request
from dare.stages import STAGES
from dare.tensors.header import printable_json

FILES = Group("Files", sort_key=1)
METHOD = Group("Method", sort_key=2)
STAGE_PARAMETERS = Group(
    "Parameters of stages", help="One value, or for delta stages one for each model.", sort_key=3
)
MISFITS = Group("What does not fit together", sort_key=4)
RESOURCES = Group("Resources", sort_key=5)
RUN = Group("This run", sort_key=6)
OUTPUT = Group("What is shown", sort_key=7)


def switch(*names: str, **place: Any) -> Parameter:
    """A flag that is off unless it is given."""
    return Parameter(names or None, negative="", show_default=False, **place)


def output_flag(text: str, **place: Any) -> Parameter:
    """The flag for the place of the result."""
    return Parameter(["--output", "-o"], help=text, **place)


def several(name: str | None = None, **place: Any) -> Parameter:
    """A flag with one value or more."""
    return Parameter(name, negative="", consume_multiple=(1, None), **place)


_shown = partial(switch, group=OUTPUT)
_EVERYTHING = "Show plan, progress and report: the default."
Verbose = Annotated[bool, _shown("--verbose", "-v", help=_EVERYTHING)]
Quiet = Annotated[bool, _shown("--quiet", "-q", help="Show errors only.")]
Json = Annotated[bool, _shown(help="JSON on stdout, everything else on stderr.")]
Debug = Annotated[bool, _shown(help="With an error, show where it came from.")]
Switch = Annotated[bool, switch()]
RunSwitch = Annotated[bool, switch(group=RUN)]
RunPath = Annotated[Path | None, Parameter(group=RUN)]
Overwrite = Annotated[bool, switch(group=RUN, help="Replace an existing output.")]
Resume = Annotated[bool, Parameter(show_default=False, group=RUN, help="Resume an earlier run.")]
_CONFIG = Parameter(["--config", "--recipe", "-c"], group=FILES, help="A recipe, or an output.")
Config = Annotated[Path | None, _CONFIG]
_TRUST = "A Python file that registers a stage. It is run, so trust it first."
_STAGE = Parameter("--stage", metavar="FILE", negative="", group=METHOD, help=_TRUST)
StageFiles = Annotated[list[Path] | None, _STAGE]


def show_result(console: Console, found: Shown, *, as_json: bool) -> int:
    """Show a result to people, and if it is asked for, to programs; return the exit status."""
    print_document(console, found.document())
    if as_json:
        print_json(found.to_json())
    return DONE


def print_json(values: Any) -> None:
    """Write values, or a text of JSON, to stdout in letters that leave a terminal alone."""
    is_text = isinstance(values, str)
    print(printable_json(values if is_text else dumps(values, indent=2, ensure_ascii=False)))


# ---------------------------------------------------------------- what a recipe can say


@dataclass(frozen=True)
class Flag:
    """A flag for something that a recipe can say."""

    kind: Any
    group: Group
    names: tuple[str, ...] = ()
    metavar: str | None = None
    help: str = ""  # its meaning; else the description in the recipe's schema
    least: int = 1  # values; 0 if the flag alone says yes

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter that a command gets for it."""
        flag = Parameter(
            name=self.names or None,
            group=self.group,
            help=self.help or KNOWN[name].description,
            metavar=self.metavar,
            negative="",
            consume_multiple=(self.least, None),
        )
        return _keyword(name, Annotated[self.kind | None, flag], None)


KNOWN = Recipe.fields() | RunOptions.fields()
KINDS: dict[str, Any] = {"path": Path, "text": str, "switch": bool, "whole": int, "number": float}
KINDS |= {"paths": list[Path], "texts": list[str]}
# The fields of a recipe, in the order of `--help`.
FIELDS: dict[str, Flag] = {
    name: Flag(KINDS[kind], group, FLAGS.get(name, ()), *shown)
    for group in (FILES, METHOD, MISFITS, RESOURCES, OUTPUT)
    for name, (kind, *shown) in HELP["flags"][group.name].items()
}

PER_MODEL: dict[str, Flag] = {
    "weight": Flag(list[float], METHOD, help="Each model's share, one value for each."),
    "model_seed": Flag(list[int], METHOD, help="Each model's seed, one value for each."),
}


# Flags of every command that takes a recipe, which are not part of one.
BESIDE_RECIPE = {"config": (Config, None), "stage": (StageFiles, None), "debug": (Debug, False)}


def takes_recipe(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command a flag for all that a recipe can say, in place of its `**flags`."""
    _declare(command, command, _recipe_flags())
    return command


@cache
def _recipe_flags() -> list[inspect.Parameter]:
    shared = [_keyword(name, *declared) for name, declared in BESIDE_RECIPE.items()]
    fields = [flag.parameter(name) for name, flag in (FIELDS | PER_MODEL).items()]
    return [*shared, *fields, *stage_flags()]


def stage_flags() -> list[inspect.Parameter]:
    """A flag for each parameter that a stage has; the drop rate stands with the method."""
    groups = {
        name: METHOD if name == "drop_rate" else STAGE_PARAMETERS for name in parameter_names()
    }
    known = [found for stage in STAGES.values() for found in stage.parameters.values()]
    least = {found.name: 0 for found in known if isinstance(found.default, bool)}
    return [
        Flag(list[str], group, (), "VALUE...", _stage_help(n), least.get(n, 1)).parameter(n)
        for n, group in groups.items()
    ]


def runs(
    work: Callable[..., Shown], more: Sequence[inspect.Parameter] = ()
) -> Callable[[Callable[..., Any]], Callable[..., int]]:
    """Make a command of a function: a declaration of flags becomes its call, whose result is shown.

    The declaration may check its flags, and return those that the function takes in another form.
    It gets `more` flags in place of its `**flags`.
    """

    def command(declared: Callable[..., dict[str, Any] | None]) -> Callable[..., int]:
        def run(*given: Any, quiet: bool = False, json: bool = False, **flags: Any) -> int:
            flags.pop("debug", None)  # which main reads
            call = inspect.signature(declared).bind(*given, **flags)
            call.apply_defaults()
            changed = declared(*call.args, **call.kwargs) or {}
            if "verbose" in inspect.signature(work).parameters:
                changed["verbose"] = not quiet
            console = make_console(json=json, quiet=quiet)
            with warnings.catch_warnings(action="ignore", category=DareWarning):  # in the report
                found = work(*call.args, **call.kwargs | changed)
            return show_result(console, found, as_json=json)

        shared = {"quiet": Quiet, "json": Json, "debug": Debug}
        keywords = [_keyword(name, kind, False) for name, kind in shared.items()]
        _declare(run, declared, [*keywords, *more])
        return update_wrapper(run, declared, ("__name__", "__doc__"), ())

    return command


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _declare(
    command: Callable[..., int], declared: Callable[..., Any], more: Sequence[inspect.Parameter]
) -> None:
    """Give a command the declared flags, and more in place of `**flags`."""
    signature = inspect.signature(declared, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = sorted([*parameters, *more], key=lambda p: p.kind)
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}


def _stage_help(name: str) -> str:
    """Return what a parameter means, for each stage that has its own meaning of it."""
    meanings: dict[str, list[str]] = {}
    for stage in (stage for stage in STAGES.values() if name in stage.parameters):
        found = stage.parameters[name]
        default = f"{stage.name} {exact_text(found.default)}"
        meanings.setdefault(f"{found.description} {found.range}", []).append(default)
    texts = [rf"{text} \[default: {', '.join(its)}]" for text, its in meanings.items()]  # no markup
    return "\n".join(texts)


def recipe_from_flags(
    config: Path | None,
    flags: Mapping[str, Any],
    *,
    start: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> Request:
    """Lay the flags that were given over a recipe file, over a document, or over nothing."""
    given = {n: v for n, v in flags.items() if n not in BESIDE_RECIPE and v is not None}
    if config is None and start is None:
        needed = ("models",) if interpolates(given) else ("base", "models")
        missing = [FLAGS[name][0] for name in needed if name not in given]
        if missing:
            remedy = "give --base, --models and --output, or a recipe with --config"
            raise UsageError(f"{' and '.join(missing)} missing: {remedy}")
    document = dict(start or {}) if config is None else load_document(config, given)
    where = "command line" if config is None else str(config)
    if config is not None and given:
        where += " with flags"
    with naming(where):
        values = {name: read_flag(name, value) for name, value in given.items()}
    return overlaid(document, values | fixed, where, lambda name: f"--{name.replace('_', '-')}")


def read_flag(name: str, value: Any) -> Any:
    """Return the value of a flag, with numbers, rules and truths read from their texts."""
    if name == "tensors":
        return [read_rule(text) for text in value]
    if name in FIELDS or name in PER_MODEL:
        return value
    return [read_value(text) for text in value] or [True]


def read_rule(text: str) -> dict[str, Any]:
    """Read `PATTERN: name=value, name=value`.

    >>> read_rule("*.mlp.*: drop_rate=0.5, rescale=l1")
    {'match': '*.mlp.*', 'drop_rate': 0.5, 'rescale': 'l1'}
    """
    pattern, _, settings = text.partition(":")
    pairs = [pair.partition("=") for pair in settings.split(",")]
    named = all(name.strip() not in ("", "match") and value.strip() for name, _, value in pairs)
    if not pattern.strip() or not named:
        example = "'*.mlp.*: drop_rate=0.5'"
        raise RecipeError(f"--tensors {text!r}: write PATTERN: name=value, as in {example}")
    values = {name.strip(): read_value(value.strip()) for name, _, value in pairs}
    return {"match": pattern.strip()} | values
