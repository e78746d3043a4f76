"""What a node of a cluster does: it opens a job for itself, and does batches of its steps.

A job is plain data. Each node opens the inputs and the output by it, as the driver has, and says
so if it finds anything else there. It has a worker for each of its threads; one worker does one
batch. Nothing here knows what brings the batches.
"""

from __future__ import annotations

import gc
import itertools
import platform
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

from dare import __version__
from dare.run.graph import Step
from dare.run.schedule import Batch, Schedule
from dare.run.threads import BATCH, AnyWorker

AHEAD = 64
"""Steps of a batch whose bytes are asked for when it comes in."""

AnyStep = TypeVar("AnyStep", bound=Step)


class Opened(Protocol):
    """A job as it lies open on one node."""

    @property
    def threads(self) -> int:
        """How many workers the memory allows."""

    @property
    def mark(self) -> str:
        """What the node has left where it writes, for the driver to find; empty if nothing."""

    def make_worker(self, progress: Callable[[int], None]) -> AnyWorker[Any]:
        """A worker for one thread, which says what it has read."""

    def finish(self) -> None:
        """Wait until what was written is on the disk; refuse inputs that have changed."""


class Job(Protocol):
    """Work that nodes share, as plain data."""

    def open(self, threads: int) -> Opened:
        """Open it on this node, if everything is as the driver sees it."""

    def confirm(self, mark: str) -> None:
        """Find the mark that a node has left, where the driver writes."""


@dataclass(frozen=True)
class Bundle(Step):
    """Steps that stay together, so that what they need of each other never leaves the node.

    Its result are theirs, but for those that only steps of the bundle need.
    """

    steps: tuple[Step, ...]


def bundle(steps: Iterable[AnyStep], key: Callable[[AnyStep], Hashable | None]) -> list[Step]:
    """Put steps with the same key together, where the first of them stood; None is left alone."""
    bundled: dict[Hashable, list[AnyStep]] = {}
    for place, step in enumerate(steps):
        found = key(step)
        bundled.setdefault((place,) if found is None else ("key", found), []).append(step)
    return [
        _joined(together) if len(together) > 1 else together[0] for together in bundled.values()
    ]


def _joined(steps: Sequence[Step]) -> Bundle:
    own = {step.id for step in steps}
    needs = dict.fromkeys(need for step in steps for need in step.needs if need not in own)
    elements = sum(step.elements for step in steps)
    return Bundle(("bundle", steps[-1].id), tuple(needs), steps[0].group, elements, tuple(steps))


@dataclass(frozen=True)
class Done:
    """What came of a batch."""

    results: list[Any]
    nbytes: int
    """What was read for it."""
    seconds: float
    """How long a thread had it."""


@dataclass
class _Seat:
    """A worker, and what it has read for its batch."""

    worker: AnyWorker[Any] | None = None
    nbytes: int = 0

    def count(self, nbytes: int) -> None:
        self.nbytes += nbytes


@dataclass
class Node:
    """A node at work; any of its methods may be called from any thread."""

    opened: Opened | None = None
    seats: queue.SimpleQueue[_Seat] = field(default_factory=queue.SimpleQueue)
    """Of the workers that have no batch."""
    scout: AnyWorker[Any] | None = None
    """One of them, to ask for bytes."""

    def versions(self) -> dict[str, str]:
        """What must be the same on every node, since all bytes are made by it."""
        return versions()

    def open(self, job: Job, threads: int) -> tuple[int, str]:
        """Open a job; return how many batches can be under way at once, and the node's mark."""
        self.opened = job.open(threads)
        workers = []
        for _ in range(self.opened.threads):
            seat = _Seat()
            seat.worker = self.opened.make_worker(seat.count)
            workers.append(seat)
        for seat in workers:
            self.seats.put(seat)
        self.scout = workers[0].worker
        gc.collect()
        gc.freeze()  # so that the collector does not go over all of Numba again and again
        return self.opened.threads, self.opened.mark

    def run(self, batch: Batch[Any]) -> Done:
        """Do a batch as soon as a worker is free; while it waits, its bytes are asked for."""
        assert self.scout is not None
        if self.seats.empty():
            for step in itertools.islice(_flat(batch.steps), AHEAD):
                self.scout.prefetch(step)
        seat = self.seats.get()
        try:
            assert seat.worker is not None
            started, seat.nbytes = time.perf_counter(), 0
            results = list(_run(seat.worker, batch))
            return Done(results, seat.nbytes, time.perf_counter() - started)
        finally:
            self.seats.put(seat)

    def finish(self) -> None:
        """See to it that what was written lasts."""
        assert self.opened is not None
        self.opened.finish()


def versions() -> dict[str, str]:
    """The versions of what computes here."""
    packages = {name: version(name) for name in ("numpy", "numba")}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"dare": __version__, "Python": python, **packages}


def _flat(steps: Iterable[Step]) -> Iterator[Step]:
    for step in steps:
        yield from step.steps if isinstance(step, Bundle) else (step,)


def _run(worker: AnyWorker[Any], batch: Batch[Any]) -> Iterator[Any]:
    if not any(isinstance(step, Bundle) for step in batch.steps):
        yield from worker.run_batch(batch)
        return
    for place, step in zip(batch.places, batch.steps, strict=True):
        if isinstance(step, Bundle):
            yield _run_bundle(worker, step, batch.results)
        else:
            yield from worker.run_batch(Batch((place,), (step,), batch.results))


def _run_bundle(worker: AnyWorker[Any], step: Bundle, known: Any) -> list[Any]:
    """Do the steps of a bundle in order; keep the results that none of them needs."""
    needed = {need for inner in step.steps for need in inner.needs}
    schedule = Schedule(step.steps, known)
    results: list[Any] = [None] * len(step.steps)
    while (batch := schedule.take_now(BATCH)) is not None:
        found = list(worker.run_batch(batch))
        schedule.hand_in(batch, found)
        for place, inner, result in zip(batch.places, batch.steps, found, strict=True):
            if inner.id not in needed:
                results[place] = result
    return results
