"""One worker: reads what a step needs, has it computed, writes what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import MismatchError
from dare.inputs.reading import read_chunks
from dare.inputs.sources import Source
from dare.output.journal import Record
from dare.output.writer import Sink
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.run.backend import Backend, Chunk, Merged, Summaries
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
from dare.run.schedule import Batch
from dare.stages import Block, Deltas
from dare.tensors.chunks import chunk_span
from dare.tensors.digest import bytes_digest
from dare.tensors.files import ALIGNMENT

Progress = Callable[[int], None]
"""Told of every few bytes that have been read."""
Results = Mapping[Id, Any]


class Stopped(Exception):  # noqa: N818
    """Another thread has failed, or the user has interrupted: leave without a word."""


class Worker:
    """Does the steps of a plan with a backend of its own; the inputs must be open."""

    def __init__(
        self, plan: Plan, backend: Backend, sink: Sink, progress: Progress, stop: threading.Event
    ) -> None:
        self._plan = plan
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._backend = backend
        self._sink = sink
        self._progress = progress
        self._stop = stop

    def _sources(self, tensor: TensorPlan, models: Collection[int]) -> list[Source]:
        """Where a tensor is read: the base, and what models have of it."""
        return [self._plan.base, *(self._plan.source_of(tensor, model) for model in models)]

    def prefetch(self, step: Step) -> None:
        """Ask for the bytes of a chunk; what reads whole tensors is served by the system."""
        if isinstance(step, Merge | Copy):
            tensor = self._tensors[step.tensor]
            for source in self._sources(tensor, tensor.models):
                source.prefetch(tensor.name, *chunk_span(step.chunk, tensor.elements))

    def run_batch(self, batch: Batch[Step]) -> Iterator[Any]:
        """Do steps: yield records of what was written, or what other steps need."""
        return (self._do(step, batch.results) for step in batch.steps)

    def _do(self, step: Step, results: Results) -> Any:
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
        concluded = {position: results[id_][tensor.key] for position, id_ in conclusions}
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

        def blocks() -> Iterator[Block]:
            for chunk in self._chunks(tensor, [model]):
                yield self._backend.block(chunk, model, summaries, before=position)

        return _Walk(self._plan.cost.spare_bytes, tensor.shape, blocks, census)

    def _survey_all(self, tensor: TensorPlan, results: Results) -> Any:
        def deltas() -> Iterator[Deltas]:
            for chunk in self._chunks(tensor, tensor.models):
                yield self._backend.deltas(chunk, summaries_of(tensor, results))

        survey = self._plan.combine.survey
        assert survey is not None  # the step exists because there is one
        walk = _Walk(self._plan.cost.spare_bytes, tensor.shape, deltas)
        return survey(walk, **tensor.combine)

    def _chunks(
        self, tensor: TensorPlan, models: Collection[int], start: int = 0, count: int | None = None
    ) -> Iterator[Chunk]:
        """Read the base and some models chunk by chunk, unless the work is to stop."""
        sources = self._sources(tensor, models)
        buffers = [self._backend.inputs[place] for place in (0, *(1 + m for m in models))]
        for place, (base, *tuned) in read_chunks(
            sources, tensor.name, start, count, buffers=buffers, base_first=True
        ):
            if self._stop.is_set():
                raise Stopped
            self._progress(sum(s.bytes_for(tensor.name, base.size) for s in sources))
            yield Chunk(tensor, place, base, dict(zip(models, tuned, strict=True)))

    # ------------------------------------------------------------ chunks

    def _read(self, step: Merge | Copy) -> tuple[Chunk, list[str]]:
        """The chunk of a step, and the digests of what was read."""
        tensor = self._tensors[step.tensor]
        (chunk,) = self._chunks(tensor, tensor.models, *chunk_span(step.chunk, tensor.elements))
        raws = (chunk.base, *chunk.tuned.values())
        return chunk, [
            source.chunk_digest(tensor.name, step.chunk) or bytes_digest(raw.data)
            for source, raw in zip(self._sources(tensor, tensor.models), raws, strict=True)
        ]

    def _merge(self, step: Merge, results: Results) -> Record:
        chunk, digests = self._read(step)
        summaries = summaries_of(chunk.tensor, results)
        summary = results.get(survey_all_id(chunk.tensor))
        merged = self._backend.merge(chunk, summaries, summary, self._room(chunk))
        return self._write(step, chunk, digests, merged)

    def _copy(self, step: Copy) -> Record:
        chunk, digests = self._read(step)
        tensor = chunk.tensor
        for model, digest in zip(tensor.models, digests[1:], strict=True):
            if digest != digests[0]:
                raise MismatchError(
                    f"{tensor.name}: the {tensor.base.dtype.name} values of "
                    f"{self._plan.model_names[model]} differ from the base's and cannot be "
                    'merged; set on_integer_mismatch = "base" to keep the base\'s'
                )
        return self._write(step, chunk, digests, self._backend.convert(chunk, self._room(chunk)))

    def _room(self, chunk: Chunk) -> NDArray[np.uint8]:
        """Where the output is made: where it shall be, or in a buffer.

        There it begins in its page where it will in the file, for direct writes.
        """
        name, offset = chunk.tensor.name, _offset(chunk)
        nbytes = chunk.base.size * chunk.tensor.dtype.itemsize
        place = self._sink.place(name, offset, nbytes)
        if place is not None:
            return place
        alignment = self._sink.position(name, offset) % ALIGNMENT
        return self._backend.output[alignment : alignment + nbytes]

    def _write(
        self, step: Merge | Copy, chunk: Chunk, inputs: Sequence[str], merged: Merged
    ) -> Record:
        self._sink.write(step.tensor, _offset(chunk), merged.data)
        return Record(
            tensor=step.tensor,
            chunk=step.chunk,
            inputs=tuple(inputs),
            output=bytes_digest(merged.data.data),
            models=tuple(map(tuple, merged.models)),
            exceptions=merged.exceptions,
        )


def _offset(chunk: Chunk) -> int:
    """Bytes of the output's tensor before a chunk."""
    return chunk.start * chunk.tensor.dtype.itemsize


def summaries_of(tensor: TensorPlan, results: Results) -> dict[int, Summaries]:
    """What was found for each model."""
    return {model: results.get(survey_id(tensor, model), {}) for model in tensor.models}


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
