"""Carry a plan out: read, take differences, run the stages, write. Here the layers meet.

The work is cut into tasks that any thread can do: surveys of a tensor, where a stage needs one,
and chunks. The order of tasks only serves speed; each writes its own bytes, which depend on the
plan and the inputs alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare import kernels as kernel_backends
from dare.errors import MismatchError
from dare.executors.threads import run_tasks
from dare.io.digest import new_hash
from dare.io.files import ALIGNMENT, aligned_bytes
from dare.io.header import TensorInfo
from dare.io.sources import Source
from dare.io.writer import Record, Sink
from dare.kernels import BLOCK
from dare.planning import Fate, Plan, TensorPlan, chunk_range
from dare.stages import Block, Deltas, Scratch

Floats = NDArray[np.float32]
Raw = NDArray[Any]
"""Stored elements, as carriers of their type."""
Progress = Callable[[int], None]
"""Told of every few bytes that have been read."""


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


def execute(
    plan: Plan,
    sink: Sink,
    *,
    backend: str = "cpu",
    done: Sequence[Record] = (),
    progress: Progress = lambda _nbytes: None,
    announce: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Merge what is not `done` yet into the sink; return the records of all chunks.

    `announce` is called if kernels have to be compiled first.
    """
    job = Job(plan, kernel_backends.load(backend), sink, progress, list(done))
    finished = {(record["tensor"], record["chunk"]) for record in done}
    with ExitStack() as stack:
        for source in (plan.base, *plan.models):
            stack.enter_context(source)
        stack.enter_context(job.kernels.announcing(announce))
        run_tasks(_tasks(job, finished), lambda stop: Worker(job, stop), plan.threads)
        for source in (plan.base, *plan.models):
            source.check_unchanged()
    return job.records


