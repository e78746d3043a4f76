"""Experts of gpt-oss in MXFP4.

Beside a layer's experts stand `NAME_blocks` (experts × outputs × groups × 16 bytes, two codes of
four bits in each, the low half first) and `NAME_scales` (a power of two for each group of 32).
`NAME` is presented as experts × inputs × outputs in BF16, which holds every product exactly. The
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

from dare.documents.notices import notice
from dare.documents.words import times
from dare.errors import InputError
from dare.inputs.sources import Bytes, CodedInfo, Raw, Source, SourceView, home_of
from dare.tensors.chunks import rectangles
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

MXFP4 = "MXFP4"
MODEL_TYPE = "gpt_oss"
GROUP = 32
GROUP_BYTES = GROUP // 2
TILE = 1 << 16
TILE_BYTES = TILE * 16  # memory for a tile: codes, places in the table, and values
# Values of the codes; 8 to 15 are 0 to 7 with a minus.
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
_BLOCKS = re.compile(r"(.*\bexperts\.(?:gate_up_proj|down_proj))_blocks")


class MXFP4Source(SourceView):
    """Another source with its experts unpacked, blocks and scales out of sight."""

    def __init__(self, inner: Source, packed: Mapping[str, TensorInfo]) -> None:
        self._packed = packed
        stored = {name + end for name in packed for end in ("_blocks", "_scales")}
        tensors = {name: info for name, info in inner.tensors.items() if name not in stored}
        super().__init__(inner, {**tensors, **packed}, computed=packed)
        count = times(len(packed), "MXFP4 tensor")
        self.remarks += (notice("dequantised", tensors=count, dtype="bfloat16, which is exact"),)
        largest = max(info.elements // max(info.shape[0], 1) for info in packed.values())
        self.cost = inner.cost.with_reading(largest // 2 + largest // GROUP + TILE_BYTES)
        self._kept: dict[int, tuple[str, int, Bytes, Bytes]] = {}  # each thread's last expert

    def compute(self, name: str, start: int, into: Raw) -> None:
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
                matrix[:, left:right] = _unpack(blocks[part], scales[part], row, rows)
            done += rows * columns

    def __exit__(self, *error: object) -> None:
        self._kept.clear()
        super().__exit__(*error)

    def _expert(self, name: str, expert: int) -> tuple[Bytes, Bytes]:
        """Read blocks and scales of an expert, outputs × bytes; threads share them."""
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
    packed: dict[str, TensorInfo] = {}
    if config.get("model_type", MODEL_TYPE) == MODEL_TYPE:
        for name, info in source.tensors.items():
            if (match := _BLOCKS.fullmatch(name)) and info.dtype.name == "U8":
                expert = _describe_experts(match[1], source)
                packed |= {} if expert is None else {expert.name: expert}
    return MXFP4Source(source, packed) if packed else source


def _describe_experts(name: str, source: Source) -> CodedInfo | None:
    """Describe the tensor that blocks and scales stand for; None without scales."""
    blocks, scales = source.tensors[f"{name}_blocks"], source.tensors.get(f"{name}_scales")
    where = home_of(source)
    if scales is None:
        return None
    fits = len(blocks.shape) == 4 and blocks.shape[3] == GROUP_BYTES
    if not fits or scales.shape != blocks.shape[:3] or scales.dtype.name != "U8":
        raise InputError(
            f"{where}: {blocks.name} is {blocks.form}, {scales.name} {scales.described}; expected "
            f"experts × outputs × groups × {GROUP_BYTES}, a U8 scale for each group. Dequantise it"
        )
    if name in source.tensors:
        raise InputError(f"{where}: has both {name} and {blocks.name}; remove one of them")
    experts, outputs, groups, _ = blocks.shape
    shape = experts, groups * GROUP, outputs
    return CodedInfo(name, STORAGE_TYPES["BF16"], shape, 0, MXFP4)


def _unpack(blocks: Bytes, scales: Bytes, row: int, rows: int) -> NDArray[np.uint16]:
    """Return some inputs of some outputs as inputs × outputs, in the bits of BF16."""
    some = blocks[:, row // 2 : (row + rows - 1) // 2 + 1]
    codes = np.empty((len(some), some.shape[1], 2), np.uint16)
    np.bitwise_and(some, 15, out=codes[:, :, 0])
    np.right_shift(some, 4, out=codes[:, :, 1])
    places = codes.reshape(len(some), -1)[:, row % 2 :][:, :rows]
    places += scales[:, np.arange(row, row + rows) // GROUP].astype(np.uint16) * 16
    return _mxfp4_bits()[places].T


@cache
def _mxfp4_bits() -> NDArray[np.uint16]:
    """Return the bits of 16 codes under 256 scales; the last scale is no NaN in transformers."""
    powers = [math.ldexp(1.0, scale - 127) for scale in range(256)]
    with np.errstate(over="ignore"):
        values = np.multiply.outer(np.array(powers), VALUES).astype(np.float32)
        bits: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits.reshape(-1)
