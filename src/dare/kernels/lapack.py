"""The symmetric eigenproblem by LAPACK itself: in float32, and for the leading vectors alone.

NumPy's public functions compute in float64, and all vectors. The library that NumPy has loaded
offers the rest by LAPACK's own interface, that of Fortran. Where none is found, or it fails,
callers have NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating[Any]]  # float32 or float64
# The number of vectors wanted: as it is, or by all eigenvalues, falling.
Count = int | Callable[[Numbers], int]

# How libraries call a function, and the type of its integers.
FORMS = (
    ("scipy_{}_64_", ctypes.c_int64),
    ("{}_64_", ctypes.c_int64),
    ("scipy_{}_", ctypes.c_int32),
    ("{}_", ctypes.c_int32),
)
BLOCK = 64  # columns that LAPACK works on together


class LapackError(Exception):
    """LAPACK is not there, or has not found a solution."""


@cache
def blas() -> Any:
    """Return the BLAS of this process; finding it among all that is loaded takes 2 ms."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


@cache
def _find(name: str) -> tuple[Any, Any]:
    """Return a function of LAPACK, NumPy's if there are several, and the type of integers."""
    paths = [found["filepath"] for found in blas().info() if found["user_api"] == "blas"]
    for path in sorted(paths, key=lambda path: "numpy" not in path):
        library = ctypes.CDLL(path)
        for form, integer in FORMS:
            if (function := getattr(library, form.format(name), None)) is not None:
                return function, integer
    raise LapackError(f"no library has {name}")


def _call(name: str, kind: np.dtype[Any], *arguments: Any) -> None:
    """Call a function of LAPACK with arrays, whole numbers and letters, in place."""
    function, integer = _find(("s" if kind == np.float32 else "d") + name)
    passed: list[Any] = []
    for argument in arguments:
        match argument:
            case np.ndarray():
                passed.append(ctypes.c_void_p(argument.ctypes.data))
            case int():
                passed.append(ctypes.byref(integer(argument)))
            case _:
                passed.append(argument)
    info = integer()
    lengths = [ctypes.c_size_t(1) for argument in arguments if isinstance(argument, bytes)]
    function(*passed, ctypes.byref(info), *lengths)
    if info.value:
        raise LapackError(f"{name} returns {info.value}")


def all_eigen(symmetric: Numbers) -> tuple[Numbers, Numbers]:
    """Return eigenvalues, rising, and eigenvectors as rows, in the precision of the matrix."""
    size, kind = len(symmetric), symmetric.dtype
    vectors, values = np.array(symmetric), np.empty(size, kind)
    work, numbers = np.empty(1 + 6 * size + 2 * size**2, kind), np.empty(3 + 5 * size, np.int64)
    order = (b"V", b"L", size, vectors, size, values)
    _call("syevd", kind, *order, work, work.size, numbers, numbers.size)
    return values, vectors


def leading_eigen(symmetric: Numbers, count: Count) -> tuple[Numbers, Numbers]:
    """Return the last eigenvalues, rising, and their vectors as rows: as many as are wanted."""
    size, kind = len(symmetric), symmetric.dtype
    reduced, factors = np.array(symmetric), np.empty(size, kind)
    diagonal, beside = np.empty(size, kind), np.zeros(size, kind)
    work = np.empty(BLOCK * size, kind)
    form = (reduced, size, diagonal, beside, factors, work, work.size)
    _call("sytrd", kind, b"L", size, *form)
    if callable(count):
        values, _ = _tridiagonal_eigen(diagonal.copy(), beside.copy(), 0)
        count = count(values[::-1])
    wanted = max(1, count)  # LAPACK refuses none
    values, vectors = _tridiagonal_eigen(diagonal, beside, wanted)
    sides = (b"L", b"L", b"N", size, wanted, reduced, size, factors, vectors, size)
    _call("ormtr", kind, *sides, work, work.size)
    return values[wanted - count : wanted], vectors[wanted - count :]


def _tridiagonal_eigen(diagonal: Numbers, beside: Numbers, wanted: int) -> tuple[Numbers, Numbers]:
    """Return all eigenvalues of a tridiagonal matrix; or the last ones, with vectors as rows."""
    size, kind = len(diagonal), diagonal.dtype
    values, vectors = np.empty(size, kind), np.empty((max(wanted, 1), size), kind)
    found, limits = np.zeros(1, np.int64), np.zeros(2, kind)
    job, which = (b"V", b"I") if wanted else (b"N", b"A")
    work, numbers = np.empty(18 * size, kind), np.empty(10 * size, np.int64)
    supports, is_tried = np.empty(2 * size, np.int64), np.ones(1, np.int64)
    order = (job, which, size, diagonal, beside, limits, limits, size - wanted + 1, size, found)
    room = (values, vectors, size, max(wanted, 1), supports, is_tried)
    _call("stemr", kind, *order, *room, work, work.size, numbers, numbers.size)
    return values, vectors
