"""The unit of everything: tensors are cut into chunks of 524,288 elements.

A chunk is what a thread works on, what a kernel is called on, what the journal records and what a
digest is taken of. Sums over a tensor and ties between equal elements go chunk by chunk, so the
size is part of what the numbers mean, and is fixed.

It is large because every call of a kernel has to take Python's lock back from the other threads:
with 131,072 elements the same merge took 1.2 times as long on two threads. Nothing is lost by
leaving the second-level cache, since the loops are bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1 << 19  # elements in a chunk; the last one of a tensor may have fewer


def chunk_count(elements: int) -> int:
    """Return the number of chunks of a tensor; an empty one has none."""
    return -(-elements // CHUNK)


def chunk_span(chunk: int, elements: int) -> tuple[int, int]:
    """Return the first element of a chunk, and how many it has.

    >>> chunk_span(1, CHUNK + 5)
    (524288, 5)
    """
    start = chunk * CHUNK
    return start, min(CHUNK, elements - start)


def chunk_spans(elements: int) -> Iterator[tuple[int, int]]:
    """Yield every chunk of a tensor in order: its first element and how many it has."""
    return (chunk_span(chunk, elements) for chunk in range(chunk_count(elements)))
