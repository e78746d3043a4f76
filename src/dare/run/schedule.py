"""Which steps can be done now: handed out in batches, taken back with their results.

A step says by id what it needs; it is handed out once that is there, in the order of the list as
far as possible, with the results it needs as values. A result is let go of when the last step that
needs it has been done. Threads of this process take batches of a few chunks; a cluster takes larger
ones, which may come back undone and are handed out again.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar


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

    @property
    def elements(self) -> int:
        """How much it has to see, by which batches are measured."""


Step = TypeVar("Step", bound=AnyStep)
Step_co = TypeVar("Step_co", bound=AnyStep, covariant=True)


@dataclass(frozen=True)
class Batch(Generic[Step_co]):
    """Some steps that can be done now, none of which needs another: plain data."""

    places: tuple[int, ...]
    """Of the steps in the list of all."""
    steps: tuple[Step_co, ...]
    results: Mapping[Any, Any]
    """What the steps need, by id."""


class Schedule(Generic[Step]):
    """Hands out steps, and passes on what came of them; any thread may ask."""

    def __init__(
        self,
        steps: Sequence[Step],
        known: Mapping[Any, Any] = MappingProxyType({}),
        *,
        takers: int = 1,
        groups_ahead: int | None = None,
        smallest: int = 0,
    ) -> None:
        """Take in all steps; `known` are results that are there already.

        Batches get smaller towards the end, so that all `takers` end together, but not smaller than
        `smallest` elements. Steps wait that are more than `groups_ahead` groups ahead of the first
        that is not done, if results take much room.
        """
        self.stop = threading.Event()
        """Set when no more steps are to be done."""
        self.steps = steps
        self.takers = takers
        self._groups_ahead = groups_ahead
        self.smallest = smallest
        self._changed = threading.Condition()
        self._results = dict(known)
        self._wanted = Counter(need for step in steps for need in step.needs)
        self._waiting: dict[Hashable, list[int]] = defaultdict(list)
        self._missing = [0] * len(steps)
        self._is_done = [False] * len(steps)
        self._first_undone = 0
        self._left = sum(step.elements for step in steps)
        """Elements of the steps that nobody has taken."""
        self._ready: list[int] = []
        for place, step in enumerate(steps):
            needs = [need for need in step.needs if need not in self._results]
            self._missing[place] = len(needs)
            for need in needs:
                self._waiting[need].append(place)
            if not needs:
                self._ready.append(place)  # in order, so it is a heap

    @property
    def is_done(self) -> bool:
        """Whether every step has been done."""
        return self._first_undone == len(self.steps)

    def take(self, limit: int) -> Batch[Step] | None:
        """Wait for steps that can be done; None when there will be no more.

        A batch has at least one step, and more only as far as they have `limit` elements together.
        """
        with self._changed:
            while not self.stop.is_set() and not self.is_done:
                if batch := self._take(limit):
                    return batch
                self._changed.wait()
            return None

    def take_now(self, limit: int) -> Batch[Step] | None:
        """The same without waiting: None if no step can be done now."""
        with self._changed:
            return None if self.stop.is_set() else self._take(limit)

    def _take(self, limit: int) -> Batch[Step] | None:
        places: list[int] = []
        room = min(limit, max(self.smallest, self._left // (2 * self.takers)))
        while self._ready and self._is_near(self._ready[0]):
            elements = self.steps[self._ready[0]].elements
            if places and elements > room:
                break
            places.append(heapq.heappop(self._ready))
            room -= elements
            self._left -= elements
        if not places:
            return None
        steps = tuple(self.steps[place] for place in places)
        results = {need: self._results[need] for step in steps for need in step.needs}
        return Batch(tuple(places), steps, results)

    def _is_near(self, place: int) -> bool:
        if self._groups_ahead is None:
            return True
        first = self.steps[self._first_undone].group
        return self.steps[place].group <= first + self._groups_ahead

    def hand_in(self, batch: Batch[Step], results: Sequence[Any]) -> None:
        """Pass the results of a batch on to the steps that wait for them."""
        with self._changed:
            for place, step, result in zip(batch.places, batch.steps, results, strict=True):
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
            while not self.is_done and self._is_done[self._first_undone]:
                self._first_undone += 1
            self._changed.notify_all()

    def give_back(self, batch: Batch[Step]) -> None:
        """Let others have a batch that its taker will not do."""
        with self._changed:
            for place, step in zip(batch.places, batch.steps, strict=True):
                heapq.heappush(self._ready, place)
                self._left += step.elements
            self._changed.notify_all()

    def end(self) -> None:
        """Let everybody leave."""
        self.stop.set()
        with self._changed:
            self._changed.notify_all()
