"""The arithmetic, on chunks of one tensor.

`reference` (NumPy) defines every function; `core` has the same functions with the same bits, fast:
the library that is built from `src/core`. `cuda` has them too, and a GPU does most of a merge.
`load` returns what has these functions; `DEVICES` tells plans what a device takes.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import Notice, notice
from dare.errors import DareError, RecipeError, did_you_mean
from dare.tensors.chunks import CHUNK
from dare.tensors.files import ALIGNMENT

# Arrays of lanes have a multiple of this length, which kernels work on at a time, in caches.
LANES_MULTIPLE = 8192
# Distance between rows of sums: not a power of two, or they would share cache sets.
ROW = LANES_MULTIPLE + 16
STAGE_FLOATS = 8  # as an election's four sums and their balance, or four arrays of float64
MOST_ON_GPU = 8  # models that one of its kernels takes: more need too many registers
GROUP = 4  # models whose values a survey of pairs holds, beside those of one more


@dataclass(frozen=True)
class Device:
    """What computes, as plans see it: its kernels, its batches, and the memory it takes."""

    module: str
    chunks_at_once: int = 4  # of each input, in a batch, if memory allows
    chunks_held: int = 18  # of all inputs; with more models, fewer of each
    fuses: bool = True  # whether one kernel can take a chunk through a chain of lazy stages
    is_gpu: bool = False  # whether chunks go to memory of its own, where they have as much room
    most_threads: int | None = None  # to merge: more of them only wait for each other
    matrix_threads: int | None = None  # likewise where it computes whole matrices
    finds_cuts: bool = False  # whether it finds magnitudes by rank, in models that it holds

    def buffer_bytes(
        self, chunks: int, inputs: int, *, width: int, is_fused: bool, held: int, has_deltas: bool
    ) -> int:
        """Return the bytes of one worker's buffers, for so many inputs that are read.

        An element has `width` bytes, as it is stored.
        What is fused needs no values of single models, anything else those of some `held` at once.
        """
        floats, lanes = 2, 2  # base and merged delta; a mask and one that keeps everything
        if not is_fused:  # values, a stage's own arrays, zeros; what is left, a stage's own flags
            floats += held + STAGE_FLOATS + 1 + has_deltas
            lanes += 2 * held
        stored, computed = (1 + inputs) * width, 4 * floats + lanes
        return CHUNK * (chunks * stored + computed) + ALIGNMENT


DEVICES = {
    "cpu": Device("core"),
    "reference": Device("reference"),
    "cuda": Device(
        "cuda",
        chunks_at_once=256,
        chunks_held=64,
        is_gpu=True,
        most_threads=8,
        matrix_threads=4,
        finds_cuts=True,
    ),
    "auto": Device("core"),  # `auto:0` where a GPU serves, as it has the models in its memory
}


class Band(NamedTuple):
    """Magnitudes (their bits) that are kept of a tensor; of equals the first counts as larger."""

    least: int
    end: int  # elements of the least magnitude are kept before this index
    most: int
    begin: int  # elements of the largest magnitude are kept from this index on


class Operand(NamedTuple):
    """One model as an operand of `combine`."""

    tuned: NDArray[Any]  # stored elements, as carriers of their type
    # Key words and the threshold's two parts; None keeps everything.
    mask: tuple[int, int, int, int] | None
    band: Band | None  # the magnitudes that are kept; None keeps everything
    weight: np.float32
    share: float  # the model's addition to the divisor of its side, when signs are elected


class OnGpu:
    """Elements in the memory of a GPU, in place of an array: nothing here can read them."""

    def __init__(self, gpu: int, address: int, dtype: np.dtype[Any], size: int) -> None:
        self.gpu, self.address, self.dtype, self.size = gpu, address, dtype, size
        self.itemsize, self.nbytes = dtype.itemsize, size * dtype.itemsize

    def __getitem__(self, part: slice) -> OnGpu:
        first, end, _ = part.indices(self.size)
        return OnGpu(self.gpu, self.address + first * self.itemsize, self.dtype, end - first)


class ChunkJob(NamedTuple):
    """Chunks of one tensor that follow each other, to be merged by `merge`."""

    base: NDArray[Any]
    operands: Sequence[Operand]  # all stored alike
    start: int
    elects: bool
    scale: np.float32
    out: NDArray[Any]
    known: Sequence[bool]  # of base and models: whether their digests are not wanted
    place: int | None = None  # the address on the GPU that the result goes to, rather than to `out`
    there: Sequence[int] = ()  # the addresses of base and models on the GPU, if it has them

    @property
    def inputs(self) -> list[NDArray[Any]]:
        """The elements of the base, then of each model."""
        return [self.base, *(operand.tuned for operand in self.operands)]


class Done(NamedTuple):
    """The figures and digests of a job that was done."""

    figures: NDArray[np.int64]  # as those of `combine`
    peak: int  # the bits of the largest magnitude before rounding
    digests: list[list[str]]  # of every chunk of base, models and result; none where not wanted


class MatrixGpus(NamedTuple):
    """The GPUs that compute whole matrices."""

    title: str  # as their maker calls them, such as NVIDIA H200
    free_bytes: int  # of all, for workers that are spread evenly


def device_of(name: str) -> Device:
    """Return the device of a name, which may have the number of a GPU: `cuda:1`."""
    kind, has_number, _ = name.partition(":")
    return DEVICES["cuda" if has_number else kind]


def takes_matrices(name: str) -> bool:
    """Tell whether whole matrices go to the GPU too, where bytes differ: only if it was named."""
    return name.partition(":")[0] == "cuda"


def check_device(name: str) -> str:
    """Refuse a name that no device has."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not (kind in ("cuda", "auto") and number.isdecimal())):
        hint = did_you_mean(kind, DEVICES)
        known = ", ".join(DEVICES)
        raise RecipeError(f"device {name!r}: not known{hint}; use one of {known}, or cuda:NUMBER")
    return name


