"""Chunks whose sizes are not known before they are there, put together in their order."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dare.errors import OutputError
from dare.output.journal import Record
from dare.output.output import Identity, Output, Publisher
from dare.output.sink import PIECES_NAME, PieceSink
from dare.output.targets import manifest_path, read_sealed
from dare.planning.data import Layout, lay_out
from dare.tensors.chunks import bytes_digest, file_digest
from dare.tensors.dtypes import STORAGE_TYPES
from helpers import listing

U8 = STORAGE_TYPES["U8"]
CHUNKS = {"a": 3, "b": 1}
DATA = {("a", 0): b"one", ("a", 1): b"", ("a", 2): b"three", ("b", 0): b"\0" * 5000}
METADATA = {"format": "pt"}


def begin(target: Path, fingerprint: str = "f", *, resume: bool = True) -> Output:
    publisher = Publisher(Layout(target, {target.name: ()}))
    sink = PieceSink(publisher.folder, target, CHUNKS)
    return Output(sink, publisher, Identity(fingerprint, "stamps"), resume=resume)


def add(output: Output, tensor: str, chunk: int) -> Record:
    data = np.frombuffer(DATA[tensor, chunk], np.uint8)
    record = Record(
        tensor,
        chunk,
        inputs=(),
        output=bytes_digest(data.tobytes()),
        models=(),
        exceptions=(0, 0),
        piece=(output.sink.append(data), data.size, -1),
        sums=(0.5,),
    )
    output.record([record])
    return record


def put_together(output: Output, records: Sequence[Record]) -> None:
    """Tensors of the pieces in order, and one of bytes."""
    places = {(record.tensor, record.chunk): record.piece[:2] for record in records}
    tensors: dict[str, list[Any]] = {"c": [b"xyz"]}
    for name, chunk in sorted(places):
        tensors.setdefault(name, []).append(places[name, chunk])
    sizes = {name: sum(len(DATA[n, k]) for n, k in DATA if n == name) for name in CHUNKS} | {"c": 3}
    described = [(name, U8, (size,)) for name, size in sizes.items()]
    layout = lay_out(output.sink.layout.target, described, None)
    output.sink.assemble(layout, METADATA, tensors)


def finish(output: Output) -> None:
    metadata = dict.fromkeys(output.sink.layout.files, METADATA)
    output.finish(metadata, {"made": "so"}, whole=True)


def make(target: Path, order: Sequence[tuple[str, int]]) -> bytes:
    with begin(target) as output:
        records = [add(output, *place) for place in order]
        put_together(output, [*output.resumed, *records])
        finish(output)
    return target.read_bytes()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.delta.safetensors"


def test_pieces_are_in_their_order_whatever_order_they_came_in(tmp_path):
    made = {
        make(tmp_path / f"{number}.safetensors", order)
        for number, order in enumerate((list(DATA), list(DATA)[::-1], sorted(DATA, key=hash)))
    }
    assert len(made) == 1
    found = load_file(tmp_path / "0.safetensors")
    assert {name: values.tobytes() for name, values in found.items()} == {
        "a": b"onethree",
        "b": b"\0" * 5000,
        "c": b"xyz",
    }


def test_the_name_appears_at_the_end_and_nothing_else_stays(target):
    with begin(target) as output:
        records = [add(output, *place) for place in DATA]
        assert listing(target.parent) == [f"{target.name}.partial"]
        put_together(output, records)
        assert output.sink.size == 4096 + 8 + 5000 + 3
        assert listing(target.parent) == [f"{target.name}.partial"]
        finish(output)
    assert listing(target.parent) == [target.name, f"{target.name}.manifest.json"]
    assert target.stat().st_size == 4096 + 8 + 5000 + 3
    assert read_sealed(manifest_path(target))["files"] == {target.name: file_digest(target)}


def test_what_was_there_is_taken_over_and_more_goes_behind_it(target):
    with begin(target) as output:
        add(output, "a", 0)
        add(output, "a", 2)
    with begin(target) as output:
        assert [(record.tensor, record.chunk) for record in output.resumed] == [("a", 0), ("a", 2)]
        assert output.resumed[1].piece == (3, 5, -1)
        assert output.resumed[1].sums == (0.5,)
        assert add(output, "b", 0).piece[0] == 8
    rest = [("a", 1)]
    assert make(target, rest) == make(target.with_name("other.safetensors"), list(DATA))


@pytest.mark.parametrize("more", [{"fingerprint": "other"}, {"resume": False}])
def test_what_is_of_another_run_is_not_taken_over(target, more):
    with begin(target) as output:
        add(output, "b", 0)
    with begin(target, **more) as output:
        assert output.resumed == []
        assert (output.folder / PIECES_NAME).stat().st_size == 0


@pytest.mark.parametrize("size", [0, 2, 7])
def test_pieces_that_were_cut_off_are_made_again(target, size):
    with begin(target) as output:
        for chunk in range(3):
            add(output, "a", chunk)
    os.truncate(output.folder / PIECES_NAME, size)
    with begin(target) as output:
        kept = [record.chunk for record in output.resumed]
        assert kept == ([1] if size < 3 else [0, 1])  # of which the second has no bytes
        assert add(output, "b", 0).piece[0] == size


def test_a_record_of_no_piece_or_of_no_chunk_is_not_believed(target):
    with begin(target) as output:
        known = add(output, "a", 0)
        for tensor, chunk, piece in (("a", 3, known.piece), ("x", 0, known.piece), ("b", 0, ())):
            output.record(
                [Record(tensor, chunk, (), known.output, models=(), exceptions=(0, 0), piece=piece)]
            )
    with begin(target) as output:
        assert output.resumed == [known]


@pytest.mark.parametrize("make_link", [os.link, os.symlink])
def test_pieces_that_have_a_second_name_are_left_alone(target, tmp_path, make_link):
    with begin(target) as output:
        add(output, "a", 0)
    theirs = tmp_path / "theirs"
    (output.folder / PIECES_NAME).rename(theirs)
    make_link(theirs, output.folder / PIECES_NAME)
    make(target, list(DATA))
    assert theirs.read_bytes() == b"one"


@pytest.mark.parametrize("step", ["a piece", "the whole"])
def test_a_full_disk_is_named_and_what_was_done_is_kept(target, monkeypatch, step):
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with begin(target) as output, monkeypatch.context() as patch:
        records = [add(output, *place) for place in DATA]
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OutputError, match=r"the disk is full; make room and run the same"):
            add(output, "b", 0) if step == "a piece" else put_together(output, records)
    with begin(target) as output:
        assert output.resumed == records
