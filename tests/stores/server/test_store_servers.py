"""The server does what S3 does, the proxy does what it is asked to, and both stop by themselves."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from fault_proxy import Fault, FaultProxy

MIB = 1 << 20


def test_parts_are_uploaded_listed_and_completed_in_any_order(bucket):
    contents = {n: bytes([n]) * (5 * MIB if n < 3 else 7) for n in (2, 3, 1)}
    place = {"Bucket": bucket.name, "Key": "a/big"}
    upload = bucket.client.create_multipart_upload(**place)["UploadId"]
    for number, content in contents.items():
        answer = bucket.client.upload_part(
            **place, UploadId=upload, PartNumber=number, Body=content
        )
        assert answer["ETag"].strip('"') == hashlib.md5(content).hexdigest()
    listed = bucket.client.list_parts(**place, UploadId=upload)["Parts"]
    assert [(p["PartNumber"], p["Size"]) for p in listed] == [
        (1, 5 * MIB),
        (2, 5 * MIB),
        (3, 7),
    ]
    assert bucket.keys() == []
    parts = [{"PartNumber": p["PartNumber"], "ETag": p["ETag"]} for p in listed]
    bucket.client.complete_multipart_upload(
        **place, UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert bucket.get("a/big") == b"".join(contents[n] for n in (1, 2, 3))
    assert bucket.keys() == ["a/big"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("status", code=403), (ClientError, "AccessDenied")),
        (Fault("status", code=503), (ClientError, "SlowDown")),
        (Fault("truncate", nbytes=1000), (ResponseStreamingError, "IncompleteRead")),
        (Fault("reset"), (ConnectionClosedError, "closed")),
        (Fault("lose"), (ConnectionClosedError, "closed")),
        (Fault("hang"), (ReadTimeoutError, "timeout")),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_fault_happens_to_one_request(bucket, proxy, fault, expected):
    bucket.put("x", b"y" * 100_000)
    client = replace(bucket.s3, endpoint=proxy.endpoint).client(timeout=1)
    fault.times = 1
    proxy.inject(fault)
    kind, match = expected
    with pytest.raises(kind, match=match):
        client.get_object(Bucket=bucket.name, Key="x")["Body"].read()
    assert client.get_object(Bucket=bucket.name, Key="x")["Body"].read() == b"y" * 100_000
    assert proxy.count("GET", "/x$") == 2


def test_an_answer_that_is_lost_was_given(bucket, proxy):
    client = replace(bucket.s3, endpoint=proxy.endpoint).client()
    proxy.inject(Fault("lose", method="PUT"))
    with pytest.raises(ConnectionClosedError):
        client.put_object(Bucket=bucket.name, Key="x", Body=b"there")
    assert bucket.get("x") == b"there"


def test_an_etag_is_changed_and_nothing_else(bucket, proxy):
    bucket.put("x", b"y")
    client = replace(bucket.s3, endpoint=proxy.endpoint).client()
    true = client.head_object(Bucket=bucket.name, Key="x")
    proxy.inject(Fault("etag", times=1))
    changed = client.head_object(Bucket=bucket.name, Key="x")
    assert changed["ETag"] == '"beef' + true["ETag"][5:] != true["ETag"]
    assert changed["ContentLength"] == 1


def test_latency_and_bandwidth_take_their_time(bucket, proxy):
    bucket.put("x", b"y" * MIB)
    client = replace(bucket.s3, endpoint=proxy.endpoint).client()
    proxy.latency = 0.2
    started = time.perf_counter()
    client.head_object(Bucket=bucket.name, Key="x")
    assert time.perf_counter() - started >= 0.2
    proxy.clear()
    proxy.bandwidth = 2 * MIB
    started = time.perf_counter()
    client.get_object(Bucket=bucket.name, Key="x")["Body"].read()
    assert time.perf_counter() - started >= 0.4


def test_the_servers_die_with_the_process_that_started_them(tmp_path):
    code = (
        "import sys, pathlib; from servers import SwiftServer\n"
        "with SwiftServer(pathlib.Path(sys.argv[1])) as s: print(s.s3.port, flush=True); input()"
    )
    here = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "swift"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(here)},
    )
    port = int(process.stdout.readline())
    with FaultProxy(port):  # somebody still talks to it
        process.send_signal(signal.SIGKILL)
        process.communicate()
        deadline = time.monotonic() + 20
        while _listens(port) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not _listens(port)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
