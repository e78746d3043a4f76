"""Batches of a merge as kernels of a GPU take them: shapes, tables, and places in its memory.

Nothing here needs a GPU: places are numbers, and tables are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, compress, islice, repeat, starmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.kernels import ChunkJob, Done, OnGpu, core
from dare.kernels.core import KINDS, OPERAND, operand_row
from dare.tensors.chunks import CHUNK

Bytes = NDArray[np.uint8]

BLOCK_SIZE = 32768  # elements, as in gpu.h
HASH_BLOCK, HASH_LANES = 1024, 8  # bytes and words, as in digests.h and gpu_digests.h
ALIGNMENT = 256
KIND_NAMES = {0: "F64", 1: "F32", 2: "F16", 3: "BF16", 4: "F8_E4M3", 5: "F8_E5M2"}
PART = np.dtype(
    [
        *((name, np.uint64) for name in ("base", "out", "models", "figures", "peak")),
        *((name, np.int64) for name in ("start", "size", "first_block")),
        ("scale", np.float64),
    ]
)
FIGURE_BYTES = 16  # four counts of a chunk's model


class Shape(NamedTuple):
    """What a kernel is compiled for, by the names of its macros."""

    base_kind: int
    model_kind: int
    out_kind: int
    models: int
    elects: bool
    has_masks: bool
    has_bands: bool

    @classmethod
    def of(cls, job: ChunkJob) -> Shape:
        """Return the shape of a job that has models."""
        base, tuned, out = (KINDS[raw.dtype] for raw in (job.base, job.operands[0].tuned, job.out))
        has_masks = any(each.mask is not None for each in job.operands)
        has_bands = any(each.band is not None for each in job.operands)
        return cls(base, tuned, out, len(job.operands), job.elects, has_masks, has_bands)

    @property
    def macros(self) -> list[tuple[str, str]]:
        """What the compiler is told."""
        values = [KIND_NAMES[kind] for kind in self[:3]] + [str(int(each)) for each in self[3:]]
        return list(zip(map(str.upper, self._fields), values, strict=True))


class Tables:
    """What a kernel is told of some jobs of one shape, and what it says of them afterwards."""

    def __init__(self, jobs: Sequence[ChunkJob]) -> None:
        """Count what the tables take."""
        self._jobs, self._models = jobs, len(jobs[0].operands)
        sizes = np.array([job.base.size for job in jobs], np.int64)
        self._chunks = np.cumsum([0, *-(-sizes // CHUNK)])
        self._blocks = np.cumsum([0, *-(-sizes // BLOCK_SIZE)])
        self.blocks = int(self._blocks[-1])
        self._operands_at = PART.itemsize * len(jobs)
        self._figures_at = self._operands_at + OPERAND.itemsize * self._models * len(jobs)
        self._peaks_at = self._figures_at + FIGURE_BYTES * self._models * int(self._chunks[-1])
        self.nbytes = self._peaks_at + 4 * len(jobs)

    def fill(self, addresses: Sequence[Sequence[int]], at: int) -> Bytes:
        """Return the tables for a place in memory, with each job's base, models and result."""
        memory = np.zeros(self.nbytes, np.uint8)
        jobs, models = list(zip(self._jobs, addresses, strict=True)), self._models
        memory[self._operands_at : self._figures_at].view(OPERAND)[:] = [
            operand_row(operand, place)
            for job, places in jobs
            for operand, place in zip(job.operands, places[1:-1], strict=True)
        ]
        parts = memory[: self._operands_at].view(PART)
        parts["base"], parts["out"] = [own[0] for own in addresses], [own[-1] for own in addresses]
        numbers = np.arange(len(jobs))
        parts["models"] = at + self._operands_at + OPERAND.itemsize * models * numbers
        parts["figures"] = at + self._figures_at + FIGURE_BYTES * models * self._chunks[:-1]
        parts["peak"] = at + self._peaks_at + 4 * numbers
        parts["start"], parts["size"] = zip(*((j.start, j.base.size) for j, _ in jobs), strict=True)
        parts["first_block"], parts["scale"] = self._blocks[:-1], [job.scale for job, _ in jobs]
        return memory

    def read(self, memory: Bytes) -> list[tuple[NDArray[np.int64], int]]:
        """Return the figures and the peak of each job, from tables that a kernel has filled."""
        figures = memory[self._figures_at : self._peaks_at].view(np.uint32).astype(np.int64)
        peaks = memory[self._peaks_at : self.nbytes].view(np.uint32).tolist()
        every = np.split(figures.reshape(-1, self._models, 4), self._chunks[1:-1])
        return list(zip(every, peaks, strict=True))


