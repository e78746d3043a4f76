"""Processes that work on the same file, each known to the others to be alive.

Each locks a byte of a file beside it, by which others know that it is alive: the system releases
the lock when the process ends, however it ends. Byte 0 is for taking turns. Such locks belong to
the process: it can lock its own bytes again, and loses all of them when it closes the file once. So
a process has each such file open once, for all that works on it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dare.errors import OutputError


@dataclass
class _LockFile:
    """A file that this process has open."""

    descriptor: int
    turn: threading.RLock = field(default_factory=threading.RLock)
    marks: set[int] = field(default_factory=set)
    """The marks of those in this process that work on the file."""

    def lock(self, byte: int, *, wait: bool) -> bool:
        """Lock one byte; return whether that was possible."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
        except BlockingIOError:
            return False
        return True

    def unlock(self, byte: int) -> None:
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, byte)


_open_files: dict[tuple[int, int], _LockFile] = {}  # by device and inode
_opening = threading.Lock()


class Presence:
    """A worker on a file, known to others by its mark."""

    def __init__(self, path: Path) -> None:
        lock_path = path.with_name(f"{path.name}.lock")
        self.mark = 1 + secrets.randbelow(1 << 30)
        with _opening:
            try:
                self._file = _open_lock_file(lock_path)
            except OSError as error:
                raise OutputError(
                    f"{path}: a study needs a folder that can be written to: {lock_path.name}: "
                    f"{error.strerror or error}"
                ) from None
            self._file.marks.add(self.mark)
            self._file.lock(self.mark, wait=False)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until nobody else has a turn."""
        with self._file.turn:
            self._file.lock(0, wait=True)
            try:
                yield
            finally:
                self._file.unlock(0)

    def is_alive(self, mark: int) -> bool:
        """Tell if the one that is known by a mark is still at work."""
        with _opening:
            if mark in self._file.marks or not self._file.lock(mark, wait=False):
                return True
            self._file.unlock(mark)
            return False

    def close(self) -> None:
        """Be gone."""
        with _opening:
            if self.mark not in self._file.marks:
                return
            self._file.marks.remove(self.mark)
            if self._file.marks:
                self._file.unlock(self.mark)
            else:
                for identity in [key for key, file in _open_files.items() if file is self._file]:
                    del _open_files[identity]
                os.close(self._file.descriptor)


def _open_lock_file(path: Path) -> _LockFile:
    """Open a file, or find it among those that are open."""
    if path.exists():
        there = path.stat()
        if (found := _open_files.get((there.st_dev, there.st_ino))) is not None:
            return found
    file = _LockFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    new = os.fstat(file.descriptor)
    _open_files[new.st_dev, new.st_ino] = file
    return file
