"""Machine code that is kept: Numba is not needed again, and no other code is ever believed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dare.kernels import cpu, native, reference
from dare.tensors import files

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
        names.append(kernel.name)
        return compile_kernel(kernel, types)

    monkeypatch.setattr(native.Kernel, "_compile", noted)
    return names


def decoder():
    """The kernel, with no machine code in memory."""
    return native.Kernel("decode", "dare.kernels.cpu", native.SOURCES)


def decoded(raw=RAW):
    out = np.zeros(raw.shape, np.float32)
    decoder()(raw, out)
    return out


def expected(raw=RAW):
    out = np.zeros(raw.shape, np.float32)
    reference.decode(raw, out)
    return out


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
    monkeypatch.setattr(native, "_digest_of", lambda _sources: "another")
    decoded()
    assert compiled == ["decode", "decode"]


def test_kernels_take_arrays_however_they_lie(folder, compiled):
    unaligned = np.zeros(2001, np.uint8)[1:].view(np.uint16)
    unaligned[:] = RAW
    constant = RAW.copy()
    constant.flags.writeable = False
    for raw in (RAW, RAW[::3], unaligned, constant, RAW[:0]):
        assert (decoded(raw) == expected(raw)).all()
    assert compiled == ["decode"]  # all are run as plain arrays
    assert len([*folder.glob("*.kernel")]) == 1


def test_results_come_back_into_arrays_that_do_not_lie_together(folder):
    out = np.zeros(2 * RAW.size, np.float32)
    decoder()(RAW, out[::2])
    assert (out[::2] == expected()).all()
    assert not out[1::2].any()


def test_the_byte_order_must_be_the_machine_s(folder):
    with pytest.raises(TypeError, match=">u2"):
        decoded(RAW.astype(">u2"))


def test_threads_compile_once(folder, compiled):
    kernel, out = decoder(), [np.zeros(RAW.shape, np.float32) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda room: kernel(RAW, room), out))
    assert compiled == ["decode"]
    assert all((room == expected()).all() for room in out)


def test_where_nothing_can_be_kept_kernels_are_compiled_in_memory(tmp_path, monkeypatch, compiled):
    (tmp_path / "file").touch()
    monkeypatch.setattr(native, "_folders", lambda: [tmp_path / "file" / "below"])
    for _ in range(2):
        assert (decoded() == expected()).all()
    assert compiled == ["decode", "decode"]


def test_a_user_without_a_home_has_a_folder_for_temporary_files(monkeypatch):
    def homeless():
        raise RuntimeError

    monkeypatch.setattr(files.Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_folder() == files.temporary_folder()


@pytest.mark.parametrize(
    "broken",
    [
        lambda raw, out: out[:] + np.empty(3, np.float32).sum(),
        lambda raw, out: out.reshape((3, raw.size)),
    ],
    ids=["makes an array", "raises an error"],
)
def test_a_kernel_that_needs_numba_s_runtime_is_refused(folder, monkeypatch, broken):
    monkeypatch.setattr(cpu, "decode", cpu.kernel(broken))
    with pytest.raises(TypeError, match="decode"):
        decoded()
    assert not [*folder.iterdir()]


def test_there_is_no_other_kernel():
    with pytest.raises(AttributeError, match="no kernel 'decoed'"):
        _ = native.decoed


# ---------------------------------------------------------------- who can have written it

PLANT = """
import numpy as np
from numba import njit
from dare.kernels import cpu, native
def sevens(raw, out):
    for place in range(out.size):
        out[place] = 7
cpu.decode = njit(sevens)
native.KERNELS.decode(np.zeros(1000, np.uint16), np.zeros(1000, np.float32))
"""
DECODE = """
import numpy as np
from dare.kernels import native
out = np.zeros(1000, np.float32)
native.KERNELS.decode(np.full(1000, 16256, np.uint16), out)
print(set(out.tolist()))
"""
PLANTED, RIGHT = "{7.0}", "{1.0}"
OTHER_USER = 54321
HAS_OWNERS = hasattr(os, "geteuid")


def python(code, **environment):
    """Run code in a process of its own; return what it prints."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, "HOME": os.environ.get("HOME", ""), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A folder with a kernel that is not ours."""
    place = tmp_path_factory.mktemp("planted")
    place.chmod(0o700)
    python(PLANT, NUMBA_CACHE_DIR=str(place))
    assert python(DECODE, NUMBA_CACHE_DIR=str(place)) == PLANTED  # as long as it is this user's
    return place


def lend(place, target):
    shutil.copytree(place, target)
    (file,) = target.glob("decode-*.kernel")
    return file


needs_owners = pytest.mark.skipif(not HAS_OWNERS, reason="Windows has no owners and modes")
needs_root = pytest.mark.skipif(
    not HAS_OWNERS or os.geteuid() != 0, reason="only root can give files away"
)


@needs_owners
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder, _: folder.chmod(0o770), id="a folder that a group can write"),
        pytest.param(lambda folder, _: folder.chmod(0o1777), id="a sticky folder itself"),
        pytest.param(lambda folder, _: folder.parent.chmod(0o707), id="a folder above it"),
        pytest.param(lambda _, file: file.chmod(0o602), id="a file that all can write"),
        pytest.param(
            lambda _, file: (file.rename(moved := file.with_suffix("")), file.symlink_to(moved)),
            id="a link",
        ),
        pytest.param(
            lambda _, file: os.chown(file, OTHER_USER, -1), id="another's file", marks=needs_root
        ),
        pytest.param(
            lambda folder, _: os.chown(folder, OTHER_USER, -1),
            id="another's folder",
            marks=needs_root,
        ),
        pytest.param(
            lambda folder, _: os.chown(folder.parent, OTHER_USER, -1),
            id="another's folder above",
            marks=needs_root,
        ),
    ],
)
def test_code_that_others_can_have_written_is_not_run(planted, tmp_path, change):
    folder = tmp_path / "above" / "cache"
    file = lend(planted, folder)
    change(folder, file)
    assert python(DECODE, NUMBA_CACHE_DIR=str(folder)) == RIGHT


@needs_owners
def test_a_link_to_a_folder_counts_as_that_folder(planted, tmp_path):
    lend(planted, tmp_path / "own")
    (tmp_path / "lax").mkdir()
    (tmp_path / "lax").chmod(0o777)
    for link in (tmp_path / "link", tmp_path / "lax" / "link"):
        link.symlink_to(tmp_path / "own")
    assert python(DECODE, NUMBA_CACHE_DIR=str(tmp_path / "link")) == PLANTED
    assert python(DECODE, NUMBA_CACHE_DIR=str(tmp_path / "lax" / "link")) == RIGHT


@needs_owners
def test_others_may_write_in_a_sticky_folder_above(planted, tmp_path):
    sticky = tmp_path / "sticky"
    lend(planted, sticky / "cache")
    sticky.chmod(0o1777)
    assert python(DECODE, NUMBA_CACHE_DIR=str(sticky / "cache")) == PLANTED


@needs_owners
def test_folders_are_this_user_s_alone_under_any_umask(tmp_path):
    place = tmp_path / "deep" / "cache"
    code = f"import os\nos.umask(0)\n{DECODE}\nimport dare.analysis.measure.kernels"
    assert python(code, NUMBA_CACHE_DIR=str(place)) == RIGHT
    assert [*place.glob("decode-*.kernel")]
    for folder in (place.parent, place):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in place.rglob("*")} == {0o600}
    assert {file.suffix for file in place.rglob("*")} == {".kernel"}  # Numba keeps no pickles
