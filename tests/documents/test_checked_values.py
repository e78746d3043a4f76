"""Values from outside: what is accepted, and what is said of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from dare.documents.values import (
    After,
    Before,
    Finite,
    Limits,
    Number,
    WrongValueError,
    checked,
    form_of,
    read_json,
)

Share = Annotated[float, Limits("A share.", ge=0, lt=1)]
INFINITY = float("inf")


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    y: Share = 0.5
    tags: tuple[str, ...] = ()
    more: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.x > 100:
            raise ValueError("too far")


def refuse(value: int) -> int:
    raise ValueError(f"{value} is unlucky")


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, np.float32(0.5), 0.5),
        (float, Fraction(1, 4), 0.25),
        (float, INFINITY, INFINITY),
        (str, "\ud800", "\ud800"),
        (Share, 0, 0.0),
        (Number, "-inf", -INFINITY),
        (bool | Literal["l1"], "l1", "l1"),
        (Literal[False, "l1"], 0, False),
        (int | None, None, None),
        (Annotated[float | None, Limits(gt=0)], None, None),
        (Colour, "red", Colour.RED),
        (Colour, Colour.BLUE, Colour.BLUE),
        (list[int], [1, 2], [1, 2]),
        (tuple[int, ...], [], ()),
        (tuple[int, str], (1, "a"), (1, "a")),
        (dict[str, Any], {"a": [1]}, {"a": [1]}),
        (Annotated[int, Before(len), Limits(le=3)], "abc", 3),
        (Annotated[int, Limits(le=3), After(str)], 2, "2"),
        (Point, {"x": 1, "tags": ["a"]}, Point(1, tags=("a",))),
        (Point, Point(2), Point(2)),
    ],
)
def test_values_that_fit(hint, value, expected):
    found = checked(value, hint)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("hint", "value", "fault"),
    [
        (int, True, "must be a valid integer"),
        (int, 1.0, "must be a valid integer"),
        (float, "1", "must be a valid number"),
        (float, False, "must be a valid number"),
        (float, 10**400, "must be a valid number"),
        (Finite, float("nan"), "must be a finite number"),
        (Number, "1", "must be a valid number"),
        (bool, 1, "must be a valid boolean"),
        (str, b"a", "must be a valid string"),
        (Share, -1, "must be greater than or equal to 0"),
        (Share, 1.0, "must be less than 1"),
        (Share, float("nan"), "must be less than 1"),
        (Literal["sum", "count"], "cont", "must be 'sum' or 'count' (did you mean 'count'?)"),
        (Literal["native", 8, 4], np.arange(2), "must be 'native', 8 or 4"),
        (Literal["base"], 1, "must be 'base'"),
        (Colour, "green", "must be 'red' or 'blue'"),
        (bool | Literal["l1"], "l2", "must be a valid boolean"),
        (list[int], (1,), "must be a valid list"),
        (tuple[int, ...], "12", "must be a valid tuple"),
        (tuple[int, ...], [1, "2"], "1: must be a valid integer"),
        (tuple[int, int], [1], "must be a valid tuple of 2"),
        (dict[str, int], [], "must be a valid dictionary"),
        (dict[str, int], {"a": None}, "a: must be a valid integer"),
        (dict[str, int], {1: 1}, "1.[key]: must be a valid string"),
        (Annotated[str, Limits(min_length=1)], "", "needs at least 1 character"),
        (Annotated[tuple[int, ...], Limits(max_length=2)], [1] * 3, "has more than 2 values"),
        (Annotated[str, Limits(pattern="[0-9]+")], "1\n", "must match [0-9]+"),
        (Annotated[int, After(refuse)], 13, "13 is unlucky"),
        (Point, 3, "must be a valid dictionary or instance of Point"),
        (Point, {"y": 0.5}, "x: is missing"),
        (Point, {"x": 1, "tag": []}, "tag: is not known (did you mean 'tags'?)"),
        (Point, {"x": 101}, "too far"),
        (dict[str, list[Point]], {"a": [{"x": 1, "y": 2}]}, "a.0.y: must be less than 1"),
    ],
)
def test_values_that_do_not(hint, value, fault):
    with pytest.raises(WrongValueError) as caught:
        checked(value, hint)
    assert str(caught.value) == fault


def test_literals_keep_their_order():
    for hint in (Literal["a", "b"], Literal["b", "a"]):
        with pytest.raises(WrongValueError) as caught:
            checked("x", hint)
        assert str(caught.value) == f"must be {hint.__args__[0]!r} or {hint.__args__[1]!r}"


@pytest.mark.parametrize(
    ("hint", "form"),
    [
        (Share, {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "description": "A share."}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (bool | Literal["l1"], {"anyOf": [{"type": "boolean"}, {"enum": ["l1"]}]}),
        (dict[str, int], {"type": "object"}),
    ],
)
def test_forms(hint, form):
    assert form_of(hint) == form


def test_json_has_whole_characters():
    assert read_json(b'["\\u00e9", "\\\\ud800"]') == ["é", "\\ud800"]
    for text in ('["\\uD800"]', '"\ud800"', b'"\xff"', "{"):
        with pytest.raises(ValueError, match=r"character|decode|Expecting"):
            read_json(text)
