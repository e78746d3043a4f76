"""Stored weights as numbers, the one walk over the chunks of a tensor, and sources in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.inputs.sources import Raw, Source, SourceView
from dare.tensors.chunks import CHUNK, chunk_count, chunk_span, chunk_spans
from dare.tensors.digest import bytes_digest

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHUNKS_AHEAD = 4  # chunks of a tensor that are asked for beyond those that are read next

SAMPLES, SAMPLE_ELEMENTS = 64, 4096  # compared first where two tensors may be the same


@contextmanager
def hold_open(sources: Sequence[Source], *, checks: bool = False) -> Iterator[None]:
    """Hold sources open; `checks` refuses at the end those that have changed meanwhile."""
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source)
        yield
        for source in sources if checks else ():
            source.check_unchanged()


def read_chunks(
    sources: Sequence[Source],
    name: str,
    start: int = 0,
    count: int | None = None,
    *,
    buffers: Sequence[Bytes] | None = None,
    base_first: bool = False,
    at_once: int = CHUNK,
    together: int = CHUNK,
) -> Iterator[tuple[int, list[Raw]]]:
    """Yield stored elements of a tensor, of several sources at once, chunk after chunk.

    Each time these are the index of the first element, and the elements of each source. The next
    chunks fill the same buffers: bytes for `at_once` elements of each source, made here unless
    given. If the first source is the base, the others need not read it for themselves. As many
    elements come `together`: some chunks.
    """
    count = sources[0].tensors[name].elements - start if count is None else count
    if buffers is None:
        sizes = (source.tensors[name].dtype.itemsize for source in sources)
        buffers = [np.empty(min(count, at_once) * size, np.uint8) for size in sizes]
    asked = count if count <= at_once else 0  # whoever reads no more has asked for it before
    for offset in range(0, count, at_once):
        read = min(at_once, count - offset)
        wanted = min(offset + at_once + CHUNKS_AHEAD * CHUNK, count)
        for source in sources if asked < wanted else ():
            source.prefetch(name, start + asked, wanted - asked)
        asked = max(asked, wanted)
        found: list[Raw] = []
        for source, buffer in zip(sources, buffers, strict=True):
            beside = found[0] if found and base_first else None
            found.append(read_stored(source, name, start + offset, read, buffer, beside))
        for first in range(0, read, together):
            yield start + offset + first, [raw[first : first + together] for raw in found]


def read_float_chunks(sources: Sequence[Source], name: str) -> Iterator[tuple[int, list[Floats]]]:
    """Yield the chunks of a whole tensor in float32, in arrays that stay."""
    for start, stored in read_chunks(sources, name):
        yield start, [decoded(raw) for raw in stored]


def read_stored(
    source: Source, name: str, start: int, count: int, buffer: Bytes, base: Raw | None = None
) -> Raw:
    """Read some elements of a tensor as they are stored, into a buffer that has room for them.

    Those of a source in memory are returned where they are: nobody may change them. `base` are
    those of the base, if they are there already.
    """
    if (held := source.view(name, start, count)) is not None:
        return held
    dtype = source.tensors[name].dtype
    raw: Raw = buffer[: count * dtype.itemsize].view(dtype.carrier)
    if base is None:
        source.read(name, start, raw)
    else:
        source.read_beside(name, start, raw, base)
    return raw


def read_floats(
    source: Source, name: str, start: int, count: int, backend: str = "reference"
) -> Floats:
    """Read some elements of a tensor, in float32."""
    values = np.empty(count, np.float32)
    decode = kernels.load(backend).decode
    for place, (raw,) in read_chunks([source], name, start, count):
        decode(raw, values[place - start :][: raw.size])
    return values


def decoded(raw: Raw, backend: str = "reference") -> Floats:
    """Decode stored elements to float32; the backend `cpu` is faster, once Numba is loaded."""
    values = np.empty(raw.shape, np.float32)
    kernels.load(backend).decode(raw, values)
    return values


def hold_same(source: Source, name: str, other: str, *, whole: bool = True) -> bool:
    """Return whether two tensors have the same bytes in some places and, if `whole`, in all."""
    one, two = source.tensors[name], source.tensors[other]
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    count, step = SAMPLE_ELEMENTS, max(SAMPLE_ELEMENTS, one.elements // SAMPLES)
    spans = [(at, min(count, one.elements - at)) for at in range(0, one.elements, step)]
    spans += chunk_spans(one.elements) if whole else ()
    buffers = np.empty((2, max((count for _, count in spans), default=0)), one.dtype.carrier)
    with source:
        for start, count in spans:
            source.read(name, start, buffers[0, :count])
            source.read(other, start, buffers[1, :count])
            left, right = buffers[:, :count].view(np.uint8)
            if not np.array_equal(left, right):
                return False
    return True


class Held(NamedTuple):
    """The tensors of a source: their elements and the digests of their chunks, by name."""

    elements: dict[str, Raw]
    digests: dict[str, list[str]]

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return sum({id(raw): raw.nbytes for raw in self.elements.values()}.values())


class HeldSource(SourceView):
    """A source as it is, but for its elements, which are held in memory; its files stay closed."""

    def __init__(self, inner: Source, held: Held) -> None:
        super().__init__(inner, inner.tensors, opened=())
        self._held = held
        self.reading_bytes = self.ahead_bytes = 0

    def view(self, name: str, start: int, count: int) -> Raw | None:
        return self._held.elements[name][start : start + count]

    def chunk_digest(self, name: str, chunk: int) -> str | None:
        return self._held.digests[name][chunk]

    def read(self, name: str, start: int, into: Raw) -> None:
        into[:] = self._held.elements[name][start : start + into.size]

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Do nothing: it is there already."""


def hold(base: Source, models: Sequence[Source], threads: int) -> list[Held]:
    """Read the base, and the tensors of the models that fit it; the base comes first."""
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

    with hold_open(sources, checks=True), ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, chunks))
    return every


def _room(base: Source, source: Source) -> Held:
    """Make arrays for the tensors that fit the base; names of one tensor have one array."""
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
