"""The kernels on an NVIDIA GPU: it does `merge`, which takes chunks through a whole merge.

A kernel is compiled for each shape of merge that occurs, and kept in the user's cache. It is made
of headers in `src/core`, as the library for processors is, so the bytes are the same. All other
functions are those of `core`: what needs the values of single models is computed by the processor.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from dare.documents.words import show_size
from dare.errors import DareError, RecipeError, install_command
from dare.kernels import MOST_ON_GPU, ChunkJob, Done, MatrixGpus, core, takes_matrices
from dare.kernels.core import KINDS, OPERAND_BYTES, operand_table
from dare.kernels.gpu_matrices import Matrices, describe_gpus
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans

Bytes = NDArray[np.uint8]

# Headers as hatch_build.py packs them.
OF_MERGES = ("types.h", "lane.h", "elements.h", "gpu.h")
OF_DIGESTS = ("types.h", "lane.h", "digests.h", "gpu_digests.h")
THREADS, BLOCK_SIZE = 256, 32768  # as in gpu.h
HASH_BLOCK, HASH_LANES, WARP = 1024, 8, 32  # as in digests.h and gpu_digests.h
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
SEARCH = np.dtype(
    [
        *((name, np.uint64) for name in ("base", "tuned")),
        *((name, np.int64) for name in ("size", "rank", "magnitude", "place")),
        *(("counts", np.uint64), ("state", np.uint32), ("blocks", np.uint32)),
    ]
)
SEARCHING, FEWER, BINS = 0, 1, 2048  # as in gpu.h
ROUNDS, SEARCH_BLOCKS = 6, 1024  # blocks that search, at most
MOST_SEARCHED = BINS << 22  # elements


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
        self._chunks = np.cumsum([0, *(chunk_count(job.base.size) for job in jobs)]).tolist()
        blocks = np.cumsum([0, *(-(-job.base.size // BLOCK_SIZE) for job in jobs)]).tolist()
        self._first_blocks, self.blocks = blocks[:-1], blocks[-1]
        self._operands_at = PART.itemsize * len(jobs)
        self._figures_at = self._operands_at + OPERAND_BYTES * self._models * len(jobs)
        self._peaks_at = self._figures_at + FIGURE_BYTES * self._models * self._chunks[-1]
        self.nbytes = self._peaks_at + 4 * len(jobs)

    def fill(self, addresses: Sequence[Sequence[int]], at: int) -> Bytes:
        """Return the tables for a place in memory, with each job's base, models and result."""
        memory, models = np.zeros(self.nbytes, np.uint8), self._models
        parts = memory[: self._operands_at].view(PART)
        for number, (job, places) in enumerate(zip(self._jobs, addresses, strict=True)):
            first = self._operands_at + OPERAND_BYTES * models * number
            operands = operand_table(job.operands, places[1:-1])
            memory[first : first + OPERAND_BYTES * models] = np.frombuffer(operands, np.uint8)
            figures_at = self._figures_at + FIGURE_BYTES * models * self._chunks[number]
            pointers = at + first, at + figures_at, at + self._peaks_at + 4 * number
            spans = job.start, job.base.size, self._first_blocks[number]
            parts[number] = (places[0], places[-1], *pointers, *spans, job.scale)
        return memory

    def read(self, memory: Bytes) -> list[tuple[NDArray[np.int64], int]]:
        """Return the figures and the peak of each job, from tables that a kernel has filled."""
        figures = memory[self._figures_at : self._peaks_at].view(np.uint32).astype(np.int64)
        peaks = memory[self._peaks_at : self.nbytes].view(np.uint32).tolist()
        every = np.split(figures.reshape(-1, self._models, 4), self._chunks[1:-1])
        return list(zip(every, peaks, strict=True))


class PieceTables:
    """The chunks of results that stay on a GPU, whose digests it computes."""

    def __init__(self, jobs: Iterable[ChunkJob]) -> None:
        """Count what the tables take."""
        found = [
            (job.place + CHUNK * job.out.itemsize * chunk, count * job.out.itemsize)
            for job in jobs
            if job.place is not None
            for chunk, (_, count) in enumerate(chunk_spans(job.out.size))
        ]
        self.spans = np.array(found, np.int64).reshape(-1, 2)
        self.count = len(found)
        self.blocks = int(self.spans[:, 1].max(initial=1) - 1) // HASH_BLOCK  # of each, at most
        self.nbytes = 2 * self.spans.nbytes  # and the digests
        self.sums_bytes = 8 * HASH_LANES * self.blocks * self.count

    def read(self, memory: Bytes) -> list[str]:
        """Return the digests, from tables that kernels have filled."""
        return core.digest_texts(memory[self.spans.nbytes : self.nbytes].view(np.uint64))


