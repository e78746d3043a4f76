from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dare.api import merge
from dare.errors import MismatchError, OutputError
from dare.inputs.shards import INDEX_NAME
from dare.output.journal import Record
from dare.output.output import Identity, Output, Publisher
from dare.output.targets import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    check_target,
    manifest_path,
    read_sealed,
)
from dare.output.verification import verify
from dare.planning.data import Layout, lay_out
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import ALIGNMENT, aligned_bytes
from helpers import listing, save, sha256, write_recipe

F32, U8 = STORAGE_TYPES["F32"], STORAGE_TYPES["U8"]
TENSORS = [("a", F32, (2,)), ("b", U8, (3,))]
A, B = np.array([1, 2], np.float32).view(np.uint8), np.array([7, 8, 9], np.uint8)
METADATA = {"format": "pt"}


def begin(target: Path, fingerprint: str = "f", shard_size: int | None = None, **more):
    return under_way(lay_out(target, TENSORS, shard_size), METADATA, fingerprint, **more)


def under_way(layout: Layout, metadata: dict[str, str], fingerprint: str, **more) -> Output:
    publisher = Publisher(layout)
    return Output(publisher.make_sink(metadata), publisher, Identity(fingerprint), **more)


def record_of(name: str, data: np.ndarray) -> Record:
    digest = bytes_digest(data.tobytes())
    return Record(name, 0, inputs=(digest,), output=digest, models=((0, 0),), exceptions=(0, 0))


def write_chunk(output: Output, name: str, data: np.ndarray) -> None:
    output.sink.write(name, 0, data)
    output.record([record_of(name, data)])


def finish(output: Output) -> None:
    output.finish(dict.fromkeys(output.sink.layout.files, METADATA), {"made": "so"})


def interrupted_after_a(target: Path) -> Output:
    with begin(target) as output:
        write_chunk(output, "a", A)
    return output


def stored(output: Output, name: str) -> bytes:
    file, info = output.sink.places[name]
    return output.sink.opened[file].read(info.start, info.nbytes)


def resumed(target: Path, **more) -> list[str]:
    with begin(target, **more) as output:
        return [record.tensor for record in output.resumed]


# ---------------------------------------------------------------- a merge that goes well


def test_the_target_does_not_exist_before_finish(tmp_path):
    target = tmp_path / "out.safetensors"
    with begin(target) as output:
        write_chunk(output, "b", B)
        write_chunk(output, "a", A)
        assert listing(tmp_path) == ["out.safetensors.partial"]
        finish(output)
    assert listing(tmp_path) == ["out.safetensors", "out.safetensors.manifest.json"]
    found = load_file(target)
    assert found["a"].tolist() == [1.0, 2.0]
    assert found["b"].tolist() == [7, 8, 9]
    assert read_sealed(manifest_path(target))["made"] == "so"


