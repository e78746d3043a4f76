"""Schemes for storing a fine-tune, and the coders of `compress`, which pack chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.errors import MismatchError, RecipeError
from dare.inputs.delta_files import AS_IN_BASE
from dare.inputs.sources import Floats
from dare.kernels.reference import SCALE_GROUP
from dare.output.journal import Record
from dare.output.sink import PieceSink
from dare.planning.plan import Plan
from dare.run.backend import Backend, Chunk
from dare.run.worker import Coder
from dare.stages.blocks import INFINITY
from dare.tensors.chunks import CHUNK, bytes_digest
from dare.tensors.mask import check_drop_rate
from dare.tensors.planes import pack

NO_THRESHOLD = np.int32(0x7FFFFFFF)

Bits = Literal["native", 4, 2]

USUAL_RATES: dict[Bits, float] = {"native": 0.5, 4: 0.0, 2: 0.0}  # the default by bits
USUAL_BITS: Bits = 2  # keeps small changes whole, and most of large ones (docs/evidence.md)


@dataclass(frozen=True)
class Scheme:
    """The share of changes that is dropped, and the bits of each kept value."""

    drop_rate: float
    bits: Bits


def choose_scheme(drop_rate: float | None, bits: Bits | None) -> Scheme:
    """Fill in a missing rate or missing bits; a rate alone means native values."""
    if bits is None:
        bits = USUAL_BITS if drop_rate is None else "native"
    if bits not in USUAL_RATES:
        known = ", ".join(map(str, USUAL_RATES))
        raise RecipeError(f"bits = {bits!r}: not known; use one of {known}")
    rate = USUAL_RATES[bits] if drop_rate is None else check_drop_rate(drop_rate)
    return Scheme(rate, bits)


def code_lossless(_plan: Plan, backend: Backend, output: PieceSink) -> Coder:
    """Code the chunks of a model (the plan's base) against those of another, if it has them."""

    def code(chunk: Chunk) -> Record:
        digests = _digests(backend, chunk)
        if len(digests) == 2 and digests[0] == digests[1]:
            return _put(output, chunk, digests, (), AS_IN_BASE)
        against = next((raw.view(np.uint8) for raw in chunk.tuned.values()), None)
        blob = pack(chunk.base.view(np.uint8), against, chunk.base.itemsize)
        return _put(output, chunk, digests, [np.frombuffer(blob, np.uint8)], len(blob))

    return lambda batch: [code(part) for chunk in batch for part in chunk.split()]


def _digests(backend: Backend, chunk: Chunk) -> list[str]:
    """Hash one chunk of each input."""
    return [digest for (digest,) in backend.digests(chunk.inputs, chunk.known)]


def _put(
    output: PieceSink,
    chunk: Chunk,
    inputs: Sequence[str],
    parts: Sequence[NDArray[Any]],
    count: int,
    sums: Sequence[float] = (),
) -> Record:
    """Append the parts of a packed chunk to the file of pieces; return its record."""
    data = np.concatenate([np.empty(0, np.uint8), *(part.view(np.uint8) for part in parts)])
    return Record(
        tensor=chunk.tensor.name,
        chunk=chunk.number,
        inputs=tuple(inputs),
        output=bytes_digest(data.data),
        models=(),
        exceptions=(0, 0),
        piece=(output.append(data), data.size, count),
        sums=tuple(sums),
    )


class Packer:
    """Packs the kept values of chunks; a record's sums are Σδ², Σ(δ̂ - δ)² as read, and Σw²."""

    def __init__(self, scheme: Scheme, plan: Plan, backend: Backend, output: PieceSink) -> None:
        self._scheme = scheme
        self._backend = backend
        self._output = output
        self._kernels = kernels.load(plan.device)
        # Reused for each chunk: allocating memory takes longer than filling it.
        self._base, self._change, self._kept, self._stored = np.empty((4, CHUNK), np.float32)
        self._all = np.full(CHUNK, 255, np.uint8)

    def __call__(self, batch: Sequence[Chunk]) -> list[Record]:
        return [self._pack(part) for chunk in batch for part in chunk.split()]

    def _pack(self, chunk: Chunk) -> Record:
        digests = _digests(self._backend, chunk)
        if not chunk.tensor.is_merged and len(set(digests)) > 1:
            raise MismatchError(
                f"{chunk.tensor.name}: its {chunk.tensor.base.dtype.name} values differ "
                "from the base's and cannot be dropped or rounded; use --lossless"
            )
        if not chunk.tensor.is_merged:
            return _put(self._output, chunk, digests, (), AS_IN_BASE)
        (tuned,) = chunk.tuned.values()
        base = self._base[: tuned.size]
        self._kernels.decode(chunk.base, base)
        weights = self._kernels.sum_products(base, base)
        if digests[0] == digests[1] and tuned.dtype == chunk.base.dtype:
            return _put(self._output, chunk, digests, (), AS_IN_BASE, (0.0, 0.0, weights))
        change = self._take_change(tuned, base)
        lanes = self._backend.kept_lanes(chunk, 0)
        kept = self._kept[: self._kernels.select(change, lanes, self._kept)]
        if self._scheme.bits == "native":
            values = np.empty(kept.size, tuned.dtype)
            self._kernels.select(tuned, lanes, values)
            parts, stored = [values], kept
        else:
            parts, stored = self._rounded(chunk, kept)
        sums = self._errors(chunk, change, kept, stored)
        return _put(self._output, chunk, digests, parts, kept.size, (*sums, weights))

    def _take_change(self, tuned: NDArray[Any], base: Floats) -> Floats:
        """Return the model's change; it is zero where both are the same infinity."""
        change = self._change[: tuned.size]
        peak, _ = self._kernels.delta(tuned, base, self._all, change, NO_THRESHOLD)
        if peak > INFINITY:
            values = np.empty_like(base)
            self._kernels.decode(tuned, values)
            change[values == base] = 0
        return change

    def _rounded(self, chunk: Chunk, kept: Floats) -> tuple[list[NDArray[Any]], Floats]:
        """Return codes and scales of kept values, and the values that will be read."""
        if not np.isfinite(kept).all():
            raise MismatchError(
                f"{chunk.tensor.name}: has changes that are NaN or infinite, which cannot be "
                f"rounded to {self._scheme.bits} bits; use --bits native or --lossless"
            )
        bits = int(self._scheme.bits)
        codes = np.empty(-(-kept.size * bits // 8), np.uint8)
        scales = np.empty(-(-kept.size // SCALE_GROUP), np.uint16)
        self._kernels.quantise(kept, bits, codes, scales)
        stored = self._stored[: kept.size]
        self._kernels.dequantise(codes, scales, bits, stored)
        return [codes, scales], stored

    def _errors(
        self, chunk: Chunk, change: Floats, kept: Floats, stored: Floats
    ) -> tuple[float, float]:
        """Return Σδ² and Σ(δ̂ - δ)², where δ̂ is 0 or was rounded and rescaled."""
        total = self._kernels.sum_products(change, change)
        rate = chunk.tensor.settings_of(0)[0].get("drop_rate", 0.0)
        factor = 1.0 / (1.0 - rate)
        of_both = self._kernels.sum_products(stored, kept)
        of_stored = self._kernels.sum_products(stored, stored)
        return total, total - 2 * factor * of_both + factor * factor * of_stored
