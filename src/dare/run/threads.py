"""Run a list of steps on the threads of this process.

A step lists the ids of the results it needs; it is handed out once they are known, in the order of
the list if possible, together with these results. A result is dropped when the last step that needs
it has been done.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from dare.tensors.chunks import CHUNK

STEPS_READ_AHEAD = 4  # steps per thread between prefetching bytes and reading them
BATCH_ELEMENTS = 4 * CHUNK  # taken at a time, so that the interpreter's lock is taken less often

Id = tuple[Any, ...]
Results = Mapping[Id, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of work."""

    id: Id  # the name of its result
    needs: tuple[Id, ...]  # the ids of the results that it needs
    group: int  # the place of its tensor in the plan, from 1; 0 for steps before all tensors
    elements: int  # to read from each input; the size of a batch is counted in them


AnyStep = TypeVar("AnyStep", bound=Step)
AnyStep_contra = TypeVar("AnyStep_contra", bound=Step, contravariant=True)


class AnyWorker(Protocol[AnyStep_contra]):
    """The private state and the work of one thread."""

    def prefetch(self, step: AnyStep_contra) -> None:
        """Announce what the step will read, some time before it runs."""

    def do(self, steps: Sequence[AnyStep_contra], results: Results, /) -> Iterator[Any]:
        """Do steps, with the results that they need by id; yield a result for each, in order."""


def run_steps(
    steps: Sequence[AnyStep],
    make_worker: Callable[[threading.Event], AnyWorker[AnyStep]],
    threads: int,
    *,
    known: Results = MappingProxyType({}),
    collect: Callable[[Sequence[AnyStep], Sequence[Any]], None] = lambda _steps, _results: None,
    batch_elements: int = BATCH_ELEMENTS,
    one_group: bool = False,
    ends_together: bool = True,
) -> None:
    """Carry out all steps; the first error, or Ctrl-C, stops the others and is raised here.

    `make_worker` makes the worker of one thread; its event is set when the work must stop.
    `collect` gets the results of every batch, in the thread that made them. `known` are results
    from before. A batch of several steps has at most `batch_elements`. With `one_group` its steps
    are all of one group, so that results of at most as many groups as threads are held: a group is
    begun only when a thread works on each group that was begun before. So that all threads end
    together, batches get smaller towards the end, unless `ends_together` is false.
    """
    schedule = _Schedule(steps, known, threads, batch_elements, one_group, ends_together)
    finished = threading.Semaphore(0)  # not Thread.join, which Ctrl-C can break for good
    errors: list[BaseException] = []
    asking = threading.Lock()
    asked = 0

    def to_prefetch(last: int) -> range:
        """Return the steps to prefetch now: up to some steps beyond `last`, each only once."""
        nonlocal asked
        with asking:
            end = min(len(steps), last + 1 + STEPS_READ_AHEAD * threads)
            first, asked = asked, max(asked, end)
            return range(first, asked)

    def work() -> None:
        try:
            worker = make_worker(schedule.stop)
            while places := schedule.take():
                for place in to_prefetch(max(places)):
                    worker.prefetch(steps[place])
                batch = [steps[place] for place in places]
                results: list[Any] = []
                try:
                    results.extend(worker.do(batch, schedule.results_for(batch)))
                finally:  # steps that were done before an error count
                    collect(batch[: len(results)], results)
                schedule.hand_in(places, results)
                del batch, results  # they may be large, and the next batch may take a while
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


class _Schedule(Generic[AnyStep]):
    """Hands out steps, and passes on their results; any thread may call it."""

    def __init__(
        self,
        steps: Sequence[AnyStep],
        known: Results,
        threads: int,
        batch_elements: int,
        one_group: bool,
        ends_together: bool,
    ) -> None:
        self.stop = threading.Event()  # set when no more steps should be done
        self._steps = steps
        self._threads = threads
        self._batch_elements = batch_elements
        self._one_group = one_group
        self._ends_together = ends_together
        self._changed = threading.Condition()
        self._results = dict(known)
        self._wanted = Counter(need for step in steps for need in step.needs)
        self._waiting: dict[Id, list[int]] = defaultdict(list)
        self._missing = [0] * len(steps)
        self._is_done = [False] * len(steps)
        self._first_undone = 0
        self._left = sum(step.elements for step in steps)  # elements that nobody has taken
        self._ready: list[int] = []
        for place, step in enumerate(steps):
            needs = [need for need in step.needs if need not in self._results]
            self._missing[place] = len(needs)
            for need in needs:
                self._waiting[need].append(place)
            if not needs:
                self._ready.append(place)  # in order, so it is a heap

    def take(self) -> list[int]:
        """Wait for steps that can be done, and return their places; none when all are done."""
        with self._changed:
            while not self.stop.is_set() and self._first_undone < len(self._steps):
                room = self._batch_elements
                if self._ends_together:
                    room = min(room, self._left // (2 * self._threads))
                if places := self._take(room):
                    return places
                self._changed.wait()
            return []

    def results_for(self, steps: Iterable[AnyStep]) -> Results:
        """Return the results that steps need, by id."""
        return {need: self._results[need] for step in steps for need in step.needs}

    def _take(self, room: int) -> list[int]:
        """Take at least one step, if one can be done, and more while there is room."""
        places: list[int] = []
        while self._ready:
            step = self._steps[self._ready[0]]
            leaves = self._one_group and places and step.group != self._steps[places[0]].group
            if leaves or (places and step.elements > room):
                break
            places.append(heapq.heappop(self._ready))
            room -= step.elements
            self._left -= step.elements
        return places

    def hand_in(self, places: Sequence[int], results: Sequence[Any]) -> None:
        """Pass the results of a batch on to the steps that wait for them."""
        with self._changed:
            for place, result in zip(places, results, strict=True):
                step = self._steps[place]
                self._is_done[place] = True
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
            while self._first_undone < len(self._steps) and self._is_done[self._first_undone]:
                self._first_undone += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Stop all threads."""
        self.stop.set()
        with self._changed:
            self._changed.notify_all()
