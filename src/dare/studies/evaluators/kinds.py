"""A kind of evaluator is a module; what it consists of, and scores as evaluators return them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from dare.documents.words import times
from dare.errors import EvaluationError
from dare.studies.results import UNGROUPED, Scored, group_means

Evaluator = str | Callable[..., Any]
LoadModel = Callable[[Path], Any]
QUOTED_VALUE = 60  # characters of a wrong value that a message quotes


@dataclass(frozen=True)
class Function:
    """A function that scores a candidate, and what it takes.

    `call` gets the candidate in its form, and `items` if it takes them. It returns a number,
    numbers by name, or `Scored`.
    """

    call: Callable[..., Any]
    form: str  # of the candidate: `tensors`, `model` or `path`
    takes_items: bool = False
    load_model: LoadModel | None = None  # makes the live model of the form `model`
    # Both get the candidate, and ids of items or None for all; only data files have them.
    look: Callable[..., list[dict[str, str]]] | None = None  # an example of each task, answered
    run_inputs: Callable[..., None] | None = None  # forward passes over inputs, for statistics


class EvaluatorKind(Protocol):
    """A module that knows one kind of evaluator."""

    WRITTEN: str  # the form that such an evaluator has, for messages
    IS_APART: bool  # True if it runs in a process of its own, which also makes the candidates

    def recognises(self, evaluator: Any, /) -> bool:
        """Tell if an evaluator is of this kind."""

    def check(self, evaluator: Any, /) -> None:
        """Refuse, before any model is read, what cannot work: by a RecipeError."""

    def find(self, evaluator: Any, time_limit: float | None, threads: int | None, /) -> Function:
        """Return the function that scores; time and threads are limited already if apart."""


def read_scores(returned: object, asked: Iterable[str] | None = None) -> Scored:
    """Turn a number, or a table of numbers that may hold `items`, into scores.

    Where only items are given, the score of a group is the mean of its items. If items were asked
    for, others are refused.

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
    found = _differences("item", first.items, now.items)
    found += _differences("score", first.scores, now.scores)
    return f"they are not those of the first candidate: {'; '.join(found)}" if found else None


def _differences(word: str, expected: Iterable[str], found: Iterable[str]) -> list[str]:
    from dare.tensors.names import some_of

    wanted, given = dict.fromkeys(expected), dict.fromkeys(found)
    missing = [name for name in wanted if name not in given]
    new = [name for name in given if name not in wanted]
    states = [(missing, f"of {len(wanted)} missing"), (new, "new")]
    return [f"{times(len(n), word)} {how} ({some_of(n, 3)})" for n, how in states if n]


def _name(name: object, what: str) -> str:
    if isinstance(name, str) and name.strip():
        return name
    raise EvaluationError(f"the {what} must be text, not {_shown(name)}")


def _number(value: Any, name: object) -> float:
    """Return a finite number; one in an array or a tensor of one element will do."""
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
