"""A merge on a Ray cluster: slices that nodes make, and write into the same partial output.

A job is plain data, done in pieces by tasks. Every process that runs tasks opens it once, with its
own view of files and folders. Ray decides where a task runs, and runs it again elsewhere if its
process or its machine dies; so a piece must give the same result if it is done twice. After an
error in a piece there is no second try: it ends the work, and the message names the node.

A task of a merge makes one slice. It returns the records of its chunks when they are on the disk,
so journaled chunks need no second check, and chunks that a dead machine has not synced are written
again by the next. For stages that need to know whole models, tasks first observe the tensors, and
the driver draws the conclusions.
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
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dare import __version__
from dare.errors import (
    ClusterError,
    DareError,
    InputError,
    OutputError,
    RecipeError,
    install_command,
    needed,
)
from dare.inputs.sources import Source, check_unchanged, hold_open, read_stored
from dare.output.journal import Record
from dare.output.receipt import metadata_of
from dare.output.sink import FileSink, explaining, make_sink
from dare.planning.plan import Plan
from dare.planning.slices import MOST_SLICES, Division, Share
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe, Request
from dare.recipe.settings import moved
from dare.run.engine import Work, do_census_steps, execute
from dare.run.nested import plan_request
from dare.run.threads import Id, Step
from dare.run.worker import Conclude, Observe, Progress, list_census_steps, repeat_conclusion
from dare.stages.registry import load_installed_stages, load_stages
from dare.stores.locations import is_stored
from dare.tensors.chunks import bytes_digest, chunk_count, chunk_span

RETRIES = 5  # times that Ray restarts a task whose process or machine has died
TASKS_PER_SLOT = 2  # tasks that are given to Ray for each one that can run
NODE_POLL_SECONDS = 2.0  # between two requests for the list of nodes
PATIENCE_SECONDS = 60.0  # time to wait for a first answer, or for a node when there is none
TASK_MEMORY_BYTES = 256 << 20  # memory of a task if no limit is set, unless it needs more
SLICES_PER_NODE, SLICES_PER_TASK = 16, 8  # at least, for each node and for each running task
SLICE_BYTES = 1 << 30  # the most bytes of a slice, unless there would be too many slices
SAMPLES = 3  # chunks of each input that are compared: the first, the last, and some between

SAME_VERSIONS = "install the same versions on every node"

# Digests of an input's headers, under an empty name, and of some of its chunks, by tensor.
Sample = dict[str, str]
# Does a piece, given the data that all pieces share; returns its result and the bytes read.
RunPiece = Callable[[Any, Any], tuple[Any, int]]
# A node by id and address, the result of a piece there, and the bytes that were read for it.
Result = tuple[tuple[str, str], Any, int]


@dataclass(frozen=True)
class ClusterJob(ABC):
    """Something done in pieces with the weights of some inputs, described by plain data."""

    request: Request
    inputs: tuple[Sample, ...]  # the driver's samples

    @abstractmethod
    def open(self, stack: ExitStack) -> RunPiece:
        """Open the inputs in this process, until the stack is closed."""

    def hold_inputs(self, stack: ExitStack, recipe: Recipe, sources: Sequence[Source]) -> None:
        """Hold the inputs open until the stack is closed; refuse inputs that differ there."""
        stack.enter_context(hold_open(sources))
        check_same_inputs(recipe, sources, self.inputs)


def versions() -> dict[str, str]:
    """Return the versions that must be the same on every node."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"dare": __version__, "Python": python, "numpy": version("numpy")}


# ---------------------------------------------------------------- in the tasks

_opened: dict[str, tuple[ExitStack, RunPiece]] = {}  # the job open in this process, by key


