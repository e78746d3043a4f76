"""A parameter's value for each tensor: the scopes it is looked for in, filters, lists of numbers.

The rules are mergekit's: a model's parameters come before those of its slice, those before the
ones of the whole configuration. A filter matches where its text stands in a tensor's name, and the
first that matches counts. A list of numbers runs over the layers (`dare.recipe.layers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dare.recipe.mergekit.nodes import Node, Table, as_table


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
    """A number, or a list of them for the layers; before it is checked, anything."""
    node: Node = field(compare=False)

    @property
    def numbers(self) -> list[Any]:
        """The numbers that it takes anywhere."""
        return self.value if isinstance(self.value, list) else [self.value]

    def changed(self, change: Callable[[Any], float]) -> Case:
        """With a number changed, or every number of a list."""
        numbers = [change(number) for number in self.numbers]
        return replace(self, value=numbers if isinstance(self.value, list) else numbers[0])


Cases = tuple[Case, ...]
"""What a parameter is, the first that matches; the last one is for all tensors."""


# ---------------------------------------------------------------- reading


def _read_cases(name: str, node: Node) -> Iterator[Case]:
    """A parameter's value as mergekit reads it."""
    entries = node.value if isinstance(node.value, tuple) else (node,)
    if all(isinstance(entry.value, dict) for entry in entries):
        for entry in entries:
            table = as_table(entry, ("filter", "value"), f"a value of {name}")
            if "value" not in table:
                raise entry.refuse(f"{name}: value is missing")
            value = _plain_value(name, table["value"])
            if isinstance(value, dict) or value == []:
                raise table["value"].refuse(
                    f"{name}: a value must be a number or a list of numbers"
                )
            text = table["filter"].value if "filter" in table else None
            yield Case(None if text in (None, "*", "") else str(text), value, table["value"])
    else:
        yield Case(None, _plain_value(name, node), node)


def _plain_value(name: str, node: Node) -> Any:
    if not isinstance(node.value, tuple):
        return node.value
    for item in node.value:
        if isinstance(item.value, dict | tuple):
            raise item.refuse(f"{name}: must be numbers alone, or filters with values alone")
    return node.plain


def has_gradient(table: Table) -> bool:
    """Whether a parameter of the table changes over the layers."""
    return any(
        isinstance(case.value, list)
        for key, node in table.items()
        for case in _read_cases(key, node)
    )


def resolve(name: str, scopes: Sequence[Table]) -> Cases:
    """The cases of all scopes, up to the first that is for all tensors."""
    cases: list[Case] = []
    for scope in scopes:
        for case in _read_cases(name, scope[name]) if name in scope else ():
            cases.append(case)
            if case.contains is None:
                return tuple(cases)
    return tuple(cases)


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
    return tuple(case.changed(partial(_one_number, name, case.node)) for case in cases)


def _one_number(name: str, node: Node, value: Any) -> float:
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
    return default if case is None else _one_number(name, case.node, case.value)


def flag_for_all(name: str, scopes: Sequence[Table], default: bool) -> bool:
    """A switch of the whole merge."""
    case = for_all(name, scopes)
    if case is None:
        return default
    value = {"true": True, "false": False}.get(str(case.value).lower(), case.value)
    if value not in (True, False):
        raise case.node.refuse(f"{name}: must be true or false, and is {case.value!r}")
    return bool(value)
