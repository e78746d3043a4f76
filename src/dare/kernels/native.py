"""The kernels of `cpu` as merges run them: by `kept`, without Numba once they are compiled.

A name here is a kernel of `cpu`, or a function below that calls some; `reference` says what each
computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.kernels import AT_ONCE, LANES_MULTIPLE, ROW, Part, reference
from dare.kernels.kept import SOURCES, Kernel, Kernels, announcing  # noqa: F401 (all backends')
from dare.kernels.reference import SCALE_GROUP, SUM_LANES, places_low_bits, places_nbytes
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans
from dare.tensors.mask import CALLS_PER_GROUP, GROUP

TILE = LANES_MULTIPLE
DIGITS = 256


class _Scratch(threading.local):
    """Arrays that a thread uses again for each call, since to make them takes as long as some."""

    def __init__(self) -> None:
        calls = TILE + CALLS_PER_GROUP
        words = (np.empty(calls, kind) for kind in (np.uint64, np.uint32))
        floats = (np.empty(count, np.float32) for count in (TILE, TILE, 4 * ROW))
        self.draw = [np.empty(GROUP, np.uint8), *words]
        self.combine = [*self.draw, np.empty(TILE, np.uint8), *floats]


_scratch = _Scratch()


def _group_room(*_arguments: Any) -> list[NDArray[Any]]:
    return [np.zeros(GROUP, kind) for kind in (np.uint8, np.uint64, np.uint32)]


def _rank_room(keys: NDArray[Any], *_others: Any) -> list[NDArray[Any]]:
    return [np.empty((2, keys.shape[1]), np.uint64), np.empty((2, DIGITS), np.uint32)]


def _apply_room(base: NDArray[Any], *_others: Any) -> list[NDArray[Any]]:
    return [np.empty(TILE + AT_ONCE, np.uint16), np.empty(TILE, base.dtype)]


ROOMS = {
    "draw": lambda *_: _scratch.draw,
    "combine_tiles": lambda *_: _scratch.combine,
    "count_magnitudes": lambda *_: [np.empty(TILE, kind) for kind in (np.float32, np.uint32)],
    "sum_magnitudes": lambda *_: [np.zeros(SUM_LANES)],
    "sum_products": lambda *_: [np.zeros(SUM_LANES)],
    "draw_uniform": _group_room,
    "drop_by_rank": _group_room,
    "rank_rows": _rank_room,
    "mark_ranks": lambda keys, *_: [np.empty((1, keys.shape[1]), np.uint32), *_rank_room(keys)],
    "quantise": lambda *_: [np.empty(SCALE_GROUP, kind) for kind in (np.int32, np.uint8)],
    "apply_values": _apply_room,
    "apply_deltas": _apply_room,
    "digest_pieces": lambda *_: [np.empty(8, np.uint64)],
}
"""Scratch arrays of kernels that need some, after their other arguments."""


KERNELS = Kernels("dare.kernels.cpu", SOURCES, ROOMS)


def __getattr__(name: str) -> Kernel:
    if name.startswith("_") or not callable(getattr(reference, name, None)):
        raise AttributeError(f"there is no kernel {name!r}")
    kernel: Kernel = globals().setdefault(name, getattr(KERNELS, name))
    return kernel


# ---------------------------------------------------------------- functions that call kernels


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
    KERNELS.combine_tiles(
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
    KERNELS.digest_pieces(np.array(addresses, np.int64), sizes, SECRET, SECRET_WORDS, out)
    found = iter(out.tolist())
    return [[f"{high:016x}{low:016x}" for high, low in islice(found, len(s))] for s in spans]


def select(raw: NDArray[Any], lanes: NDArray[np.uint8], out: NDArray[Any]) -> int:
    return int(KERNELS.select_integers(_as_integers(raw), lanes, _as_integers(out)))


def expand(packed: NDArray[Any], lanes: NDArray[np.uint8], into: NDArray[Any]) -> int:
    return int(KERNELS.expand_integers(_as_integers(packed), lanes, _as_integers(into)))


def _as_integers(raw: NDArray[Any]) -> NDArray[Any]:
    """A carrier as unsigned integers, so that kernels that only move it are compiled per width."""
    return raw.view(f"u{raw.dtype.itemsize}")


def code_places(lanes: NDArray[np.uint8], size: int, kept: int, out: NDArray[np.uint8]) -> None:
    if kept:
        out[:] = 0
        KERNELS.set_places(lanes, size, places_low_bits(size, kept), kept, out)


def uncode_places(coded: NDArray[np.uint8], size: int, kept: int, lanes: NDArray[np.uint8]) -> bool:
    lanes[:] = 0
    if not 0 <= kept <= size <= lanes.size or coded.size != places_nbytes(size, kept):
        return False
    if kept == 0:
        return True
    return bool(KERNELS.find_places(coded, size, places_low_bits(size, kept), kept, lanes))
