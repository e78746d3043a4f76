"""Other processes: those that work on the same file, and those that run other people's code.

A `Presence` locks a byte in a lock file beside the file that is worked on. This shows others that
its process is alive: the system releases the lock when the process ends, however it ends. Byte 0 is
for taking turns. The last process that works on a file removes the lock file. Such locks belong to
the process: it can lock its own bytes again, and loses all of them when it closes the file once. So
a process opens each lock file once, for everything that works on it.

Other people's code is imported, or run in child processes that have limits and end when we end. A
`Watched` process has its own session, so that it can be ended with everything it has started. A
second, tiny process waits for this one to end, however it ends, and then ends the first: an
evaluator that computes for hours cannot be relied on to watch its parent. An `AnsweringProcess`
calls a function of ours there, by lines of JSON on its standard input and output, which the other
code cannot use: what that prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dare import errors
from dare.errors import DareError, EvaluationError, OutputError, RecipeError, printable
from dare.tensors import system


@dataclass
class _LockFile:
    """A file that this process has open."""

    path: Path
    descriptor: int
    turn: threading.RLock = field(default_factory=threading.RLock)
    marks: set[int] = field(default_factory=set)  # of the workers here that use the file

    def close(self) -> None:
        """Close the file; remove it if no other process has locked anything in it."""
        is_last = system.IS_POSIX and system.lock_byte(self.descriptor, 0, count=0)
        with contextlib.suppress(OSError):
            there = self.path.stat()
            if is_last and not there.st_size and os.path.samestat(there, os.fstat(self.descriptor)):
                self.path.unlink()
        os.close(self.descriptor)


_open_files: dict[Path, _LockFile] = {}
_opening = threading.Lock()


class Presence:
    """A worker on a file, known to others by its mark."""

    def __init__(self, path: Path) -> None:
        real = path.resolve()  # a file with two names has one lock
        lock_path = real.with_name(f"{real.name}.lock")
        self.mark = 1 + secrets.randbelow(1 << 30)
        with _opening:
            try:
                self._file = _open_lock_file(lock_path, self.mark)
            except OSError as error:
                raise OutputError(
                    f"{path}: a study needs a folder that can be written to: {lock_path.name}: "
                    f"{error.strerror or error}"
                ) from None
            self._file.marks.add(self.mark)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until nobody else has a turn."""
        with self._file.turn:
            system.lock_byte(self._file.descriptor, 0, wait=True)
            try:
                yield
            finally:
                system.unlock_byte(self._file.descriptor, 0)

    def is_alive(self, mark: int) -> bool:
        """Tell if the worker with a mark is still at work."""
        with _opening:
            if mark in self._file.marks or not system.lock_byte(self._file.descriptor, mark):
                return True
            system.unlock_byte(self._file.descriptor, mark)
            return False

    def close(self) -> None:
        """Release the lock, so that others no longer see this worker."""
        with _opening:
            if self.mark not in self._file.marks:
                return
            self._file.marks.remove(self.mark)
            system.unlock_byte(self._file.descriptor, self.mark)
            if not self._file.marks:
                _open_files.pop(self._file.path).close()


def _open_lock_file(path: Path, mark: int) -> _LockFile:
    """Open a file, or find it among those that are open, and lock the byte of a mark in it."""
    flags = os.O_RDWR | os.O_CREAT | system.NO_LINKS
    while True:
        file = _open_files.get(path) or _LockFile(path, os.open(path, flags, 0o666))
        system.lock_byte(file.descriptor, mark, wait=True)
        if file.marks or os.fstat(file.descriptor).st_nlink:
            return _open_files.setdefault(path, file)
        os.close(file.descriptor)  # somebody has just removed it


# ---------------------------------------------------------------- code of others