def _run_piece(key: str, expected: dict[str, str], job: tuple[Any], piece: Any, common: Any) -> Any:
    """Do a piece; return the node's id, its address, and a result with its bytes, or an error."""
    import ray

    node = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    try:
        if (found := versions()) != expected:
            differ = f"has {_listed(found)}, and the driver {_listed(expected)}"
            raise ClusterError(f"{differ}; {SAME_VERSIONS}")
        if piece is None:  # the driver only asks for an answer
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

    Ray's messages about nodes that died go to stderr, since stdout is for results.
    """
    _check_listening(address)
    what = f"Ray is not installed: {install_command('ray')}"
    with needed(ClusterError(f'cluster = "{address}": {what}')):
        import ray
    if ray.is_initialized():
        yield Cluster(ray, address)
        return
    with redirect_stdout(sys.stderr if verbose else io.StringIO()):
        try:
            with warnings.catch_warnings(action="ignore"):
                ray.init(address, log_to_driver=False, logging_level="CRITICAL")
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or repr(error)
            raise _no_answer(address, reason) from None
        try:
            yield Cluster(ray, address)
        finally:
            ray.shutdown()


def _check_listening(address: str) -> None:
    """Refuse an address where nobody listens: Ray would wait a minute, and end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise _no_answer(address, error.strerror or str(error)) from None


def _no_answer(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f'cluster = "{address}": no Ray cluster answers ({reason}); '
        "start one with `ray start --head`, or leave cluster out"
    )


