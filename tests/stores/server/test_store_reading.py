"""Inputs in S3: the same bytes as from a disk, whatever the network does."""

from __future__ import annotations

import numpy as np
import pytest
from fault_proxy import Fault
from obstore.store import from_url
from small_models import digests, recipe

import dare
from dare.errors import InputError
from dare.inputs.sources import open_source
from dare.recipe.settings import with_files
from dare.stores import reading
from dare.stores.locations import to_path
from helpers import save_shards


@pytest.fixture(autouse=True)
def fresh():
    reading.forget()


@pytest.fixture
def stored(bucket, models):
    """The models in the bucket, by name."""
    return {
        name: bucket.put(f"m/{name}.safetensors", models / f"{name}.safetensors")
        for name in ("base", "math", "code")
    }


def elsewhere(models, output, **places):
    """The same merge with some models in other places."""
    asked = recipe(models, output).recipe
    names = ("math", "code")
    files = [to_path(places.get(n, models / f"{n}.safetensors")) for n in names]
    return with_files(asked, to_path(places.get("base", asked.base)), files, asked.output)


def test_models_in_azures_store(container, models, tmp_path):
    store = from_url(container)
    for name in ("base", "math"):
        store.put(f"m/{name}.safetensors", models / f"{name}.safetensors")
    dare.merge(recipe(models, tmp_path / "local" / "out.safetensors"))
    places = {name: f"{container}/m/{name}.safetensors" for name in ("base", "math")}
    dare.merge(elsewhere(models, tmp_path / "stored" / "out.safetensors", **places))
    assert digests(tmp_path / "stored") == digests(tmp_path / "local")
    folder = to_path(f"{container}/m")
    assert sorted(path.name for path in folder.iterdir()) == [
        "base.safetensors",
        "math.safetensors",
    ]


def test_directories_in_shards_are_listed_and_copied(bucket, tmp_path):
    draw = np.random.default_rng(0)
    arrays = {f"w{n}": draw.random(9000, np.float32) for n in range(5)}
    folder = save_shards(tmp_path / "base", arrays, 3)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "odd.model").write_bytes(b"pieces")
    bucket.put("base", folder)
    path = to_path(bucket.url("base"))
    assert sorted(p.name for p in path.iterdir()) == sorted(p.name for p in folder.iterdir())
    assert path.is_dir()
    assert (path / "config.json").is_file()
    assert not (path / "no").exists()
    assert not to_path(bucket.url("nowhere")).exists()
    here, there = open_source(folder), open_source(path)
    assert here.tensors == there.tensors
    again = dare.ModelEntry(file=path, seed=1)
    dare.merge(dare.Request.of(base=path, models=[again], output=tmp_path / "out", verbose=False))
    assert (tmp_path / "out" / "odd.model").read_bytes() == b"pieces"


# ---------------------------------------------------------------- faults


def test_another_etag_is_another_object(bucket, models, stored, proxy, tmp_path):
    planned = dare.plan(elsewhere(models, tmp_path / "out.safetensors", **stored))
    proxy.inject(Fault("etag", "GET"))
    with pytest.raises(InputError, match="changed since the merge was planned"):
        dare.merge(planned)


def test_a_profile_is_found(bucket, models, stored, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(
        f"[other]\naws_access_key_id = {bucket.s3.access_key}\n"
        f"aws_secret_access_key = {bucket.s3.secret_key}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert open_source(stored["base"]).tensors
