"""The work of a plan as a list of steps: plain data, which any thread, process or machine can do.

    observe (a tensor, for a stage that asks about all tensors of a model) → conclude
      → survey (a tensor of one model) → survey (a tensor of all models) → make (a chunk)

A step names the tensor it is for, and by id the results that it needs. Chunks that are made are
written, and their results are records; the results of the others are passed on. The order of the
list only serves speed: bytes depend on the plan and the inputs alone.

A worker does steps: it reads what they need, and has its backend compute. Chunks that are read
together go through a coder, which makes records of them: the merger here, or those of delta files.

A merge refuses inputs and results that are not finite, unless the recipe allows them, in the chunk
where they first appear (`dare.checks.inputs`).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.checks.inputs import check_chunk, is_suspect
from dare.errors import MismatchError
from dare.formats.recoding import in_pieces
from dare.inputs.sources import Raw, Source, bytes_for, read_chunks, read_stored
from dare.output.journal import Record
from dare.output.sink import Sink
from dare.planning.data import CensusPlan, TensorPlan
from dare.planning.plan import Plan
from dare.planning.slices import Share
from dare.run.backend import Backend, Bytes, Chunk, Made, Place, Room, Summaries
from dare.run.threads import Id, Results, Step
from dare.stages.blocks import DeltaView, Grams
from dare.stages.matrices import refine
from dare.tensors.chunks import CHUNK, chunk_count, chunk_span, running_digest
from dare.tensors.files import ALIGNMENT

# Ids of conclusions with the positions of their stages in the chain, by tensor and model.
Conclusions = dict[tuple[str, int], list[tuple[int, Id]]]

# A sample of a tensor: the most elements, what part of it, and in how many pieces.
SAMPLE_ELEMENTS, SAMPLE_PART, SAMPLE_PIECES = 1 << 16, 32, 16


@dataclass(frozen=True, slots=True)
class Observe(Step):
    """Observe one tensor for a stage that asks about all tensors of a model."""

    census: int  # the place of the stage's request in the plan's `censuses`
    round: int
    tensor: str
    # The conclusions for earlier stages, by their positions in the chain.
    conclusions: tuple[tuple[int, Id], ...]


@dataclass(frozen=True, slots=True)
class Conclude(Step):
    """Draw the conclusion from the observations of a round."""

    census: int
    round: int


@dataclass(frozen=True, slots=True)
class Survey(Step):
    """Let the surveying stages of one model's chain, or those after them, see one tensor.

    In an analysis: compute the singular values of a model's delta.
    """

    tensor: str
    model: int | None  # None for combine and refine stages, which see the deltas of all models
    conclusions: tuple[tuple[int, Id], ...] = ()


@dataclass(frozen=True, slots=True)
class Make(Step):
    """Merge one chunk of a tensor, or copy it from the base, comparing the models' if asked.

    In an output of another format the step makes all chunks that are stored together with it. In
    an analysis the chunk is measured.
    """

    tensor: str
    chunk: int


def survey_id(tensor: TensorPlan, model: int | None = None) -> Id:
    """Return the id of a model's survey, or of all models'."""
    return "survey", tensor.name, model


def conclusion_id(census: CensusPlan, number: int) -> Id:
    """Return the id of a round's conclusion, the same in any plan that has this census."""
    settings = tuple(sorted(census.settings.items()))
    return "conclude", census.model, census.tensors[0].method, census.position, settings, number


