"""Counts the calls of this process that change or read files; kills, fails, shortens or logs them.

All that dare does to files goes through functions of `os`, and through renameat2 of the C library.
`open` is that of `_pyio`, which is written in Python and asks `os` too. That no change is missed is
seen in `test_power_cuts.py`: what is in the log, played again, is what is on the disk.
"""

from __future__ import annotations

import _pyio
import builtins
import ctypes
import errno
import fcntl
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from interposing import Attack

from dare.tensors import system

CALLS = {
    **{name: name for name in ("open", "write", "link", "symlink", "unlink", "mkdir", "rmdir")},
    **{"pwrite": "write", "remove": "unlink", "rename": "rename", "replace": "rename"},
    **{"fsync": "sync", "fdatasync": "sync", "ftruncate": "resize", "truncate": "resize"},
    **{"read": "read", "pread": "read", "preadv": "read"},
}
"""Functions of `os`, and what they do."""
UNWATCHED = ("writev", "pwritev", "readv", "posix_fallocate", "sendfile", "copy_file_range")
"""Functions that would do the same unseen: they fail, and whoever asks does it another way."""
PAGE = 4096


class Call(NamedTuple):
    """A call that changed files."""

    name: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


class Watch:
    """Watches the calls of this process; what it finds goes to an open file."""

    def __init__(self, attack: Attack, report: int) -> None:
        self._attack, self._report = attack, report
        self._root = str(attack.root)
        self._seen, self._what = 0, ""
        self._write, self._lock = os.write, threading.RLock()
        log = attack.log
        self._log = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def begin(self) -> None:
        """Watch from now on."""
        for name, call in CALLS.items():
            if (call == "read") == self._attack.reads:
                setattr(os, name, self._watched(getattr(os, name), call))
        for name in UNWATCHED:
            setattr(os, name, _refuse)
        builtins.open = io.open = _pyio.open  # type: ignore[assignment]
        if not self._attack.reads:
            system.system_call = self._system_call(system.system_call)

    def tell(self) -> None:
        """Write down what was seen."""
        self._write(self._report, pickle.dumps((self._seen, self._what)))

    def _watched(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(first: Any, *given: Any, **more: Any) -> Any:
            other, call = "", name
            changed = given[0] if name == "symlink" else first
            path = _path(changed, more.get("dir_fd", more.get("src_dir_fd")))
            if name in ("rename", "link"):
                other = _path(given[0], more.get("dst_dir_fd"))
            elif name == "open":
                flags = given[0] if given else more["flags"]
                call = _way_of_opening(path, flags)
            if not call or not (self._is_below(path) or self._is_below(other)):
                return real(first, *given, **more)
            with self._lock:
                is_cut = self._comes(call, path)
                if is_cut and name in ("read", "write"):
                    given = (_half(first, given[0], name), *given[1:])
                offset = given[-1] if name == "resize" else 0
                if name == "write":
                    offset = given[1] if len(given) > 1 else _place_of_write(first)
                try:
                    result = real(first, *given, **more)
                except OSError:
                    self._end(None)
                    raise
                data = bytes(memoryview(given[0])[:result]) if name == "write" else b""
                if name == "symlink":
                    data = os.fsencode(first)
                self._end(Call(call, path, other, offset, data))
            return result

        return watched

    def _system_call(self, real: Callable[[str], Any]) -> Callable[[str], Any]:
        """The C library's functions, of which renameat2 is watched."""

        def rename(here: Any, old: bytes, there: Any, new: bytes, flags: int) -> int:
            paths = (_path(old), _path(new))
            if not any(map(self._is_below, paths)):
                return int(real("renameat2")(here, old, there, new, flags))
            call = "exchange" if flags == 2 else "rename"
            with self._lock:
                try:
                    self._comes(call, paths[0])
                except OSError as error:
                    ctypes.set_errno(error.errno or 0)
                    return -1
                result = int(real("renameat2")(here, old, there, new, flags))
                self._end(Call(call, *paths) if result == 0 else None)
            return result

        return lambda name: rename if name == "renameat2" and real(name) else real(name)

    def _is_below(self, path: str) -> bool:
        return path == self._root or path.startswith(f"{self._root}/")

    def _is_now(self) -> bool:
        return self._attack.action != "count" and self._seen == self._attack.at

    def _comes(self, call: str, path: str) -> bool:
        """Count a call; kill the process or let the call fail. Return whether it shall be short."""
        self._seen += 1
        if not self._is_now():
            return False
        self._what = f"{call} {path}"
        self._die_if("kill before")
        if self._attack.action == "fail":
            number = getattr(errno, self._attack.error)
            raise OSError(number, os.strerror(number), path)
        return self._attack.action == "shorten"

    def _end(self, call: Call | None) -> None:
        """Write a call down unless it failed by itself; die if it is the one."""
        if self._log >= 0 and call is not None:
            self._write(self._log, pickle.dumps(call))
        if self._is_now():
            self._die_if("kill after")

    def _die_if(self, action: str) -> None:
        if self._attack.action == action:
            self.tell()
            os.kill(os.getpid(), signal.SIGKILL)


def _refuse(*_given: object, **_more: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _path(given: Any, folder: int | None = None) -> str:
    """Where a call goes: below a folder that is open, or by an open file."""
    if isinstance(given, int):
        return str(Path(f"/proc/self/fd/{given}").readlink())
    start = Path.cwd() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
    return str(start / os.fsdecode(given))


def _way_of_opening(path: str, flags: int) -> str:
    """What opening a file changes, if anything."""
    if not flags & (os.O_CREAT | os.O_TRUNC):
        return ""
    if not os.path.lexists(path):
        return "create"
    return "truncate" if flags & os.O_TRUNC else "open"


def _place_of_write(file_descriptor: int) -> int:
    """Where a write without a position will land."""
    if fcntl.fcntl(file_descriptor, fcntl.F_GETFL) & os.O_APPEND:
        return os.fstat(file_descriptor).st_size
    return os.lseek(file_descriptor, 0, os.SEEK_CUR)


def _half(file_descriptor: int, data: Any, name: str) -> Any:
    """Half of what is to be read or written; of a direct write whole pages, as disks take them."""
    if isinstance(data, int):
        return (data + 1) // 2
    if isinstance(data, list):
        return [memoryview(data[0]).cast("B")[: (len(data[0]) + 1) // 2]]
    whole = memoryview(data).cast("B")
    is_direct = name == "write" and fcntl.fcntl(file_descriptor, fcntl.F_GETFL) & os.O_DIRECT
    half = len(whole) // 2 // PAGE * PAGE if is_direct else (len(whole) + 1) // 2
    return whole[: half or len(whole)]