def test_a_directory_is_published_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with begin(target, shard_size=8) as output:
        write_chunk(output, "a", A)
        write_chunk(output, "b", B)
        assert listing(target.parent) == ["out.partial"]
        finish(output)
    assert listing(target.parent) == ["out"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert listing(target) == [MANIFEST_NAME, *shards, INDEX_NAME]
    assert load_file(target / shards[0])["a"].tolist() == [1.0, 2.0]
    assert load_file(target / shards[1])["b"].tolist() == [7, 8, 9]
    index = json.loads((target / INDEX_NAME).read_text())
    assert index["weight_map"] == {"a": shards[0], "b": shards[1]}


@pytest.mark.parametrize(("start", "size"), [(0, 20_000), (1, 9_000), (4_000, 8_192), (5_000, 7)])
def test_a_block_lands_where_it_belongs_whatever_pages_it_covers(tmp_path, start, size):
    layout = lay_out(tmp_path / "out.safetensors", [("x", U8, (20_000,))], None)
    with under_way(layout, METADATA, "f") as output:
        shift = output.sink.position("x", start) % ALIGNMENT
        block = aligned_bytes(size + ALIGNMENT)[shift : shift + size]
        block[:] = np.arange(size) % 251 + 1
        output.sink.write("x", start, block)
        expected = bytes(start) + block.tobytes() + bytes(20_000 - start - size)
        output.sink.sync()
        assert (output.folder / "out.safetensors").read_bytes()[-20_000:] == expected


# ---------------------------------------------------------------- resuming


def test_a_finished_chunk_is_resumed(tmp_path):
    target = tmp_path / "out.safetensors"
    output = interrupted_after_a(target)
    assert output.resumed == []
    assert not target.exists()
    with begin(target) as output:
        assert output.resumed == [record_of("a", A)]
        assert not output.started_over
        write_chunk(output, "b", B)
        finish(output)
    assert load_file(target)["a"].tolist() == [1.0, 2.0]


def test_what_is_recorded_after_a_torn_line_is_resumed_too(tmp_path):
    target = tmp_path / "out.safetensors"
    output = interrupted_after_a(target)
    with (output.folder / JOURNAL_NAME).open("ab") as journal:
        journal.write(b'{"tensor":"b","chu')
    with begin(target) as output:
        write_chunk(output, "b", B)
    assert resumed(target) == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [b"\0\0", b"\xff\xfe", b"5", b"[]", b"{}", b'{"tensor":"a","chunk":7,"output":""}'],
)
def test_a_line_that_makes_no_sense_is_not_trusted(tmp_path, line):
    output = interrupted_after_a(tmp_path / "out.safetensors")
    with (output.folder / JOURNAL_NAME).open("ab") as journal:
        journal.write(line + b"\n")
    assert resumed(tmp_path / "out.safetensors") == ["a"]


def test_a_chunk_that_is_not_on_disk_as_recorded_is_not_trusted(tmp_path):
    target = tmp_path / "out.safetensors"
    with begin(target) as output:
        write_chunk(output, "a", A)
        write_chunk(output, "b", B)
        output.sink.write("a", 3, np.array([255], np.uint8))
    assert resumed(target) == ["b"]


def test_another_merge_starts_over(tmp_path):
    target = tmp_path / "out.safetensors"
    interrupted_after_a(target)
    with begin(target, "another fingerprint") as output:
        assert output.resumed == []
        assert output.started_over
        assert stored(output, "a") == bytes(8)


def test_resume_false_starts_over(tmp_path):
    interrupted_after_a(tmp_path / "out.safetensors")
    assert resumed(tmp_path / "out.safetensors", resume=False) == []


class PowerFailureError(Exception):
    pass


BASE = {"n": np.array([1, 2], np.int64), **{name: np.ones(4, np.float32) for name in "vwx"}}
MODEL = {**BASE, **{name: np.arange(4, dtype=np.float32) for name in "vwx"}}


def fail_after(monkeypatch, records: int) -> None:
    """Let that many chunks of a merge be recorded, then fail."""
    original = Output.record
    done = []

    def record(self, lines):
        left = records - len(done)
        done.extend(lines[:left])
        original(self, lines[:left])
        if len(lines) > left:
            raise PowerFailureError

    monkeypatch.setattr(Output, "record", record)


@pytest.mark.parametrize("records", [0, 1, 2, 3])
def test_an_interrupted_merge_goes_on_to_the_same_bytes(tmp_path, monkeypatch, records):
    recipe = write_recipe(tmp_path, BASE, [MODEL], method="sum")
    with monkeypatch.context() as patch:
        fail_after(patch, records)
        with pytest.raises(PowerFailureError):
            merge(recipe)
    assert not recipe.recipe.output.exists()
    assert merge(recipe).resumed_chunks == records

    other = recipe.changed(output=tmp_path / "other.safetensors")
    assert merge(other).resumed_chunks == 0
    assert sha256(other.recipe.output) == sha256(recipe.recipe.output)
    assert listing(tmp_path) == [
        "base.safetensors",
        "model0.safetensors",
        "other.safetensors",
        "other.safetensors.manifest.json",
        "out.safetensors",
        "out.safetensors.manifest.json",
    ]


def merge_interrupted(monkeypatch, recipe) -> None:
    with monkeypatch.context() as patch:
        fail_after(patch, 2)
        with pytest.raises(PowerFailureError):
            merge(recipe)


def test_shards_of_another_size_are_not_left_in_the_output(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, BASE, [MODEL], method="sum", output=tmp_path / "out")
    merge_interrupted(monkeypatch, recipe.changed(shard_size=16))
    merge(recipe)
    assert listing(tmp_path / "out") == [MANIFEST_NAME, "model.safetensors"]


