"""The kernels of `cpu` without Numba: it is only imported to compile what was never compiled.

Importing Numba takes longer than a small merge. So what it makes of a kernel, for arguments of some
types, is kept (`kept`) and runs by itself from then on.

A name here is a kernel of `cpu`, or a function below that calls some; `reference` says what each
computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.kernels import Part, kept, reference
from dare.kernels.reference import places_low_bits, places_nbytes
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans

C_ORDER, FORTRAN_ORDER, ALIGNED = 0x1, 0x2, 0x100
"""Of the flags of an array, those that a kernel is compiled for."""

_loading = threading.Lock()
_announcers: list[Callable[[], None]] = []


class Kernel:
    """A kernel of `cpu`, with machine code for each kind of arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._variants: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run it; only here the interpreter's lock is held."""
        kinds: list[Any] = []
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                kinds += (
                    argument.dtype.char,
                    argument.ndim,
                    argument.flags.num & (C_ORDER | FORTRAN_ORDER | ALIGNED),
                )
                values.append(id(argument))  # its address, where the kernel finds data and shape
            else:
                kinds.append(type(argument))
                values.append(argument.item() if isinstance(argument, np.generic) else argument)
        key = tuple(kinds)
        run = self._variants.get(key) or self._load(key, arguments)
        return run(arguments, values)

    def _load(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> Callable[..., Any]:
        types = [describe(argument) for argument in arguments]
        with _loading:
            if key not in self._variants:
                code = kept.find(self._name, types) or self._compile(types)
                run = kept.load(self._name, code) if code.machine_code else self._by_numba()
                self._variants[key] = run
            return self._variants[key]

    def _compile(self, types: Sequence[str]) -> kept.Code:
        for announce in _announcers:
            announce()
        from dare.kernels.compiling import compile_kernel

        code = compile_kernel(self._name, types)
        kept.keep(self._name, types, code)
        return code

    def _by_numba(self) -> Callable[..., Any]:
        from dare.kernels import cpu

        kernel = getattr(cpu, self._name)
        return lambda arguments, _values: kernel(*arguments)


def __getattr__(name: str) -> Kernel:
    if name.startswith("_") or not callable(getattr(reference, name, None)):
        raise AttributeError(f"there is no kernel {name!r}")
    kernel: Kernel = globals().setdefault(name, Kernel(name))
    return kernel


def describe(argument: Any) -> str:
    """The type of an argument, as a kernel is compiled for it.

    >>> describe(np.zeros((2, 3), np.float32)), describe(7), describe(np.uint8(7))
    ('float32 2 C', 'int64', 'uint8')
    """
    if not isinstance(argument, np.ndarray):
        return np.dtype(type(argument)).name
    if not argument.dtype.isnative:
        raise TypeError(f"a kernel needs the byte order of the machine, not {argument.dtype.str}")
    flags = argument.flags
    order = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    words = [argument.dtype.name, str(argument.ndim), order]
    return " ".join(words if flags.aligned else [*words, "unaligned"])


@contextmanager
def announcing(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` once if anything has to be compiled inside the `with` block."""
    waiting = [announce]

    def once() -> None:
        if waiting:
            waiting.pop()()

    _announcers.append(once)
    try:
        yield
    finally:
        _announcers.remove(once)


# ---------------------------------------------------------------- functions that call kernels

_combine_tiles, _digest_pieces = Kernel("combine_tiles"), Kernel("digest_pieces")
_select, _expand = Kernel("select_integers"), Kernel("expand_integers")
_set_places, _find_places = Kernel("set_places"), Kernel("find_places")


def combine(
    base_raw: NDArray[Any],
    parts: Sequence[Part],
    start: int,
    elects: bool,
    threshold_bits: np.int32,
    out: NDArray[np.float32],
) -> NDArray[np.int64]:
    figures = np.zeros((chunk_count(base_raw.size), len(parts), 4), np.int64)
    masks = [part.mask or (0, 0, 256, 0) for part in parts]
    _combine_tiles(
        base_raw,
        parts[0].tuned[:0],
        np.array([part.tuned.ctypes.data for part in parts], np.int64),
        start,
        np.array([mask[:2] for mask in masks], np.uint32),
        np.array([mask[2] for mask in masks], np.int64),
        np.array([mask[3] for mask in masks], np.uint32),
        np.array([part.least for part in parts], np.int32),
        np.array([part.weight for part in parts], np.float32),
        np.array([part.share for part in parts], np.float32),
        elects,
        threshold_bits,
        out,
        figures,
    )
    return figures


SHORT = 240
"""Bytes up to which a digest is computed in another way."""
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
"""What XXH3 mixes its input with."""
SECRET_WORDS = np.concatenate([SECRET[at : at + 64].copy().view("<u8") for at in (128, 11, 117)])


def digests(raws: Sequence[NDArray[Any]]) -> list[list[str]]:
    spans = [[count * raw.itemsize for _, count in chunk_spans(raw.size)] for raw in raws]
    if any(size <= SHORT for sizes in spans for size in sizes):
        return reference.digests(raws)
    addresses = [
        raw.ctypes.data + CHUNK * raw.itemsize * chunk
        for raw, sizes in zip(raws, spans, strict=True)
        for chunk in range(len(sizes))
    ]
    out = np.empty((len(addresses), 2), np.uint64)
    sizes = np.array([size for sizes in spans for size in sizes], np.int64)
    _digest_pieces(np.array(addresses, np.int64), sizes, SECRET, SECRET_WORDS, out)
    found = iter(out.tolist())
    return [[f"{high:016x}{low:016x}" for high, low in islice(found, len(s))] for s in spans]


def select(raw: NDArray[Any], lanes: NDArray[np.uint8], out: NDArray[Any]) -> int:
    return int(_select(_as_integers(raw), lanes, _as_integers(out)))


def expand(packed: NDArray[Any], lanes: NDArray[np.uint8], into: NDArray[Any]) -> int:
    return int(_expand(_as_integers(packed), lanes, _as_integers(into)))


def _as_integers(raw: NDArray[Any]) -> NDArray[Any]:
    """A carrier as unsigned integers, so that kernels that only move it are compiled per width."""
    return raw.view(f"u{raw.dtype.itemsize}")


def code_places(lanes: NDArray[np.uint8], size: int, kept: int, out: NDArray[np.uint8]) -> None:
    if kept:
        out[:] = 0
        _set_places(lanes, size, places_low_bits(size, kept), kept, out)


def uncode_places(coded: NDArray[np.uint8], size: int, kept: int, lanes: NDArray[np.uint8]) -> bool:
    lanes[:] = 0
    if not 0 <= kept <= size <= lanes.size or coded.size != places_nbytes(size, kept):
        return False
    return kept == 0 or bool(_find_places(coded, size, places_low_bits(size, kept), kept, lanes))
