"""gpt-oss with MXFP4 experts, presented as the weights that transformers makes of them.

Beside a layer's experts stand `NAME_blocks` (experts × outputs × groups × 16 bytes, two codes of
four bits in each, the low half first) and `NAME_scales` (a power of two for each group of 32).
Presented is `NAME` as experts × inputs × outputs in BF16, which holds every product exactly. The
stored layout is the transpose, so the codes of one expert are read as a whole and kept by the
thread until it asks for another.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare.documents.words import times
from dare.errors import InputError
from dare.inputs.reading import rectangles
from dare.inputs.sources import Raw, Source, SourceView
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

MODEL_TYPE = "gpt_oss"
GROUP = 32
GROUP_BYTES = GROUP // 2
TILE = 1 << 16
"""How many elements are looked up at once."""
TILE_BYTES = TILE * 16
"""What that takes: codes, places in the table and what stands there, some of them twice."""

BF16 = STORAGE_TYPES["BF16"]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 mean; 8 to 15 are the same with a minus."""

Bytes = NDArray[np.uint8]
_BLOCKS = re.compile(r"(.*\bexperts\.(?:gate_up_proj|down_proj))_blocks")


class UnpackedSource(SourceView):
    """Another source with its experts unpacked, blocks and scales out of sight."""

    def __init__(self, inner: Source, packed: Mapping[str, TensorInfo]) -> None:
        self._packed = packed
        stored = {name + end for name in packed for end in ("_blocks", "_scales")}
        tensors = {name: info for name, info in inner.tensors.items() if name not in stored}
        super().__init__(inner, {**tensors, **packed})
        count = times(len(packed), "MXFP4 tensor is", "MXFP4 tensors are")
        self.remarks += (f"{count} read as bfloat16, which is exact",)
        largest = max(info.elements // max(info.shape[0], 1) for info in packed.values())
        self.reading_bytes += largest // 2 + largest // GROUP + TILE_BYTES
        self._kept: dict[int, tuple[str, int, Bytes, Bytes]] = {}
        """For each thread, the expert that it read last."""

    def read(self, name: str, start: int, into: Raw) -> None:
        if name not in self._packed:
            super().read(name, start, into)
            return
        _, inputs, outputs = self._packed[name].shape
        done = 0
        for place, rows, column, columns in rectangles(start, into.size, outputs, inputs):
            expert, row = divmod(place, inputs)
            matrix = into[done : done + rows * columns].reshape(rows, columns)
            blocks, scales = self._expert(name, expert)
            step = max(1, TILE // rows)
            for left in range(0, columns, step):
                right = min(left + step, columns)
                part = slice(column + left, column + right)
                matrix[:, left:right] = _decode(blocks[part], scales[part], row, rows)
            done += rows * columns

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name not in self._packed:
            super().prefetch(name, start, count)

    def __exit__(self, *error: object) -> None:
        self._kept.clear()
        super().__exit__(*error)

    def _expert(self, name: str, expert: int) -> tuple[Bytes, Bytes]:
        """Blocks and scales of an expert, outputs × bytes; threads share them."""
        thread = threading.get_ident()
        for kept in list(self._kept.values()):
            if kept[:2] == (name, expert):
                self._kept[thread] = kept
                return kept[2:]
        self._kept.pop(thread, None)  # so that no thread ever has two
        _, inputs, outputs = self._packed[name].shape
        found = []
        for end, width in (("_blocks", inputs // 2), ("_scales", inputs // GROUP)):
            raw = np.empty(outputs * width, np.uint8)
            self.inner.read(name + end, expert * raw.size, raw)
            found.append(raw.reshape(outputs, width))
        self._kept[thread] = name, expert, found[0], found[1]
        return found[0], found[1]


def unpacked(source: Source, config: Mapping[str, Any]) -> Source:
    """Unpack a source's MXFP4 experts, if it has any and is of the kind whose layout is known."""
    if config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        return source
    packed = {}
    for name, info in source.tensors.items():
        if (match := _BLOCKS.fullmatch(name)) and info.dtype.name == "U8":
            expert = _presented(match[1], source)
            if expert is not None:
                packed[match[1]] = expert
    return UnpackedSource(source, packed) if packed else source


def _presented(name: str, source: Source) -> TensorInfo | None:
    """The tensor that blocks and scales stand for; None without scales."""
    blocks, scales = source.tensors[f"{name}_blocks"], source.tensors.get(f"{name}_scales")
    where = source.files[0].parent if source.files else "the model"
    if scales is None:
        return None
    fits = len(blocks.shape) == 4 and blocks.shape[3] == GROUP_BYTES
    if not fits or scales.shape != blocks.shape[:3] or scales.dtype.name != "U8":
        raise InputError(
            f"{where}: {blocks.name} is {blocks.form} and {scales.name} {scales.dtype.name} of "
            f"{scales.form}; expected experts × outputs × groups × {GROUP_BYTES} with a U8 scale "
            "for each group. Dequantise the model first"
        )
    if name in source.tensors:
        raise InputError(f"{where}: has both {name} and {blocks.name}; remove one of them")
    experts, outputs, groups, _ = blocks.shape
    return TensorInfo(name, BF16, (experts, groups * GROUP, outputs), 0)


def _decode(blocks: Bytes, scales: Bytes, row: int, rows: int) -> NDArray[np.uint16]:
    """Some inputs of some outputs as inputs × outputs, in the bits of BF16."""
    some = blocks[:, row // 2 : (row + rows - 1) // 2 + 1]
    codes = np.empty((len(some), some.shape[1], 2), np.uint16)
    np.bitwise_and(some, 15, out=codes[:, :, 0])
    np.right_shift(some, 4, out=codes[:, :, 1])
    places = codes.reshape(len(some), -1)[:, row % 2 :][:, :rows]
    places += scales[:, np.arange(row, row + rows) // GROUP].astype(np.uint16) * 16
    return _table()[places].T


@cache
def _table() -> NDArray[np.uint16]:
    """The bits of 16 codes under 256 scales, powers of two; the last is no NaN in transformers."""
    codes = [*MAGNITUDES, *(-value for value in MAGNITUDES)]
    powers = [math.ldexp(1.0, scale - 127) for scale in range(256)]
    with np.errstate(over="ignore"):
        values = np.multiply.outer(np.array(powers), np.array(codes)).astype(np.float32)
        bits: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits.reshape(-1)
