"""A Python without what Windows does not have, and with rules that Windows has, on Linux.

`prepare` makes a folder; a process that has it in PYTHONPATH and PATH, and every process that it
starts, is without POSIX functions, flags and locks. Files are opened as text unless O_BINARY is
given. What this process has open can be neither renamed, replaced nor removed, and folders cannot
be opened. `msvcrt` locks bytes for a handle, and `taskkill` ends a process with its children.
What no function shows stays as it is: the signs of a path, names that differ in case, and locks
that keep others from reading.
"""

from __future__ import annotations

import asyncio  # noqa: F401 (which asks the system when it is imported)
import os
import signal
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MISSING = """
chown fchmod fchown fdatasync fork getegid geteuid getpgid killpg lchown major minor mkfifo
posix_fadvise posix_fallocate pread preadv preadv2 pwrite pwritev pwritev2 readv sched_getaffinity
sendfile setsid sync sysconf writev
O_CLOEXEC O_DIRECT O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC RWF_NOWAIT POSIX_FADV_WILLNEED
"""
O_BINARY = 1 << 40


def prepare(folder: Path) -> dict[str, str]:
    """Make the folder; return the environment of a process as on Windows."""
    folder.mkdir()
    code = "import like_windows\nlike_windows.take_away()\n"
    (folder / "sitecustomize.py").write_text(code)
    ender = folder / "taskkill"
    ender.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{__file__}" "$4"\n')
    ender.chmod(0o755)
    here = Path(__file__).parent
    paths = [str(folder), str(here), str(here.parent / "src")]
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": path}


def take_away() -> None:
    """Make this process one as on Windows."""
    import ctypes
    import fcntl
    import subprocess  # which asks for msvcrt to know where it is

    sys.modules["msvcrt"] = _make_msvcrt(fcntl)
    sys.modules["fcntl"] = None  # type: ignore[assignment]
    _change_files()
    for name in MISSING.split():
        if hasattr(os, name):
            delattr(os, name)
    load = ctypes.CDLL.__init__

    def load_named(self: Any, name: str | None, *more: Any, **how: Any) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        load(self, name, *more, **how)

    ctypes.CDLL.__init__ = load_named  # type: ignore[method-assign]

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: Any, *more: Any, **how: Any) -> None:
            assert not how.get("pass_fds"), "pass_fds not supported on Windows."
            assert not how.get("start_new_session"), "what is of no effect is not asked for"
            how.pop("creationflags", None)
            shell = 'cmd /d /s /c "'
            if isinstance(command, str) and command.startswith(shell):
                command = ["/bin/sh", "-c", command.removeprefix(shell).removesuffix('"')]
            super().__init__(command, *more, **how)

    subprocess.Popen = Popen  # type: ignore[misc]


def _change_files() -> None:
    is_ours = lambda: sys._getframe(2).f_globals["__name__"].startswith("dare.")  # noqa: E731
    open_any, describe = os.open, os.fstat
    of_python = os.O_CLOEXEC  # by which its own flags are known, and on Windows they are right

    def open_file(path: Any, flags: int, *more: Any, **how: Any) -> int:
        assert flags & (O_BINARY | of_python) or not is_ours() or path == os.devnull, path
        if not how and Path(path).is_dir():
            raise PermissionError(13, "Permission denied", path)
        return open_any(path, flags & ~O_BINARY, *more, **how)

    def status(descriptor: int) -> Any:
        found = describe(descriptor)
        names = [n for n in dir(found) if n.startswith("st_") and not n.startswith("st_bl")]
        return types.SimpleNamespace(**{name: getattr(found, name) for name in names})

    os.O_BINARY = O_BINARY  # type: ignore[attr-defined]
    os.open, os.fstat = open_file, status
    for name in ("rename", "replace", "unlink", "remove", "rmdir"):
        setattr(os, name, _refusing(getattr(os, name)))


def _refusing(change: Callable[..., None]) -> Callable[..., None]:
    """Refuse to change a name if this process has open what it stands for, or has in it."""

    def changed(*paths: Any, **how: Any) -> None:
        of_temporary_files = sys._getframe(1).f_globals["__name__"] == "tempfile"
        for path in () if of_temporary_files else paths:
            real = os.path.realpath(path)
            if any(f"{held}/".startswith(f"{real}/") for held in _open_paths()):
                raise PermissionError(13, "The process cannot access the file", str(path))
        change(*paths, **how)

    return changed


def _open_paths() -> Iterator[str]:
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list
            yield str(Path("/proc/self/fd", entry).readlink())


def _make_msvcrt(fcntl: Any) -> types.ModuleType:
    module: Any = types.ModuleType("msvcrt")
    held: set[tuple[int, int]] = set()
    close = os.close

    def locking(descriptor: int, how: int, nbytes: int) -> None:
        place = descriptor, os.lseek(descriptor, 0, os.SEEK_CUR)
        if (place in held) == (how != module.LK_UNLCK):  # nobody locks twice, even by one handle
            raise PermissionError(13, "Permission denied")
        kind = fcntl.F_UNLCK if how == module.LK_UNLCK else fcntl.F_WRLCK
        region = struct.pack("hhqqi4x", kind, os.SEEK_SET, place[1], nbytes, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, region)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None
        (held.discard if how == module.LK_UNLCK else held.add)(place)

    def close_file(descriptor: int) -> None:
        held.difference_update([place for place in held if place[0] == descriptor])
        close(descriptor)

    module.LK_UNLCK, module.LK_LOCK, module.LK_NBLCK = 0, 1, 2
    module.locking, os.close = locking, close_file
    return module


def end_with_children(number: int) -> None:
    """End a process, and those that it has started, as `taskkill /F /T` does."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has ended
            continue
        if parent == number:
            end_with_children(int(entry.parent.name))
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


if __name__ == "__main__":
    end_with_children(int(sys.argv[1]))
