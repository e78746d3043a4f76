"""A process that has dare imported and forks a child for every attack.

Requests come in and outcomes go out pickled, see `Warm` in `interposing.py`. A child is in every
way a process of its own: it can be killed, and what it leaves on the disk is real.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from interposing import CANNOT_MOUNT, Job, Outcome
from watching import Watch

from dare.cli import main
from dare.tensors.files import OutputFile

HANGS_AFTER_S = 120


class Child:
    """One command in a forked process."""

    def __init__(self, job: Job) -> None:
        self._streams = [os.memfd_create(name) for name in ("out", "err", "report")]
        self._status: int | None = None
        started = time.monotonic()
        self.dies_at = None if job.kill_after_s is None else started + job.kill_after_s
        self.pid = os.fork()
        if self.pid == 0:
            self._run(job)

    def _run(self, job: Job) -> None:
        status, watch = 70, None
        try:
            signal.alarm(HANGS_AFTER_S)
            for number, stream in enumerate(self._streams[:2], start=1):
                os.dup2(stream, number)
            for source, target in job.mounts:
                bind(source, target)
            if job.attack is not None:
                watch = Watch(job.attack, self._streams[2])
                watch.begin()
            status = call(job)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if watch is not None:
                watch.tell()
            os._exit(status)

    def is_done(self) -> bool:
        """Whether the process has ended; kill it if its time has come."""
        if self._status is None and self.dies_at is not None and time.monotonic() >= self.dies_at:
            os.kill(self.pid, signal.SIGKILL)
            self.dies_at = None
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None

    def outcome(self) -> Outcome:
        """How it ended."""
        assert self._status is not None
        out, err, report = map(_whole, self._streams)
        seen, what = pickle.loads(report) if report else (0, "")
        return Outcome(
            self._status, out.decode(errors="replace"), err.decode(errors="replace"), seen, what
        )


def _whole(stream: int) -> bytes:
    with os.fdopen(stream, "rb") as file:
        file.seek(0)
        return file.read()


def bind(source: Path, target: Path) -> None:
    """Show a folder at a second place, to this process alone."""
    system = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, is_bind, is_private = 0x20000, 0x10000000, 0x1000, 0x44000
    ours = f"0 {os.geteuid()} 1"
    is_root = os.geteuid() == 0
    if system.unshare(new_mounts if is_root else new_mounts | new_user) != 0:
        os._exit(CANNOT_MOUNT)
    if not is_root:
        Path("/proc/self/uid_map").write_text(ours)
    mount = system.mount
    if mount(b"none", b"/", None, is_private, None) or mount(
        os.fsencode(source), os.fsencode(target), None, is_bind, None
    ):
        os._exit(CANNOT_MOUNT)


def call(job: Job) -> int:
    """Call the command, as a shell would, in this process."""
    os.chdir(job.folder)
    return main(list(job.arguments))


def write_by_calls() -> None:
    """A file that is mapped is written without a call that could be counted, failed or lost."""
    OutputFile.place = lambda _file, _position, _nbytes: None  # type: ignore[method-assign]


def serve() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    write_by_calls()
    with suppress(EOFError):
        while True:
            request: Job | list[Job] = pickle.load(sys.stdin.buffer)
            if isinstance(request, Job):
                answer: int | list[Outcome] = call(request)
            else:
                children = [Child(job) for job in request]
                while not all([child.is_done() for child in children]):  # noqa: C419 (each is asked)
                    time.sleep(0.0003)
                answer = [child.outcome() for child in children]
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    serve()
