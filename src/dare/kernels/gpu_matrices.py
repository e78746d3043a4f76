"""Whole matrices on an NVIDIA GPU, as arrays of CuPy.

NumPy hands its functions to the library that made an array, so stages and `linalg` compute on the
GPU what they are given there. Sums are added in another order than by the processor's BLAS.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import RecipeError, install_command, needed
from dare.kernels import MatrixGpus


def describe_gpus(name: str, find_gpus: Callable[[str], list[int]]) -> MatrixGpus:
    """Return the GPUs that a name stands for; refuse if there is no CuPy, whose extra has all."""
    remedy = f"{install_command('gpu-matrices')}, or merge with device = cpu"
    what = "whole matrices need the extra gpu-matrices"
    with needed(RecipeError(f"device = {name}: {what}; {remedy}")):
        import cupy
    numbers = find_gpus(name)
    found = [cupy.cuda.runtime.getDeviceProperties(number)["name"] for number in numbers]
    free = min(cupy.cuda.Device(number).mem_info[0] for number in numbers)
    return MatrixGpus(", ".join(sorted({each.decode() for each in found})), len(numbers) * free)


_first_call = threading.Lock()
_called: set[Callable[..., Any]] = set()


@contextmanager
def _alone_at_first(function: Callable[..., Any]) -> Iterator[None]:
    """Let a function's first call run alone: CuPy compiles its kernels then, for all threads.

    Threads that call it at once would each compile all of them.
    """
    with ExitStack() as alone:
        if function not in _called:
            alone.enter_context(_first_call)
            if function in _called:
                alone.close()
        yield
        _called.add(function)


class Matrices:
    """One worker's part of a GPU: a stream and memory of its own."""

    def __init__(
        self, number: int, errors_named: Callable[[], AbstractContextManager[None]]
    ) -> None:
        import cupy
        import cupyx

        self._cupy, self._cupyx = cupy, cupyx
        self._errors_named, self._device = errors_named, cupy.cuda.Device(number)
        with errors_named(), self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pool = cupy.cuda.MemoryPool()
        _load_libraries(number)

    @contextmanager
    def _current(self) -> Iterator[None]:
        own_memory = self._cupy.cuda.using_allocator(self._pool.malloc)
        checked = self._cupyx.errstate(linalg="raise")
        with self._errors_named(), self._device, self._stream, own_memory, checked:
            yield

    def empty(self, size: int) -> Any:
        """Return room for so many numbers on the GPU."""
        with self._current():
            return self._cupy.empty(size, np.float32)

    def put(self, values: NDArray[np.float32], room: Any) -> None:
        """Copy numbers to a part of such a room; they may change afterwards."""
        with self._current():
            room.set(values, self._stream)

    def call(self, function: Callable[..., Any], *given: Any, **settings: Any) -> Any:
        """Call a function with matrices on the GPU, and return its result from there.

        NumPy's matrices are copied to the GPU. A named tuple that it returns may have matrices too.
        """
        with _alone_at_first(function), self._current():
            return self._fetched(function(*map(self._sent, given), **settings))

    def _sent(self, value: Any) -> Any:
        if isinstance(value, list):  # one that is there is the function's own, to be emptied
            is_here = any(isinstance(each, np.ndarray) for each in value)
            return [self._sent(each) for each in value] if is_here else value
        if not isinstance(value, np.ndarray):
            return value
        copy = self._cupy.empty(value.shape, value.dtype)
        copy.set(value, self._stream)
        return copy

    def _fetched(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(self._fetched, value))
        if not isinstance(value, self._cupy.ndarray):
            return value
        # Memory that the GPU reaches by itself is 20 times as fast, and CuPy keeps it for the next.
        return value.get(out=self._cupyx.empty_pinned(value.shape, value.dtype))


@cache
def _load_libraries(number: int) -> None:
    """Have CuPy load its libraries while the first matrices are read."""

    def load() -> None:
        import cupy

        with suppress(Exception), cupy.cuda.Device(number):  # whoever needs them will say it
            nothing = np.zeros_like(cupy.empty((2, 2), np.float64))
            np.linalg.eigh(nothing @ nothing)

    threading.Thread(target=load).start()
