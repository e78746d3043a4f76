"""One process at a time makes an output in a store.

The lock is an object that is stored only if there is none, and that its owner stores again every
few seconds. A lock whose owner is known to be dead, or has not been heard of for a minute by the
clock of the store, is taken over. An owner that finds somebody else's lock in the place of its own
stops. The bytes do not hang on any of this: an upload is completed from parts that are told by
their ETags. It keeps two processes from doing the same work, or from starting over each other's.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dare.errors import OutputError
from dare.output.objects import Objects
from dare.tensors.digest import bytes_digest

SIGN_SECONDS = 15.0
"""Between two signs of life."""
SILENT_SECONDS = 60.0
"""After which an owner is taken for dead."""

_OWNED: set[str] = set()
"""The locks that this process has."""


class StoreLock:
    """A lock on one output; `lost` is called, in another thread, if somebody takes it away."""

    def __init__(self, objects: Objects, key: str, lost: Callable[[OutputError], None]) -> None:
        self._objects = objects
        self._key = key
        self._lost = lost
        self._owner = uuid.uuid4().hex
        described = {"owner": self._owner, "machine": _machine(), "process": os.getpid()}
        self._text = json.dumps(described).encode()
        self._end = threading.Event()

    def take(self) -> None:
        """Take the lock, or raise."""
        for _ in range(3):
            if self._objects.put_new(self._key, self._text):
                _OWNED.add(self._owner)
                threading.Thread(target=self._live, name="dare-lock", daemon=True).start()
                return
            found = self._objects.get(self._key)
            silent = self._silence()
            if found is None or silent is None:
                continue
            if not _is_dead(found) and silent < SILENT_SECONDS:
                raise OutputError(
                    f"{self._objects.describe(self._key)}: another process is writing this "
                    f"output (its last sign of life is {max(0, silent):.0f} s old); wait "
                    f"until it is done; if it has died, wait until {SILENT_SECONDS:.0f} s "
                    "have passed"
                )
            self._objects.delete([self._key])
        raise OutputError(
            f"{self._objects.describe(self._key)}: other processes keep taking this "
            "lock; try again later"
        )

    def _silence(self) -> float | None:
        """How many seconds older the lock is than an object just written there.

        Both are dated by the clock of the store; that of this machine may be wrong.
        """
        probe = f"{self._key}-{self._owner}"
        self._objects.put(probe, b"")
        try:
            now, stored = self._objects.age(probe), self._objects.age(self._key)
        finally:
            self._objects.delete([probe])
        return None if now is None or stored is None else stored - now

    def release(self) -> None:
        """Give it back, if it is still ours."""
        if self._owner in _OWNED:
            _OWNED.discard(self._owner)
            self._end.set()
            with suppress(OutputError):
                if self._objects.get(self._key) == self._text:
                    self._objects.delete([self._key])

    def _live(self) -> None:
        while not self._end.wait(SIGN_SECONDS):
            with suppress(OutputError):  # of which whoever sends parts hears as well
                if self._objects.get(self._key) not in (self._text, None):
                    where = self._objects.describe(self._key)
                    text = f"{where}: another process has taken over this output"
                    self._lost(OutputError(text))
                    return
                if not self._end.is_set():
                    self._objects.put(self._key, self._text)


def _machine() -> str:
    """Says whether two processes can see each other; tells nothing else of the machine."""
    seen = [platform.node(), str(uuid.getnode())]
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            seen.append(
                str(Path(file).readlink() if file.endswith("pid") else Path(file).read_text())
            )
    return bytes_digest("\n".join(seen).encode())


def _is_dead(text: bytes) -> bool:
    """Whether the owner of a lock is known not to live."""
    try:
        found = json.loads(text)
        owner, machine, process = found["owner"], found["machine"], int(found["process"])
    except (ValueError, KeyError, TypeError):
        return False
    if machine != _machine() or owner in _OWNED:
        return False
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
