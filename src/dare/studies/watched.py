"""Processes of others: what they print is kept in bounds, and none outlives its time or us.

Each runs in a session of its own, so that it can be ended with all it has started. A second, tiny
process waits for this one to end, however it ends, and then ends the first: an evaluator that
computes for hours can neither be asked to look after its parent nor be trusted to.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from dare.errors import printable

SHELL = "/bin/sh"
MOST_KEPT = 1 << 26
"""Bytes of standard output in which a last line of many items is looked for."""
MOST_SHOWN = 1 << 16
SHOWN_LINES = 40
LINE_LENGTH = 1000
AT_A_TIME = 1 << 16
ROUND_SECONDS = 0.1
"""How often is looked whether a process has ended whose children keep its pipes open."""
MOST_DRAINED = 64
"""Reads after the end: more than a pipe holds, and an end even if a stray child goes on."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class TimeUpError(Exception):
    """A process took longer than it may, and was ended."""


class Tail:
    """The last of what was printed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = bytearray()

    def add(self, piece: bytes) -> None:
        """Take what was printed next."""
        self._bytes += piece
        if len(self._bytes) > 2 * self._most:
            del self._bytes[: -self._most]

    def clear(self) -> None:
        """Forget what was printed so far."""
        self._bytes.clear()

    def last_line(self) -> str:
        """The last line that is not empty."""
        *_, last = self._bytes.rstrip().rsplit(b"\n", 1)
        return last.decode(errors="replace").strip()

    def shown(self) -> str:
        """The last lines as a terminal would show them, and nothing that acts on one."""
        text = self._bytes[-self._most :].decode(errors="replace")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
        short = [line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}…" for line in lines]
        return printable("\n".join(short[-SHOWN_LINES:]), keep="\n\t")


class Watched:
    """A process in a session of its own, that ends when this one does."""

    def __init__(
        self, command: Sequence[str], *, threads: int | None = None, channel: int | None = None
    ) -> None:
        """Start a command; with a `channel`, a socket that it is given, stdout is only shown."""
        self.stdout = Tail(MOST_KEPT)
        self.printed = Tail(MOST_SHOWN)
        self._process = subprocess.Popen(  # noqa: S603 (it is what the user asked for)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=() if channel is None else (channel,),
            env=environment(threads),
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pipes = (self._process.stdout, self._process.stderr)
        try:
            self._guard, self._lifeline = _guard(self._process.pid)
        except BaseException:
            _kill_group(self._process)
            raise
        self.listen(self._pipes[0].fileno(), self.printed.add if channel else self._take)
        self.listen(self._pipes[1].fileno(), self.printed.add)

    def _take(self, piece: bytes) -> None:
        self.stdout.add(piece)
        self.printed.add(piece)

    def listen(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        """Hand on what comes out of a pipe or socket, while `pump` runs."""
        self._selector.register(descriptor, selectors.EVENT_READ, take)

    def pump(self, is_enough: Callable[[], bool], time_limit: float | None) -> int | None:
        """Listen until there is enough, or the process has ended; then return its exit status.

        If time is up, or anything else goes wrong here, the process is ended, with all that it
        has started.
        """
        deadline = None if time_limit is None else time.monotonic() + time_limit
        try:
            while not is_enough():
                status = self._process.poll()
                left = ROUND_SECONDS if deadline is None else deadline - time.monotonic()
                if status is None and left <= 0:
                    raise TimeUpError
                if status is not None:
                    self._drain()
                    return status
                self._read(min(left, ROUND_SECONDS))
            self._drain()
            return None
        except BaseException:
            self.close()
            raise

    def _read(self, seconds: float) -> bool:
        """Hand on what there is, after waiting for it that long at most."""
        if not self._selector.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            try:
                piece = os.read(key.fd, AT_A_TIME)
            except ConnectionResetError:  # a socket whose other end left something unread
                piece = b""
            if piece:
                key.data(piece)
            else:
                self._selector.unregister(key.fd)
        return bool(ready)

    def _drain(self) -> None:
        for _ in range(MOST_DRAINED):
            if not self._selector.get_map() or not self._read(0):
                return

    def close(self) -> None:
        """End the process and all that it has started, and let go of its pipes."""
        if self._lifeline < 0:
            return
        _kill_group(self._process)
        self._drain()
        self._guard.kill()
        self._guard.wait()
        os.close(self._lifeline)
        self._lifeline = -1
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()


def environment(threads: int | None) -> Mapping[str, str]:
    """Our environment, with so many threads for libraries that multiply matrices."""
    more = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    return {**os.environ, **more}


def describe_status(status: int) -> str:
    """How a process ended.

    >>> describe_status(3), describe_status(-11), describe_status(139)
    ('ended with status 3', 'was stopped by SIGSEGV', 'ended with status 139 (SIGSEGV)')
    """
    number = -status if status < 0 else status - 128
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    hint = ", which the system sends if memory runs out" if name == "SIGKILL" else ""
    if status < 0:
        return f"was stopped by {name or f'signal {number}'}{hint}"
    return f"ended with status {status}" + (f" ({name}{hint})" if name else "")


def _guard(group: int) -> tuple[subprocess.Popen[bytes], int]:
    """A process that ends a group once the other end of its input is closed, by whatever."""
    reading, writing = os.pipe()
    try:
        script = 'read -r _; kill -s KILL -- "-$0"'
        guard = subprocess.Popen(  # noqa: S603
            [SHELL, "-c", script, str(group)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return guard, writing


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
