"""Outputs in a store: uploaded file by file, taken up where a merge broke off, nothing else's lost.

The store is obstore's own in memory, so what talks to it is what talks to any other; its ETags say
nothing of the content, so every object is read back. A real server is in tests/stores.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.errors import MismatchError, OutputError, RecipeError
from dare.output import store as destinations
from dare.output.output import Output
from dare.output.receipt import METADATA_KEY
from dare.output.store import StoreSink
from dare.output.targets import UNKNOWN, default_scratch, has_fitting_check, work_folder
from dare.planning.data import Layout
from dare.run.engine import publisher_of
from dare.stores import objects, reading
from dare.stores.locations import to_path
from helpers import listing, save

SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
WHOLE = sorted([*SHARDS, "dare-manifest.json", "model.safetensors.index.json"])


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A store in memory, whatever the bucket is called, and a scratch folder of the test's own."""
    from obstore.store import MemoryStore

    made = MemoryStore()
    monkeypatch.setattr(reading, "_connect", lambda *_: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reading.forget()
    yield made
    reading.forget()


@pytest.fixture
def models(tmp_path):
    draw = np.random.default_rng(0)
    base = {f"w{n}": draw.standard_normal((300, 200), np.float32) for n in range(3)}
    save(tmp_path / "base.safetensors", base)
    save(tmp_path / "math.safetensors", {k: v + np.float32(0.01) for k, v in base.items()})
    return tmp_path


def recipe(models, output="s3://bucket/runs/out", **settings):
    given = {"shard_size": 240_000, "threads": 2, **settings}
    return dare.Request.of(
        base=models / "base.safetensors",
        models=[models / "math.safetensors"],
        output=output,
        verbose=False,
        **given,
    )


def names(store, prefix="runs/out") -> list[str]:
    found = [entry["path"] for entries in store.list(prefix) for entry in entries]
    return sorted(path.removeprefix(f"{prefix}/") for path in found)


def weights(output) -> str | None:
    """The SHA-256 of all weights of an output that is intact."""
    reading.forget()
    found = dare.verify(output)
    assert found.ok, found
    return found.sha256


def fail_at(monkeypatch, number, *, before) -> list[str]:
    """Let the upload with this number fail, or the next step after it; return what is uploaded."""
    upload, seen = objects.upload, []

    def failing(path, content, progress=lambda _nbytes: None):
        seen.append(path.name)
        if len(seen) == number + 1 and before:
            raise OutputError("the network is gone")
        stored = upload(path, content, progress)
        if len(seen) == number + 1:
            raise OutputError("the network is gone")
        return stored

    monkeypatch.setattr(objects, "upload", failing)
    return seen


# ---------------------------------------------------------------- what is made


def test_one_file_has_the_bytes_of_a_local_one(store, models, tmp_path):
    dare.merge(recipe(models, tmp_path / "out.safetensors", shard_size=None))
    dare.merge(recipe(models, "s3://bucket/runs/out.safetensors", shard_size=None))
    assert (
        bytes(store.get("runs/out.safetensors").bytes())
        == (tmp_path / "out.safetensors").read_bytes()
    )
    assert weights("s3://bucket/runs/out.safetensors") == weights(tmp_path / "out.safetensors")
    assert names(store, "runs") == ["out.safetensors", "out.safetensors.manifest.json"]
    assert listing(default_scratch()) == []


def test_shards_have_the_weights_and_a_header_without_digests(store, models, tmp_path):
    dare.merge(recipe(models, tmp_path / "out"))
    dare.merge(recipe(models, scratch=tmp_path / "scratch"))
    assert names(store) == WHOLE
    assert listing(tmp_path / "scratch") == []
    assert weights("s3://bucket/runs/out") == weights(tmp_path / "out")
    for shard in SHARDS:
        content = bytes(store.get(f"runs/out/{shard}").bytes())
        length = 8 + int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8:length])["__metadata__"]
        assert json.loads(metadata[METADATA_KEY])["output"] == UNKNOWN
        assert has_fitting_check(content[:length])
        local = (tmp_path / "out" / shard).read_bytes()
        assert content[length:] == local[length:]
    manifest = json.loads(bytes(store.get("runs/out/dare-manifest.json").bytes()))
    assert str(tmp_path) not in json.dumps(manifest)
    assert manifest["output"] != UNKNOWN