@dataclass(eq=False)
class Cluster:
    """A Ray cluster that this process is connected to."""

    _ray: Any
    _address: str
    _tasks_per_node: int = 1
    task_memory: int = 0  # bytes that one task may take
    _is_answering: bool = False
    _sent: tuple[ClusterJob, Any] | None = None

    def processors(self) -> list[int]:
        """Return the number of processors that Ray may use on each live node."""
        alive = (node["Resources"] for node in self._ray.nodes() if node["Alive"])
        return [int(resources["CPU"]) for resources in alive if resources.get("CPU", 0) >= 1]

    def size_tasks(self, least: int, limit: int, given: int | None, threads: int | None) -> int:
        """Size tasks by the memory and processors of a node; return how many can run at once.

        A task needs `least` bytes; a node has `limit` bytes, or more if no limit was `given`.
        """
        largest = max(self.processors(), default=1)
        self._tasks_per_node = max(1, min(largest, threads or largest, limit // max(least, 1)))
        each = limit // self._tasks_per_node
        self.task_memory = each if given is not None else max(each, TASK_MEMORY_BYTES)
        return self._slots(self._processors_of_a_task)

    @property
    def _processors_of_a_task(self) -> int:
        return max(1, max(self.processors(), default=1) // self._tasks_per_node)

    def _slots(self, processors: int) -> int:
        """Return the number of tasks with these processors that can run at once."""
        return sum(found // processors for found in self.processors())

    def run(self, job: ClusterJob, pieces: Iterable[Any], common: Any = None) -> Iterator[Result]:
        """Have tasks do all pieces; yield each result as soon as it arrives."""
        ray, processors = self._ray, self._processors_of_a_task
        task = ray.remote(_run_piece).options(
            num_cpus=processors, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )
        if self._sent is None or self._sent[0] is not job:
            self._sent = job, (secrets.token_hex(16), versions(), (ray.put(job),))
        given, common = self._sent[1], ray.put(common)
        waiting = itertools.chain(() if self._is_answering else (None,), pieces)
        running: set[Any] = set()
        slots, polled_at, heard_at = 1, -NODE_POLL_SECONDS, time.monotonic()
        try:
            while True:
                if (now := time.monotonic()) - polled_at > NODE_POLL_SECONDS:
                    slots, polled_at = self._slots(processors), now
                    heard_at = now if slots and self._is_answering else heard_at
                    self._check_patience(slots, now - heard_at)
                wanted = TASKS_PER_SLOT * max(slots, 1) - len(running)
                more = itertools.islice(waiting, max(0, wanted))
                running.update(task.remote(*given, piece, common) for piece in more)
                if not running:
                    return
                ready, _ = ray.wait(list(running), timeout=NODE_POLL_SECONDS)
                running.difference_update(ready)
                for reference in ready:
                    yield from self._take(reference)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _check_patience(self, slots: int, seconds: float) -> None:
        """Raise an error after waiting too long for a node with processors for a task."""
        if seconds < PATIENCE_SECONDS:
            return
        reason = "no node is left that can do the work; add nodes and run it again: it resumes"
        if slots:
            reason = "no node has free processors; wait for other jobs to end, or add nodes"
        raise ClusterError(f'cluster = "{self._address}": {reason}')

    def _take(self, reference: Any) -> Iterator[Result]:
        """Yield the result of a task, unless it was only asked to answer."""
        errors = self._ray.exceptions
        try:
            node, name, outcome = self._ray.get(reference)
        except errors.RayTaskError as error:  # before any line of ours
            reason = str(error).strip().splitlines()[-1]
            what = f"dare cannot be started there ({reason})"
            raise ClusterError(f"node {error.ip}: {what}; {SAME_VERSIONS}") from None
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


# ---------------------------------------------------------------- the same inputs


def sample_inputs(sources: Sequence[Source]) -> tuple[Sample, ...]:
    """Take samples of inputs, so that other processes can check that they see the same."""
    with hold_open(sources):
        return tuple(map(_sample, sources))


def check_same_inputs(recipe: Recipe, sources: Sequence[Source], samples: Sequence[Sample]) -> None:
    """Refuse inputs whose samples are not the driver's."""
    for file, found, sample in zip(recipe.read_files, sample_inputs(sources), samples, strict=True):
        if differing := [name for name in sample if found.get(name) != sample[name]]:
            raise InputError(
                f"{file}: is not the same file here as where the work was started: "
                f"{differing[0] or 'its header'} differs; every node must see the same inputs"
            )


def _sample(source: Source) -> Sample:
    names = [name for name, info in source.tensors.items() if info.elements]
    last = max(len(names) - 1, 0)
    places = {last * part // (SAMPLES - 1) for part in range(SAMPLES)}
    sample = {"": bytes_digest(repr(source.fingerprint()).encode())}
    for name in (names[place] for place in sorted(places) if names):
        info = source.tensors[name]
        start, count = chunk_span(chunk_count(info.elements) - 1, info.elements)
        room = np.empty(count * info.dtype.itemsize, np.uint8)
        sample[name] = bytes_digest(read_stored(source, name, start, count, room).data)
    return sample


def task_request(recipe: Recipe, options: RunOptions, memory: int) -> Request:
    """Return the request for tasks: one thread, a task's memory, local paths from the root."""

    def absolute(path: Path) -> Path:
        is_here = not is_stored(path) and path.exists()
        return path.absolute() if is_here else path  # others are in a store, or on the hub

    output = None if recipe.output is None else recipe.output.absolute()
    for_task: dict[str, Any] = {"cluster": None, "threads": 1, "max_memory": memory}
    for_task |= {"verbose": False, "require_signed": ()}  # signatures are checked once, here
    return Request(moved(recipe, absolute, output), options.changed(**for_task))


# ---------------------------------------------------------------- the merge


@dataclass(frozen=True)
class MergeJob(ClusterJob):
    """A merge under way; a piece is a share of its chunks, or some tensors to observe."""

    stage_files: tuple[str, ...]
    fingerprint: str
    folder: Path  # the folder of the partial output
    fetches: bool = True  # True if models on the hub are fetched, and not read from there

    @classmethod
    def of(cls, plan: Plan, folder: Path, memory: int) -> MergeJob:
        """Describe a plan for other processes."""
        files = plan.input_files
        return cls(
            task_request(plan.recipe, plan.options, memory),
            sample_inputs(plan.sources),
            tuple(dict.fromkeys(stage.file for stage, _ in plan.recipe.all_stages if stage.file)),
            plan.fingerprint,
            folder.absolute(),
            fetches=not any(is_stored(file) for file in files),
        )

    def open(self, stack: ExitStack) -> RunPiece:
        """Open the inputs and make the plan; refuse those that differ from the driver's."""
        load_installed_stages()
        for file in self.stage_files:
            load_stages(file)
        plan = plan_request(self.request, fetches=self.fetches)
        self.hold_inputs(stack, plan.recipe, plan.sources)
        if plan.fingerprint != self.fingerprint:
            raise InputError(
                f"{plan.recipe.output}: the plan differs on this node; every node must see the "
                "same inputs with the same configurations"
            )
        files = self.files(plan)
        is_sent = plan.layout is not None and plan.layout.is_sent

        def run(piece: Share | Sequence[Observe], known: Mapping[Id, Any]) -> tuple[Any, int]:
            read: list[int] = []
            if not isinstance(piece, Mapping):
                return do_census_steps(plan, piece, known, progress=read.append), sum(read)
            with explaining(self.folder, resumable=True):
                files.join(set().union(*map(files.files_of, piece)))
                if not is_sent:
                    files.reserve()
            try:
                records = execute(plan, files, progress=read.append, known=known, share=piece)
                with explaining(self.folder, resumable=True):
                    files.sync()
            finally:
                files.close()
            return records, sum(read)

        return run

    def files(self, plan: Plan) -> FileSink:
        """Return the files of the partial output, for this process."""
        assert plan.layout is not None  # a merge in memory has no cluster
        return make_sink(self.folder, plan.layout, metadata_of(plan.identity))


def check_for_cluster(plan: Plan) -> None:
    """Refuse plans that nodes cannot carry out together, before anything is written."""
    options, target = plan.options, plan.recipe.output
    is_sent = plan.layout is not None and plan.layout.is_sent
    if plan.layout is not None and plan.layout.is_on_hub:
        what = "a cluster does not write to the hub; leave cluster out, or upload the output later"
        raise RecipeError(f'cluster = "{options.cluster}": {target}: {what}')
    if is_sent and options.scratch is None:
        raise RecipeError(
            f'cluster = "{options.cluster}": {target} is in a store; name a folder that all '
            "nodes see with --scratch FOLDER, or leave cluster out"
        )


def execute_on_cluster(merge: Work[Any]) -> list[Record]:
    """Have a cluster merge the chunks that are not done; return the records of all chunks."""
    plan, output, progress = merge.plan, merge.output, merge.meter.advance
    options, cost = plan.options, plan.cost
    assert options.cluster is not None
    merge.announce(f"merging on the cluster {options.cluster}")
    records = list(output.resumed)
    with connect(options.cluster, verbose=options.verbose) as cluster:
        tasks = cluster.size_tasks(
            cost.least_memory, cost.max_memory, options.max_memory, options.threads
        )
        division = Division(plan, _count_slices(plan, len(cluster.processors()), tasks))
        job = MergeJob.of(plan, output.folder, cluster.task_memory)
        shares = list(_shares_left(division, records))
        known = _conclude(plan, division, job, cluster, progress) if shares else {}
        files, checked_nodes = job.files(plan), set[tuple[str, str]]()
        for node, made, nbytes in cluster.run(job, shares, known):
            if node not in checked_nodes:
                _check_arrival(node[1], files, made[0])
                checked_nodes.add(node)
            output.record(made)
            records += made
            progress(nbytes)
    check_unchanged(plan.sources)
    return records


def _count_slices(plan: Plan, nodes: int, tasks: int) -> int:
    chunks = sum(tensor.chunks for tensor in plan.tensors)
    nbytes = plan.cost.bytes_read + plan.cost.bytes_written
    wanted = max(SLICES_PER_NODE * nodes, SLICES_PER_TASK * tasks, nbytes // SLICE_BYTES)
    return max(1, min(wanted, chunks, MOST_SLICES))


def _conclude(
    plan: Plan, division: Division, job: MergeJob, cluster: Cluster, progress: Progress
) -> dict[Id, Any]:
    """Have tasks observe the tensors of whole models; conclude from that, round by round."""
    known: dict[Id, Any] = {}
    to_observe: dict[int, list[Step]] = defaultdict(list)
    for step in list_census_steps(plan):
        if isinstance(step, Observe):
            to_observe[division.owner(step.tensor)].append(step)
        elif isinstance(step, Conclude):
            again, found = repeat_conclusion(plan, step, known), dict(known)
            pieces = [] if again else list(to_observe.values())
            for _, results, nbytes in cluster.run(job, pieces, known):
                found |= results
                progress(nbytes)
            known |= again or do_census_steps(plan, [step], found)
            to_observe.clear()
    return known


def _shares_left(division: Division, done: Sequence[Record]) -> Iterator[Share]:
    """Yield the shares of slices, without the chunks that are done."""
    finished = {(record.tensor, record.chunk) for record in done}
    for share in division.shares():
        to_make = {n: [c for c in chunks if (n, c) not in finished] for n, chunks in share.items()}
        if to_make := {name: chunks for name, chunks in to_make.items() if chunks}:
            yield to_make


def _check_arrival(node: str, files: FileSink, record: Record) -> None:
    """Refuse a node that writes into another folder of the same name."""
    with explaining(files.folder, resumable=True):
        files.join(files.files_of(record.tensor))
        has_arrived = files.has(record)
        files.close()
    if not has_arrived:
        raise OutputError(
            f"node {node}: {files.folder}: is a different folder there: what it writes does not "
            "arrive here; every node must see the same file system"
        )
