"""The work of a plan as a list of steps: plain data, which any thread, process or machine can do.

    observe (a tensor, for a stage that asks about all tensors of a model) → conclude
      → survey (a tensor of one model) → survey (a tensor of all models) → make (a chunk)

A step names the tensor it is for, and by id the results that it needs. Chunks that are made are
written, and their results are records; the results of the others are passed on. The order of the
list only serves speed: bytes depend on the plan and the inputs alone.


One worker: reads what a step needs, has it computed, writes the result.

A merge refuses inputs with elements that are not finite, unless the recipe allows them. Finding
them costs nothing: the figures of every chunk hold its largest |δ| and the number of NaN results,
and only where these say so are the stored elements read again. An infinity that a model and the
base share, as in a stored causal mask, is no change and never refused. Overflow of finite inputs
is a warning in the report.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

from dare.checks.inputs import check_chunk, is_suspect
from dare.errors import MismatchError
from dare.inputs.sources import Source, bytes_for, read_chunks
from dare.output.journal import Record
from dare.output.sink import Sink
from dare.planning.data import CensusPlan, TensorPlan
from dare.planning.plan import Plan
from dare.planning.slices import Share
from dare.run.backend import Backend, Bytes, Chunk, Figures, Raw, Summaries
from dare.run.threads import Batch, Id, Results, Step
from dare.stages.blocks import Block, Deltas
from dare.tensors.chunks import CHUNK, chunk_count, chunk_span
from dare.tensors.files import ALIGNMENT

Conclusions = dict[tuple[str, int], list[tuple[int, Id]]]
"""Ids of conclusions with the positions of their stages in the chain, by tensor and model."""


@dataclass(frozen=True, slots=True)
class Observe(Step):
    """Observe one tensor for a stage that asks about all tensors of a model."""

    census: int  # the place of the stage's request in the plan's `censuses`
    round: int
    tensor: str
    conclusions: tuple[tuple[int, Id], ...]
    """The conclusions for earlier stages, by their positions in the chain."""


@dataclass(frozen=True, slots=True)
class Conclude(Step):
    """Draw the conclusion from the observations of a round."""

    census: int
    round: int


@dataclass(frozen=True, slots=True)
class Survey(Step):
    """Let the surveying stages of one model's chain, or the combine stage, see one tensor."""

    tensor: str
    model: int | None  # None for the combine stage, which sees the deltas of all models
    conclusions: tuple[tuple[int, Id], ...] = ()


@dataclass(frozen=True, slots=True)
class Make(Step):
    """Merge one chunk of a tensor; or copy it from the base, comparing the models' if asked."""

    tensor: str
    chunk: int


def survey_id(tensor: TensorPlan, model: int | None = None) -> Id:
    """Return the id of a model's survey, or of the combine stage's."""
    return "survey", tensor.name, model


def conclusion_id(census: CensusPlan, number: int) -> Id:
    """Return the id of a round's conclusion, the same in any plan that has this census."""
    settings = tuple(sorted(census.settings.items()))
    return "conclude", census.model, census.position, settings, number


def list_steps(
    plan: Plan,
    done: Collection[tuple[str, int]] = (),
    known: Collection[Id] = (),
    share: Share | None = None,
) -> list[Step]:
    """List all steps but the chunks that are done and the conclusions that are known.

    With a share, only its chunks are made. Comparisons of integers come first, since they may end
    the merge; but not if the output is sent in parts, which fill in the order of the files.
    """
    conclusions = _conclusions(plan)
    copies: list[Step] = []
    steps: list[Step] = []
    is_sent = plan.layout is not None and plan.layout.is_sent
    merges = False
    for group, tensor in enumerate(plan.tensors, start=1):
        to_make = range(tensor.chunks) if share is None else share.get(tensor.name, ())
        chunks = [c for c in to_make if (tensor.name, c) not in done]
        if not tensor.is_merged:
            (steps if is_sent else copies).extend(_making(tensor, chunks, (), is_sent * group))
        elif chunks:
            merges = True
            surveys = list(_surveying(plan, tensor, conclusions, group))
            needs = tuple(survey.id for survey in surveys)
            steps += [*surveys, *_making(tensor, chunks, needs, group)]
    return [*copies, *(list_census_steps(plan, known) if merges else ()), *steps]


def list_census_steps(plan: Plan, known: Collection[Id] = ()) -> Iterator[Step]:
    """List the steps of all censuses, one after the other, and of each round by round."""
    before = _conclusions(plan)
    for place, census in enumerate(plan.censuses):
        rounds = plan.stages[census.position].rounds(census.settings)
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


def _conclusions(plan: Plan) -> Conclusions:
    """Return the last conclusion for each stage that has a census."""
    conclusions: Conclusions = defaultdict(list)
    for census in plan.censuses:
        last = len(plan.stages[census.position].rounds(census.settings)) - 1
        for tensor in census.tensors:
            place = census.position, conclusion_id(census, last)
            conclusions[tensor.name, census.model].append(place)
    return conclusions


