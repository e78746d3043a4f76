"""Observations of tensors that the slices of a merge share.

A stage that ranks the elements of all tensors of a model observes each of them first, and draws a
conclusion from all observations. A slice observes its own tensors, leaves the observations in a
file in `OUT.partial`, and draws the same conclusions as every other from the files of all.

Nobody waits for a slice that does not run: any slice that needs its observations makes them, and
leaves the same file. So slices may run at the same time, or one after the other.

A file of observations is a line of JSON, whose check is taken over all that follows it and the
merge's fingerprint, then the values: their shape as JSON, their arrays as NumPy stores them.
Nothing in it can name code: of classes only named tuples and dataclasses are written, and found
again in the module of the stage.
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
from numpy.typing import NDArray

from dare.errors import RecipeError
from dare.output.journal import is_held
from dare.output.sink import explaining
from dare.output.targets import slice_journal, write_synced
from dare.planning.plan import Plan
from dare.planning.slices import Division, Slice
from dare.run.engine import do_census_steps
from dare.run.threads import Id, Results
from dare.run.worker import Conclude, Observe, Progress, list_census_steps, repeat_conclusion
from dare.tensors.chunks import bytes_digest
from dare.tensors.system import sync_folder

POLL_SECONDS = 0.25
OBSERVATIONS_VERSION = 1
RoundKey = tuple[int, int]  # a census, by its place in the plan, and a round of it
Observer = Callable[..., Any]  # a stage's function that observes a tensor
Arrays = list[NDArray[Any]]


@dataclass
class SharedObservations:
    """The observations of all slices, and the conclusions from them, for one slice."""

    plan: Plan
    part: Slice
    division: Division
    folder: Path  # the folder of the files of observations
    identity: str  # the merge, and its inputs here and now
    wait: float  # seconds without news after which nobody waits for a slice that runs
    progress: Progress
    # Gets a line when the slice waits, or does what others do not.
    announce: Callable[[str], None]

    def __post_init__(self) -> None:
        # By the numbers of slices.
        self._steps = defaultdict[RoundKey, dict[int, list[Observe]]](lambda: defaultdict(list))
        self._conclude: dict[RoundKey, Conclude] = {}
        self._known: dict[Id, Any] = {}
        self._absent: set[int] = set()  # slices whose tensors were observed here
        for step in list_census_steps(self.plan):
            if isinstance(step, Observe):
                owner = self.division.owner(step.tensor)
                self._steps[step.census, step.round][owner].append(step)
            elif isinstance(step, Conclude):
                self._conclude[step.census, step.round] = step

    def conclusions(self) -> Results:
        """Observe this slice's tensors and draw all conclusions."""
        left, own = list(self._conclude), self.part.number
        while left:
            ready = [key for key in left if self._is_ready(key)]
            for key in ready:
                self._known |= repeat_conclusion(self.plan, self._conclude[key], self._known)
            needed = [key for key in ready if self._conclude[key].id not in self._known]
            for key in needed:
                if self._steps[key][own] and self._read(key, own) is None:
                    self._observe(key, own)
            for key in needed:  # one at a time: observations take room
                observed = {**self._known, **self._gather(key)}
                self._known |= do_census_steps(self.plan, [self._conclude[key]], observed)
            left = [key for key in left if key not in ready]
        return self._known

    def _is_ready(self, key: RoundKey) -> bool:
        steps = (step for steps in self._steps[key].values() for step in steps)
        return all(need in self._known for step in steps for need in step.needs)

    def _gather(self, key: RoundKey) -> Mapping[Id, Any]:
        """Return the observations of all slices; those of slices that do not run are made here."""
        missing = [number for number, steps in self._steps[key].items() if steps]
        found: dict[Id, Any] = {}
        waits_for: list[int] = []
        last_news = time.monotonic()
        while missing:
            for number in list(missing):
                if (observed := self._read(key, number)) is not None:
                    steps = self._steps[key][number]
                    found.update((step.id, observed[step.tensor]) for step in steps)
                    missing.remove(number)
                    last_news = time.monotonic()
            is_late = time.monotonic() > last_news + self.wait
            absent = [n for n in missing if is_late or not is_held(self._journal(n))]
            if absent:
                # Others may be at it too: each begins somewhere else.
                place = self.part.number * len(absent) // (self.part.of + 1)
                self._observe(key, absent[place])
            elif missing:
                if missing != waits_for:
                    self.announce(f"waiting for {self._named(missing)}")
                    waits_for = list(missing)
                time.sleep(POLL_SECONDS)
        return found

    def _observe(self, key: RoundKey, number: int) -> None:
        """Observe the tensors of one slice and leave the observations for all."""
        if number != self.part.number and number not in self._absent:
            self._absent.add(number)
            self.announce(f"reading the tensors of slice {number}/{self.part.of}")
        steps = self._steps[key][number]
        observed = do_census_steps(self.plan, steps, self._known, progress=self.progress)
        by_tensor = {step.tensor: observed[step.id] for step in steps}
        write_observations(*self._file(key, number), by_tensor)

    def _read(self, key: RoundKey, number: int) -> dict[str, Any] | None:
        observed = read_observations(*self._file(key, number))
        steps = self._steps[key][number]
        is_whole = observed is not None and all(step.tensor in observed for step in steps)
        return observed if is_whole else None

    def _named(self, numbers: list[int]) -> str:
        shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
        return f"{'slice' if len(numbers) == 1 else 'slices'} {shown} of {self.part.of}"

    def _journal(self, number: int) -> Path:
        return slice_journal(self.folder, Slice(number, self.part.of))

    def _file(self, key: RoundKey, number: int) -> tuple[Path, str, Observer]:
        """Return a file of observations, its identity, and the stage's function that observes."""
        census = self.plan.censuses[key[0]]
        path = self._journal(number).with_suffix(".looks-{}-{}".format(*key))
        return path, f"{self.identity} {key}", census.rounds[key[1]].observe


