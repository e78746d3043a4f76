"""Carry a plan out: read, take differences, run the stages, write. Here the layers meet.

The work is cut into tasks that any thread can do: looks at all tensors of a model and surveys of
one, where a stage needs them, and chunks. The order of tasks only serves speed; each writes its own
bytes, which depend on the plan and the inputs alone.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare import kernels as kernel_backends
from dare.errors import MismatchError
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread
from dare.output.writer import ArraySink, Record, Sink
from dare.planning.plan import CensusPlan, Fate, Plan, TensorPlan
from dare.run.threads import run_tasks
from dare.stages import Block, Deltas, Round, Scratch
from dare.tensors.chunks import CHUNK, chunk_span, chunk_spans
from dare.tensors.digest import bytes_digest
from dare.tensors.files import ALIGNMENT, aligned_bytes
from dare.tensors.header import TensorInfo

Floats = NDArray[np.float32]
Raw = NDArray[Any]
"""Stored elements, as carriers of their type."""
Progress = Callable[[int], None]
"""Told of every few bytes that have been read."""


Censuses = dict[tuple[str, int, int], Future[Mapping[str, Any]]]
"""For a tensor, a model and the position of a stage, what was concluded of all its tensors."""


class Stopped(Exception):  # noqa: N818
    """Another thread has failed, or the user has interrupted: leave without a word."""


@dataclass(frozen=True)
class Job:
    """What all threads share."""

    plan: Plan
    kernels: Any
    sink: Sink
    progress: Progress
    records: list[Record]
    delta_summaries: dict[tuple[str, int], Future[dict[int, Any]]] = field(default_factory=dict)
    """For a tensor and a model, what each surveying delta stage found."""
    combine_summaries: dict[str, Future[Any]] = field(default_factory=dict)
    censuses: Censuses = field(default_factory=dict)
    chunks_left: Counter[str] = field(default_factory=Counter)
    counting: threading.Lock = field(default_factory=threading.Lock)

    def chunk_done(self, tensor: TensorPlan) -> None:
        """Let go of what surveys found once the last chunk of a tensor is merged."""
        with self.counting:
            self.chunks_left[tensor.name] -= 1
            if self.chunks_left[tensor.name]:
                return
        self.combine_summaries.pop(tensor.name, None)
        for model in tensor.models:
            self.delta_summaries.pop((tensor.name, model), None)


def execute(
    plan: Plan,
    sink: Sink,
    *,
    backend: str = "cpu",
    done: Sequence[Record] = (),
    progress: Progress = lambda _nbytes: None,
    announce: Callable[[], None] = lambda: None,
    censuses: Censuses | None = None,
) -> list[Record]:
    """Merge what is not `done` yet into the sink; return the records of all chunks.

    `announce` is called if kernels have to be compiled first. `censuses` are those of a plan that
    this one is a part of; else they are taken here.
    """
    finished = {(record["tensor"], record["chunk"]) for record in done}
    job = Job(plan, kernel_backends.load(backend), sink, progress, list(done))
    job.censuses.update(censuses or {})
    _carry_out(job, lambda: _tasks(job, finished), announce)
    return job.records


def take_censuses(plan: Plan, *, backend: str = "cpu") -> Censuses:
    """Look at all tensors for the stages that ask for it, so that parts of the plan can be run."""
    job = Job(plan, kernel_backends.load(backend), ArraySink(()), lambda _nbytes: None, [])
    if plan.censuses:
        _carry_out(job, lambda: list(_looks(job)), lambda: None)
    return job.censuses


def _carry_out(job: Job, tasks: Callable[[], Sequence[Any]], announce: Callable[[], None]) -> None:
    plan = job.plan
    with ExitStack() as stack:
        stack.enter_context(_collector_paused())
        if plan.matrix_bytes:
            stack.enter_context(one_blas_thread())
        for source in (plan.base, *plan.models):
            stack.enter_context(source)
        stack.enter_context(job.kernels.announcing(announce))
        run_tasks(tasks(), lambda stop: Worker(job, stop), plan.threads)
        for source in (plan.base, *plan.models):
            source.check_unchanged()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from going over all of Numba again and again.

    Tasks leave no cycles behind, and its passes took 0.1 s of a short merge.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tasks(job: Job, finished: set[tuple[str, int]]) -> list[Any]:
    """All tasks in an order in which none has to wait for long.

    Comparisons of integers come first, since they may end the merge. The surveys of a tensor
    stand two tensors ahead of its chunks, so that they are done when the chunks are reached; or
    only so far ahead that each thread has one, if they keep whole matrices.
    """
    plan = job.plan
    copies: list[Any] = []
    surveys: list[list[Any]] = []
    combines: list[list[Any]] = []
    chunks: list[list[Any]] = []
    for tensor in plan.tensors:
        left = [c for c in range(tensor.chunks) if (tensor.name, c) not in finished]
        if tensor.fate is not Fate.MERGED:
            copies += [CopyChunk(job, tensor, chunk) for chunk in left]
            continue
        surveys.append([])
        combines.append([])
        chunks.append([MergeChunk(job, tensor, chunk) for chunk in left])
        job.chunks_left[tensor.name] = len(left)
        if not left:
            continue
        for model in tensor.models:
            if tensor.surveyed_stages(plan.stages, model):
                job.delta_summaries[tensor.name, model] = Future()
                surveys[-1].append(SurveyDelta(job, tensor, model))
        if plan.combine.surveys_when(tensor.combine):
            job.combine_summaries[tensor.name] = Future()
            combines[-1].append(SurveyCombine(job, tensor))
    groups: Iterable[tuple[list[Any], ...]]
    if plan.matrix_bytes:
        gap: list[list[Any]] = [[]] * (plan.threads - 1)
        groups = zip([*surveys, *gap], [*combines, *gap], [*gap, *chunks], strict=True)
    else:
        groups = zip([*surveys, [], []], [[], *combines, []], [[], [], *chunks], strict=True)
    tasks = [task for group in groups for tasks in group for task in tasks]
    return [*copies, *(_looks(job) if any(chunks) and not job.censuses else ()), *tasks]


def _looks(job: Job) -> Iterator[Look]:
    """The looks of all censuses, one after the other, and of each round by round."""
    for plan in job.plan.censuses:
        known: Future[Any] = Future()
        known.set_result(None)
        for step in job.plan.stages[plan.position].rounds(plan.settings):
            poll = Poll(job, plan, step, known)
            yield from (Look(job, tensor, poll) for tensor in plan.tensors)
            known = poll.concluded
        for tensor in plan.tensors:
            job.censuses[tensor.name, plan.model, plan.position] = known


class Worker:
    """One thread's buffers, and the steps from stored bytes to deltas that all tasks share."""

    def __init__(self, job: Job, stop: threading.Event) -> None:
        plan = job.plan
        self.job = job
        self._stop = stop
        self._base_bytes = np.empty(CHUNK * plan.widest, np.uint8)
        self._model_bytes = [np.empty_like(self._base_bytes) for _ in plan.models]
        self._output_bytes = aligned_bytes(CHUNK * plan.widest + ALIGNMENT)
        self._scratch = Scratch(CHUNK)
        self._nothing = np.zeros(CHUNK if plan.has_deltas else 0, np.float32)
        self._seeds = plan.recipe.seeds()
        self._threshold_bits = np.float32(plan.recipe.delta_threshold).view(np.int32)

    def spans(self, tensor: TensorPlan) -> Iterator[tuple[int, int]]:
        """Every chunk of a tensor, unless the work is to stop."""
        for span in chunk_spans(tensor.elements):
            if self._stop.is_set():
                raise Stopped
            yield span

    def read_base(self, tensor: TensorPlan, start: int, count: int) -> Raw:
        """Read the base's stored elements of a chunk."""
        return self._read(self.job.plan.base, tensor.base, start, count, self._base_bytes)

    def read_model(self, tensor: TensorPlan, model: int, start: int, count: int) -> Raw:
        """Read a model's stored elements of a chunk."""
        source = self.job.plan.source_of(tensor, model)
        info = source.tensors[tensor.name]
        return self._read(source, info, start, count, self._model_bytes[model])

    def _read(
        self, source: Source, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> Raw:
        raw = into[: count * info.dtype.itemsize].view(info.dtype.carrier)
        source.read(info.name, start, raw)
        self.job.progress(raw.nbytes)
        return raw

    def output_chunk(self, tensor: TensorPlan, start: int, count: int) -> NDArray[np.uint8]:
        """Room for a chunk of the output, aligned in memory as it will be in the file."""
        size = tensor.dtype.itemsize
        shift = self.job.sink.position(tensor.name, start * size) % ALIGNMENT
        return self._output_bytes[shift : shift + count * size]

    def block(
        self,
        tensor: TensorPlan,
        model: int,
        start: int,
        base: Raw,
        tuned: Raw,
        *,
        before: int | None = None,
        found: Mapping[int, Any] | None = None,
    ) -> Block:
        """Run a chunk of a model through its delta stages (those before position `before`).

        `found` is what the surveys found, if they are not to be waited for.
        """
        seed, threshold = self._seeds[model], self._threshold_bits
        if self.job.plan.source_of(tensor, model).holds_delta(tensor.name):
            base = self._nothing[: tuned.size]
        block = Block(
            self.job.kernels, tensor.name, start, seed, tuned, base, self._scratch, threshold
        )
        summaries = self._summaries(tensor, model) if found is None else found
        draws = tensor.draws_of(self.job.plan.stages, model)
        for position, settings in enumerate(tensor.settings_of(model)[:before]):
            block.summary, block.draw = summaries.get(position), draws[position]
            self.job.plan.stages[position].apply(block, **settings)
            block.end_stage()
        if before is not None:
            block.draw = draws[before]
        return block

    def _summaries(self, tensor: TensorPlan, model: int) -> Mapping[int, Any]:
        """What the surveys of a model's delta found; waits for them."""
        future = self.job.delta_summaries.get((tensor.name, model))
        return future.result() if future else {}

    def deltas(
        self, tensor: TensorPlan, base: Raw, blocks: Sequence[Block], summary: Any = None
    ) -> Deltas:
        """Present the models' deltas to the combine stage."""
        return Deltas(
            self.job.kernels,
            base,
            blocks,
            tensor.weights,
            self._scratch,
            self._threshold_bits,
            summary,
        )


@dataclass(frozen=True)
class _Task:
    job: Job
    tensor: TensorPlan

    def _sources(self) -> list[Source]:
        plan = self.job.plan
        return [plan.base, *(plan.source_of(self.tensor, m) for m in self.tensor.models)]


@dataclass(frozen=True)
class _Survey(_Task):
    """Surveys read a tensor from end to end, so the system's own read-ahead serves them."""

    def prefetch(self) -> None:
        pass


class _Walk:
    """Blocks of a tensor in order, as often as a survey asks."""

    def __init__(
        self,
        plan: Plan,
        tensor: TensorPlan,
        walk: Callable[[], Iterator[Any]],
        census: Any = None,
    ) -> None:
        self.spare_bytes = plan.spare_bytes
        self.shape = tensor.shape
        self.census = census
        self._walk = walk

    def __call__(self) -> Iterator[Any]:
        return self._walk()


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Complete a future whatever happens, so that no other thread waits in vain."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        raise


@dataclass(frozen=True)
class _DeltaSurvey(_Survey):
    """Surveys of one model's delta of one tensor."""

    def survey(self, worker: Worker, model: int, before: int | None = None) -> dict[int, Any]:
        """What the surveying stages of the chain find, in order, up to a position."""
        plan, tensor = self.job.plan, self.tensor
        found: dict[int, Any] = {}
        for position in tensor.surveyed_stages(plan.stages, model):
            if before is not None and position >= before:
                break
            survey = plan.stages[position].survey
            assert survey is not None  # surveyed_stages has looked
            future = self.job.censuses.get((tensor.name, model, position))
            census = future.result()[tensor.name] if future else None
            walk = self.walk(worker, model, found, position, census)
            found[position] = survey(walk, **tensor.settings_of(model)[position])
        return found

    def walk(
        self, worker: Worker, model: int, found: dict[int, Any], position: int, census: Any = None
    ) -> _Walk:
        """The blocks as they come to a stage, which knows what the surveys before it found."""
        blocks = partial(self._blocks, worker, model, found, position)
        return _Walk(self.job.plan, self.tensor, blocks, census)

    def _blocks(
        self, worker: Worker, model: int, found: dict[int, Any], position: int
    ) -> Iterator[Block]:
        tensor = self.tensor
        for start, count in worker.spans(tensor):
            base = worker.read_base(tensor, start, count)
            tuned = worker.read_model(tensor, model, start, count)
            yield worker.block(tensor, model, start, base, tuned, before=position, found=found)


@dataclass(frozen=True)
class SurveyDelta(_DeltaSurvey):
    """Let the surveying stages of one model's chain see one tensor."""

    model: int

    def run(self, worker: Worker) -> None:
        """Survey."""
        future = self.job.delta_summaries[self.tensor.name, self.model]
        _settle(future, lambda: self.survey(worker, self.model))


@dataclass(frozen=True)
class Poll:
    """One round of a census: the looks so far, and what is concluded when the last has come in."""

    job: Job
    plan: CensusPlan
    round: Round
    known: Future[Any]
    """What the round before concluded."""
    looks: dict[str, Any] = field(default_factory=dict)
    concluded: Future[Any] = field(default_factory=Future)

    def add(self, tensor: str, look: Any) -> None:
        """Take a look in; with the last one, conclude."""
        with self.job.counting:
            self.looks[tensor] = look
            if len(self.looks) < len(self.plan.tensors):
                return
        known, settings = self.known.result(), self.plan.settings
        looks = {each.name: self.looks[each.name] for each in self.plan.tensors}
        _settle(self.concluded, lambda: self.round.conclude(looks, known, **settings))
        self.looks.clear()

    def fail(self, error: BaseException) -> None:
        """Let no other thread wait in vain."""
        with self.job.counting:
            if not self.concluded.done():
                self.concluded.set_exception(error)


@dataclass(frozen=True)
class Look(_DeltaSurvey):
    """Look at one tensor for a census."""

    poll: Poll

    def run(self, worker: Worker) -> None:
        """Look."""
        plan = self.poll.plan
        try:
            known = self.poll.known.result()
            found = self.survey(worker, plan.model, before=plan.position)
            walk = self.walk(worker, plan.model, found, plan.position)
            look = self.poll.round.look(walk, known, **plan.settings)
        except BaseException as error:
            self.poll.fail(error)
            raise
        self.poll.add(self.tensor.name, look)


@dataclass(frozen=True)
class SurveyCombine(_Survey):
    """Let the combine stage see all models' deltas of one tensor."""

    def run(self, worker: Worker) -> None:
        """Survey."""
        _settle(self.job.combine_summaries[self.tensor.name], lambda: self._survey(worker))

    def _survey(self, worker: Worker) -> Any:
        plan = self.job.plan
        assert plan.combine.survey is not None  # the task exists because there is one
        walk = _Walk(plan, self.tensor, partial(self._walk, worker))
        return plan.combine.survey(walk, **self.tensor.combine)

    def _walk(self, worker: Worker) -> Iterator[Deltas]:
        tensor = self.tensor
        for start, count in worker.spans(tensor):
            base = worker.read_base(tensor, start, count)
            blocks = [
                worker.block(
                    tensor, model, start, base, worker.read_model(tensor, model, start, count)
                )
                for model in tensor.models
            ]
            yield worker.deltas(tensor, base, blocks)


@dataclass(frozen=True)
class _Chunk(_Task):
    chunk: int

    def prefetch(self) -> None:
        """Ask for the chunk's bytes of every input."""
        start, count = self._span()
        for source in self._sources():
            source.prefetch(self.tensor.name, start, count)

    def _span(self) -> tuple[int, int]:
        return chunk_span(self.chunk, self.tensor.elements)

    def _finish(self, inputs: Sequence[str], output: NDArray[np.uint8], **figures: Any) -> None:
        """Write the chunk and record it."""
        size = self.tensor.dtype.itemsize
        self.job.sink.write(self.tensor.name, self._span()[0] * size, output)
        record = {
            "tensor": self.tensor.name,
            "chunk": self.chunk,
            "inputs": inputs,
            "output": bytes_digest(output.data),
            **figures,
        }
        self.job.sink.record(record)
        self.job.records.append(record)

    def _add_to_base(self, base: Raw, merged: Floats, output: NDArray[np.uint8]) -> tuple[int, int]:
        """Encode base + scale·merged; count results that overflow or are NaN."""
        dtype, kernels = self.tensor.dtype, self.job.kernels
        scale = np.float32(self.job.plan.recipe.scale)
        same_type = dtype == self.tensor.base.dtype
        add = kernels.add_to_base if same_type else kernels.add_to_base_as
        if add(base, merged, scale, output.view(dtype.carrier)) < dtype.overflow_bits:
            return 0, 0
        limit = np.int32(dtype.overflow_bits)
        overflowed, nans = kernels.count_exceptions(base, merged, scale, limit)
        return int(overflowed), int(nans)


@dataclass(frozen=True)
class MergeChunk(_Chunk):
    """Merge one chunk of one tensor."""

    def run(self, worker: Worker) -> None:
        """Merge."""
        tensor, job = self.tensor, self.job
        start, count = self._span()
        base = worker.read_base(tensor, start, count)
        tuned = [worker.read_model(tensor, model, start, count) for model in tensor.models]
        digests = [bytes_digest(raw.data) for raw in (base, *tuned)]
        blocks = [
            worker.block(tensor, model, start, base, raw)
            for model, raw in zip(tensor.models, tuned, strict=True)
        ]
        future = job.combine_summaries.get(tensor.name)
        deltas = worker.deltas(tensor, base, blocks, future.result() if future else None)
        merged = job.plan.combine.apply(deltas, **tensor.combine)
        output = worker.output_chunk(tensor, start, count)
        exceptions = self._add_to_base(base, merged, output)
        figures = [block.figures() for block in blocks]
        self._finish(digests, output, models=figures, exceptions=exceptions)
        job.chunk_done(tensor)


@dataclass(frozen=True)
class CopyChunk(_Chunk):
    """Copy one chunk of a tensor from the base, comparing the models' copies if asked."""

    def run(self, worker: Worker) -> None:
        """Copy."""
        tensor = self.tensor
        start, count = self._span()
        raw = worker.read_base(tensor, start, count)
        digests = [bytes_digest(raw.data)]
        for model in tensor.models:
            other = worker.read_model(tensor, model, start, count)
            digests.append(bytes_digest(other.data))
            if digests[-1] != digests[0]:
                raise MismatchError(
                    f"{tensor.name}: the {tensor.base.dtype.name} values of "
                    f"{self.job.plan.model_names[model]} differ from the base's and cannot be "
                    'merged; set on_integer_mismatch = "base" to keep the base\'s'
                )
        output = worker.output_chunk(tensor, start, count)
        exceptions = (0, 0)
        if tensor.dtype == tensor.base.dtype:
            output[:] = raw.view(np.uint8)
        else:
            exceptions = self._add_to_base(raw, np.zeros(count, np.float32), output)
        self._finish(digests, output, exceptions=exceptions)