def can_stay(job: ChunkJob) -> bool:
    """Tell if a result has a place on a GPU where it can be digested too."""
    last = job.out[-1 - (job.out.size - 1) % CHUNK :]
    return job.place is not None and job.place % 8 == 0 and last.nbytes > core.SHORT_BYTES


@cache
def source(headers: tuple[str, ...] = OF_MERGES) -> str:
    """Return the source of kernels: the headers one after the other."""
    here, checkout = Path(__file__).with_name("gpu"), core.CHECKOUT / "src" / "core"
    folder = here if here.is_dir() else checkout
    lines = itertools.chain.from_iterable(
        (folder / name).read_text(encoding="utf-8").splitlines() for name in headers
    )
    return "\n".join(line for line in lines if not line.startswith('#include "')) + "\n"


# ---------------------------------------------------------------- the machine's GPUs


def find_gpus(name: str) -> list[int]:
    """Return the numbers of the GPUs that a name stands for: all of them, or `cuda:1` alone."""
    try:
        from cuda.core import Device
    except ImportError:
        remedy = f"{install_command('gpu')}, or merge with device = cpu"
        raise RecipeError(f"device = {name}: needs the extra gpu; {remedy}") from None
    with _errors_named(name, "check that nvidia-smi lists the GPU, or merge with device = cpu"):
        found = [device.device_id for device in Device.get_all_devices()]
    _, _, number = name.partition(":")
    if not found or (number and int(number) not in found):
        there = f"the GPUs are {', '.join(map(str, found))}" if found else "there is no GPU"
        raise RecipeError(f"device = {name}: {there}; choose another device, or device = cpu")
    return [int(number)] if number else found


def find_matrix_gpus(name: str) -> MatrixGpus:
    """Return the GPUs that a name stands for, if they can compute whole matrices."""
    with _errors_named(name, "update the driver, or merge with device = cpu"):
        return describe_gpus(name, find_gpus(name))


@contextmanager
def _errors_named(name: str, remedy: str) -> Iterator[None]:
    """Say what a GPU's driver or compiler says in a line, with a remedy."""
    try:
        yield
    except DareError:
        raise
    except Exception as error:  # cuda.core has no public class of them
        said = str(error).strip().partition("\n")[0]
        raise DareError(f"device = {name}: {said}; {remedy}") from error


NO_ROOM = "close what else uses the GPU, lower max_memory, or merge with device = cpu"
_compiling = threading.Lock()
_opened = itertools.count()  # workers, which share the GPUs


def kernel(name: str, number: int, shape: Shape | None = None) -> Any:
    """Return a kernel for a GPU, compiled once by whichever thread asks first."""
    with _compiling:
        return _loaded(name, number, shape)


@cache
def _loaded(name: str, number: int, shape: Shape | None) -> Any:
    return _compiled(number, shape).get_kernel(name)


@cache
def _compiled(number: int, shape: Shape | None) -> Any:
    from cuda.core import Device, Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache

    options = ProgramOptions(
        std="c++17",
        arch=f"sm_{Device(number).arch}",
        fma=False,  # each operation is rounded by itself
        ftz=False,
        prec_div=True,
        prec_sqrt=True,
        device_as_default_execution_space=True,
        disable_warnings=True,
        define_macro=shape.macros if shape else None,
    )
    program = Program(source(OF_MERGES if shape else OF_DIGESTS), "c++", options=options)
    with FileStreamProgramCache() as kept:
        return program.compile("cubin", cache=kept)


# ---------------------------------------------------------------- memory of a GPU

# Memory of the machine that GPUs reach by themselves, all of it and what nobody uses now: it takes
# long to get. It must be given back while there is a driver, that is before the process ends.
_pinned: list[Any] = []
_unused: list[Any] = []
_allocating = threading.Lock()


