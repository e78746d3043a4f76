"""Functions that score: `module:function`, `folder/file.py:function`, or a callable.

The first parameter says by its name what the function is given: `tensors`, `model` or `path`. A
parameter `items` says that it can score some of the items alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import closing
from operator import attrgetter
from typing import Any

from dare.errors import RecipeError, did_you_mean
from dare.run.processes import FILE_SUFFIX, AnsweringProcess, import_program
from dare.studies.evaluators.kinds import Evaluator, Function

USAGE = "module:function or file.py:function"
IN_OWN_PROCESS = True
FORMS = ("tensors", "model", "path")
READY_SECONDS = 600.0  # the least limit for importing it and its model, if scoring has one


def recognises(evaluator: Evaluator) -> bool:
    """Tell if it is a callable, or names a function in a module or a file."""
    if not isinstance(evaluator, str):
        return True
    place, _, name = evaluator.rpartition(":")
    parts = name.split(".") + ([] if place.endswith(FILE_SUFFIX) else place.split("."))
    return all(part.isidentifier() for part in parts)


def check(evaluator: str) -> None:
    """Have another process import the function, which takes a tenth of a second."""
    with closing(AnsweringProcess(evaluator, Importing, threads=1)) as process:
        process.ask("find", evaluator, READY_SECONDS)


class Importing:
    """A process that only looks for a function."""

    def find(self, evaluator: str) -> None:
        find(evaluator)


def find(
    evaluator: Evaluator, time_limit: float | None = None, _threads: int | None = None
) -> Function:
    """Import what a text names; RecipeError if there is no such thing, or it cannot be called."""
    if isinstance(evaluator, str):
        place, _, name = evaluator.rpartition(":")
        module = import_program(place)
        try:
            function = attrgetter(name)(module)
        except AttributeError:
            known = [n for n, value in vars(module).items() if callable(value)]
            hint = did_you_mean(name, known)
            raise RecipeError(f"{place}: has no function {name!r}{hint}") from None
        return read_signature(function, evaluator, vars(module))
    if time_limit is not None:
        raise RecipeError('a time limit needs a function by name, as in "module:function"')
    home = sys.modules.get(getattr(evaluator, "__module__", None) or "")
    shown = getattr(evaluator, "__qualname__", None) or repr(evaluator)
    return read_signature(evaluator, shown, vars(home) if home else {})


def read_signature(function: Any, shown: str, beside: Mapping[str, Any]) -> Function:
    """Return what a function takes, by the names of its parameters, and what stands beside it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise RecipeError(f"{shown}: is not a function whose parameters can be read") from None
    forms = f"{', '.join(FORMS[:-1])} or {FORMS[-1]}; the name decides what the function receives"
    if not parameters:
        raise RecipeError(f"{shown}: takes no parameters; the first must be {forms}")
    first, *others = parameters
    if first.name not in FORMS:
        hint = did_you_mean(first.name, FORMS)
        raise RecipeError(f"{shown}: its first parameter is {first.name!r}{hint}, not {forms}")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for other in others:
        if other.name != "items" and other.default is other.empty and other.kind not in variable:
            how = f"only {first.name} and items are known, and others need a default"
            raise RecipeError(f"{shown}: there is no value for its parameter {other.name!r}; {how}")
    takes_items = any(other.name == "items" for other in others)
    more = {name: beside.get(name) for name in ("load_model", "run_inputs")}
    return Function(function, first.name, takes_items, **more)
