"""Values that come from outside, checked against the type that a declaration gives them.

    Rate = Annotated[float, Limits("Share to drop.", ge=0, lt=1)]

`checked(0.5, Rate)` returns the value, or raises a `WrongValueError`, which says what is wrong and
where. Types are those of Python: `int`, `float`, `bool`, `str`, `Any`, literals, enumerations,
unions, lists, tuples, dictionaries and classes. A dataclass is made from a dictionary with its
fields; any other class is called with the dictionary, and checks it itself. Nothing is converted
but whole numbers where a float is wanted, and lists where a tuple is.

What else holds stands beside the type, in `Annotated`: `Limits`, and functions to call `Before` the
check or `After` it.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dare.documents.words import counted
from dare.errors import did_you_mean

Check = Callable[[Any], Any]  # returns the value, perhaps converted, or raises a WrongValueError
Place = tuple[Any, ...]  # keys and numbers that lead to a value inside another


class WrongValueError(ValueError):
    """A value that is wrong: the reason, and its place inside others.

    The cause is the error of a function that the value was given to, if one found the fault.
    """

    def __init__(self, text: str, value: Any, place: Place = (), cause: Any = None) -> None:
        super().__init__(text)
        self.text, self.value, self.place, self.cause = text, value, place, cause

    def inside(self, *keys: Any) -> WrongValueError:
        """Return the same fault of a value that has this one at some keys."""
        return WrongValueError(self.text, self.value, (*keys, *self.place), self.cause)

    def __str__(self) -> str:
        return ": ".join(filter(None, (".".join(map(str, self.place)), self.text)))


_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}

# The bounds of numbers by name: the comparison, its words, and its name in JSON Schema.
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str, str]] = {
    "le": (operator.le, "less than or equal to", "maximum"),
    "lt": (operator.lt, "less than", "exclusiveMaximum"),
    "ge": (operator.ge, "greater than or equal to", "minimum"),
    "gt": (operator.gt, "greater than", "exclusiveMinimum"),
}


@dataclass(frozen=True)
class Limits:
    """The meaning of a value for people, and what it may be.

    Limits hold for what they fit, where there are several types.
    """

    text: str = ""
    le: float | None = None
    lt: float | None = None
    ge: float | None = None
    gt: float | None = None
    allow_inf_nan: bool = True
    min_length: int = 0
    max_length: int | None = None
    pattern: str = ""

    def around(self, check: Check) -> Check:
        """Return a check with these limits behind it."""
        bounds = [
            (holds, bound, f"must be {words} {bound}")
            for name, (holds, words, _) in _BOUNDS.items()
            if (bound := getattr(self, name)) is not None
        ]
        if not self.allow_inf_nan:
            bounds.insert(0, (lambda value, _: math.isfinite(value), 0, "must be a finite number"))
        if bounds:
            check = partial(_check_bounds, check, bounds)
        if self.min_length or self.max_length is not None or self.pattern:
            check = partial(_check_length, check, self)
        return check


@dataclass(frozen=True)
class Before:
    """A function that is given the value, and returns the one to check."""

    function: Check

    def around(self, check: Check) -> Check:
        """Return a check with the function before it."""
        return lambda given: check(_call(self.function, given))


@dataclass(frozen=True)
class After:
    """A function that is given the value that was checked, and returns the one to take."""

    function: Check

    def around(self, check: Check) -> Check:
        """Return a check with the function behind it."""
        return lambda given: _call(lambda given: self.function(check(given)), given)


def _call(function: Check, value: Any) -> Any:
    """Call a function; any error about the value becomes a fault."""
    try:
        return function(value)
    except WrongValueError:
        raise
    except ValueError as error:
        raise WrongValueError(str(error), value, cause=error) from None


def _read_number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


Finite = Annotated[float, Limits(allow_inf_nan=False)]
Number = Annotated[float, Before(_read_number)]
"""A number from JSON, where one that is not finite is a text."""


def read_json(text: str | bytes) -> Any:
    """Read JSON; refuse half a character, which no file can hold, as any other fault."""
    content = text.encode() if isinstance(text, str) else text
    document = json.loads(content)
    if b"\\ud" in content.lower():
        json.dumps(document, ensure_ascii=False).encode()
    return document


def checked(value: Any, hint: Any) -> Any:
    """Return a value of a type, or raise a WrongValueError.

    >>> checked([1, 2.5], tuple[Annotated[float, Limits(ge=0)], ...])
    (1.0, 2.5)
    >>> checked({"layers": [1, -2]}, dict[str, list[Annotated[int, Limits(ge=0)]]])
    Traceback (most recent call last):
    dare.documents.values.WrongValueError: layers.1: must be greater than or equal to 0
    """
    return check_of(hint)(value)


def check_of(hint: Any) -> Check:
    """Return the function that checks values of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check = check_of(inner[0])
        for mark in inner[1:]:
            if isinstance(mark, Limits | Before | After):
                check = mark.around(check)
            elif type(mark).__module__.startswith("pydantic"):  # its limits would not hold
                raise TypeError(f'{mark!r}: write meaning("…", gt=0) of dare.stages.registry')
        return check
    if origin is Literal:
        return partial(_check_choice, inner)
    if origin in (Union, UnionType):
        kinds = [check_of(kind) for kind in inner if kind is not NoneType]
        return partial(_check_union, kinds, NoneType in inner)
    if origin is dict:
        return partial(_check_dictionary, *map(check_of, inner))
    if origin is list or inner[1:] == (...,):
        return partial(_check_many, origin, check_of(inner[0]))
    if origin is tuple:
        return partial(_check_entries, [check_of(kind) for kind in inner])
    return _CHECKS.get(hint) or _check_of_class(hint)