def _pinned_buffer(nbytes: int) -> Any:
    from cuda.core import LegacyPinnedMemoryResource

    with _allocating:
        for place, buffer in enumerate(_unused):
            if nbytes <= buffer.size <= 2 * nbytes:
                return _unused.pop(place)
        while _unused:  # merges of other sizes are over
            _pinned.remove(buffer := _unused.pop())
            buffer.close()
        _pinned.append(LegacyPinnedMemoryResource().allocate(nbytes))
        return _pinned[-1]


def _close(buffers: list[Any]) -> None:
    while buffers:
        buffers.pop().close()


atexit.register(_close, _pinned)


class _Worker:
    """One GPU as a thread uses it: a stream of its own, and memory that grows as needed."""

    def __init__(self, number: int) -> None:
        from cuda.core import Device

        self.number = number
        self._device = Device(number)
        self._device.set_current()
        self._device.sync()  # others may still use the memory that results go to
        self.stream = self._device.create_stream()
        self._rooms: list[Any] = []  # one at most
        finalize(self, _close, self._rooms)

    @property
    def free_bytes(self) -> int:
        """The memory that nobody uses."""
        from cuda.bindings import driver

        self._device.set_current()
        fault, free, _ = driver.cuMemGetInfo()
        if fault:
            raise RuntimeError(str(fault))
        return int(free)

    def allocate(self, nbytes: int) -> Any:
        return self._device.allocate(nbytes, stream=self.stream)

    def room(self, nbytes: int) -> int:
        """Return the address of so many bytes, which the next call gives again."""
        self._device.set_current()  # for this thread
        if not self._rooms or self._rooms[0].size < nbytes:
            _close(self._rooms)
            self._rooms.append(self.allocate(nbytes))
        return int(self._rooms[0].handle)

    def pinned(self, nbytes: int) -> Bytes:
        """Return memory of the machine that the GPU reaches by itself, which is faster."""
        self._device.set_current()
        buffer = _pinned_buffer(max(nbytes, 1))
        memory = (ctypes.c_uint8 * nbytes).from_address(int(buffer.handle))
        finalize(memory, _unused.append, buffer).atexit = False  # when no array is left of it
        return np.ctypeslib.as_array(memory)

    def copy(self, to: int, start: int, nbytes: int) -> None:
        """Copy bytes between any memory of the machine and of the GPU."""
        from cuda.core import Buffer

        if nbytes:
            there, here = Buffer.from_handle(to, nbytes), Buffer.from_handle(start, nbytes)
            there.copy_from(here, stream=self.stream)

    def launch(self, kernel: Any, blocks: int, *arguments: int) -> None:
        from cuda.core import LaunchConfig, launch

        launch(self.stream, LaunchConfig(grid=blocks, block=THREADS), kernel, *arguments)


class Residents:
    """Arrays of which a GPU has a copy, which kernels find there for as long as this is kept."""

    def __init__(self, name: str, arrays: Iterable[NDArray[Any]], most_share: float = 1) -> None:
        """Copy arrays to the first GPU that a name stands for, or to a share of its free memory."""
        self.number = find_gpus(name)[0]
        places = {(_address(array), array.nbytes): array for array in arrays if array.nbytes}
        self._arrays = [places[place] for place in sorted(places)]
        self._starts = [start for start, _ in sorted(places)]
        with _errors_named(name, NO_ROOM):
            worker = _Worker(self.number)
            nbytes, free = sum(array.nbytes for array in self._arrays), worker.free_bytes
            if nbytes > most_share * free:
                room = f"has {show_size(free)} free, and base and models take {show_size(nbytes)}"
                raise DareError(f"device = {name}: GPU {self.number} {room}; {NO_ROOM}")
            self._buffers = [worker.allocate(array.nbytes) for array in self._arrays]
            for array, buffer in zip(self._arrays, self._buffers, strict=True):
                worker.copy(int(buffer.handle), _address(array), array.nbytes)
            worker.stream.sync()
        finalize(self, _close, self._buffers)
        with _allocating:
            _residents.add(self)

    def find(self, array: NDArray[Any]) -> int | None:
        """Return the address that the elements of an array have there, if they have one."""
        place = bisect_right(self._starts, _address(array)) - 1
        offset = _address(array) - self._starts[place]
        if place < 0 or offset + array.nbytes > self._arrays[place].nbytes:
            return None
        return int(self._buffers[place].handle) + offset


