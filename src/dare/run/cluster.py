"""Steps carried out by the nodes of a Ray cluster; nothing else knows Ray.

The driver, which is this process, has the schedule. Every node has one actor, which opens the job
for itself and does batches with all its threads. A few more batches than it has threads are on
their way to it, so that none waits. Weights are read and written by the nodes; what travels are
steps, records, and what surveys and looks have found.

A node that dies gives its batches back, and others do them: a chunk has its place, and whoever
writes it writes the same bytes. A node that joins is used. What a node has written may still have
been in its memory when it died; it is for the caller to look at that again.
"""

from __future__ import annotations

import json
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dare.errors import ClusterError, DareError, OutputError
from dare.run.graph import Conclude, Step
from dare.run.node import Bundle, Done, Job, Node, versions
from dare.run.schedule import Batch, Schedule
from dare.tensors.sizes import show_size

BATCH_BYTES = 64 << 20
"""What a batch reads at the most, unless a single step reads more."""
MANY_NODES, MORE = 16, 4
"""With more nodes batches are so many times as large, and never smaller than else the largest, or
the driver could not keep up."""
SMALLEST = 16
"""The part of a batch that is the least, towards the end."""
WAITING = 2
"""Batches that wait at a node while its threads have theirs."""
LOOK_SECONDS = 2.0
"""How often the driver looks for nodes that have joined."""
START_SECONDS = 60.0
"""How long the first batch waits for a node that is there and does not answer."""
PATIENCE_SECONDS = 60.0
"""How long the driver waits for a node to join when none is left."""
DEATHS = 3
"""So many workers may die of a batch on nodes that live."""

Pairs = list[tuple[Step, Any]]
"""Steps with their results."""


@dataclass(frozen=True)
class Settings:
    """How a cluster is used."""

    address: str
    """`auto`, or where its head is."""
    threads: int | None = None
    """Of each node; all that Ray may use there if not given."""
    limit: int = 1
    """The most elements of a batch, unless one step has more."""
    log: Path | None = None
    """Where a line of JSON goes for every batch."""
    announce: Callable[[str], None] = lambda _text: None


