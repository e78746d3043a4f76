"""Who works on a study, and one at a time where only one may.

Each search locks a byte of a file beside the study, by which others know that it goes on: the
system lets go of the lock when the process ends, however it ends. Byte 0 is for taking turns.

Such locks belong to the process: it can lock its own bytes again, and loses all of them when it
closes the file once. So a process has each such file open once, for all that works on the study.
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
    """Of those in this process that work on the study."""


_open_files: dict[tuple[int, int], _LockFile] = {}
"""By device and inode."""
_opening = threading.Lock()


class Presence:
    """Somebody at work on a study."""

    def __init__(self, study: Path) -> None:
        path = study.with_name(f"{study.name}.lock")
        self.mark = 1 + secrets.randbelow(1 << 30)
        """What it is known by."""
        with _opening:
            try:
                self._identity, self._file = _opened(path)
            except OSError as error:
                raise OutputError(
                    f"{study}: a study needs a folder that can be written to: {path.name}: "
                    f"{error.strerror or error}"
                ) from None
            self._file.marks.add(self.mark)
            _lock(self._file.descriptor, self.mark, wait=False)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until nobody else has a turn."""
        with self._file.turn:
            _lock(self._file.descriptor, 0, wait=True)
            try:
                yield
            finally:
                _unlock(self._file.descriptor, 0)

    def is_alive(self, mark: int) -> bool:
        """Whether the one that is known by a mark is still at work."""
        with _opening:
            if mark in self._file.marks or not _lock(self._file.descriptor, mark, wait=False):
                return True
            _unlock(self._file.descriptor, mark)
            return False

    def close(self) -> None:
        """Be gone."""
        with _opening:
            if self.mark not in self._file.marks:
                return
            self._file.marks.remove(self.mark)
            if self._file.marks:
                _unlock(self._file.descriptor, self.mark)
            else:
                del _open_files[self._identity]
                os.close(self._file.descriptor)


def _opened(path: Path) -> tuple[tuple[int, int], _LockFile]:
    """Open a file, or find it among those that are open."""
    if path.exists():
        there = path.stat()
        if (found := _open_files.get((there.st_dev, there.st_ino))) is not None:
            return (there.st_dev, there.st_ino), found
    file = _LockFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    new = os.fstat(file.descriptor)
    _open_files[new.st_dev, new.st_ino] = file
    return (new.st_dev, new.st_ino), file


def _lock(file: int, place: int, *, wait: bool) -> bool:
    """Lock one byte; say whether that was possible."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
    except BlockingIOError:
        return False
    return True


def _unlock(file: int, place: int) -> None:
    fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
