"""Sources in memory: read once, and then seen where they lie as often as anybody asks.

What is held is what a source presents: an adapter's tensors as changes in float32, rows in the
output's order, a tensor that has two names once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple, Self

import numpy as np

from dare.inputs.sources import Raw, Source, SourceView
from dare.tensors.chunks import chunk_count, chunk_span
from dare.tensors.digest import bytes_digest


class Held(NamedTuple):
    """The tensors of a source: their elements and the digests of their chunks, by name."""

    elements: dict[str, Raw]
    digests: dict[str, list[str]]

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum({id(raw): raw.nbytes for raw in self.elements.values()}.values())


class HeldSource(SourceView):
    """A source as it is, but for its elements, which are held in memory; its files stay closed."""

    def __init__(self, inner: Source, held: Held) -> None:
        super().__init__(inner, inner.tensors)
        self._held = held
        self.reading_bytes = self.ahead_bytes = 0

    def view(self, name: str, start: int, count: int) -> Raw | None:
        return self._held.elements[name][start : start + count]

    def chunk_digest(self, name: str, chunk: int) -> str | None:
        return self._held.digests[name][chunk]

    def read(self, name: str, start: int, into: Raw) -> None:
        into[:] = self._held.elements[name][start : start + into.size]

    def prefetch(self, name: str, start: int, count: int) -> None:
        """It is there already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing is open."""

    def check_unchanged(self) -> None:
        """What is held cannot change."""


def hold(base: Source, models: Sequence[Source], threads: int) -> list[Held]:
    """Read the base, and what fits it of the models, chunk by chunk; the base comes first."""
    sources = [base, *models]
    every = [_room(base, source) for source in sources]
    chunks = [
        (name, number)
        for name, info in base.tensors.items()
        if name not in base.ties
        for number in range(chunk_count(info.elements))
    ]

    def read(chunk: tuple[str, int]) -> None:
        name, number = chunk
        start, count = chunk_span(number, base.tensors[name].elements)
        first: Raw | None = None
        for source, held in zip(sources, every, strict=True):
            if name in held.elements:
                into = held.elements[name][start : start + count]
                if first is None:
                    source.read(name, start, into)
                    first = into
                else:
                    source.read_beside(name, start, into, first)
                held.digests[name][number] = bytes_digest(into.data)

    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        for _ in pool.map(read, chunks):
            pass
        for source in sources:
            source.check_unchanged()
    return every


def _room(base: Source, source: Source) -> Held:
    """Arrays for what fits the base; names of one tensor have one array."""
    held = Held({}, {})
    for name, info in source.tensors.items():
        if name in base.tensors and info.shape == base.tensors[name].shape:
            first = base.ties.get(name, name)
            if first not in held.elements:
                held.elements[first] = np.empty(info.elements, info.dtype.carrier)
                held.digests[first] = [""] * chunk_count(info.elements)
            held.elements[name] = held.elements[first]
            held.digests[name] = held.digests[first]
    return held
