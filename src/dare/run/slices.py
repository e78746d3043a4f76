"""What slices of a merge must tell each other: the looks of a census.

A stage that ranks the elements of all tensors of a model looks at each of them first, and
concludes from all looks. A slice looks at its own tensors, leaves what it found in a file in
`OUT.partial`, and draws the same conclusions as every other from the files of all.

Nobody waits for a slice that does not run: its looks are made by whoever needs them, and left
where it would have left them. So slices may run at the same time, or one after the other.

A file of looks is a line of JSON, whose check is taken over all that follows it and the merge's
fingerprint, then the values: their shape as JSON, their arrays as NumPy stores them. Nothing in it
can name code: of classes only named tuples and dataclasses are written, and found again in the
module of the stage that looked.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import RecipeError
from dare.output.journal import is_held
from dare.output.publishing import sync_folder, write_synced
from dare.output.targets import slice_journal
from dare.output.writer import explaining
from dare.planning.plan import Plan
from dare.planning.slices import Division, Slice
from dare.run.execute import Conclusions, do_census_steps
from dare.run.graph import Conclude, Id, Look, list_census_steps
from dare.run.worker import Progress
from dare.tensors.digest import bytes_digest

POLL_SECONDS = 0.25
LOOKS_VERSION = 1
Task = tuple[int, int]
"""A census, by its place in the plan, and a round of it."""
Looker = Callable[..., Any]
"""A stage's function that looks at a tensor, in whose module its classes stand."""


@dataclass(frozen=True)
class Feedback:
    """What is called while a slice is at work."""

    progress: Progress
    compiling: Callable[[], None]
    """When kernels have to be compiled."""
    say: Callable[[str], None]
    """When it waits, or does what others do not."""


