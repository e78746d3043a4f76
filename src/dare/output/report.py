"""What a merge did, as figures: the object that `merge` returns."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import Concern, Notice, Strength, printable
from dare.output.journal import Record
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.recipe.layers import Gradient
from dare.tensors.cards import card, facts, remarks, table, value
from dare.tensors.digest import model_digest, tensor_digest
from dare.tensors.header import TensorInfo
from dare.tensors.json_values import json_ready
from dare.tensors.sizes import named, show_size, times


@dataclass(frozen=True)
class ModelReport:
    """One model's part in a merge."""

    name: str
    seed: int
    weight: float | Gradient
    elements: int
    drop_rate_asked: float | None
    """Of all dropping stages together, 1 - Π(1 - p), each p the mean over the elements that reach
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
class Report:
    """What a merge did."""

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

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite becomes a string."""
        return json.dumps(json_ready(self.to_dict()), indent=2, ensure_ascii=False)

    def __repr__(self) -> str:
        """The report in a line."""
        target = f" to {self.output}" if self.output is not None else ""
        models = named([model.name for model in self.models])
        warnings = [notice for notice in self.warnings if notice.strength is not Strength.NOTE]
        warned = f", {times(len(warnings), 'warning')}" if warnings else ""
        return printable(f"<Report: {self.method} of {models}{target}{warned}>")

    def _repr_html_(self) -> str:
        """The report in a notebook."""
        rows = (
            (
                model.name,
                value(model.weight),
                "" if model.drop_rate_realised is None else f"{model.drop_rate_realised:.2%}",
                f"{model.largest_delta:.3g}",
                model.largest_delta_in or "-",
            )
            for model in self.models
        )
        known = {"tensors": f"{len(self.tensors):,}", "seconds": f"{self.seconds:.1f}"}
        known["read"], known["written"] = map(show_size, (self.bytes_read, self.bytes_written))
        if self.output is not None:
            known["to"] = str(self.output)
        return card(
            f"Merged by {self.method}",
            table(("model", "weight >", "dropped >", "largest |δ| >", "in"), rows),
            facts(known),
            remarks((warning.strength, warning.text) for warning in self.warnings),
        )

    def __str__(self) -> str:
        """The report in a few lines."""
        lines = [
            f"{self.method}: {len(self.tensors)} tensors merged in {self.seconds:.1f} s "
            f"({self.bytes_read / 1e9 / max(self.seconds, 1e-9):.2f} GB/s read)"
        ]
        for model in self.models:
            realised, asked = model.drop_rate_realised, model.drop_rate_asked
            dropped = "" if asked is None else f"dropped {realised:.4%} (asked for {asked:.4%}), "
            lines.append(
                f"{model.name}: {dropped}largest |δ| {model.largest_delta:.3g} "
                f"in {model.largest_delta_in or '-'}"
            )
        lines += [f"{warning.strength}: {warning}" for warning in self.warnings]
        if self.output is not None:
            lines.append(f"written to {self.output}")
        return "\n  ".join(map(printable, lines))