@cache
def _check_of_class(kind: Any) -> Check:
    if not isinstance(kind, type):
        raise TypeError(f"{kind}: no type that values can be checked against")
    if issubclass(kind, Enum):
        words = [member.value for member in kind]
        return lambda value: kind(_check_choice(words, value))
    make = _maker_of(kind) if is_dataclass(kind) else lambda given: kind(**given)
    return partial(_check_class, kind, make)


def _maker_of(kind: Any) -> Check:
    """Return the function that makes a dataclass from a dictionary."""
    hints = get_type_hints(kind, include_extras=True)
    checks = {each.name: check_of(hints[each.name]) for each in fields(kind)}
    required = {
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    }
    return partial(_make_dataclass, kind, checks, required)


# ---------------------------------------------------------------- single values


def _check_plain(kind: type, called: str, value: Any) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WrongValueError(f"must be a valid {called}", value)
    return value


def _check_number(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not hasattr(type(value), "__float__"):
        raise WrongValueError("must be a valid number", value)
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):  # an array of several has `__float__` too
        raise WrongValueError("must be a valid number", value) from None


_CHECKS: dict[Any, Check] = {
    **{kind: partial(_check_plain, kind, _TYPES[kind]) for kind in (int, bool, str)},
    float: _check_number,
    Any: lambda value: value,
}


def _check_choice(choices: Sequence[Any], value: Any) -> Any:
    if isinstance(value, str | int | float) and value in choices:
        return next(choice for choice in choices if choice == value)
    *others, last = map(repr, choices)
    known = " or ".join(filter(None, (", ".join(others), last)))
    words = [choice for choice in choices if isinstance(choice, str)]
    raise WrongValueError(f"must be {known}{did_you_mean(str(value), words)}", value)


def _check_bounds(check: Check, bounds: Sequence[tuple[Any, float, str]], given: Any) -> Any:
    value = check(given)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for holds, bound, text in bounds:
            if not holds(value, bound):
                raise WrongValueError(text, given)
    return value


