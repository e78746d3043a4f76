"""`cuda.core` as far as kernels use it, with this machine in the place of GPUs.

Memory is the machine's, streams do all at once, and a compiler of C++ makes the kernels. So all but
the driver runs in tests on machines that have no GPU.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dare.kernels import cuda

COMPILER = shutil.which("g++") or shutil.which("clang++")
GPUS = 2
AT_WORK = threading.Lock()  # numbers of blocks, and what their threads share, are the library's
OF_DIGESTS = ("sum_blocks", "digest_sums")
IS_REAL = "DARE_TEST_GPU" in os.environ
on_host_only = pytest.mark.skipif(IS_REAL, reason="what it asks cannot be had of a real GPU")


def last_gpu():
    """The name of the last of the GPUs."""
    return f"cuda:{cuda.find_gpus('cuda')[-1]}"


class Buffer:
    def __init__(self, handle, size, memory=None):
        self.handle, self.size, self._memory = handle, size, memory

    @classmethod
    def of(cls, size):
        memory = np.full(size, 0xAA, np.uint8)
        return cls(memory.ctypes.data, size, memory)

    from_handle = classmethod(lambda cls, handle, size: cls(handle, size))

    def copy_from(self, source, *, stream):
        assert stream is not None
        assert source.size == self.size
        ctypes.memmove(self.handle, source.handle, self.size)

    def close(self):
        self._memory = None


class Stream:
    def sync(self):
        pass


class Device:
    most_bytes = 1 << 30

    def __init__(self, device_id=0):
        self.device_id, self.arch = device_id, "90"

    @classmethod
    def get_all_devices(cls):
        return [cls(number) for number in range(GPUS)]

    def set_current(self):
        pass

    sync = set_current

    def create_stream(self):
        return Stream()

    def allocate(self, size, *, stream):
        assert stream is not None
        if size > self.most_bytes:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: not enough memory")
        return Buffer.of(size)


class driver:  # noqa: N801
    @staticmethod
    def cuMemGetInfo():  # noqa: N802
        return 0, Device.most_bytes, Device.most_bytes


class LegacyPinnedMemoryResource:
    allocate = staticmethod(Buffer.of)


class ProgramOptions:
    def __init__(self, **options):
        assert options["fma"] is options["ftz"] is False
        self.macros = options["define_macro"]
        assert self.macros != []


class Program:
    def __init__(self, code, kind, options):
        assert kind == "c++"
        self._code, self._macros = code, tuple(options.macros or ())

    def compile(self, target, *, cache):
        assert target == "cubin"
        return Compiled(cache.folder, self._code, self._macros)


class Compiled:
    def __init__(self, folder, code, macros):
        self._library = compiled(folder, code, macros)

    def get_kernel(self, name):
        return self._library, name


# Threads run one after the other; a merge's need each other's results, and are one a block.
BUILT_IN = """
struct Index { unsigned x; };
extern "C" { Index blockIdx, gridDim, threadIdx; }
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __builtin_assume(what)
#define __ffsll __builtin_ffsll
#define __syncthreads()
#define __syncthreads_or(value) (value)
#define __syncwarp()
#define __threadfence()
#define __shfl_xor_sync(warp, value, apart) (value)
template <typename Number> Number atomicAdd(Number *sum, unsigned value) {
  Number before = *sum;
  *sum += value;
  return before;
}
template <typename Number> void atomicMax(Number *most, Number value) {
  if (*most < value) *most = value;
}
"""
SUM_BLOCKS = """
extern "C" void sum_blocks(const Piece *pieces, i64 count, i64 blocks, u64 *sums) {
  i64 number = ((i64)blockIdx.x * THREADS + threadIdx.x) / WARP, block = number % blocks;
  if (number >= count * blocks || threadIdx.x % WARP) return;
  Piece piece = pieces[number / blocks];
  u64 *own = sums_of(sums, number / blocks, blocks, block);
  for (int lane = 0; lane < LANES_OF_STRIPE; lane++) own[lane] = 0;
  if (block >= mixed_blocks(piece.size)) return;
  add_stripes(own, piece.data + block * BLOCK, (const u8 *)SECRET, STRIPES);
}
"""


@functools.cache
def compiled(folder, code, macros):
    if COMPILER is None:
        pytest.skip("needs a compiler of C++")
    file = Path(folder, "-".join(value for _, value in macros) or "digests")
    own = ("#define THREADS 1\n", "") if macros else ("", SUM_BLOCKS)
    file.with_suffix(".cc").write_text(BUILT_IN + own[0] + code + own[1])
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    defined = [f"-D{name}={value}" for name, value in macros]
    files = [file.with_suffix(".cc"), "-o", file.with_suffix(".so")]
    subprocess.run([COMPILER, *flags, *defined, *files], check=True)
    return ctypes.CDLL(str(file.with_suffix(".so")))


class LaunchConfig:
    def __init__(self, *, grid, block):
        assert block == 256
        self.grid, self.block = grid, block


def launch(_stream, config, kernel, *arguments):
    library, name = kernel
    run, given = getattr(library, name), [*map(ctypes.c_int64, arguments)]
    block, thread, blocks = (
        ctypes.c_uint.in_dll(library, index) for index in ("blockIdx", "threadIdx", "gridDim")
    )
    with AT_WORK:
        blocks.value = config.grid
        for block.value in range(config.grid):
            for thread.value in range(config.block if name in OF_DIGESTS else 1):
                run(*given)


class FileStreamProgramCache:
    folder = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(scope="session")
def gpu_on_host(tmp_path_factory):
    """Have the machine play two GPUs, unless it has a real one that is to be tested."""
    if IS_REAL:
        yield
        return
    FileStreamProgramCache.folder = str(tmp_path_factory.mktemp("kernels"))
    core, utils = ModuleType("cuda.core"), ModuleType("cuda.core.utils")
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    for each in (Buffer, Device, LegacyPinnedMemoryResource, LaunchConfig, ProgramOptions, Program):
        setattr(core, each.__name__, each)
    core.launch, utils.FileStreamProgramCache = launch, FileStreamProgramCache
    with pytest.MonkeyPatch.context() as patch:
        for module in (ModuleType("cuda"), core, utils, bindings):
            patch.setitem(sys.modules, module.__name__, module)
        yield
