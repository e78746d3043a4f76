"""What systems differ in; `test_without_posix` does everyday work with all of it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dare.tensors.files import LocalFile, OutputFile, open_ordinary
from dare.tensors.system import keep_freed_memory, system_call


@pytest.fixture
def without_positions(monkeypatch):
    """A system whose files are read and written at one position, and threads that interfere."""
    for name in ("preadv", "pread", "pwrite", "posix_fadvise", "O_DIRECT"):
        monkeypatch.delattr(os, name, raising=False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("without_positions")
def test_threads_that_share_a_file_read_and_write_what_they_mean(tmp_path):
    size, count = 4096, 200
    content = np.random.default_rng(0).integers(0, 256, size * count, np.uint8)
    path, written = tmp_path / "read", OutputFile(tmp_path / "written", content.size)
    path.write_bytes(content)
    read = LocalFile(open_ordinary(path))

    def copy(number: int) -> None:
        into = np.empty(size, np.uint8)
        assert read.read_at(into.data, number * size) == size
        written.write(into, number * size)
        assert written.read(number * size, size) == into.tobytes()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, range(count)))
    read.close()
    written.close()
    assert (tmp_path / "written").read_bytes() == content.tobytes()


@pytest.mark.skipif(system_call("mallopt") is None, reason="needs glibc")
def test_arrays_are_made_in_memory_that_was_freed():
    resource = pytest.importorskip("resource")
    keep_freed_memory()
    faults = []
    for _ in range(21):
        arrays = [np.ones(1 << 21, np.uint8) for _ in range(8)]
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        del arrays
    assert faults[-1] - faults[0] < 8 * (1 << 21) // resource.getpagesize()  # once, not 20 times
