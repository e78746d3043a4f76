"""Jobs of the server: one runs, the others wait, and all are there when a page comes back.

Each runs in a process (`job_process`) that ends when the server does, however that ends: the
process watches the pipe through which it got its request.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from dare.errors import InputError
from dare.studies.processes import describe_status
from dare.web.job_process import INTERRUPTED, Request

State = Literal["waiting", "running", "done", "failed", "stopped"]
GRACE_SECONDS = 20.0
"""How long a process may take to end when it is interrupted; what a merge has done is on the disk
at any moment."""
LAST_BYTES = 2000
"""Of what a process that crashed has printed."""
MOST_WAITING = 20
MOST_FINISHED = 100
"""Those that ended first are forgotten first, with what they wrote for the page."""
COMMAND = [sys.executable, "-P", "-m", "dare.web.job_process"]


@dataclass
class Job:
    """One piece of work and how far it is."""

    number: int
    request: Request
    folder: Path
    state: State = "waiting"
    verb: str = ""
    note: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    problem: str | None = None
    result: dict[str, Any] | None = None
    made_at: float = field(default_factory=time.time)
    seconds: float = 0.0
    seconds_left: float | None = None
    pid: int | None = None

    @property
    def kind(self) -> str:
        """What is done."""
        return str(self.request["kind"])

    def to_dict(self) -> dict[str, Any]:
        """What a page shows of it, ready for JSON."""
        shown = {name: value for name, value in vars(self).items() if name != "folder"}
        return {**shown, "kind": self.kind}


class Jobs:
    """A queue of jobs, and a thread that takes care of the one that runs."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dare-playground-")
        self._jobs: dict[str, Job] = {}  # by their numbers
        self._numbers = itertools.count(1)
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._running: Worker | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run_all, name="jobs", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> Job:
        """Put a job at the end of the queue."""
        with self._lock:
            if self._closed:
                raise InputError("the server is stopping")
            if sum(job.state == "waiting" for job in self._jobs.values()) >= MOST_WAITING:
                raise InputError(f"{MOST_WAITING} jobs are waiting; cancel some, or wait for one")
            number = next(self._numbers)
            folder = Path(self._folder.name, str(number))
            folder.mkdir()
            job = Job(number, {**request, "folder": str(folder)}, folder)
            self._jobs[str(number)] = job
            self._forget_the_oldest()
            self._queue.put(job)
        return job

    def _forget_the_oldest(self) -> None:
        ended = [job for job in self._jobs.values() if job.state not in ("waiting", "running")]
        for job in ended[: max(0, len(ended) - MOST_FINISHED)]:
            del self._jobs[str(job.number)]
            shutil.rmtree(job.folder, ignore_errors=True)

    def all(self) -> list[Job]:
        """All jobs that are kept, the latest last."""
        return list(self._jobs.values())

    def find(self, number: str) -> Job:
        """A job by its number as text, which may be any text."""
        job = self._jobs.get(number)
        if job is None:
            raise InputError(f"there is no job {number[:20]!a}; it ended long ago or never was")
        return job

    def cancel(self, job: Job) -> None:
        """Take a job that waits out of the queue, or interrupt it if it runs."""
        with self._lock:
            if job.state == "waiting":
                job.state = "stopped"
                with self._queue.mutex, contextlib.suppress(ValueError):  # just taken out
                    self._queue.queue.remove(job)
            elif job.state == "running" and self._running is not None:
                job.note = "stopping …"
                self._running.interrupt()

    def close(self) -> None:
        """Interrupt what runs, and wait until it has ended."""
        with self._lock:
            self._closed = True
        for job in reversed(self.all()):
            self.cancel(job)
        self._queue.put(None)
        self._thread.join(2 * GRACE_SECONDS)
        self._folder.cleanup()

    def _run_all(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if job.state != "waiting":
                    continue
                try:
                    worker = self._running = Worker(job)
                except OSError as error:
                    job.state, job.problem = "failed", f"no process could be started: {error}"
                    continue
            worker.watch()


class Worker:
    """The process of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._is_cancelled = False
        self._log = (job.folder / "log.txt").open("w+b")
        self._process = start_process(job.request, self._log)
        job.state, job.pid = "running", self._process.pid

    def interrupt(self) -> None:
        """Have the process end soon: its stdin is closed, and it is killed if that is no help."""
        self._is_cancelled = True
        hang_up(self._process)
        killing = threading.Timer(GRACE_SECONDS, self._process.kill)
        killing.daemon = True
        killing.start()

    def watch(self) -> None:
        """Take the messages of the process until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # half a line, of a process that was killed
                self._take(json.loads(line))
        self._conclude(self._process.wait())
        self._process.stdout.close()
        hang_up(self._process)
        self._log.close()

    def _take(self, message: dict[str, Any]) -> None:
        job, now = self._job, time.monotonic()
        if "progress" in message:
            job.done_bytes, job.total_bytes = message["progress"]
            if message["verb"] != job.verb:
                self._first = None
            job.verb, job.note = message["verb"], ""
            self._first = self._first or (now, job.done_bytes)
            job.seconds_left = self._seconds_left(now)
        job.note = message.get("note", job.note)
        job.result = message.get("result", job.result)
        job.problem = message.get("error", job.problem)
        job.seconds = now - self._started

    def _seconds_left(self, now: float) -> float | None:
        """By how fast it went since the first news, which tells of what was taken over as well."""
        job, (began, had) = self._job, self._first or (now, 0)
        if now - began < 1 or job.done_bytes <= had:
            return None
        return (job.total_bytes - job.done_bytes) * (now - began) / (job.done_bytes - had)

    def _conclude(self, status: int) -> None:
        job = self._job
        job.pid, job.seconds_left, job.note = None, None, ""
        job.seconds = time.monotonic() - self._started
        if job.problem is not None:
            job.state = "failed"
        elif job.result is not None:  # even if it was cancelled while reading back
            job.state = "done"
        elif self._is_cancelled or status == INTERRUPTED:
            job.state = "stopped"
        else:
            job.state, job.problem = "failed", self._last_words(status)

    def _last_words(self, status: int) -> str:
        """How a process ended that did not say so, and the last that it printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LAST_BYTES))
        said = self._log.read().decode(errors="replace").strip()
        return f"the process {describe_status(status)}{f': {said}' if said else ''}"


def start_process(request: Request, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that does what is asked for as long as its stdin is open."""
    process = subprocess.Popen(  # noqa: S603 (ours, and the request goes through its stdin)
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
        start_new_session=True,  # Ctrl-C in the server's terminal is for the server
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has crashed, and its end will say so
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    return process


def hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close a process's stdin, which ends it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