def _surveying(
    plan: Plan, tensor: TensorPlan, conclusions: Conclusions, group: int
) -> Iterator[Survey]:
    name, elements = tensor.name, tensor.elements
    surveys: list[Id] = []
    for model in tensor.models:
        if tensor.surveyed_stages(plan.stages, model):
            concluded = tuple(conclusions[tensor.key, model])
            needs = tuple(conclusion for _, conclusion in concluded)
            surveys.append(survey_id(tensor, model))
            yield Survey(surveys[-1], needs, group, elements, name, model, concluded)
    if plan.combine.surveys(tensor.combine):
        yield Survey(survey_id(tensor), tuple(surveys), group, elements, name, None)


def _making(
    tensor: TensorPlan, chunks: list[int], needs: tuple[Id, ...], group: int
) -> Iterator[Make]:
    name, elements = tensor.name, tensor.elements
    for chunk in chunks:  # millions of them, in a large model
        size = chunk_span(chunk, elements)[1]
        yield Make(("make", name, chunk), needs, group, size, name, chunk)


# ----------------------------------------------------------------


Progress = Callable[[int], None]  # called with the number of bytes that were just read


class Stopped(Exception):  # noqa: N818
    """Another thread has failed, or the user has interrupted: leave without a word."""


def sources_of(plan: Plan, tensor: TensorPlan, models: Iterable[int]) -> list[Source]:
    """Return the sources of a tensor: the base, then some of the models."""
    return [plan.base, *(plan.source_of(tensor, model) for model in models)]


