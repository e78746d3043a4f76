"""Run a list of steps on the threads of this process.

A step says by id what it needs; it is handed out once that is there, in the order of the list as
far as possible, and gets the results it needs as values. A result is let go of when the last step
that needs it has been done.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

READ_AHEAD = 4
"""Steps per thread between asking for bytes and reading them."""


class AnyStep(Protocol):
    """A piece of work."""

    @property
    def id(self) -> Hashable:
        """What its result is called."""

    @property
    def needs(self) -> Sequence[Hashable]:
        """The ids of the results that it needs."""

    @property
    def group(self) -> int:
        """Which part of the work it belongs to; groups follow each other in the list."""


Step = TypeVar("Step", bound=AnyStep)
Step_contra = TypeVar("Step_contra", bound=AnyStep, contravariant=True)


class AnyWorker(Protocol[Step_contra]):
    """The private state of one thread, and what it does."""

    def prefetch(self, step: Step_contra) -> None:
        """Say what will be read when the step runs, some time before it does."""

    def run(self, step: Step_contra, results: Mapping[Any, Any]) -> Any:
        """Do the work; `results` has what the step needs."""


class _Schedule:
    """Which steps can be done now. Threads take them, and hand in what came of them."""

    def __init__(
        self, steps: Sequence[AnyStep], known: Mapping[Any, Any], groups_ahead: int | None
    ) -> None:
        self.stop = threading.Event()
        self._steps = steps
        self._groups_ahead = groups_ahead
        self._changed = threading.Condition()
        self._results = dict(known)
        self._wanted = Counter(need for step in steps for need in step.needs)
        self._waiting: dict[Hashable, list[int]] = defaultdict(list)
        self._missing = [0] * len(steps)
        self._is_done = [False] * len(steps)
        self._first_undone = 0
        self._ready: list[int] = []
        for index, step in enumerate(steps):
            needs = [need for need in step.needs if need not in self._results]
            self._missing[index] = len(needs)
            for need in needs:
                self._waiting[need].append(index)
            if not needs:
                self._ready.append(index)  # in order, so it is a heap

    def take(self) -> tuple[int, dict[Any, Any]] | None:
        """The next step that can be done, and the results it needs; None when there is no more."""
        with self._changed:
            while not self.stop.is_set() and self._first_undone < len(self._steps):
                if self._ready and self._is_near(self._ready[0]):
                    index = heapq.heappop(self._ready)
                    needs = self._steps[index].needs
                    return index, {need: self._results[need] for need in needs}
                self._changed.wait()
            return None

    def _is_near(self, index: int) -> bool:
        if self._groups_ahead is None:
            return True
        first = self._steps[self._first_undone].group
        return self._steps[index].group <= first + self._groups_ahead

    def hand_in(self, index: int, result: Any) -> None:
        """Pass the result of a step on to those that wait for it."""
        step = self._steps[index]
        with self._changed:
            if self._wanted[step.id]:
                self._results[step.id] = result
            for waiting in self._waiting.pop(step.id, ()):
                self._missing[waiting] -= 1
                if not self._missing[waiting]:
                    heapq.heappush(self._ready, waiting)
            for need in step.needs:
                self._wanted[need] -= 1
                if not self._wanted[need]:
                    self._results.pop(need, None)
            self._is_done[index] = True
            while self._first_undone < len(self._steps) and self._is_done[self._first_undone]:
                self._first_undone += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Let every thread leave."""
        self.stop.set()
        with self._changed:
            self._changed.notify_all()


def run_steps(
    steps: Sequence[Step],
    make_worker: Callable[[threading.Event], AnyWorker[Step]],
    threads: int,
    *,
    known: Mapping[Any, Any] = MappingProxyType({}),
    collect: Callable[[Step, Any], None] = lambda _step, _result: None,
    groups_ahead: int | None = None,
) -> None:
    """Carry out all steps; the first error, or Ctrl-C, stops the others and is raised here.

    `make_worker` makes the worker of one thread; the event it is given is set when work is to stop.
    `known` are results that are there already. `collect` is told of every result, in the thread
    that has it. Steps wait that are more than `groups_ahead` groups ahead of the first that is not
    done, if results take much room.
    """
    schedule = _Schedule(steps, known, groups_ahead)
    finished = threading.Semaphore(0)  # not Thread.join, which Ctrl-C can break for good
    errors: list[BaseException] = []

    def work() -> None:
        try:
            worker = make_worker(schedule.stop)
            while (taken := schedule.take()) is not None:
                index, results = taken
                result = worker.run(steps[index], results)
                del results, taken
                collect(steps[index], result)
                schedule.hand_in(index, result)
                del result
                ahead = index + READ_AHEAD * threads
                if ahead < len(steps):
                    worker.prefetch(steps[ahead])
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
