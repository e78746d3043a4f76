"""What systems differ in; `test_without_posix` does everyday work with all of it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dare.tensors.files import LocalFile, OutputFile, open_ordinary


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