FILE_SUFFIX = ".py"
MOST_KEPT_BYTES = 1 << 26  # of standard output, whose last line may have many items
MOST_SHOWN_BYTES = 1 << 16
SHOWN_LINES = 40
LINE_LENGTH = 1000
POLL_SECONDS = 0.1  # between two checks whether a process has ended while its pipes are open
MOST_LATE_READS = 64  # after the end: more than a pipe holds, if a stray child keeps writing
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Tail(bytearray):
    """The end of the printed output."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, piece: bytes) -> None:
        """Add the next piece of output."""
        self.extend(piece)
        if len(self) > 2 * self._most:
            del self[: -self._most]

    def last_line(self) -> str:
        """Return the last line that is not empty."""
        *_, last = self.rstrip().rsplit(b"\n", 1)
        return last.decode(errors="replace").strip()

    def shown(self) -> str:
        """Return the last lines as a terminal would show them, without control characters."""
        text = self[-self._most :].decode(errors="replace")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
        short = [line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}…" for line in lines]
        return printable("\n".join(short[-SHOWN_LINES:]), keep="\n\t")


class Watched:
    """A process in its own session, which ends when this one does."""

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        name: str = "",
        threads: int | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Start a command; `name` is for messages."""
        variables = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
        self._name = name
        self.stdout = Tail(MOST_KEPT_BYTES)
        self.printed = Tail(MOST_SHOWN_BYTES)
        self._process, self._guard = system.start_guarded(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
        )
        self.is_running = True
        self._listener = system.make_listener()
        pipes = self._process.stdout, self._process.stderr
        for pipe, take in zip(pipes, (self.take, self.printed.add), strict=True):
            assert isinstance(pipe, io.BufferedReader)
            self._listener.add(pipe, take)
        self._process.stdout = self._process.stderr = None  # they are the listener's

    def send(self, line: Any) -> None:
        """Write a line of JSON to the process, unless it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def take(self, piece: bytes) -> None:
        """Take the next piece of standard output."""
        self.stdout.add(piece)
        self.printed.add(piece)

    def pump(self, is_enough: Callable[[], bool], time_limit: float | None) -> int | None:
        """Listen until there is enough, or the process has ended; then return its exit status.

        If time is up (an EvaluationError), or anything else goes wrong here, the process is ended
        with everything that it has started.
        """
        deadline = time.monotonic() + (math.inf if time_limit is None else time_limit)
        status = None
        try:
            while not is_enough() and (status := self._process.poll()) is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self.close()
                    late = f"{self._name}: took longer than {time_limit:g} s and was stopped"
                    raise EvaluationError(late, self.printed.shown())
                self._read(min(remaining, POLL_SECONDS))
            self._drain()
        except BaseException:
            self.close()
            raise
        return status

    def _read(self, seconds: float) -> bool:
        """Pass on available output, after waiting at most `seconds`; say if there was any."""
        if not self._listener.is_over():
            return self._listener.read(seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return False

    def _drain(self) -> None:
        for _ in range(MOST_LATE_READS):
            if not self._read(0):
                return

    def close(self) -> None:
        """End the process with everything it has started, and close its pipes."""
        if self.is_running:
            self.is_running = False
            system.kill_all(self._process)
            self._drain()
            with contextlib.suppress(BrokenPipeError), self._process, self._guard:
                self._guard.kill()
            self._listener.close()


def describe_status(status: int) -> str:
    """Return how a process ended.

    >>> describe_status(3), describe_status(-11), describe_status(139)
    ('ended with status 3', 'was stopped by SIGSEGV', 'ended with status 139 (SIGSEGV)')
    """
    number = -status if status < 0 else status - 128
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    hint = ", which the system sends if memory runs out" if name == "SIGKILL" else ""
    if status < 0:
        return f"was stopped by {name or f'signal {number}'}{hint}"
    return f"ended with status {status}" + (f" ({name}{hint})" if name else "")


# ---------------------------------------------------------------- requests and replies

REPLY = b"\0"  # the start of a reply; Python may print other output before it imports us


class AnsweringProcess(Watched):
    """A Python process that answers requests by `answer_requests`."""

    def __init__(self, name: str, answering: type, threads: int | None) -> None:
        """Start a process; requests go to methods of an object of the class `answering`."""
        self._received = bytearray()
        # -P and the path: it imports the same modules as we do, whatever is in this folder.
        code = (
            f"import sys; sys.path[:] = {[path for path in sys.path if path]!a}; "
            f"from {answering.__module__} import {answering.__name__} as Answering; "
            f"from {__name__} import answer_requests; answer_requests(Answering())"
        )
        command = [sys.executable, "-u", "-P", "-X", "faulthandler", "-c", code]
        super().__init__(command, name=name, threads=threads, stdin=subprocess.PIPE)

    def take(self, piece: bytes) -> None:
        self._received.extend(piece)

    def ask(self, verb: str, given: Any, time_limit: float | None) -> Any:
        """Send a request and wait for the reply; an error of the other side is raised here."""
        self.printed.clear()
        self._received.clear()
        try:
            self.send([verb, given])
            status = self.pump(self._has_reply, time_limit)
            if status is not None and not self._has_reply():
                ended = f"{self._name}: its process {describe_status(status)}"
                raise EvaluationError(ended, self.printed.shown())
        except BaseException:
            self.close()
            raise
        reply = json.loads(self._received.rpartition(REPLY)[2])
        if reply.get("is_last"):
            self.close()
        if "error" not in reply:
            return reply["value"]
        kind: type[DareError] = getattr(errors, reply["error"])
        if kind is not EvaluationError:
            raise kind(*reply["args"])
        output = "\n".join(filter(None, (self.printed.shown(), reply["output"])))
        raise EvaluationError(f"{self._name}: {reply['args'][0]}", output)

    def _has_reply(self) -> bool:
        return REPLY in self._received and self._received.endswith(b"\n")


def answer_requests(answering: object) -> None:
    """Answer requests by an object's methods, until the other side is gone; then exit.

    After a MemoryError or a SystemExit nobody knows what is left of the process: it ends too.
    """
    requests, replies = (os.fdopen(os.dup(number), mode) for number, mode in ((0, "rb"), (1, "wb")))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # no child of the evaluator has ours
    os.dup2(2, 1)
    process = os.getpid()
    for request in requests:
        reply = _reply(answering, *json.loads(request))
        if os.getpid() != process:  # the evaluator has forked, and its copy returns here too
            break
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the evaluator has closed it
                stream.flush()
        replies.write(REPLY + json.dumps(reply).encode() + b"\n")
        replies.flush()
    os._exit(0)  # without waiting for threads that the evaluator has left running


def _reply(answering: object, verb: str, given: Any) -> dict[str, Any]:
    try:
        return {"value": getattr(answering, verb)(given)}
    except BaseException as error:
        is_ours = isinstance(error, DareError)
        known = error if is_ours else foreign_error("it failed", error)
        kind = next(kind for kind in type(known).__mro__ if hasattr(errors, kind.__name__))
        return {
            "error": kind.__name__,
            "args": [str(arg) for arg in known.args],
            "output": getattr(known, "output", ""),
            "is_last": not is_ours or isinstance(error.__cause__, MemoryError | SystemExit),
        }


def foreign_error(what: str, error: BaseException) -> EvaluationError:
    """Return an error of other people's code as ours, with its traceback in their code."""
    theirs = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(type(error), error, theirs)
    return EvaluationError(f"{what}: {describe_error(error)}", "".join(lines).rstrip())


def describe_error(error: BaseException) -> str:
    """Return an error in words, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".rstrip(": ") + where


def import_program(place: str) -> Any:
    """Import a module as a program in the current folder would, or a file as in its folder."""
    folder = Path.cwd()
    module_name = place
    if place.endswith(FILE_SUFFIX):
        file = Path(place).absolute()
        if not file.is_file():
            raise RecipeError(*errors.no_such_file(Path(place)).args)
        folder, module_name = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise RecipeError(
                f"{place}: there is no module {missing!r}, neither in {folder} nor installed"
            ) from None
        raise RecipeError(f"{place}: cannot be imported: {describe_error(error)}") from error
    found = getattr(module, "__file__", None)
    if place.endswith(FILE_SUFFIX) and (found is None or not Path(found).samefile(file)):
        raise RecipeError(
            f"{place}: there is another module called {module_name!r} ({found}); rename the file"
        )
    return module
