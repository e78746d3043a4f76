"""A merge of files into an output, as a work of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dare.checks.inputs import check_chunks
from dare.checks.sample import SampledModels, sample_models
from dare.documents.notices import LEFTOVERS, notice
from dare.errors import InputError, RecipeError, VerificationError
from dare.output.journal import JournalContent, Record
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
from dare.output.targets import seal
from dare.planning.plan import Plan
from dare.run.engine import Receipt, Work, warn


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
            return None  # the inputs may have changed
        records = [record for _, record in found.records.values()]
        what = "Already complete; removed temporary files"
        noticed = [notice(LEFTOVERS, str(self.plan.recipe.output), what=what)]
        sample = sample_models(self.plan)
        return make_report(self.plan, records, sample, noticed, 0.0, 0, len(records))

    def prepare(self) -> None:
        """Sample the weights, and make the documents of an empty merge, to find errors early."""
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
        warnings = (*report.warnings, *late)
        return replace(report, warnings=warnings, commit=self.output.commit)


def take_sample(plan: Plan) -> SampledModels:
    """Sample the weights; refuse values that are not finite, and show the notices."""
    sample = sample_models(plan)
    check_chunks(plan, [(t.name, n, (0, 0)) for t in sample.not_finite for n in range(t.chunks)])
    warn(plan, [*plan.warnings, *sample.notices])
    return sample


def check_digests(plan: Plan, digests: Digests) -> None:
    """Refuse a delta file for another base, and inputs that a manifest's recipe does not demand."""
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