@dataclass
class SharedCensuses:
    """The looks of all slices, and what follows from them, for one slice."""

    plan: Plan
    part: Slice
    division: Division
    folder: Path
    """Where the files of looks lie."""
    identity: str
    """The merge, and its inputs here and now."""
    wait: float
    """Seconds without news after which nobody waits for a slice that runs."""
    feedback: Feedback

    def __post_init__(self) -> None:
        self._looks: dict[Task, dict[int, list[Look]]] = defaultdict(lambda: defaultdict(list))
        """By the number of the slice that has to look."""
        self._conclude: dict[Task, Conclude] = {}
        self._known: dict[Id, Any] = {}
        self._absent: set[int] = set()
        """Slices whose looks were made here."""
        for step in list_census_steps(self.plan):
            if isinstance(step, Look):
                owner = self.division.owner(step.tensor)
                self._looks[step.census, step.round][owner].append(step)
            elif isinstance(step, Conclude):
                self._conclude[step.census, step.round] = step

    def conclusions(self) -> Conclusions:
        """Do this slice's looks and draw all conclusions."""
        left = list(self._conclude)
        while left:
            ready = [task for task in left if self._is_ready(task)]
            for task in ready:
                is_ours = self._looks[task][self.part.number]
                if is_ours and self._read(task, self.part.number) is None:
                    self._look(task, self.part.number)
            for task in ready:  # one at a time: looks take room
                looks = {**self._known, **self._gather(task)}
                self._known |= do_census_steps(self.plan, [self._conclude[task]], looks)
            left = [task for task in left if task not in ready]
        return self._known

    def _is_ready(self, task: Task) -> bool:
        steps = (step for steps in self._looks[task].values() for step in steps)
        return all(need in self._known for step in steps for need in step.needs)

    def _gather(self, task: Task) -> Mapping[Id, Any]:
        """The looks of all slices; those of slices that do not run are made here."""
        missing = [number for number, steps in self._looks[task].items() if steps]
        found: dict[Id, Any] = {}
        waits_for: list[int] = []
        last_news = time.monotonic()
        while missing:
            for number in list(missing):
                if (looks := self._read(task, number)) is not None:
                    steps = self._looks[task][number]
                    found.update((step.id, looks[step.tensor]) for step in steps)
                    missing.remove(number)
                    last_news = time.monotonic()
            is_late = time.monotonic() > last_news + self.wait
            absent = [number for number in missing if is_late or not self._runs(number)]
            if absent:
                # Others may be at it too: each begins somewhere else.
                self._look(task, absent[self.part.number * len(absent) // (self.part.of + 1)])
            elif missing:
                if missing != waits_for:
                    self.feedback.say(f"waiting for the looks of {self._named(missing)}")
                    waits_for = list(missing)
                time.sleep(POLL_SECONDS)
        return found

    def _look(self, task: Task, number: int) -> None:
        """Do the looks of one slice and leave them for all."""
        if number != self.part.number and number not in self._absent:
            self._absent.add(number)
            self.feedback.say(f"looking at the tensors of slice {number}/{self.part.of}")
        steps, feedback = self._looks[task][number], self.feedback
        told: dict[str, Any] = {"progress": feedback.progress, "announce": feedback.compiling}
        looks = do_census_steps(self.plan, steps, self._known, **told)
        by_tensor = {step.tensor: looks[step.id] for step in steps}
        write_looks(self._file(task, number), self._identity(task), by_tensor, self._looker(task))

    def _read(self, task: Task, number: int) -> dict[str, Any] | None:
        looks = read_looks(self._file(task, number), self._identity(task), self._looker(task))
        steps = self._looks[task][number]
        is_whole = looks is not None and all(step.tensor in looks for step in steps)
        return looks if is_whole else None

    def _runs(self, number: int) -> bool:
        return is_held(slice_journal(self.folder, Slice(number, self.part.of)))

    def _named(self, numbers: list[int]) -> str:
        shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
        return f"{'slice' if len(numbers) == 1 else 'slices'} {shown} of {self.part.of}"

    def _file(self, task: Task, number: int) -> Path:
        journal = slice_journal(self.folder, Slice(number, self.part.of))
        return journal.with_suffix(".looks-{}-{}".format(*task))

    def _identity(self, task: Task) -> str:
        return f"{self.identity} {task}"

    def _looker(self, task: Task) -> Callable[..., Any]:
        """The stage's function that looks."""
        census = self.plan.censuses[task[0]]
        stage = self.plan.stages[census.position]
        return stage.rounds(census.settings)[task[1]].observe


# ---------------------------------------------------------------- files of looks


def write_looks(path: Path, identity: str, looks: Mapping[str, Any], look: Looker) -> None:
    """Put looks by tensor into a file, at once: it is complete or not there.

    `identity` says of which merge, inputs, census and round they are.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    try:
        values = {name: _pack(value, arrays, look) for name, value in looks.items()}
    except TypeError as error:
        name = f"{look.__module__}.{look.__name__}"
        raise RecipeError(f"{name}: {error}, so merge without --slice") from None
    stored = io.BytesIO()
    np.savez(stored, *arrays)
    content = json.dumps(values).encode() + b"\n" + stored.getvalue()
    head = {"looks": LOOKS_VERSION, "check": _check(identity, content)}
    started = path.with_name(f"{path.name}.{os.urandom(6).hex()}")
    with explaining(path, resumable=True):
        write_synced(started, json.dumps(head).encode() + b"\n" + content)
        started.replace(path)
        sync_folder(path.parent)


def read_looks(path: Path, identity: str, look: Looker) -> dict[str, Any] | None:
    """The looks of a file; None if it is not there, not whole, or of something else."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
        expected = {"looks": LOOKS_VERSION, "check": _check(identity, content)}
        if json.loads(head) != expected:
            return None
        values, _, stored = content.partition(b"\n")
        with np.load(io.BytesIO(stored), allow_pickle=False) as found:
            arrays = [found[f"arr_{place}"] for place in range(len(found.files))]
        return {name: _unpack(value, arrays, look) for name, value in json.loads(values).items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None


def _check(identity: str, content: bytes) -> str:
    return bytes_digest(identity.encode() + b"\n" + content)


def _pack(value: Any, arrays: list[np.ndarray[Any, Any]], look: Looker) -> Any:
    """A value as JSON has it; arrays are put aside."""
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise TypeError("it finds an array of objects")
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "number": len(arrays) - 1}
    if isinstance(value, dict):
        pairs = [[_pack(part, arrays, look) for part in pair] for pair in value.items()]
        return {"dict": pairs}
    kind = type(value)
    if kind in (list, tuple):
        return {kind.__name__: [_pack(part, arrays, look) for part in value]}
    if _fields(kind) and look.__globals__.get(kind.__name__) is kind:
        parts = [_pack(getattr(value, name), arrays, look) for name in _fields(kind)]
        return {"class": kind.__name__, "parts": parts}
    raise TypeError(f"it finds a {kind.__name__}, which has no plain form")


def _unpack(value: Any, arrays: list[np.ndarray[Any, Any]], look: Looker) -> Any:
    if not isinstance(value, dict):
        return value
    if "class" in value:
        kind = look.__globals__[value["class"]]
        if not isinstance(kind, type) or not _fields(kind):
            raise TypeError(f"{value['class']} is not a class of values")
        parts = [_unpack(part, arrays, look) for part in value["parts"]]
        return kind(**dict(zip(_fields(kind), parts, strict=True)))
    ((word, content),) = value.items()
    if word in ("array", "number"):
        return arrays[content] if word == "array" else arrays[content][()]
    if word == "dict":
        return {_unpack(k, arrays, look): _unpack(v, arrays, look) for k, v in content}
    unpacked = [_unpack(part, arrays, look) for part in content]
    return tuple(unpacked) if word == "tuple" else unpacked


def _fields(kind: type) -> tuple[str, ...]:
    """The names of what a named tuple or a dataclass holds; none for other classes."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    named: tuple[str, ...] = getattr(kind, "_fields", ())
    return named if issubclass(kind, tuple) else ()
