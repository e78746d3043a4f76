"""Stored weights as numbers, and the one walk over the chunks of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.inputs.sources import Raw, Source
from dare.tensors.chunks import CHUNK, chunk_spans

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHUNKS_AHEAD = 4
"""How many chunks of a tensor are asked for beyond those that are read next."""

PLACES, PLACE = 64, 4096
"""How many places of two tensors are compared first, and how many elements at each."""


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
    """Stored elements of a tensor, of several sources at once, chunk after chunk.

    Yields the index of a chunk's first element, and what each source has there. The next chunks
    fill the same buffers: bytes for `at_once` elements of each source, made here unless given. If
    the first source is the base, the others need not read it for themselves. As many elements come
    `together`: some chunks.
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


def read_float_chunks(
    sources: Sequence[Source], name: str, backend: str = "reference"
) -> Iterator[tuple[int, list[Floats]]]:
    """The same of a whole tensor in float32, in arrays that stay."""
    for start, stored in read_chunks(sources, name):
        yield start, [decoded(raw, backend) for raw in stored]


def read_stored(
    source: Source, name: str, start: int, count: int, buffer: Bytes, base: Raw | None = None
) -> Raw:
    """Some elements of a tensor as they are stored, in a buffer that has room for them.

    Those of a source in memory are seen where they are: nobody may change what is returned. `base`
    are the base's, if they are there already.
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
    """Some elements of a tensor, in float32."""
    values = np.empty(count, np.float32)
    decode = kernels.load(backend).decode
    for place, (raw,) in read_chunks([source], name, start, count):
        decode(raw, values[place - start :][: raw.size])
    return values


def decoded(raw: Raw, backend: str = "reference") -> Floats:
    """Stored elements in float32; the backend `cpu` is faster, once Numba is loaded."""
    values = np.empty(raw.shape, np.float32)
    kernels.load(backend).decode(raw, values)
    return values


def hold_same(source: Source, name: str, other: str, *, whole: bool = True) -> bool:
    """Whether two tensors have the same bytes; first in some places, then, if `whole`, in all."""
    one, two = source.tensors[name], source.tensors[other]
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    step = max(PLACE, one.elements // PLACES)
    spans = [(at, min(PLACE, one.elements - at)) for at in range(0, one.elements, step)]
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


def rectangles(
    first: int, count: int, width: int, height: int | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a run into rectangles of matrices of a height: row, rows, column, columns."""
    while count:
        row, column = divmod(first, width)
        rows, columns = 1, min(width - column, count)
        if not column and count >= width:
            rows = min(count // width, count if height is None else height - row % height)
        yield row, rows, column, columns
        first, count = first + rows * columns, count - rows * columns