def _tasks(job: Job, finished: set[tuple[str, int]]) -> list[Any]:
    """All tasks in an order in which none has to wait for long.

    Comparisons of integers come first, since they may end the merge. The surveys of a tensor
    stand two tensors ahead of its chunks, so that they are done when the chunks are reached.
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
        if not left:
            continue
        for model in tensor.models:
            if tensor.surveyed_stages(plan.stages, model):
                job.delta_summaries[tensor.name, model] = Future()
                surveys[-1].append(SurveyDelta(job, tensor, model))
        if plan.combine.surveys_when(tensor.combine):
            job.combine_summaries[tensor.name] = Future()
            combines[-1].append(SurveyCombine(job, tensor))
    return copies + [
        task
        for group in zip([*surveys, [], []], [[], *combines, []], [[], [], *chunks], strict=True)
        for tasks in group
        for task in tasks
    ]


class Worker:
    """One thread's buffers, and the steps from stored bytes to deltas that all tasks share."""

    def __init__(self, job: Job, stop: threading.Event) -> None:
        plan = job.plan
        self.job = job
        self._stop = stop
        self._base_bytes = np.empty(BLOCK * plan.widest, np.uint8)
        self._model_bytes = np.empty(BLOCK * plan.widest, np.uint8)
        self._output_bytes = aligned_bytes(BLOCK * plan.widest + ALIGNMENT)
        self._base = np.empty(BLOCK, np.float32)
        self._rows = [np.empty(BLOCK, np.float32) for _ in range(plan.combine.rows)]
        self._scratch = Scratch(BLOCK)
        self._seeds = plan.recipe.seeds()
        self._weights = plan.recipe.weights()
        self._threshold_bits = np.float32(plan.recipe.delta_threshold).view(np.int32)

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut a range of elements into blocks: (start, count)."""
        for start in range(first, last, BLOCK):
            if self._stop.is_set():
                raise Stopped
            yield start, min(BLOCK, last - start)

    def read_base(self, tensor: TensorPlan, start: int, count: int) -> Raw:
        """Read the base's stored bytes of a block."""
        return self._read(self.job.plan.base, tensor.base, start, count, self._base_bytes)

    def read_model(self, tensor: TensorPlan, model: int, start: int, count: int) -> Raw:
        """Read a model's stored bytes of a block."""
        source = self.job.plan.source_of(tensor, model)
        return self._read(source, source.tensors[tensor.name], start, count, self._model_bytes)

    def _read(
        self, source: Source, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> Raw:
        size = info.dtype.itemsize
        view = into[: count * size]
        source.read(info.name, start * size, view)
        self.job.progress(view.size)
        return view.view(info.dtype.carrier)

    def decode_base(self, raw: Raw) -> Floats:
        """Widen a block of the base."""
        base = self._base[: raw.size]
        self.job.kernels.decode(raw, base)
        return base

    def output_block(self, tensor: TensorPlan, start: int, count: int) -> NDArray[np.uint8]:
        """Room for a block of the output, aligned in memory as it will be in the file."""
        size = tensor.dtype.itemsize
        shift = self.job.sink.position(tensor.name, start * size) % ALIGNMENT
        return self._output_bytes[shift : shift + count * size]

    def delta(
        self,
        tensor: TensorPlan,
        model: int,
        start: int,
        tuned: Raw,
        base: Floats,
        *,
        before: int | None = None,
        found: Mapping[int, Any] | None = None,
    ) -> tuple[Block, list[int]]:
        """Run a block through the delta stages (those before position `before`).

        `found` is what the surveys found, if it is not to be waited for. Also returns how many
        elements survived each stage.
        """
        plan = self.job.plan
        block = Block(
            self.job.kernels,
            tensor.name,
            start,
            self._seeds[model],
            tuned,
            base,
            self._scratch,
            self._threshold_bits,
        )
        summaries = self._summaries(tensor, model) if found is None else found
        survivors = []
        for position, settings in enumerate(tensor.settings_of(model)[:before]):
            block.summary = summaries.get(position)
            plan.stages[position].apply(block, **settings)
            survivors.append(block.survivors)
        return block, survivors

    def _summaries(self, tensor: TensorPlan, model: int) -> Mapping[int, Any]:
        """What the surveys of a model's delta found; waits for them."""
        future = self.job.delta_summaries.get((tensor.name, model))
        return future.result() if future else {}

    def combine(
        self, tensor: TensorPlan, base: Floats, stream: Iterator[Block], summary: Any
    ) -> Deltas:
        """Present the models' deltas to the combine stage."""
        weights = [self._weights[model] for model in tensor.models]
        return Deltas(self.job.kernels, base, weights, self._rows, stream, summary)


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

    def __init__(self, spare_bytes: int, walk: Callable[[], Iterator[Any]]) -> None:
        self.spare_bytes = spare_bytes
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
class SurveyDelta(_Survey):
    """Let the surveying stages of one model's chain see one tensor, in order."""

    model: int

    def run(self, worker: Worker) -> None:
        """Survey."""
        future = self.job.delta_summaries[self.tensor.name, self.model]
        _settle(future, lambda: self._survey(worker))

    def _survey(self, worker: Worker) -> dict[int, Any]:
        plan, tensor = self.job.plan, self.tensor
        found: dict[int, Any] = {}
        for position in tensor.surveyed_stages(plan.stages, self.model):
            survey = plan.stages[position].survey
            assert survey is not None  # surveyed_stages has looked
            walk = _Walk(plan.spare_bytes, partial(self._walk, worker, found, position))
            found[position] = survey(walk, **tensor.settings_of(self.model)[position])
        return found

    def _walk(self, worker: Worker, found: dict[int, Any], position: int) -> Iterator[Block]:
        tensor, model = self.tensor, self.model
        for start, count in worker.blocks(0, tensor.elements):
            base = worker.decode_base(worker.read_base(tensor, start, count))
            tuned = worker.read_model(tensor, model, start, count)
            yield worker.delta(tensor, model, start, tuned, base, before=position, found=found)[0]


@dataclass(frozen=True)
class SurveyCombine(_Survey):
    """Let the combine stage see all models' deltas of one tensor."""

    def run(self, worker: Worker) -> None:
        """Survey."""
        _settle(self.job.combine_summaries[self.tensor.name], lambda: self._survey(worker))

    def _survey(self, worker: Worker) -> Any:
        plan = self.job.plan
        assert plan.combine.survey is not None  # the task exists because there is one
        walk = _Walk(plan.spare_bytes, partial(self._walk, worker))
        return plan.combine.survey(walk, **self.tensor.combine)

    def _walk(self, worker: Worker) -> Iterator[Deltas]:
        for start, count in worker.blocks(0, self.tensor.elements):
            base = worker.decode_base(worker.read_base(self.tensor, start, count))
            stream = self._stream(worker, start, count, base)
            yield worker.combine(self.tensor, base, stream, None)

    def _stream(self, worker: Worker, start: int, count: int, base: Floats) -> Iterator[Block]:
        for model in self.tensor.models:
            tuned = worker.read_model(self.tensor, model, start, count)
            yield worker.delta(self.tensor, model, start, tuned, base)[0]


@dataclass(frozen=True)
class _Chunk(_Task):
    chunk: int

    def prefetch(self) -> None:
        """Ask for the chunk's bytes of every input."""
        first, last = chunk_range(self.tensor, self.chunk)
        for source in self._sources():
            size = source.tensors[self.tensor.name].dtype.itemsize
            source.prefetch(self.tensor.name, first * size, (last - first) * size)

    def _finish(self, inputs: Sequence[Any], output: Any, **figures: Any) -> None:
        record = {
            "tensor": self.tensor.name,
            "chunk": self.chunk,
            "inputs": [digest.hexdigest() for digest in inputs],
            "output": output.hexdigest(),
            **figures,
        }
        self.job.sink.record(record)
        self.job.records.append(record)

    def _add_to_base(
        self, raw: Raw | None, base: Floats, merged: Floats, output: NDArray[np.uint8]
    ) -> tuple[int, int]:
        """Encode base + scale·merged; count results that overflow or are NaN.

        `raw` is where the unchanged elements are copied from, if the storage type stays.
        """
        dtype, kernels = self.tensor.dtype, self.job.kernels
        scale = np.float32(self.job.plan.recipe.scale)
        encoded = output.view(dtype.carrier)
        if raw is not None:
            peak = kernels.add_to_base(raw, base, merged, scale, encoded)
        else:
            peak = kernels.add_to_base_as(base, merged, scale, encoded)
        if peak < dtype.overflow_bits:
            return 0, 0
        found: tuple[int, int] = kernels.count_exceptions(
            base, merged, scale, np.int32(dtype.overflow_bits)
        )
        return found


@dataclass(frozen=True)
class MergeChunk(_Chunk):
    """Merge one chunk of one tensor."""

    def run(self, worker: Worker) -> None:
        """Merge block by block."""
        tensor, job = self.tensor, self.job
        base_hash, output_hash = new_hash(), new_hash()
        stages = len(job.plan.stages) - 1
        parts = [ModelPart(model, stages) for model in tensor.models]
        exceptions = np.zeros(2, np.int64)
        future = job.combine_summaries.get(tensor.name)
        summary = future.result() if future else None
        for start, count in worker.blocks(*chunk_range(tensor, self.chunk)):
            raw = worker.read_base(tensor, start, count)
            base_hash.update(raw.data)
            base = worker.decode_base(raw)
            stream = self._stream(worker, start, count, base, parts)
            deltas = worker.combine(tensor, base, stream, summary)
            merged = job.plan.combine.apply(deltas, **tensor.combine)
            output = worker.output_block(tensor, start, count)
            same_type = tensor.dtype == tensor.base.dtype
            exceptions += self._add_to_base(raw if same_type else None, base, merged, output)
            output_hash.update(output.data)
            job.sink.write(tensor.name, start * tensor.dtype.itemsize, output)
        self._finish(
            [base_hash, *(part.hash for part in parts)],
            output_hash,
            models=[part.figures() for part in parts],
            exceptions=exceptions.tolist(),
        )

    def _stream(
        self, worker: Worker, start: int, count: int, base: Floats, parts: Sequence[ModelPart]
    ) -> Iterator[Block]:
        for part in parts:
            tuned = worker.read_model(self.tensor, part.model, start, count)
            part.hash.update(tuned.data)
            block, survivors = worker.delta(self.tensor, part.model, start, tuned, base)
            yield block
            part.add(block, survivors)


class ModelPart:
    """What is gathered about one model in one chunk."""

    def __init__(self, model: int, stages: int) -> None:
        self.model = model
        self.hash = new_hash()
        self._peak = 0
        self._over = 0
        self._survivors = [0] * stages

    def add(self, block: Block, survivors: Sequence[int]) -> None:
        """Add a block's figures, when the combine stage is through with it."""
        block.measure()
        self._peak = max(self._peak, int(block.peak))
        self._over += int(block.over)
        self._survivors = [
            int(total + new) for total, new in zip(self._survivors, survivors, strict=True)
        ]

    def figures(self) -> list[int]:
        """As they stand in a record."""
        return [self._peak, self._over, *self._survivors]


@dataclass(frozen=True)
class CopyChunk(_Chunk):
    """Copy one chunk of a tensor from the base, comparing the models' copies if asked."""

    def run(self, worker: Worker) -> None:
        """Copy block by block."""
        tensor, job = self.tensor, self.job
        base_hash, output_hash = new_hash(), new_hash()
        model_hashes = [new_hash() for _ in tensor.models]
        exceptions = np.zeros(2, np.int64)
        for start, count in worker.blocks(*chunk_range(tensor, self.chunk)):
            raw = worker.read_base(tensor, start, count)
            base_hash.update(raw.data)
            for model, digest in zip(tensor.models, model_hashes, strict=True):
                other = worker.read_model(tensor, model, start, count)
                digest.update(other.data)
                self._compare(raw, other, model)
            output = worker.output_block(tensor, start, count)
            if tensor.dtype == tensor.base.dtype:
                output[:] = raw.view(np.uint8)
            else:
                base = worker.decode_base(raw)
                exceptions += self._add_to_base(None, base, np.zeros_like(base), output)
            output_hash.update(output.data)
            job.sink.write(tensor.name, start * tensor.dtype.itemsize, output)
        self._finish([base_hash, *model_hashes], output_hash, exceptions=exceptions.tolist())

    def _compare(self, raw: Raw, other: Raw, model: int) -> None:
        if not np.array_equal(raw.view(np.uint8), other.view(np.uint8)):
            name = self.job.plan.model_names[model]
            raise MismatchError(
                f"{self.tensor.name}: the {self.tensor.base.dtype.name} values of {name} differ "
                "from the base's and cannot be merged; "
                'set on_integer_mismatch = "base" to keep the base\'s'
            )
