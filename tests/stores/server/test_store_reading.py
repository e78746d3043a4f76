"""Inputs in S3: the same bytes as from a disk, whatever the network does."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from fault_proxy import Fault
from obstore.store import from_url
from small_models import digests, recipe

import dare
from dare.errors import InputError
from dare.inputs.sources import open_source
from dare.stores import reading
from dare.stores.locations import to_path
from file_server import serving
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
    asked = recipe(models, output)
    names = ("math", "code")
    files = [to_path(places.get(n, models / f"{n}.safetensors")) for n in names]
    return asked.with_files(to_path(places.get("base", asked.base)), files, asked.output)


def test_base_on_the_web_a_model_in_s3_and_one_here(bucket, models, tmp_path):
    dare.merge(recipe(models, tmp_path / "local" / "out.safetensors"))
    with serving() as web:
        base = web.add("base.safetensors", models / "base.safetensors")
        math = bucket.put("math.safetensors", models / "math.safetensors")
        out = tmp_path / "stored" / "out.safetensors"
        dare.merge(elsewhere(models, out, base=base, math=math))
    assert digests(tmp_path / "stored") == digests(tmp_path / "local")
    manifest = json.loads((out.parent / "out.safetensors.manifest.json").read_bytes())
    told = manifest["recipe"]["models"]
    assert told["base_file"] == base
    assert told["merge_files"][0] == math


def test_everything_in_s3(bucket, models, stored, tmp_path):
    dare.merge(recipe(models, tmp_path / "out"))
    dare.merge(elsewhere(models, bucket.url("out"), **stored))
    fetched = bucket.download("out/", tmp_path / "fetched")
    assert digests(fetched)["model.safetensors"] == digests(tmp_path / "out")["model.safetensors"]
    assert dare.verify(bucket.url("out")).ok
    again = dare.load_recipe(bucket.url("out"))
    assert str(again.base) == stored["base"]


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
    dare.merge(dare.Recipe(base=path, models=[again], output=tmp_path / "out", verbose=False))
    assert (tmp_path / "out" / "odd.model").read_bytes() == b"pieces"


# ---------------------------------------------------------------- faults


def merged(models, stored, tmp_path, name):
    out = tmp_path / name / "out.safetensors"
    dare.merge(elsewhere(models, out, **stored))
    return digests(out.parent)


PASSING = {
    "503": Fault("status", "GET", code=503, times=4, after=3),
    "500": Fault("status", "GET", code=500, times=4, after=3),
    "truncate": Fault("truncate", "GET", nbytes=300_000, times=6, after=3),
    "reset": Fault("reset", "GET", times=4, after=3),
    "lose": Fault("lose", "GET", times=4, after=3),
    "delay": Fault("delay", "GET", seconds=0.3, times=20),
    "hang": Fault("hang", "GET", times=3, after=3),
}


@pytest.mark.parametrize("name", PASSING)
def test_faults_that_pass_change_nothing(
    bucket, models, stored, proxy, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(reading, "PATIENCE_SECONDS", 1.0)
    dare.merge(recipe(models, tmp_path / "local" / "out.safetensors"))
    fault = replace(PASSING[name])
    proxy.inject(fault)
    assert merged(models, stored, tmp_path, "stored") == digests(tmp_path / "local")
    assert fault.happened >= 3


def test_another_etag_is_another_object(bucket, models, stored, proxy, tmp_path):
    planned = dare.plan(elsewhere(models, tmp_path / "out.safetensors", **stored))
    proxy.inject(Fault("etag", "GET"))
    with pytest.raises(InputError, match="changed since the merge was planned"):
        dare.merge(planned)


def test_another_region_is_told(bucket, stored, proxy):
    proxy.inject(Fault("status", "GET", code=400, reason="AuthorizationHeaderMalformed"))
    with pytest.raises(InputError, match="is in another region; set AWS_REGION to it"):
        open_source(stored["base"])


def test_what_is_forbidden_is_told(bucket, models, stored, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrongsecret")
    message = r"denies access \(403.*set AWS_PROFILE"
    with pytest.raises(InputError, match=message) as caught:
        merged(models, stored, tmp_path, "out")
    assert "wrongsecret" not in str(caught.value)


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


def test_missing_buckets_and_objects_are_told(bucket, models):
    with pytest.raises(InputError, match=r"none\.safetensors: no such file"):
        open_source(bucket.url("none.safetensors"))
    with pytest.raises(InputError, match="the store has no no-such-bucket-here"):
        open_source("s3://no-such-bucket-here/x.safetensors")


def test_an_object_that_is_replaced_is_noticed(bucket, models, stored, tmp_path):
    planned = dare.plan(elsewhere(models, tmp_path / "out.safetensors", **stored))
    bucket.put("m/math.safetensors", models / "code.safetensors")
    with pytest.raises(InputError, match=r"math\.safetensors: changed since the merge was planned"):
        dare.merge(planned)
