"""Files of figures gathered from models at work, which a recipe names beside its models.

A recipe's `gathered` is a safetensors file with two kinds of tensors. Both are optional.

    gram/MODEL/TENSOR   the Gram matrix XᵀX of the inputs of a linear layer, over a model's task:
                        its upper triangle, row after row
    TENSOR              a tensor that goes into the output unchanged, such as a norm's statistics

Its header has the digest of every tensor. So the header identifies the file, and each tensor is
checked when it is read, one at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare import __version__
from dare.documents.values import checked, read_json
from dare.errors import InputError, OutputError
from dare.inputs.arrays import stored
from dare.inputs.sources import FileSource, Floats
from dare.tensors.chunks import bytes_digest, model_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo, build_header, show_shape

NOTE = "dare.gathered"  # the key of the notes in the header
GRAM = "gram/"
REMEDY = "gather it again, as docs/guides/inputs.md shows"


@dataclass(frozen=True)
class Notes:
    """The notes in the header."""

    digests: dict[str, str]
    rows: dict[str, int]  # by model: the most inputs of a layer, such as tokens
    turned: tuple[str, ...]  # layers that are stored as inputs × outputs
    version: str = __version__


class Gathered(FileSource):
    """A file of gathered tensors; it must be open when tensors are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            given = read_json(self.metadata.get(NOTE, ""))
            names = [field.name for field in fields(Notes) if field.name in given]
            self.notes = checked({name: given[name] for name in names}, Notes)
        except (ValueError, TypeError, RecursionError):
            what = "has no Gram matrices or statistics with their digests"
            raise InputError(f"{path}: {what}; {REMEDY}") from None
        if self.notes.digests.keys() != self.tensors.keys():
            raise InputError(f"{path}: its header has digests of other tensors; {REMEDY}")

    @cached_property
    def digest(self) -> str:
        """The digest of all its tensors."""
        digests = self.notes.digests.items()
        return model_digest((self.tensors[name], digest) for name, digest in digests)

    def fingerprint(self) -> list[Any]:
        return [self.digest]

    def array(self, name: str) -> Floats:
        """Read a tensor of float32 numbers; refuse one that has changed or is not finite."""
        info = self.tensors[name]
        values = np.empty(info.elements, info.dtype.carrier)
        self.read(name, 0, values)
        if bytes_digest(values.data) != self.notes.digests[name]:
            raise InputError(f"{self.path}: {name}: changed since it was written; {REMEDY}")
        if not np.isfinite(values).all():
            raise InputError(f"{self.path}: {name}: has NaN or infinite values; {REMEDY}")
        return values.reshape(info.shape)

    def input_axis(self, tensor: str, shape: tuple[int, ...], models: Iterable[str]) -> int | None:
        """Return the dimension of a layer's inputs if all models have its Gram matrix, else None.

        Refuse models without any, and matrices that do not fit the layer.
        """
        names = {f"{GRAM}{model}/{tensor}": model for model in models}
        for model in names.values():
            if model not in self.notes.rows:
                known = ", ".join(self.notes.rows) or "none"
                raise InputError(
                    f"{self.path}: has no Gram matrices of {model}; it has: {known}. Gather those "
                    "of all models, by the names that the recipe has for them"
                )
        if len(shape) != 2 or not names.keys() <= self.tensors.keys():
            return None
        axis = 0 if tensor in self.notes.turned else 1
        expected = STORAGE_TYPES["F32"], (shape[axis] * (shape[axis] + 1) // 2,)
        for name in names:
            if (self.tensors[name].dtype, self.tensors[name].shape) != expected:
                what = f"is not that of a layer with {shape[axis]} inputs"
                raise InputError(f"{self.path}: {name}: {what}; {REMEDY}")
        return axis

    def gram(self, model: str, tensor: str) -> Floats:
        """Return the Gram matrix of a model's layer."""
        return _from_triangle(self.array(f"{GRAM}{model}/{tensor}"))


def open_gathered(path: Path, base: Mapping[str, TensorInfo]) -> Gathered:
    """Open a file, and check that the tensors which are not Gram matrices fit the base's."""
    gathered = Gathered(path)
    with gathered:
        for name in (name for name in gathered.tensors if not name.startswith(GRAM)):
            shape = gathered.array(name).shape
            if name not in base or base[name].shape != shape:
                other = show_shape(base[name].shape) if name in base else "absent"
                what = f"is {show_shape(shape)}, but {other} in the base"
                raise InputError(f"{path}: {name}: {what}; {REMEDY}")
    return gathered


def has_statistics(path: Path) -> bool:
    """Return whether a file has tensors that go into the output unchanged."""
    return any(not name.startswith(GRAM) for name in Gathered(path).tensors)


def _from_triangle(packed: Floats) -> Floats:
    size = int(np.sqrt(2 * packed.size))
    full, start = np.empty((size, size), np.float32), 0
    for row in range(size):
        full[row, row:] = full[row:, row] = packed[start : start + size - row]
        start += size - row
    return full


def as_triangle(gram: NDArray[Any]) -> Floats:
    """Return the upper triangle of a matrix, row after row.

    >>> as_triangle(np.array([[1, 2], [2, 3]]))
    array([1., 2., 3.], dtype=float32)
    """
    rows = [row[number:] for number, row in enumerate(gram)]
    return np.concatenate(rows).astype(np.float32)


def write_gathered(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    rows: Mapping[str, int] | None = None,
    turned: Iterable[str] = (),
) -> None:
    """Write a file from tensors by their names in it; it appears only when it is complete."""
    file, made = Path(path), Path(f"{os.fspath(path)}.partial")
    parts = {name: stored(array, name) for name, array in tensors.items()}
    digests = {name: bytes_digest(data.data) for name, (_, _, data) in parts.items()}
    notes = {"digests": digests, "rows": rows or {}, "turned": sorted(turned)}
    described = [(name, kind, shape) for name, (kind, shape, _) in parts.items()]
    text = json.dumps({**notes, "version": __version__})
    header, _ = build_header(described, {NOTE: text})
    try:
        with made.open("wb") as opened:
            opened.write(header)
            for _, _, data in parts.values():
                opened.write(data.data)
        made.replace(file)
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}") from None
