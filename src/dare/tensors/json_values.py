"""JSON that the package reads, which may be hostile, and JSON that it writes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from dare.documents.shown import json_ready
from dare.errors import ACTS, InputError

MAX_CONFIG_BYTES = 10_000_000


def printable_json(document: str) -> str:
    r"""Return a document with all escaped that a terminal would act on.

    >>> print(printable_json('{"name": "\x9b2J"}'))
    {"name": "\u009b2J"}
    """
    return ACTS.sub(lambda m: m[0] if m[0] == "\n" else json.dumps(m[0])[1:-1], document)


def json_bytes(value: Any, indent: int) -> bytes:
    """Return a document with a line's end, made piece by piece to save memory."""
    written = io.BytesIO()
    for piece in json.JSONEncoder(indent=indent).iterencode(json_ready(value)):
        written.write(piece.encode())
    written.write(b"\n")
    return written.getvalue()


def parse_json(text: bytes, where: Path) -> Any:
    """Read JSON; raise InputError, which names its origin `where`, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not valid JSON: {error}") from None


def dump_json(document: object, where: Path, *, indent: int | None = 2) -> bytes:
    """Write JSON as transformers does, in the order of the keys; errors name its origin `where`."""
    try:
        return json.dumps(document, indent=indent, ensure_ascii=False).encode() + b"\n"
    except (ValueError, RecursionError) as error:  # half a character, or too deep
        raise InputError(f"{where}: cannot be written again: {error}") from None
