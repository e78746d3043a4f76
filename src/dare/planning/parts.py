"""How the files of an output are cut into the parts of an upload, before anything is made.

Stores take a large object in parts, in any order, and show it when all are there. A part here is a
run of whole chunks in the order of the file, so that what a journal says of chunks and what a store
says of parts fit together. The first part holds the header, whose digests are known only at the
end; it is kept as small as may be.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dare.tensors.chunks import chunk_span, chunk_spans
from dare.tensors.header import TensorInfo

MIN_PART_BYTES = 5 << 20
"""Of every part but the last, in S3."""
MAX_PARTS = 10_000
"""Of one object, in S3."""
MAX_OBJECT_BYTES = 5 << 40
"""In S3; other stores allow no less."""
PART_BYTES = 16 << 20
"""Of a part, if so many do for the object. Larger ones take more memory for the same."""
UPLOADS = 4
"""Parts that are sent at the same time."""
HELD_PARTS = UPLOADS + 4
"""Parts that are in memory at the same time: those being sent, and those being filled."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file, by what lies in it."""

    number: int
    """From 1 on."""
    start: int
    """Its first byte in the file."""
    nbytes: int
    chunks: int
    """How many it has."""


def part_bytes(size: int) -> int:
    """How large the parts of a file are at least, but for the first and the last."""
    return max(PART_BYTES, -(-size // (MAX_PARTS - 2)))


def held_bytes(sizes: Collection[int], chunk_bytes: int) -> int:
    """What parts take in memory at the most, with those that are just being put together."""
    largest = part_bytes(max(sizes, default=0)) + chunk_bytes
    return min(2 * sum(sizes), (HELD_PARTS + UPLOADS) * largest)


def cut(header_bytes: int, tensors: Iterable[TensorInfo]) -> tuple[Part, ...]:
    """The parts of a file whose tensors are given in its order."""
    ends = [
        info.position(start + count)
        for info in tensors
        for start, count in chunk_spans(info.elements)
    ]
    size = ends[-1] if ends else header_bytes
    wanted = part_bytes(size)
    parts: list[Part] = []
    start = chunks = 0
    least = MIN_PART_BYTES
    for end in (header_bytes, *ends):
        chunks += end != header_bytes
        if end - start >= least or end == size:
            parts.append(Part(len(parts) + 1, start, end - start, chunks))
            start, chunks, least = end, 0, wanted
    return tuple(parts)


def part_at(parts: Sequence[Part], position: int) -> Part:
    """The part that a byte of the file lies in."""
    return parts[bisect.bisect_right(parts, position, key=lambda part: part.start) - 1]


def part_of(parts: Sequence[Part], info: TensorInfo, chunk: int) -> Part:
    """The part that a chunk lies in."""
    return part_at(parts, info.position(chunk_span(chunk, info.elements)[0]))
