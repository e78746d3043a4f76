"""An output that is disturbed at any moment is the old one, the new one, or made again to the same.

`Disk` counts the calls that change files, and lets one of them fail. What is changed, lost or added
between two tries is a table. `tests/attack` does the same to processes of their own.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dare
from dare.documents.notices import LEFTOVERS
from dare.errors import ExistsError
from dare.output import output as publishing
from dare.output.journal import Record
from dare.output.output import Output
from dare.output.sink import PIECES_NAME, FileSink
from dare.output.targets import JOURNAL_NAME, MARK_NAME, claim, partial_folder
from helpers import flip_bit, listing, save

BASE = {f"t{number}": np.arange(64, dtype=np.float32) + number for number in range(4)}
BASE["ids"] = np.arange(5)
CHANGES = ("pwrite", "write", "fsync", "ftruncate", "mkdir", "unlink", "rmdir", "rename", "replace")


class Disk:
    """Counts the calls that change files; from the call `at` on it fails, or only there."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int = -1, error: int = 0) -> None:
        self.calls = 0
        self._at, self._error = at, error
        for name in CHANGES:
            patch.setattr(os, name, self._watched(getattr(os, name)))
        patch.setattr(publishing, "rename", self._watched(publishing.rename))

    def _watched(self, call: Callable[..., object]) -> Callable[..., object]:
        def watched(*given: object, **more: object) -> object:
            number, self.calls = self.calls, self.calls + 1
            if number == self._at or (self._error == errno.EIO and 0 <= self._at < number):
                raise OSError(self._error, os.strerror(self._error))
            return call(*given, **more)

        return watched


def make(kind: str, folder: Path, **more: object) -> Any:
    """Make an output from the models in a folder."""
    files = [folder / name / "model.safetensors" for name in ("base", "model")]
    if kind.startswith("folder"):
        files = [file.parent for file in files]
        more = {"shard_size": 300, **more}
    given = {"base": files[0], "models": files[1:], "output": folder / output_of(kind)}
    quiet = {"verbose": False, "threads": 1, "overwrite": kind.endswith("again")}
    if kind == "delta":
        return dare.compress(*files, given["output"], verbose=False, threads=1)
    if kind == "slices":
        request = dare.Request.of(**given, verbose=False, threads=1)
        for number in (1, 2):
            if dare.merge_slice(request, f"{number}/2").report is not None:
                break
        return None
    return dare.merge(**given, **{**quiet, **more})


def output_of(kind: str) -> str:
    return "out" if kind.startswith("folder") else "out.safetensors"


WITHOUT_EXCHANGE = "folder without exchange again"
KINDS = ("file", "file again", "folder", "folder again", WITHOUT_EXCHANGE)
KINDS = (*KINDS, "delta", "slices")
STRIDE = 3  # of so many calls one is attacked


def contents(folder: Path) -> dict[str, bytes]:
    """All files but inputs; of manifests, which say how long it took, only that they are there."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(("base/", "model/")):
            found[name] = b"" if "manifest" in name else path.read_bytes()
    return found


def is_part(expected: dict[str, bytes], found: dict[str, bytes]) -> bool:
    return all(found.get(name) == data for name, data in expected.items())


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class Case:
    """Folders in which an output of a kind is made again and again."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.name = kind, output_of(kind)
        self._folder, self._numbers = folder, itertools.count(1)
        for name, shift in (("base", 0), ("model", 1)):
            moved = {n: v if n == "ids" else v + np.float32(shift) for n, v in BASE.items()}
            save(folder / "0" / name / "model.safetensors", moved)
            (folder / "0" / name / "config.json").write_text("{}")
        if kind.endswith("again"):
            make(kind, folder / "0", scale=0.5)
        self.old = contents(folder / "0")
        whole = self.start()
        make(kind, whole)
        self.new = contents(whole)

    def start(self) -> Path:
        """A folder in which the output is not there yet, or an older one."""
        return Path(shutil.copytree(self._folder / "0", self._folder / str(next(self._numbers))))

    def check(self, folder: Path, context: object) -> None:
        """Make it once more, undisturbed: it is as if nothing had happened."""
        with suppress(ExistsError):  # and only cleared away what was left
            make(self.kind, folder)
        assert contents(folder) == self.new, context
        assert dare.verify(folder / self.name).ok, context


@pytest.fixture
def case(kind: str, tmp_path: Path) -> Case:
    return Case(kind, tmp_path)


# ---------------------------------------------------------------- disks that fail


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["once", "from there on"])
def test_a_disk_that_fails_at_any_call(case, monkeypatch, error):
    if case.kind == WITHOUT_EXCHANGE:
        monkeypatch.setattr("dare.tensors.system.system_call", lambda _name: None)
    for at in itertools.count(error % STRIDE, STRIDE):
        folder, report, failed = case.start(), None, None
        with monkeypatch.context() as patch:
            disk = Disk(patch, at, error)
            try:
                report = make(case.kind, folder)
            except dare.DareError as error_found:
                failed = str(error_found)
        found, context = contents(folder), (at, failed)
        if failed is None:
            assert found.keys() >= case.new.keys(), context  # and what could not be cleared away
            assert dare.verify(folder / case.name).ok, context
            if isinstance(report, dare.Report) and found != case.new:
                assert LEFTOVERS in [notice.code for notice in report.warnings], context
        else:
            assert failed.startswith(f"{folder}{os.sep}"), context
            is_whole = any(is_part(there, found) for there in (case.old, case.new))
            is_between = case.kind == WITHOUT_EXCHANGE and not (folder / case.name).exists()
            assert is_whole or is_between, context
        if disk.calls <= at:
            break
        if failed is not None or found != case.new:
            case.check(folder, context)
    assert at > 20


