"""Merges as works of the engine: a whole one, one of its slices, and the end of all slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dare.checks.inputs import check_chunks
from dare.checks.sample import SampledModels, sample_models
from dare.documents.notices import LEFTOVERS, notice
from dare.errors import InputError, OutputError, RecipeError, VerificationError
from dare.output.journal import BusyError, JournalContent, Record
from dare.output.output import Publisher
from dare.output.receipt import (
    Digests,
    Report,
    checked_metadata,
    full_manifest,
    make_report,
    metadata_of,
    with_digests,
)
from dare.output.sidecars import sidecar_files
from dare.output.sink import FileSink
from dare.output.slices import Finisher, GoneError, OneSlice, SliceReport
from dare.output.targets import seal
from dare.planning.plan import Plan
from dare.planning.slices import Division, Slice
from dare.run.engine import Receipt, Work, begin, perform, warn


class Merge(Work[Report]):
    """A merge of files into an output."""

    can_be_sent = True

    def __init__(self, plan: Plan) -> None:
        if plan.layout is None:
            raise RecipeError(
                "output is missing: add --output PATH, or output = PATH in the recipe"
            )
        if plan.options.cluster is not None:
            from dare.run.cluster import check_for_cluster

            check_for_cluster(plan)
        super().__init__(plan, plan.layout)
        self.sample = SampledModels()

    def recognise(self, found: JournalContent) -> Report | None:
        if found.fingerprint != self.identity.fingerprint:
            return None
        if {stamps for stamps, _ in found.records.values()} - {self.identity.stamps}:
            return None  # whether the inputs are still the same is not known
        records = [record for _, record in found.records.values()]
        what = "Already complete; removed temporary files"
        noticed = [notice(LEFTOVERS, str(self.plan.recipe.output), what=what)]
        sample = sample_models(self.plan)
        return make_report(self.plan, records, sample, noticed, 0.0, 0, len(records))

    def prepare(self) -> None:
        """Sample the weights, and make the documents of an empty merge: so nothing fails later."""
        self.sample = take_sample(self.plan)
        receipt = self._receipt_of(make_report(self.plan, ()))
        seal(receipt.manifest or {}, {})
        receipt.report.to_json()

    def make_sink(self, publisher: Publisher) -> FileSink:
        return publisher.make_sink(metadata_of(self.plan.identity))

    def carry_out(self) -> Sequence[Record]:
        if self.plan.recoding is not None:
            self.announce(f"storing as {self.plan.recoding.format}")
        if self.plan.options.cluster is None:
            return self.execute()
        from dare.run.cluster import execute_on_cluster

        return execute_on_cluster(self)

    def conclude(self, records: Sequence[Record]) -> Receipt[Report]:
        figures = self.seconds, self.meter.bytes_read, len(self.output.resumed)
        return self._receipt(records, *figures)

    def _receipt(self, records: Sequence[Record], *figures: Any) -> Receipt[Report]:
        report = make_report(self.plan, records, self.sample, self.noticed, *figures)
        check_digests(self.plan, report.digests)
        return self._receipt_of(report)

    def _receipt_of(self, report: Report) -> Receipt[Report]:
        embedded = with_digests(self.plan.identity, report.digests)
        manifest = full_manifest(self.plan, report, embedded)
        files = {} if self.plan.sidecars is None else sidecar_files(self.plan, report)
        metadata = checked_metadata(self.layout, embedded)
        return Receipt(report, metadata, manifest, files, whole=self.plan.recoding is not None)

    def end(self, report: Report, problems: Sequence[str]) -> Report:
        target = self.layout.target
        late = [notice(LEFTOVERS, what=f"{target} is complete, but {fault}") for fault in problems]
        shown = {*self.plan.warnings, *self.sample.notices, *self.noticed}
        warn(self.plan, [*(n for n in report.warnings if n not in shown), *late])
        return replace(report, warnings=(*report.warnings, *late))


def take_sample(plan: Plan) -> SampledModels:
    """Sample the weights; refuse what is not finite, and warn of what was noticed."""
    sample = sample_models(plan)
    check_chunks(plan, [(t.name, n, (0, 0)) for t in sample.not_finite for n in range(t.chunks)])
    warn(plan, [*plan.warnings, *sample.notices])
    return sample


def check_digests(plan: Plan, digests: Digests) -> None:
    """Refuse a delta file of another base, and inputs other than a manifest's recipe demands."""
    recipe = plan.recipe
    gathered = [plan.gathered.digest] if plan.gathered else []
    found = (digests.base, *digests.models, *gathered)
    demanded = recipe.input_digests or ()
    for model, entry in zip(plan.models, recipe.models, strict=True):
        for name in model.tensors.keys() & digests.base_tensors.keys():
            if model.delta_of(name).base_digest not in (None, digests.base_tensors[name]):
                differs = f"{name} differs from the one in {recipe.base}; give the base it is for"
                raise InputError(f"{entry.file}: is a delta file for another base: {differs}")
    for file, expected, digest in zip(recipe.read_files, demanded, found, strict=False):
        if digest != expected:
            raise InputError(
                f"{file}: is not what it was when the manifest was written "
                f"(digest {digest} now, {expected} then); to merge it anyway, write the recipe "
                "out with `dare init --config` and take input_digests out of it"
            )
    if recipe.output_digest not in (None, digests.output):
        raise VerificationError(
            f"{recipe.output}: the weights are not those that its manifest names (digest "
            f"{digests.output}, not {recipe.output_digest}); the manifest was edited, or "
            "written by another version. Nothing was written"
        )


