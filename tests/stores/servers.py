"""Starts and stops the stores that tests talk to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import swift_server

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DARE_STORES_PYTHON", ROOT / ".venv-stores/bin/python"))
"""One that has Swift; `make test-stores` installs it."""


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
            raise FileNotFoundError(f"{PYTHON}: there is no Swift; run `make test-stores`")
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
        self.s3 = S3(f"http://127.0.0.1:{json.loads(line)['port']}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


if __name__ == "__main__":  # for a look by hand
    with SwiftServer(Path(sys.argv[1])) as server:
        for name, value in server.s3.environment.items():
            print(f"export {name}={value}")
        input()
