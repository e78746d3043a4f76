"""A real S3 server for the session, buckets in it, and a proxy that does what networks do."""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_proxy import FaultProxy
from servers import AZURITE, S3, AzuriteServer, SwiftServer
from small_models import make_models, recipe

import dare
from dare.stores import objects
from dare.stores.reading import forget

_NUMBERS = itertools.count()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell runs in the background; the processes under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own for a test, reached directly or through a proxy."""

    name: str
    s3: S3
    client: Any
    """Goes to the server itself, past any proxy."""

    def url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, content: bytes | Path) -> str:
        """Store an object, a file or a folder; return its URL."""
        if isinstance(content, Path) and content.is_dir():
            for file in content.rglob("*"):
                if file.is_file():
                    self.put(f"{key}/{file.relative_to(content).as_posix()}", file)
        else:
            body = content.read_bytes() if isinstance(content, Path) else content
            self.client.put_object(Bucket=self.name, Key=key, Body=body)
        return self.url(key)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.name, Prefix=prefix)
        return [o["Key"] for page in found for o in page.get("Contents", ())]

    def uploads(self) -> list[dict[str, Any]]:
        """The multipart uploads that are under way."""
        return list(self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", ()))

    def download(self, prefix: str, folder: Path) -> Path:
        """Fetch everything below a prefix, or one object."""
        for key in self.keys(prefix):
            path = folder / (key[len(prefix) :].lstrip("/") or key.rpartition("/")[2])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(key))
        return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """OpenStack Swift with its s3api on loopback; all it stores is in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="dare-swift-") as folder,
        SwiftServer(Path(folder)) as server,
    ):
        yield server.s3


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the least size that S3 takes, so that small models have some."""
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scratch folder, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/dare/uploads"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models on this machine."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The SHA-256 of the weights that a merge of them gives."""
    output = tmp_path_factory.mktemp("expected") / "out"
    dare.merge(recipe(models, output))
    return dare.verify(output).sha256


@pytest.fixture
def bucket(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket; the environment leads to its server, as a user's would."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    made = Bucket(f"bucket-{next(_NUMBERS)}", s3_server, s3_server.client())
    made.client.create_bucket(Bucket=made.name)
    return made


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    """A blob store on loopback, where node and Azurite are installed."""
    if not AZURITE.exists():
        pytest.skip(f"{AZURITE.parents[3]}: there is no Azurite; it needs npm")
    with (
        tempfile.TemporaryDirectory(prefix="dare-azurite-") as folder,
        AzuriteServer(Path(folder)) as server,
    ):
        yield server


@pytest.fixture
def container(azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty container; the environment leads to its server."""
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    name = f"container-{next(_NUMBERS)}"
    azurite.make_container(name)
    forget()
    return f"az://{name}"


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server that the environment leads to now; `bucket.client` goes past it."""
    with FaultProxy(bucket.s3.port) as running:
        through = replace(bucket.s3, endpoint=running.endpoint)
        for name, value in through.environment.items():
            monkeypatch.setenv(name, value)
        yield running
