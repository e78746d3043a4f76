"""What networks and stores do to a merge that writes to S3: a retry or a clear error, no loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fault_proxy import Fault, FaultProxy
from small_models import digests, recipe
from swift_server import SECRET_KEY

import dare
from dare.errors import OutputError
from dare.output import s3

PARTS = "partNumber="
COMPLETE = "uploadId="
OUT = "runs/out"


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch):
    """Few tries, so that a store that never recovers is known soon."""
    monkeypatch.setattr(s3, "TRIES", 3)
    s3._opened.clear()


def expect(fault: Fault, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a fault happen; who waits for an answer that never comes waits shortly."""
    if fault.kind == "hang":
        monkeypatch.setattr(s3, "ANSWER_SECONDS", 5)
    proxy.inject(fault)


@pytest.fixture(scope="session")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("expected")
    dare.merge(recipe(models, folder / "out"))
    return digests(folder / "out")


PASSING = {
    "503 for parts": Fault("status", "PUT", PARTS, times=2),
    "500 for the completion": Fault("status", "POST", COMPLETE, times=2, code=500),
    "503 for everything at first": Fault("status", times=2),
    "resets of parts": Fault("reset", "PUT", PARTS, times=2),
    "lost answers to parts": Fault("lose", "PUT", PARTS, times=2),
    "a lost answer to the completion": Fault("lose", "POST", COMPLETE, times=1),
    "a lost answer to the lock": Fault("lose", "PUT", "lock", times=1),
    "a lost answer to the journal": Fault("lose", "PUT", "jsonl", times=2),
    "a part that hangs": Fault("hang", "PUT", PARTS, times=1),
    "a completion that hangs": Fault("hang", "POST", COMPLETE, times=1),
    "a truncated body": Fault("truncate", "GET", "first/", times=2, nbytes=1000),
    "a truncated list": Fault("truncate", "GET", "uploadId=", times=1, nbytes=50),
    "delays": Fault("delay", "PUT", PARTS, seconds=1.0),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(bucket, proxy, models, expected, tmp_path, monkeypatch, fault):
    expect(fault, proxy, monkeypatch)
    dare.merge(recipe(models, bucket.url(OUT)))
    assert fault.happened
    assert digests(bucket.download(OUT, tmp_path)) == expected
    assert not [key for key in bucket.keys("") if ".partial" in key]
    assert bucket.uploads() == []


LASTING = {
    "access is denied": (Fault("status", "PUT", PARTS, after=2, code=403), "access is denied"),
    "no bucket": (Fault("status", code=404), "there is no such bucket"),
    "expired": (Fault("status", "PUT", PARTS, after=2, code=400), "credentials have expired"),
    "full": (Fault("status", "PUT", PARTS, after=2, code=507), "quota is used up"),
    "another region": (
        Fault("status", code=301, reason="PermanentRedirect"),
        "bucket is in another region",
    ),
    "slow down": (
        Fault("status", "PUT", PARTS, after=2),
        r"refuses after 3 tries.*SlowDown",
    ),
    "resets": (Fault("reset", "PUT", PARTS, after=2), "does not answer"),
    "hangs": (Fault("hang", "PUT", PARTS, after=2), "does not answer"),
    "other ETags": (Fault("etag", "PUT", PARTS, after=2), r"does not have part \d as it was sent"),
}


@pytest.mark.parametrize(("fault", "text"), LASTING.values(), ids=LASTING)
def test_what_lasts_is_told_and_the_same_merge_goes_on(
    bucket, proxy, models, expected, tmp_path, monkeypatch, fault, text
):
    expect(fault, proxy, monkeypatch)
    with pytest.raises(OutputError, match=text) as raised:
        dare.merge(recipe(models, bucket.url(OUT)))
    assert re.match(rf"s3://{bucket.name}/?", str(raised.value))
    assert SECRET_KEY not in str(raised.value)
    assert not [key for key in bucket.keys("") if ".partial" not in key]
    proxy.clear()
    report = dare.merge(recipe(models, bucket.url(OUT)))
    assert (report.resumed_chunks > 0) == (fault.target == PARTS)
    assert digests(bucket.download(OUT, tmp_path)) == expected
    assert bucket.uploads() == []


def test_a_store_that_is_slow_is_waited_for(bucket, proxy, models, tmp_path):
    proxy.bandwidth = 15 << 20
    proxy.latency = 0.05
    dare.merge(recipe(models, bucket.url(OUT)))
    assert dare.verify(bucket.download(OUT, tmp_path / "out")).ok


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("AWS_SECRET_ACCESS_KEY", "another-secret-of-mine", "does not accept the credentials"),
        ("AWS_ACCESS_KEY_ID", None, "no credentials were found"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "does not answer"),
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


def test_a_bucket_that_is_not_there(bucket, models):
    with pytest.raises(OutputError, match=r"there is no such bucket; make it first"):
        dare.merge(recipe(models, "s3://no-such-bucket/out"))


def test_a_bucket_of_others_is_refused(bucket, models, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other:stranger")
    with pytest.raises(OutputError, match=r"there is no such bucket|access is denied"):
        dare.merge(recipe(models, bucket.url(OUT)))
