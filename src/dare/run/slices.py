"""An output under way that several processes make together, and the one that finishes it.

Each slice has its own journal in `OUT.partial`, which it locks while it runs. The main journal
names the merge; a slice locks it for a moment to join, and the process that finishes the output
locks it until the output has its name. When all chunks of a slice are written, it syncs the files
and says so in the last line of its journal. The process that finds every slice complete puts the
journals together, checks the chunks that are near those of another slice, and publishes.

Only those are checked because a slice has synced its bytes; a merge by one process does not read
them again either. But a network file system may write whole pages, and with them old bytes of a
neighbour that another machine has written. So chunks that share a page with those of another slice
are hashed again.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dare.documents.document import Document, Tone
from dare.documents.shown import Shown
from dare.documents.words import counted, pace_text
from dare.errors import InputError, MismatchError, OutputError, RecipeError, VerificationError
from dare.output.journal import (
    BusyError,
    Journal,
    JournalContent,
    Key,
    Record,
    SliceFigures,
    SliceState,
    is_complete,
    is_held,
    read_journal,
)
from dare.output.output import Output, Publisher, SoleWriter
from dare.output.receipt import (
    Report,
)
from dare.output.sink import FileSink
from dare.output.targets import (
    JOURNAL_NAME,
    MARK_NAME,
    has_mark,
    slice_journal,
    slice_journals,
)
from dare.planning.plan import Plan
from dare.planning.slices import Division, Share, Slice
from dare.run.engine import Receipt, Work, perform, run
from dare.run.merging import Merge
from dare.tensors.names import some_of
from dare.tensors.system import sync_folder

JOIN_SECONDS = 60.0  # the wait for other slices that join
PROBE_SECONDS = 2.0  # the wait for a slice's own journal, which others probe
LARGEST_PAGE = 1 << 16  # bytes that a file system may write at once, even if it was given fewer
SLICES_SHOWN = 8


@dataclass(frozen=True)
class SliceReport(Shown):
    """The report of one slice of a merge."""

    slice: str
    chunks: int
    resumed_chunks: int
    bytes_read: int
    seconds: float
    unfinished: tuple[int, ...]
    """The numbers of the slices that were not complete when this one was."""
    report: Report | None
    """The whole merge's report, if this slice was the last and published the output."""

    def document(self) -> Document:
        """Return the whole merge's document, if there is one, else the slice's."""
        if self.report is not None:
            return self.report.document()
        waits = f"not done yet: {_first_of(self.unfinished)}; the last one publishes the output"
        return Document(
            title=f"Slice {self.slice} was done in {self.seconds:.1f} s",
            kind="slice",
            tone=Tone.GOOD,
            lead=f"{counted(self.chunks, 'piece')}, "
            + pace_text(self.bytes_read, self.seconds, self.resumed_chunks),
            facts=(
                ("slices", waits if self.unfinished else "another slice has published the output"),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "report": self.report and self.report.to_dict()}


class OneSlice(SoleWriter):
    """The part of a process that makes one slice of an output; call `end` at the end."""

    FATAL = ()  # the work of others stays
    is_shared = True

    def __init__(self, part: Slice, share: Share) -> None:
        self.part = part
        self._share = share
        self._output: Output

    def open_journal(self, output: Output) -> JournalContent:
        """Open the slice's journal, and join the other slices or be the first."""
        self._output = output
        own_name = slice_journal(output.folder, self.part).name
        running = f"slice {self.part} is already running; give each process a different slice"
        with self._joining() as main:
            found = self._join(main)
            journal = output.journal = self._lock_free(own_name, PROBE_SECONDS, running)
        for made in output.made:  # another process may publish, and not know that they are new
            sync_folder(made.parent)
        of_slice = journal.read()
        if of_slice.fingerprint != output.identity.fingerprint:
            journal.start()
        self._known = set(of_slice.records)  # the chunks in its journal
        journal.note_stamps(output.identity.stamps)
        journal.note_synced(slice=str(self.part), started=time.time())
        sync_folder(output.folder)
        return JournalContent(records=found.records | of_slice.records)

    def _joining(self) -> closing[Journal]:
        """Hold the main journal for a moment, so that slices join one after the other."""
        what = "another process is writing this output without slices; wait, or stop it"
        return closing(self._lock_free(JOURNAL_NAME, JOIN_SECONDS, what))

    def _lock_free(self, name: str, wait: float, problem: str) -> Journal:
        try:
            return self._output.lock(name, wait=wait)
        except BusyError:
            raise OutputError(f"{self._output.folder}: {problem}") from None

    def _join(self, main: Journal) -> JournalContent:
        """Check that this slice fits the merge under way; begin one if there is none."""
        folder, (fingerprint, stamps) = self._output.folder, self._output.identity
        found = main.read()
        if found.fingerprint != fingerprint:
            self._begin(main, found)
            return JournalContent()
        if found.stamps != stamps:
            if running := self._running():
                raise InputError(
                    f"{folder}: the inputs are not the files that slice {running[0]} reads; "
                    "all slices must read the same files on a shared file system"
                )
            main.note_stamps(stamps)
        journals = slice_journals(folder)
        if former := [path for part, path in journals.items() if part.count != self.part.count]:
            if running := [part for part in self._running() if part.count != self.part.count]:
                raise OutputError(
                    f"{folder}: this merge is running in {running[0].count} slices "
                    f"({_first_of(running)}); use that number, or stop them first"
                )
            main.absorb(former)
            found = main.read()
            for path in former:
                path.unlink()
        return found

    def _begin(self, main: Journal, found: JournalContent) -> None:
        """Begin this merge as its first slice."""
        output = self._output
        if running := self._running():
            raise OutputError(
                f"{output.folder}: slices of another merge are writing here "
                f"({_first_of(running)}); wait until they are done, or choose another output"
            )
        target = output.sink.layout.target
        if target.exists() and not output.overwrite:
            main.release()
            shutil.rmtree(output.folder)
            raise OutputError(f"{target}: other slices have just published it")
        output.start_over(main, found)
        main.note_stamps(output.identity.stamps)

    def _running(self) -> list[Slice]:
        """Return the other slices that are running."""
        journals = slice_journals(self._output.folder)
        return [part for part, path in journals.items() if part != self.part and is_held(path)]

    def open_files(self, sink: FileSink) -> None:
        """Open the files; make them, unless another slice has."""
        try:
            sink.join()
        except FileNotFoundError:
            sink.close()
            with self._joining():
                sink.make()
            sink.sync()

    def owns(self, record: Record) -> bool:
        return record.chunk in self._share.get(record.tensor, ())

    def adopt(self) -> None:
        """Add chunks of this slice that others have made to its journal."""
        output = self._output
        output.record([r for r in output.resumed if r.key not in self._known])

    def end(self, bytes_read: int) -> None:
        """Sync all chunks, and write that into the journal."""
        output = self._output
        assert output.journal is not None
        with output.explaining():
            output.sink.sync()
            figures = SliceFigures(bytes_read, len(output.resumed))
            output.journal.note_synced(synced=asdict(figures))

    def unfinished(self) -> tuple[int, ...]:
        """Return the slices that are not marked as complete; none if the output is published."""
        numbers = []
        folder = self._output.folder
        adopted: Mapping[str, SliceState] | None = None
        with self._output.explaining(), suppress(FileNotFoundError):  # for the main journal
            for number in range(1, self.part.count + 1):
                part = Slice(number, self.part.count)
                path = slice_journal(folder, part)
                if is_complete(path, self._output.identity.fingerprint):
                    continue
                if not path.exists():  # not begun, or its lines are in the main journal
                    adopted = adopted or read_journal((folder / JOURNAL_NAME).read_bytes()).parts
                    state = adopted.get(str(part))
                    if state is not None and state.synced is not None:
                        continue
                numbers.append(number)
            return tuple(numbers)
        return ()


class GoneError(OutputError):
    """No output is under way there, or it is already published."""


class Finisher(SoleWriter):
    """The part of a process that publishes an output whose chunks slices have made."""

    FATAL = (MismatchError, VerificationError)  # not NotFiniteError: it may be allowed after all
    is_shared = True

    def __init__(self, wait: float = 0) -> None:
        self._wait = wait
        self._found = JournalContent()
        self._sink: FileSink
        self.bytes_read = self.resumed_chunks = 0
        self.seconds = 0.0  # since the first slice started

    def claim(self, folder: Path) -> list[Path]:
        """Check that the folder exists."""
        if not has_mark(folder):
            raise GoneError(f"{folder}: does not exist, so there is nothing to finish")
        return []

    def open_journal(self, output: Output) -> JournalContent:
        """Open the main journal, and read those of all slices."""
        folder, fingerprint = output.folder, output.identity.fingerprint
        try:
            path = folder / JOURNAL_NAME
            output.journal = Journal(path, fingerprint, create=False, wait=self._wait)
        except FileNotFoundError:
            raise GoneError(f"{folder}: has no journal, so there is nothing to finish") from None
        output.refuse_beside_slices(self._wait)  # a complete slice will soon close its journal
        found = self._found = output.journal.read()
        if found.fingerprint != fingerprint:
            raise OutputError(
                f"{folder}: {found.origin}; finish it with the recipe and the version "
                "that started it, or delete the folder"
            )
        for file in slice_journals(folder).values():
            found.add(read_journal(file.read_bytes()))
        accounts = [p.synced for p in found.parts.values() if p.synced is not None]
        self.bytes_read = sum(account.bytes_read for account in accounts)
        self.resumed_chunks = sum(account.resumed_chunks for account in accounts)
        now = time.time()
        self.seconds = now - min((p.started for p in found.parts.values()), default=now)
        return found

    def open_files(self, sink: FileSink) -> None:
        """Open the files that slices have made."""
        self._sink = sink
        sink.join()

    def must_rehash(self, records: list[Record]) -> Collection[Record]:
        """Return the chunks that their slice did not sync, or that are near another slice's."""
        near = self._near_others(records)
        return [r for r in records if r.key in near or not self._found.is_synced(r.key)]

    def _near_others(self, records: list[Record]) -> set[Key]:
        """Return the chunks that share a page with another slice's, or with the header."""
        makers = defaultdict[tuple[str, int], set[str]](set)
        for file, (header, _) in self._sink.built.items():
            makers[file, (len(header) - 1) // LARGEST_PAGE].add("")
        pages = defaultdict[Key, list[tuple[str, int]]](list)
        for record in records:  # between its ends, a part shares no page
            for file, start, nbytes, _ in self._sink.parts(record):
                ends = [(file, end // LARGEST_PAGE) for end in (start, start + nbytes - 1)]
                pages[record.key] += ends
                for page in ends:
                    makers[page].add(self._found.makers.get(record.key, ""))
        return {key for key, ends in pages.items() if any(len(makers[page]) > 1 for page in ends)}

    def adopt(self, output: Output, planned: Plan) -> None:
        """If no chunk is missing, merge the slices' journals into the main one, and sync it."""
        self._check_complete(output, planned)
        assert output.journal is not None
        with output.explaining():
            output.journal.absorb(slice_journals(output.folder).values())
            output.clear({MARK_NAME, JOURNAL_NAME, *output.sink.names})
            output.journal.note_stamps(output.identity.stamps)
            sync_folder(output.folder)

    def _check_complete(self, output: Output, planned: Plan) -> None:
        """Refuse to finish if chunks are missing; say which slices must make them."""
        done = {record.key for record in output.resumed}
        chunks = [(t.name, chunk) for t in planned.tensors for chunk in range(t.chunks)]
        missing = [key for key in chunks if key not in done]
        if not missing:
            return
        what = f"{len(missing):,} of {len(chunks):,} chunks are missing"
        if self._found.parts:
            division = Division(planned, Slice.parse(list(self._found.parts)[-1]).count)
            owners = sorted({division.owner(*key) for key in missing})
            what += f", from {_first_of([Slice(number, division.count) for number in owners])}"
        raise OutputError(
            f"{output.folder}: {what}; run these slices again, or run the merge without --slice"
        )


def _first_of(slices: Iterable[object]) -> str:
    return some_of([str(part) for part in slices], SLICES_SHOWN)


# ---------------------------------------------------------------- the works


class MergeSlice(Work[SliceReport]):
    """One slice of a merge, which others publish, or this one if it is the last."""

    writer: OneSlice

    def __init__(self, merge: Merge, part: Slice) -> None:
        super().__init__(merge.plan, merge.layout)
        self.verb = f"slice {part}"
        self.merge = merge
        self.division = Division(merge.plan, part.count)
        self.share = self.division.share(part.number)
        self.writer = OneSlice(part, self.share)

    @property
    def nbytes(self) -> int:
        """Its part of the bytes of the merge, and the tensors of other slices that it observes."""
        plan = self.plan
        in_share = plan.cost.bytes_read * self.division.nbytes(self.share) // self.division.total
        return in_share + sum(
            tensor.base.nbytes + plan.source_of(tensor, census.model).tensors[tensor.name].nbytes
            for census in plan.censuses
            for tensor in census.tensors
            if tensor.name not in self.share
        )

    def recognise(self, found: JournalContent) -> SliceReport | None:
        if (report := self.merge.recognise(found)) is None:
            return None
        return SliceReport(str(self.writer.part), 0, 0, 0, 0.0, (), report)

    def prepare(self) -> None:
        self.merge.prepare()

    def make_sink(self, publisher: Publisher) -> FileSink:
        return self.merge.make_sink(publisher)

    def carry_out(self) -> Sequence[Record]:
        self.writer.adopt()
        return self.execute(share=self.share)

    def conclude(self, records: Sequence[Record]) -> Receipt[SliceReport]:
        del records  # they are in the slice's journal
        bytes_read, resumed = self.meter.bytes_read, len(self.output.resumed)
        self.writer.end(bytes_read)
        chunks, unfinished = sum(map(len, self.share.values())), self.writer.unfinished()
        figures = chunks, resumed, bytes_read, self.seconds, unfinished
        return Receipt(SliceReport(str(self.writer.part), *figures, None))


class Finish(Merge):
    """The end of a merge whose slices have made all chunks."""

    verb = "finishing"
    writer: Finisher

    def __init__(self, plan: Plan, wait: float = 0, after: MergeSlice | None = None) -> None:
        super().__init__(plan)
        self.writer = Finisher(wait)
        self._after = after

    @property
    def nbytes(self) -> int:
        return 0

    def prepare(self) -> None:
        if self._after is None:
            super().prepare()
        else:
            self.sample = self._after.merge.sample

    def carry_out(self) -> Sequence[Record]:
        self.noticed[:0] = self._after.noticed if self._after is not None else ()
        self.writer.adopt(self.output, self.plan)
        return self.output.resumed

    def conclude(self, records: Sequence[Record]) -> Receipt[Report]:
        made = self.writer
        return self._receipt(records, made.seconds, made.bytes_read, made.resumed_chunks)


def run_slice(
    plan: Plan,
    text: str,
    *,
    overwrite: bool,
    wait: float,
    before: Callable[[], None] = lambda: None,
) -> SliceReport:
    """Make one slice; publish the output if it was the last."""
    started, part = time.perf_counter(), Slice.parse(text)
    check_sliceable(plan)
    work = MergeSlice(Merge(plan), part)
    done = run(work, overwrite=overwrite, before=before)
    if done.report is not None:  # a process died after all was done
        return done
    report = None
    if not done.unfinished:
        # Another slice may have finished at the same moment, and is publishing it.
        with suppress(GoneError, BusyError):
            report = perform(Finish(plan, wait, after=work), overwrite=overwrite)
    return replace(done, seconds=time.perf_counter() - started, report=report)


def run_finish(plan: Plan, *, overwrite: bool) -> Report:
    """Publish an output whose slices are all done; raise OutputError if something is missing."""
    check_sliceable(plan)
    return run(Finish(plan), overwrite=overwrite)


def check_sliceable(plan: Plan) -> None:
    """Refuse an output that slices cannot make."""
    if (cluster := plan.options.cluster) is not None:
        raise RecipeError(f'cluster = "{cluster}": slices run without one; leave it out')
    if plan.layout is not None and plan.layout.is_sent:
        remedy = "merge without --slice, or copy the output there afterwards"
        raise OutputError(f"{plan.layout.target}: slices cannot write to a store; {remedy}")
