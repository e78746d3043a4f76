"""The work of a plan as a list of steps: plain data, which any thread, process or machine can do.

    observe (a tensor, for a stage that asks about all tensors of a model) → conclude
      → survey (a tensor of one model) → survey all (a tensor of all models) → merge (a chunk)
    copy (a chunk)

A step names the tensor it is for, and by id the results that it needs. Merges and copies write
their bytes and return a record; the results of the others are passed on. The order of the list
only serves speed: bytes depend on the plan and the inputs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dare.planning.data import CensusPlan, Fate, TensorPlan
from dare.planning.plan import Plan
from dare.planning.slices import Share
from dare.run.threads import Id, Step
from dare.tensors.chunks import chunk_span


@dataclass(frozen=True, slots=True)
class Observe(Step):
    """Observe one tensor for a stage that asks about all tensors of a model."""

    census: int
    """The place of the stage's request in the plan's `censuses`."""
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
    """Let the surveying stages of one model's chain see one tensor."""

    tensor: str
    model: int
    conclusions: tuple[tuple[int, Id], ...]


@dataclass(frozen=True, slots=True)
class SurveyAll(Step):
    """Let the combine stage see all models' deltas of one tensor."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Merge(Step):
    """Merge one chunk of a tensor."""

    tensor: str
    chunk: int


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """Copy one chunk of a tensor from the base, comparing the models' copies if asked."""

    tensor: str
    chunk: int


def survey_id(tensor: TensorPlan, model: int) -> Id:
    """Return the id of a survey."""
    return "survey", tensor.name, model


def survey_all_id(tensor: TensorPlan) -> Id:
    """Return the id of a combine stage's survey."""
    return "survey all", tensor.name


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
    for group, tensor in enumerate(plan.tensors, start=1):
        to_make = range(tensor.chunks) if share is None else share.get(tensor.name, ())
        chunks = [c for c in to_make if (tensor.name, c) not in done]
        if tensor.fate is Fate.MERGED:
            steps += _merging(plan, tensor, chunks, conclusions, group)
        else:
            name, elements = tensor.name, tensor.elements
            place = group if is_sent else 0
            (steps if is_sent else copies).extend(
                Copy(("copy", name, c), (), place, chunk_span(c, elements)[1], name, c)
                for c in chunks
            )
    is_merged = any(not isinstance(step, Copy) for step in steps)
    return [*copies, *(list_census_steps(plan, known) if is_merged else ()), *steps]


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


def _conclusions(plan: Plan) -> dict[tuple[str, int], list[tuple[int, Id]]]:
    """Return the last conclusion for each stage that has a census, by tensor and model."""
    conclusions: dict[tuple[str, int], list[tuple[int, Id]]] = defaultdict(list)
    for census in plan.censuses:
        last = len(plan.stages[census.position].rounds(census.settings)) - 1
        for tensor in census.tensors:
            place = census.position, conclusion_id(census, last)
            conclusions[tensor.name, census.model].append(place)
    return conclusions


def _merging(
    plan: Plan,
    tensor: TensorPlan,
    chunks: list[int],
    conclusions: dict[tuple[str, int], list[tuple[int, Id]]],
    group: int,
) -> Iterator[Step]:
    """List the steps of one tensor, if it has chunks to be merged."""
    if not chunks:
        return
    surveys: list[Id] = []
    for model in tensor.models:
        if tensor.surveyed_stages(plan.stages, model):
            concluded = tuple(conclusions[tensor.key, model])
            needs = tuple(conclusion for _, conclusion in concluded)
            surveys.append(survey_id(tensor, model))
            found = surveys[-1], needs, group, tensor.elements
            yield Survey(*found, tensor.name, model, concluded)
    if plan.combine.surveys(tensor.combine):
        yield SurveyAll(survey_all_id(tensor), tuple(surveys), group, tensor.elements, tensor.name)
        surveys.append(survey_all_id(tensor))
    needs, name, elements = tuple(surveys), tensor.name, tensor.elements
    for chunk in chunks:  # millions of them, in a large model
        size = chunk_span(chunk, elements)[1]
        yield Merge(("merge", name, chunk), needs, group, size, name, chunk)