class Worker:
    """Does the steps of a plan with a backend of its own; the inputs must be open."""

    takes_spans = True  # tells that `_code` takes several chunks as one, where the backend does

    def __init__(
        self, plan: Plan, backend: Backend, sink: Sink, progress: Progress, stop: threading.Event
    ) -> None:
        self._plan = plan
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._backend = backend
        self._sink = sink
        self._progress = progress
        self._stop = stop

    def prefetch(self, step: Step) -> None:
        """Ask for the bytes of a chunk; what reads whole tensors is served by the system."""
        if isinstance(step, Make):
            tensor = self._tensors[step.tensor]
            for source in sources_of(self._plan, tensor, tensor.models):
                source.prefetch(tensor.name, *chunk_span(step.chunk, tensor.elements))

    def run_batch(self, batch: Batch[Step]) -> Iterator[Any]:
        """Do steps: yield records of what was written, or what other steps need."""
        results = batch.results
        for steps in _spans(batch.steps, self._backend.chunks_at_once):
            match steps[0]:
                case Make():
                    yield from self._make(cast("Sequence[Make]", steps), results)
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
        observe = self._plan.stages[position].rounds(census.settings)[step.round].observe
        summaries = self._survey(tensor, model, step.conclusions, results, before=position)
        walk = self._walk(tensor, model, summaries, position, None)
        return observe(walk, _conclusion_before(census, step.round, results), **census.settings)

    def _conclude(self, step: Conclude, results: Results) -> Any:
        census = self._plan.censuses[step.census]
        conclude = self._plan.stages[census.position].rounds(census.settings)[step.round].conclude
        names = [tensor.name for tensor in census.tensors]
        observed = {name: results["observe", step.census, step.round, name] for name in names}
        known = _conclusion_before(census, step.round, results)
        return conclude(observed, known, **census.settings)

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
        for position in tensor.surveyed_stages(self._plan.stages, model):
            if before is not None and position >= before:
                break
            survey = self._plan.stages[position].survey
            assert survey is not None  # surveyed_stages has seen to it
            walk = self._walk(tensor, model, summaries, position, concluded.get(position))
            summaries[position] = survey(walk, **tensor.settings_of(model)[position])
        return summaries

    def _walk(
        self, tensor: TensorPlan, model: int, summaries: Summaries, position: int, census: Any
    ) -> _Walk:
        """Return the blocks as they come to a stage, which knows the surveys before it."""

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
        self,
        tensor: TensorPlan,
        models: Sequence[int],
        start: int = 0,
        count: int | None = None,
        together: int = 1,
    ) -> Iterator[Chunk]:
        """Read the base and some models chunk by chunk, unless the work is to stop."""
        sources = sources_of(self._plan, tensor, models)
        is_plain = not any(source.cost.reading_bytes for source in sources)
        for place, (base, *tuned) in read_chunks(
            *(sources, tensor.name, start, count),
            buffers=[self._backend.inputs[row] for row in (0, *(1 + m for m in models))],
            base_first=True,
            at_once=CHUNK * (self._backend.chunks_at_once if is_plain else 1),
            together=CHUNK * together,
        ):
            if self._stop.is_set():
                raise Stopped
            self._progress(sum(bytes_for(s, tensor.name, base.size) for s in sources))
            yield Chunk(tensor, place, base, dict(zip(models, tuned, strict=True)))

    # ------------------------------------------------------------ chunks

    def _make(self, steps: Sequence[Make], results: Results) -> list[Record]:
        """Make the chunks of one tensor that follow each other, and write them together."""
        tensor = self._tensors[steps[0].tensor]
        together = self._backend.chunks_together if self.takes_spans else 1
        start, count = steps[0].chunk * CHUNK, sum(step.elements for step in steps)
        room, is_in_place = self._room(tensor, start, count)
        records: list[Record] = []
        for chunk in self._chunks(tensor, tensor.models, start, count, together):
            first, nbytes = (n * tensor.dtype.itemsize for n in (chunk.start - start, chunk.size))
            records += self._code(chunk, results, room[first : first + nbytes])
        if not is_in_place:
            self._sink.write(tensor.name, start * tensor.dtype.itemsize, room)
        return records

    def _code(self, chunk: Chunk, results: Results, into: Bytes) -> list[Record]:
        """Make the stored bytes of some chunks."""
        tensor = chunk.tensor
        if tensor.is_merged:
            summary = results.get(survey_id(tensor))
            figures = self._backend.merge(chunk, summaries_of(tensor, results), summary, into)
            self._check_finite(chunk, figures)
        else:
            figures = self._backend.convert(chunk, into)
        *inputs, output = self._digests(chunk, into.view(tensor.dtype.carrier))
        if not tensor.is_merged:
            self._check_copies(tensor, inputs)
        return [
            Record(tensor.name, chunk.number + place, of_inputs, made, *found)
            for place, (of_inputs, made, found) in enumerate(
                zip(zip(*inputs, strict=True), output, figures, strict=True)
            )
        ]

    def _digests(self, chunk: Chunk, *others: Raw) -> list[list[str]]:
        """Return the digests of every chunk of base, models and others; some are known."""
        numbers = range(chunk.number, chunk.number + chunk_count(chunk.size))
        known = [
            [] if held is None else [held.digests[number] for number in numbers]
            for source in sources_of(self._plan, chunk.tensor, chunk.tuned)
            for held in [source.held(chunk.tensor.name)]
        ]
        raws = (chunk.base, *chunk.tuned.values(), *others)
        unknown = [raw for raw, digests in zip_longest(raws, known) if not digests]
        found = iter(self._backend.digests(unknown))
        return [digests or next(found) for _, digests in zip_longest(raws, known)]

    def _check_finite(self, chunk: Chunk, figures: Sequence[Figures]) -> None:
        """Refuse inputs that are not finite; their elements are only read if a figure says so."""
        if self._plan.recipe.allow_not_finite or not any(is_suspect(*found) for found in figures):
            return
        nans = sum(found.exceptions[1] for found in figures)
        check_chunk(self._plan, chunk.tensor, chunk.base, chunk.tuned, nans=nans)

    def _check_copies(self, tensor: TensorPlan, digests: Sequence[Sequence[str]]) -> None:
        for model, found in zip(tensor.models, digests[1:], strict=True):
            if found != digests[0]:
                whose = f"{tensor.base.dtype.name} values of {self._plan.model_names[model]}"
                raise MismatchError(
                    f"{tensor.name}: the {whose} differ from the base's and cannot be merged; set "
                    'on_integer_mismatch = "base" to keep the base\'s'
                )

    def _room(self, tensor: TensorPlan, start: int, count: int) -> tuple[Bytes, bool]:
        """Return the output's own place (True), or a buffer that is to be written.

        The buffer begins in its page where the output will in the file, for direct writes.
        """
        offset, nbytes = (n * tensor.dtype.itemsize for n in (start, count))
        place = self._sink.place(tensor.name, offset, nbytes)
        if place is not None:
            return place, True
        alignment = self._sink.position(tensor.name, offset) % ALIGNMENT
        return self._backend.output[alignment : alignment + nbytes], False


def _spans(steps: Sequence[Step], most: int) -> Iterator[Sequence[Step]]:
    """Yield steps one by one, but chunks of one tensor that follow each other together."""
    span: list[Step] = []
    for step in steps:
        if span and (len(span) == most or not _follows(span[-1], step)):
            yield span
            span = []
        span.append(step)
    if span:
        yield span


def _follows(step: Step, after: Step) -> bool:
    if not (isinstance(step, Make) and isinstance(after, Make)):
        return False
    return (after.tensor, after.chunk) == (step.tensor, step.chunk + 1)


def _conclusion_before(census: CensusPlan, number: int, results: Results) -> Any:
    """Return the conclusion of the round before; None for the first round."""
    return results[conclusion_id(census, number - 1)] if number else None


def summaries_of(tensor: TensorPlan, results: Results) -> dict[int, Summaries]:
    """Return the findings of the surveys of each model."""
    return {model: results.get(survey_id(tensor, model), {}) for model in tensor.models}


@dataclass(eq=False)
class _Walk:
    """Blocks of a tensor in order, as often as a survey asks."""

    spare_bytes: int
    shape: tuple[int, ...]
    walk: Callable[[], Iterator[Any]]
    census: Any = None

    def __call__(self) -> Iterator[Any]:
        return self.walk()
