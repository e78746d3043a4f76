"""Pieces of a job done by tasks on a Ray cluster; nothing else knows Ray.

A job is plain data. Every process in which tasks run opens it once, as it sees files and folders
there. Ray decides where a task runs, and runs it again elsewhere if its process or its machine
dies; so a piece must give the same result if it is done twice. What goes wrong in a piece is not
tried again: it ends the job, and the message names the node.
"""

from __future__ import annotations

import io
import itertools
import platform
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.metadata import version
from typing import Any, Protocol

from dare import __version__
from dare.errors import ClusterError, DareError

RETRIES = 5
"""So often Ray starts a task again whose process or machine has died."""
WAITING = 2
"""Tasks that are handed to Ray for each one that can run."""
LOOK_SECONDS = 2.0
"""How often the driver looks which nodes there are."""
PATIENCE_SECONDS = 60.0
"""How long it waits for a first answer, and for a node when none is left."""
TASK_MEMORY = 256 << 20
"""What a task may take if nobody has set a limit, and it does not need more."""

Do = Callable[[Any, Any], tuple[Any, int]]
"""Does a piece, given what all pieces have in common; returns its result and the bytes read."""
Result = tuple[tuple[str, str], Any, int]
"""A node by id and address, what came of a piece there, and how many bytes were read for it."""


class Job(Protocol):
    """Work that is done in pieces, as plain data."""

    def open(self, stack: ExitStack) -> Do:
        """Open it in this process, until the stack is closed."""


def versions() -> dict[str, str]:
    """The versions of what computes here, which must be the same on every node."""
    packages = {name: version(name) for name in ("numpy", "numba")}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"dare": __version__, "Python": python, **packages}


# ---------------------------------------------------------------- in the tasks

_opened: dict[str, tuple[ExitStack, Do]] = {}
"""The job that this process has open, by its key."""


def _do(key: str, expected: dict[str, str], job: tuple[Any], piece: Any, common: Any) -> Any:
    """Do a piece; return the node's id, its address, and a result with its bytes, or an error."""
    import ray

    node = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    try:
        if (found := versions()) != expected:
            differ = f"has {_listed(found)}, and the driver {_listed(expected)}"
            raise ClusterError(f"{differ}; install the same versions on every node")
        if piece is None:  # the driver asks whether anybody is there
            return *node, None
        if key not in _opened:
            for stack, _ in _opened.values():
                stack.close()
            _opened.clear()
            stack = ExitStack()
            _opened[key] = stack, ray.get(job[0]).open(stack)
        return *node, _opened[key][1](piece, common)
    except DareError as error:
        return *node, error
    except Exception as error:
        return *node, ClusterError(f"{type(error).__name__}: {error}")


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())


# ---------------------------------------------------------------- in the driver


@contextmanager
def connect(address: str, *, verbose: bool) -> Iterator[Cluster]:
    """Connect to a cluster, unless the program is connected already and goes on using Ray.

    Ray's news of nodes that have died go to stderr, since stdout is for results.
    """
    _knock(address)
    try:
        import ray
    except ImportError:
        what = 'Ray is not installed; install it with pip install "dare-merge[ray]"'
        raise ClusterError(f'cluster = "{address}": {what}') from None
    if ray.is_initialized():
        yield Cluster(ray, address)
        return
    with redirect_stdout(sys.stderr if verbose else io.StringIO()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(address, log_to_driver=False, logging_level="CRITICAL")
        except Exception as error:
            raise _nobody(address, str(error).strip().partition("\n")[0] or repr(error)) from None
        try:
            yield Cluster(ray, address)
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address where nobody listens: Ray would wait a minute, and end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise _nobody(address, error.strerror or str(error)) from None


def _nobody(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f'cluster = "{address}": no Ray cluster answers ({reason}); '
        "start one with `ray start --head`, or leave cluster out"
    )


class Cluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, ray: Any, address: str) -> None:
        self._ray = ray
        self._address = address
        self._tasks_per_node = 1
        self.task_memory = 0
        """What one task may take."""
        self._is_answering = False
        self._sent: tuple[Job, Any] | None = None

    def processors(self) -> list[int]:
        """How many processors Ray may use on each node that is there."""
        alive = (node["Resources"] for node in self._ray.nodes() if node["Alive"])
        return [int(resources["CPU"]) for resources in alive if resources.get("CPU", 0) >= 1]

    def share_out(self, least: int, limit: int, given: int | None, threads: int | None) -> int:
        """Say how many tasks run at once in all, by the memory and processors of a node.

        A task needs the `least`; a node has the `limit`, or more than that if none was `given`.
        """
        largest = max(self.processors(), default=1)
        self._tasks_per_node = max(1, min(largest, threads or largest, limit // max(least, 1)))
        each = limit // self._tasks_per_node
        self.task_memory = each if given is not None else max(each, TASK_MEMORY)
        return self._room(self._processors_of_a_task)

    @property
    def _processors_of_a_task(self) -> int:
        return max(1, max(self.processors(), default=1) // self._tasks_per_node)

    def _room(self, processors: int) -> int:
        return sum(found // processors for found in self.processors())

    def run(self, job: Job, pieces: Iterable[Any], common: Any = None) -> Iterator[Result]:
        """Have all pieces done; yield what comes of each as soon as it is there."""
        ray, processors = self._ray, self._processors_of_a_task
        task = ray.remote(_do).options(
            num_cpus=processors, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )
        if self._sent is None or self._sent[0] is not job:
            self._sent = job, (secrets.token_hex(16), versions(), (ray.put(job),))
        given, common = self._sent[1], ray.put(common)
        waiting = itertools.chain(() if self._is_answering else (None,), pieces)
        running: set[Any] = set()
        room, looked_at, heard_at = 1, -LOOK_SECONDS, time.monotonic()
        try:
            while True:
                if (now := time.monotonic()) - looked_at > LOOK_SECONDS:
                    room, looked_at = self._room(processors), now
                    heard_at = now if room and self._is_answering else heard_at
                    self._give_up(room, now - heard_at)
                more = itertools.islice(waiting, max(0, WAITING * max(room, 1) - len(running)))
                running.update(task.remote(*given, piece, common) for piece in more)
                if not running:
                    return
                ready, _ = ray.wait(list(running), timeout=LOOK_SECONDS)
                running.difference_update(ready)
                for reference in ready:
                    yield from self._take(reference)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _give_up(self, room: int, seconds: float) -> None:
        """Refuse to wait any longer for a node that has processors for a task."""
        if seconds < PATIENCE_SECONDS:
            return
        reason = "no node is left that can do the work; add nodes and run it again: it resumes"
        if room:
            reason = "no node has free processors; wait for other jobs to end, or add nodes"
        raise ClusterError(f'cluster = "{self._address}": {reason}')

    def _take(self, reference: Any) -> Iterator[Result]:
        """Give the result of a task, unless it was only to answer."""
        errors = self._ray.exceptions
        try:
            node, name, outcome = self._ray.get(reference)
        except errors.RayTaskError as error:  # before any line of ours
            reason = str(error).strip().splitlines()[-1]
            what = f"dare cannot be started there ({reason})"
            same = "install the same versions on every node"
            raise ClusterError(f"node {error.ip}: {what}; {same}") from None
        except errors.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ClusterError(
                f'cluster = "{self._address}": a task died {1 + RETRIES} times ({reason}); lower '
                "threads or max_memory, and run the same command again: it resumes"
            ) from None
        if isinstance(outcome, DareError):
            raise type(outcome)(*(f"node {name}: {finding}" for finding in outcome.args))
        self._is_answering = True
        if outcome is not None:
            yield (node, name), *outcome
