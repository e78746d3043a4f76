"""A process that has dare imported and forks a child for every attack.

Requests come in and outcomes go out as lines of JSON, see `Warm` in `interposing.py`. A child is
in every way a process of its own: it can be killed, and what it leaves on the disk is real.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from interposing import ACTIONS, CANNOT_MOUNT, ERRORS, Struct

from dare.cli import main
from dare.tensors.files import OutputFile

HANGS_AFTER_S = 120


class Child:
    """One command in a forked process."""

    def __init__(self, library: ctypes.CDLL, job: dict[str, Any]) -> None:
        self._streams = [os.memfd_create(name) for name in ("out", "err")]
        self._shared = mmap.mmap(-1, ctypes.sizeof(Struct))
        self._struct = Struct.from_buffer(self._shared)
        self._status: int | None = None
        attack = job["attack"]
        self._log = -1
        if attack is not None:
            self._log = _open_log(attack["log"])
            self._struct.at = attack["at"]
            self._struct.action = ACTIONS.index(attack["action"])
            self._struct.error = ERRORS[attack["error"]]
            self._struct.reads = attack["reads"]
            self._struct.log = self._log
            self._struct.root = attack["root"].encode()
        started = time.monotonic()
        self.dies_at = None if job["kill_after_s"] is None else started + job["kill_after_s"]
        self.pid = os.fork()
        if self.pid == 0:
            self._run(library, job)

    def _run(self, library: ctypes.CDLL, job: dict[str, Any]) -> None:
        status = 70
        try:
            signal.alarm(HANGS_AFTER_S)
            for number, stream in enumerate(self._streams, start=1):
                os.dup2(stream, number)
            for source, target in job["mounts"]:
                bind(source, target)
            if job["attack"] is not None:
                library.attack_with(ctypes.byref(self._struct))
            status = call(job)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def is_done(self) -> bool:
        """Whether the process has ended; kill it if its time has come."""
        if self._status is None and self.dies_at is not None and time.monotonic() >= self.dies_at:
            os.kill(self.pid, signal.SIGKILL)
            self.dies_at = None
        if self._status is None:
            self._wait(os.WNOHANG)
        return self._status is not None

    def wait(self) -> None:
        """Wait until the process has ended by itself."""
        self._wait(0)

    def _wait(self, how: int) -> None:
        pid, status = os.waitpid(self.pid, how)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)

    def outcome(self) -> dict[str, Any]:
        """How it ended."""
        out, err = (_whole(stream) for stream in self._streams)
        if self._log >= 0:
            os.close(self._log)
        return {
            "status": self._status,
            "out": out,
            "err": err,
            "seen": self._struct.seen,
            "happened": bool(self._struct.happened),
            "what": self._struct.what.decode(errors="replace"),
        }


def _open_log(path: str | None) -> int:
    return -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _whole(stream: int) -> str:
    with os.fdopen(stream, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def bind(source: str, target: str) -> None:
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


def call(job: dict[str, Any]) -> int:
    """Call the command, as a shell would, in this process."""
    os.chdir(job["folder"])
    return main(job["arguments"])


def write_by_calls() -> None:
    """A file that is mapped is written without a call that could be counted, failed or lost."""
    OutputFile.place = lambda _file, _position, _nbytes: None  # type: ignore[method-assign]


def serve() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library = ctypes.CDLL(sys.argv[1])
    write_by_calls()
    for line in sys.stdin:
        request = json.loads(line)
        if "warm" in request:
            answer: Any = call(request["warm"])
        else:
            children = [Child(library, job) for job in request["jobs"]]
            if len(children) == 1 and children[0].dies_at is None:
                children[0].wait()
            while not all([child.is_done() for child in children]):  # noqa: C419 (each is asked)
                time.sleep(0.0003)
            answer = [child.outcome() for child in children]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