def test_writes_may_be_short(case, monkeypatch):
    for name in ("pwrite", "write"):
        real = getattr(os, name)
        shorter = lambda fd, data, *at, real=real: real(fd, data[: -(-len(data) // 2)], *at)  # noqa: E731
        monkeypatch.setattr(os, name, shorter)
    case.check(case.start(), "short writes")


def test_weights_and_then_their_name_are_on_the_disk(case, monkeypatch):
    synced, ever, real = set[int](), set[int](), os.fsync

    def sync(file_descriptor: int) -> None:
        for found in (synced, ever):
            found.add(os.fstat(file_descriptor).st_ino)
        real(file_descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    folder = case.start()
    for place, name in ((os, "replace"), (publishing, "rename")):  # the name is to be synced again
        call = getattr(place, name)
        moved = lambda *given, call=call, **more: synced.clear() or call(*given, **more)  # noqa: E731
        monkeypatch.setattr(place, name, moved)
    make(case.kind, folder)
    assert folder.stat().st_ino in synced
    inputs = (folder / "base", folder / "model")
    published = [p for p in folder.rglob("*") if p not in inputs and p.parent not in inputs]
    assert [path for path in published if path.stat().st_ino not in ever] == []


# ---------------------------------------------------------------- what changes between two tries


def interrupt(kind: str, folder: Path, chunks: int = 3, **settings: object) -> Path:
    """Stop when so many chunks are in the journal; return the folder of what was made."""
    real, count = Output.record, 0

    def record(self: Output, records: list[Record]) -> None:
        nonlocal count
        real(self, records[: chunks - count])
        count += len(records)
        if count > chunks:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "record", record)
        with pytest.raises(KeyboardInterrupt):
            make(kind, folder, **settings)
    assert not (folder / output_of(kind)).exists()
    return partial_folder(folder / output_of(kind))


def resumed_chunks(case: Case, folder: Path, **more: object) -> int:
    """Make it again; the number of chunks that were not made again."""
    kept: list[Record] = []
    take_over = FileSink.take_over

    def watched(self: FileSink, records: list[Record]) -> list[Record]:
        kept[:] = take_over(self, records)
        return kept[:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSink, "take_over", watched)
        make(case.kind, folder, **more)
    assert contents(folder) == case.new
    assert dare.verify(folder / case.name).ok
    return len(kept)


def edit(change: Callable[[bytes], bytes], name: str = JOURNAL_NAME) -> Callable[[Path], None]:
    """A change of the first file in the folder that matches a name."""

    def apply(folder: Path) -> None:
        file = next(folder.glob(name))
        file.write_bytes(change(file.read_bytes()))

    return apply


def append(*lines: bytes) -> Callable[[Path], None]:
    return edit(lambda journal: journal + b"".join(line + b"\n" for line in lines))


CHUNKS, LATER = "*.safetensors", 2 * 64 * 4 + 1  # the bytes of later chunks, and one
UNREADABLE = (b"\0\0", b"\xff\xfe", b"5", b"[]", b"{}", b"[" * 9000, b'{"tensor":"t1","chunk":7}')
DAMAGE: dict[str, tuple[Callable[[Path], None], int]] = {
    "nothing": (lambda _folder: None, 3),
    "lines that make no sense": (append(*UNREADABLE), 3),
    "a torn line": (edit(lambda journal: journal + b'{"tensor":"t3","chu'), 3),
    "a lost line": (edit(lambda journal: journal[: journal.rindex(b'{"tensor"')]), 2),
    "an empty journal": (edit(lambda _journal: b""), 0),
    "a journal of another merge": (edit(lambda j: j.replace(b'"fingerprint":"', b'"x":"')), 0),
    "a changed chunk": (edit(lambda data: data[:-LATER] + b"?" + data[1 - LATER :], CHUNKS), 2),
    "a short file": (edit(lambda data: data[:-LATER], CHUNKS), 2),
    "a file of zeros": (edit(lambda data: bytes(len(data)), CHUNKS), 0),
    "a file that nobody knows": (lambda folder: (folder / "extra").write_text("x") and None, 3),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_between_two_tries_is_made_again(tmp_path, damage):
    case = Case("file", tmp_path)
    folder = case.start()
    change, chunks = DAMAGE[damage]
    change(interrupt("file", folder))
    assert resumed_chunks(case, folder) == chunks


def test_no_flipped_bit_of_a_journal_gives_other_bytes(tmp_path):
    case = Case("file", tmp_path)
    interrupt("file", stopped := case.start())
    bits = 8 * (partial_folder(stopped / case.name) / JOURNAL_NAME).stat().st_size
    for bit in random.Random(0).sample(range(bits), 12):
        folder = Path(shutil.copytree(stopped, tmp_path / f"bit {bit}"))
        flip_bit(partial_folder(folder / case.name) / JOURNAL_NAME, bit)
        assert resumed_chunks(case, folder) <= 3


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("name", [JOURNAL_NAME, CHUNKS, PIECES_NAME, MARK_NAME])
def test_files_that_have_a_second_name_are_left_alone(tmp_path, link, name):
    case = Case("delta" if name == PIECES_NAME else "file", tmp_path)
    folder = case.start()
    made = next(interrupt(case.kind, folder).glob(name))
    theirs = made.rename(tmp_path / "theirs")
    before = theirs.read_bytes()
    link(theirs, made)
    with suppress(dare.OutputError):
        make(case.kind, folder)
    assert theirs.read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "more", "code"),
    [
        ({"seed": 1}, {}, LEFTOVERS),
        ({"shard_size": 100}, {}, LEFTOVERS),
        ({}, {"resume": False}, ""),
    ],
)
def test_another_try_is_not_gone_on_with(tmp_path, settings, more, code):
    case = Case("folder", tmp_path)
    interrupt("folder", folder := case.start(), **settings)
    report = make("folder", folder, **more)
    assert report.resumed_chunks == 0
    assert {notice.code for notice in report.warnings} & {LEFTOVERS} == {code} - {""}
    assert LEFTOVERS not in (folder / "out" / "dare-manifest.json").read_text()
    assert contents(folder) == case.new


# ---------------------------------------------------------------- others at the same time


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path, monkeypatch, kind, overwrite):
    folder, real = Case(kind, tmp_path).start(), Output.finish
    theirs = folder / output_of(kind) / ("theirs" if kind == "folder" else "")

    def finish_late(self: Output, *given: object, **more: object) -> list[str]:
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_bytes(b"theirs")
        return real(self, *given, **more)

    monkeypatch.setattr(Output, "finish", finish_late)
    with pytest.raises(dare.OutputError):
        make(kind, folder, overwrite=overwrite)
    assert theirs.read_bytes() == b"theirs"


def test_one_that_begins_while_the_name_is_given_is_left_alone(tmp_path, monkeypatch):
    folder, real = Case("folder", tmp_path).start(), publishing.rename

    def rename_and_begin(old: Path, new: Path, **more: bool) -> bool:
        is_done = real(old, new, **more)
        claim(old)
        return is_done

    monkeypatch.setattr(publishing, "rename", rename_and_begin)
    report = make("folder", folder)
    assert LEFTOVERS not in [notice.code for notice in report.warnings]
    assert listing(folder / "out.partial") == [MARK_NAME]
    assert not {JOURNAL_NAME, MARK_NAME} & set(listing(folder / "out"))


AGAIN = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from test_crashes import make
make("file", Path(sys.argv[2]))
"""


def test_a_second_process_is_refused_while_the_first_is_writing(tmp_path, monkeypatch):
    case, real = Case("file", tmp_path), Output.finish
    folder = case.start()

    def finish_beside_another(self: Output, *given: object, **more: object) -> list[str]:
        command = [sys.executable, "-c", AGAIN, str(Path(__file__).parent), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "another process is writing this output" in done.stderr
        return real(self, *given, **more)

    monkeypatch.setattr(Output, "finish", finish_beside_another)
    case.check(folder, "beside another")


# ---------------------------------------------------------------- when the name is given


@pytest.mark.parametrize("kind", ["file", "file again", "folder", "folder again"])
def test_one_that_died_before_clearing_up_is_known_again(tmp_path, kind):
    case = Case(kind, tmp_path)
    folder = case.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "clear_away", lambda *_given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(kind, folder)
    report = make(kind, folder)
    assert LEFTOVERS in [notice.code for notice in report.warnings]
    assert report.bytes_read == 0
    assert contents(folder) == case.new
    with pytest.raises(ExistsError):
        make(kind, folder, overwrite=False)


def test_weights_and_manifest_apart_are_known_as_such(tmp_path):
    case, real = Case("file again", tmp_path), publishing.sync_folder
    folder = case.start()

    def die_in_the_middle(path: Path) -> None:
        real(path)
        assert path != folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "sync_folder", die_in_the_middle)
        with pytest.raises(AssertionError):
            make(case.kind, folder)
    (problem,) = dare.verify(folder / case.name).problems
    assert problem.code == "other_manifest"
    assert problem.subjects == (str(folder / f"{case.name}.manifest.json"),)
    case.check(folder, "apart")


@pytest.mark.parametrize("part", ["model_card", "inherited"])
def test_all_that_finishing_needs_is_tried_before_the_first_byte(tmp_path, monkeypatch, part):
    folder = Case("folder", tmp_path).start()
    monkeypatch.setattr(f"dare.output.sidecars.{part}", lambda *_given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make("folder", folder)
    assert listing(folder) == ["base", "model"]
