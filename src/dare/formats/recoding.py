"""Outputs that are not plain safetensors: each merged tensor is recoded when all are there.

A merge writes its chunks into one plain file, so that resuming, slices and digests are the same
for every output. Then each tensor is read back and stored as its format says. A format is a module
of this folder with a subclass of `Recoding`, which `open_recoding` makes, from headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import RecipeError
from dare.inputs.directory import Sidecars
from dare.inputs.sources import Raw, Source
from dare.recipe.recipe import Recipe
from dare.tensors.chunks import chunk_spans
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import Described, TensorInfo, build_header, stored_elements

Floats = NDArray[np.float32]
# Returns some elements of the merged tensor as they are stored: from which one on, and how many.
Read = Callable[[int, int], Raw]
# Writes bytes of a stored tensor: its name, from which byte on, and the bytes.
Put = Callable[[str, int, NDArray[np.uint8]], None]


@dataclass(frozen=True)
class Loss:
    """The loss of a tensor by being recoded."""

    error: float
    """The Frobenius norm of the difference, as a share of the merged tensor's."""
    largest: float
    """The largest difference of an element."""


class LossMeter:
    """Adds the loss of a tensor up, piece by piece."""

    def __init__(self) -> None:
        self._lost = self._whole = self._largest = 0.0

    def add(self, merged: Floats, stored: Floats) -> None:
        """Count some elements: as they were merged, and as they read when they are stored."""
        difference = np.abs(np.subtract(stored, merged, dtype=np.float64))
        self._lost += float(np.square(difference).sum())
        self._whole += float(np.square(merged, dtype=np.float64).sum())
        self._largest = max(self._largest, float(difference.max(initial=0)))

    @property
    def loss(self) -> Loss:
        """The loss of what was counted."""
        return Loss(sqrt(self._lost / self._whole) if self._whole else 0.0, self._largest)


class Recoding:
    """A format of outputs; it must pickle, and knows nothing of the files that it is written to."""

    format: str
    """Its name for people, with the types: `GGUF (Q8_0)`."""
    config: Mapping[str, Any] = {}
    """Values of the output's config.json, laid over what a plain output would have there."""

    def merged_type(self, base: TensorInfo) -> StorageType:  # noqa: ARG002
        """Return the type that a tensor of weights has before it is recoded."""
        return STORAGE_TYPES["F32"]

    def stored(self, tensor: Described) -> Sequence[Described]:
        """Return the tensors that a merged one becomes: by default itself; maybe none."""
        return [tensor]

    def encode(self, tensor: Described, read: Read, put: Put) -> Loss | None:
        """Store a merged tensor, in bounded memory; return its loss, None if nothing is lost.

        Several threads may be here at once, each with a tensor.
        """
        name, dtype, shape = tensor
        for start, count in chunk_spans(stored_elements(dtype, shape)):
            put(name, start * dtype.itemsize, read(start, count).view(np.uint8))
        return None

    def build_header(
        self, tensors: Iterable[Described], metadata: Mapping[str, str]
    ) -> tuple[bytes, dict[str, TensorInfo]]:
        """Return the first bytes of a file with these tensors, and where each begins."""
        return build_header(tensors, metadata)

    def with_files(self, beside: Sidecars) -> Self:  # noqa: ARG002
        """Take in configuration and tokenizer, where these are stored with the weights."""
        return self


def find_recoding(recipe: Recipe, inputs: Sequence[Source]) -> Recoding | None:
    """Return the format that a recipe asks for; None: plain safetensors."""
    if recipe.output is not None and recipe.output.suffix == ".gguf":
        if recipe.format is not None:
            raise RecipeError("format is for safetensors; leave it out, and set dtype for GGUF")
        return _open("gguf", recipe, inputs)
    if recipe.dtype is not None and recipe.dtype not in STORAGE_TYPES:
        raise RecipeError(f"dtype {recipe.dtype}: is for an output that ends with .gguf")
    if recipe.format is None or recipe.output is None:
        return None
    if (found := _open("quantised", recipe, inputs)) is not None:
        return found
    what = "the base is not quantised in a format that can be written"
    raise RecipeError(f'format = "input": {what}; leave format out, or set dtype')


def _open(name: str, recipe: Recipe, inputs: Sequence[Source]) -> Recoding | None:
    found: Recoding | None = import_module(f"dare.formats.{name}").open_recoding(recipe, inputs)
    return found
