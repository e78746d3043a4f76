"""The kernels on a GPU of NVIDIA: `merge`, which takes chunks through a whole merge there.

The compiler of the driver makes a kernel of the headers in `src/core`, which the library for
processors is made of too, for each shape of merge that occurs; it is kept in the user's cache. So
the bytes are the same. All other functions are those of `core`: what asks for values of single
models is computed by the processor.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.errors import DareError
from dare.kernels import ChunkJob, Done, core
from dare.kernels.core import KINDS, OPERAND_BYTES, operand_table
from dare.tensors.chunks import CHUNK, chunk_count

Bytes = NDArray[np.uint8]

SOURCES = ("types.h", "lane.h", "elements.h", "gpu.h")
THREADS, BLOCK_SIZE = 256, 32768  # as in gpu.h
MOST_MODELS = 8  # with more, compiling takes long, and registers are too few
ALIGNMENT = 256
KIND_NAMES = {0: "F64", 1: "F32", 2: "F16", 3: "BF16", 4: "F8_E4M3", 5: "F8_E5M2"}
PART = np.dtype(
    [
        *((name, np.uint64) for name in ("base", "out", "models", "figures", "peak")),
        *((name, np.int64) for name in ("start", "size", "first_block")),
        ("scale", np.float64),
    ]
)
FIGURES = np.dtype((np.uint32, 4))


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
        kinds = (KINDS[raw.dtype] for raw in (job.base, job.operands[0].tuned, job.out))
        has_masks = any(each.mask is not None for each in job.operands)
        has_bands = any(each.band is not None for each in job.operands)
        return cls(*kinds, len(job.operands), job.elects, has_masks, has_bands)

    @property
    def macros(self) -> list[tuple[str, str]]:
        """What the compiler is told."""
        values = [KIND_NAMES[kind] for kind in self[:3]] + [str(int(each)) for each in self[3:]]
        return list(zip(map(str.upper, self._fields), values, strict=True))


class Tables(NamedTuple):
    """What a kernel is told of some jobs of one shape, and where it leaves figures."""

    memory: Bytes
    figures_at: int  # from here on it is written
    peaks_at: int
    blocks: int


def make_tables(
    jobs: Sequence[ChunkJob], addresses: Sequence[Sequence[int]], address: int
) -> Tables:
    """Lay out the tables of some jobs for a place in memory.

    The addresses are those of each job's base, models and result.
    """
    models = len(jobs[0].operands)
    chunks = np.cumsum([0, *(chunk_count(job.base.size) for job in jobs)])
    blocks = np.cumsum([0, *(-(-job.base.size // BLOCK_SIZE) for job in jobs)])
    operands_at = PART.itemsize * len(jobs)
    figures_at = operands_at + OPERAND_BYTES * models * len(jobs)
    peaks_at = figures_at + FIGURES.itemsize * models * int(chunks[-1])
    memory = np.zeros(peaks_at + 4 * len(jobs), np.uint8)
    parts = memory[:operands_at].view(PART)
    for part, job, places, number in zip(parts, jobs, addresses, itertools.count(), strict=False):
        first = operands_at + OPERAND_BYTES * models * number
        operands = operand_table(job.operands, places[1:-1])
        memory[first : first + OPERAND_BYTES * models] = np.frombuffer(operands, np.uint8)
        part["base"], part["out"], part["models"] = places[0], places[-1], address + first
        part["figures"] = address + figures_at + FIGURES.itemsize * models * int(chunks[number])
        part["peak"] = address + peaks_at + 4 * number
        part["start"], part["size"], part["scale"] = job.start, job.base.size, job.scale
        part["first_block"] = blocks[number]
    return Tables(memory, figures_at, peaks_at, int(blocks[-1]))


def read_tables(jobs: Sequence[ChunkJob], tables: Tables) -> list[tuple[NDArray[np.int64], int]]:
    """Return the figures and the peak of each job, from tables that a kernel has filled."""
    models = len(jobs[0].operands)
    written = tables.memory[tables.figures_at : tables.peaks_at].view(np.uint32)
    figures = written.reshape(-1, models, 4).astype(np.int64)
    peaks = tables.memory[tables.peaks_at :].view(np.uint32).tolist()
    ends = np.cumsum([chunk_count(job.base.size) for job in jobs])
    return list(zip(np.split(figures, ends[:-1]), peaks, strict=True))


@cache
def source() -> str:
    """Return the source of the kernels: the headers one after the other."""
    here, checkout = Path(__file__).with_name("gpu"), core.CHECKOUT / "src" / "core"
    folder = here if here.is_dir() else checkout
    lines = itertools.chain.from_iterable(
        (folder / name).read_text(encoding="utf-8").splitlines() for name in SOURCES
    )
    return "\n".join(line for line in lines if not line.startswith('#include "')) + "\n"
