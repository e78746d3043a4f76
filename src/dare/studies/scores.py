"""What an evaluator returned, checked: numbers with names, and items with ids, in groups.

Parts of the items follow from their ids and a seed, by a hash: neither the order of the items nor
a version of a package changes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from dare.documents.words import times
from dare.errors import EvaluationError
from dare.studies.results import UNGROUPED, Scored, group_of

ITEMS = "items"
SHOWN = 60
"""Characters of a wrong value that a message quotes."""
LEAST_ITEMS = 10
"""A part of fewer items tells too little to stop anything."""
MOST_RUNGS = 4
"""How many parts there are at most: each costs a start of the evaluator."""
REDUCTION = 3
"""How many times as many items each part makes them, and one in how many candidates goes on."""


def read_scores(returned: object) -> Scored:
    """Turn a number, or a table of numbers that may hold `items`, into scores.

    Where only items are given, the score of a group is the mean of its items.

    >>> read_scores({"items": {"add/1": 1, "add/2": 0, "sort/1": 1}}).scores
    {'add': 0.5, 'sort': 1.0}
    """
    table = returned if isinstance(returned, Mapping) else {UNGROUPED: returned}
    given = table.get(ITEMS)
    if given is not None and not isinstance(given, Mapping):
        raise EvaluationError(f"items must be a table of numbers by id, not {_shown(given)}")
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


def groups_of(ids: Iterable[str]) -> dict[str, list[str]]:
    """The ids of each group, all in their order."""
    groups: dict[str, list[str]] = {}
    for item_id in ids:
        groups.setdefault(group_of(item_id), []).append(item_id)
    return groups


def group_means(items: Mapping[str, float]) -> dict[str, float]:
    """The mean of each group of items; the part of an id before the first slash is its group."""
    return {g: math.fsum(items[i] for i in ids) / len(ids) for g, ids in groups_of(items).items()}


def groups_of_scores(scored: Scored) -> dict[str, str]:
    """For each score that is the mean of a group of items: the group.

    One score and items without groups belong together, whatever the score is called.
    """
    means = group_means(scored.items)
    if set(means) == {UNGROUPED} and len(scored.scores) == 1:
        groups = dict.fromkeys(scored.scores, UNGROUPED)
    else:
        groups = {name: name for name in scored.scores if name in means}
    return {
        name: group
        for name, group in groups.items()
        if math.isclose(scored.scores[name], means[group], rel_tol=1e-6, abs_tol=1e-6)
    }


def rungs(ids: Iterable[str], *, seed: int) -> list[list[str]]:
    """Parts of the items for racing: what each rung adds to those before it; the last makes all.

    Each rung makes about three times as many items, takes each group by its share, and has one of
    each group at least. So few items that no part would tell anything are one rung.

    >>> [len(rung) for rung in rungs((f"add/{n}" for n in range(270)), seed=0)]
    [10, 20, 60, 180]
    """

    def place(item_id: str) -> tuple[bytes, str]:
        seeded = f"{seed}\0{item_id}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(seeded, digest_size=8).digest(), item_id

    groups = groups_of(sorted(set(ids), key=place))
    # Each group's items are spread evenly over 0 … 1, so that every beginning has its share.
    spread = [
        (number / len(group), *place(item_id))
        for group in groups.values()
        for number, item_id in enumerate(group)
    ]
    order = [item_id for *_, item_id in sorted(spread)]
    least = max(LEAST_ITEMS, len(groups))
    ends = [len(order)]
    while len(ends) < MOST_RUNGS and ends[0] // REDUCTION >= least:
        ends.insert(0, ends[0] // REDUCTION)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


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
