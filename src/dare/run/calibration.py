"""How fast this machine is: a plan's chain on small matrices in memory, and a file on the disk.

One thread carries the chain out by the same code as a merge. It counts processor time, so that
other programs do not disturb it.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dare import kernels
from dare.inputs.sources import ArraySource
from dare.kernels.kept import cache_folder, make_private
from dare.kernels.reference import encode
from dare.output.writer import ArraySink
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.run.execute import execute
from dare.tensors.files import OutputFile, aligned_bytes, read_at
from dare.tensors.header import TensorInfo

SIDES = (128, 256, 512, 1024)
"""Of the square matrices that are merged to measure; the last is two chunks."""
ASPECT = 4
"""How many times as long as wide another matrix is, for stages that need whole ones."""
ENOUGH_SECONDS = 0.1
"""A matrix is merged again until this has passed, and no larger one after one that took longer."""
FILE_BYTES, FILE_SECONDS = 64 << 20, 0.3
"""The file that is written and read back: its size, and how long either may take."""
LOADING_SECONDS = 0.5
"""To import the kernels, if they were there already when it could have been measured."""
SHORT_POWERS, LONG_POWERS = (0.8, 2.0), (0.3, 1.2)
"""What can be believed of how the time for a matrix grows with its sides."""


@dataclass(frozen=True)
class Disk:
    """How fast a file is written and read back."""

    folder: str
    written_bytes_per_second: float
    read_bytes_per_second: float
    """Not from the page cache, where the system can be asked to leave it."""


@dataclass(frozen=True)
class Speed:
    """How long one thread takes to merge a square matrix of all models, in processor time."""

    side: int
    seconds: float
    short_power: float
    """The power of a matrix's shorter side that the time grows with; 1 unless a stage needs whole
    matrices."""
    long_power: float
    """That of the longer side."""
    loading_seconds: float
    """What it took to import the kernels."""


def measure_speed(
    plan: Plan,
    tensor: TensorPlan,
    announce: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.process_time,
) -> Speed:
    """Merge a small matrix as this tensor, and larger ones if the time grows faster than they."""
    is_loaded = f"dare.kernels.{plan.backend}" in sys.modules
    started = clock()
    kernels.load(plan.backend)
    loading = LOADING_SECONDS if is_loaded else clock() - started
    first = SIDES[0 if plan.cost.matrix_bytes else -1]
    execute(*_sample(plan, tensor, first, first), announce=announce)

    def seconds(rows: int, columns: int) -> float:
        sample, sink = _sample(plan, tensor, rows, columns)
        times, passed, started = 0, 0.0, clock()
        while passed < ENOUGH_SECONDS:
            execute(sample, sink)
            times, passed = times + 1, clock() - started
        return passed / times

    if not plan.cost.matrix_bytes:
        return Speed(first, seconds(first, first), 1.0, 1.0, loading)
    half, side = SIDES[:2]
    before, now = seconds(half, half), seconds(side, side)
    while now < ENOUGH_SECONDS and side < SIDES[-1]:
        half, side = side, 2 * side
        before, now = now, seconds(side, side)
    growth = math.log(seconds(ASPECT * half, half) / before, ASPECT)
    long_power = _within(LONG_POWERS, growth)
    short_power = _within(SHORT_POWERS, math.log(now / before, side / half) - long_power)
    return Speed(side, now, short_power, long_power, loading)


def _within(bounds: tuple[float, float], value: float) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _sample(plan: Plan, tensor: TensorPlan, rows: int, columns: int) -> tuple[Plan, ArraySink]:
    sample = sample_plan(plan, tensor, (rows, columns))
    return sample, ArraySink([replace(sample.tensors[0].base, dtype=tensor.dtype)])


def sample_plan(plan: Plan, tensor: TensorPlan, shape: tuple[int, int]) -> Plan:
    """The plan for one matrix of random numbers, merged by one thread as the tensor is."""
    generator = np.random.default_rng(0)

    def source(values: Any, like: TensorInfo, *, delta: bool) -> ArraySource:
        raw = np.empty(values.size, like.dtype.carrier)
        encode(values.astype(np.float32), raw)
        stored = {tensor.name: (like.dtype, shape, raw.view(np.uint8))}
        return ArraySource(stored, holds_deltas=delta)

    base = 0.02 * generator.standard_normal(math.prod(shape), np.float32)
    base_source = source(base, tensor.base, delta=False)
    sources = [base_source] * len(plan.models)
    for model in tensor.models:
        real = plan.source_of(tensor, model)
        delta = real.holds_delta(tensor.name)
        values = 0.001 * generator.standard_normal(base.size, np.float32)
        info = real.tensors[tensor.name]
        sources[model] = source(values if delta else base + values, info, delta=delta)
    info = base_source.tensors[tensor.name]
    return replace(
        plan,
        recipe=plan.recipe.model_copy(update={"threads": 1, "cluster": None}),
        base=base_source,
        models=tuple(sources),
        tensors=(replace(tensor, shape=shape, base=info),),
        layout=None,
    )


def measure_disk(clock: Callable[[], float] = time.perf_counter) -> Disk | None:
    """Write a file as a merge does and read it back; None where nothing can be written."""
    for find in (cache_folder, lambda: Path(tempfile.gettempdir())):
        with suppress(OSError):
            make_private(folder := find())
            with tempfile.TemporaryDirectory(dir=folder) as place:
                return _measure_file(folder, Path(place) / "rates", clock)
    return None


def _measure_file(folder: Path, path: Path, clock: Callable[[], float]) -> Disk:
    piece = aligned_bytes(FILE_BYTES // 16)
    file = OutputFile(path, FILE_BYTES)
    written = 0
    started = clock()
    while written < FILE_BYTES and clock() - started < FILE_SECONDS:
        file.write(piece, written)
        written += piece.size
    file.sync()
    writing = clock() - started
    file.close()
    opened = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    read = 0
    started = clock()
    while read < written and clock() - started < FILE_SECONDS:
        read += read_at(opened, memoryview(bytearray(piece.size)), read)
    reading = clock() - started
    os.close(opened)
    return Disk(str(folder), written / max(writing, 1e-9), read / max(reading, 1e-9))