def list_steps(
    plan: Plan,
    done: Collection[tuple[str, int]] = (),
    known: Collection[Id] = (),
    share: Share | None = None,
) -> list[Step]:
    """List all steps, except chunks that are done and conclusions that are known.

    With a share, only its chunks are made. Comparisons of integers come first, since they may end
    the merge; but not if the output is sent in parts, which fill in the order of the files.
    """
    conclusions = conclusions_of(plan)
    copies: list[Step] = []
    steps: list[Step] = []
    is_sent = plan.layout is not None and plan.layout.is_sent
    merges = False
    for group, tensor in enumerate(plan.tensors, start=1):
        to_make = range(tensor.chunks) if share is None else share.get(tensor.name, ())
        chunks = [c for c in to_make if (tensor.name, c) not in done] if done else to_make
        if not tensor.is_merged:
            (steps if is_sent else copies).extend(
                _making(plan, tensor, chunks, (), group if is_sent else 0)
            )
        elif chunks:
            merges = True
            reads = plan.cost.surveys_here
            asked = list_surveys(tensor, conclusions, group, reads=reads)
            surveys = list(asked) if tensor.treatment.asks else []
            needs = tuple(survey.id for survey in surveys)
            steps += [*surveys, *_making(plan, tensor, chunks, needs, group)]
    return [*copies, *(list_census_steps(plan, known) if merges else ()), *steps]


def list_census_steps(plan: Plan, known: Collection[Id] = ()) -> Iterator[Step]:
    """List the steps of all censuses, one after the other, and of each round by round."""
    before = conclusions_of(plan)
    for place, census in enumerate(plan.censuses):
        rounds = census.rounds
        if conclusion_id(census, len(rounds) - 1) in known:
            continue
        last: tuple[Id, ...] = ()
        for number in range(len(rounds)):
            observed = []
            for tensor in census.tensors:
                name, elements = tensor.name, tensor.elements
                earlier = tuple(c for c in before[name, census.model] if c[0] < census.position)
                needs = (*last, *(conclusion for _, conclusion in earlier))
                observed.append(("observe", place, number, name))
                yield Observe(observed[-1], needs, 0, elements, place, number, name, earlier)
            concluded = conclusion_id(census, number)
            yield Conclude(concluded, (*last, *observed), 0, 0, place, number)
            last = (concluded,)


def repeat_conclusion(plan: Plan, step: Conclude, known: Results) -> dict[Id, Any]:
    """Return the conclusion of a round that need not be computed, by its id; else nothing."""
    census = plan.censuses[step.census]
    before = _conclusion_before(census, step.round, known)
    return {} if census.rounds[step.round].when(before) else {step.id: before}


def conclusions_of(plan: Plan) -> Conclusions:
    """Return the last conclusion for each stage that has a census."""
    conclusions: Conclusions = defaultdict(list)
    for census in plan.censuses:
        for tensor in census.tensors:
            place = census.position, conclusion_id(census, len(census.rounds) - 1)
            conclusions[tensor.name, census.model].append(place)
    return conclusions


def list_surveys(
    tensor: TensorPlan, conclusions: Conclusions, group: int, *, reads: bool = True
) -> Iterator[Survey]:
    """List the surveys of one tensor: of each model, then of all.

    They go into one batch if the processor need not read anything for them.
    """
    name, elements = tensor.name, tensor.elements if reads else 0
    surveys: list[Id] = []
    for model in tensor.models:
        if tensor.surveyed_stages(model):
            concluded = tuple(conclusions[tensor.key, model])
            needs = tuple(conclusion for _, conclusion in concluded)
            surveys.append(survey_id(tensor, model))
            yield Survey(surveys[-1], needs, group, elements, name, model, concluded)
    if tensor.joint_reads:
        yield Survey(survey_id(tensor), tuple(surveys), group, elements, name, None)


def _making(
    plan: Plan, tensor: TensorPlan, chunks: Sequence[int], needs: tuple[Id, ...], group: int
) -> Iterator[Make]:
    name, elements, together = tensor.name, tensor.elements, plan.chunks_together(tensor)
    if isinstance(chunks, range):  # of maybe millions
        chunks = range(chunks.start - chunks.start % together, chunks.stop, together)
    for chunk in dict.fromkeys(chunk - chunk % together for chunk in chunks):
        size = chunk_span(chunk, elements, together)[1]
        yield Make(("make", name, chunk), needs, group, size, name, chunk)


# ---------------------------------------------------------------- doing the steps


