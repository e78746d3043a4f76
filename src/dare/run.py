"""Carry a plan out: read, take differences, run the stages, write. Here the layers meet.

The work is cut into tasks that any thread can do: surveys of a tensor, where a stage needs one,
and chunks. The order of tasks only serves speed; each writes its own bytes, which depend on the
plan and the inputs alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare import kernels as kernel_backends
from dare.errors import MismatchError
from dare.executors.threads import run_tasks
from dare.io.digest import new_hash
from dare.io.header import TensorInfo
from dare.io.sources import Source
from dare.io.writer import Record, Sink
from dare.kernels import BLOCK
from dare.plan import Fate, Plan, TensorPlan, chunk_range
from dare.stages import Block, Deltas

Progress = Callable[[int], None]
"""Told of every few bytes that have been read."""


class Stopped(Exception):
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
        widest = max((tensor.dtype.itemsize for tensor in plan.tensors), default=1)
        widest = max(
            [widest]
            + [info.dtype.itemsize for s in (plan.base, *plan.models) for info in s.tensors.values()]
        )
        self._base_bytes = np.empty(BLOCK * widest, np.uint8)
        self._model_bytes = np.empty(BLOCK * widest, np.uint8)
        self.output_bytes = np.empty(BLOCK * widest, np.uint8)
        self._base = np.empty(BLOCK, np.float32)
        self._delta = np.empty(BLOCK, np.float32)
        self._rows = [np.empty(BLOCK, np.float32) for _ in range(plan.combine.rows)]
        self._scratch = np.empty(BLOCK, np.uint8)

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut a range of elements into blocks: (start, count)."""
        for start in range(first, last, BLOCK):
            if self._stop.is_set():
                raise Stopped
            yield start, min(BLOCK, last - start)

    def read_base(self, info: TensorInfo, start: int, count: int) -> NDArray[np.uint8]:
        """Read the base's stored bytes of a block."""
        return self._read(self.job.plan.base, info, start, count, self._base_bytes)

    def read_model(self, tensor: TensorPlan, model: int, start: int, count: int) -> NDArray[np.uint8]:
        """Read a model's stored bytes of a block."""
        source = self.job.plan.models[model]
        return self._read(source, source.tensors[tensor.name], start, count, self._model_bytes)

    def _read(
        self, source: Source, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        size = info.dtype.itemsize
        view = into[: count * size]
        source.read(info.name, start * size, view)
        self.job.progress(view.size)
        return view

    def decode_base(self, tensor: TensorPlan, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Widen a block of the base."""
        raw = stored.view(tensor.base.dtype.carrier)
        base = self._base[: raw.size]
        self.job.kernels.decode(raw, base)
        return base

    def subtract(
        self, tensor: TensorPlan, model: int, stored: NDArray[np.uint8], base: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], int, int]:
        """Take a model's delta; also its largest magnitude's bits and the count over threshold."""
        raw = stored.view(self.job.plan.models[model].tensors[tensor.name].dtype.carrier)
        delta = self._delta[: raw.size]
        threshold = np.float32(self.job.plan.recipe.delta_threshold).view(np.int32)
        peak, over = self.job.kernels.delta(raw, base, delta, threshold)
        return delta, peak, over

    def run_stages(
        self,
        tensor: TensorPlan,
        model: int,
        start: int,
        delta: NDArray[np.float32],
        summaries: dict[int, Any],
        before: int | None = None,
    ) -> tuple[Block, list[int]]:
        """Run the delta stages (those before position `before`); also count survivors after each."""
        plan = self.job.plan
        block = Block(
            self.job.kernels,
            tensor.name,
            start,
            plan.recipe.seeds()[model],
            delta,
            delta.size,
            self._scratch,
        )
        settings = tensor.settings[tensor.models.index(model)][:before]
        survivors = []
        for position, values in enumerate(settings):
            block.summary = summaries.get(position)
            plan.stages[position].apply(block, **values)
            survivors.append(block.survivors)
        return block, survivors

    def deltas(
        self,
        tensor: TensorPlan,
        base: NDArray[np.float32],
        stream: Iterator[NDArray[np.float32]],
        summary: Any,
    ) -> Deltas:
        """Present the models' deltas to the combine stage."""
        weights = [self.job.plan.recipe.weights()[model] for model in tensor.models]
        return Deltas(self.job.kernels, base, weights, self._rows, stream, summary)

    def summaries(self, tensor: TensorPlan, model: int) -> dict[int, Any]:
        """What the surveys of a model's delta found; waits for them."""
        future = self.job.delta_summaries.get((tensor.name, model))
        return future.result() if future else {}


@dataclass(frozen=True)
class _Task:
    job: Job
    tensor: TensorPlan

    def _sources(self) -> list[Source]:
        plan = self.job.plan
        return [plan.base, *(plan.models[model] for model in self.tensor.models)]


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
        stages = self.job.plan.stages
        settings = self.tensor.settings[self.tensor.models.index(self.model)]
        found: dict[int, Any] = {}
        for position in self.tensor.surveyed_stages(stages, self.model):
            walk = _Walk(self.job.plan.spare_bytes, lambda p=position: self._walk(worker, found, p))
            survey = stages[position].survey
            assert survey is not None  # noqa: S101 (surveyed_stages has looked)
            found[position] = survey(walk, **settings[position])
        return found

    def _walk(self, worker: Worker, found: dict[int, Any], position: int) -> Iterator[Block]:
        tensor = self.tensor
        for start, count in worker.blocks(0, tensor.elements):
            base = worker.decode_base(tensor, worker.read_base(tensor.base, start, count))
            stored = worker.read_model(tensor, self.model, start, count)
            delta, _, _ = worker.subtract(tensor, self.model, stored, base)
            yield worker.run_stages(tensor, self.model, start, delta, found, position)[0]


@dataclass(frozen=True)
class SurveyCombine(_Survey):
    """Let the combine stage see all models' deltas of one tensor."""

    def run(self, worker: Worker) -> None:
        """Survey."""
        _settle(self.job.combine_summaries[self.tensor.name], lambda: self._survey(worker))

    def _survey(self, worker: Worker) -> Any:
        survey = self.job.plan.combine.survey
        assert survey is not None  # noqa: S101 (the task exists because there is one)
        walk = _Walk(self.job.plan.spare_bytes, lambda: self._walk(worker))
        return survey(walk, **self.tensor.combine)

    def _walk(self, worker: Worker) -> Iterator[Deltas]:
        tensor = self.tensor
        for start, count in worker.blocks(0, tensor.elements):
            base = worker.decode_base(tensor, worker.read_base(tensor.base, start, count))

            def stream(
                base: NDArray[np.float32] = base, start: int = start, count: int = count
            ) -> Iterator[NDArray[np.float32]]:
                for model in tensor.models:
                    stored = worker.read_model(tensor, model, start, count)
                    delta, _, _ = worker.subtract(tensor, model, stored, base)
                    summaries = worker.summaries(tensor, model)
                    worker.run_stages(tensor, model, start, delta, summaries)
                    yield delta

            yield worker.deltas(tensor, base, stream(), None)


@dataclass(frozen=True)
class _Chunk(_Task):
    chunk: int

    def prefetch(self) -> None:
        """Ask for the chunk's bytes of every input."""
        first, last = chunk_range(self.tensor, self.chunk)
        for source in self._sources():
            size = source.tensors[self.tensor.name].dtype.itemsize
            source.prefetch(self.tensor.name, first * size, (last - first) * size)

    def _hashes(self) -> list[Any]:
        return [new_hash() for _ in self._sources()]

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
        self,
        stored_base: NDArray[np.uint8] | None,
        base: NDArray[np.float32],
        merged: NDArray[np.float32],
        output: NDArray[np.uint8],
    ) -> tuple[int, int]:
        """Encode base + scale·merged; count results that overflow or are NaN.

        `stored_base` is what the base's unchanged elements are copied from, if the type stays.
        """
        tensor, kernels = self.tensor, self.job.kernels
        scale = np.float32(self.job.plan.recipe.scale)
        encoded = output.view(tensor.dtype.carrier)
        if tensor.dtype == tensor.base.dtype and stored_base is not None:
            raw = stored_base.view(tensor.base.dtype.carrier)
            peak = kernels.add_to_base(raw, base, merged, scale, encoded)
        else:
            peak = kernels.add_to_base_as(base, merged, scale, encoded)
        if peak < tensor.dtype.overflow_bits:
            return 0, 0
        overflow_bits = np.int32(tensor.dtype.overflow_bits)
        found: tuple[int, int] = kernels.count_exceptions(base, merged, scale, overflow_bits)
        return found


@dataclass(frozen=True)
class MergeChunk(_Chunk):
    """Merge one chunk of one tensor."""

    def run(self, worker: Worker) -> None:
        """Merge block by block."""
        tensor, job = self.tensor, self.job
        base_hash, *model_hashes = hashes = self._hashes()
        output_hash = new_hash()
        figures = [ModelFigures(len(job.plan.stages) - 1) for _ in tensor.models]
        exceptions = np.zeros(2, np.int64)
        future = job.combine_summaries.get(tensor.name)
        summary = future.result() if future else None

        for start, count in worker.blocks(*chunk_range(tensor, self.chunk)):
            stored_base = worker.read_base(tensor.base, start, count)
            base_hash.update(stored_base)
            base = worker.decode_base(tensor, stored_base)

            def stream(
                base: NDArray[np.float32] = base, start: int = start, count: int = count
            ) -> Iterator[NDArray[np.float32]]:
                for model, digest, figure in zip(
                    tensor.models, model_hashes, figures, strict=True
                ):
                    stored = worker.read_model(tensor, model, start, count)
                    digest.update(stored)
                    delta, peak, over = worker.subtract(tensor, model, stored, base)
                    summaries = worker.summaries(tensor, model)
                    _, survivors = worker.run_stages(tensor, model, start, delta, summaries)
                    figure.add(peak, over, survivors)
                    yield delta

            deltas = worker.deltas(tensor, base, stream(), summary)
            merged = job.plan.combine.apply(deltas, **tensor.combine)
            output = worker.output_bytes[: count * tensor.dtype.itemsize]
            exceptions += self._add_to_base(stored_base, base, merged, output)
            output_hash.update(output)
            job.sink.write(tensor.name, start * tensor.dtype.itemsize, output)

        self._finish(
            hashes,
            output_hash,
            models=[figure.to_list() for figure in figures],
            exceptions=exceptions.tolist(),
        )


class ModelFigures:
    """What is counted of one model in one chunk."""

    def __init__(self, stages: int) -> None:
        self.peak = 0
        self.over = 0
        self.survivors = [0] * stages

    def add(self, peak: int, over: int, survivors: Sequence[int]) -> None:
        """Add a block's figures."""
        self.peak = max(self.peak, int(peak))
        self.over += int(over)
        self.survivors = [
            int(total + new) for total, new in zip(self.survivors, survivors, strict=True)
        ]

    def to_list(self) -> list[int]:
        """As they stand in a record."""
        return [self.peak, self.over, *self.survivors]


@dataclass(frozen=True)
class CopyChunk(_Chunk):
    """Copy one chunk of a tensor from the base, comparing the models' copies if asked."""

    def run(self, worker: Worker) -> None:
        """Copy block by block."""
        tensor, job = self.tensor, self.job
        base_hash, *model_hashes = hashes = self._hashes()
        output_hash = new_hash()
        exceptions = np.zeros(2, np.int64)
        for start, count in worker.blocks(*chunk_range(tensor, self.chunk)):
            stored = worker.read_base(tensor.base, start, count)
            base_hash.update(stored)
            for model, digest in zip(tensor.models, model_hashes, strict=True):
                other = worker.read_model(tensor, model, start, count)
                digest.update(other)
                if not np.array_equal(stored, other):
                    raise MismatchError(
                        f"{tensor.name}: {tensor.base.dtype.name} values of "
                        f"{job.plan.model_names[model]} differ from the base's, and cannot be "
                        'merged; set on_integer_mismatch = "base" to keep the base\'s'
                    )
            output = stored
            if tensor.dtype != tensor.base.dtype:
                base = worker.decode_base(tensor, stored)
                output = worker.output_bytes[: count * tensor.dtype.itemsize]
                exceptions += self._add_to_base(None, base, np.zeros_like(base), output)
            output_hash.update(output)
            job.sink.write(tensor.name, start * tensor.dtype.itemsize, output)
        self._finish(hashes, output_hash, exceptions=exceptions.tolist())