def test_integers_that_may_not_differ_are_compared_when_resuming(tmp_path, monkeypatch):
    model = {**MODEL, "n": np.array([1, 3], np.int64)}
    recipe = write_recipe(tmp_path, BASE, [model], method="sum")
    merge_interrupted(monkeypatch, recipe.changed(on_integer_mismatch="base"))
    with pytest.raises(MismatchError, match=r"n: .*model0"):
        merge(recipe)


def test_a_new_delta_threshold_counts_for_resumed_chunks(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, BASE, [MODEL], method="sum")
    merge_interrupted(monkeypatch, recipe.changed(delta_threshold=100.0))
    report = merge(recipe)
    assert report.models[0].over_threshold == 9  # |δ| is 1, 0, 1, 2 in each of three tensors


# ---------------------------------------------------------------- two processes

OPEN_THE_SAME = """
import sys
from pathlib import Path
from dare.errors import OutputError
from dare.planning.data import lay_out
from dare.output.output import Identity, Output, Publisher
try:
    publisher = Publisher(lay_out(Path(sys.argv[1]), [], None))
    with Output(publisher.make_sink({}), publisher, Identity("another"), resume=False):
        print("opened")
except OutputError as error:
    print(error)
"""


def open_elsewhere(target: Path) -> str:
    command = [sys.executable, "-c", OPEN_THE_SAME, target]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_second_process_is_refused_while_the_first_is_writing(tmp_path):
    target = tmp_path / "out.safetensors"
    with begin(target) as output:
        write_chunk(output, "a", A)
        assert open_elsewhere(target).endswith("another process is writing this output")
        assert stored(output, "a") == A.tobytes()
        finish(output)
    assert load_file(target)["a"].tolist() == [1.0, 2.0]


# ---------------------------------------------------------------- what is never overwritten


def check(target: Path, *inputs: Path, overwrite: bool = True) -> None:
    check_target(lay_out(target, TENSORS, None), inputs, overwrite=overwrite)


@pytest.fixture
def weights(tmp_path) -> Path:
    return save(tmp_path / "model" / "in.safetensors", {"a": np.ones(2, np.float32)})


def test_the_output_may_not_be_an_input_under_any_name(weights, tmp_path):
    symbolic, hard = tmp_path / "link.safetensors", tmp_path / "same.safetensors"
    symbolic.symlink_to(weights)
    hard.hardlink_to(weights)
    spelled = weights.parent / ".." / "model" / "in.safetensors"
    for target in (weights, spelled, symbolic, hard):
        with pytest.raises(OutputError, match=r"overwrite the input .*in.safetensors"):
            check(target, weights)
    with pytest.raises(OutputError, match="overwrite the input"):
        check(weights, symbolic)


@pytest.mark.parametrize("target", ["model", "."])
def test_the_output_may_not_be_a_directory_that_holds_an_input(weights, tmp_path, target):
    (tmp_path / target / MANIFEST_NAME).write_text("{}")
    with pytest.raises(OutputError, match="would overwrite the input"):
        check(tmp_path / target, weights)


@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_an_input_may_not_lie_where_the_output_is_prepared(tmp_path, output):
    source = save(tmp_path / f"{output}.partial" / "in.safetensors", {"a": np.ones(2, np.float32)})
    with pytest.raises(OutputError, match=r"the input .*in.safetensors"):
        check(tmp_path / output, source)


def test_an_existing_output_is_refused_unless_told(weights, tmp_path):
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"")
    with pytest.raises(OutputError, match=r"out.safetensors: .*choose another output"):
        check(target, weights, overwrite=False)
    check(target, weights, overwrite=True)


def test_a_directory_not_made_by_dare_is_not_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(OutputError, match=f"photos: .*{MANIFEST_NAME}"):
        check(tmp_path / "photos")


def test_a_file_is_not_replaced_by_a_directory_nor_a_directory_by_a_file(tmp_path):
    (tmp_path / "out").write_bytes(b"")
    (tmp_path / "out.safetensors").mkdir()
    with pytest.raises(OutputError, match="out: is no directory"):
        check(tmp_path / "out")
    with pytest.raises(OutputError, match=r"out.safetensors: is a directory"):
        check(tmp_path / "out.safetensors")


