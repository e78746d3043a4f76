"""The compiled arithmetic: the library that is built from `src/core`, called by ctypes.

A function here has the name, the arguments and the bits of its namesake in `reference`, whose
docstring says what it computes. The library is built with the package for a platform, with code for
several levels of its processors; the highest that this machine has is taken, or the one that
DARE_CORE_LEVEL names (for tests, as is DARE_CORE_LIBRARY, which names another library). It runs
without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import DareError
from dare.kernels import ChunkJob, Done, Operand, reference
from dare.kernels.reference import Floats, Lanes, Raw
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans

LIBRARY = Path(__file__).with_name(
    {"win32": "dare.dll", "darwin": "libdare.dylib"}.get(sys.platform, "libdare.so")
)
CHECKOUT = Path(__file__).parents[3]  # where this is one
# How the library numbers the carriers of weights, and after them the types of keys.
KINDS = {
    np.dtype(name): kind
    for kind, name in enumerate(
        ("float64", "float32", "int16", "uint16", "uint8", "int8", "uint32", "uint64")
    )
}
ROOM_BYTES = 512 << 10  # scratch memory of a thread; `ROOM_BYTES` in types.h
HASH_BYTES = 128  # of an array that is digested; `Hash` in digests.h
MEASURING_BYTES = 11904  # of a tile of one model; `Measuring` in measuring.h

# What each function takes and returns: a for an array or a list of some, i for an integer, f and d
# for floats, r for scratch memory; after the colon the number of integers, or d for a float.
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
    "select": "aaair:1",
    "expand": "aaair:1",
    "quantise": "aiaa:",
    "dequantise": "aaia:",
    "apply_packed": "aaiafaar:1",
    "digest_pieces": "aa:",
    "order_keys": "aaa:",
    "rank_left": "aar:",
    "select_ranks": "aaaaar:",
    "drop_by_rank": "aaiaaaiiiar:",
    "draw_order": "aiiiir:",
    "measure": "aaaaaaaaaar:",
    "sample": "aaiiiar:",
    "compare_tops": "aaaar:",
}


class Array(ctypes.Structure):
    """An array as the library takes it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


OPERAND = np.dtype(
    [
        ("tuned", np.uint64),
        *((name, np.int64) for name in ("key0", "key1", "high", "low")),
        *((name, np.int64) for name in ("least", "end", "most", "begin")),
        *((name, np.float64) for name in ("weight", "share")),
    ]
)
NO_MASK, NO_BAND = (0, 0, 256, 0), (-1, 0, 0, 0)


class _Job(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "start", "size")),
        ("models", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "models_kind", "elects")),
        ("scale", ctypes.c_double),
        ("out", ctypes.c_void_p),
        ("out_kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("is_known", "figures", "digests")),
        ("peak", ctypes.c_int64),
    )


