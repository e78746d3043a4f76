from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from memory_objects import Killed, MemoryObjects

import dare
from dare.errors import InputError, OutputError
from dare.output import store_lock, store_output, store_targets
from dare.planning import parts
from dare.recipe.schema import Recipe
from helpers import write_recipe

MANIFEST = "dare-manifest.json"
START = "out.partial/journal/start.jsonl"


@pytest.fixture
def store(monkeypatch):
    """A bucket in memory; parts are small, so that little models have several."""
    objects = MemoryObjects()
    monkeypatch.setattr(store_targets, "open_objects", lambda _target: objects)
    monkeypatch.setattr(store_output, "open_objects", lambda _target: objects)
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 6000)
    monkeypatch.setattr(parts, "PART_BYTES", 9000)
    monkeypatch.setattr(store_output, "UPLOADS", 1)  # so that calls have one order
    return objects


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    draw = np.random.default_rng(0)
    shapes = {f"layers.{n}.weight": (40, 50 + n) for n in range(12)}
    base = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    base["ids"] = np.arange(1500, dtype=np.int64)
    tuned = [
        {
            k: v if v.dtype == np.int64 else v + 0.01 * draw.standard_normal(v.shape, np.float32)
            for k, v in base.items()
        }
        for _ in range(2)
    ]
    return write_recipe(tmp_path, base, tuned, method="dare+linear", threads=1)


def to(recipe: Recipe, output: object, **settings: object) -> Recipe:
    return Recipe(**{**recipe.model_dump(), "output": output, **settings})


def local(recipe: Recipe, folder: Path, name: str) -> dict[str, bytes]:
    """What a merge to this machine writes."""
    dare.merge(to(recipe, folder / name))
    if (folder / name).is_file():
        return {name: (folder / name).read_bytes()}
    return {
        f"{name}/{path.name}": path.read_bytes()
        for path in (folder / name).iterdir()
        if path.name != MANIFEST
    }


def without_manifests(objects: MemoryObjects) -> dict[str, bytes]:
    return {key: text for key, text in objects.objects.items() if "manifest.json" not in key}


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_the_bytes_are_those_of_a_local_output(store, recipe, tmp_path, name):
    shards = {} if "." in name else {"shard_size": 40_000}
    report = dare.merge(to(recipe, f"s3://bucket/{name}", **shards))
    assert without_manifests(store) == local(to(recipe, None, **shards), tmp_path, name)
    assert sum(call == "send " for call in store.calls) > 3
    assert (report.resumed_chunks, store.uploads) == (0, {})


def test_chunks_that_are_written_together_may_lie_in_several_parts(store, tmp_path):
    base = {"w": np.arange(1_200_000, dtype=np.float32)}
    recipe = write_recipe(tmp_path, base, [{"w": base["w"] + 1}], method="dare+linear")
    layout = dare.plan(to(recipe, "s3://bucket/out.safetensors")).layout
    content = base["w"].view(np.uint8)
    with store_output.StoreOutput(layout, {}, "which") as output:
        output.write("w", 0, content)
        pieces = {name[1]: filling.content() for name, filling in output._filling.items()}
    assert sorted(pieces) == [1, 2, 3]  # a part for each chunk, the first with the header
    assert b"".join(pieces[number] for number in sorted(pieces)) == content.tobytes()
    assert store.objects == {}
    dare.merge(to(recipe, "s3://bucket/out.safetensors"))
    assert without_manifests(store) == local(recipe, tmp_path, "out.safetensors")


