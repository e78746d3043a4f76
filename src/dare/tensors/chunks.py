"""Chunks of tensors, and digests made of theirs.

Tensors are cut into chunks of 524,288 elements, the unit of everything.

A chunk is what a thread works on, what a kernel is called on, what the journal records and what a
digest is taken of. Sums over a tensor and ties between equal elements go chunk by chunk, so the
size is part of what the numbers mean, and is fixed.

It is large because every call of a kernel has to take Python's lock back from the other threads:
with 131,072 elements the same merge took 1.2 times as long on two threads. Nothing is lost by
leaving the second-level cache, since the loops are bound by arithmetic.

Digests do not depend on how tensors are read or laid out. Each chunk is hashed with XXH3-128, and a
tensor's digest is the hash of its chunks' digests. The digest of a model is the hash of a line for
each tensor, in order of name. So chunks can be hashed in any order, by any thread, while they pass
by, and a model has the same digest in one file and in seven.

XXH3 finds accidents (a flipped bit, a truncated copy, the wrong file). It is no protection against
someone who forges a collision on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import xxhash

from dare.documents.values import Limits
from dare.tensors.files import as_stream, open_input
from dare.tensors.header import TensorInfo

CHUNK = 1 << 19  # elements in a chunk; the last one of a tensor may have fewer


def chunk_count(elements: int) -> int:
    """Return the number of chunks of a tensor; an empty one has none."""
    return -(-elements // CHUNK)


def chunk_span(chunk: int, elements: int, chunks: int = 1) -> tuple[int, int]:
    """Return the first element of a chunk, and how many it has, or it and those that follow.

    >>> chunk_span(1, CHUNK + 5)
    (524288, 5)
    """
    start = chunk * CHUNK
    return start, min(CHUNK * chunks, elements - start)


def chunk_spans(elements: int) -> Iterator[tuple[int, int]]:
    """Yield every chunk of a tensor in order: its first element and how many it has."""
    return (chunk_span(chunk, elements) for chunk in range(chunk_count(elements)))


def rectangles(
    first: int, count: int, width: int, height: int | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a run of elements into rectangles of matrices of a height: row, rows, column, columns.

    >>> list(rectangles(3, 9, 4))
    [(0, 1, 3, 1), (1, 2, 0, 4)]
    """
    while count:
        row, column = divmod(first, width)
        rows, columns = 1, min(width - column, count)
        if not column and count >= width:
            rows = min(count // width, count if height is None else height - row % height)
        yield row, rows, column, columns
        first, count = first + rows * columns, count - rows * columns


# ---------------------------------------------------------------- digests

DIGEST_LENGTH = 32
UNKNOWN = "0" * DIGEST_LENGTH  # stands where a digest will be, so that the length is final
Digest = Annotated[str, Limits(pattern=f"[0-9a-f]{{{DIGEST_LENGTH}}}")]
SEAL = "check"  # key of the digest that a document has of itself


running_digest = xxhash.xxh3_128  # of bytes that come one after the other: update, then hexdigest


def bytes_digest(data: bytes | memoryview) -> str:
    """Hash a chunk, a header or a manifest."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """Hash a file piece by piece."""
    with as_stream(open_input(path)) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def tensor_digest(chunk_digests: Iterable[str]) -> str:
    """Combine the digests of a tensor's chunks, in order; several may come as one text."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in chunk_digests))


def model_digest(tensors: Iterable[tuple[TensorInfo, str]]) -> str:
    """Combine the digests of tensors with their names, types and shapes."""
    lines = sorted(
        f"{info.name}\t{info.dtype.name}\t{list(info.shape)}\t{digest}\n"
        for info, digest in tensors
    )
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())
