"""Outputs in S3: the same bytes as on a disk, whole or not at all, and never something else's."""

from __future__ import annotations

import pytest
from small_models import digests, recipe

import dare
from dare.errors import OutputError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "settings"),
    [("out.safetensors", {}), ("out", {}), ("out", {"shard_size": 10 * MIB})],
    ids=["file", "directory", "shards"],
)
def test_an_output_in_s3_has_the_bytes_of_a_local_one(bucket, models, tmp_path, name, settings):
    (tmp_path / "local").mkdir()
    dare.merge(recipe(models, tmp_path / "local" / name, **settings))
    report = dare.merge(recipe(models, bucket.url(f"runs/{name}"), **settings))
    assert report.resumed_chunks == 0
    fetched = bucket.download("runs/", tmp_path / "fetched")
    assert digests(fetched) == digests(tmp_path / "local")
    assert dare.verify(fetched / name).ok
    assert dare.verify(bucket.url(f"runs/{name}")).ok
    assert bucket.uploads() == []
    assert not [key for key in bucket.keys("") if ".partial" in key]
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(recipe(models, bucket.url(f"runs/{name}"), **settings))
