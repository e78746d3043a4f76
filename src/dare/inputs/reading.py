"""Stored weights as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.inputs.sources import Raw, Source
from dare.tensors.chunks import chunk_spans

Floats = NDArray[np.float32]


def read_floats(
    source: Source, name: str, start: int, count: int, backend: str = "reference"
) -> Floats:
    """Some elements of a tensor, in float32."""
    raw = np.empty(count, source.tensors[name].dtype.carrier)
    source.read(name, start, raw)
    return decoded(raw, backend)


def read_chunks(sources: Sequence[Source], name: str) -> Iterator[list[Floats]]:
    """A tensor that several sources have, chunk by chunk: the values in each of them."""
    for start, count in chunk_spans(sources[0].tensors[name].elements):
        yield [read_floats(source, name, start, count) for source in sources]


def decoded(raw: Raw, backend: str = "reference") -> Floats:
    """Stored elements in float32; the backend `cpu` is faster, once Numba is loaded."""
    values = np.empty(raw.shape, np.float32)
    kernels.load(backend).decode(raw, values)
    return values
