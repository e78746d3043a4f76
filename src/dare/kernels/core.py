"""The compiled arithmetic: the library that is built from `src/core`, called by ctypes.

A function here has the name, the arguments and the bits of its namesake in `reference`, whose
docstring says what it computes. The library is built with the package for a platform, with code for
several levels of its processors; the highest that this machine has is taken, or the one that
DARE_CORE_LEVEL names. It runs without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import DareError
from dare.kernels import Operand
from dare.kernels.reference import Floats, Raw
from dare.tensors.chunks import CHUNK, chunk_count

LIBRARY = Path(__file__).with_name(
    {"win32": "dare.dll", "darwin": "libdare.dylib"}.get(sys.platform, "libdare.so")
)
# How the library numbers the carriers of weights.
KINDS = {"float64": 0, "float32": 1, "int16": 2, "uint16": 3, "uint8": 4, "int8": 5}
ROOM_BYTES = 512 << 10  # scratch memory of a thread; `ROOM_BYTES` in types.h

# What each function takes and returns: a for an array, i for an integer, f and d for floats, r for
# scratch memory; after the colon the number of integers, or d for a float.
SIGNATURES = {
    "decode": "aa:",
    "encode": "aa:1",
    "delta": "aaaai:2",
    "add_to_base": "aafar:1",
    "draw": "aiiiiiir:1",
    "keep_lanes": "aa:1",
    "keep_band": "aaaiiiii:1",
    "add_scaled": "aaf:",
    "vote": "aaff:",
    "elect": "aaa:",
    "collect_keys": "aaaiiiaar:1",
    "count_bins": "aaaiiaaar:1",
    "add_extremes": "afaaa:",
    "elect_extremes": "aaa:",
    "count_needing": "afafa:",
    "keep_needed": "aai:",
    "multiply_kept": "aa:",
    "sum_products": "aa:d",
    "add_products": "aaiiiar:",
    "low_rank": "aaifa:",
    "balance_scores": "aaddddar:",
    "add_shares": "aafffaa:",
}


class Array(ctypes.Structure):
    """An array as the library takes it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


class _Operand(ctypes.Structure):
    _fields_ = (
        ("tuned", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key0", "key1", "high", "low")),
        *((name, ctypes.c_int64) for name in ("least", "end", "most", "begin")),
        ("weight", ctypes.c_double),
        ("share", ctypes.c_double),
    )


class _Room(threading.local):
    """Scratch memory of a thread, used again for each call."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def address(self, size: int = ROOM_BYTES) -> int:
        """Return the address of so many bytes, from a multiple of 64 on."""
        if self._bytes.size < size + 64:
            self._bytes = np.empty(size + 64, np.uint8)
        return -(-self._bytes.ctypes.data // 64) * 64


_room = _Room()
_TYPES = {
    "a": ctypes.POINTER(Array),
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "r": ctypes.c_void_p,
}


def _described(array: NDArray[Any]) -> Array:
    columns = array.shape[-1] if array.ndim else 1
    return Array(array.ctypes.data, array.size, columns, KINDS.get(array.dtype.name, -1))


@cache
def _library() -> tuple[ctypes.CDLL, str]:
    """Load the library; return it with the level of this machine's processor."""
    library = ctypes.CDLL(str(LIBRARY))
    library.dare_levels.restype = ctypes.c_char_p
    levels = library.dare_levels().decode().split()
    level = os.environ.get("DARE_CORE_LEVEL", levels[-1])
    if level not in levels:
        raise DareError(f"DARE_CORE_LEVEL = {level}: this machine has {', '.join(levels)}")
    return library, level


@cache
def _entry(name: str) -> Callable[..., Any]:
    library, level = _library()
    entry: Callable[..., Any] = getattr(library, f"dare_{name}_{level}")
    return entry


@cache
def _function(name: str) -> Callable[..., Any]:
    """Return a function of the library that takes what its namesake in `reference` takes."""
    kinds, _, results = SIGNATURES[name].partition(":")
    run: Any = _entry(name)
    run.argtypes = [*(_TYPES[kind] for kind in kinds), *([ctypes.c_void_p] * (results == "2"))]
    run.restype = {"1": ctypes.c_int64, "d": ctypes.c_double}.get(results)
    has_room, is_pair = kinds.endswith("r"), results == "2"
    size_of_room = ROOMS.get(name, lambda *_: ROOM_BYTES)

    def call(*arguments: Any) -> Any:
        given: list[Any] = []
        copies = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                array = np.require(argument, requirements=["C", "A"])
                if array is not argument:
                    copies.append((argument, array))
                given.append(_described(array))
            else:
                given.append(argument.item() if isinstance(argument, np.generic) else argument)
        if has_room:
            given.append(_room.address(size_of_room(*arguments)))
        returned = (ctypes.c_int64 * 2)()
        found = run(*given, returned) if is_pair else run(*given)
        for original, copy in copies:
            if original.flags.writeable:
                original[...] = copy
        return tuple(returned) if is_pair else found

    return call


# The bytes of scratch memory for functions that need more than ROOM_BYTES, by their arguments.
ROOMS: dict[str, Callable[..., int]] = {}


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in SIGNATURES:
        raise AttributeError(f"the library has no function {name!r}")
    found = globals()[name] = _function(name)
    return found


def combine(
    base: Raw, operands: list[Operand], start: int, elects: bool, threshold_bits: int, out: Floats
) -> NDArray[np.int64]:
    figures = np.zeros((chunk_count(base.size), len(operands), 4), np.int64)
    models = (_Operand * len(operands))(
        *(
            _Operand(
                each.tuned.ctypes.data,
                *(each.mask or (0, 0, 256, 0)),
                *(each.band or (-1, 0, 0, 0)),
                each.weight,
                each.share,
            )
            for each in operands
        )
    )
    kind = KINDS[operands[0].tuned.dtype.name]
    numbers = (len(operands), kind, start, elects, threshold_bits, CHUNK)
    _entry("combine")(
        ctypes.byref(_described(base)),
        models,
        *map(ctypes.c_int64, numbers),
        ctypes.byref(_described(out)),
        figures.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_void_p(_room.address()),
    )
    return figures
