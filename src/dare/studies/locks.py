"""Which processes work on a study, and one at a time where only one may.

Each process locks a byte of a file beside the study, by which others know that it lives: the
system lets go of the lock when the process ends, however it ends. Byte 0 is for taking turns.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dare.errors import OutputError


class Presence:
    """A process at work on a study: the one that makes it."""

    def __init__(self, study: Path) -> None:
        self._path = study.with_name(f"{study.name}.lock")
        self._turn = threading.RLock()
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(
                f"{study}: a study needs a folder that can be written to: {self._path.name}: "
                f"{error.strerror or error}"
            ) from None
        self.mark = 1 + secrets.randbelow(1 << 30)
        """What this process is known by."""
        _lock(self._file, self.mark, wait=False)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other thread or process has its turn."""
        with self._turn:
            _lock(self._file, 0, wait=True)
            try:
                yield
            finally:
                _unlock(self._file, 0)

    def is_alive(self, mark: int) -> bool:
        """Whether the process of a mark is still there."""
        if mark == self.mark:
            return True
        if not _lock(self._file, mark, wait=False):
            return True
        _unlock(self._file, mark)
        return False

    def close(self) -> None:
        """Be gone."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _lock(file: int, place: int, *, wait: bool) -> bool:
    """Lock one byte; say whether that was possible."""
    try:
        import fcntl
    except ImportError:  # Windows
        return _lock_on_windows(file, place, wait=wait)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
    except BlockingIOError:
        return False
    return True


def _unlock(file: int, place: int) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(file, place, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
        return
    fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def _lock_on_windows(file: int, place: int, *, wait: bool) -> bool:
    import msvcrt

    while True:
        os.lseek(file, place, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            if not wait:
                return False
        else:
            return True
