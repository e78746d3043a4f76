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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from dare.documents.words import show_size
from dare.errors import DareError, RecipeError, install_command
from dare.kernels import MOST_ON_GPU, ChunkJob, Done, MatrixGpus, OnGpu, core, takes_matrices
from dare.kernels.core import KINDS
from dare.kernels.gpu_batches import (
    HASH_LANES,
    GpuBatch,
    PieceTables,
    Shape,
    can_stay,
    is_digested_there,
)
from dare.kernels.gpu_matrices import Matrices, describe_gpus
from dare.tensors.chunks import CHUNK

Bytes = NDArray[np.uint8]

# Headers as hatch_build.py packs them.
OF_MERGES = ("types.h", "lane.h", "elements.h", "gpu.h")
OF_DIGESTS = ("types.h", "lane.h", "digests.h", "gpu_digests.h")
THREADS, WARP = 256, 32  # as in gpu.h and gpu_digests.h
SEARCH = np.dtype(
    [
        *((name, np.uint64) for name in ("base", "tuned")),
        *((name, np.int64) for name in ("size", "rank", "magnitude", "place")),
        *(("counts", np.uint64), ("state", np.uint32), ("blocks", np.uint32)),
    ]
)
SEARCHING, FEWER, BINS = 0, 1, 2048  # as in gpu.h
ROUNDS = 6
SEARCH_BLOCKS, BLOCKS_OF_ONE = 1024, 32  # blocks that search, at most unless each search needs some
MOST_SEARCHED = BINS << 22  # elements


