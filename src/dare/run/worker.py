"""One worker: from stored bytes through the stages to stored bytes. Here the layers meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import MismatchError
from dare.inputs.sources import Source
from dare.output.writer import Record, Sink
from dare.planning.plan import Plan, TensorPlan
from dare.run.graph import (
    Conclude,
    Copy,
    Id,
    Look,
    Merge,
    Step,
    Survey,
    SurveyAll,
    conclusion_id,
    survey_all_id,
    survey_id,
)
from dare.stages import Block, Deltas, Scratch
from dare.tensors.chunks import CHUNK, chunk_span, chunk_spans
from dare.tensors.digest import bytes_digest
from dare.tensors.files import ALIGNMENT, aligned_bytes
from dare.tensors.header import TensorInfo

Floats = NDArray[np.float32]
Raw = NDArray[Any]
"""Stored elements, as carriers of their type."""
Progress = Callable[[int], None]
"""Told of every few bytes that have been read."""
Summaries = Mapping[int, Any]
"""What surveying stages found, by their positions in the chain."""
Results = Mapping[Id, Any]


class Stopped(Exception):  # noqa: N818
    """Another thread has failed, or the user has interrupted: leave without a word."""


class Worker:
    """Does the steps of a plan, with buffers of its own; the inputs must be open."""

    def __init__(
        self, plan: Plan, kernels: Any, sink: Sink, progress: Progress, stop: threading.Event
    ) -> None:
        self._plan = plan
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._kernels = kernels
        self._sink = sink
        self._progress = progress
        self._stop = stop
        self._base_bytes = np.empty(CHUNK * plan.widest, np.uint8)
        self._model_bytes = [np.empty_like(self._base_bytes) for _ in plan.models]
        self._output_bytes = aligned_bytes(CHUNK * plan.widest + ALIGNMENT)
        self._scratch = Scratch(CHUNK)
        self._nothing = np.zeros(CHUNK if plan.has_deltas else 0, np.float32)
        self._seeds = plan.recipe.seeds()
        self._threshold_bits = np.float32(plan.recipe.delta_threshold).view(np.int32)

    def prefetch(self, step: Step) -> None:
        """Ask for the bytes of a chunk; what reads whole tensors is served by the system."""
        if isinstance(step, Merge | Copy):
            tensor = self._tensors[step.tensor]
            start, count = chunk_span(step.chunk, tensor.elements)
            sources = (self._plan.source_of(tensor, model) for model in tensor.models)
            for source in (self._plan.base, *sources):
                source.prefetch(tensor.name, start, count)

    def run(self, step: Step, results: Results) -> Any:
        """Do one step: return a record of what was written, or what other steps need."""
        match step:
            case Merge():
                return self._merge(step, results)
            case Copy():
                return self._copy(step)
            case Survey():
                return self._survey(
                    self._tensors[step.tensor], step.model, step.conclusions, results
                )
            case SurveyAll():
                return self._survey_all(self._tensors[step.tensor], results)
            case Look():
                return self._look(step, results)
            case Conclude():
                return self._conclude(step, results)
            case _:
                raise TypeError(f"{step!r} is not a step of a merge")

    # ------------------------------------------------------------ censuses and surveys

    def _look(self, step: Look, results: Results) -> Any:
        census = self._plan.censuses[step.census]
        tensor, model, position = self._tensors[step.tensor], census.model, census.position
        look = self._plan.stages[position].rounds(census.settings)[step.round].look
        known = results[conclusion_id(census, step.round - 1)] if step.round else None
        summaries = self._survey(tensor, model, step.conclusions, results, before=position)
        return look(self._walk(tensor, model, summaries, position), known, **census.settings)

    def _conclude(self, step: Conclude, results: Results) -> Any:
        census = self._plan.censuses[step.census]
        conclude = self._plan.stages[census.position].rounds(census.settings)[step.round].conclude
        known = results[conclusion_id(census, step.round - 1)] if step.round else None
        looks = {
            tensor.name: results["look", step.census, step.round, tensor.name]
            for tensor in census.tensors
        }
        return conclude(looks, known, **census.settings)

    def _survey(
        self,
        tensor: TensorPlan,
        model: int,
        conclusions: Sequence[tuple[int, Id]],
        results: Results,
        before: int | None = None,
    ) -> Summaries:
        """What the surveying stages of a chain find, in order, up to a position."""
        concluded = {position: results[id_][tensor.name] for position, id_ in conclusions}
        summaries: dict[int, Any] = {}
        for position in tensor.surveyed_stages(self._plan.stages, model):
            if before is not None and position >= before:
                break
            survey = self._plan.stages[position].survey
            assert survey is not None  # surveyed_stages has looked
            walk = self._walk(tensor, model, summaries, position, concluded.get(position))
            summaries[position] = survey(walk, **tensor.settings_of(model)[position])
        return summaries

    def _walk(
        self,
        tensor: TensorPlan,
        model: int,
        summaries: Summaries,
        position: int,
        census: Any = None,
    ) -> _Walk:
        """The blocks as they come to a stage, which knows what the surveys before it found."""
        blocks = partial(self._blocks, tensor, model, summaries, position)
        return _Walk(self._plan.spare_bytes, tensor.shape, blocks, census)

    def _blocks(
        self, tensor: TensorPlan, model: int, summaries: Summaries, position: int
    ) -> Iterator[Block]:
        for start, count in self._spans(tensor):
            base = self._read_base(tensor, start, count)
            tuned = self._read_model(tensor, model, start, count)
            yield self._block(tensor, model, start, base, tuned, summaries, before=position)

    def _survey_all(self, tensor: TensorPlan, results: Results) -> Any:
        combine = self._plan.combine
        assert combine.survey is not None  # the step exists because there is one
        deltas = partial(self._all_deltas, tensor, results)
        walk = _Walk(self._plan.spare_bytes, tensor.shape, deltas)
        return combine.survey(walk, **tensor.combine)

    def _all_deltas(self, tensor: TensorPlan, results: Results) -> Iterator[Deltas]:
        for start, count in self._spans(tensor):
            base = self._read_base(tensor, start, count)
            tuned = [self._read_model(tensor, model, start, count) for model in tensor.models]
            yield self._deltas(tensor, start, base, tuned, results)

    def _spans(self, tensor: TensorPlan) -> Iterator[tuple[int, int]]:
        """Every chunk of a tensor, unless the work is to stop."""
        for span in chunk_spans(tensor.elements):
            if self._stop.is_set():
                raise Stopped
            yield span

    # ------------------------------------------------------------ chunks

    def _merge(self, step: Merge, results: Results) -> Record:
        tensor = self._tensors[step.tensor]
        start, count = chunk_span(step.chunk, tensor.elements)
        base = self._read_base(tensor, start, count)
        tuned = [self._read_model(tensor, model, start, count) for model in tensor.models]
        digests = [bytes_digest(raw.data) for raw in (base, *tuned)]
        deltas = self._deltas(tensor, start, base, tuned, results)
        merged = self._plan.combine.apply(deltas, **tensor.combine)
        output = self._output_chunk(tensor, start, count)
        exceptions = self._add_to_base(tensor, base, merged, output)
        figures = [block.figures() for block in deltas.blocks]
        return self._write(step, digests, output, models=figures, exceptions=exceptions)

    def _copy(self, step: Copy) -> Record:
        tensor = self._tensors[step.tensor]
        start, count = chunk_span(step.chunk, tensor.elements)
        raw = self._read_base(tensor, start, count)
        digests = [bytes_digest(raw.data)]
        for model in tensor.models:
            other = self._read_model(tensor, model, start, count)
            digests.append(bytes_digest(other.data))
            if digests[-1] != digests[0]:
                raise MismatchError(
                    f"{tensor.name}: the {tensor.base.dtype.name} values of "
                    f"{self._plan.model_names[model]} differ from the base's and cannot be "
                    'merged; set on_integer_mismatch = "base" to keep the base\'s'
                )
        output = self._output_chunk(tensor, start, count)
        exceptions = (0, 0)
        if tensor.dtype == tensor.base.dtype:
            output[:] = raw.view(np.uint8)
        else:
            zeros = np.zeros(count, np.float32)
            exceptions = self._add_to_base(tensor, raw, zeros, output)
        return self._write(step, digests, output, exceptions=exceptions)

    def _read_base(self, tensor: TensorPlan, start: int, count: int) -> Raw:
        return self._read(self._plan.base, tensor.base, start, count, self._base_bytes)

    def _read_model(self, tensor: TensorPlan, model: int, start: int, count: int) -> Raw:
        source = self._plan.source_of(tensor, model)
        info = source.tensors[tensor.name]
        return self._read(source, info, start, count, self._model_bytes[model])

    def _read(
        self, source: Source, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> Raw:
        data: Raw = into[: count * info.dtype.itemsize].view(info.dtype.carrier)
        source.read(info.name, start, data)
        self._progress(data.nbytes)
        return data

    def _block(
        self,
        tensor: TensorPlan,
        model: int,
        start: int,
        base: Raw,
        tuned: Raw,
        summaries: Summaries,
        before: int | None = None,
    ) -> Block:
        """Run a chunk of a model through its delta stages (those before position `before`)."""
        seed, threshold = self._seeds[model], self._threshold_bits
        if self._plan.source_of(tensor, model).holds_delta(tensor.name):
            base = self._nothing[: tuned.size]
        block = Block(
            self._kernels, tensor.name, start, seed, tuned, base, self._scratch, threshold
        )
        draws = tensor.draws_of(self._plan.stages, model)
        for position, settings in enumerate(tensor.settings_of(model)[:before]):
            block.summary, block.draw = summaries.get(position), draws[position]
            self._plan.stages[position].apply(block, **settings)
            block.end_stage()
        if before is not None:
            block.draw = draws[before]
        return block

    def _deltas(
        self, tensor: TensorPlan, start: int, base: Raw, tuned: Sequence[Raw], results: Results
    ) -> Deltas:
        """Present the models' deltas to the combine stage."""
        blocks = [
            self._block(tensor, model, start, base, raw, results.get(survey_id(tensor, model), {}))
            for model, raw in zip(tensor.models, tuned, strict=True)
        ]
        return Deltas(
            self._kernels,
            base,
            blocks,
            tensor.weights,
            self._scratch,
            self._threshold_bits,
            results.get(survey_all_id(tensor)),
        )

    def _output_chunk(self, tensor: TensorPlan, start: int, count: int) -> NDArray[np.uint8]:
        """Room for a chunk of the output, aligned in memory as it will be in the file."""
        size = tensor.dtype.itemsize
        shift = self._sink.position(tensor.name, start * size) % ALIGNMENT
        return self._output_bytes[shift : shift + count * size]

    def _add_to_base(
        self, tensor: TensorPlan, base: Raw, merged: Floats, output: NDArray[np.uint8]
    ) -> tuple[int, int]:
        """Encode base + scale·merged; count results that overflow or are NaN."""
        dtype, kernels = tensor.dtype, self._kernels
        scale = np.float32(self._plan.recipe.scale)
        add = kernels.add_to_base if dtype == tensor.base.dtype else kernels.add_to_base_as
        if add(base, merged, scale, output.view(dtype.carrier)) < dtype.overflow_bits:
            return 0, 0
        limit = np.int32(dtype.overflow_bits)
        overflowed, nans = kernels.count_exceptions(base, merged, scale, limit)
        return int(overflowed), int(nans)

    def _write(
        self, step: Merge | Copy, inputs: Sequence[str], output: NDArray[np.uint8], **figures: Any
    ) -> Record:
        tensor = self._tensors[step.tensor]
        start, _ = chunk_span(step.chunk, tensor.elements)
        self._sink.write(tensor.name, start * tensor.dtype.itemsize, output)
        return {
            "tensor": tensor.name,
            "chunk": step.chunk,
            "inputs": inputs,
            "output": bytes_digest(output.data),
            **figures,
        }


class _Walk:
    """Blocks of a tensor in order, as often as a survey asks."""

    def __init__(
        self,
        spare_bytes: int,
        shape: tuple[int, ...],
        walk: Callable[[], Iterator[Any]],
        census: Any = None,
    ) -> None:
        self.spare_bytes = spare_bytes
        self.shape = shape
        self.census = census
        self._walk = walk

    def __call__(self) -> Iterator[Any]:
        return self._walk()
