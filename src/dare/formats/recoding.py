"""Formats of outputs that are not plain safetensors, and are stored while they are merged.

A format says how many elements are stored together: a block, a band of rows with one scale, an
expert. The fewest chunks that are whole units make a stretch; if no fewer do, the tensor is one. A
worker merges a stretch and hands it to `encode` piece by piece, as often as that asks. A format
that must know the largest magnitude of a whole tensor asks twice, so the tensor is merged twice.

So no tensor is held as a whole, nothing is written but the output, and stretches are resumed,
checked and shared among slices like chunks. A format is a module of this folder with a subclass of
`Recoding`, made from headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, sqrt
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dare.inputs.directory import Sidecars
from dare.inputs.sources import Raw
from dare.tensors.chunks import CHUNK, chunk_count
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import Described, TensorInfo, build_header, stored_elements

Floats = NDArray[np.float32]
# Yields the merged elements of a stretch in pieces of so many, each with its place in the tensor.
# The last piece may be shorter. A piece is valid until the next; another call begins anew.
Read = Callable[[int], Iterable[tuple[int, Raw]]]
# Writes bytes of a stored tensor: its name, from which byte on, and the bytes.
Put = Callable[[str, int, NDArray[np.uint8]], None]

# Elements that are encoded at once, and the bytes that this takes for each: some arrays of
# float32, and of float64 to measure the loss.
PIECE_ELEMENTS, PIECE_WORK = 1 << 18, 48


@dataclass(frozen=True)
class Loss:
    """The difference that storing a tensor in another format makes."""

    error: float
    """The Frobenius norm of the difference, as a share of the merged tensor's."""
    largest: float
    """The largest difference of an element."""


class Unit(NamedTuple):
    """The elements of a tensor that are stored together, and what that takes."""

    elements: int = 1
    """Their number, from the first of the tensor on; the last unit may have fewer.

    Bytes of units that follow each other must follow each other in each stored tensor.
    """
    reads: int = 1
    """How often `encode` reads them; they are merged as often."""
    work_bytes: int = 0
    """About how much memory `encode` takes."""


class LossMeter:
    """Adds up the loss of a tensor: Σ(stored - merged)², Σ merged² and the largest difference."""

    def __init__(self, parts: Iterable[Sequence[float]] = ()) -> None:
        self.sums = (0.0, 0.0, 0.0)
        for part in parts:
            self._count(*part)

    def add(self, merged: Floats, stored: Floats) -> None:
        """Count some elements, as they were merged and as they will be read back."""
        difference = np.abs(np.subtract(stored, merged, dtype=np.float64))
        self._count(
            float(np.square(difference).sum()),
            float(np.square(merged, dtype=np.float64).sum()),
            float(difference.max(initial=0)),
        )

    def _count(self, lost: float, whole: float, largest: float) -> None:
        self.sums = self.sums[0] + lost, self.sums[1] + whole, max(self.sums[2], largest)

    @property
    def loss(self) -> Loss:
        """The loss of all elements that were counted."""
        lost, whole, largest = self.sums
        return Loss(sqrt(lost / whole) if whole else 0.0, largest)


class Recoding:
    """A format of outputs; it must pickle, and does not know the files that are written."""

    format: str
    """Its name for people, with the types: `GGUF (Q8_0)`."""
    config: Mapping[str, Any] = {}
    """Values of the output's config.json, laid over what a plain output would have there."""
    replacing: Sequence[str] = ()
    """The files that replace those of a plain output; empty for a format that writes its own."""

    def merged_type(self, base: TensorInfo) -> StorageType:  # noqa: ARG002
        """Return the type that a tensor of weights has before it is recoded."""
        return STORAGE_TYPES["F32"]

    def stored(self, tensor: Described) -> Sequence[Described]:
        """Return the tensors that store a merged one: by default itself, maybe none."""
        return [tensor]

    def unit(self, tensor: Described) -> Unit:  # noqa: ARG002
        """Return the elements that must be stored together."""
        return Unit()

    def encode(self, tensor: Described, read: Read, put: Put) -> LossMeter | None:
        """Store a stretch of a merged tensor; return its loss, None if nothing is lost.

        Several threads may be here at once, each with a stretch.
        """
        name, dtype, _ = tensor
        for start, raw in read(PIECE_ELEMENTS):
            put(name, start * dtype.itemsize, raw.view(np.uint8))
        return None

    def chunks_together(self, tensor: Described) -> int:
        """Return the length of a tensor's stretches, in chunks."""
        chunks = lcm(self.unit(tensor).elements, CHUNK) // CHUNK
        return max(1, min(chunks, chunk_count(stored_elements(*tensor[1:]))))

    def build_header(
        self, tensors: Iterable[Described], metadata: Mapping[str, str]
    ) -> tuple[bytes, dict[str, TensorInfo]]:
        """Return the first bytes of a file with these tensors, and where each begins."""
        return build_header(tensors, metadata)

    def replace(self, folder: Path, places: Mapping[str, tuple[str, TensorInfo]]) -> None:
        """Write the files that replace others, from the file and the place of each tensor there."""
        raise NotImplementedError

    def with_files(self, beside: Sidecars) -> Self:  # noqa: ARG002
        """Return the format with configuration and tokenizer, if they are stored with weights."""
        return self


def in_pieces(arrays: Iterable[Raw], size: int) -> Iterator[Raw]:
    """Cut arrays that follow each other into pieces of a size; the last may be shorter.

    >>> [piece.tolist() for piece in in_pieces([np.arange(3), np.arange(4)], 2)]
    [[0, 1], [2, 0], [1, 2], [3]]
    """
    held, room = list[Raw](), size  # the beginning of a piece, and what it lacks
    for raw in arrays:
        left = raw
        while left.size >= room:
            yield np.concatenate([*held, left[:room]]) if held else left[:room]
            held, room, left = [], size, left[room:]
        if left.size:
            held.append(left.copy())  # the next array may lie in the same place
            room -= left.size
    if held:
        yield np.concatenate(held)