class PieceTables:
    """The chunks of arrays that a GPU digests."""

    def __init__(self, raws: Sequence[NDArray[Any]]) -> None:
        """Count what the tables take."""
        self._sizes = np.array([raw.nbytes for raw in raws], np.int64)
        self._steps = np.array([CHUNK * raw.itemsize for raw in raws], np.int64)
        self._counts = -(-self._sizes // self._steps)
        self.count = int(self._counts.sum())
        largest = int(np.minimum(self._sizes, self._steps).max(initial=1))
        self.blocks = (largest - 1) // HASH_BLOCK  # of each piece, at most
        self.spans_bytes = 16 * self.count
        self.nbytes = 2 * self.spans_bytes  # and the digests
        self.sums_bytes = 8 * HASH_LANES * self.blocks * self.count

    def fill(self, addresses: Sequence[int]) -> Bytes:
        """Return address and size of each piece of the arrays at some addresses."""
        own = np.repeat(np.arange(len(addresses)), self._counts)
        number = np.arange(self.count) - (np.cumsum(self._counts) - self._counts)[own]
        steps, offsets = self._steps[own], number * self._steps[own]
        starts = np.array(addresses, np.int64)[own] + offsets
        spans = np.stack([starts, np.minimum(steps, self._sizes[own] - offsets)], axis=1)
        return spans.reshape(-1).view(np.uint8)

    def read(self, memory: Bytes) -> Iterator[list[str]]:
        """Yield the digests of each array, from tables that kernels have filled."""
        found = iter(core.digest_texts(memory[self.spans_bytes : self.nbytes].view(np.uint64)))
        return (list(islice(found, count)) for count in self._counts.tolist())


def is_digested_there(raw: NDArray[Any] | OnGpu, place: int | None) -> bool:
    """Tell if kernels can digest all chunks of an array; a place is one that it must have."""
    last_bytes = (raw.nbytes - 1) % (CHUNK * raw.itemsize) + 1
    return last_bytes > core.SHORT_BYTES and (place or 0) % 8 == 0


def can_stay(job: ChunkJob) -> bool:
    """Tell if a result has a place on a GPU where it can be digested too."""
    return job.place is not None and is_digested_there(job.out, job.place)


class _GpuRoom:
    """The memory that some jobs take on a GPU."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int) -> int:
        """Return the place of so many bytes."""
        place, self.size = self.size, self.size + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return place


class _KernelInput(NamedTuple):
    """An array that a kernel reads: its place in the room, or where the GPU has it already."""

    raw: NDArray[Any]
    place: int
    there: int | None

    def address(self, room: int) -> int:
        return self.there or room + self.place


class GpuBatch:
    """Jobs of one shape: the places of all they need in a GPU's room, and what is digested there.

    What the GPU tells of them, from `pieces_at` on, are digests, then figures.
    """

    start = 0  # the room's address

    def __init__(self, jobs: Sequence[ChunkJob]) -> None:
        """Count what the jobs take."""
        self.jobs, room = jobs, _GpuRoom()
        self._inputs = [
            [
                _KernelInput(raw, 0 if there else room.take(raw.nbytes), there)
                for raw, there in zip(job.inputs, job.there or repeat(None), strict=False)
            ]
            for job in jobs
        ]
        known = chain.from_iterable(job.known for job in jobs)
        inputs = chain.from_iterable(self._inputs)
        self._unknown = [each for each, is_known in zip(inputs, known, strict=True) if not is_known]
        digested = [(each.raw, each.there) for each in self._unknown]
        digested += [(job.out, job.place) for job in jobs]
        self._raws = [raw for raw, _ in digested]
        self._is_there = list(starmap(is_digested_there, digested))
        self.tables = Tables(jobs)
        self.pieces = PieceTables(list(compress(self._raws, self._is_there)))
        self.sums_at, self.pieces_at = map(room.take, (self.pieces.sums_bytes, self.pieces.nbytes))
        self.tables_at = room.take(self.tables.nbytes)
        self.told_bytes = self.tables_at + self.tables.nbytes - self.pieces_at
        self._outs = [room.take(job.out.nbytes if job.place is None else 0) for job in jobs]
        self.nbytes = room.size

    @property
    def results(self) -> list[int]:
        """The address of each job's result."""
        pairs = zip(self.jobs, self._outs, strict=True)
        return [job.place or self.start + out for job, out in pairs]

    def to_send(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield what goes to the GPU, each with its address: inputs, and the tables of kernels."""
        start, results = self.start, self.results
        for each in chain.from_iterable(self._inputs):
            if each.there is None:
                yield each.address(start), each.raw
        addresses = [
            [*(each.address(start) for each in own), result]
            for own, result in zip(self._inputs, results, strict=True)
        ]
        yield start + self.tables_at, self.tables.fill(addresses, start + self.tables_at)
        places = [*(each.address(start) for each in self._unknown), *results]
        yield start + self.pieces_at, self.pieces.fill(list(compress(places, self._is_there)))

    def read(self, told: Bytes) -> list[Done]:
        """Return what was done, once results are where they belong."""
        short = [
            raw for raw, is_there in zip(self._raws, self._is_there, strict=True) if not is_there
        ]
        here, there = iter(core.digests(short)), self.pieces.read(told)
        digests = [next(there if is_there else here) for is_there in self._is_there]
        of_inputs, of_results = iter(digests), digests[len(self._unknown) :]
        figures = self.tables.read(told[self.tables_at - self.pieces_at :])
        return [
            Done(*found, [*([] if known else next(of_inputs) for known in job.known), own])
            for job, found, own in zip(self.jobs, figures, of_results, strict=True)
        ]