_residents: WeakSet[Residents] = WeakSet()


def _resident_address(array: NDArray[Any], number: int) -> int | None:
    with _allocating:
        found = [each.find(array) for each in _residents if each.number == number]
    return next((address for address in found if address is not None), None)


# ---------------------------------------------------------------- the kernels of one worker


class Kernels:
    """The functions of `core`, of which a GPU does `merge`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._received: Bytes = np.empty(0, np.uint8)

    @cached_property
    def _worker(self) -> _Worker:
        gpus = find_gpus(self._name)
        return _Worker(gpus[next(_opened) % len(gpus)])

    def __getattr__(self, name: str) -> Any:
        return getattr(core, name)

    @cached_property
    def matrices(self) -> Matrices | None:
        """What calls functions of matrices on the GPU; None if the processor is to do so."""
        if not takes_matrices(self._name):
            return None
        remedy = "close what else uses the GPU, use fewer threads, or merge with device = cpu"
        return Matrices(self._worker.number, partial(_errors_named, self._name, remedy))

    def pinned(self, nbytes: int) -> Bytes:
        with _errors_named(self._name, "lower max_memory, or merge with device = cpu"):
            return self._worker.pinned(nbytes)

    @property
    def number(self) -> int:
        """The number of the GPU."""
        return self._worker.number

    def send(self, raw: NDArray[Any], place: int) -> None:
        """Copy elements to a place on the GPU."""
        with _errors_named(self._name, NO_ROOM):
            self._worker.copy(place, _address(raw), raw.nbytes)
            self._worker.stream.sync()

    def merge(self, jobs: Sequence[ChunkJob], threshold_bits: int) -> list[Done]:
        """Merge what has elements and a few models on the GPU, and the rest here."""
        groups: dict[Shape | None, list[int]] = {}
        for number, job in enumerate(jobs):
            fits = 0 < len(job.operands) <= MOST_ON_GPU and job.base.size > 0
            groups.setdefault(Shape.of(job) if fits else None, []).append(number)
        done: dict[int, Done] = {}
        for shape, numbers in groups.items():
            asked = [jobs[number] for number in numbers]
            if shape is None:
                some = [job._replace(place=None) for job in asked]
                made = core.merge(some, threshold_bits)
            else:
                some = [job if can_stay(job) else job._replace(place=None) for job in asked]
                with _errors_named(self._name, NO_ROOM):
                    made = self._merge_alike(shape, some, int(threshold_bits))
            for job, merged in zip(asked, some, strict=True):
                if job.place is not None and merged.place is None:
                    self.send(job.out, job.place)
            done |= zip(numbers, made, strict=True)
        return [done[number] for number in range(len(jobs))]

    def _merge_alike(self, shape: Shape, jobs: Sequence[ChunkJob], threshold: int) -> list[Done]:
        """Merge jobs of one shape; digests are computed where inputs and results are.

        The inputs' are computed here while the GPU works.
        """
        worker, room = self._worker, _GpuRoom()
        inputs = [
            [room.add(raw, worker.number) for raw in (job.base, *(o.tuned for o in job.operands))]
            for job in jobs
        ]
        tables, pieces = Tables(jobs), PieceTables(jobs)
        sums_at = room.take(pieces.sums_bytes)
        results_at = room.take(tables.nbytes)  # from here on it is sent back
        pieces_at = room.take(pieces.nbytes)
        outs = [room.take(job.out.nbytes if job.place is None else 0) for job in jobs]
        start = worker.room(room.size)
        addresses = [
            [*(each.address(start) for each in own), job.place or start + out]
            for own, out, job in zip(inputs, outs, jobs, strict=True)
        ]
        filled = tables.fill(addresses, start + results_at)
        for each in itertools.chain.from_iterable(inputs):
            if each.resident is None:
                worker.copy(each.address(start), _address(each.raw), each.raw.nbytes)
        worker.copy(start + results_at, _address(filled), filled.nbytes)
        asked = kernel("merge_parts", worker.number, shape)
        worker.launch(asked, tables.blocks, start + results_at, len(jobs), threshold, CHUNK)
        if pieces.count:
            self._digest(pieces, start + pieces_at, start + sums_at)
        results = self._receive(start + results_at, room.size - results_at)
        wanted = [
            each.raw[:0] if is_known else each.raw
            for own, job in zip(inputs, jobs, strict=True)
            for each, is_known in zip(own, job.known, strict=True)
        ]
        of_inputs = iter(core.digests(wanted))
        worker.stream.sync()
        of_pieces = iter(pieces.read(results[pieces_at - results_at :]))
        for job, out in zip(jobs, outs, strict=True):
            if job.place is None:
                job.out.view(np.uint8)[:] = results[out - results_at :][: job.out.nbytes]
        of_outputs = iter(core.digests([job.out for job in jobs if job.place is None]))
        done: list[Done] = []
        for job, own, (figures, peak) in zip(jobs, inputs, tables.read(results), strict=True):
            chunks = chunk_count(job.out.size)
            made = next(of_outputs) if job.place is None else list(islice(of_pieces, chunks))
            done.append(Done(figures, peak, [*islice(of_inputs, len(own)), made]))
        return done

    def find_cut(
        self, base: NDArray[Any], tuned: NDArray[Any], rank: int
    ) -> tuple[int, int] | None:
        """Find the magnitude of a rank in a delta, and the place after its last equal that counts.

        They are 0 if no more than so many are not zero. None if the GPU does not hold the delta,
        or not all of it is finite.
        """
        addresses = [_resident_address(raw, self.number) for raw in (base, tuned)]
        if None in addresses or base.size > MOST_SEARCHED:
            return None
        kinds = KINDS[base.dtype], KINDS[tuned.dtype], KINDS[base.dtype]
        worker, blocks = self._worker, min(-(-base.size // THREADS), SEARCH_BLOCKS)
        asked = np.zeros(SEARCH.itemsize + 4 * BINS, np.uint8)
        with _errors_named(self._name, NO_ROOM):
            search = kernel("find_cut", worker.number, Shape(*kinds, 1, False, False, False))
            room = worker.room(asked.nbytes)
            what = (*addresses, base.size, rank, 0, 0, room + SEARCH.itemsize, SEARCHING, 0)
            asked[: SEARCH.itemsize].view(SEARCH)[0] = what
            worker.copy(room, _address(asked), asked.nbytes)
            for number in range(ROUNDS):
                worker.launch(search, blocks, room, number)
            found = self._receive(room, SEARCH.itemsize)
            worker.stream.sync()
        (told,) = found.view(SEARCH)
        if told["state"] == FEWER:
            return 0, 0
        is_found = told["state"] == SEARCHING
        return (int(told["magnitude"]), int(told["place"]) + 1) if is_found else None

    def _digest(self, pieces: PieceTables, at: int, sums: int) -> None:
        """Have pieces digested; `at` is the place of their tables."""
        worker, tables = self._worker, (pieces.count, pieces.blocks, sums)
        worker.copy(at, _address(pieces.spans), pieces.spans.nbytes)
        for name, threads, *digests in (
            ("sum_blocks", WARP * pieces.blocks * pieces.count),
            ("digest_sums", HASH_LANES * pieces.count, at + pieces.spans.nbytes),
        ):
            if threads:
                asked = kernel(name, worker.number)
                worker.launch(asked, -(-threads // THREADS), at, *tables, *digests)

    def _receive(self, start: int, nbytes: int) -> Bytes:
        """Have bytes of the GPU sent; they are there when its stream is done."""
        if self._received.size < nbytes:
            self._received = self._worker.pinned(nbytes)
        self._worker.copy(_address(self._received), start, nbytes)
        return self._received[:nbytes]


class _GpuArray(NamedTuple):
    """An array that a kernel reads: where the GPU has it, or its place in the room."""

    raw: NDArray[Any]
    resident: int | None
    place: int

    def address(self, room: int) -> int:
        return room + self.place if self.resident is None else self.resident


class _GpuRoom:
    """The memory that some jobs take on a GPU."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int) -> int:
        """Return the place of so many bytes."""
        place, self.size = self.size, self.size + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def add(self, raw: NDArray[Any], number: int) -> _GpuArray:
        resident = _resident_address(raw, number)
        return _GpuArray(raw, resident, 0 if resident else self.take(raw.nbytes))


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found
