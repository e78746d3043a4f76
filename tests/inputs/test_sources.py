from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dare.api import merge
from dare.errors import HeaderError, InputError
from dare.inputs.opening import open_model
from dare.inputs.shards import INDEX_NAME
from dare.inputs.sources import CHUNKS_AHEAD, open_source, read_chunks, stamps_of
from dare.output.output import Output
from dare.tensors import files
from dare.tensors.chunks import CHUNK
from helpers import (
    entry,
    file_bytes,
    flip_bit,
    read_tensor,
    save,
    save_shards,
    write_index,
    write_recipe,
)

W = np.arange(6, dtype=np.float32).reshape(2, 3)
N = np.array([7, -7], np.int64)


def contents(path) -> dict[str, bytes]:
    with open_source(path) as source:
        return {name: read_tensor(source, name) for name in source.tensors}


# ---------------------------------------------------------------- what a path may be


def test_a_file_a_directory_and_shards_are_sources(tmp_path):
    path = save(tmp_path / "model.safetensors", {"w": W, "n": N})
    save(tmp_path / "training_args.safetensors", {"other": N})
    for given in (path, tmp_path):
        assert open_source(given).files.keys() == {path}
        assert open_source(given).tensors["w"].shape == (2, 3)
        assert contents(str(given)) == {"w": W.tobytes(), "n": N.tobytes()}
    arrays = {name: np.full(3, number, np.float32) for number, name in enumerate("abcde")}
    save_shards(tmp_path / "shards", arrays, 3)
    assert len(open_source(tmp_path / "shards").files) == 3
    assert contents(tmp_path / "shards") == {n: array.tobytes() for n, array in arrays.items()}


def test_a_shard_may_be_a_link_to_a_file_elsewhere(tmp_path):
    # The Hugging Face cache looks like this.
    blob = save(tmp_path / "blobs" / "0f1e", {"w": W})
    write_index(tmp_path / "snapshot", {"w": "a.safetensors"})
    (tmp_path / "snapshot" / "a.safetensors").symlink_to(blob)
    assert contents(tmp_path / "snapshot") == {"w": W.tobytes()}


# ---------------------------------------------------------------- paths that lead nowhere


