"""MXFP4 for the experts of gpt-oss.

A group of 32 inputs of an output has the smallest power of two as its scale under which no element
is above 6, the largest code, as Triton's kernels choose it; elements are rounded to the nearest,
ties to even. So what was MXFP4 keeps its values, whatever the scale was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import ml_dtypes
import numpy as np

from dare.errors import NotFiniteError
from dare.formats.fp8 import ceil_log2
from dare.formats.recoding import PIECE_WORK, LossMeter, Put, Read, Unit
from dare.inputs.mxfp4 import GROUP, GROUP_BYTES, VALUES
from dare.inputs.sources import Bytes, decoded
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import Described

LOWEST = -127  # exponent of the smallest scale


class Mxfp4:
    """The experts of a layer: experts × inputs × outputs, merged in BF16."""

    def stored(self, tensor: Described) -> Sequence[Described]:
        """Return blocks and scales."""
        name, _, (experts, inputs, outputs) = tensor
        grid, kind = (experts, outputs, inputs // GROUP), STORAGE_TYPES["U8"]
        return [(f"{name}_blocks", kind, (*grid, GROUP_BYTES)), (f"{name}_scales", kind, grid)]

    def unit(self, tensor: Described) -> Unit:
        """Return an expert, whose codes are held in memory."""
        _, inputs, outputs = tensor[2]
        work = PIECE_WORK * GROUP + inputs // 2 + inputs // GROUP * np.dtype(np.int32).itemsize
        return Unit(inputs * outputs, work_bytes=work * outputs)

    def encode(self, tensor: Described, read: Read, put: Put) -> LossMeter:
        """Store experts, one after the other."""
        (blocks, _, (_, outputs, groups, _)), (scales, *_) = self.stored(tensor)
        meter, size = LossMeter(), GROUP * outputs
        codes = np.empty((outputs, groups, GROUP_BYTES), np.uint8)
        exponents = np.empty((outputs, groups), np.int32)
        for start, raw in read(size):
            expert, group = divmod(start // size, groups)
            values = decoded(raw, "cpu").reshape(GROUP, outputs)
            if not np.isfinite(values).all():
                what = "has values that are not finite, which MXFP4 cannot store"
                raise NotFiniteError(f"{tensor[0]}: {what}; leave format out")
            largest = np.abs(values).max(axis=0) / VALUES.max()
            own = ceil_log2(np.maximum(largest, np.float32(2.0**LOWEST)))
            exponents[:, group] = own
            scaled = values * np.ldexp(np.float32(1), -own)
            places = np.take(_codes(), scaled.view(np.uint32) >> 16)
            codes[:, group] = (places[0::2] | places[1::2] << 4).T
            meter.add(values, VALUES[places] * np.ldexp(np.float32(1), own))
            if group == groups - 1:
                put(blocks, expert * codes.size, codes.reshape(-1))
                powers = (exponents - LOWEST).astype(np.uint8)
                put(scales, expert * powers.size, powers.reshape(-1))
        return meter


@cache
def _codes() -> Bytes:
    """Return the code of each number in BF16."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        codes: Bytes = numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes
