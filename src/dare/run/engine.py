"""A plan is run into a sink, and a receipt says what was done.

There is one `run`, for everything that writes a model: a merge, a slice of it, a delta file, a
restored model, an adapter. It refuses outputs that must not be written, continues an earlier try,
has the work done with a progress bar, puts the last files beside the weights and gives the output
its name. Only the `Work` differs: its identity, its sink, what is done to chunks, and its receipt.

`execute` carries out a plan with the threads of this process.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Generic, TypeVar

from dare.checks.inputs import check_chunks, is_suspect
from dare.documents.notices import LEFTOVERS, Notice, notice
from dare.documents.shown import Display, Meter, show_progress
from dare.errors import OutputError, RecipeError, warn_caller
from dare.inputs.sources import Source, hold_open, read_chunks
from dare.kernels.linalg import one_blas_thread
from dare.output.hub import HubPublisher
from dare.output.journal import JournalContent, Record
from dare.output.output import Identity, Output, Publisher, SoleWriter
from dare.output.sink import FileSink, Metadata, Sink
from dare.output.store import StorePublisher
from dare.planning.data import Layout
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
    Recoder,
    Worker,
    list_census_steps,
    list_steps,
    sources_of,
)
from dare.tensors.chunks import CHUNK, bytes_digest, chunk_span
from dare.tensors.system import keep_freed_memory

R = TypeVar("R")


@dataclass(frozen=True)
class Receipt(Generic[R]):
    """The end of a run: the report for the user, and the remaining files of the output."""

    report: R
    metadata: Metadata = field(default_factory=dict)  # of each file of weights
    manifest: Mapping[str, Any] | None = None  # None if there is nothing to publish yet
    files: Mapping[str, bytes | Path] = field(default_factory=dict)  # beside the weights
    whole: bool = True  # True if the manifest has digests of whole files, not of headers


class Work(Generic[R]):
    """Something to make, and everything that distinguishes one kind of it from another."""

    verb = "merging"
    can_be_sent = False  # True if it may be made in a store
    discards = False  # True if the next try cannot use an incomplete output
    writer = SoleWriter()  # the part of this process in the output

    def __init__(self, plan: Plan, layout: Layout, *fingerprint: str) -> None:
        self.plan = plan
        self.layout = layout
        self.identity = Identity(":".join(fingerprint) or plan.fingerprint, plan.stamps)

    @property
    def inputs(self) -> Iterable[Path]:
        """The files that are read."""
        return self.plan.input_files

    @property
    def nbytes(self) -> int:
        """The bytes that are read, for the progress bar."""
        return self.plan.cost.bytes_read

    @property
    def verbose(self) -> bool:
        """True if progress and warnings are shown."""
        return self.plan.options.verbose

    def recognise(self, found: JournalContent) -> R | None:  # noqa: ARG002
        """Return the report, if this same work was complete when its process died."""
        return None

    def prepare(self) -> None:
        """Do what must succeed before anything is written."""

    def make_sink(self, publisher: Publisher) -> FileSink:
        """Return the places for its bytes."""
        return publisher.make_sink({})

    def carry_out(self) -> Sequence[Record]:
        """Make all chunks that are not done."""
        return self.execute()

    def conclude(self, records: Sequence[Record]) -> Receipt[R]:
        """Return the receipt for what was made."""
        raise NotImplementedError

    def end(self, report: R, problems: Sequence[str]) -> R:  # noqa: ARG002
        """Return the report of an output that is published, with later problems."""
        return report

    # ------------------------------------------------------------ while it is carried out

    def start(self, output: Output, display: Display, started: float) -> None:
        """Keep the output under way, and the display of its progress."""
        self.output = output
        self.meter = Meter(display)
        self.noticed: list[Notice] = []
        self._display = display
        self._started = started
        output.sink.announce = display.announce

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self._started

    def announce(self, text: str) -> None:
        """Show a line."""
        self._display.announce(text)

    def take_over(self) -> None:
        """Continue an earlier try, if it was made from these inputs; say what is not used."""
        plan, output = self.plan, self.output
        if output.started_over:
            self.noticed.append(notice(LEFTOVERS, str(output.folder), what=output.started_over))
            warn(plan, self.noticed)
        if output.doubtful:
            self.announce("comparing the inputs with those of the earlier run")
            output.confirm(_made_of_same(plan, output.doubtful))
        suspects = [r for r in output.resumed if is_suspect(r.models, r.exceptions)]
        check_chunks(plan, [(r.tensor, r.chunk, r.exceptions) for r in suspects])
        elements = {tensor.name: tensor.elements for tensor in plan.tensors}
        done = sum(chunk_span(r.chunk, elements[r.tensor])[1] for r in output.resumed)
        self._display.advance(plan.cost.bytes_read * done // max(sum(elements.values()), 1))

    def execute(self, **how: Any) -> list[Record]:
        """Carry out the plan into the output, except for chunks that are done."""
        how = {"progress": self.meter.advance, "record": self.output.record} | how
        return execute(self.plan, self.output.sink, done=self.output.resumed, **how)


def publisher_of(layout: Layout) -> Publisher:
    """Return the publisher of an output: on this machine, in a store, or on the hub."""
    stored = HubPublisher if layout.is_on_hub else StorePublisher
    return stored(layout) if layout.is_sent else Publisher(layout)


def run(
    work: Work[R],
    *,
    overwrite: bool = False,
    resume: bool = True,
    before: Callable[[], None] = lambda: None,
) -> R:
    """Make an output; refuse one that is an input, or exists and does not belong to this work.

    If this same work was complete when its process died, return its report. `before` is called
    after all checks, before anything is made.
    """
    layout, publisher = work.layout, publisher_of(work.layout)
    if layout.is_sent and not work.can_be_sent:
        raise OutputError(
            f"{layout.target}: only a merge can go to a store; choose a path on this machine"
        )
    found = publisher.finished_before()
    report = work.recognise(found) if resume and found is not None else None
    publisher.clear_leftovers(finished=found is not None)
    if report is None:
        publisher.check(work.inputs, overwrite=overwrite)
    before()
    return report or perform(work, overwrite=overwrite, resume=resume)


def perform(work: Work[R], *, overwrite: bool = False, resume: bool = True) -> R:
    """Make an output whose place was checked."""
    started = time.perf_counter()
    work.prepare()
    with (
        open_output(work, overwrite=overwrite, resume=resume) as output,
        show_progress(work.nbytes, work.verb, visible=work.verbose) as display,
    ):
        work.start(output, display, started)
        work.take_over()
        receipt = work.conclude(work.carry_out())
        if receipt.manifest is None:
            return receipt.report
        output.add_files(receipt.files)
        problems = output.finish(receipt.metadata, receipt.manifest, whole=receipt.whole)
    return work.end(receipt.report, problems)


def open_output(work: Work[Any], *, overwrite: bool = False, resume: bool = True) -> Output:
    """Return the output of a work: its sink, its journal and its publisher."""
    publisher = publisher_of(work.layout)
    return Output(
        work.make_sink(publisher),
        publisher,
        work.identity,
        resume=resume and not work.discards,
        overwrite=overwrite,
        writer=work.writer,
        discards=work.discards,
    )


def warn(plan: Plan, notices: Iterable[Notice]) -> None:
    """Show notices as warnings of the caller, unless the run is silent."""
    if plan.options.verbose:
        for found in dict.fromkeys(notices):
            warn_caller(str(found))


def _made_of_same(plan: Plan, records: Sequence[Record]) -> list[Record]:
    """Keep the chunks of an earlier try whose inputs have other stamps but the same content.

    A tensor that was surveyed as a whole counts only if all of it is the same.
    """
    tensors = {tensor.name: tensor for tensor in plan.tensors}

    def is_same(record: Record) -> bool:
        tensor = tensors[record.tensor]
        sources = sources_of(plan, tensor, tensor.models)
        span = chunk_span(record.chunk, tensor.elements)
        ((_, stored),) = read_chunks(sources, tensor.name, *span, base_first=True)
        return record.inputs == tuple(bytes_digest(raw.data) for raw in stored)

    with hold_open(plan.sources), ThreadPoolExecutor(plan.cost.threads) as pool:
        same = list(itertools.compress(records, pool.map(is_same, records)))
    chunks = Counter(record.tensor for record in same)
    whole = {name for name, count in chunks.items() if count == tensors[name].chunks}
    if plan.censuses and len(whole) < len(tensors):
        same = [record for record in same if not tensors[record.tensor].is_merged]
    return [r for r in same if r.tensor in whole or not plan.is_surveyed(tensors[r.tensor])]


# ---------------------------------------------------------------- the threads of this process


def execute(
    plan: Plan,
    sink: Sink,
    *,
    done: Sequence[Record] = (),
    record: Callable[[Sequence[Record]], None] = lambda _records: None,
    progress: Progress = lambda _nbytes: None,
    known: Results | None = None,
    share: Share | None = None,
    make_coder: MakeCoder | None = None,
) -> list[Record]:
    """Merge all chunks that are not `done` into the sink; return the records of all chunks.

    `record` gets the records of each batch. `known` are the conclusions of a larger plan that this
    one is part of; without it they are drawn here. With a `share`, only its chunks are merged.
    `make_coder` makes the coder of chunks; by default they are stored as the plan's layout says.
    """
    if plan.options.cluster is not None:
        what = "only merges of files into files run on a cluster; leave cluster out here"
        raise RecipeError(f'cluster = "{plan.options.cluster}": {what}')
    records = list(done)

    def collect(steps: Sequence[Step], results: Sequence[Any]) -> None:
        pairs = zip(steps, results, strict=True)
        if made := [each for step, found in pairs if isinstance(step, Make) for each in found]:
            record(made)
            records.extend(made)

    finished = {found.key for found in done}
    steps = list_steps(plan, finished, known or (), share)
    coder = make_coder or (Merger if plan.recoding is None else Recoder)
    _run_steps(plan, steps, sink, progress, known or {}, collect, coder)
    return records


def draw_conclusions(plan: Plan) -> Results:
    """Observe all tensors for stages that need it, so that parts of the plan can be run."""
    return do_census_steps(plan, list_census_steps(plan), {}, kind=Conclude)


def do_census_steps(
    plan: Plan,
    steps: Iterable[Step],
    known: Results,
    *,
    kind: type[Step] = Step,
    progress: Progress = lambda _nbytes: None,
) -> dict[Id, Any]:
    """Observe tensors or draw conclusions; return the results of one kind of steps, or of all."""
    kept: dict[Id, Any] = {}

    def collect(steps: Sequence[Step], results: Sequence[Any]) -> None:
        pairs = zip(steps, results, strict=True)
        kept.update((step.id, result) for step, result in pairs if isinstance(step, kind))

    _run_steps(plan, steps, Sink(), progress, known, collect)
    return kept


def _run_steps(
    plan: Plan,
    steps: Iterable[Step],
    sink: Sink,
    progress: Progress,
    known: Results,
    collect: Callable[[Sequence[Step], Sequence[Any]], None],
    make_coder: MakeCoder = Merger,
) -> None:
    def make_worker(stop: Event) -> Worker:
        backend = open_backend(plan)
        return Worker(plan, backend, make_coder(plan, backend, sink), progress, stop)

    holds_matrices = plan.cost.matrix_bytes > 0
    with open_for_threads(plan.sources, uses_blas=holds_matrices):
        run_steps(
            list(steps),
            make_worker,
            plan.cost.threads,
            batch_elements=CHUNK * plan.cost.chunks_at_once,
            known=known,
            collect=collect,
            one_group=holds_matrices,
            ends_together=plan.cost.threads > 1 or not plan.is_held,
        )


@contextmanager
def open_for_threads(sources: Sequence[Source], *, uses_blas: bool) -> Iterator[None]:
    """Hold inputs open while threads read them, for a merge or an analysis.

    At the end, refuse inputs that have changed meanwhile.
    """
    keep_freed_memory()
    with one_blas_thread() if uses_blas else nullcontext(), hold_open(sources, checks=True):
        yield
