"""Stored weights as numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dare import kernels as kernel_backends
from dare.inputs.sources import Source

Floats = NDArray[np.float32]


def read_floats(source: Source, name: str, start: int, count: int) -> Floats:
    """Some elements of a tensor, in float32."""
    dtype = source.tensors[name].dtype
    raw = np.empty(count * dtype.itemsize, np.uint8)
    source.read(name, start * dtype.itemsize, raw)
    values = np.empty(count, np.float32)
    kernel_backends.load("cpu").decode(raw.view(dtype.carrier), values)
    return values
