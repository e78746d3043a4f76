"""The Python half of `interposer.c`: build it, describe an attack, start processes under it.

Starting Python and importing dare takes a second, an attack takes a hundredth of one. So one warm
process, `warm.py`, imports dare once and forks a child for each attack; `Warm` talks to it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
ACTIONS = ("count", "kill before", "kill after", "fail", "shorten")
"""What can be done to a call, in the order of `enum action`."""
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "EACCES")}
LONGEST_PATH = 4096
CANNOT_MOUNT = 77
"""The exit status where a bind mount is not allowed."""


class Struct(ctypes.Structure):
    """`struct attack` of the interposer."""

    _fields_ = (
        ("at", ctypes.c_long),
        ("seen", ctypes.c_long),
        ("happened", ctypes.c_long),
        ("action", ctypes.c_int),
        ("error", ctypes.c_int),
        ("reads", ctypes.c_int),
        ("log", ctypes.c_int),
        ("root", ctypes.c_char * LONGEST_PATH),
        ("what", ctypes.c_char * (LONGEST_PATH + 64)),
    )


@dataclass(frozen=True)
class Attack:
    """What shall happen to which call."""

    root: Path
    """Calls on files below this folder are counted."""
    action: str = "count"
    at: int = 0
    """The number of the call, from 1 on."""
    error: str = "EIO"
    reads: bool = False
    """Count reads instead of changes."""
    log: Path | None = None
    """Where all changes are written down, with their data."""


@dataclass(frozen=True)
class Job:
    """A command of dare's, and what is done to it."""

    arguments: tuple[str, ...]
    folder: Path
    attack: Attack | None = None
    kill_after_s: float | None = None
    mounts: tuple[tuple[Path, Path], ...] = ()
    """Folders that the command sees at a second place."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    """The exit status, or the negative number of the signal."""
    out: str
    err: str
    seen: int
    """How many calls were counted."""
    happened: bool
    """Whether the attacked call came."""
    what: str
    """The attacked call."""


def why_not() -> str:
    """Say why there can be no attacks here, or nothing."""
    if not sys.platform.startswith("linux"):
        return "LD_PRELOAD and /proc are Linux's"
    return "" if shutil.which("gcc") else "there is no gcc to build the interposer with"


def build(folder: Path) -> Path:
    """Compile the interposer into a folder."""
    library = folder / "interposer.so"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run(
        ["gcc", *flags, "-o", library, HERE / "interposer.c", "-ldl", "-pthread"], check=True
    )
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment of a process that the interposer is loaded into."""
    return {**os.environ, "LD_PRELOAD": str(library)}


class Warm:
    """The warm process; a context manager."""

    def __init__(self, library: Path, errors: Path) -> None:
        self.preloaded = library
        self._errors = errors

    def __enter__(self) -> Self:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "warm.py", self.preloaded],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(self.preloaded),
                text=True,
            )
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.communicate()

    def warm_up(self, arguments: Sequence[str], folder: Path) -> None:
        """Run a command in the warm process itself, so that it has all that the command needs."""
        job = Job(tuple(arguments), folder)
        assert self._ask({"warm": _plain(job)}) == 0, self._errors.read_text()

    def run(self, *arguments: str, folder: Path, attack: Attack | None = None) -> Outcome:
        """Run one command."""
        (outcome,) = self.run_together([Job(arguments, folder, attack)])
        return outcome

    def run_together(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run commands at the same time; those with a time are killed after it."""
        return [Outcome(**found) for found in self._ask({"jobs": [_plain(job) for job in jobs]})]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the warm process has died: {self._errors.read_text()}"
        return json.loads(answer)


def _plain(job: Job) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(asdict(job), default=str))
    return document