def test_the_plan_says_how_much_room_is_taken(store, models, tmp_path):
    planned = dare.plan(recipe(models))
    assert planned.layout.scratch_bytes == 2 * 240_000
    assert work_folder(planned.layout).parent == tmp_path / "cache/dare/uploads"
    assert dare.plan(recipe(models, tmp_path / "out")).layout.scratch_bytes == 0


def test_few_files_are_in_the_scratch_folder_at_a_time(store, models, monkeypatch, tmp_path):
    most, upload, waits = [0], objects.upload, threading.Event()

    def slow(path, content, progress=lambda _nbytes: None):
        if isinstance(content, Path):
            taken = [f for f in content.parent.glob("*.safetensors") if f.stat().st_blocks > 16]
            most.append(len(taken))
        waits.wait(0.2)
        return upload(path, content, progress)

    monkeypatch.setattr(objects, "upload", slow)
    dare.merge(recipe(models, threads=1))
    assert 1 <= max(most) <= destinations.SCRATCH_FILES


class OneNode:
    """What stands for a cluster: pieces are done here, one after the other."""

    task_memory = 1 << 28

    def size_tasks(self, *_limits):
        return 1

    def processors(self):
        return [1]

    def run(self, job, pieces, common=None):
        with ExitStack() as stack:
            do = job.open(stack)
            for piece in pieces:
                yield ("id", "here"), *do(piece, common)


def test_nodes_write_into_a_scratch_folder_that_is_emptied_meanwhile(
    store, models, tmp_path, monkeypatch
):
    @contextmanager
    def connect(*_address, **_more):
        yield OneNode()

    monkeypatch.setattr("dare.run.cluster.connect", connect)
    monkeypatch.chdir(tmp_path)
    dare.merge(recipe(models, tmp_path / "out"))
    with pytest.raises(RecipeError, match=r'cluster = "auto".*--scratch'):
        dare.merge(recipe(models, cluster="auto"))
    break_off(models, monkeypatch, 2, cluster="auto", scratch="scratch")
    dare.merge(recipe(models, cluster="auto", scratch="scratch"))
    assert names(store) == WHOLE
    assert weights("s3://bucket/runs/out") == weights(tmp_path / "out")
    assert listing(tmp_path / "scratch") == []


# ---------------------------------------------------------------- what breaks off


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", range(5))
def test_a_merge_that_broke_off_goes_on(store, models, tmp_path, monkeypatch, number, before):
    dare.merge(recipe(models, tmp_path / "out"))
    with monkeypatch.context() as patch:
        fail_at(patch, number, before=before)
        with pytest.raises(OutputError, match="network"):
            dare.merge(recipe(models))
    assert before or number < 4 or "dare-manifest.json" in names(store)
    seen = fail_at(monkeypatch, 99, before=True)
    report = dare.merge(recipe(models))
    assert report.resumed_chunks > 0
    assert len([name for name in seen if name in SHARDS]) == max(0, 3 - number)
    assert names(store) == WHOLE
    assert weights("s3://bucket/runs/out") == weights(tmp_path / "out")
    assert listing(default_scratch()) == []


def break_off(models, monkeypatch, number=1, **settings) -> list[str]:
    """Break a merge off before an upload; return what was uploaded, in whatever order it was."""
    with monkeypatch.context() as patch:
        seen = fail_at(patch, number, before=True)
        with pytest.raises(OutputError, match="network"):
            dare.merge(recipe(models, **settings))
    return seen[:number]


def test_what_the_store_lost_or_changed_is_uploaded_again(store, models, tmp_path, monkeypatch):
    dare.merge(recipe(models, tmp_path / "out"))
    lost, changed = break_off(models, monkeypatch, 2)
    store.delete(f"runs/out/{lost}")
    store.put(f"runs/out/{changed}", b"something else")
    seen = fail_at(monkeypatch, 99, before=True)
    dare.merge(recipe(models))
    assert set(SHARDS) <= set(seen)
    assert weights("s3://bucket/runs/out") == weights(tmp_path / "out")


