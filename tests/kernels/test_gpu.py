"""The kernels of GPUs, with this machine in a GPU's place; `make test-gpu` asks a real one."""

import gc
import sys

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import cuda_on_host
from cuda_on_host import last_gpu
from dare.errors import DareError, RecipeError
from dare.kernels import (
    MOST_ON_GPU,
    Band,
    ChunkJob,
    Operand,
    check_device,
    check_is_there,
    core,
    cuda,
    gpu_batches,
)
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.mask import keep_threshold, mask_key

pytestmark = pytest.mark.usefixtures("gpu_on_host")

THRESHOLD = int(np.float32(0.002).view(np.int32))
INFINITY = 0x7F800000
SEVERAL_BLOCKS = 2 * gpu_batches.BLOCK_SIZE + 77


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
    known = [number == 1 for number in range(1 + models)]
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
def test_kernels_have_the_bytes_of_the_library(kinds, shape):
    """Blocks of all kinds: whole, short, of several chunks, at odd addresses, with NaN."""
    sizes = [SEVERAL_BLOCKS, 0, 1, CHUNK + 130 if shape == "dare" else 200]
    starts = [0, 0, 128 * 5, 3 * CHUNK]
    jobs = [
        job_of(KINDS[kinds], size, start=start, seed=number, **SHAPES[shape])
        for number, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    expected = core.merge(jobs, THRESHOLD)
    wanted = [job.out.copy() for job in jobs]
    for job in jobs:
        job.out.view(np.uint8)[:] = 0xAA
    found = cuda.Kernels("cuda").merge(jobs, THRESHOLD)
    for job, out, ours, theirs in zip(jobs, wanted, found, expected, strict=True):
        assert_array_equal(job.out, out)
        assert figures_of(ours) == figures_of(theirs)
        assert ours.digests == theirs.digests


def test_what_a_gpu_holds_is_not_sent_again(monkeypatch):
    jobs = [job_of(KINDS["bf16"], CHUNK + 300, seed=seed) for seed in range(2)]
    expected = [(done.digests, figures_of(done)) for done in core.merge(jobs, THRESHOLD)]
    held = cuda.Residents(last_gpu(), [raw for job in jobs for raw in job.inputs])
    kernels, sent = cuda.Kernels(last_gpu()), []
    copy = cuda._Worker.copy
    monkeypatch.setattr(cuda._Worker, "copy", lambda *a: (sent.append(a[-1]), copy(*a))[1])
    there = [job._replace(there=[held.copy_of(raw).address for raw in job.inputs]) for job in jobs]
    found = kernels.merge(there, THRESHOLD)
    assert [(done.digests, figures_of(done)) for done in found] == expected
    assert sum(sent) < 1.1 * sum(job.out.nbytes for job in jobs)  # results and tables
    sent.clear()
    kernels.merge(jobs, THRESHOLD)
    assert sum(sent) > sum(raw.nbytes for job in jobs for raw in job.inputs)


def test_results_come_straight_to_memory_that_the_gpu_reaches(monkeypatch):
    kernels, job = cuda.Kernels(last_gpu()), job_of(KINDS["bf16"], 5000)
    (expected,) = core.merge([job], THRESHOLD)
    wanted, room = job.out.copy(), kernels.pinned(job.out.nbytes + 64)
    pinned = job._replace(out=room[64:].view(job.out.dtype))
    job.out[:] = 0
    asked, pinned_memory = [], cuda._Worker.pinned
    monkeypatch.setattr(
        cuda._Worker, "pinned", lambda *a: (asked.append(a[1]), pinned_memory(*a))[1]
    )
    assert kernels.merge([pinned], THRESHOLD)[0].digests == expected.digests
    assert_array_equal(pinned.out, wanted)
    assert sum(asked) < job.out.nbytes  # tables only


def test_memory_that_nobody_uses_is_given_out_again():
    gc.collect()  # what failed merges have left
    kernels = cuda.Kernels("cuda")
    first = kernels.pinned(5000)
    part, address = first[1000:], first.ctypes.data
    del first
    second = kernels.pinned(5000)
    assert second.ctypes.data != address  # a part of it is still used
    del part
    again = kernels.pinned(4000)
    assert again.ctypes.data == address
    del again
    kept = [second, kernels.pinned(90_000)]
    assert sorted(buffer.size for buffer in cuda._pinned) == [5000, 90_000]
    del kept


def test_more_models_than_a_kernel_takes_are_merged_here():
    jobs = [job_of(KINDS["bf16"], 500, models=MOST_ON_GPU + 1)]
    expected = core.merge(jobs, THRESHOLD)[0].digests
    assert cuda.Kernels("cuda").merge(jobs, THRESHOLD)[0].digests == expected


@cuda_on_host.on_host_only
def test_too_little_memory_is_said_with_a_remedy(monkeypatch):
    kernels = cuda.Kernels("cuda")
    monkeypatch.setattr(cuda_on_host.Device, "most_bytes", 1000)
    with pytest.raises(DareError, match=r"OUT_OF_MEMORY.*max_memory"):
        kernels.merge([job_of(KINDS["bf16"], 5000)], THRESHOLD)


@pytest.mark.parametrize("name", ["cuda:7", "cuda:-1", "gpu", "cpu:0", "cuda:"])
def test_a_gpu_that_is_not_there_is_refused(name):
    with pytest.raises(RecipeError, match=f"{name}.*cpu"):
        check_device(name) and check_is_there(name)


def test_without_the_extra_the_remedy_is_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(RecipeError, match=r"pip install .*gpu"):
        check_is_there("cuda")


@pytest.mark.parametrize("kinds", ["bf16", "f32", "f64", "fp8"])
def test_results_stay_on_a_gpu_and_are_digested_there(kinds):
    """Pieces of whole and of broken blocks, and those that the processor digests, or has made."""
    sizes = (2 * CHUNK + 512, 513, 1024, 2 * CHUNK + 30, 33, 700)
    jobs = [job_of(KINDS[kinds], size, seed=size) for size in sizes]
    jobs.append(job_of(KINDS[kinds], 400, models=MOST_ON_GPU + 1))
    expected = core.merge(jobs, THRESHOLD)
    wanted = [job.out.copy() for job in jobs]
    kernels = cuda.Kernels(last_gpu())
    rooms = [kernels._worker.allocate(job.out.nbytes + 4) for job in jobs]
    odd = [4 * (size == 700) for size in (*sizes, 0)]
    places = [int(room.handle) + apart for room, apart in zip(rooms, odd, strict=True)]
    found = kernels.merge(
        [job._replace(place=place) for job, place in zip(jobs, places, strict=True)], THRESHOLD
    )
    for place, out, ours, theirs in zip(places, wanted, found, expected, strict=True):
        made = np.empty_like(out)
        kernels._worker.copy(made.ctypes.data, place, made.nbytes)
        kernels._worker.stream.sync()
        assert_array_equal(made, out)
        assert ours.digests == theirs.digests
        assert figures_of(ours) == figures_of(theirs)
