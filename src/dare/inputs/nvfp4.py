"""Weights in NVFP4, as ModelOpt and compressed-tensors store them.

A weight is codes of four bits, two in each byte, the low half first, with a scale in F8_E4M3 for
every 16 of a row and a number for the whole tensor. It is presented under its own name as float32,
`code · (scale · number)`; in compressed-tensors, the number is a divisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from dare.documents.notices import notice
from dare.documents.words import times
from dare.errors import InputError
from dare.inputs.fp8 import PIECE_BYTES, PIECE_ELEMENTS, read_values
from dare.inputs.mxfp4 import VALUES
from dare.inputs.sources import CodedInfo, Floats, Raw, Source, SourceView, home_of
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

GROUP = 16
NUMBERS = {"": "_scale_2", "_packed": "_global_scale"}  # by the ending of the codes' name


class Packed(NamedTuple):
    """The tensors that stand for a weight."""

    codes: TensorInfo
    scales: TensorInfo
    number: TensorInfo


class NVFP4Source(SourceView):
    """Another source with its codes unpacked, and scales out of sight."""

    def __init__(self, inner: Source, packed: Mapping[str, Packed]) -> None:
        self._packed = packed
        stored = {info.name for parts in packed.values() for info in parts}
        tensors = {name: info for name, info in inner.tensors.items() if name not in stored}
        for name, parts in packed.items():
            *rows, width = parts.codes.shape
            tensors[name] = CodedInfo(name, STORAGE_TYPES["F32"], (*rows, width * 2), 0, parts)
        super().__init__(inner, tensors, computed=packed)
        count = times(len(packed), "NVFP4 tensor")
        self.remarks += (notice("dequantised", tensors=count, dtype="float32"),)
        self.cost = inner.cost.with_reading(PIECE_BYTES)

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name in self._packed:
            name, start, count = self._packed[name].codes.name, start // 2, count // 2
        self.inner.prefetch(name, start, count)

    def compute(self, name: str, start: int, into: Raw) -> None:
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            self._fill(piece, self._packed[name], start + done)

    def _fill(self, values: Floats, packed: Packed, first: int) -> None:
        """Read elements and multiply each by its factor; every NaN is the same one."""
        last = first + values.size - 1
        raw = np.empty(last // 2 + 1 - first // 2, np.uint8)
        self.inner.read(packed.codes.name, first // 2, raw)
        values[:] = np.take(_pairs(), raw, axis=0).reshape(-1)[first % 2 :][: values.size]
        group = first // GROUP
        scales = read_values(self.inner, packed.scales, group, last // GROUP + 1 - group)
        number = read_values(self.inner, packed.number, 0, 1)
        divides = packed.number.name.endswith(NUMBERS["_packed"])
        factors = scales / number if divides else scales * number
        values *= factors[np.arange(first, last + 1) // GROUP - group]
        np.copyto(values, np.float32(np.nan), where=np.isnan(values))


def unpacked(source: Source) -> Source:
    """Unpack a source's weights in NVFP4, if it has any."""
    packed: dict[str, Packed] = {}
    for name, codes in source.tensors.items():
        for ending, number in NUMBERS.items() if codes.dtype.name == "U8" else ():
            stem = name.removesuffix(ending)
            beside = [source.tensors.get(stem + end) for end in ("_scale", number)]
            if name.endswith(ending) and all(beside):
                packed[stem] = Packed(codes, *(info for info in beside if info is not None))
                _check(stem, packed[stem], source)
    return NVFP4Source(source, packed) if packed else source


def _check(name: str, packed: Packed, source: Source) -> None:
    """Refuse scales that do not fit their codes, and a second tensor of the same name."""
    codes, scales, number = packed
    width = codes.shape[-1] if codes.shape else 0
    fits = scales.dtype.name == "F8_E4M3" and number.dtype.name == "F32" and number.elements == 1
    if not fits or width % 8 or scales.shape != (*codes.shape[:-1], width * 2 // GROUP):
        parts = ", ".join(f"{info.name} is {info.described}" for info in packed)
        raise InputError(
            f"{home_of(source)}: {parts}; expected an F8_E4M3 scale for each {GROUP} of a row "
            "and one F32 number. Dequantise it"
        )
    if name in source.tensors and name != codes.name:
        raise InputError(f"{home_of(source)}: has both {name} and {codes.name}; remove one of them")


@cache
def _pairs() -> Floats:
    """Return the values of the two codes in each byte."""
    codes = np.arange(256)
    return VALUES[np.stack([codes & 15, codes >> 4], axis=1)]