class _Room(threading.local):
    """Scratch memory of a thread, used again for each call."""

    def __init__(self) -> None:
        self._size = -1

    def address(self, size: int = ROOM_BYTES) -> int:
        """Return the address of so many bytes, from a multiple of 64 on."""
        if self._size < size:
            self._bytes = np.empty(size + 64, np.uint8)
            self._size, self._address = size, -(-self._bytes.ctypes.data // 64) * 64
        return self._address


_room = _Room()
_TYPES = {
    "a": ctypes.POINTER(Array),
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "r": ctypes.c_void_p,
}


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def _described(array: NDArray[Any]) -> Array:
    columns = array.shape[-1] if array.ndim else 1
    return Array(_address(array), array.size, columns, KINDS.get(array.dtype, -1))


def is_built() -> bool:
    """Return whether there is a library; in a checkout it is an error if there is none."""
    return _is_checkout() or LIBRARY.is_file()


def _is_checkout() -> bool:
    return (CHECKOUT / "src" / "core" / "core.c").is_file()


def sources_digest() -> str:
    """Return the digest of what a checkout's library is made of; `hatch_build.py` has the same."""
    files = (*sorted((CHECKOUT / "src" / "core").glob("*.[ch]")), CHECKOUT / "hatch_build.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _open(path: Path) -> ctypes.CDLL:
    """Load a library; refuse one that a checkout's sources are newer than."""
    remedy = "run `make core`" if _is_checkout() else "install dare-merge again"
    try:
        library = ctypes.CDLL(str(path))
        library.dare_levels.restype = library.dare_sources.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        fault = f"cannot be loaded ({error})" if path.exists() else "not built yet"
        raise DareError(f"{path}: {fault}; {remedy}") from None
    if path == LIBRARY and _is_checkout() and library.dare_sources().decode() != sources_digest():
        raise DareError(f"{path}: older than the sources in src/core; {remedy}")
    return library


@cache
def _library() -> tuple[ctypes.CDLL, str]:
    """Load the library; return it with the level of this machine's processor."""
    library = _open(Path(os.environ.get("DARE_CORE_LIBRARY", LIBRARY)))
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
    size_of_room: Callable[..., int] = ROOMS.get(name, lambda *_: ROOM_BYTES)

    def call(*arguments: Any) -> Any:
        given: list[Any] = []
        copies, kept = [], []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                array = argument
                if not (argument.flags.c_contiguous and argument.flags.aligned):
                    array = np.require(argument, requirements=["C", "A"])
                    copies.append((argument, array))
                given.append(_described(array))
            elif isinstance(argument, list):
                arrays = [np.require(each, requirements=["C", "A"]) for each in argument]
                table: Any = Array * len(arrays)
                kept.append(arrays)
                given.append(table(*map(_described, arrays)))
            elif isinstance(argument, np.generic):
                given.append(argument.item())
            elif hasattr(argument, "__array__"):  # a note that becomes one
                given.append(_described(np.asarray(argument)))
            else:
                given.append(argument)
        if has_room:
            given.append(_room.address(max(ROOM_BYTES, size_of_room(*arguments))))
        returned = (ctypes.c_int64 * 2)()
        found = run(*given, returned) if is_pair else run(*given)
        for original, copy in copies:
            if original.flags.writeable:
                original[...] = copy
        return tuple(returned) if is_pair else found

    return call


# The bytes of scratch memory for functions that need more than ROOM_BYTES, by their arguments.
ROOMS: dict[str, Callable[..., int]] = {
    "rank_left": lambda keys, *_: 16 * keys.shape[1],
    "select_ranks": lambda keys, *_: max(16 << 10, 8 * keys.shape[1]),
    "drop_by_rank": lambda _values, _left, columns, *_: 40 * (columns + 64),
    "draw_order": lambda out, *_: 2 * out.size,
    "measure": lambda _base, raws, *others: (
        MEASURING_BYTES * (1 + len(raws)) + 8 * reference.SUM_LANES * (others[3].size + 1)
    ),
    "compare_tops": lambda values, *_: MEASURING_BYTES * len(values),
}


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in SIGNATURES:
        raise AttributeError(f"the library has no function {name!r}")
    found = globals()[name] = _function(name)
    return found


def operand_row(operand: Operand, address: int) -> tuple[Any, ...]:
    """Return a model as the library takes it, with the address of its elements."""
    mask, band = operand.mask or NO_MASK, operand.band or NO_BAND
    return (address, *mask, *band, operand.weight, operand.share)


def _operand_table(operands: Iterable[Operand]) -> NDArray[Any]:
    return np.array([operand_row(each, _address(each.tuned)) for each in operands], OPERAND)


def combine(
    base: Raw, operands: list[Operand], start: int, elects: bool, threshold_bits: int, out: Floats
) -> NDArray[np.int64]:
    figures = np.zeros((chunk_count(base.size), len(operands), 4), np.int64)
    numbers = (len(operands), _kind(operands), start, elects, threshold_bits, CHUNK)
    models = _operand_table(operands)
    _entry("combine")(
        ctypes.byref(_described(base)),
        ctypes.c_void_p(_address(models)),
        *map(ctypes.c_int64, numbers),
        ctypes.byref(_described(out)),
        figures.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_void_p(_room.address()),
    )
    return figures


def merge(jobs: Sequence[ChunkJob], threshold_bits: int) -> list[Done]:
    table: Any = (_Job * len(jobs))()
    kept, made = [], []
    for job, given in zip(jobs, table, strict=True):
        chunks, inputs = chunk_count(job.base.size), 1 + len(job.operands)
        figures = np.zeros((chunks, inputs - 1, 4), np.int64)
        found = np.zeros((chunks, inputs + 1, 2), np.uint64)
        models, known = _operand_table(job.operands), np.array(job.known, np.uint8)
        kept += [models, known]
        given.base, given.kind, given.start = _address(job.base), KINDS[job.base.dtype], job.start
        given.size, given.models = job.base.size, _address(models)
        given.count, given.models_kind, given.elects = inputs - 1, _kind(job.operands), job.elects
        given.scale, given.out, given.out_kind = job.scale, _address(job.out), KINDS[job.out.dtype]
        given.is_known, given.figures = _address(known), _address(figures)
        given.digests = _address(found)
        made.append((figures, found))
    most = max((len(job.operands) for job in jobs), default=0)
    room = _room.address(ROOM_BYTES + HASH_BYTES * (2 + most))
    numbers = map(ctypes.c_int64, (len(jobs), threshold_bits, CHUNK))
    _entry("merge")(table, *numbers, ctypes.c_void_p(room))
    return [
        Done(figures, given.peak, _texts(job, found))
        for job, given, (figures, found) in zip(jobs, table, made, strict=True)
    ]


def _kind(operands: Sequence[Operand]) -> int:
    return KINDS[operands[0].tuned.dtype] if operands else 0


def _texts(job: ChunkJob, found: NDArray[np.uint64]) -> list[list[str]]:
    """Return the digests of a job's arrays, those of short chunks computed here."""
    raws = [job.base, *(operand.tuned for operand in job.operands), job.out]
    texts = [digest_texts(column) for column in found.swapaxes(0, 1)]
    rest = (job.base.size - 1) % CHUNK + 1
    for raw, own in zip(raws, texts, strict=True):
        if rest * raw.itemsize <= SHORT_BYTES:
            own[-1:] = reference.digests([raw[-rest:]])[0]
    return [[] if known else own for own, known in zip(texts, (*job.known, False), strict=True)]


SHORT_BYTES = 240  # bytes up to which a digest is computed in another way


def digest_texts(words: NDArray[np.uint64]) -> list[str]:
    """Return digests as text: each is two words, the high one first."""
    text = words.byteswap().tobytes().hex()
    return [text[place : place + 32] for place in range(0, len(text), 32)]


def digests(raws: Sequence[NDArray[Any]]) -> list[list[str]]:
    spans = [[count * raw.itemsize for _, count in chunk_spans(raw.size)] for raw in raws]
    is_long = [min(sizes, default=0) > SHORT_BYTES for sizes in spans]
    pieces = [
        (raw.ctypes.data + CHUNK * raw.itemsize * chunk, size)
        for raw, sizes in compress(zip(raws, spans, strict=True), is_long)
        for chunk, size in enumerate(sizes)
    ]
    out = np.empty((len(pieces), 2), np.uint64)
    _function("digest_pieces")(np.array(pieces, np.int64), out)
    found = iter(digest_texts(out))
    return [
        list(islice(found, len(sizes))) if long else reference.digests([raw])[0]
        for raw, sizes, long in zip(raws, spans, is_long, strict=True)
    ]


def select(raw: Raw, lanes: Lanes, out: Raw) -> int:
    return int(_function("select")(raw, lanes, out, raw.itemsize))


def expand(packed: Raw, lanes: Lanes, into: Raw) -> int:
    return int(_function("expand")(packed, lanes, into, into.itemsize))
