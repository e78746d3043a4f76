"""CuPy as far as matrices use it, with this machine's memory in the place of a GPU's.

Its arrays are as strict as CuPy's: they never become NumPy's by themselves, nor are computed with
those, and only functions and arguments that CuPy has are known to them.
"""

import contextlib
import os
import sys
import threading
import types
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from numpy.lib.mixins import NDArrayOperatorsMixin

IS_REAL = "DARE_TEST_GPU" in os.environ
TITLE = "NVIDIA Imaginary"

FUNCTIONS = {
    "asarray": (),
    "concatenate": ("axis", "dtype"),
    "empty": (),
    "empty_like": (),
    "fft.irfft": ("n", "axis"),
    "fft.rfft": ("axis",),
    "linalg.eigh": (),
    "linalg.eigvalsh": (),
    "linalg.inv": (),
    "linalg.norm": (),
    "linalg.qr": (),
    "partition": ("axis",),
    "split": ("axis",),
    "stack": (),
    "take_along_axis": (),
    "where": (),
    "zeros": (),
    "zeros_like": (),
}
here = threading.local()
launched = []  # threads that have called a function on a GPU


class OutOfMemoryError(MemoryError):
    pass


def unwrap(value):
    if isinstance(value, list | tuple):
        return type(value)(map(unwrap, value))
    if isinstance(value, np.ndarray) and value.size:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")
    return value._array if isinstance(value, ndarray) else value


def wrap(value):
    if isinstance(value, list | tuple):
        return [wrap(each) for each in value]
    return ndarray(np.asarray(value))


class ndarray(NDArrayOperatorsMixin):  # noqa: N801
    def __init__(self, array):
        self._array = array

    def __array__(self, *_args, **_kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc, method, *inputs, out=(None,), dtype=None):
        assert method == "__call__"
        made = ufunc(*map(unwrap, inputs), dtype=dtype, out=unwrap(out))
        return wrap(made) if out[0] is None else out[0]

    def __array_function__(self, function, types, args, kwargs):
        name = f"{function.__module__}.{function.__name__}".removeprefix("numpy.")
        assert kwargs.keys() <= set(FUNCTIONS[name]), f"CuPy's {name} has not all of {kwargs}"
        launched.append(threading.get_ident())
        if name == "asarray":
            return wrap(np.array(args[0]))
        return wrap(function(*map(unwrap, args), **kwargs))

    shape = property(lambda self: self._array.shape)
    dtype = property(lambda self: self._array.dtype)
    size = property(lambda self: self._array.size)
    T = property(lambda self: wrap(self._array.T))
    device = property(lambda self: here.Device)

    def __getitem__(self, key):
        return wrap(self._array[unwrap(key)])

    def __setitem__(self, key, value):
        self._array[unwrap(key)] = unwrap(value)

    def __len__(self):
        return len(self._array)

    def __iter__(self):
        return map(wrap, self._array)

    def __float__(self):
        return float(self._array)

    def __int__(self):
        return int(self._array)

    def __bool__(self):
        return bool(self._array)

    def argmax(self, axis):
        return wrap(self._array.argmax(axis=axis))

    def astype(self, dtype, *, order="K", copy=True):
        return wrap(self._array.astype(dtype, order=order, copy=copy))

    def copy(self):
        return wrap(self._array.copy())

    def reshape(self, *shape):
        return wrap(self._array.reshape(*shape))

    def sum(self, axis=None, dtype=None):
        return wrap(self._array.sum(axis=axis, dtype=dtype))

    def trace(self):
        return wrap(self._array.trace())

    def max(self):
        return wrap(self._array.max())

    def min(self):
        return wrap(self._array.min())

    def get(self, out=None):
        out = np.empty(self.shape, self.dtype) if out is None else out
        out[...] = self._array
        return out

    def set(self, array, stream):
        assert array.dtype == self.dtype
        assert stream is here.Stream
        self._array[...] = array


def empty(shape, dtype):
    """Arrays are made while the thread has set device, stream and memory."""
    assert {"Device", "Stream", "using_allocator"} <= vars(here).keys()
    if np.dtype(dtype).itemsize * np.prod(shape) > Device.most_bytes:
        raise OutOfMemoryError("Out of memory allocating 99 bytes")
    return ndarray(np.full(shape, np.nan, dtype))


class Current:
    """A thing that is current in its thread."""

    def __init__(self, *_args, **_kwargs):
        self._name = type(self).__name__

    def __enter__(self):
        setattr(here, self._name, self)

    def __exit__(self, *_):
        delattr(here, self._name)


class Device(Current):
    most_bytes = free_bytes = 1 << 40
    attributes = types.MappingProxyType({"SingleToDoublePrecisionPerfRatio": 2})
    mem_info = property(lambda self: (self.free_bytes, 1 << 40))


class Stream(Current):
    pass


class using_allocator(Current):  # noqa: N801
    pass


class MemoryPool:
    def malloc(self, size):
        """Only its name is asked for."""


@contextlib.contextmanager
def errstate(*, linalg):
    assert linalg == "raise"
    yield


@pytest.fixture(scope="session")
def matrices_on_host(gpu_on_host):
    """Have the machine play CuPy, unless there is a real GPU that is to be tested."""
    if IS_REAL:
        pytest.importorskip("cupy")
        yield
        return
    cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
    cupy.ndarray, cupy.empty = ndarray, empty
    runtime = SimpleNamespace(getDeviceProperties=lambda _number: {"name": TITLE.encode()})
    of_cuda = {each.__name__: each for each in (Device, Stream, MemoryPool, using_allocator)}
    cupy.cuda = SimpleNamespace(runtime=runtime, **of_cuda)
    cupyx.errstate, cupyx.empty_pinned = errstate, np.empty
    with pytest.MonkeyPatch.context() as patch:
        for module in (cupy, cupyx):
            patch.setitem(sys.modules, module.__name__, module)
        yield