def check_is_there(name: str) -> None:
    """Refuse a GPU that this machine does not have, or cannot use."""
    if device_of(name).is_gpu:
        from dare.kernels import cuda

        cuda.find_gpus(name)


def find_matrix_gpus(name: str) -> MatrixGpus | None:
    """Return the GPUs that compute whole matrices, if any do."""
    if not takes_matrices(name):
        return None
    from dare.kernels import cuda

    return cuda.find_matrix_gpus(name)


def keep_on_gpu(name: str, arrays: Iterable[NDArray[Any]]) -> tuple[str, Any]:
    """Copy arrays to a GPU, if the name is one's, or `auto` and they take half of what is free.

    Returns the device that has them, and what keeps them there.
    """
    if name != "auto" and not device_of(name).is_gpu:
        return name, None
    from dare.kernels import cuda

    try:
        is_auto = name == "auto"
        kept = cuda.Residents("cuda" if is_auto else name, arrays, 0.5 if is_auto else 1)
    except DareError:
        if name != "auto":
            raise
        return "cpu", None
    return f"{name.partition(':')[0]}:{kept.number}", kept


def load(name: str) -> Any:
    """Return a device's kernels; `reference` serves on machines that there is no library for.

    A GPU's are for one worker.
    """
    device = device_of(check_device(name))
    module = "reference" if _has_no_library(device) else device.module
    found = importlib.import_module(f"dare.kernels.{module}")
    return found.Kernels(name) if device.is_gpu else found


def matrix_gpu(kernels: Any) -> Any:
    """Return the worker's part of a GPU that takes whole matrices; None if the processor does."""
    return getattr(kernels, "matrices", None)


def call_with_matrices(gpu: Any, function: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    """Call a function of matrices on a GPU, or here if there is none."""
    return gpu.call(function, *given, **settings) if gpu else function(*given, **settings)


def device_notices(name: str) -> Iterator[Notice]:
    """Say so where `load` has to take `reference` instead."""
    if _has_no_library(device_of(name)):
        yield notice("no_library", machine=f"{platform.system()} {platform.machine()}")


def _has_no_library(device: Device) -> bool:
    if device.module == "reference":
        return False
    from dare.kernels import core

    return not core.is_built()
