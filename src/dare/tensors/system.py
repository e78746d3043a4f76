"""The system: memory, files at any position, locks, names, and processes that can be ended.

Linux and macOS are POSIX systems, and Windows is not. There a file has one position, at which
threads take turns. What is open can be neither renamed nor removed, a folder cannot be synced, only
sockets can be selected on, and processes have no groups. Other modules ask here, and never for the
name of a system.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

IS_POSIX = find_spec("fcntl") is not None

BINARY = getattr(os, "O_BINARY", 0)  # leaves line ends as they are
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | BINARY  # opens a file and not what a link leads to
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | BINARY  # opens a pipe though nobody writes to it

_turns = defaultdict[int, threading.Lock](threading.Lock)  # at the position of a file descriptor


@cache
def system_call(name: str) -> Any:
    """Return a function of the C library; None if it has none of that name."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if IS_POSIX else None


# ---------------------------------------------------------------- memory

KEPT_BYTES = 32 << 20  # the most that glibc goes up to by itself


def keep_freed_memory() -> None:
    """Have glibc use the memory of freed arrays again, which takes a page fault per page if not.

    It does so by itself once an array of this size was freed. Larger ones are still given back.
    """
    if (choose := system_call("mallopt")) is not None:
        choose(-3, KEPT_BYTES)  # M_MMAP_THRESHOLD
        choose(-1, 2 * KEPT_BYTES)  # M_TRIM_THRESHOLD


# ---------------------------------------------------------------- files


def read_some(file_descriptor: int, into: memoryview, position: int) -> int:
    """Read into a buffer what comes at once; return how many bytes those are, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(file_descriptor, [into], position)
    with _turns[file_descriptor]:
        os.lseek(file_descriptor, position, os.SEEK_SET)
        return io.FileIO(file_descriptor, closefd=False).readinto(into) or 0


def write_some(file_descriptor: int, data: memoryview, position: int) -> int:
    """Write of a buffer what can be written at once; return how many bytes those are."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file_descriptor, data, position)
    with _turns[file_descriptor]:
        os.lseek(file_descriptor, position, os.SEEK_SET)
        return os.write(file_descriptor, data)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where a folder can be opened."""
    if IS_POSIX:
        file_descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file_descriptor)
        finally:
            os.close(file_descriptor)


_NO_SUCH_CALL = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def rename(old: Path, new: Path, *, exchange: bool = False) -> bool:
    """Rename to a name that is free, or exchange two names; False if that cannot be done."""
    here, paths = ctypes.c_int(-100), (os.fsencode(old), os.fsencode(new))  # AT_FDCWD
    linux = here, paths[0], here, paths[1], 2 if exchange else 1
    macos = *paths, 2 if exchange else 4
    for name, given in (("renameat2", linux), ("renamex_np", macos)):
        if (call := system_call(name)) is not None:
            if call(*given) == 0:
                return True
            if (error := ctypes.get_errno()) == errno.EEXIST:
                return False
            if error not in _NO_SUCH_CALL:
                raise OSError(error, os.strerror(error), str(new))
    if exchange or os.path.lexists(new):
        return False
    old.rename(new)
    return True


# ---------------------------------------------------------------- locks

# Windows locks bytes against reading too, so this one is behind the end of the file.
LAST_BYTE = (1 << 31) - 2
POLL_SECONDS = 0.01


def lock_file(file_descriptor: int) -> bool:
    """Lock a file; False if it is open elsewhere and locked, True where there are no locks."""
    try:
        if not IS_POSIX:
            return lock_byte(file_descriptor, LAST_BYTE)
        import fcntl

        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def lock_byte(file_descriptor: int, byte: int, *, wait: bool = False, count: int = 1) -> bool:
    """Lock a byte of a file for this process, or several; return whether that was possible."""
    how = ["LOCK_EX"] if wait else ["LOCK_EX", "LOCK_NB"]
    while True:
        try:
            _lock(file_descriptor, byte, how, "LK_NBLCK", count)
        except (BlockingIOError, PermissionError):  # as POSIX and Windows call it
            if not wait:
                return False
            time.sleep(POLL_SECONDS)
        else:
            return True


def unlock_byte(file_descriptor: int, byte: int) -> None:
    """Let others lock a byte."""
    _lock(file_descriptor, byte, ["LOCK_UN"], "LK_UNLCK", 1)


def _lock(fd: int, byte: int, posix: Iterable[str], windows: str, count: int) -> None:
    if IS_POSIX:
        import fcntl

        fcntl.lockf(fd, sum(getattr(fcntl, name) for name in posix), count, byte)
        return
    msvcrt: Any = import_module("msvcrt")
    with _turns[fd]:
        os.lseek(fd, byte, os.SEEK_SET)
        msvcrt.locking(fd, getattr(msvcrt, windows), count)


# ---------------------------------------------------------------- processes

SHELL = "/bin/sh"
GATED = 'read -r _ <"/dev/fd/$0" && exec "$@"'  # runs a command when it is told to
# A session, or a group on Windows, to which nobody else's Ctrl-C goes.
APART: Mapping[str, Any] = {"start_new_session": True} if IS_POSIX else {"creationflags": 0x200}
READ_BYTES = 1 << 16
Take = Callable[[bytes], None]
LATE_SECONDS = 0.05  # the wait for a thread that has something to hand on
END = ("taskkill", "/F", "/T", "/PID")


def shell_command(text: str) -> str | list[str]:
    """Return the command that has the system's shell run a text."""
    return [SHELL, "-c", text] if IS_POSIX else f'cmd /d /s /c "{text}"'


