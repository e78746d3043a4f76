"""The headers that a GPU's kernels are made of, as a compiler for processors understands them.

What a GPU itself computes is asked by `make test-gpu`.
"""

import ctypes
import functools
import shutil
import subprocess

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from dare.kernels import Band, ChunkJob, Operand, core, cuda
from dare.tensors.chunks import CHUNK, chunk_count
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.mask import keep_threshold, mask_key

COMPILER = shutil.which("g++") or shutil.which("clang++")
THRESHOLD = int(np.float32(0.002).view(np.int32))
INFINITY = 0x7F800000
SEVERAL_BLOCKS = 2 * cuda.BLOCK_SIZE + 77


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile kernels as functions."""
    folder = tmp_path_factory.mktemp("kernels")

    @functools.cache
    def function(shape):
        if COMPILER is None:
            pytest.skip("needs a compiler of C++")
        file = folder / "-".join(map(str, shape))
        file.with_suffix(".cc").write_text(cuda.source())
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
        macros = [f"-D{name}={value}" for name, value in shape.macros]
        files = [file.with_suffix(".cc"), "-o", file.with_suffix(".so")]
        subprocess.run([COMPILER, *flags, *macros, *files], check=True)
        return ctypes.CDLL(str(file.with_suffix(".so"))).dare_merge_parts_any

    return function


def any_weights(rng, name, size):
    """Weights as fine-tunes have them, and some of every other kind."""
    dtype = STORAGE_TYPES[name]
    raw = np.empty(size, dtype.carrier)
    values = rng.normal(0, 0.01, size).astype(np.float32)
    values[rng.random(size) < 0.1] = 0.0
    core.encode(values, raw)
    odd = rng.random(size) < 0.001
    raw[odd] = rng.integers(0, 256, raw[odd].nbytes, np.uint8).view(raw.dtype)
    return raw


def job_of(types, size, *, masks=True, bands=False, elects=False, models=3, start=0, seed=0):
    rng = np.random.default_rng(seed)
    base, out = any_weights(rng, types[0], size), np.empty(size, STORAGE_TYPES[types[2]].carrier)
    operands = []
    for number in range(models):
        tuned = any_weights(rng, types[1], size)
        if types[0] == types[1]:
            same = rng.random(size) < 0.2
            tuned[same] = base[same]
        parts = divmod(keep_threshold([0.3, 0.001, 0.999][number % 3]), 1 << 32)
        mask = (*mask_key(number, "a"), *parts)
        middle, least = int(start + size // 2), int(np.float32(0.004).view(np.int32))
        band = Band(least, middle, int(np.float32(0.03).view(np.int32)), middle // 2)
        has_mask, has_band = masks and number != 1, bands and number != 2
        how = (mask if has_mask else None, band if has_band else None)
        operands.append(Operand(tuned, *how, np.float32(0.5 - number), 0.25 + number))
    known = [True] * (1 + models)
    return ChunkJob(base, operands, start, elects, np.float32(0.75), out, known)


SHAPES = {
    "dare": {},
    "ties": {"masks": False, "elects": True},
    "trim": {"masks": False, "bands": True, "elects": True},
    "everything": {"bands": True, "elects": True},
    "average": {"masks": False},
    "one": {"models": 1},
    "seven": {"models": 7},
}
KINDS = {
    "bf16": ("BF16", "BF16", "BF16"),
    "f32": ("F32", "F32", "F32"),
    "f64": ("F64", "F64", "F64"),
    "f16 on f32": ("F32", "F16", "BF16"),
    "fp8": ("BF16", "F8_E4M3", "F8_E5M2"),
    "f16": ("F16", "F16", "F16"),
}
CASES = [("bf16", shape) for shape in SHAPES] + [
    (kinds, "everything") for kinds in KINDS if kinds != "bf16"
]


def figures_of(done):
    """Figures and peaks; of a NaN only that it is one, for machines choose its payload."""
    figures = done.figures.copy()
    figures[..., 0] = np.minimum(figures[..., 0], INFINITY + 1)
    return figures.tolist(), min(done.peak, INFINITY + 1)


@pytest.mark.parametrize(("kinds", "shape"), CASES, ids=lambda case: case)
def test_kernels_have_the_bytes_of_the_library(compiled, kinds, shape):
    """Blocks of all kinds: whole, short, of several chunks, at odd addresses, with NaN."""
    sizes = [SEVERAL_BLOCKS, 1, CHUNK + 130 if shape == "dare" else 200]
    starts = [0, 128 * 5, 3 * CHUNK]
    jobs = [
        job_of(KINDS[kinds], size, start=start, seed=number, **SHAPES[shape])
        for number, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    expected = core.merge(jobs, THRESHOLD)
    wanted = [job.out.copy() for job in jobs]
    for job in jobs:
        job.out.view(np.uint8)[:] = 0xAA
    arrays = [[job.base, *(each.tuned for each in job.operands), job.out] for job in jobs]
    addresses = [[array.ctypes.data for array in each] for each in arrays]
    draft = cuda.make_tables(jobs, addresses, 0)
    room = np.zeros(draft.memory.size, np.uint8)
    tables = cuda.make_tables(jobs, addresses, room.ctypes.data)
    room[:] = tables.memory
    shape_of_jobs = cuda.Shape.of(jobs[0])
    numbers = map(ctypes.c_int64, (len(jobs), THRESHOLD, CHUNK, tables.blocks))
    compiled(shape_of_jobs)(ctypes.c_void_p(room.ctypes.data), *numbers)
    found = cuda.read_tables(jobs, tables._replace(memory=room))
    for job, out, done, (figures, peak) in zip(jobs, wanted, expected, found, strict=True):
        assert_array_equal(job.out, out)
        assert figures_of(done._replace(figures=figures, peak=peak)) == figures_of(done)
        assert figures.shape == (chunk_count(job.base.size), len(job.operands), 4)
