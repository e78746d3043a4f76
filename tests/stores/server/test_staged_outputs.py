"""Outputs that obstore writes: in Azure's store, by its emulator, and in S3 to have another."""

from __future__ import annotations

import pytest
from obstore.store import from_url
from small_models import digests, recipe

import dare
from dare.errors import OutputError
from dare.output import staged, store_targets


def fetch(address: str, name: str, folder):
    """Download what lies below a name."""
    store = from_url(address)
    for some in store.list(name):
        for entry in some:
            path = folder / entry["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(store.get(entry["path"]).bytes()))
    return folder / name


@pytest.fixture(params=["az", "s3"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "az":
        return request.getfixturevalue("container")
    bucket = request.getfixturevalue("bucket")

    def open_staged(target):
        return staged.StagedObjects(store_targets.store_path(target.with_name("out.partial")))

    monkeypatch.setattr("dare.output.store_output.open_objects", open_staged)
    monkeypatch.setattr(store_targets, "open_objects", open_staged)
    return f"s3://{bucket.name}"


def test_the_bytes_are_those_of_a_local_output_also_after_a_break(
    address, models, tmp_path, monkeypatch
):
    dare.merge(recipe(models, tmp_path / "local", shard_size=14 << 20))
    send = staged.StagedObjects.send
    sent = []

    def break_off(objects, upload, number, content):
        if len(sent) == 2:
            raise OutputError("the network is gone")
        sent.append(number)
        return send(objects, upload, number, content)

    monkeypatch.setattr(staged.StagedObjects, "send", break_off)
    with pytest.raises(OutputError, match="the network is gone"):
        dare.merge(recipe(models, f"{address}/runs/out", shard_size=14 << 20))
    monkeypatch.setattr(staged.StagedObjects, "send", send)
    report = dare.merge(recipe(models, f"{address}/runs/out", shard_size=14 << 20))
    assert report.resumed_chunks > 0
    fetched = fetch(address, "runs", tmp_path / "fetched") / "out"
    assert digests(fetched) == digests(tmp_path / "local")
    assert sorted(path.name for path in fetched.parent.iterdir()) == ["out"]
    assert dare.verify(fetched).ok
    assert dare.verify(f"{address}/runs/out").ok
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(recipe(models, f"{address}/runs/out", shard_size=14 << 20))
    dare.merge(recipe(models, f"{address}/runs/out", seed=9), overwrite=True)
    again = fetch(address, "runs", tmp_path / "again") / "out"
    assert sorted(path.name for path in again.iterdir()) == [
        "dare-manifest.json",
        "model.safetensors",
    ]


def test_a_container_that_is_not_there(container, models):
    with pytest.raises(OutputError, match="there is no such bucket or container; make it first"):
        dare.merge(recipe(models, "az://no-such-container/out"))
