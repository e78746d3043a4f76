"""A page that is being served, and a tab of a browser that shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pages
from helpers import PATIENCE_SECONDS


@dataclass(frozen=True)
class Site:
    """A page that is being served."""

    address: str
    """What a browser opens, with the token where there is one."""
    folder: Path
    """The built files, or the folder that the server was pointed at."""

    @property
    def origin(self) -> str:
        """What all addresses of the page begin with."""
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}"

    def with_state(self, query: str) -> str:
        """The address that opens the page with some state: `drop.p=0.5&live.seed=7`."""
        return f"{self.address}{'&' if '?' in self.address else '?'}{query}"


class Tab(pages.Tab):
    """A tab that shows a site."""

    def asked_elsewhere(self, site: Site) -> list[str]:
        """Requests that went to no page of ours."""
        known = (f"{site.origin}/", "data:", f"blob:{site.origin}/")
        return [address for address in self.asked if not address.startswith(known)]


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[tuple[Site, subprocess.Popen[str]]]:
    """The command in a process of its own, which is ended as people end it."""
    command = [sys.executable, "-m", "dare", "playground", str(folder)]
    process = subprocess.Popen(
        [*command, "--no-browser", "--port", "0", "--json"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        document = json.loads(line)
        assert document["pid"] == process.pid
        try:
            yield Site(document["address"], folder), process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=PATIENCE_SECONDS)
