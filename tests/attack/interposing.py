"""Commands of dare's in processes of their own, with an attack on the calls that they make.

Starting Python and importing dare takes a second, an attack takes a hundredth of one. So one warm
process, `warm.py`, imports dare once and forks a child for each attack; `Warm` talks to it. In the
child `watching.py` counts the calls that change or read files, and attacks one of them.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EACCES")
CANNOT_MOUNT = 77
"""The exit status where a bind mount is not allowed."""


@dataclass(frozen=True)
class Attack:
    """What shall happen to which call."""

    root: Path
    """Calls on files below this folder are counted."""
    action: str = "count"
    """Or "kill before", "kill after", "fail", "shorten"."""
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
    """How many calls were counted, unless the process was killed."""
    what: str
    """The attacked call; nothing if it never came."""


class Warm:
    """The warm process; a context manager."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors

    def __enter__(self) -> Self:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "warm.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.communicate()

    def warm_up(self, arguments: Sequence[str], folder: Path) -> None:
        """Run a command in the warm process itself, so that it has all that the command needs."""
        assert self._ask(Job(tuple(arguments), folder)) == 0, self._errors.read_text()

    def run(self, *arguments: str, folder: Path, attack: Attack | None = None) -> Outcome:
        """Run one command."""
        (outcome,) = self.run_together([Job(arguments, folder, attack)])
        return outcome

    def run_together(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run commands at the same time; those with a time are killed after it."""
        outcomes: list[Outcome] = self._ask(list(jobs))
        return outcomes

    def _ask(self, request: Job | list[Job]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        try:
            return pickle.load(self._process.stdout)
        except EOFError:
            raise AssertionError(f"the warm process died: {self._errors.read_text()}") from None