# ---------------------------------------------------------------- slices


class MergeSlice(Work[SliceReport]):
    """One slice of a merge, which others publish, or this one if it is the last."""

    def __init__(self, merge: Merge, part: Slice) -> None:
        super().__init__(merge.plan, merge.layout)
        self.verb = f"slice {part}"
        self.merge = merge
        self.division = Division(merge.plan, part.of)
        self.share = self.division.share(part.number)
        self.part = OneSlice(part, self.share)

    @property
    def nbytes(self) -> int:
        """Its part of what the merge reads, and what it observes of the tensors of others."""
        plan = self.plan
        own = plan.cost.bytes_read * self.division.nbytes(self.share) // self.division.total
        return own + sum(
            tensor.base.nbytes + plan.source_of(tensor, census.model).tensors[tensor.name].nbytes
            for census in plan.censuses
            for tensor in census.tensors
            if tensor.name not in self.share
        )

    def recognise(self, found: JournalContent) -> SliceReport | None:
        if (report := self.merge.recognise(found)) is None:
            return None
        return SliceReport(str(self.part.part), 0, 0, 0, 0.0, (), report)

    def prepare(self) -> None:
        self.merge.prepare()

    def make_sink(self, publisher: Publisher) -> FileSink:
        return self.merge.make_sink(publisher)

    def carry_out(self) -> Sequence[Record]:
        self.part.adopt()
        return self.execute(share=self.share)

    def conclude(self, records: Sequence[Record]) -> Receipt[SliceReport]:
        del records  # they are in the slice's journal
        bytes_read, resumed = self.meter.bytes_read, len(self.output.resumed)
        self.part.end(bytes_read)
        chunks, left = sum(map(len, self.share.values())), self.part.unfinished()
        figures = chunks, resumed, bytes_read, self.seconds, left
        return Receipt(SliceReport(str(self.part.part), *figures, None))


class Finish(Merge):
    """The end of a merge whose slices have made all chunks."""

    verb = "finishing"

    def __init__(self, plan: Plan, part: Finisher, after: MergeSlice | None = None) -> None:
        super().__init__(plan)
        self._part = part
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
        self._part.adopt(self.output, self.plan)
        return self.output.resumed

    def conclude(self, records: Sequence[Record]) -> Receipt[Report]:
        part = self._part
        return self._receipt(records, part.seconds, part.bytes_read, part.resumed_chunks)


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
    finished = begin(work, overwrite=overwrite, resume=True)
    before()
    if finished is not None:
        return finished
    done = perform(work, overwrite=overwrite, part=work.part)
    report = None
    if not done.unfinished:
        finisher = Finisher(wait)
        last = Finish(plan, finisher, after=work)
        # Another slice may have come as far at the same moment, and publishes it.
        with suppress(GoneError, BusyError):
            report = perform(last, overwrite=overwrite, part=finisher)
    return replace(done, seconds=time.perf_counter() - started, report=report)


def run_finish(plan: Plan, *, overwrite: bool) -> Report:
    """Publish an output whose slices are all done; raise OutputError if something is missing."""
    check_sliceable(plan)
    finisher = Finisher()
    work = Finish(plan, finisher)
    finished = begin(work, overwrite=overwrite, resume=True)
    return finished or perform(work, overwrite=overwrite, part=finisher)


def check_sliceable(plan: Plan) -> None:
    """Refuse an output that slices cannot make."""
    if (cluster := plan.options.cluster) is not None:
        raise RecipeError(f'cluster = "{cluster}": slices run without one; leave it out')
    if plan.layout is not None and plan.layout.is_sent:
        remedy = "merge without --slice, or copy the output there afterwards"
        raise OutputError(f"{plan.layout.target}: slices cannot write to a store; {remedy}")
