"""What networks and stores do to a merge that writes to S3: a retry or a clear error, no loss."""

from __future__ import annotations

import pytest
from fault_proxy import Fault
from small_models import recipe
from swift_server import SECRET_KEY

import dare
from dare.errors import OutputError
from dare.stores import reading

PARTS = "partNumber="
COMPLETE = "uploadId="
OUT = "runs/out"
SHARD = 14 << 20


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch):
    """Few tries, so that a store that never recovers is known soon."""
    monkeypatch.setattr(reading, "RETRIES", 2)
    reading.forget()


def weights(bucket, tmp_path) -> str | None:
    found = dare.verify(bucket.download(OUT, tmp_path / "fetched"))
    assert found.ok
    return found.sha256


PASSING = {
    "503 for parts": Fault("status", "PUT", PARTS, times=2),
    "500 for the completion": Fault("status", "POST", COMPLETE, times=2, code=500),
    "resets of parts": Fault("reset", "PUT", PARTS, times=2),
    "a lost answer to the completion": Fault("lose", "POST", COMPLETE, times=1),
    "a part that hangs": Fault("hang", "PUT", PARTS, times=1),
    "ETags that say nothing": Fault("etag", "HEAD"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(bucket, proxy, models, expected, tmp_path, monkeypatch, fault):
    if fault.kind == "hang":
        monkeypatch.setattr(reading, "PATIENCE_SECONDS", 5)
    proxy.inject(fault)
    dare.merge(recipe(models, bucket.url(OUT), shard_size=SHARD))
    assert fault.happened
    assert weights(bucket, tmp_path) == expected
    assert bucket.uploads() == []


LASTING = {
    "denied": (Fault("status", "PUT", PARTS, after=4, code=403), r"denies access.*AWS_PROFILE"),
    "no bucket": (Fault("status", code=404), "make it first"),
    "expired": (Fault("status", "PUT", PARTS, after=4, code=400), "ExpiredToken.*AWS_PROFILE"),
    "full": (Fault("status", "PUT", PARTS, after=4, code=507), "make room"),
    "region": (Fault("status", code=301, reason="PermanentRedirect"), "set AWS_REGION"),
    "resets": (Fault("reset", "PUT", PARTS, after=4), "check the address and the network"),
    "other bytes": (Fault("flip", "GET", "safetensors$"), "run the merge again"),
}


@pytest.mark.parametrize(("fault", "text"), LASTING.values(), ids=LASTING)
def test_what_lasts_is_told_and_the_same_merge_goes_on(
    bucket, proxy, models, expected, tmp_path, fault, text
):
    if fault.kind == "flip":  # a store that has something else than was sent
        proxy.inject(Fault("etag", "HEAD"))
    proxy.inject(fault)
    with pytest.raises(OutputError, match=text) as raised:
        dare.merge(recipe(models, bucket.url(OUT), shard_size=SHARD))
    assert str(raised.value).startswith(f"s3://{bucket.name}/runs/out")
    assert SECRET_KEY not in str(raised.value)
    assert f"{OUT}/dare-manifest.json" not in bucket.keys("")
    proxy.clear()
    report = dare.merge(recipe(models, bucket.url(OUT), shard_size=SHARD))
    assert (report.resumed_chunks > 0) == bool(fault.target)
    assert weights(bucket, tmp_path) == expected


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("AWS_SECRET_ACCESS_KEY", "another-secret-of-mine", "AWS_PROFILE"),
        ("AWS_ACCESS_KEY_ID", None, "no credentials.*AWS_PROFILE"),
        ("AWS_ACCESS_KEY_ID", "other:stranger", r"AWS_PROFILE|make it first"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "no connection"),
    ],
)
def test_what_is_wrong_with_the_environment_is_told(
    bucket, models, monkeypatch, variable, value, text
):
    if value is None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(variable, value)
    with pytest.raises(OutputError, match=text) as raised:
        dare.merge(recipe(models, bucket.url(OUT)))
    assert "secret" not in str(raised.value).replace("AWS_SECRET_ACCESS_KEY", "")
    assert bucket.keys("") == []
