"""Mutations of what a file holds: of its bytes, of its text, and of the values that it stands for.

All of them are functions of a generator of random numbers, so that a seed gives the same again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 127, 255, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(-(2**31), -(2**63), 10**40, 0.5, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf),
)
TEXTS = (
    *("", " ", "a", "0", "-1", "1e400", "nan", "true", "null", "__metadata__", "../../x", "/", "."),
    *("*", "[", "\0", "\n", "\x1b[2J", "\x9b1m", "\u202e", "\ud800", "é" * 300, "x" * 5000),
    *("(a+)+$", "F32", "LORA", "dare", "model", "weight"),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": None}, [0], ["x"], {"x": 1})
WRITTEN = (
    *(b"0", b"-1", b"1", b"2147483648", b"9223372036854775808", b"18446744073709551616", b"1e400"),
    *(b"-1e400", b"NaN", b"Infinity", b"nan", b"inf", b"1e-400", b"0x10", b"1_0", b"00", b"true"),
    *(b"9" * 5000, b"null", b'""', b"[]", b"{}"),
)
"""What stands in place of a number in a text."""
FIELDS = (bytes(8), b"\xff" * 8, b"\x01" + bytes(7), b"\xff" * 4 + bytes(4), bytes(7) + b"\x80")
"""Numbers of eight bytes in a file: 0, -1, 1, 2**32 - 1, -2**63."""
MARKS = (b"{", b"}", b"[", b"]", b'"', b"'", b",", b":", b"=", b"\n", b"\\", b"#", b"&", b"*", b"-")

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def times(random: Random) -> int:
    """How many mutations a case gets: mostly one."""
    count = 1
    while count < 6 and random.random() < 0.35:
        count += 1
    return count


# ---------------------------------------------------------------- bytes


def change_bytes(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Flip, insert, delete, cut, or put a piece of another file in."""
    changed = bytearray(data)
    for _ in range(times(random)):
        place = random.randrange(len(changed) + 1)
        kind = random.random()
        if kind < 0.35 and place < len(changed):
            changed[place] ^= 1 << random.randrange(8)
        elif kind < 0.5:
            changed[place : place + random.choice((1, 4, 8))] = random.choice(FIELDS)
        elif kind < 0.65:
            changed[place:place] = random.randbytes(random.choice((1, 2, 8, 100)))
        elif kind < 0.8:
            del changed[place : place + random.choice((1, 2, 8, 100))]
        elif kind < 0.9:
            del changed[place:]
        else:
            other = random.choice(others or (data,))
            begin = random.randrange(len(other) + 1)
            end = begin + random.choice((8, 64, len(other)))
            changed[place : place + random.choice((0, 8, 64))] = other[begin:end]
    return bytes(changed)


def change_text(random: Random, text: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Swap numbers, repeat or drop lines, put marks in; now and then change bytes."""
    for _ in range(times(random)):
        kind = random.random()
        if kind < 0.35 and (numbers := list(_NUMBER.finditer(text))):
            number = random.choice(numbers)
            text = text[: number.start()] + random.choice(WRITTEN) + text[number.end() :]
        elif kind < 0.6:
            lines = text.split(b"\n")
            one, other = random.randrange(len(lines)), random.randrange(len(lines))
            match random.randrange(3):
                case 0:
                    del lines[one]
                case 1:
                    lines.insert(other, lines[one])
                case 2:
                    lines[one], lines[other] = lines[other], lines[one]
            text = b"\n".join(lines)
        elif kind < 0.85:
            place = random.randrange(len(text) + 1)
            depth = random.choice((1, 1, 1, 1, 1, 1, 1, 50, 2000))
            text = text[:place] + random.choice(MARKS) * depth + text[place:]
        else:
            text = change_bytes(random, text, others)
    return text


# ---------------------------------------------------------------- values


def any_value(random: Random) -> Any:
    """A value of any type."""
    return _copied(random.choice(random.choice((NUMBERS, TEXTS, OTHERS))))


def change_values(random: Random, tree: Any) -> Any:
    """Change some values of a tree of dicts and lists, in place; return the tree."""
    for _ in range(times(random)):
        places = _way_down(random, tree)
        if not places:
            return any_value(random)
        container, key = random.choice(places)
        _change(random, tree, container, key)
    return tree


def _way_down(random: Random, tree: Any) -> list[tuple[Any, Any]]:
    """The containers on one way from the root to a leaf, each with the key that is followed."""
    places = []
    while isinstance(tree, dict | list) and tree:
        key = random.choice(list(tree)) if isinstance(tree, dict) else random.randrange(len(tree))
        places.append((tree, key))
        tree = tree[key]
    return places


def _change(random: Random, tree: Any, container: Any, key: Any) -> None:
    kind = random.random()
    if kind < 0.45:
        container[key] = any_value(random)
    elif kind < 0.55:
        places = _way_down(random, tree)
        other, name = random.choice(places) if places else (container, key)
        container[key] = _copied(other[name])
    elif kind < 0.7:
        del container[key]
    elif kind < 0.8:
        container[key] = [container[key]] if random.random() < 0.5 else {"x": container[key]}
    elif kind < 0.995:
        value = _copied(container[key]) if random.random() < 0.5 else any_value(random)
        if isinstance(container, list):
            container.insert(key, value)
        else:
            container[random.choice((*TEXTS, f"{key}s", *container))] = value
    else:
        for _ in range(random.choice((20, 200, 900))):
            container[key] = [container[key]]


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, dict | list) else value


# ---------------------------------------------------------------- JSON

Change = Callable[[Random, Any], Any]


def change_json(
    random: Random, text: bytes, others: Sequence[bytes] = (), change: Change = change_values
) -> bytes:
    """Change the values of a JSON document, its text, or its keys so that one is there twice."""
    kind = random.random()
    if kind < 0.7:
        try:
            return json.dumps(change(random, json.loads(text))).encode()
        except RecursionError:
            return b"[" * 100_000
    if kind < 0.8 and (keys := list(re.finditer(rb'"[^"\\]*"\s*:', text))):
        key, other = random.choice(keys), random.choice(keys)
        return text[: other.start()] + key[0] + b" 1, " + text[other.start() :]
    return change_text(random, text, others)
