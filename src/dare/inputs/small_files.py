"""Directories, and the small files in them: JSON and texts that may be hostile or huge."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dare.errors import InputError
from dare.stores.locations import StorePath

MAX_CONFIG_BYTES = 10_000_000


def is_directory(path: Path) -> bool:
    """Whether a path is a directory; an error if nobody can say."""
    try:
        return path.is_dir()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:
        return False  # no possible file name; opening it will say so


def is_there(path: Path) -> bool:
    """Whether there is something of that name, be it a link that leads nowhere."""
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


def list_names(directory: Path) -> list[str]:
    """What there is in a directory, in order."""
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise InputError(f"{directory}: cannot be listed: {error.strerror or error}") from None


def parse_json(text: bytes, where: Path) -> Any:
    """Read JSON; an error that says where it is from, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not valid JSON: {error}") from None


def dump_json(document: object, where: Path, *, indent: int | None = 2) -> bytes:
    """Write JSON as transformers does, in the order of the keys; `where` the content is from."""
    try:
        return json.dumps(document, indent=indent, ensure_ascii=False).encode() + b"\n"
    except (ValueError, RecursionError) as error:  # half a character, or too deep
        raise InputError(f"{where}: cannot be written again: {error}") from None


def some_of(names: Sequence[str], shown: int = 1) -> str:
    """The first names, and how many more there are.

    >>> some_of(["a", "b", "c"]), some_of(["a"])
    ('a and 2 more', 'a')
    """
    plain = [name if name.isprintable() else ascii(name) for name in names[:shown]]
    return ", ".join(plain) + (f" and {len(names) - shown} more" if len(names) > shown else "")
