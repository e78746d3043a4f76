"""The report of a merge, which `merge` returns."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dare.checks.inputs import find_copies
from dare.checks.sample import MergedTensor, SampledModels, find_large_deltas, find_largest
from dare.documents.document import Columns, Document, Section, Tone, tabulate
from dare.documents.notices import Notice, Severity, notice
from dare.documents.shown import Shown
from dare.documents.words import NOTHING, named, pace_text, rate_text, show_size, times, weight_text
from dare.errors import printable
from dare.output.journal import Record, group_by_tensor
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.recipe.layers import Gradient
from dare.tensors.chunks import model_digest, tensor_digest
from dare.tensors.header import TensorInfo


@dataclass(frozen=True)
class ModelReport:
    """One model's part in a merge."""

    name: str
    seed: int
    weight: float | Gradient
    elements: int
    drop_rate_asked: float | None
    """The rate of all dropping stages, 1 - Π(1 - p), with p the mean over the elements that reach
    the stage; None without a dropping stage."""
    drop_rate_realised: float | None
    """The share that was dropped of the elements that reached the dropping stages."""
    largest_delta: float
    largest_delta_in: str
    over_threshold: int


@dataclass(frozen=True)
class TensorReport:
    """One merged tensor: for each model that took part, in order."""

    name: str
    models: tuple[str, ...]
    largest_delta: tuple[float, ...]
    over_threshold: tuple[int, ...]
    survivors: tuple[tuple[int, ...], ...]
    """Elements left after each delta stage."""


