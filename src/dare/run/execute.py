"""Carry a plan out with the threads of this process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any

from dare import kernels
from dare.documents.progress import Display
from dare.errors import RecipeError
from dare.inputs.sources import hold_open, read_chunks
from dare.kernels.linalg import one_blas_thread
from dare.output.journal import Record
from dare.output.writer import ArraySink, PartialOutput, Sink
from dare.planning.plan import Plan
from dare.planning.slices import Share
from dare.run.backend import open_backend
from dare.run.threads import Id, Results, Step, run_steps
from dare.run.worker import (
    Conclude,
    Make,
    MakeCoder,
    Merger,
    Progress,
    Worker,
    list_census_steps,
    list_steps,
    sources_of,
)
from dare.tensors.chunks import CHUNK, bytes_digest, chunk_span


def execute(
    plan: Plan,
    sink: Sink,
    *,
    done: Sequence[Record] = (),
    progress: Progress = lambda _nbytes: None,
    announce: Callable[[], None] = lambda: None,
    known: Results | None = None,
    share: Share | None = None,
    make_coder: MakeCoder = Merger,
) -> list[Record]:
    """Merge what is not `done` yet into the sink; return the records of all chunks.

    `announce` is called if kernels have to be compiled first. `known` are the conclusions of a plan
    that this one is a part of; else they are drawn here. With a `share`, only its chunks are
    merged. `make_coder` makes what codes chunks.
    """
    if plan.recipe.cluster is not None:
        what = "only merges of files into files run on a cluster; leave cluster out here"
        raise RecipeError(f'cluster = "{plan.recipe.cluster}": {what}')
    records = list(done)

    def collect(steps: Sequence[Step], results: Sequence[Any]) -> None:
        pairs = zip(steps, results, strict=True)
        if made := [result for step, result in pairs if isinstance(step, Make)]:
            sink.record(made)
            records.extend(made)

    finished = {(record.tensor, record.chunk) for record in done}
    steps = list_steps(plan, finished, known or (), share)
    _run(plan, steps, sink, progress, announce, known or {}, collect, make_coder)
    return records


def confirm_inputs(plan: Plan, output: PartialOutput, display: Display) -> None:
    """Keep the chunks of an earlier try whose inputs have other stamps and the same content.

    What was surveyed as a whole counts only if all of it is the same.
    """
    if not (records := output.doubtful):
        return
    display.announce("comparing the inputs with those of the earlier run")
    tensors = {tensor.name: tensor for tensor in plan.tensors}

    def is_same(record: Record) -> bool:
        tensor = tensors[record.tensor]
        sources = sources_of(plan, tensor, tensor.models)
        span = chunk_span(record.chunk, tensor.elements)
        ((_, found),) = read_chunks(sources, tensor.name, *span, base_first=True)
        return record.inputs == tuple(bytes_digest(raw.data) for raw in found)

    opened = hold_open((plan.base, *plan.models))
    with opened, ThreadPoolExecutor(plan.cost.threads) as pool:
        same = list(itertools.compress(records, pool.map(is_same, records)))
    chunks = Counter(record.tensor for record in same)
    whole = {name for name, count in chunks.items() if count == tensors[name].chunks}
    if plan.censuses and len(whole) < len(tensors):
        same = [record for record in same if not tensors[record.tensor].is_merged]
    kept = [r for r in same if r.tensor in whole or not plan.is_surveyed(tensors[r.tensor])]
    output.confirm(kept)


def draw_conclusions(plan: Plan) -> Results:
    """Observe all tensors for the stages that ask for it, so that parts of the plan can be run."""
    return do_census_steps(plan, list_census_steps(plan), {}, kind=Conclude)


def do_census_steps(
    plan: Plan,
    steps: Iterable[Step],
    known: Results,
    *,
    kind: type[Step] = Step,
    progress: Progress = lambda _nbytes: None,
    announce: Callable[[], None] = lambda: None,
) -> dict[Id, Any]:
    """Observe tensors or draw conclusions; return the results of one kind of steps, or of all."""
    found: dict[Id, Any] = {}

    def collect(steps: Sequence[Step], results: Sequence[Any]) -> None:
        pairs = zip(steps, results, strict=True)
        found.update((step.id, result) for step, result in pairs if isinstance(step, kind))

    _run(plan, steps, ArraySink(()), progress, announce, known, collect)
    return found


def _run(
    plan: Plan,
    steps: Iterable[Step],
    sink: Sink,
    progress: Progress,
    announce: Callable[[], None],
    known: Results,
    collect: Callable[[Sequence[Step], Sequence[Any]], None],
    make_coder: MakeCoder = Merger,
) -> None:
    def make_worker(stop: Event) -> Worker:
        backend = open_backend(plan)
        return Worker(plan, backend, make_coder(plan, backend, sink), progress, stop)

    holds_matrices = plan.cost.matrix_bytes > 0
    with (
        one_blas_thread() if holds_matrices else nullcontext(),
        hold_open((plan.base, *plan.models), checks=True),
        kernels.load(plan.backend).announcing(announce),
    ):
        run_steps(
            list(steps),
            make_worker,
            plan.cost.threads,
            batch_elements=CHUNK * kernels.DEVICES[plan.backend].chunks_at_once,
            known=known,
            collect=collect,
            groups_ahead=plan.cost.threads if holds_matrices else None,
        )
