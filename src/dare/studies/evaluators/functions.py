"""Functions that score, to which all kinds of evaluators are reduced, and the scores they return.

The usual kind names a function: `module:function`, `folder/file.py:function`, or a callable. The
name of its first parameter says what it receives: `tensors`, `model` or `path`. A parameter `items`
says that it can score some of the items alone.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from dare.documents.words import counted
from dare.errors import EvaluationError, RecipeError, did_you_mean
from dare.run.processes import FILE_SUFFIX, AnsweringProcess, import_program
from dare.studies.results import UNGROUPED, Scored, group_means
from dare.tensors.names import some_of

Evaluator = str | Callable[..., Any]
LoadModel = Callable[[Path], Any]
QUOTED_VALUE = 60  # characters of a wrong value that a message quotes

USAGE = "module:function or file.py:function"
IN_OWN_PROCESS = True
FORMS = ("tensors", "model", "path")
READY_SECONDS = 600.0  # the least limit for importing it and its model, if scoring has one


@dataclass(frozen=True)
class Function:
    """A function that scores a candidate, and the arguments it takes.

    `call` gets the candidate in its form, and `items` if it takes them. It returns a number,
    numbers by name, or `Scored`.
    """

    call: Callable[..., Any]
    form: str  # of the candidate: `tensors`, `model` or `path`
    takes_items: bool = False
    load_model: LoadModel | None = None  # makes the live model of the form `model`
    # Both get the candidate, and ids of items or None for all.
    preview: Callable[..., list[dict[str, str]]] | None = None  # an example of each task, answered
    run_inputs: Callable[..., None] | None = None  # forward passes over inputs, for statistics


class EvaluatorKind(Protocol):
    """A module that knows one kind of evaluator."""

    USAGE: str  # the form that such an evaluator has, for messages
    IN_OWN_PROCESS: bool  # True if it runs in its own process, which also makes the candidates

    def recognises(self, evaluator: Any, /) -> bool:
        """Tell if an evaluator is of this kind."""

    def check(self, evaluator: Any, /) -> None:
        """Raise RecipeError, before any model is read, if it cannot work."""

    def find(self, evaluator: Any, time_limit: float | None, threads: int | None, /) -> Function:
        """Return the function that scores; its own process already limits time and threads."""


# ---------------------------------------------------------------- the kind


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
    """Import the function that a text names; RecipeError if it is missing or not callable."""
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
    """Return a function's form and arguments, by its parameters and the names `beside` it."""
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


# ---------------------------------------------------------------- scores


def read_scores(returned: object, asked: Iterable[str] | None = None) -> Scored:
    """Turn a number, or a table of numbers that may hold `items`, into scores.

    If only items are given, the score of a group is the mean of its items. If certain items were
    asked for, others are refused.

    >>> read_scores({"items": {"add/1": 1, "add/2": 0, "sort/1": 1}}).scores
    {'add': 0.5, 'sort': 1.0}
    """
    table = returned if isinstance(returned, Mapping) else {UNGROUPED: returned}
    given = table.get("items")
    if given is not None and not isinstance(given, Mapping):
        raise EvaluationError(f"items must be a table of numbers by id, not {_shown(given)}")
    items = {
        _name(id_, "id of an item"): _number(value, f"item {id_}")
        for id_, value in (given or {}).items()
    }
    scores = {
        _name(name, "name of a score"): _number(value, name)
        for name, value in table.items()
        if name != "items"
    }
    if not scores and not items:
        raise EvaluationError("there are no scores; return a number, or numbers by name")
    if asked is not None and (wrong := _differences("item", asked, items)):
        how = f"they are not those asked for: {'; '.join(wrong)}"
        raise EvaluationError(f"the evaluator returned different items; {how}")
    return Scored(scores or group_means(items), items)


def compare_items(first: Scored, now: Scored) -> str | None:
    """Return how items and names of scores differ from those of the first time; None if not."""
    texts = _differences("item", first.items, now.items)
    texts += _differences("score", first.scores, now.scores)
    return f"they are not those of the first candidate: {'; '.join(texts)}" if texts else None


def _differences(word: str, expected: Iterable[str], found: Iterable[str]) -> list[str]:
    wanted, given = dict.fromkeys(expected), dict.fromkeys(found)
    missing = [name for name in wanted if name not in given]
    new = [name for name in given if name not in wanted]
    states = [(missing, f"of {len(wanted)} missing"), (new, "new")]
    return [f"{counted(len(n), word)} {how} ({some_of(n, 3)})" for n, how in states if n]


def _name(name: object, what: str) -> str:
    if isinstance(name, str) and name.strip():
        return name
    raise EvaluationError(f"the {what} must be text, not {_shown(name)}")


def _number(value: Any, name: object) -> float:
    """Return a finite number, also from an array or a tensor of one element."""
    plain = value
    if hasattr(value, "item"):
        try:
            plain = value.item()
        except (ValueError, RuntimeError, TypeError):  # more than one element
            raise EvaluationError(f"{name} must be one number, not {_shown(value)}") from None
    if isinstance(plain, bool):
        raise EvaluationError(f"{name} is {plain}; return 1 or 0 instead")
    if not isinstance(plain, Real):
        raise EvaluationError(f"{name} must be a number, not {_shown(value)}")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise EvaluationError(f"{name} must be a finite number, not {_shown(plain)}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= QUOTED_VALUE else f"{text[:QUOTED_VALUE]}…"