@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_an_output_is_replaced_if_told(tmp_path, output):
    recipe = write_recipe(tmp_path, BASE, [MODEL], method="sum", output=tmp_path / output)
    merge(recipe)
    halved = recipe.changed(scale=0.5)
    with pytest.raises(OutputError, match="exists already"):
        merge(halved)
    merge(halved, overwrite=True)
    assert verify(recipe.recipe.output).ok
    file = recipe.recipe.output / "model.safetensors" if output == "out" else recipe.recipe.output
    assert load_file(file)["w"].tolist() == [0.5, 1.0, 1.5, 2.0]
    assert not [name for name in listing(tmp_path) if "partial" in name or "replaced" in name]


def test_a_linked_output_directory_is_not_replaced(tmp_path):
    recipe = write_recipe(tmp_path, BASE, [MODEL], method="sum", output=tmp_path / "out")
    merge(recipe)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="out: is a link, and links are not replaced"):
        merge(recipe.changed(scale=0.5), overwrite=True)
    assert verify(tmp_path / "elsewhere").ok


def test_the_working_directory_is_no_output(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, BASE, [MODEL], method="sum", output=".")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(OutputError):
        merge(recipe, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path, monkeypatch, output, overwrite):
    recipe = write_recipe(tmp_path, BASE, [MODEL], method="sum", output=tmp_path / output)
    theirs = recipe.recipe.output / "theirs" if output == "out" else recipe.recipe.output
    original = Output.finish

    def finish_late(self, *arguments, **keywords):
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_bytes(b"theirs")
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Output, "finish", finish_late)
    with pytest.raises(OutputError):
        merge(recipe, overwrite=overwrite)
    assert theirs.read_bytes() == b"theirs"


# ---------------------------------------------------------------- disks that fail


def raise_no_space(*_arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("pwrite", lambda output: output.sink.write("b", 0, B)),
        ("write", lambda output: output.record([record_of("b", B)])),
        ("pwrite", finish),
        ("fsync", finish),
    ],
    ids=["a block", "the journal", "the header", "syncing"],
)
def test_a_full_disk_is_an_output_error_and_what_was_done_is_kept(
    tmp_path, monkeypatch, call, step
):
    target = tmp_path / "out.safetensors"
    with begin(target) as output, monkeypatch.context() as patch:
        write_chunk(output, "a", A)
        patch.setattr(os, call, raise_no_space)
        with pytest.raises(OutputError, match="make room"):
            step(output)
    assert not target.exists()
    assert resumed(target) == ["a"]


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    def fail(*_arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with begin(tmp_path / "out.safetensors") as output, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OutputError, match=r"out.safetensors: cannot be written: Input/output"):
            output.sink.write("a", 0, A)


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    original = os.pwrite
    with begin(tmp_path / "out.safetensors") as output:
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: original(fd, data[:3], at))
        output.sink.write("a", 0, A)
        assert stored(output, "a") == A.tobytes()


def test_an_output_whose_folder_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        begin(tmp_path / "file" / "out.safetensors").__enter__()


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


def test_an_output_larger_than_the_disk_is_refused_at_once(tmp_path, small_disk):
    target = small_disk / "out.safetensors"
    layout = lay_out(target, [("big", U8, (2 << 20,))], None)
    with pytest.raises(OutputError, match="make room"):
        under_way(layout, METADATA, "f").__enter__()
    assert not target.exists()


def test_room_that_was_taken_is_there_when_the_disk_is_full(small_disk):
    target = small_disk / "out.safetensors"
    layout = lay_out(target, [("x", U8, (300_000,))], None)
    data = np.full(300_000, 7, np.uint8)
    with under_way(layout, METADATA, "f") as output:
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "ballast").write_bytes(bytes(2 << 20))
        write_chunk(output, "x", data)
        place = output.sink.place("x", 1, 2)
        assert place is None or place.tolist() == [7, 7]  # what lies in memory is seen at once
        (small_disk / "ballast").unlink()
        finish(output)
    assert load_file(target)["x"].tobytes() == data.tobytes()