def quoted(text: str) -> str:
    """Return a text as one word for the system's shell."""
    return shlex.quote(text) if IS_POSIX else subprocess.list2cmdline([text])


Started = subprocess.Popen[bytes]


def start_guarded(command: str | Sequence[str], **more: Any) -> tuple[Started, Started]:
    """Start a process in its own session, and the guard that ends it when we have ended.

    The guard ends all that the process has started when its own input is closed, by whatever. Where
    it can, the command waits until it is guarded.
    """
    gate, opener = os.pipe()
    with os.fdopen(opener, "wb", buffering=0) as opening:
        try:
            if IS_POSIX:
                command = [SHELL, "-c", GATED, str(gate), *command]
                more = {**more, "pass_fds": (gate,)}
            process = subprocess.Popen(command, **APART, **more)  # noqa: S603 (the user's command)
        finally:
            os.close(gate)
        try:
            guard = subprocess.Popen(  # noqa: S603
                _guard_command(process.pid),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **APART,
            )
        except BaseException:
            kill_all(process)
            raise
        with suppress(BrokenPipeError):  # nobody waits
            opening.write(b"\n")
    return process, guard


def _guard_command(number: int) -> list[str]:
    if IS_POSIX:
        return [SHELL, "-c", 'read -r _; kill -s KILL -- "-$0"', str(number)]
    code = f"import subprocess, sys; sys.stdin.read(); subprocess.run({[*END, str(number)]})"
    return [sys.executable, "-I", "-c", code]


def kill_all(process: Started) -> None:
    """End a process in its own session, with everything that it has started."""
    if IS_POSIX:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        subprocess.run([*END, str(process.pid)], check=False, capture_output=True)  # noqa: S603
    process.wait()


class Listener:
    """Hands on what comes out of pipes, when asked to."""

    def __init__(self) -> None:
        self._selector, self._pipes = selectors.DefaultSelector(), list[io.BufferedReader]()

    def add(self, pipe: io.BufferedReader, take: Take) -> None:
        """Hand on to a function what comes out of a pipe, which is closed in the end."""
        self._selector.register(pipe, selectors.EVENT_READ, take)
        self._pipes.append(pipe)

    def is_over(self) -> bool:
        """Return whether all pipes have ended."""
        return not self._selector.get_map()

    def read(self, seconds: float) -> bool:
        """Hand on what there is, after waiting for it that long at most; say if there was any."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if piece := os.read(key.fd, READ_BYTES):
                key.data(piece)
            else:
                self._selector.unregister(key.fd)
        return bool(ready)

    def close(self) -> None:
        """Close the pipes."""
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()


class ThreadListener(Listener):
    """Threads that hand on what comes; each closes its pipe at the end, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self._threads, self._news = list[threading.Thread](), threading.Event()

    def add(self, pipe: io.BufferedReader, take: Take) -> None:
        self._threads.append(threading.Thread(target=self._run, args=(pipe, take), daemon=True))
        self._threads[-1].start()

    def _run(self, pipe: io.BufferedReader, take: Take) -> None:
        with pipe:
            while piece := pipe.read1(READ_BYTES):
                take(piece)
                self._news.set()

    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def read(self, seconds: float) -> bool:
        is_news = self._news.wait(max(seconds, LATE_SECONDS))
        self._news.clear()
        return is_news


make_listener = Listener if IS_POSIX else ThreadListener


# ---------------------------------------------------------------- cores and memory

# By cgroup version: its folder, the files of the limit and of its use, the prefix of counts.
CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take, within the limits of its container.

    What only holds copies of files counts as free. macOS says what there is in all, and Windows
    nothing (None).
    """
    found = list(_cgroup_memory(root))
    with suppress(OSError, ValueError, LookupError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]))
    if not found and hasattr(os, "sysconf"):
        with suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yield the rest of each limit that holds for this process."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, most, taken, prefix = CGROUPS[bool(controllers)]
            inside = root / top / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if folder.is_relative_to(root / top):
                    with suppress(OSError, ValueError):  # without a limit it is not a number
                        limit = int((folder / most).read_text())
                        lines = (folder / "memory.stat").read_text().splitlines()
                        counts = {name: int(count) for name, count in map(str.split, lines)}
                        kinds = (f"{prefix}active_file", f"{prefix}inactive_file")
                        files = sum(counts.get(kind, 0) for kind in kinds)
                        yield limit - int((folder / taken).read_text()) + files
