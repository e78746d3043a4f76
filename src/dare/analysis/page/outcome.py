"""What became of each model in a finished merge, as far as its report or manifest tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dare.analysis.results import Analysis, PairAnalysis
from dare.errors import InputError
from dare.output.report import Report


@dataclass(frozen=True)
class ModelOutcome:
    """One model's part in a merge."""

    name: str
    weight: float | list[float]
    seed: int
    elements: int
    drop_rate_asked: float | None
    drop_rate_realised: float | None
    largest_delta: float
    largest_delta_in: str
    kept: dict[str, float]
    """Share of its elements that is left after each delta stage; empty if that is not known."""
    kept_by_layer: dict[int, float]
    """The same after the last of them, for each layer."""


@dataclass(frozen=True)
class Outcome:
    """What a merge did."""

    method: str
    output: str
    seconds: float
    models: tuple[ModelOutcome, ...]
    warnings: tuple[str, ...]
    survival: tuple[PairAnalysis, ...]
    """Each model's delta beside the merged one, if that was measured."""


def outcome_of_report(
    report: Report, analysis: Analysis, survival: Sequence[PairAnalysis] = ()
) -> Outcome:
    """Take from the report of a merge what the page shows.

    `survival` has for each model a pair of it and of the output, from an analysis of both.
    """
    return _outcome(report.to_dict(), report.output, analysis, survival)


def outcome_of_manifest(
    manifest: Mapping[str, Any],
    analysis: Analysis,
    survival: Sequence[PairAnalysis] = (),
    where: str = "manifest",
) -> Outcome:
    """The same from the manifest that lies beside an output."""
    try:
        output = manifest["recipe"]["models"].get("output_file")
        return _outcome(manifest["report"], output, analysis, survival)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{where}: has no whole report of a merge ({error!r}); pass the manifest "
            "that `dare merge` wrote beside its output"
        ) from None


def _outcome(
    report: Mapping[str, Any], output: Any, analysis: Analysis, survival: Sequence[PairAnalysis]
) -> Outcome:
    stages = report["method"].split("+")[:-1]
    tallies = _count_kept(report["tensors"], analysis)
    return Outcome(
        report["method"],
        "" if output is None else str(output),
        report["seconds"],
        tuple(_model(model, stages, tallies) for model in report["models"]),
        tuple(warning["text"] for warning in report["warnings"]),
        tuple(survival),
    )


@dataclass
class _Tally:
    """Elements of one model in one layer, and how many are left after each delta stage."""

    elements: int
    left: list[int]


def _count_kept(
    tensors: Sequence[Mapping[str, Any]], analysis: Analysis
) -> dict[tuple[str, int], _Tally]:
    """By model and layer; tensors that were not analysed do not count."""
    known = {tensor.name: tensor for model in analysis.models for tensor in model.tensors}
    tallies: dict[tuple[str, int], _Tally] = {}
    for tensor in tensors:
        if (tensor_analysis := known.get(tensor["name"])) is None:
            continue
        for model, survivors in zip(tensor["models"], tensor["survivors"], strict=True):
            tally = tallies.setdefault(
                (model, tensor_analysis.layer), _Tally(0, [0] * len(survivors))
            )
            tally.elements += tensor_analysis.statistics.elements
            tally.left = [a + b for a, b in zip(tally.left, survivors, strict=True)]
    return tallies


def _model(
    model: Mapping[str, Any], stages: Sequence[str], tallies: Mapping[tuple[str, int], _Tally]
) -> ModelOutcome:
    by_layer = {layer: tally for (name, layer), tally in tallies.items() if name == model["name"]}
    elements = sum(tally.elements for tally in by_layer.values())
    shown = [field.name for field in fields(ModelOutcome) if not field.name.startswith("kept")]
    return ModelOutcome(
        **{name: model[name] for name in shown if name != "largest_delta"},
        largest_delta=float(model["largest_delta"]),  # text in a manifest, if it is not finite
        kept={
            stage_name(stages, number): sum(tally.left[number] for tally in by_layer.values())
            / elements
            for number in range(len(stages))
            if elements
        },
        kept_by_layer={
            layer: tally.left[-1] / tally.elements
            for layer, tally in sorted(by_layer.items())
            if stages and tally.elements
        },
    )


def stage_name(stages: Sequence[str], number: int) -> str:
    """The name of a stage, numbered where a chain has it twice.

    >>> stage_name(["dare", "trim", "dare"], 1), stage_name(["dare", "trim", "dare"], 2)
    ('trim', 'dare (3)')
    """
    name = stages[number]
    return f"{name} ({number + 1})" if stages.count(name) > 1 else name