@cache
def source(headers: tuple[str, ...] = OF_MERGES) -> str:
    """Return the source of kernels: the headers one after the other."""
    here, checkout = Path(__file__).with_name("gpu"), core.CHECKOUT / "src" / "core"
    folder = here if here.is_dir() else checkout
    lines = chain.from_iterable(
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
        return describe_gpus(name, find_gpus)


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


def _is_pinned(array: NDArray[Any]) -> bool:
    place = _address(array)
    with _allocating:
        rooms = [(int(buffer.handle), buffer.size) for buffer in _pinned]
    return any(first <= place and place + array.nbytes <= first + size for first, size in rooms)


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
    """Arrays of which a GPU has a copy, which lies there for as long as this is kept."""

    def __init__(self, name: str, arrays: Iterable[NDArray[Any]], most_share: float = 1) -> None:
        """Copy arrays to the first GPU that a name stands for, or to a share of its free memory."""
        self.number = find_gpus(name)[0]
        places = {_address(array): array for array in arrays if array.nbytes}
        with _errors_named(name, NO_ROOM):
            worker = _Worker(self.number)
            nbytes, free = sum(array.nbytes for array in places.values()), worker.free_bytes
            if nbytes > most_share * free:
                room = f"has {show_size(free)} free, and base and models take {show_size(nbytes)}"
                raise DareError(f"device = {name}: GPU {self.number} {room}; {NO_ROOM}")
            buffers = {start: worker.allocate(array.nbytes) for start, array in places.items()}
            for start, buffer in buffers.items():
                worker.copy(int(buffer.handle), start, places[start].nbytes)
            worker.stream.sync()
        self._addresses = {start: int(buffer.handle) for start, buffer in buffers.items()}
        finalize(self, _close, list(buffers.values()))

    def copy_of(self, array: NDArray[Any]) -> OnGpu | None:
        """Return the copy of an array; None if it has no elements."""
        address = self._addresses.get(_address(array))
        return None if address is None else OnGpu(self.number, address, array.dtype, array.size)


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

    def fetch(self, wanted: Iterable[tuple[OnGpu, NDArray[Any]]]) -> None:
        """Copy elements of the GPU into arrays."""
        with _errors_named(self._name, NO_ROOM):
            self._receive(*((raw.address, into.view(np.uint8)) for raw, into in wanted))

    def takes(self, raws: Sequence[OnGpu]) -> bool:
        """Tell if `merge` reads nothing here of a base and not too many models on the GPU."""
        return len(raws) > 1 and all(is_digested_there(raw, raw.address) for raw in raws)

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
        """Merge jobs of one shape, and digest where inputs and results are."""
        worker, batch = self._worker, GpuBatch(jobs)
        batch.start = start = worker.room(batch.nbytes)
        for place, raw in batch.to_send():
            worker.copy(place, _address(raw), raw.nbytes)
        asked, tables_at = kernel("merge_parts", worker.number, shape), start + batch.tables_at
        worker.launch(asked, batch.tables.blocks, tables_at, len(jobs), threshold, CHUNK)
        self._digest(batch.pieces, start + batch.pieces_at, start + batch.sums_at)
        told = np.empty(batch.told_bytes, np.uint8)
        results = [
            (place, job.out.view(np.uint8))
            for place, job in zip(batch.results, jobs, strict=True)
            if job.place is None
        ]
        self._receive((start + batch.pieces_at, told), *results)
        return batch.read(told)

    def find_cuts(self, asked: Sequence[tuple[OnGpu, OnGpu, int]]) -> list[tuple[int, int] | None]:
        """Find magnitudes of some ranks in deltas; and the places after their equals that count.

        A delta is given by its base and the model. Both numbers are 0 if no more elements than the
        rank are not zero. None where some are not finite, or there are too many.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for number, (base, tuned, _) in enumerate(asked):
            if base.size <= MOST_SEARCHED:
                groups.setdefault((KINDS[base.dtype], KINDS[tuned.dtype]), []).append(number)
        found: dict[int, tuple[int, int] | None] = {}
        for kinds, numbers in groups.items():
            shape = Shape(*kinds, kinds[0], 1, False, False, False)
            with _errors_named(self._name, NO_ROOM):
                own = self._find_alike(shape, [asked[number] for number in numbers])
            found |= zip(numbers, own, strict=True)
        return [found.get(number) for number in range(len(asked))]

    def _find_alike(self, shape: Shape, asked: Sequence[Any]) -> list[tuple[int, int] | None]:
        worker, count, nbytes = self._worker, len(asked), SEARCH.itemsize * len(asked)
        room = worker.room(nbytes + 4 * BINS * count)
        count_at = itertools.count(room + nbytes, 4 * BINS)
        sent = np.zeros(nbytes + 4 * BINS * count, np.uint8)
        sent[:nbytes].view(SEARCH)[:] = [
            (*(base.address, tuned.address, base.size, rank, 0, 0), counts, SEARCHING, 0)
            for (base, tuned, rank), counts in zip(asked, count_at, strict=False)
        ]
        search = kernel("find_cuts", worker.number, shape)
        worker.copy(room, _address(sent), sent.nbytes)
        largest = max(base.size for base, *_ in asked)
        blocks = min(-(-largest // THREADS), max(SEARCH_BLOCKS // count, BLOCKS_OF_ONE))
        for number in range(ROUNDS):
            worker.launch(search, blocks * count, room, count, number)
        told = np.empty(nbytes, np.uint8)
        self._receive((room, told))
        cuts = told.view(SEARCH)
        states, bits, places = (cuts[name].tolist() for name in ("state", "magnitude", "place"))
        return [
            (0, 0) if state == FEWER else (bit, place + 1) if state == SEARCHING else None
            for state, bit, place in zip(states, bits, places, strict=True)
        ]

    def _digest(self, pieces: PieceTables, at: int, sums: int) -> None:
        """Have pieces digested; `at` is the place of their tables."""
        worker, tables = self._worker, (pieces.count, pieces.blocks, sums)
        for name, threads, *digests in (
            ("sum_blocks", WARP * pieces.blocks * pieces.count),
            ("digest_sums", HASH_LANES * pieces.count, at + pieces.spans_bytes),
        ):
            if threads:
                asked = kernel(name, worker.number)
                worker.launch(asked, -(-threads // THREADS), at, *tables, *digests)

    def _receive(self, *wanted: tuple[int, Bytes]) -> None:
        """Wait for the GPU, and fetch bytes from addresses into arrays.

        It reaches pinned memory by itself; the others' bytes take the way over some of that.
        """
        is_direct = [_is_pinned(into) for _, into in wanted]
        sizes = [
            0 if own else into.nbytes for own, (_, into) in zip(is_direct, wanted, strict=True)
        ]
        if self._received.size < sum(sizes):
            self._received = self._worker.pinned(sum(sizes))
        ends = pairwise(np.cumsum([0, *sizes]).tolist())
        staged = [self._received[first:end] for first, end in ends]
        for (start, into), own, room in zip(wanted, is_direct, staged, strict=True):
            self._worker.copy(_address(into if own else room), start, into.nbytes)
        self._worker.stream.sync()
        for (_, into), own, room in zip(wanted, is_direct, staged, strict=True):
            if not own:
                into[:] = room


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found
