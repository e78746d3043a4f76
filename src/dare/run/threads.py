"""Run a list of steps on the threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from dare.run.schedule import AnyStep, Batch, Schedule
from dare.tensors.chunks import CHUNK

READ_AHEAD = 4
"""Steps per thread between asking for bytes and reading them."""

BATCH = 4 * CHUNK
"""Elements that a thread takes at a time: the interpreter's lock is asked for less often."""

Step = TypeVar("Step", bound=AnyStep)
Step_contra = TypeVar("Step_contra", bound=AnyStep, contravariant=True)


class AnyWorker(Protocol[Step_contra]):
    """The private state of one thread, and what it does."""

    def prefetch(self, step: Step_contra) -> None:
        """Say what will be read when the step runs, some time before it does."""

    def run_batch(self, batch: Batch[Step_contra]) -> Iterator[Any]:
        """Do the steps of a batch; yield a result for each, in order."""


def run_steps(
    steps: Sequence[Step],
    make_worker: Callable[[threading.Event], AnyWorker[Step]],
    threads: int,
    *,
    known: Mapping[Any, Any] = MappingProxyType({}),
    collect: Callable[[Sequence[Step], Sequence[Any]], None] = lambda _steps, _results: None,
    groups_ahead: int | None = None,
) -> None:
    """Carry out all steps; the first error, or Ctrl-C, stops the others and is raised here.

    `make_worker` makes the worker of one thread; the event it is given is set when work is to stop.
    `collect` is told of the results of every batch, in the thread that has them. `known` and
    `groups_ahead` are as in `Schedule`.
    """
    schedule = Schedule(steps, known, takers=threads, groups_ahead=groups_ahead)
    finished = threading.Semaphore(0)  # not Thread.join, which Ctrl-C can break for good
    errors: list[BaseException] = []
    asking = threading.Lock()
    asked = 0

    def to_prefetch(last: int) -> range:
        """Steps up to some way beyond one, as far as nobody has asked for their bytes yet."""
        nonlocal asked
        with asking:
            first, asked = asked, max(asked, min(len(steps), last + 1 + READ_AHEAD * threads))
            return range(first, asked)

    def work() -> None:
        try:
            worker = make_worker(schedule.stop)
            while (batch := schedule.take(BATCH)) is not None:
                for place in to_prefetch(max(batch.places)):
                    worker.prefetch(steps[place])
                results: list[Any] = []
                try:
                    results.extend(worker.run_batch(batch))
                finally:  # what was done before an error counts
                    collect(batch.steps[: len(results)], results)
                schedule.hand_in(batch, results)
                del batch, results  # they may be large, and taking the next may take a while
        except BaseException as error:
            errors.append(error)
            schedule.end()
        finally:
            finished.release()

    for number in range(threads):
        threading.Thread(target=work, name=f"dare-{number}", daemon=True).start()
    running = threads
    try:
        while running:
            running -= finished.acquire(timeout=0.2)
    except BaseException:
        schedule.end()
        for _ in range(running):
            finished.acquire()
        raise
    if errors:
        raise errors[0]
