"""A parameter's value for each tensor: the scopes it is looked for in, filters, lists of numbers.

The rules are mergekit's: a model's parameters come before those of its slice, those before the
ones of the whole configuration. A filter matches where its text stands in a tensor's name, and the
first that matches counts. A list of numbers runs over the layers (`dare.recipe.layers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dare.recipe.layers import Gradient
from dare.recipe.mergekit.nodes import Node, Table, as_table

Number = float | Gradient
"""A number, or one for each part of the layers."""


@dataclass(frozen=True)
class Input:
    """A model that is merged, and its parameters from the strongest scope to the weakest."""

    model: str
    node: Node
    scopes: tuple[Table, ...]


@dataclass(frozen=True)
class Case:
    """A value for the tensors whose names contain a text; None: for all."""

    contains: str | None
    value: Any
    node: Node = field(compare=False)


Cases = tuple[Case, ...]
"""What a parameter is, the first that matches; the last one is for all tensors."""


# ---------------------------------------------------------------- reading


def _read_cases(name: str, node: Node) -> Cases:
    """A parameter's value as mergekit reads it."""
    if isinstance(node.value, dict):
        return (_conditional(name, node),)
    if not isinstance(node.value, tuple):
        return (Case(None, node.value, node),)
    if not node.value:
        return ()
    if all(isinstance(item.value, dict) for item in node.value):
        return tuple(_conditional(name, item) for item in node.value)
    return (Case(None, _scalars(name, node), node),)


def _conditional(name: str, node: Node) -> Case:
    table = as_table(node, ("filter", "value"), f"a value of {name}")
    if "value" not in table:
        raise node.refuse(f"{name}: value is missing")
    given = table["value"]
    value = _scalars(name, given) if isinstance(given.value, tuple) else given.value
    if isinstance(value, dict) or value == []:
        raise given.refuse(f"{name}: a value must be a number or a list of numbers")
    text = table["filter"].value if "filter" in table else None
    return Case(None if text in (None, "*", "") else str(text), value, given)


def _scalars(name: str, node: Node) -> list[Any]:
    for item in node.value:
        if isinstance(item.value, dict | tuple):
            raise item.refuse(f"{name}: must be numbers alone, or filters with values alone")
    return [item.value for item in node.value]


def has_gradient(table: Table) -> bool:
    """Whether a parameter of the table changes over the layers."""
    return any(
        isinstance(case.value, list)
        for key, node in table.items()
        for case in _read_cases(key, node)
    )


def resolve(name: str, scopes: Sequence[Table]) -> Cases:
    """The cases of all scopes, up to the first that is for all tensors."""
    found: list[Case] = []
    for scope in scopes:
        for case in _read_cases(name, scope[name]) if name in scope else ():
            found.append(case)
            if case.contains is None:
                return tuple(found)
    return tuple(found)


# ---------------------------------------------------------------- of one model


def numbers(name: str, given: Input, default: float | None = None) -> Cases:
    """A model's number in every case; an error if there is a tensor without one."""
    cases = resolve(name, given.scopes)
    if not cases or cases[-1].contains is not None:
        if default is None:
            lacking = "tensors that no filter matches" if cases else given.model
            raise given.node.refuse(f"{name} is missing for {lacking}; mergekit has no default")
        cases = (*cases, Case(None, default, given.node))
    return as_numbers(name, cases)


def as_numbers(name: str, cases: Cases) -> Cases:
    """The cases with their values as numbers; an error if one is none."""
    return tuple(Case(c.contains, _as_number(name, c.value, c.node), c.node) for c in cases)


def _as_number(name: str, value: Any, node: Node) -> Number:
    if isinstance(value, list):
        return [_one_number(name, item, node) for item in value]
    return _one_number(name, value, node)


def _one_number(name: str, value: Any, node: Node) -> float:
    """A finite number; 1e-3 is text in YAML, and a number to mergekit."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise node.refuse(f"{name}: must be a number, and is {value!r}")
    return number


# ---------------------------------------------------------------- of the whole merge


def for_all(name: str, scopes: Sequence[Table]) -> Case | None:
    """A parameter of the whole merge that must be the same for all tensors."""
    cases = resolve(name, scopes)
    for case in cases:
        if case.contains is not None or isinstance(case.value, list):
            raise case.node.refuse(f"{name}: must be one value for all tensors to be converted")
    return cases[0] if cases else None


def number_for_all(name: str, scopes: Sequence[Table], default: float) -> float:
    """A number of the whole merge."""
    case = for_all(name, scopes)
    return default if case is None else _one_number(name, case.value, case.node)


def flag_for_all(name: str, scopes: Sequence[Table], default: bool) -> bool:
    """A switch of the whole merge."""
    case = for_all(name, scopes)
    if case is None:
        return default
    value = {"true": True, "false": False}.get(str(case.value).lower(), case.value)
    if value not in (True, False):
        raise case.node.refuse(f"{name}: must be true or false, and is {case.value!r}")
    return bool(value)


# ---------------------------------------------------------------- numbers, and lists of them


def each(change: Callable[[float], float], value: Number) -> Number:
    """A number changed, or every number of a list."""
    return [change(number) for number in value] if isinstance(value, list) else change(value)


def values(cases: Cases) -> list[float]:
    """All numbers that a parameter takes anywhere."""
    return [n for c in cases for n in (c.value if isinstance(c.value, list) else [c.value])]