def run_on_cluster(
    job: Job,
    steps: Sequence[Step],
    settings: Settings,
    *,
    known: Mapping[Any, Any] = MappingProxyType({}),
    collect: Callable[[Sequence[Step], Sequence[Any]], None] = lambda _steps, _results: None,
    progress: Callable[[int], None] = lambda _nbytes: None,
    conclude: Callable[[Batch[Step]], Sequence[Any]] | None = None,
) -> Pairs:
    """Carry out all steps; return those whose node died before it had synced what it wrote.

    `collect` is told of all results, and `progress` of bytes that were read. `conclude` draws
    conclusions here, since that needs what all nodes have found and reads nothing.
    """
    with _connected(settings.address) as ray, _Log(settings.log) as log:
        schedule = Schedule(steps, known, smallest=settings.limit // SMALLEST)
        driver = _Driver(ray, job, settings, schedule, log)
        driver.collect, driver.progress, driver.conclude = collect, progress, conclude
        try:
            doubtful = driver.run()
            for line in driver.rates():
                settings.announce(line)
            return doubtful
        finally:
            driver.dismiss()


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster, and as quiet as it can be."""
    try:
        import ray
        import ray._private.worker
    except ImportError:
        raise ClusterError(
            f'cluster = "{address}": Ray is not installed; '
            'install it with pip install "dare-merge[ray]"'
        ) from None
    if ray.is_initialized():  # by a program that uses dare, which may go on using Ray
        yield ray
        return
    _knock(address)
    ray._private.worker.print_to_stdstream = _say_nothing  # news of dead nodes, on stdout
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address, log_to_driver=False, logging_level="CRITICAL")
    except Exception as error:
        raise ClusterError(
            f'cluster = "{address}": no Ray cluster answers ({_first_line(error)}); '
            "start one with `ray start --head`, or leave cluster out"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _say_nothing(*_arguments: Any, **_more: Any) -> None:
    pass


def _knock(address: str) -> None:
    """Refuse an address where nobody listens: Ray would wait a minute, and end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f'cluster = "{address}": no Ray cluster answers ({error.strerror or error}); '
            "start one with `ray start --head`, or leave cluster out"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _Log:
    """Lines of JSON about what happens, if somebody wants them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._started = time.perf_counter()

    def __enter__(self) -> _Log:
        try:
            self._file = None if self._path is None else self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"{self._path}: cannot be written: {error.strerror or error}"
            ) from None
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, event: str, node: str, **more: Any) -> None:
        """Write a line, with the seconds since the start."""
        if self._file is not None:
            at = round(time.perf_counter() - self._started, 6)
            line = {"at": at, "event": event, "node": node, **more}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


@dataclass
class _Member:
    """A node that is used, as the driver sees it."""

    id: str
    name: str
    actor: Any
    wanted_threads: int
    is_late: bool
    """Whether it joined when work was under way."""
    threads: int = 0
    """None before it is ready."""
    batches: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    """Of all its threads."""
    done: Pairs = field(default_factory=list)
    """What it has handed in and not synced."""

    @property
    def is_ready(self) -> bool:
        return self.threads > 0


@dataclass
class _Call:
    """Something a member has been asked for."""

    member: _Member
    what: str
    batch: Batch[Step] | None = None


class _Driver:
    """Hands out batches and takes in what comes of them, until all is done."""

    collect: Callable[[Sequence[Step], Sequence[Any]], None]
    progress: Callable[[int], None]
    conclude: Callable[[Batch[Step]], Sequence[Any]] | None

    def __init__(
        self, ray: Any, job: Job, settings: Settings, schedule: Schedule[Step], log: _Log
    ) -> None:
        self._ray = ray
        self._job = ray.put(job)
        self._confirm = job.confirm
        self._settings = settings
        self._schedule = schedule
        self._log = log
        self._members: dict[str, _Member] = {}
        self._left_out: set[str] = set()
        """Nodes that joined later and cannot be used."""
        self._calls: dict[Any, _Call] = {}
        self._last_look = -LOOK_SECONDS
        self._last_alive = time.perf_counter()
        self._deaths: Counter[tuple[int, ...]] = Counter()
        """How many workers died of a batch."""
        self._doubtful: Pairs = []

    def run(self) -> Pairs:
        """Do all steps."""
        self._gather()
        while not self._schedule.is_done:
            self._meet(is_late=True)
            self._hand_out()
            self._hear(0.5)
        for member in self._ready():
            self._call(member, "finish", member.actor.finish.remote())
        while any(call.what == "finish" for call in self._calls.values()):
            self._hear(0.5)
        return self._doubtful

    def dismiss(self) -> None:
        """Let all nodes go; if work is under way, it ends where it is."""
        for member in self._members.values():
            self._ray.kill(member.actor)

    def _ready(self) -> list[_Member]:
        return [member for member in self._members.values() if member.is_ready]

    # ------------------------------------------------------------ nodes that come and go

    def _gather(self) -> None:
        """Wait until every node that is there is ready: what is wrong is found before work."""
        started = time.perf_counter()
        self._meet(is_late=False)
        while not all(member.is_ready for member in self._members.values()) or not self._members:
            if time.perf_counter() - started > START_SECONDS:
                break
            self._meet(is_late=False)
            self._hear(0.2)
        for member in self._members.values():
            member.is_late = not member.is_ready
        if not self._ready():
            raise ClusterError(
                f'cluster = "{self._settings.address}": no node has free processors; '
                "wait for other jobs to end, or add nodes"
            )

    def _meet(self, *, is_late: bool) -> None:
        """Look for nodes that are not in use yet, now and then."""
        now = time.perf_counter()
        if now - self._last_look < LOOK_SECONDS:
            return
        self._last_look = now
        for node in self._ray.nodes():
            cores = int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
            if cores and node["NodeID"] not in self._members.keys() | self._left_out:
                self._engage(node, cores, is_late=is_late)
        if self._ready():
            self._last_alive = now
        elif now - self._last_alive > PATIENCE_SECONDS and is_late:
            raise ClusterError(
                f'cluster = "{self._settings.address}": no node is left; when there are nodes '
                "again, run the same command: it resumes"
            )

    def _engage(self, node: Mapping[str, Any], cores: int, *, is_late: bool) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        threads = min(cores, self._settings.threads or cores)
        actor = (
            self._ray.remote(Node)
            .options(
                num_cpus=threads,
                max_restarts=0,
                max_concurrency=threads + WAITING + 1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote()
        )
        name = node["NodeManagerAddress"]
        member = _Member(node["NodeID"], name, actor, threads, is_late)
        self._members[member.id] = member
        self._call(member, "versions", actor.versions.remote())

    def _welcome(self, call: _Call, answer: Any) -> None:
        """Take a node on step by step: it has the same versions, the same inputs, the output."""
        member = call.member
        if call.what == "versions":
            if answer != versions():
                raise ClusterError(
                    f"has {_listed(answer)}, and the driver {_listed(versions())}; "
                    "install the same versions on every node"
                )
            opening = member.actor.open.remote(self._job, member.wanted_threads)
            self._call(member, "open", opening)
            return
        threads, mark = answer
        self._confirm(mark)
        member.threads = threads
        self._schedule.takers = sum(member.threads for member in self._ready())
        self._log.add("joined", member.name, threads=threads)

    def _refuse(self, member: _Member, error: Exception) -> None:
        """End because of a node that cannot be used, or go on without one that came later."""
        found = _named(member.name, error)
        if not member.is_late:
            raise found from None
        self._left_out.add(member.id)
        self._forget(member)
        self._ray.kill(member.actor)
        self._settings.announce(f"{found}; the work goes on without it")
        self._log.add("left out", member.name, reason=str(found))

    def _lose(self, member: _Member, error: Exception) -> None:
        """Give back what a node had that has died, or whose worker has."""
        if self._members.get(member.id) is not member:
            return
        lost = self._forget(member)
        alive = any(n["Alive"] and n["NodeID"] == member.id for n in self._ray.nodes())
        if alive and not member.is_ready:
            reason = str(error).strip().splitlines()[-1]
            text = f"dare cannot be started there ({reason}); install it on every node"
            self._refuse(member, ClusterError(text))
            return
        self._doubtful += member.done
        for batch in lost:
            self._schedule.give_back(batch)
            self._deaths[batch.places] += alive
            if self._deaths[batch.places] >= DEATHS:
                raise ClusterError(
                    f"node {member.name}: the worker died {DEATHS} times while it had "
                    f"{batch.steps[0].id}, perhaps for want of memory; lower threads or "
                    "max_memory, and run the same command again: it resumes"
                )
        self._ray.kill(member.actor)
        what = "the worker died" if alive else "died"
        self._settings.announce(f"node {member.name}: {what}; others do its work")
        self._log.add("lost", member.name, batches=len(lost), alive=alive)

    def _forget(self, member: _Member) -> list[Batch[Step]]:
        """Use a member no more; return the batches that it had."""
        self._members.pop(member.id, None)
        calls = {ref: call for ref, call in self._calls.items() if call.member is member}
        for ref in calls:
            del self._calls[ref]
        self._schedule.takers = max(1, sum(member.threads for member in self._ready()))
        return [call.batch for call in calls.values() if call.batch is not None]

    # ------------------------------------------------------------ work

    def _hand_out(self) -> None:
        """Give every node as much as its threads can do, and a little more."""
        held = Counter(call.member.id for call in self._calls.values())
        limit = self._settings.limit
        if len(self._members) > MANY_NODES:
            limit, self._schedule.smallest = MORE * limit, limit
        while hungry := [m for m in self._ready() if held[m.id] < m.threads + WAITING]:
            member = min(hungry, key=lambda member: held[member.id] / member.threads)
            batch = self._schedule.take_now(limit)
            if batch is None:
                return
            if (batch := self._without_conclusions(batch)).steps:
                held[member.id] += 1
                self._call(member, "run", member.actor.run.remote(batch), batch)

    def _without_conclusions(self, batch: Batch[Step]) -> Batch[Step]:
        """Draw the conclusions of a batch here; return the rest of it."""
        if self.conclude is None:
            return batch
        here = [isinstance(step, Conclude) for step in batch.steps]
        if not any(here):
            return batch
        parts = []
        for chosen in (True, False):
            indices = [index for index, local in enumerate(here) if local is chosen]
            steps = tuple(batch.steps[index] for index in indices)
            needs = {need: batch.results[need] for step in steps for need in step.needs}
            parts.append(Batch(tuple(batch.places[index] for index in indices), steps, needs))
        own, rest = parts
        self._schedule.hand_in(own, self.conclude(own))
        return rest

    def _call(self, member: _Member, what: str, ref: Any, batch: Batch[Step] | None = None) -> None:
        self._calls[ref] = _Call(member, what, batch)

    def _hear(self, seconds: float) -> None:
        """Wait for an answer, and take in all that are there."""
        if not self._calls:
            time.sleep(seconds)
            return
        ready, _ = self._ray.wait(list(self._calls), timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for ref in ready:
            if ref in self._calls:  # else its member was lost a moment ago
                self._take_in(ref, self._calls[ref])

    def _take_in(self, ref: Any, call: _Call) -> None:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(ref)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if call.what in ("versions", "open"):
                self._refuse(call.member, cause)
                return
            raise _named(call.member.name, cause) from None
        except errors.RayError as error:
            self._lose(call.member, error)
            return
        del self._calls[ref]
        if call.what == "run":
            self._take_results(call, answer)
        elif call.what == "finish":
            call.member.done = []
        else:
            try:
                self._welcome(call, answer)
            except DareError as error:
                self._refuse(call.member, error)

    def _take_results(self, call: _Call, done: Done) -> None:
        member, batch = call.member, call.batch
        assert batch is not None
        pairs = list(_flat(zip(batch.steps, done.results, strict=True)))
        self.collect([step for step, _ in pairs], [result for _, result in pairs])
        self._schedule.hand_in(batch, done.results)
        self.progress(done.nbytes)
        member.done += pairs
        member.batches += 1
        member.nbytes += done.nbytes
        member.seconds += done.seconds
        seconds = round(done.seconds, 6)
        ids = [step.id for step, _ in pairs]
        self._log.add("batch", member.name, steps=ids, bytes=done.nbytes, seconds=seconds)

    def rates(self) -> list[str]:
        """What each node has done, in a line."""
        return [
            f"node {m.name}: {m.batches} batches, {show_size(m.nbytes)} read, "
            f"{show_size(int(m.nbytes * m.threads / m.seconds))}/s"
            for m in self._ready()
            if m.seconds
        ]


def _flat(pairs: Any) -> Iterator[tuple[Step, Any]]:
    """Steps and results, of bundles too; what stayed on its node is left out."""
    for step, result in pairs:
        if isinstance(step, Bundle):
            inner = zip(step.steps, result, strict=True)
            yield from ((s, r) for s, r in inner if r is not None)
        else:
            yield step, result


def _named(node: str, error: Exception) -> DareError:
    """An error that says on which node it happened."""
    if not isinstance(error, DareError):
        return ClusterError(f"node {node}: {type(error).__name__}: {error}")
    return type(error)(*(f"node {node}: {finding}" for finding in error.args))


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())
