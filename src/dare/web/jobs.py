"""Jobs of the server: one runs, the others wait, and a page that is reloaded finds all of them.

Each runs in its own process, `python -m dare.web.jobs`. The request is the first line of its
stdin, as JSON; its messages go to stdout, a line of JSON each:

    {"progress": [done, total], "verb": "merging"}     bytes, now and then
    {"note": "waiting for slice 2 …"}                  its present activity
    {"result": {…}}                                    its result; a later one replaces it
    {"error": "…"}                                     the reason why there is no result

The process lives as long as its stdin is open. When that ends, because the job is cancelled, the
server stops, or the server was killed, the work is interrupted as by Ctrl-C: a merge keeps finished
chunks in OUTPUT.partial, and the same merge continues from there.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from dare import api
from dare.analysis import analyzing
from dare.analysis.advice import judge, to_json
from dare.documents.shown import Display, json_ready, progress_shown_by
from dare.errors import DareError, DareWarning, InputError, printable
from dare.output import verification
from dare.output.targets import write_file
from dare.recipe.document import request_from_document
from dare.run.processes import Watched, describe_status
from dare.stores.locations import confine

Request = dict[str, Any]
State = Literal["waiting", "running", "done", "failed", "stopped"]
# Time for a process to end when it is interrupted; the work of a merge is always on the disk.
GRACE_SECONDS = 20.0
MOST_WAITING = 20
MOST_FINISHED = 100  # the jobs that ended first are forgotten first, with their files
COMMAND = [sys.executable, "-P", "-m", "dare.web.jobs"]
MESSAGE_SECONDS = 0.1  # the least time between two messages of progress
ANALYSIS = "analysis.json"
INTERRUPTED = 130


@dataclass
class QueuedJob:
    """A request to merge, verify or analyze, and its progress."""

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
        """The kind of work: merge, verify or analyze."""
        return str(self.request["kind"])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a page shows, ready for JSON."""
        shown = {name: value for name, value in vars(self).items() if name != "folder"}
        return {**shown, "kind": self.kind}


class Jobs:
    """A queue of jobs, and a thread that runs one after the other."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._confined = {"given_folders": list(map(str, folders))}
        self._folder = tempfile.TemporaryDirectory(prefix="dare-playground-")
        self._jobs: dict[str, QueuedJob] = {}  # by their numbers
        self._numbers = itertools.count(1)
        self._queue: queue.Queue[QueuedJob | None] = queue.Queue()
        self._lock = threading.Lock()
        self._running: JobProcess | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run_all, name="jobs", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> QueuedJob:
        """Put a job at the end of the queue; forget the oldest finished jobs if there are many."""
        with self._lock:
            if self._closed:
                raise InputError("the server is stopping")
            if sum(job.state == "waiting" for job in self._jobs.values()) >= MOST_WAITING:
                raise InputError(f"{MOST_WAITING} jobs are waiting; cancel some, or wait for one")
            number = next(self._numbers)
            folder = Path(self._folder.name, str(number))
            folder.mkdir()
            job = QueuedJob(number, {**request, "folder": str(folder), **self._confined}, folder)
            self._jobs[str(number)] = job
            ended = [job for job in self._jobs.values() if job.state not in ("waiting", "running")]
            for old in ended[: max(0, len(ended) - MOST_FINISHED)]:
                del self._jobs[str(old.number)]
                shutil.rmtree(old.folder, ignore_errors=True)
            self._queue.put(job)
        return job

    def all(self) -> list[QueuedJob]:
        """Return all jobs that are kept, the latest last."""
        return list(self._jobs.values())

    def find(self, number: str) -> QueuedJob:
        """Find a job by its number as text, which may be any text."""
        job = self._jobs.get(number)
        if job is None:
            raise InputError(f"there is no job {number[:20]!a}; it ended long ago or never existed")
        return job

    def cancel(self, job: QueuedJob) -> None:
        """Take a waiting job out of the queue, or interrupt a running one."""
        with self._lock:
            if job.state == "waiting":
                job.state = "stopped"
                with self._queue.mutex, suppress(ValueError):  # just taken out
                    self._queue.queue.remove(job)
            elif job.state == "running" and self._running is not None:
                job.note = "stopping …"
                self._running.interrupt()

    def close(self) -> None:
        """Interrupt the running job, and wait until it has ended."""
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
                    worker = self._running = JobProcess(job)
                except OSError as error:
                    job.state, job.problem = "failed", f"no process could be started: {error}"
                    continue
            worker.watch()


class JobProcess(Watched):
    """The process of a job, which works as long as its stdin is open."""

    def __init__(self, job: QueuedJob) -> None:
        self._job, self._started = job, time.monotonic()
        self._first: tuple[float, int] | None = None
        self._is_cancelled, self._line = False, b""
        super().__init__(COMMAND, threads=1, stdin=subprocess.PIPE)
        self.send(job.request)
        job.state, job.pid = "running", self._process.pid

    def interrupt(self) -> None:
        """Make the process end soon: close its stdin, and kill it if that does not help."""
        self._is_cancelled = True
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        killing = threading.Timer(GRACE_SECONDS, self._process.kill)
        killing.daemon = True
        killing.start()

    def watch(self) -> None:
        """Take the messages of the process until it ends."""
        status = self.pump(lambda: False, None)
        assert status is not None  # it has ended
        self.close()
        self._finish(status)

    def take(self, piece: bytes) -> None:
        """Take the next messages, each of which is a line."""
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # something else was printed
                self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        job, now = self._job, time.monotonic()
        if "progress" in message:
            job.done_bytes, job.total_bytes = message["progress"]
            if message["verb"] != job.verb:
                self._first = None
            job.verb, job.note = message["verb"], ""
            self._first = self._first or (now, job.done_bytes)
            began, had = self._first  # without bytes that an earlier try had done
            is_known = now - began >= 1 and job.done_bytes > had
            remaining = (job.total_bytes - job.done_bytes) * (now - began)
            job.seconds_left = remaining / (job.done_bytes - had) if is_known else None
        job.note = message.get("note", job.note)
        job.result = message.get("result", job.result)
        job.problem = message.get("error", job.problem)
        job.seconds = now - self._started

    def _finish(self, status: int) -> None:
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
            said = self.printed.shown()
            ended = f"the process {describe_status(status)}{f': {said}' if said else ''}"
            job.state, job.problem = "failed", ended


# ---------------------------------------------------------------- in the process of a job


class Line:
    """The connection to the server, which takes a line of JSON for each message."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message; if nobody listens any more, the interrupt will end the work."""
        with self._sending, suppress(OSError):
            print(json.dumps(json_ready(message)), file=self._stream, flush=True)

    @contextmanager
    def show(self, total_bytes: int, verb: str) -> Iterator[Display]:
        """Open a display that sends progress to the server."""
        counting = threading.Lock()
        done, sent_at = 0, 0.0

        def advance(nbytes: int) -> None:
            nonlocal done, sent_at
            with counting:
                done += nbytes
                now, so_far = time.monotonic(), done
                if now - sent_at < MESSAGE_SECONDS:
                    return
                sent_at = now
            self.send(progress=[so_far, total_bytes], verb=verb)

        self.send(progress=[0, total_bytes], verb=verb)
        yield Display(advance, lambda text: self.send(note=text))
        self.send(progress=[total_bytes, total_bytes], verb=verb)


