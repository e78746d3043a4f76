"""What an evaluator returned, checked: numbers with names, and items with ids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from dare.errors import EvaluationError
from dare.studies.results import UNGROUPED, Scored, group_of
from dare.tensors.sizes import times

ITEMS = "items"
SHOWN = 60
"""Characters of a wrong value that a message quotes."""


def read_scores(returned: object) -> Scored:
    """Turn a number, or a table of numbers that may hold `items`, into scores.

    Where only items are given, the score of a group is the mean of its items.

    >>> read_scores({"items": {"add/1": 1, "add/2": 0, "sort/1": 1}}).scores
    {'add': 0.5, 'sort': 1.0}
    """
    table = returned if isinstance(returned, Mapping) else {UNGROUPED: returned}
    given = table.get(ITEMS)
    if given is not None and not isinstance(given, Mapping):
        raise EvaluationError(
            "items must be a table of numbers by id, as in "
            f"{{'add/1': 1, 'add/2': 0}}, not {_shown(given)}"
        )
    items = {
        _name(id_, "id of an item"): _number(value, f"item {id_}")
        for id_, value in (given or {}).items()
    }
    scores = {
        _name(name, "name of a score"): _number(value, name)
        for name, value in table.items()
        if name != ITEMS
    }
    if not scores and not items:
        raise EvaluationError("there are no scores; return a number, or numbers by name")
    return Scored(scores or group_means(items), items)


def group_means(items: Mapping[str, float]) -> dict[str, float]:
    """The mean of each group of items; the part of an id before the first slash is its group."""
    groups: dict[str, list[float]] = {}
    for item_id, value in items.items():
        groups.setdefault(group_of(item_id), []).append(value)
    return {group: math.fsum(values) / len(values) for group, values in groups.items()}


def check_items(first: Scored, now: Scored, asked: Iterable[str] | None = None) -> str | None:
    """Say how the items differ from those asked for, or else from those of the first time.

    None if they are the same. Where all were asked for, the names of the scores are compared too.
    """
    ids = first.items if asked is None else asked
    what = "those of the first candidate" if asked is None else "those asked for"
    found = _differences("item", ids, now.items)
    if asked is None:
        found += _differences("score", first.scores, now.scores)
    return f"they are not {what}: {'; '.join(found)}" if found else None


def checked(scored: Scored, asked: Iterable[str] | None) -> Scored:
    """Refuse scores on other items than those asked for."""
    problem = None if asked is None else check_items(scored, scored, asked)
    if problem:
        raise EvaluationError(f"the evaluator returned different items; {problem}")
    return scored


def _differences(word: str, expected: Iterable[str], found: Iterable[str]) -> list[str]:
    from dare.inputs.small_files import some_of

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
    """A finite number; one in an array or a tensor of one element will do."""
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
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
