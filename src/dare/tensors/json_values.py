"""What JSON lacks: one rule for every document that the package writes."""

from __future__ import annotations

import io
import json
import math
import operator
from typing import Any

from dare.errors import ACTS


def json_ready(value: Any) -> Any:
    """NaN and infinities as the strings that `float` takes: JSON has none.

    >>> json_ready({"largest": float("inf"), "shares": (0.5, float("nan"))})
    {'largest': 'inf', 'shares': [0.5, 'nan']}
    """
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            ready = {key: json_ready(item) for key, item in value.items()}
            return value if all(ready[key] is item for key, item in value.items()) else ready
        case list() | tuple():
            items = [json_ready(item) for item in value]
            return value if all(map(operator.is_, items, value)) else items
        case _:
            return value


def printable_json(document: str) -> str:
    r"""The same document, with all escaped that a terminal would act on.

    >>> print(printable_json('{"name": "\x9b2J"}'))
    {"name": "\u009b2J"}
    """
    return ACTS.sub(lambda found: _escaped(found[0]), document)


def _escaped(character: str) -> str:
    return character if character == "\n" else json.dumps(character)[1:-1]


def json_bytes(value: Any, indent: int) -> bytes:
    """A document with a line's end, made piece by piece: `json.dumps` has all pieces at once."""
    written = io.BytesIO()
    for piece in json.JSONEncoder(indent=indent).iterencode(json_ready(value)):
        written.write(piece.encode())
    written.write(b"\n")
    return written.getvalue()
