"""Run a program as its own process and say what it took (Linux).

- Wall time runs from before the process is started until it has been waited for.
- CPU time and peak memory are what the kernel has counted for that process (and any child that it
  has waited for itself), by wait4.
- Peak memory is resident memory, in which pages of memory-mapped files count. What the process
  really owns is its anonymous memory: its peak is sampled while the process runs.

A new process starts with the peak of the one that started it, so a peak that is not above our own
says nothing and is left out.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02
READ_BYTES = 1 << 20
LOG_LINES = 15


class ProgramError(Exception):
    """A measured program has ended with an error; the text is the end of what it said."""


@dataclass(frozen=True)
class Measurement:
    """What one run of a program took."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    own_peak_bytes: int | None
    """The part that is not memory-mapped files."""


def measure(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Measurement:
    """Run a command to its end."""
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        sampler = OwnMemorySampler(process.pid)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall_seconds = time.perf_counter() - started
        sampler.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            said = "\n".join(lines)
            raise ProgramError(f"{command[0]} ended with {process.returncode}:\n{said}")

    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tells = usage.ru_maxrss > ours
    return Measurement(
        wall_seconds,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024 if tells else None,
        sampler.peak_bytes if tells else None,
    )


class OwnMemorySampler(threading.Thread):
    """Looks at a process's anonymous memory again and again."""

    def __init__(self, process_id: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._status = Path(f"/proc/{process_id}/status")
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample until told to stop, or until the process is gone."""
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                text = self._status.read_text()
            except OSError:
                return
            for line in text.splitlines():
                if line.startswith("RssAnon:"):
                    self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) * 1024)

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()


def warm_page_cache(files: Iterable[Path]) -> None:
    """Read files from end to end, so that the next to read them need not wait for the disk."""
    buffer = bytearray(READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def available_memory_bytes() -> int:
    """What the kernel says a new program could take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; this benchmark needs Linux")
