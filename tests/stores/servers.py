"""Starts and stops the stores that tests talk to."""

from __future__ import annotations

import base64
import ctypes
import email.utils
import hashlib
import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import swift_server

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DARE_STORES_PYTHON", ROOT / ".venv-stores/bin/python"))
"""One that has Swift; `make .venv-stores/ready` installs it."""
AZURITE = (
    Path(os.environ.get("DARE_AZURITE", ROOT / ".venv-stores/node_modules/azurite"))
    / "dist/src/blob/main.js"
)
"""Which `make test-stores` installs where npm is there."""


@dataclass(frozen=True)
class S3:
    """An S3 store at an address, which may be that of a proxy before it."""

    endpoint: str
    access_key: str = swift_server.ACCESS_KEY
    secret_key: str = swift_server.SECRET_KEY

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which boto3 and obstore find it, and nothing else."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": swift_server.REGION,
            "AWS_DEFAULT_REGION": swift_server.REGION,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def client(self, *, timeout: float = 60) -> Any:
        """A plain client that tries once, to look and change behind dare's back."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=swift_server.REGION,
            config=Config(
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                read_timeout=timeout,
                retries={"total_max_attempts": 1},
            ),
        )


class SwiftServer:
    """Swift in processes of their own, while it is entered; they die with this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        if not PYTHON.exists():
            raise FileNotFoundError(f"{PYTHON}: there is no Swift; run `make .venv-stores/ready`")
        self._folder.mkdir(parents=True, exist_ok=True)
        os.setxattr(self._folder, "user.dare", b"Swift keeps what it knows of objects so")
        log = (self._folder / "log").open("wb")
        command = [PYTHON, swift_server.__file__, self._folder]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        log.close()
        timer = threading.Timer(60, self._process.kill)
        timer.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise OSError(f"Swift did not start:\n{(self._folder / 'log').read_text()}")
        started = json.loads(line)
        self.s3 = S3(f"http://127.0.0.1:{started['port']}")
        self.processes: list[int] = started["processes"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


class AzuriteServer:
    """Microsoft's emulator of its blob store, while it is entered; it dies with this process."""

    ACCOUNT = "devstoreaccount1"
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    """Both are the same in every Azurite, and public."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent"]
        arguments += ["--location", self._folder, "--disableTelemetry", "--skipApiVersionCheck"]
        self._process = subprocess.Popen(
            ["node", AZURITE, *arguments],
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        until = time.monotonic() + 60
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > until:
                raise OSError("Azurite did not start")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which obstore finds it."""
        return {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{self.port}",
            "AZURE_STORAGE_ACCOUNT_NAME": self.ACCOUNT,
        }

    def make_container(self, name: str) -> None:
        """Make one by a signed request, which obstore has no call for."""
        date = email.utils.formatdate(usegmt=True)
        place = f"/{self.ACCOUNT}/{self.ACCOUNT}/{name}\nrestype:container"
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n{place}"
        digest = hmac.new(base64.b64decode(self.KEY), signed.encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Content-Length": "0",
            "Authorization": f"SharedKey {self.ACCOUNT}:{base64.b64encode(digest).decode()}",
        }
        url = f"http://127.0.0.1:{self.port}/{self.ACCOUNT}/{name}?restype=container"
        request = urllib.request.Request(url, method="PUT", headers=headers)
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 201


def die_with_parent() -> None:
    """Have the process that is about to run killed when this one dies."""
    ctypes.CDLL(None).prctl(swift_server.PARENT_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":  # for a look by hand
    with SwiftServer(Path(sys.argv[1])) as server:
        for name, value in server.s3.environment.items():
            print(f"export {name}={value}")
        input()
