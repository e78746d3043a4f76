"""Machine code that is kept: Numba is not needed again, and no other code is ever believed."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dare.kernels import kept, native, reference

RAW = np.arange(16256, 16256 + 1000, dtype=np.uint16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that are compiled, one for each time."""
    names = []
    compile_kernel = native.Kernel._compile

    def noted(kernel, types):
        names.append(kernel._name)
        return compile_kernel(kernel, types)

    monkeypatch.setattr(native.Kernel, "_compile", noted)
    return names


def decoded(raw=RAW):
    out = np.zeros(raw.shape, np.float32)
    native.Kernel("decode")(raw, out)
    return out


def expected(raw=RAW):
    out = np.zeros(raw.shape, np.float32)
    reference.decode(raw, out)
    return out


def test_another_process_needs_no_numba(folder):
    code = """
import sys
import numpy as np
from dare.kernels import native
lanes = np.zeros(8192, np.uint8)
print(native.draw(lanes, 8192, 0, 1, 2, 25, 3), lanes.sum(), "numba" in sys.modules)
"""
    lines = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    first, second = (line.stdout.split() for line in lines)
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == ("True", "False")


MERGES = """
import sys
import numpy as np
import dare
base = {"w": np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)}
models = [{"w": base["w"] + 0.01 * np.roll(base["w"], n)} for n in (1, 5)]
for method in ("dare+linear", "dare+ties", "trim+ties", "della+linear", "breadcrumbs+sum"):
    dare.merge_arrays(base, models, method=method, verbose=False)
print("numba" in sys.modules)
"""


def test_merges_need_no_numba():
    for _ in range(2):  # the first may have something to compile
        found = subprocess.run(
            [sys.executable, "-c", MERGES], capture_output=True, text=True, check=False
        )
    assert found.stdout == "False\n", found.stderr


def test_what_is_spoilt_is_compiled_again(folder, compiled):
    assert (decoded() == expected()).all()
    (file,) = folder.glob("decode-*.kernel")
    whole = file.read_bytes()
    for spoilt in (b"", whole[:-1], whole[:100] + b"?" + whole[101:]):
        file.write_bytes(spoilt)
        assert (decoded() == expected()).all()
    assert len(compiled) == 4
    decoded()
    assert len(compiled) == 4


def test_another_text_of_the_kernels_is_compiled_again(folder, compiled, monkeypatch):
    decoded()
    monkeypatch.setattr(kept, "_source", lambda: "another")
    decoded()
    assert compiled == ["decode", "decode"]


def test_each_kind_of_array_has_its_own(folder, compiled):
    unaligned = np.zeros(2001, np.uint8)[1:].view(np.uint16)
    unaligned[:] = RAW
    constant = RAW.copy()
    constant.flags.writeable = False
    for raw in (RAW, RAW[::3], unaligned, constant, RAW[:0]):
        assert (decoded(raw) == expected(raw)).all()
    assert len(compiled) == 3  # constant and empty arrays need none of their own


def test_the_byte_order_must_be_the_machine_s(folder):
    with pytest.raises(TypeError, match="byte order of the machine"):
        decoded(RAW.astype(">u2"))


def test_threads_compile_once(folder, compiled):
    kernel, out = native.Kernel("decode"), [np.zeros(RAW.shape, np.float32) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda room: kernel(RAW, room), out))
    assert compiled == ["decode"]
    assert all((room == expected()).all() for room in out)


def test_what_cannot_be_kept_is_run_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert (decoded() == expected()).all()


def test_numba_runs_what_cannot_be_kept_and_that_is_known_the_next_time(folder, monkeypatch):
    from dare.kernels import compiling

    monkeypatch.setattr(compiling, "_foreign_functions", lambda _module: {"foreign"})
    assert (decoded() == expected()).all()
    assert [*folder.glob("*.kernel")]
    monkeypatch.setattr(compiling, "compile_kernel", None)
    assert (decoded() == expected()).all()


def test_there_is_no_other_kernel():
    with pytest.raises(AttributeError, match="no kernel 'decoed'"):
        _ = native.decoed
