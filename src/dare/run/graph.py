"""The work of a plan as a list of steps: plain data, which any thread, process or machine can do.

    observe (a tensor, for a stage that asks about all tensors of a model) → conclude
      → survey (a tensor of one model) → survey (a tensor of all models) → make (a chunk)

A step names the tensor it is for, and by id the results that it needs. Chunks that are made are
written, and their results are records; the results of the others are passed on. The order of the
list only serves speed: bytes depend on the plan and the inputs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dare.planning.data import CensusPlan, TensorPlan
from dare.planning.plan import Plan
from dare.planning.slices import Share
from dare.run.threads import Id, Step
from dare.tensors.chunks import chunk_span

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