@pytest.mark.parametrize("lost", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_a_process_that_is_killed_at_any_call_can_be_resumed(
    store, recipe, tmp_path, lost, overwrite
):
    """The output is there as a whole or not at all, and what was sent is not made again."""
    expected = local(to(recipe, None, shard_size=40_000), tmp_path, "out")
    asked = to(recipe, "s3://bucket/out", shard_size=40_000)
    old = {}
    if overwrite:
        dare.merge(to(asked, "s3://bucket/out", seed=99, shard_size=60_000))
        old = dict(store.objects)
    store.revive()
    dare.merge(asked, overwrite=overwrite)
    calls = len(store.calls)
    assert without_manifests(store) == expected
    most_resumed = 0
    for last in range(1 + lost, calls + 1, 7):
        store.objects, store.marks, store.uploads = dict(old), {}, {}
        store.revive()
        store.dies_at, store.answers_are_lost = last, lost
        with pytest.raises(Killed):
            dare.merge(asked, overwrite=overwrite)
        if f"out/{MANIFEST}" in store.objects and store.objects != old:
            seen = {k: v for k, v in without_manifests(store).items() if ".partial" not in k}
            assert seen in (expected, {k: v for k, v in old.items() if MANIFEST not in k})
        store.revive()
        store_lock._OWNED.clear()  # which a dead process has not
        is_cleared = f"out/{MANIFEST}" in store.objects and START not in store.objects
        if is_cleared and not overwrite:  # all that is left to do is to clear away the rest
            with pytest.raises(OutputError, match="exists already"):
                dare.merge(asked)
            assert without_manifests(store) == expected
            continue
        report = dare.merge(asked, overwrite=overwrite)
        assert without_manifests(store) == expected
        assert not any(store.uploads.values())  # one that was begun and not noted has no parts
        most_resumed = max(most_resumed, report.resumed_chunks)
    assert most_resumed == 13


def test_another_merge_to_the_same_name_aborts_the_first(store, recipe):
    store.dies_at = 25
    with pytest.raises(Killed):
        dare.merge(to(recipe, "s3://bucket/out"))
    assert len(store.uploads) == 1
    store.revive()
    store_lock._OWNED.clear()
    report = dare.merge(to(recipe, "s3://bucket/out", seed=5))
    assert "its uploads were aborted" in str(report.warnings)
    assert (report.resumed_chunks, store.uploads) == (0, {})


def test_an_upload_that_the_store_has_forgotten_starts_over(store, recipe):
    store.dies_at = 25
    with pytest.raises(Killed):
        dare.merge(to(recipe, "s3://bucket/out"))
    store.uploads.clear()
    store.revive()
    store_lock._OWNED.clear()
    report = dare.merge(to(recipe, "s3://bucket/out"))
    assert "no longer has the uploads of 1 of 1 files" in str(report.warnings)
    assert report.resumed_chunks == 0


def test_a_part_that_is_not_as_it_was_sent_is_made_again(store, recipe, tmp_path):
    store.dies_at = 25
    with pytest.raises(Killed):
        dare.merge(to(recipe, "s3://bucket/out.safetensors"))
    (sent,) = store.uploads.values()
    number = max(sent)
    sent[number] = b"\0" * len(sent[number])
    store.revive()
    store_lock._OWNED.clear()
    dare.merge(to(recipe, "s3://bucket/out.safetensors"))
    assert without_manifests(store) == local(recipe, tmp_path, "out.safetensors")


def test_inputs_that_were_changed_in_between_are_merged_anew(store, recipe, tmp_path):
    store.dies_at = 25
    with pytest.raises(Killed):
        dare.merge(to(recipe, "s3://bucket/out.safetensors"))
    store.revive()
    store_lock._OWNED.clear()
    file = Path(recipe.models[0].file)
    content = bytearray(file.read_bytes())
    content[-4:] = b"\0\0\x80\x3f"  # the last weight of the last tensor
    file.write_bytes(content)
    report = dare.merge(to(recipe, "s3://bucket/out.safetensors"))
    assert 0 < report.resumed_chunks < 13
    assert without_manifests(store) == local(recipe, tmp_path, "out.safetensors")


def test_nothing_is_replaced_that_dare_did_not_write(store, recipe):
    store.objects["out/notes.txt"] = b"mine"
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(to(recipe, "s3://bucket/out"))
    with pytest.raises(OutputError, match="not made by dare"):
        dare.merge(to(recipe, "s3://bucket/out"), overwrite=True)
    del store.objects["out/notes.txt"]
    dare.merge(to(recipe, "s3://bucket/out"))
    store.objects["out/notes.txt"] = b"mine"
    with pytest.raises(OutputError, match=r"contains notes\.txt, which dare did not write"):
        dare.merge(to(recipe, "s3://bucket/out", seed=1), overwrite=True)
    assert store.objects["out/notes.txt"] == b"mine"


def test_files_of_a_replaced_output_that_the_new_one_has_not_go_away(store, recipe):
    dare.merge(to(recipe, "s3://bucket/out", shard_size=20_000))
    assert len(store.objects) > 6
    dare.merge(to(recipe, "s3://bucket/out"), overwrite=True)
    assert sorted(store.objects) == [f"out/{MANIFEST}", "out/model.safetensors"]


def test_a_folder_that_is_not_ours_is_left_alone(store, recipe):
    store.objects["out.partial/mine"] = b"mine"
    with pytest.raises(OutputError, match="was not made by dare"):
        dare.merge(to(recipe, "s3://bucket/out"))
    assert store.objects == {"out.partial/mine": b"mine"}


def test_what_appears_during_the_merge_is_not_overwritten(store, recipe, monkeypatch):
    finish = store_output.StoreOutput.finish

    def late(output, *given, **named):
        store.objects["out.safetensors"] = b"somebody's"
        return finish(output, *given, **named)

    monkeypatch.setattr(store_output.StoreOutput, "finish", late)
    with pytest.raises(OutputError, match="appeared during the merge"):
        dare.merge(to(recipe, "s3://bucket/out.safetensors"))
    assert store.objects.pop("out.safetensors") == b"somebody's"
    monkeypatch.undo()


def test_a_failed_merge_that_has_sent_nothing_leaves_nothing(store, recipe, monkeypatch):
    def fail(_output, *_given):
        raise InputError("no more")

    monkeypatch.setattr(store_output.StoreOutput, "write", fail)
    with pytest.raises(InputError, match="no more"):
        dare.merge(to(recipe, "s3://bucket/out"))
    assert (store.objects, store.uploads) == ({}, {})


def test_an_input_is_never_overwritten(store, recipe, tmp_path):
    layout = dare.plan(to(recipe, "s3://bucket/models/out")).layout
    for file in ("models/out/model.safetensors", "models/out.partial/base.safetensors"):
        with pytest.raises(OutputError, match="choose another output"):
            store_targets.check_target(
                layout, [store_targets.StorePath(f"s3://bucket/{file}")], overwrite=True
            )
    store_targets.check_target(
        layout, [store_targets.StorePath("s3://bucket/models/outer")], overwrite=True
    )


def test_parts_that_wait_to_be_sent_are_counted_as_memory(recipe):
    here = dare.plan(to(recipe, "out.safetensors")).cost
    there = dare.plan(to(recipe, "s3://bucket/out.safetensors")).cost
    assert there.sent_bytes > 2 * there.bytes_written - 100
    assert there.least_memory == here.least_memory + there.sent_bytes


def test_chunks_are_made_in_the_order_of_the_file(recipe):
    from dare.run.graph import Copy, list_steps

    steps = list_steps(dare.plan(to(recipe, "s3://bucket/out.safetensors")))
    assert isinstance(steps[0], Copy)  # of 8-byte integers, which lie first
    groups = [step.group for step in steps]
    assert groups == sorted(groups)
    assert groups[0] == 1
