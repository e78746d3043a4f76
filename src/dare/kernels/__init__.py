"""The arithmetic, on chunks of one tensor.

`reference` (NumPy) defines every function; `core` has the same functions with the same bits, fast:
the library that is built from `src/core`. `load` returns a module with these functions. `DEVICES`
tells plans what a backend takes, before there is one.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import Notice, notice
from dare.errors import RecipeError, did_you_mean
from dare.tensors.chunks import CHUNK
from dare.tensors.files import ALIGNMENT

# Arrays of lanes have a multiple of this length, which kernels work on at a time, in caches.
LANES_MULTIPLE = 8192
# Distance between rows of sums: not a power of two, or they would share cache sets.
ROW = LANES_MULTIPLE + 16
STAGE_FLOATS = 8  # as an election's four sums and their balance, or four arrays of float64
GROUP = 4  # models whose values a survey of pairs holds, beside those of one more


@dataclass(frozen=True)
class Device:
    """A backend as plans see it: its kernels, its batches, and the memory it takes."""

    module: str
    chunks_at_once: int = 4  # of each input, in a batch, if memory allows
    chunks_held: int = 20  # of all inputs and the output; with more models, fewer of each
    fuses: bool = True  # whether one kernel can take a chunk through a chain of lazy stages

    def buffer_bytes(
        self, chunks: int, models: int, *, width: int, is_fused: bool, held: int, has_deltas: bool
    ) -> int:
        """Return the bytes of one worker's buffers; an element has `width` bytes, as it is stored.

        What is fused needs no values of single models, anything else those of some `held` at once.
        """
        floats, lanes = 2, 2  # base and merged delta; a mask and one that keeps everything
        if not is_fused:  # values, a stage's own arrays, zeros; what is left, a stage's own flags
            floats += held + STAGE_FLOATS + 1 + has_deltas
            lanes += 2 * held
        stored, computed = (2 + models) * width, 4 * floats + lanes
        together = chunks if is_fused else 1
        return CHUNK * (chunks * stored + together * computed) + ALIGNMENT


DEVICES = {"cpu": Device("core"), "reference": Device("reference")}


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


class ChunkJob(NamedTuple):
    """Chunks of one tensor that follow each other, to be merged by `merge`."""

    base: NDArray[Any]
    operands: Sequence[Operand]  # all stored alike
    start: int
    elects: bool
    scale: np.float32
    out: NDArray[Any]
    known: Sequence[bool]  # of base and models: whether their digests are not wanted


class Done(NamedTuple):
    """The figures and digests of a job that was done."""

    figures: NDArray[np.int64]  # as those of `combine`
    peak: int  # the bits of the largest magnitude before rounding
    digests: list[list[str]]  # of every chunk of base, models and result; none where not wanted


def check_backend(backend: str) -> str:
    """Refuse a name that no backend has."""
    if backend not in DEVICES:
        hint = did_you_mean(backend, DEVICES)
        raise RecipeError(f"backend {backend!r}: not known{hint}; use one of {', '.join(DEVICES)}")
    return backend


def load(backend: str) -> Any:
    """Import a backend's kernels; `reference` serves on machines that there is no library for."""
    name = "reference" if _has_no_library(backend) else DEVICES[check_backend(backend)].module
    return importlib.import_module(f"dare.kernels.{name}")


def backend_notices(backend: str) -> Iterator[Notice]:
    """Say so where `load` has to take `reference` instead."""
    if _has_no_library(backend):
        yield notice("no_library", machine=f"{platform.system()} {platform.machine()}")


def _has_no_library(backend: str) -> bool:
    if DEVICES[check_backend(backend)].module != "core":
        return False
    from dare.kernels import core

    return not core.is_built()
