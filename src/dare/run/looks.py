"""What the looks of a census found, in files, so that processes can share it.

A file is a line of JSON, whose check is taken over all that follows it and the merge's
fingerprint, then the values: their shape as JSON, their arrays as NumPy stores them. Nothing in it
can name code: of classes only named tuples and dataclasses are written, and found again in the
module of the stage that looked.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import RecipeError
from dare.output.publishing import sync_folder, write_synced
from dare.output.writer import explaining
from dare.tensors.digest import bytes_digest

LOOKS_VERSION = 1

Look = Callable[..., Any]
"""A stage's function that looks at a tensor, in whose module its classes stand."""


def write_looks(path: Path, identity: str, looks: Mapping[str, Any], look: Look) -> None:
    """Put looks by tensor into a file, at once: it is complete or not there.

    `identity` says of which merge, inputs, census and round they are.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    try:
        values = {name: _pack(value, arrays, look) for name, value in looks.items()}
    except TypeError as error:
        raise RecipeError(
            f"{look.__module__}.{look.__name__}: {error}; slices cannot share it, so merge "
            "without --slice"
        ) from None
    stored = io.BytesIO()
    np.savez(stored, *arrays)
    content = json.dumps(values).encode() + b"\n" + stored.getvalue()
    head = {"looks": LOOKS_VERSION, "check": _check(identity, content)}
    started = path.with_name(f"{path.name}.{os.urandom(6).hex()}")
    with explaining(path, resumable=True):
        write_synced(started, json.dumps(head).encode() + b"\n" + content)
        started.replace(path)
        sync_folder(path.parent)


def read_looks(path: Path, identity: str, look: Look) -> dict[str, Any] | None:
    """The looks of a file; None if it is not there, not whole, or of something else."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
        expected = {"looks": LOOKS_VERSION, "check": _check(identity, content)}
        if json.loads(head) != expected:
            return None
        values, _, stored = content.partition(b"\n")
        with np.load(io.BytesIO(stored), allow_pickle=False) as found:
            arrays = [found[f"arr_{place}"] for place in range(len(found.files))]
        return {name: _unpack(value, arrays, look) for name, value in json.loads(values).items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None


def _check(identity: str, content: bytes) -> str:
    return bytes_digest(identity.encode() + b"\n" + content)


def _pack(value: Any, arrays: list[np.ndarray[Any, Any]], look: Look) -> Any:
    """A value as JSON has it; arrays are put aside."""
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise TypeError("it finds an array of objects")
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "number": len(arrays) - 1}
    if isinstance(value, dict):
        pairs = [[_pack(part, arrays, look) for part in pair] for pair in value.items()]
        return {"dict": pairs}
    kind = type(value)
    if kind in (list, tuple):
        return {kind.__name__: [_pack(part, arrays, look) for part in value]}
    if _fields(kind) and look.__globals__.get(kind.__name__) is kind:
        parts = [_pack(getattr(value, name), arrays, look) for name in _fields(kind)]
        return {"class": kind.__name__, "parts": parts}
    raise TypeError(f"it finds a {kind.__name__}, which has no plain form")


def _unpack(value: Any, arrays: list[np.ndarray[Any, Any]], look: Look) -> Any:
    if not isinstance(value, dict):
        return value
    if "class" in value:
        kind = look.__globals__[value["class"]]
        if not isinstance(kind, type) or not _fields(kind):
            raise TypeError(f"{value['class']} is not a class of values")
        parts = [_unpack(part, arrays, look) for part in value["parts"]]
        return kind(**dict(zip(_fields(kind), parts, strict=True)))
    ((word, content),) = value.items()
    if word in ("array", "number"):
        return arrays[content] if word == "array" else arrays[content][()]
    if word == "dict":
        return {_unpack(k, arrays, look): _unpack(v, arrays, look) for k, v in content}
    unpacked = [_unpack(part, arrays, look) for part in content]
    return tuple(unpacked) if word == "tuple" else unpacked


def _fields(kind: type) -> tuple[str, ...]:
    """The names of what a named tuple or a dataclass holds; none for other classes."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    named: tuple[str, ...] = getattr(kind, "_fields", ())
    return named if issubclass(kind, tuple) else ()
