"""Stored weights as numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.inputs.sources import Source
from dare.tensors.dtypes import StorageType

Floats = NDArray[np.float32]


def read_floats(
    source: Source, name: str, start: int, count: int, backend: str = "reference"
) -> Floats:
    """Some elements of a tensor, in float32."""
    dtype = source.tensors[name].dtype
    raw = np.empty(count * dtype.itemsize, np.uint8)
    source.read(name, start * dtype.itemsize, raw)
    return decoded(raw, dtype, backend)


def decoded(raw: NDArray[np.uint8], dtype: StorageType, backend: str = "reference") -> Floats:
    """Stored bytes in float32; the backend `cpu` is faster, once Numba is loaded."""
    carriers = raw.view(dtype.carrier)
    values = np.empty(carriers.shape, np.float32)
    kernels.load(backend).decode(carriers, values)
    return values