# ---------------------------------------------------------------- files of observations


def write_observations(
    path: Path, identity: str, observe: Observer, observed: Mapping[str, Any]
) -> None:
    """Put observations by tensor into a file, at once: it is complete or not there.

    `identity` names their merge, inputs, census and round.
    """
    arrays: Arrays = []
    try:
        values = {name: _pack(value, arrays, observe) for name, value in observed.items()}
    except TypeError as error:
        name = f"{observe.__module__}.{observe.__name__}"
        raise RecipeError(f"{name}: {error}, so merge without --slice") from None
    stored = io.BytesIO()
    np.savez(stored, *arrays)
    content = json.dumps(values).encode() + b"\n" + stored.getvalue()
    started = path.with_name(f"{path.name}.{os.urandom(6).hex()}")
    with explaining(path, resumable=True):
        write_synced(started, json.dumps(_head(identity, content)).encode() + b"\n" + content)
        started.replace(path)
        sync_folder(path.parent)


def read_observations(path: Path, identity: str, observe: Observer) -> dict[str, Any] | None:
    """Read the observations in a file; None if it is not there, not whole, or of something else."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
        if json.loads(head) != _head(identity, content):
            return None
        values, _, stored = content.partition(b"\n")
        with np.load(io.BytesIO(stored), allow_pickle=False) as found:
            arrays = [found[f"arr_{place}"] for place in range(len(found.files))]
        return {name: _unpack(value, arrays, observe) for name, value in json.loads(values).items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None


def _head(identity: str, content: bytes) -> dict[str, Any]:
    check = bytes_digest(identity.encode() + b"\n" + content)
    return {"looks": OBSERVATIONS_VERSION, "check": check}


def _pack(value: Any, arrays: Arrays, observe: Observer) -> Any:
    """Return a value as JSON has it; arrays are put aside."""
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise TypeError("it finds an array of objects")
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "number": len(arrays) - 1}
    if isinstance(value, dict):
        return {"dict": [[_pack(part, arrays, observe) for part in pair] for pair in value.items()]}
    kind = type(value)
    if kind in (list, tuple):
        return {kind.__name__: [_pack(part, arrays, observe) for part in value]}
    if _fields(kind) and observe.__globals__.get(kind.__name__) is kind:
        parts = [_pack(getattr(value, name), arrays, observe) for name in _fields(kind)]
        return {"class": kind.__name__, "parts": parts}
    raise TypeError(f"it finds a {kind.__name__}, which has no plain form")


def _unpack(value: Any, arrays: Arrays, observe: Observer) -> Any:
    if not isinstance(value, dict):
        return value
    if "class" in value:
        kind = observe.__globals__[value["class"]]
        if not isinstance(kind, type) or not _fields(kind):
            raise TypeError(f"{value['class']} is not a class of values")
        parts = [_unpack(part, arrays, observe) for part in value["parts"]]
        return kind(**dict(zip(_fields(kind), parts, strict=True)))
    ((word, content),) = value.items()
    if word in ("array", "number"):
        return arrays[content] if word == "array" else arrays[content][()]
    if word == "dict":
        return {_unpack(k, arrays, observe): _unpack(v, arrays, observe) for k, v in content}
    unpacked = [_unpack(part, arrays, observe) for part in content]
    return tuple(unpacked) if word == "tuple" else unpacked


def _fields(kind: type) -> tuple[str, ...]:
    """Return the field names of a named tuple or a dataclass; none for other classes."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    named: tuple[str, ...] = getattr(kind, "_fields", ())
    return named if issubclass(kind, tuple) else ()