@dataclass(frozen=True, repr=False)
class Digests:
    """Digests of everything that was read and written."""

    base: str
    models: tuple[str, ...]
    output: str
    base_tensors: dict[str, str]
    model_tensors: tuple[dict[str, str], ...]
    output_tensors: dict[str, str]

    def __repr__(self) -> str:
        """The digests of whole models."""
        return f"<Digests: base {self.base}, models {', '.join(self.models)}, output {self.output}>"


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The figures and warnings of a merge."""

    method: str
    output: Path | None
    models: tuple[ModelReport, ...]
    tensors: tuple[TensorReport, ...]
    delta_threshold: float
    overflowed: int
    """Results too large for the output type."""
    nans: int
    """Results that are not a number."""
    warnings: tuple[Notice, ...]
    bytes_read: int
    bytes_written: int
    resumed_chunks: int
    seconds: float
    digests: Digests

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "output": None if self.output is None else str(self.output)}

    def __repr__(self) -> str:
        """The report in a line."""
        target = f" to {self.output}" if self.output is not None else ""
        models = named([model.name for model in self.models])
        warnings = [notice for notice in self.warnings if notice.severity is not Severity.NOTE]
        warned = f", {times(len(warnings), 'warning')}" if warnings else ""
        return printable(f"<Report: {self.method} of {models}{target}{warned}>")

    def document(self) -> Document:
        """Return what was done, and what to do next."""
        columns: Columns = {
            "model": lambda model: model.name,
            "weight >": lambda model: weight_text(model.weight),
            "dropped >": lambda model: rate_text(model.drop_rate_realised),
            "asked >": lambda model: rate_text(model.drop_rate_asked),
            "largest |δ| >": lambda model: f"{model.largest_delta:.3g}",
            f"above {self.delta_threshold:g} >": _count_over,
            "largest in": lambda model: model.largest_delta_in or NOTHING,
        }
        models = tabulate(self.models, columns, optional=("weight >", "largest in"))
        output = shlex.quote(str(self.output))
        steps = {"verify": f"dare verify {output}", "repeat": f"dare {output} --output OTHER"}
        return Document(
            title=f"Merged {times(len(self.tensors), 'tensor')} in {self.seconds:.1f} s",
            kind="merge",
            tone=Tone.GOOD,
            lead=pace_text(self.bytes_read, self.seconds, self.resumed_chunks),
            sections=(Section("models", "Models", (models,), is_brief=True),),
            notices=self.warnings,
            steps={} if self.output is None else steps,
            done=f"{self.output} is written ({show_size(self.bytes_written)})"
            if self.output is not None
            else "",
            models=tuple(model.name for model in self.models),
        )


def _count_over(model: ModelReport) -> str:
    share = model.over_threshold / model.elements if model.elements else 0.0
    return f"{model.over_threshold:,} ({share:.2%})"


def make_report(
    plan: Plan,
    records: Sequence[Record],
    sample: SampledModels | None = None,
    noticed: Sequence[Notice] = (),
    seconds: float = 0.0,
    bytes_read: int = 0,
    resumed_chunks: int = 0,
) -> Report:
    """Add up the figures of all chunks; `noticed` are further notices since the plan."""
    chunks = group_by_tensor(records)
    tensors = tuple(_tensor_report(plan, t, chunks[t.name]) for t in plan.merged())
    merged = [_merged_tensors(plan, model, tensors) for model in range(len(plan.models))]
    models = tuple(_model_report(plan, model, each) for model, each in enumerate(merged))
    overflowed, nans = (sum(record.exceptions[kind] for record in records) for kind in (0, 1))
    digests = digests_of(plan, records)
    sample = sample or SampledModels()
    contents = [  # empty for a model that is the base, None if there is nothing of it
        digest if model.largest_delta else "" if model.elements else None
        for model, digest in zip(models, digests.models, strict=True)
    ]
    warnings = [
        *plan.warnings,
        *sample.notices,
        *noticed,
        *find_copies(plan, contents),
    ]
    for code, count in (("overflow", overflowed), ("not_a_number", nans)):
        if count:
            values = times(count, "merged value is", "merged values are")
            warnings.append(notice(code, values=values))
    for each, exposures in zip(merged, sample.exposures, strict=False):
        warnings += find_large_deltas(plan, each, exposures)
    return Report(
        method=plan.method,
        output=plan.recipe.output,
        models=models,
        tensors=tensors,
        delta_threshold=plan.recipe.delta_threshold,
        overflowed=overflowed,
        nans=nans,
        warnings=tuple(dict.fromkeys(warnings)),
        bytes_read=bytes_read,
        bytes_written=plan.cost.bytes_written,
        resumed_chunks=resumed_chunks,
        seconds=seconds,
        digests=digests,
    )


def _tensor_report(plan: Plan, tensor: TensorPlan, chunks: Sequence[Record]) -> TensorReport:
    figures = np.array([chunk.models for chunk in chunks], np.int64)  # chunk, model, figure
    figures = figures.reshape(len(chunks), len(tensor.models), 1 + len(plan.stages))
    peaks = figures[:, :, 0].max(axis=0, initial=0).astype(np.uint32).view(np.float32)
    return TensorReport(
        tensor.name,
        tuple(plan.model_names[model] for model in tensor.models),
        tuple(peaks.tolist()),
        tuple(figures[:, :, 1].sum(axis=0).tolist()),
        tuple(map(tuple, figures[:, :, 2:].sum(axis=0).tolist())),
    )


def _merged_tensors(plan: Plan, model: int, reports: Sequence[TensorReport]) -> list[MergedTensor]:
    """Return the merged tensors that a model takes part in."""
    found = []
    for tensor, report in zip(plan.merged(), reports, strict=True):
        if model in tensor.models:
            place = tensor.models.index(model)
            peak, over = report.largest_delta[place], report.over_threshold[place]
            found.append(MergedTensor(plan, model, tensor, peak, over, report.survivors[place]))
    return found


def _model_report(plan: Plan, index: int, merged: Sequence[MergedTensor]) -> ModelReport:
    largest, largest_in = find_largest(merged)
    asked, realised = _drop_rates(plan, merged)
    return ModelReport(
        name=plan.model_names[index],
        seed=plan.recipe.seeds()[index],
        weight=plan.recipe.weights()[index],
        elements=sum(each.tensor.elements for each in merged),
        drop_rate_asked=asked,
        drop_rate_realised=realised,
        largest_delta=largest,
        largest_delta_in=largest_in,
        over_threshold=sum(each.over_threshold for each in merged),
    )


def _drop_rates(plan: Plan, merged: Sequence[MergedTensor]) -> tuple[float | None, float | None]:
    """Return what all dropping stages were asked to drop of one model, and what they dropped."""
    asked_kept, realised_kept = Fraction(1), 1.0
    dropped = False
    for position, stage in enumerate(plan.stages):
        if "drop_rate" not in stage.parameters:
            continue
        reached = kept = 0
        expected = Fraction(0)
        for each in merged:
            survivors = (each.tensor.elements, *each.survivors)
            rate = Fraction(each.tensor.settings_of(each.model)[position]["drop_rate"])
            reached += survivors[position]
            kept += survivors[position + 1]
            expected += survivors[position] * (1 - rate)
        if reached:
            dropped = True
            asked_kept *= expected / reached
            realised_kept *= kept / reached
    return (float(1 - asked_kept), 1 - realised_kept) if dropped else (None, None)


def digests_of(plan: Plan, records: Sequence[Record]) -> Digests:
    """Return the digests of all inputs and of the output."""
    chunks_of = group_by_tensor(records)
    base: dict[str, str] = {}
    models: list[dict[str, str]] = [{} for _ in plan.models]
    output: dict[str, str] = {}
    for tensor in plan.tensors:
        name, chunks = tensor.name, chunks_of[tensor.name]
        base[name] = tensor_digest(chunk.inputs[0] for chunk in chunks)
        output[name] = tensor_digest(chunk.output for chunk in chunks)
        for place, model in enumerate(tensor.models, start=1):
            if name in plan.models[model].tensors:
                found = plan.original_digest(tensor, model)
                models[model][name] = found or tensor_digest(c.inputs[place] for c in chunks)

    def of_model(tensors: Mapping[str, TensorInfo], digests: Mapping[str, str]) -> str:
        return model_digest((tensors[name], digest) for name, digest in digests.items())

    written = {t.name: TensorInfo(t.name, t.dtype, t.shape, 0) for t in plan.tensors}
    return Digests(
        base=of_model(plan.base.tensors, base),
        models=tuple(of_model(m.tensors, d) for m, d in zip(plan.models, models, strict=True)),
        output=of_model(written, output),
        base_tensors=base,
        model_tensors=tuple(models),
        output_tensors=output,
    )