@dataclass
class Batch:
    """Chunks to be made together; those that follow each other in a tensor are one step of it."""

    steps: list[Make] = field(default_factory=list)
    count: int = 0  # of the steps that they were


Progress = Callable[[int], None]  # called with the number of bytes that were just read
# Makes chunks, puts them away, and returns their records in order.
Coder = Callable[[Sequence[Chunk]], list[Record]]
MakeCoder = Callable[[Plan, Backend, Any], Coder]  # the last is a sink


class Stopped(Exception):  # noqa: N818
    """Another thread has failed, or the user has interrupted: stop silently."""


def sources_of(plan: Plan, tensor: TensorPlan, models: Iterable[int]) -> list[Source]:
    """Return the sources of a tensor: the base, then some of the models."""
    return [plan.base_of(tensor), *(plan.source_of(tensor, model) for model in models)]


class Worker:
    """Does the steps of a plan with its own backend; the inputs must be open."""

    def __init__(
        self, plan: Plan, backend: Backend, coder: Coder, progress: Progress, stop: threading.Event
    ) -> None:
        self._plan = plan
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._backend = backend
        self._coder = coder
        self._progress = progress
        self._stop = stop

    def prefetch(self, step: Step) -> None:
        """Ask for the bytes of a chunk; for steps that read whole tensors the system does it."""
        if isinstance(step, Make) and not self._plan.is_held:
            tensor = self._tensors[step.tensor]
            for source in sources_of(self._plan, tensor, tensor.models):
                source.prefetch(tensor.name, *chunk_span(step.chunk, tensor.elements))

    def do(self, steps: Sequence[Step], results: Results) -> Iterator[Any]:
        """Do steps: yield records of what was written, or what other steps need."""
        surveys = (step for step in steps if isinstance(step, Survey))
        self._backend.find_cuts(
            [(self._tensors[s.tensor], s.model) for s in surveys if s.model is not None]
        )
        for work in self._batches(steps):
            match work:
                case Batch(steps=batch, count=number):
                    yield self._coder(list(self._read_batch(batch, results)))
                    yield from ([] for _ in range(number - 1))  # records came with the first step
                case Make() as step:
                    assert isinstance(self._coder, Recoder)  # as the output has another format
                    read = partial(self._read_made, step, results)
                    yield self._coder.store(self._tensors[step.tensor], step.chunk, read)
                case Survey(tensor=name, model=None):
                    yield self._survey_all(self._tensors[name], results)
                case Survey(tensor=name, model=int(model), conclusions=conclusions):
                    yield self._survey(self._tensors[name], model, conclusions, results)
                case Observe() as step:
                    yield self._observe(step, results)
                case Conclude() as step:
                    yield self._conclude(step, results)
                case step:
                    raise TypeError(f"{step!r} is not a step of a merge")

    # ------------------------------------------------------------ whole models and tensors

    def _observe(self, step: Observe, results: Results) -> Any:
        census = self._plan.censuses[step.census]
        tensor, model, position = self._tensors[step.tensor], census.model, census.position
        asked, known = census.rounds[step.round], _conclusion_before(census, step.round, results)
        if not asked.when(known):
            return None
        summaries = self._survey(tensor, model, step.conclusions, results, before=position)
        view = self._view(tensor, model, Place(position, summaries))
        return asked.observe(view, known, **census.settings)

    def _conclude(self, step: Conclude, results: Results) -> Any:
        census = self._plan.censuses[step.census]
        asked, known = census.rounds[step.round], _conclusion_before(census, step.round, results)
        if not asked.when(known):
            return known
        names = [tensor.name for tensor in census.tensors]
        observed = {name: results["observe", step.census, step.round, name] for name in names}
        return asked.conclude(observed, known, **census.settings)

    def _survey(
        self,
        tensor: TensorPlan,
        model: int,
        conclusions: Sequence[tuple[int, Id]],
        results: Results,
        before: int | None = None,
    ) -> Summaries:
        """Return the findings of the surveying stages of a chain, in order, up to a position."""
        concluded = {position: results[id_][tensor.key] for position, id_ in conclusions}
        summaries: dict[int, Any] = {}
        for position in tensor.surveyed_stages(model):
            if before is not None and position >= before:
                break
            survey = tensor.stages[position].survey
            assert survey is not None  # surveyed_stages returns only such stages
            place = Place(position, summaries, concluded.get(position))
            view = self._view(tensor, model, place)
            summaries[position] = survey(view, **tensor.settings_of(model)[position])
        return summaries

    def _view(self, tensor: TensorPlan, model: int, place: Place) -> DeltaView:
        read = partial(self._read, tensor, [model], {})
        sample = partial(self._read_sample, tensor, model)
        return self._backend.view(read, sample, tensor, model, place)

    def _survey_all(self, tensor: TensorPlan, results: Results) -> Any:
        """Return the finding of the combine stage, or the result of the refine stages."""
        combine, summary = tensor.combine_stage, None
        read = partial(self._read, tensor, tensor.models, _summaries_of(tensor, results))
        if combine.survey is not None and tensor.combine_surveys:
            view = self._backend.joint_view(read, tensor)
            if tensor.input_axis is not None:
                view.grams = Grams(tensor.input_axis, partial(self._plan.grams_of, tensor))
            summary = combine.survey(view, **tensor.combine)
        if not tensor.refine_stages:
            return summary

        def chunks() -> Iterator[Chunk]:
            return (chunk._replace(summary=summary) for chunk in read())

        view = self._backend.joint_view(chunks, tensor)
        return refine(view, partial(combine.apply, **tensor.combine), tensor.refine_stages)

    def _read(
        self,
        tensor: TensorPlan,
        models: Sequence[int],
        summaries: Mapping[int, Summaries],
        start: int = 0,
        count: int | None = None,
        place: int = 0,
        *,
        leaves: bool = False,
    ) -> Iterator[Chunk]:
        """Read the base and some models chunk by chunk, unless the work must stop.

        `place` is a position in the buffers, in elements of the widest type. What a GPU has is left
        there if `leaves` says so.
        """
        sources = sources_of(self._plan, tensor, models)
        at_once = self._backend.batch_elements if _are_plain(sources) else CHUNK
        rows = self._backend.inputs[:, place * self._plan.cost.widest :]
        buffers = [rows[row] for row in (0, *(1 + m for m in models))]
        for first, raws in read_chunks(
            *(sources, tensor.name, start, count),
            buffers=buffers,
            base_first=True,
            at_once=at_once,
            together=count or CHUNK,
            leaves=leaves,
        ):
            base, *tuned = raws
            if self._stop.is_set():
                raise Stopped
            self._progress(sum(bytes_for(s, tensor.name, base.size) for s in sources))
            rooms = zip(buffers if leaves else (), raws, strict=leaves)
            yield Chunk(
                *(tensor, first, base, dict(zip(models, tuned, strict=True)), summaries),
                rooms=[buffer[: raw.nbytes].view(raw.dtype) for buffer, raw in rooms],
            )

    def _read_sample(self, tensor: TensorPlan, model: int) -> Chunk | None:
        """Read pieces from all over a tensor as if they followed each other; not from a store."""
        sources = sources_of(self._plan, tensor, [model])
        if any(source.cost.ahead_bytes for source in sources):
            return None
        size = min(SAMPLE_ELEMENTS, tensor.elements // SAMPLE_PART) // SAMPLE_PIECES
        step, width = tensor.elements // SAMPLE_PIECES, size * self._plan.cost.widest

        def read(source: Source, row: Bytes) -> NDArray[Any]:
            rooms = enumerate(row[: SAMPLE_PIECES * width].reshape(SAMPLE_PIECES, -1))
            pieces = [read_stored(source, tensor.name, n * step, size, room) for n, room in rooms]
            return np.concatenate(pieces)

        base, tuned = map(read, sources, (self._backend.inputs[row] for row in (0, 1 + model)))
        return Chunk(tensor, 0, base, {model: tuned}, {})

    def _read_batch(self, steps: Sequence[Make], results: Results) -> Iterator[Chunk]:
        """Read the chunks of a batch, each to its own place in the buffers."""
        place = 0
        for step in steps:
            yield from self._read_made(step, results, place)
            place = _place_after(place, step)

    def _read_made(self, step: Make, results: Results, place: int = 0) -> Iterator[Chunk]:
        """Read what a step makes; a stretch goes to one place, some chunks at a time."""
        tensor = self._tensors[step.tensor]
        held = [s.held(tensor.name) for s in sources_of(self._plan, tensor, tensor.models)]
        on_gpu = self._plan.on_gpu(tensor, tensor.models)
        read = partial(self._read, leaves=bool(on_gpu) and None in held)
        span = step.chunk * CHUNK, step.elements, place
        for chunk in read(tensor, tensor.models, _summaries_of(tensor, results), *span):
            first, end = chunk.number, chunk.number + chunk_count(chunk.size)
            known = [each.digests[first:end] if each else [] for each in held]
            there = [each[chunk.start :].address for each in on_gpu]
            summary = results.get(survey_id(tensor))
            yield chunk._replace(summary=summary, known=known, there=there)

    def _batches(self, steps: Sequence[Step]) -> Iterator[Batch | Step]:
        """Yield steps one by one, but chunks in batches of as many as the buffers have room for."""
        batch = Batch()
        place = 0  # where the last step of the batch begins in the buffers
        for step in steps:
            if not isinstance(step, Make) or isinstance(self._coder, Recoder):
                if batch.count:
                    yield batch
                    batch = Batch()
                yield step
                continue
            last = batch.steps[-1] if batch.count else None
            if last and self._follows(step, last, place):
                batch.steps[-1] = replace(last, elements=last.elements + step.elements)
            else:
                place = _place_after(place, last) if last else 0
                if last and place + step.elements > self._backend.batch_elements:
                    yield batch
                    batch, place = Batch(), 0
                batch.steps.append(step)
            batch.count += 1
        if batch.count:
            yield batch

    def _follows(self, step: Make, last: Make, place: int) -> bool:
        """Tell if a chunk can be read with those before it; some sources have room for one."""
        tensor, end = self._tensors[step.tensor], last.chunk * CHUNK + last.elements
        return (
            (step.tensor, step.chunk * CHUNK) == (last.tensor, end)
            and place + last.elements + step.elements <= self._backend.batch_elements
            and _are_plain(sources_of(self._plan, tensor, tensor.models))
        )


def _place_after(place: int, step: Make) -> int:
    """Return the next place in the buffers: on a page, with a page between it and the last step."""
    return (-(-(place + step.elements) // ALIGNMENT) + 1) * ALIGNMENT


def _are_plain(sources: Iterable[Source]) -> bool:
    """Tell if no source needs memory of its own for the chunk that is read, as LoRAs do."""
    return not any(source.cost.reading_bytes for source in sources)


class Merger:
    """The coder of a merge: merges chunks into their place in the output, or writes them there."""

    def __init__(self, plan: Plan, backend: Backend, sink: Sink, *, figures: bool = True) -> None:
        self._plan = plan
        self._backend = backend
        self._sink = sink
        self._figures = figures  # whether each chunk has a record, with the models' figures

    def __call__(self, batch: Sequence[Chunk]) -> list[Record]:
        rooms = list(self._rooms(batch))
        made = self._backend.merge([(chunk, room) for chunk, room, _ in rooms])
        for each in made:
            self._check(each)
        on_gpu: list[tuple[str, int]] = []
        for chunk, room, is_in_place in rooms:
            place = chunk.tensor.name, chunk.start * chunk.tensor.dtype.itemsize
            if room.on_gpu is not None:
                on_gpu.append(place)
            elif not is_in_place:
                self._sink.write(*place, room.raw)
        self._sink.take_from_gpu(on_gpu)
        if not self._figures:
            return [each.summed_up() for each in made]
        return [record for each in made for record in each.records()]

    def _check(self, made: Made) -> None:
        """Refuse results that are not finite, and copies that differ from the base."""
        chunk, tensor = made.chunk, made.chunk.tensor
        if (
            made.exceptions
            and not self._plan.recipe.allow_not_finite
            and any(is_suspect(each.models, each.exceptions) for each in made.records())
        ):
            exceptions = list(map(sum, zip(*made.exceptions, strict=True)))
            check_chunk(self._plan, tensor, chunk.base, chunk.tuned, exceptions)
        for place, model in enumerate(() if tensor.is_merged else tensor.models, start=1):
            if made.inputs[place] != made.inputs[0]:
                whose = f"{tensor.base.dtype.name} values of {self._plan.model_names[model]}"
                raise MismatchError(
                    f"{tensor.name}: the {whose} differ from the base's and cannot be merged; set "
                    'on_integer_mismatch = "base" (--on-integer-mismatch base) to keep the base\'s'
                )

    def _rooms(self, batch: Sequence[Chunk]) -> Iterator[tuple[Chunk, Room, bool]]:
        """Yield chunks with their place in the output (True), or in a buffer to be written.

        In the buffer a chunk begins at the same place in a page as in the file, for direct writes.
        """
        used, gpu = 0, self._backend.gpu
        for chunk in batch:
            name, width = chunk.tensor.name, chunk.tensor.dtype.itemsize
            offset, nbytes = chunk.start * width, chunk.size * width
            place = self._sink.place(name, offset, nbytes)
            if place is not None:
                yield chunk, Room(place), True
                continue
            used += (self._sink.position(name, offset) - used) % ALIGNMENT
            room = self._backend.output[used : used + nbytes]
            there = None if gpu is None else self._sink.place_on_gpu(gpu, name, offset, nbytes)
            yield chunk, Room(room, there), False
            used += nbytes


class Recoder(Merger):
    """The coder of a merge into another format: merges a stretch of chunks as it is stored."""

    def store(
        self, tensor: TensorPlan, first: int, read_inputs: Callable[[], Iterator[Chunk]]
    ) -> list[Record]:
        """Store the stretch that begins with a chunk; the format may have it merged again."""
        recoding, made = self._plan.recoding, list[Record]()
        assert recoding is not None
        stored: dict[str, tuple[int, int, Any]] = {}

        def merge() -> Iterator[Raw]:
            is_repeat = bool(made)  # then the records would be the same again
            for chunk in read_inputs():
                room = self._backend.output[: chunk.size * tensor.dtype.itemsize]
                for part in self._backend.merge([(chunk, Room(room))]):
                    self._check(part)
                    if not is_repeat:
                        made.extend(part.records())
                yield room.view(tensor.dtype.carrier)

        def read(size: int) -> Iterator[tuple[int, Raw]]:
            place = first * CHUNK
            for piece in in_pieces(merge(), size):
                yield place, piece
                place += piece.size

        def put(name: str, start: int, data: Bytes) -> None:
            begin, nbytes, digest = stored.get(name) or (start, 0, running_digest())
            digest.update(data.data)
            stored[name] = begin, nbytes + data.size, digest
            self._sink.write(name, start, data)

        meter = recoding.encode(tensor.described, read, put)
        if not made:  # there is no such tensor in the format
            deque(merge(), maxlen=0)
        head, *others = made
        parts = tuple((n, begin, size, d.hexdigest()) for n, (begin, size, d) in stored.items())
        return [replace(head, stored=parts, sums=meter.sums if meter else ()), *others]


def _conclusion_before(census: CensusPlan, number: int, results: Results) -> Any:
    """Return the conclusion of the round before; None for the first round."""
    return results[conclusion_id(census, number - 1)] if number else None


def _summaries_of(tensor: TensorPlan, results: Results) -> dict[int, Summaries]:
    """Return the findings of the surveys of each model."""
    return {model: results.get(survey_id(tensor, model), {}) for model in tensor.models}
