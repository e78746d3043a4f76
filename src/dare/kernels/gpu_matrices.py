"""Whole matrices on an NVIDIA GPU, as arrays of CuPy.

NumPy hands its functions to the library that made an array, so stages and `linalg` compute on the
GPU what they are given there. Sums are added in another order than by the processor's BLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from dare.errors import RecipeError, install_command, needed
from dare.kernels import MatrixGpus


def describe_gpus(name: str, numbers: Sequence[int]) -> MatrixGpus:
    """Return the GPUs of these numbers; refuse if there is no CuPy."""
    remedy = f"{install_command('gpu-matrices')}, or merge with device = cpu"
    what = "whole matrices need the extra gpu-matrices"
    with needed(RecipeError(f"device = {name}: {what}; {remedy}")):
        import cupy
    found = [cupy.cuda.runtime.getDeviceProperties(number)["name"] for number in numbers]
    free = min(cupy.cuda.Device(number).mem_info[0] for number in numbers)
    return MatrixGpus(", ".join(sorted({each.decode() for each in found})), len(numbers) * free)


class Matrices:
    """One worker's part of a GPU: a stream and memory of its own."""

    def __init__(
        self, number: int, errors_named: Callable[[], AbstractContextManager[None]]
    ) -> None:
        import cupy

        self._errors_named, self._device = errors_named, cupy.cuda.Device(number)
        with errors_named(), self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pool = cupy.cuda.MemoryPool()

    def call(self, function: Callable[..., Any], *given: Any, **settings: Any) -> Any:
        """Call a function with copies of matrices on the GPU, and return its result from there.

        A named tuple that it returns may have matrices too.
        """
        import cupy
        import cupyx

        def sent(value: Any) -> Any:
            if isinstance(value, list):
                return [sent(each) for each in value]
            if not isinstance(value, np.ndarray):
                return value
            copy = cupy.empty(value.shape, value.dtype)
            copy.set(value)
            return copy

        def fetched(value: Any) -> Any:
            if isinstance(value, tuple):
                return type(value)(*map(fetched, value))
            return cupy.asnumpy(value) if isinstance(value, cupy.ndarray) else value

        own_memory = cupy.cuda.using_allocator(self._pool.malloc)
        checked = cupyx.errstate(linalg="raise")
        with self._errors_named(), self._device, self._stream, own_memory, checked:
            return fetched(function(*map(sent, given), **settings))