@pytest.mark.parametrize("is_same", [True, False])
def test_shards_count_only_if_their_inputs_are_the_same(store, models, monkeypatch, is_same):
    missing = set(SHARDS) - set(break_off(models, monkeypatch, 2))
    math = models / "math.safetensors"
    if is_same:
        os.utime(math, (1, 1))
    else:
        content = bytearray(math.read_bytes())
        content[-200 * 300 * 4 - 8 :] = content[-200 * 300 * 4 - 8 :][::-1]
        math.write_bytes(content)
    seen = fail_at(monkeypatch, 99, before=True)
    dare.merge(recipe(models, allow_not_finite=True))
    again = {name for name in seen if name in SHARDS}
    assert again == (missing if is_same else missing | set(SHARDS[1:]))
    assert weights("s3://bucket/runs/out")


def test_a_merge_that_died_after_the_last_step_is_complete(store, models, monkeypatch):
    def die(*_args, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(destinations.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            dare.merge(recipe(models))
    seen = fail_at(monkeypatch, 0, before=True)
    report = dare.merge(recipe(models))
    assert seen == []
    assert report.resumed_chunks == 3
    assert listing(default_scratch()) == []


def test_what_can_never_be_finished_leaves_nothing(store, models, monkeypatch):
    def refuse(*_args, **_more):
        raise MismatchError("it is another one")

    monkeypatch.setattr(Output, "finish", refuse)
    with pytest.raises(MismatchError):
        dare.merge(recipe(models))
    assert names(store) == []
    assert not default_scratch().exists()


# ---------------------------------------------------------------- what may be replaced


def test_an_output_is_replaced_if_told_to_and_loses_its_manifest_first(
    store, models, tmp_path, monkeypatch
):
    dare.merge(recipe(models))
    reading.forget()
    with pytest.raises(OutputError, match=r"exists already.*overwrite"):
        dare.merge(recipe(models, seed=9))
    with monkeypatch.context() as patch:
        fail_at(patch, 0, before=True)
        with pytest.raises(OutputError, match="network"):
            dare.merge(recipe(models, seed=9, shard_size=None), overwrite=True)
    assert "dare-manifest.json" not in names(store)
    break_off(models, monkeypatch, 2, seed=8)
    assert dare.merge(recipe(models, seed=9, shard_size=None)).resumed_chunks == 0
    assert names(store) == ["dare-manifest.json", "model.safetensors"]
    dare.merge(recipe(models, tmp_path / "out", seed=9, shard_size=None))
    assert weights("s3://bucket/runs/out") == weights(tmp_path / "out")


def test_what_is_not_ours_is_never_replaced(store, models):
    store.put("runs/out/notes.txt", b"precious")
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(recipe(models))
    with pytest.raises(OutputError, match=r"notes\.txt.*move it away"):
        dare.merge(recipe(models), overwrite=True)
    store.delete("runs/out/notes.txt")
    store.put("runs/out.safetensors", b"precious")
    with pytest.raises(OutputError, match=r"out\.safetensors.*move it away"):
        dare.merge(
            recipe(models, "s3://bucket/runs/out.safetensors", shard_size=None), overwrite=True
        )
    assert bytes(store.get("runs/out.safetensors").bytes()) == b"precious"


def test_what_appears_during_the_merge_is_not_replaced(store, models, monkeypatch):
    free = StoreSink.free_place

    def late(output):
        store.put("runs/out/notes.txt", b"precious")
        free(output)

    monkeypatch.setattr(StoreSink, "free_place", late)
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(recipe(models))
    assert names(store) == ["notes.txt"]


def test_the_shards_of_a_machine_that_is_gone_are_known_by_their_marks(
    store, models, monkeypatch, tmp_path
):
    break_off(models, monkeypatch, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(recipe(models))
    dare.merge(recipe(models), overwrite=True)
    assert names(store) == WHOLE


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("https://host/out", "choose s3://"),
        ("s3://bucket", "add a name"),
        ("s3://bucket/base/out", None),
    ],
)
def test_where_an_output_may_go(store, models, monkeypatch, output, remedy):
    layout = Layout(to_path(output), dare.plan(recipe(models)).layout.files)
    monkeypatch.setattr(objects, "read_object", None)
    assert publisher_of(layout).finished_before() is None  # nobody is asked before the refusal
    if remedy is None:
        with pytest.raises(OutputError, match="choose another output"):
            publisher_of(layout).check([to_path(f"{output}/model.safetensors")], overwrite=True)
    else:
        with pytest.raises(OutputError, match=remedy):
            publisher_of(layout).check([], overwrite=False)


def test_slices_are_not_written_to_a_store(store, models):
    with pytest.raises(OutputError, match="--slice"):
        dare.merge_slice(recipe(models), "1/2")