def _check_length(check: Check, limits: Limits, given: Any) -> Any:
    value = check(given)
    if not isinstance(value, (str, tuple)):
        return value
    parts = "character" if isinstance(value, str) else "value"
    if len(value) < limits.min_length:
        raise WrongValueError(f"needs at least {counted(limits.min_length, parts)}", given)
    if limits.max_length is not None and len(value) > limits.max_length:
        raise WrongValueError(f"has more than {counted(limits.max_length, parts)}", given)
    if limits.pattern and not re.fullmatch(limits.pattern, str(value)):
        raise WrongValueError(f"must match {limits.pattern}", given)
    return value


# ---------------------------------------------------------------- values made of others


def _check_union(checks: Sequence[Check], has_none: bool, value: Any) -> Any:
    """Return what the first type that fits makes of a value; else say what the first type asks."""
    if has_none and value is None:
        return None
    first = None
    for check in checks:
        try:
            return check(value)
        except WrongValueError as fault:
            first = first or fault
    raise first or WrongValueError("must be None", value)


def _check_at(check: Check, value: Any, *keys: Any) -> Any:
    try:
        return check(value)
    except WrongValueError as fault:
        raise fault.inside(*keys) from None


def _check_each(checks: Iterable[Check], values: Iterable[Any]) -> list[Any]:
    """Return checked values; a fault has the number of the value."""
    made: list[Any] = []
    try:
        for check, value in zip(checks, values, strict=False):
            made.append(check(value))
    except WrongValueError as fault:
        raise fault.inside(len(made)) from None
    return made


def _check_many(kind: Any, check: Check, value: Any) -> Any:
    """Return a list or a tuple of values of one type."""
    if not isinstance(value, (list, kind)):
        raise WrongValueError(f"must be a valid {kind.__name__}", value)
    return kind(_check_each(repeat(check), value))


def _check_entries(checks: Sequence[Check], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) != len(checks):
        raise WrongValueError(f"must be a valid tuple of {len(checks)}", value)
    return tuple(_check_each(checks, value))


def _check_dictionary(check_key: Check, check: Check, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise WrongValueError("must be a valid dictionary", value)
    return {
        _check_at(check_key, key, key, "[key]"): _check_at(check, entry, key)
        for key, entry in value.items()
    }


def _check_class(kind: type, make: Check, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        raise WrongValueError(f"must be a valid dictionary or instance of {kind.__name__}", value)
    return _call(make, value)


def _make_dataclass(kind: type, checks: Mapping[str, Check], required: set[str], given: Any) -> Any:
    made = {}
    for name, check in checks.items():
        if name in given:
            made[name] = _check_at(check, given[name], name)
        elif name in required:
            raise WrongValueError("is missing", given, (name,))
    for name in given:
        if name not in checks:
            raise WrongValueError(f"is not known{did_you_mean(str(name), checks)}", given, (name,))
    return kind(**made)


# ---------------------------------------------------------------- types, described


def form_of(hint: Any) -> dict[str, Any]:
    """Describe a type in the words of JSON Schema.

    >>> form_of(Annotated[float | None, Limits("Share.", ge=0)])
    {'anyOf': [{'type': 'number', 'minimum': 0}, {'type': 'null'}], 'description': 'Share.'}
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        form = form_of(inner[0])
        for limits in (mark for mark in inner[1:] if isinstance(mark, Limits)):
            bounds = {name: getattr(limits, bound) for bound, (_, _, name) in _BOUNDS.items()}
            given = {name: bound for name, bound in bounds.items() if bound is not None}
            for choice in form.get("anyOf", [form]):
                if choice.get("type") in ("integer", "number"):
                    choice.update(given)
            form |= {"description": limits.text} if limits.text else {}
        return form
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [form_of(kind) for kind in inner]}
    if origin in (list, tuple):
        return {"type": "array", "items": form_of(inner[0])}
    if hint is Path:
        return {"type": "string", "format": "path"}
    return {"type": _TYPES.get(hint, "object")}
