"""A merge into a real S3 server on loopback, in several shards, that breaks off and goes on.

`make test` installs the server (`make .venv-stores/ready`); without it this fails.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from servers import SwiftServer
from small_models import make_models, recipe

import dare
from dare.errors import OutputError
from dare.stores import objects, reading

SHARD = 10 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux alone")


@pytest.fixture
def client(monkeypatch, tmp_path):
    """A client of a server that the environment leads to; parts are as small as S3 takes them."""
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with (
        tempfile.TemporaryDirectory(prefix="dare-swift-") as folder,
        SwiftServer(Path(folder)) as server,
    ):
        for name, value in server.s3.environment.items():
            monkeypatch.setenv(name, value)
        reading.forget()
        yield server.s3.client()
    reading.forget()


def test_a_merge_into_s3_breaks_off_and_goes_on(client, tmp_path, monkeypatch):
    client.create_bucket(Bucket="models")
    models = make_models(tmp_path)
    dare.merge(recipe(models, tmp_path / "local", shard_size=SHARD))
    wanted = recipe(models, "s3://models/runs/out", shard_size=SHARD)
    upload, uploaded, read_back = objects.upload, [], []

    def breaks_off(path, *given):
        if len(uploaded) == 1:
            raise OutputError("the network is gone")
        uploaded.append(path.name)
        return upload(path, *given)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "upload", breaks_off)
        with pytest.raises(OutputError, match="the network is gone"):
            dare.merge(wanted)
    assert list(there(client)) == [f"runs/out/{uploaded[0]}"]
    kept = there(client)

    monkeypatch.setattr(objects, "_is_same", lambda path, _: bool(read_back.append(path)) or True)
    report = dare.merge(wanted)
    assert report.resumed_chunks > 0
    assert read_back == []  # the ETag of each object says what is in it
    assert {key: there(client)[key] for key in kept} == kept
    assert len(there(client)) == len(list((tmp_path / "local").iterdir()))
    found, local = dare.verify("s3://models/runs/out"), dare.verify(tmp_path / "local")
    assert (found.ok, found.sha256) == (True, local.sha256)
    assert client.list_multipart_uploads(Bucket="models").get("Uploads", []) == []
    with pytest.raises(OutputError, match="overwrite"):
        dare.merge(wanted)


def there(client) -> dict[str, object]:
    """The keys of all objects, and when each was stored."""
    found = client.list_objects_v2(Bucket="models").get("Contents", ())
    return {entry["Key"]: entry["LastModified"] for entry in found}
