"""An output under way: its sinks, its journal, and the disk that it is on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dare.api import merge
from dare.errors import MismatchError, OutputError
from dare.output.journal import Journal, Record, read_journal
from dare.output.output import Identity, Output, Publisher
from dare.output.sink import PieceSink
from dare.output.targets import manifest_path, read_sealed
from dare.planning.data import Layout, lay_out
from dare.tensors.chunks import bytes_digest, file_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import ALIGNMENT, aligned_bytes
from helpers import listing, write_recipe

U8 = STORAGE_TYPES["U8"]
METADATA = {"format": "pt"}
DIGEST = "0123456789abcdef" * 2
RECORD = Record("w", 0, (DIGEST, DIGEST), DIGEST, ((7, 0, 3),), (0, 0))


def under_way(target: Path, nbytes: int, name: str = "x") -> Output:
    """An output of one tensor of bytes."""
    publisher = Publisher(lay_out(target, [(name, U8, (nbytes,))], None))
    return Output(publisher.make_sink(METADATA), publisher, Identity("f"))


def finish(output: Output, **more: bool) -> None:
    output.finish(dict.fromkeys(output.sink.layout.files, METADATA), {"made": "so"}, **more)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(("start", "size"), [(0, 20_000), (1, 9_000), (4_000, 8_192), (5_000, 7)])
def test_a_block_lands_where_it_belongs_whatever_pages_it_covers(tmp_path, start, size):
    with under_way(tmp_path / "out.safetensors", 20_000) as output:
        shift = output.sink.position("x", start) % ALIGNMENT
        block = aligned_bytes(size + ALIGNMENT)[shift : shift + size]
        block[:] = np.arange(size) % 251 + 1
        output.sink.write("x", start, block)
        expected = bytes(start) + block.tobytes() + bytes(20_000 - start - size)
        output.sink.sync()
        assert (output.folder / "out.safetensors").read_bytes()[-20_000:] == expected


def test_an_output_whose_folder_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        under_way(tmp_path / "file" / "out.safetensors", 1).__enter__()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A real file system with a megabyte of room."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_room_is_asked_for_at_once_and_is_there_when_the_disk_is_full(small_disk):
    target = small_disk / "out.safetensors"
    with pytest.raises(OutputError, match="make room"):
        under_way(target, 2 << 20).__enter__()
    assert not target.exists()
    data = np.full(300_000, 7, np.uint8)
    with under_way(target, data.size) as output:
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "ballast").write_bytes(bytes(2 << 20))
        output.sink.write("x", 0, data)
        place = output.sink.place("x", 1, 2)
        assert place is None or place.tolist() == [7, 7]  # what lies in memory is seen at once
        (small_disk / "ballast").unlink()
        finish(output)
    assert load_file(target)["x"].tobytes() == data.tobytes()


BASE = {"n": np.array([1, 2], np.int64), **{name: np.ones(4, np.float32) for name in "vwx"}}
MODEL = {**BASE, **{name: np.arange(4, dtype=np.float32) for name in "vwx"}}


@pytest.mark.parametrize(
    ("before", "model"),
    [
        ({"delta_threshold": 100.0}, MODEL),
        ({"on_integer_mismatch": "base"}, {**MODEL, "n": np.array([1, 3], np.int64)}),
    ],
)
def test_settings_that_leave_the_bytes_count_for_resumed_chunks_too(
    tmp_path, monkeypatch, before, model
):
    recipe = write_recipe(tmp_path, BASE, [model], method="sum")
    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", lambda *_given, **_more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge(recipe.changed(**before))
    if "on_integer_mismatch" in before:
        with pytest.raises(MismatchError, match=r"n: .*model0"):
            merge(recipe)
    else:  # |δ| is 1, 0, 1, 2 in each of three tensors
        assert merge(recipe).models[0].over_threshold == 9


# ---------------------------------------------------------------- the journal


def written(path: Path, *records: Record) -> bytes:
    journal = Journal(path, "fingerprint")
    journal.start()
    journal.note_stamps("stamps")
    for record in records:
        journal.add([record])
    journal.note_synced(finished=DIGEST)
    journal.close()
    return path.read_bytes()


def test_what_was_written_is_read_and_no_flipped_bit_is_believed(tmp_path):
    text = written(tmp_path / "j", RECORD)
    whole = read_journal(text)
    assert whole.fingerprint == "fingerprint"
    assert whole.records == {("w", 0): ("stamps", RECORD)}
    assert whole.finished == DIGEST
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        found = read_journal(bytes(changed))
        assert found.fingerprint in (None, whole.fingerprint)
        for key, (stamps, record) in found.records.items():
            assert whole.records[key] == (stamps or "stamps", record)
        assert found.finished in (None, DIGEST)


# ---------------------------------------------------------------- pieces of unknown size

CHUNKS = {"a": 3, "b": 1}
DATA = {("a", 0): b"one", ("a", 1): b"", ("a", 2): b"three", ("b", 0): b"\0" * 5000}


def begin(target: Path) -> Output:
    publisher = Publisher(Layout(target, {target.name: ()}))
    sink = PieceSink(publisher.folder, target, CHUNKS)
    return Output(sink, publisher, Identity("f", "stamps"))


def add(output: Output, tensor: str, chunk: int) -> Record:
    data = np.frombuffer(DATA[tensor, chunk], np.uint8)
    piece = output.sink.append(data), data.size, -1
    digest = bytes_digest(data.tobytes())
    record = Record(tensor, chunk, (), digest, (), (0, 0), piece=piece, sums=(0.5,))
    output.record([record])
    return record


def make(target: Path, order: Sequence[tuple[str, int]]) -> bytes:
    """Tensors of the pieces in order, and one of bytes."""
    with begin(target) as output:
        records = [*output.resumed, *(add(output, *place) for place in order)]
        places = {record.key: record.piece[:2] for record in records}
        tensors: dict[str, list[Any]] = {"c": [b"xyz"]}
        for name, chunk in sorted(places):
            tensors.setdefault(name, []).append(places[name, chunk])
        described = [("a", U8, (8,)), ("b", U8, (5000,)), ("c", U8, (3,))]
        output.sink.assemble(lay_out(target, described, None), METADATA, tensors)
        assert output.sink.size == 4096 + 8 + 5000 + 3
        assert not target.exists()
        finish(output, whole=True)
    return target.read_bytes()


def test_pieces_are_in_their_order_whatever_order_they_came_in(tmp_path):
    orders = (list(DATA), list(DATA)[::-1])
    (made,) = {make(tmp_path / f"{n}.safetensors", order) for n, order in enumerate(orders)}
    target = tmp_path / "0.safetensors"
    found = {name: values.tobytes() for name, values in load_file(target).items()}
    assert found == {"a": b"onethree", "b": b"\0" * 5000, "c": b"xyz"}
    assert len(made) == 4096 + 8 + 5000 + 3
    assert read_sealed(manifest_path(target))["files"] == {target.name: file_digest(target)}
    assert not [name for name in listing(tmp_path) if "partial" in name]


@pytest.mark.parametrize("left", [8, 7, 2, 0])
def test_pieces_that_are_there_are_taken_over_and_more_goes_behind_them(tmp_path, left):
    target = tmp_path / "out.safetensors"
    with begin(target) as output:
        known = [add(output, "a", chunk) for chunk in range(3)]
        for tensor, chunk, piece in (("a", 3, (0, 3, -1)), ("x", 0, (0, 3, -1)), ("b", 0, ())):
            output.record([Record(tensor, chunk, (), known[0].output, (), (0, 0), piece=piece)])
        names = list(output.sink.names)
    with (output.folder / names[0]).open("r+b") as file:
        file.truncate(left)
    with begin(target) as output:
        assert output.resumed == [r for r in known if r.piece[1] == 0 or sum(r.piece[:2]) <= left]
        assert add(output, "b", 0).piece[0] == left
        done = {record.key for record in output.resumed} | {("b", 0)}
    rest = [place for place in DATA if place not in done]
    assert make(target, rest) == make(tmp_path / "other.safetensors", list(DATA))