def make_report(
    plan: Plan,
    records: Sequence[Record],
    *,
    seconds: float,
    bytes_read: int,
    resumed_chunks: int,
    noticed: Sequence[Notice] = (),
) -> Report:
    """Add the figures of all chunks up; `noticed` is what was warned of since the plan."""
    by_tensor = _by_tensor(records)
    tensors = tuple(_tensor_report(plan, t, by_tensor[t.name]) for t in plan.merged())
    models = tuple(_model_report(plan, index, tensors) for index in range(len(plan.models)))
    overflowed, nans = (sum(record.exceptions[kind] for record in records) for kind in (0, 1))
    digests = _digests(plan, by_tensor)
    found = *_twin_warnings(plan, models, digests), *_number_warnings(overflowed, nans)
    warnings = [*plan.warnings, *noticed, *found]
    return Report(
        method="+".join(stage.name for stage in plan.stages),
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


def digests_of(plan: Plan, records: Sequence[Record]) -> Digests:
    """Only the digests of a report."""
    return _digests(plan, _by_tensor(records))


def _by_tensor(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each tensor's chunks, in order."""
    by_tensor: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_tensor[record.tensor].append(record)
    for chunks in by_tensor.values():
        chunks.sort(key=lambda record: record.chunk)
    return by_tensor


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


def _model_report(plan: Plan, index: int, reports: Sequence[TensorReport]) -> ModelReport:
    parts = [
        (tensor, tensor.models.index(index), report)
        for tensor, report in zip(plan.merged(), reports, strict=True)
        if index in tensor.models
    ]
    largest, largest_in = 0.0, ""
    for tensor, place, report in parts:
        peak = report.largest_delta[place]
        if peak > largest or (math.isnan(peak) and not math.isnan(largest)):  # the first NaN stays
            largest, largest_in = peak, tensor.name
    asked, realised = _drop_rates(plan, parts)
    return ModelReport(
        name=plan.model_names[index],
        seed=plan.recipe.seeds()[index],
        weight=plan.recipe.weights()[index],
        elements=sum(tensor.elements for tensor, _, _ in parts),
        drop_rate_asked=asked,
        drop_rate_realised=realised,
        largest_delta=largest,
        largest_delta_in=largest_in,
        over_threshold=sum(report.over_threshold[place] for _, place, report in parts),
    )


def _drop_rates(
    plan: Plan, parts: Sequence[tuple[TensorPlan, int, TensorReport]]
) -> tuple[float | None, float | None]:
    """What all dropping stages together were asked to drop of one model, and what they did.

    A part is a tensor, the model's place among those that take part in it, and its figures.
    """
    asked_kept, realised_kept = Fraction(1), 1.0
    dropped = False
    for position, stage in enumerate(plan.stages):
        if "drop_rate" not in stage.parameters:
            continue
        reached = kept = 0
        expected = Fraction(0)
        for tensor, place, report in parts:
            survivors = (tensor.elements, *report.survivors[place])
            rate = Fraction(tensor.settings[place][position]["drop_rate"])
            reached += survivors[position]
            kept += survivors[position + 1]
            expected += survivors[position] * (1 - rate)
        if reached:
            dropped = True
            asked_kept *= expected / reached
            realised_kept *= kept / reached
    return (float(1 - asked_kept), 1 - realised_kept) if dropped else (None, None)


def _twin_warnings(plan: Plan, models: Sequence[ModelReport], digests: Digests) -> Iterator[Notice]:
    """Models that are the base, and models that are another one."""
    changed = []
    for index, model in enumerate(models):
        is_weighted = plan.recipe.models[index].weight is not None  # to pull towards the base
        is_meant = is_weighted or plan.recipe.interpolates  # from the base on
        if model.elements and model.largest_delta == 0 and not is_meant:
            text = (
                f"{model.name}: equals the base in every element, so it changes nothing, and in a "
                "mean others count less; leave it out, or check that it is the file you meant"
            )
            yield Notice(Concern.EQUALS_BASE, text, Strength.STRONG)
        elif model.largest_delta != 0:
            changed.append(index)
    for one, other in itertools.combinations(changed, 2):
        if digests.models[one] == digests.models[other]:
            yield same_model(plan, one, other)


def same_model(plan: Plan, one: int, other: int) -> Notice:
    """What is said of two models that are one, by a glance or by their digests."""
    names = plan.model_names
    what = f"has the same weights as {names[one]}, so it counts twice; leave one of them out"
    text = f"{names[other]}: {what}, or double its weight if that is meant"
    return Notice(Concern.SAME_MODEL, text, Strength.STRONG)


def _number_warnings(overflowed: int, nans: int) -> Iterator[Notice]:
    too_large = "infinite or too large for the output type; lower scale, or store a wider dtype"
    not_numbers = "NaN; `dare analyze` shows which input has NaN or infinite elements, and where"
    for about, count, what in (
        (Concern.OVERFLOW, overflowed, too_large),
        (Concern.NOT_A_NUMBER, nans, not_numbers),
    ):
        if count:
            values = "1 merged value is" if count == 1 else f"{count:,} merged values are"
            yield Notice(about, f"{values} {what}", Strength.STRONG)


def _digests(plan: Plan, by_tensor: dict[str, list[Record]]) -> Digests:
    base: dict[str, str] = {}
    models: list[dict[str, str]] = [{} for _ in plan.models]
    output: dict[str, str] = {}
    for tensor in plan.tensors:
        name, chunks = tensor.name, by_tensor[tensor.name]
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