def merge(request: Request, line: Line) -> None:
    """Merge, and read the output back."""
    asked = request_from_document(request["recipe"], "recipe")
    report = api.merge(asked, overwrite=bool(request.get("overwrite")))
    whole = report.to_dict()
    names = ("method", "output", "models", "bytes_read", "bytes_written", "seconds")
    result = {name: whole[name] for name in (*names, "resumed_chunks")}
    result |= {"tensors": len(report.tensors), "warnings": list(map(str, report.warnings))}
    line.send(result=result)
    line.send(note="checking the output")
    assert report.output is not None
    line.send(result={**result, "sha256": verification.verify(report.output).sha256})


def verify(request: Request, line: Line) -> None:
    """Compare an output with its manifest."""
    line.send(result=verification.verify(request["path"]).to_dict())


def analyze(request: Request, line: Line) -> None:
    """Analyze the models, and write the analysis into the job's folder."""
    asked = request_from_document(request["recipe"], "recipe")
    recipe = asked.recipe
    analysis = analyzing.analyze(
        recipe.base,
        [entry.file for entry in recipe.models],
        allow_pickle=recipe.allow_pickle,
        max_memory=asked.options.max_memory,
        threads=asked.options.threads,
    )
    readiness, advice = judge(analysis)
    document = to_json(analysis, readiness, advice).encode()
    write_file(Path(request["folder"], ANALYSIS), document, "analysis")
    line.send(result={"verdict": readiness.verdict, "seconds": analysis.seconds})


WORK = {work.__name__: work for work in (merge, verify, analyze)}


def main() -> int:
    """Do the request in the first line of stdin."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored
    line = Line(_own_stdout())
    try:
        request = json.loads(sys.stdin.readline())
        confine(map(Path, request["given_folders"]))
        threading.Thread(target=_interrupt_at_end, daemon=True).start()
        quietly = warnings.catch_warnings(action="ignore", category=DareWarning)
        with quietly, progress_shown_by(line.show):  # plans and reports have the warnings
            WORK[request["kind"]](request, line)
    except KeyboardInterrupt:
        return INTERRUPTED
    except DareError as error:
        line.send(error=str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        reason = printable(f"{type(error).__name__}: {error}")
        line.send(error=f"{reason} (this is a bug in dare)")
        return 1
    return 0


def _own_stdout() -> TextIO:
    """Return stdout for our messages only; other output goes to stderr."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def _interrupt_at_end() -> None:
    """Interrupt the work when stdin ends, because the server has closed it or is gone."""
    while os.read(0, 1 << 12):  # sys.stdin would be locked when the process ends
        pass
    if hasattr(signal, "pthread_kill"):  # it also wakes the main thread while that waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        import _thread

        _thread.interrupt_main()


if __name__ == "__main__":
    sys.exit(main())
