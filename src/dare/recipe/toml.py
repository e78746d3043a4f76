r"""TOML that may be hostile, read in time that its size bounds; and values written as TOML.

Python's parser takes the square of the number of parts of a dotted key, so that `a.a.a…` of
200,000 bytes would keep it busy for minutes. Keys are therefore looked over before it runs.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare.errors import ACTS, InputError, RecipeError, printable
from dare.tensors.files import read_limited

MAX_BYTES = 10_000_000
"""The limit for a recipe: some rule for each of 100,000 tensors."""
MAX_PARTS = 100
"""The limit for a dotted key; a recipe has no more than two parts."""
MAX_NESTED = 100
MAX_BITS = 128
"""The limit for a whole number: Python refuses to print much larger ones."""

_NOT_KEYS = re.compile(
    r'#[^\n]*+|"""(?:[^"\\]|\\.|"(?!""))*+(?:"""|\Z)|\'\'\'(?:[^\']|\'(?!\'\'))*+(?:\'\'\'|\Z)'
    r"|\"(?:[^\"\\\n]|\\.)*+\"?|'[^'\n]*+'?",
    re.DOTALL,
)
"""Comments and texts as a whole; possessive, so that no alternative is tried twice."""
_DOTTED = re.compile(r"[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++)++")


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a recipe from a TOML file."""
    content = read_limited(path, MAX_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: must be text in UTF-8, and byte {error.start} is not") from None
    keys = _NOT_KEYS.sub(lambda found: "" if found[0].startswith("#") else "_", text)
    if any(key[0].count(".") >= MAX_PARTS for key in _DOTTED.finditer(keys)):
        raise RecipeError(f"{path}: not valid TOML: a key has more than {MAX_PARTS} parts")
    try:
        document = tomllib.loads(text.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    _check(document, path, MAX_NESTED)
    return document


def _check(value: Any, path: Path, nested: int) -> None:
    """Refuse what no recipe holds, before anything tries to show it."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise RecipeError(f"{path}: holds a number of more than {MAX_BITS} bits")
    if not isinstance(value, dict | list):
        return
    if not nested:
        raise RecipeError(f"{path}: is nested more than {MAX_NESTED} deep")
    for inner in value.values() if isinstance(value, dict) else value:
        _check(inner, path, nested - 1)


def write_toml(document: Mapping[str, Any]) -> str:
    """Write tables as TOML, with every text escaped, so that it stays one value."""
    import tomli_w

    return ACTS.sub(_escape, tomli_w.dumps(document))


def _escape(found: re.Match[str]) -> str:
    """Escape a character that tomli_w leaves inside a text and a terminal would act on."""
    if found[0] in "\n\t":
        return found[0]
    if "\ud800" <= found[0] <= "\udfff":
        raise RecipeError(f"{found[0]!a} is half a character, which TOML cannot hold; rename it")
    return f"\\U{ord(found[0]):08X}"


def write_value(value: Any) -> str:
    r"""Write a value as TOML on one line.

    >>> write_value(["a\nb", {"file": "c", "weight": 0.5}])
    '["a\\nb", { file = "c", weight = 0.5 }]'
    """
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {write_value(v)}' for key, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(write_value, value))}]"
    return write_toml({"x": value}).removeprefix("x = ").strip()


def write_comment(text: str) -> str:
    r"""Write a text as one comment; characters that end the line or act on a terminal are escaped.

    >>> write_comment("a model called 'b\nallow_pickle = true'")
    "# a model called 'b\\nallow_pickle = true'"
    """
    return f"# {printable(text)}"