OPEN_AS_NOBODY = """
import os, sys
from dare.errors import InputError
from dare.inputs.sources import open_source
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(65534)
try:
    open_source(sys.argv[1])
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("closed", "message"),
    [
        ("folder", "folder: cannot be listed: Permission denied"),
        ("folder/model.safetensors", "model.safetensors: cannot be opened: Permission denied"),
    ],
)
def test_what_may_not_be_read_is_refused(tmp_path, closed, message):
    save(tmp_path / "folder" / "model.safetensors", {"w": W})
    tmp_path.chmod(0o755)
    (tmp_path / closed).chmod(0)
    try:
        command = [sys.executable, "-c", OPEN_AS_NOBODY, "folder"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    finally:
        (tmp_path / closed).chmod(0o755)
    assert found.stdout.strip().endswith(message)


# ---------------------------------------------------------------- hostile and broken indexes


ELSEWHERE = ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", ".", "..", "a/", 5, None, {}]
IMPOSSIBLE = ["a\0.safetensors", "\ud800.safetensors", "a" * 5000]  # as names of files
IN_FOLDER = "w is in .*must be a file in the same"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        *(({"v": "a.safetensors", "w": place}, IN_FOLDER) for place in ELSEWHERE),
        *(({"w": name}, "model/") for name in IMPOSSIBLE),
        ({"w": "a.safetensors", "n": "a.safetensors", "z": "a.safetensors"}, "lacks n and 1 more"),
        ({"w": "a.safetensors", "n": "b.safetensors"}, "b.safetensors also holds w"),
        ({"w": "a.safetensors", "n": "c.safetensors"}, "c.safetensors: no such file"),
        ({"w": "folder.safetensors"}, "folder.safetensors: is not an ordinary file"),
        ({"w": "d.safetensors"}, r"d.safetensors: w: unknown dtype 'F33'"),
        (None, f"has 3 safetensors files and no {INDEX_NAME}"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path, weight_map, message):
    save(tmp_path / "x.safetensors", {"w": W})
    folder = tmp_path / "model"
    save(folder / "a.safetensors", {"w": W})
    save(folder / "b.safetensors", {"n": N, "w": W})
    (folder / "d.safetensors").write_bytes(file_bytes({"w": entry("F33", [1], 0, 1)}, b"a"))
    if weight_map is not None:
        (folder / "folder.safetensors").mkdir()
        write_index(folder, weight_map)
    with pytest.raises(InputError, match=message):
        open_source(folder)


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"x":' + b"9" * 5000, b'{"weight_map": []}'],
)
def test_an_index_that_is_no_json_with_a_weight_map_is_refused(tmp_path, text):
    with pytest.raises(InputError, match=f"has no safetensors file and no {INDEX_NAME}"):
        open_source(tmp_path)
    (tmp_path / INDEX_NAME).write_bytes(text)
    with pytest.raises(HeaderError, match=f"{INDEX_NAME}: .*weight_map"):
        open_source(tmp_path)


def test_an_index_of_absurd_size_is_refused_without_being_read(tmp_path, monkeypatch):
    monkeypatch.setattr("dare.inputs.shards.MAX_INDEX_BYTES", 1000)
    write_index(tmp_path, {"w" * 1000: "a.safetensors"})
    with pytest.raises(HeaderError, match="larger than 1000 bytes"):
        open_source(tmp_path)


# ---------------------------------------------------------------- files that change


def test_a_file_written_again_since_it_was_planned_is_refused(tmp_path):
    path = save(tmp_path / "m.safetensors", {"w": W})
    source = open_source(path)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    with pytest.raises(InputError, match=r"m.safetensors: changed since the merge was planned"):
        source.__enter__()


def test_a_refused_source_leaves_no_file_open(tmp_path):
    save_shards(tmp_path, {"w": W, "n": N}, 2)
    source = open_source(tmp_path)
    list(source.files)[1].unlink()
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(InputError):
        source.__enter__()
    assert len(os.listdir("/dev/fd")) == before


def test_a_file_cut_while_it_is_open_is_noticed(tmp_path):
    path = save(tmp_path / "m.safetensors", {"w": W})
    with open_source(path) as source:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(InputError, match=r"m.safetensors: ends inside w; the file was cut"):
            read_tensor(source, "w")


def test_a_file_written_to_while_it_is_merged_is_refused(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, {"v": W, "w": W}, [{"v": W + 1, "w": W + 1}], method="sum")
    original = Output.record

    def record(self, line):
        flip_bit(recipe.recipe.base, 8 * recipe.recipe.base.stat().st_size - 1)
        os.utime(recipe.recipe.base, ns=(0, 0))
        original(self, line)

    monkeypatch.setattr(Output, "record", record)
    with pytest.raises(InputError, match=r"base.safetensors: .*changed"):
        merge(recipe)
    assert not recipe.recipe.output.exists()


def test_the_fingerprint_knows_what_and_the_stamps_which_file(tmp_path):
    first, second = (save(tmp_path / name / "m.safetensors", {"w": W}) for name in "ab")
    one, two = open_source(first), open_source(second)
    assert one.fingerprint() == two.fingerprint()
    assert stamps_of(one) != stamps_of(two)
    assert json.loads(json.dumps([one.fingerprint(), stamps_of(one)]))
    other = open_source(save(first, {"w": W.reshape(1, -1)}))
    assert other.fingerprint() != one.fingerprint()


# ---------------------------------------------------------------- reading ahead


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system is not told")
def test_bytes_are_asked_for_in_pieces_the_system_reads_ahead(tmp_path, monkeypatch):
    path = save(tmp_path / "m.safetensors", {"w": np.zeros(200_000, np.float32)})
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, *what: asked.append(what))
    monkeypatch.setattr(files, "_read_ahead", lambda _device: 300_000)
    monkeypatch.setattr(files, "_is_in_memory", lambda _file: False)
    monkeypatch.setattr(files.LocalFile, "_is_there", lambda _file, _position: False)
    with open_source(path) as source:
        source.prefetch("w", 50_000, 150_000)
    first = path.stat().st_size - 600_000
    needed = os.POSIX_FADV_WILLNEED
    assert asked == [(first, 300_000, needed), (first + 300_000, 300_000, needed)]


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="nobody can say what is in memory")
def test_what_is_in_memory_is_not_asked_for(tmp_path, monkeypatch):
    path = save(tmp_path / "m.safetensors", {"w": np.zeros(200_000, np.float32)})
    path.read_bytes()
    looks, asked, opened = [], [], open_source(path)
    monkeypatch.setattr(files, "_is_in_memory", lambda _file: False)
    monkeypatch.setattr(os, "preadv", lambda *what: looks.append(what) or len(looks) < 4)
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, *what: asked.append(what))
    with opened as source:
        for _ in range(2 + 4 + 8):
            source.prefetch("w", 0, 10)
        assert (len(looks), asked) == (3, [])  # looked at after 0, 1 and 3 more
        source.prefetch("w", 0, 10)
        assert len(asked) == 1  # and what is no longer there is asked for at once


def test_a_walk_asks_for_what_comes_next(tmp_path, monkeypatch):
    chunks = 2 * CHUNKS_AHEAD
    path = save(tmp_path / "m.safetensors", {"w": np.zeros(chunks * CHUNK, np.uint8)})
    asked = []
    with open_source(path) as source:
        monkeypatch.setattr(source, "prefetch", lambda _name, *what: asked.append(what))
        for place, _ in read_chunks([source], "w"):
            done = sum(count for _, count in asked)
            assert done == min(place + (1 + CHUNKS_AHEAD) * CHUNK, chunks * CHUNK)
    assert [start for start, _ in asked] == [0, *range(5 * CHUNK, chunks * CHUNK, CHUNK)]


OPEN = """
import sys, pathlib, dare.inputs.opening
dare.inputs.opening.open_model(pathlib.Path(sys.argv[1]))
print(*sorted(name for name in sys.modules if name.startswith("dare.inputs.")))
"""


def test_plain_safetensors_import_no_other_form(tmp_path):
    command = [sys.executable, "-c", OPEN, save(tmp_path / "m.safetensors", {"w": W})]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert [name.rpartition(".")[2] for name in found] == ["names", "opening", "shards", "sources"]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1048576\n"


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"),
        *("config.json", "model.gguf", "pytorch_model.bin", "adapter_config.json"),
        "adapter_model.safetensors",
    ],
)
def test_a_git_lfs_pointer_is_named_with_the_remedy(tmp_path, name):
    """In whatever form of model it stands for a file."""
    if name.startswith("model-"):
        write_index(tmp_path, {"a": name})
    if name == "config.json":
        save(tmp_path / "model.safetensors", {"a": np.zeros(4, np.float32)})
    if name == "adapter_model.safetensors":
        adapter = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
        (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / name).write_bytes(POINTER)
    path = tmp_path / name if name.endswith("gguf") else tmp_path
    with pytest.raises(InputError) as caught:
        open_model(path, allow_pickle=True)
    assert str(caught.value).startswith(f"{tmp_path / name}: is a Git LFS pointer")
    assert "`git lfs pull`" in str(caught.value)
