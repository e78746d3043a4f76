"""What became of each model in a finished merge, as far as its report or manifest tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    *,
    output: Path,
) -> Outcome:
    """The same from the manifest that lies beside an output."""
    try:
        return _outcome(manifest["report"], output, analysis, survival)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{output}: its manifest has no whole report of a merge ({error!r}); pass the manifest "
            "that `dare merge` wrote beside its output"
        ) from None


def _outcome(
    report: Mapping[str, Any],
    output: Path | None,
    analysis: Analysis,
    survival: Sequence[PairAnalysis],
) -> Outcome:
    stages = report["method"].split("+")[:-1]
    known = {tensor.name: tensor for model in analysis.models for tensor in model.tensors}
    counts: dict[str, dict[int, list[int]]] = {model["name"]: {} for model in report["models"]}
    for tensor in report["tensors"]:
        if (analysed := known.get(tensor["name"])) is None:
            continue  # what was not analysed does not count
        for model, survivors in zip(tensor["models"], tensor["survivors"], strict=True):
            new = [analysed.statistics.elements, *survivors]
            old = counts[model].get(analysed.layer, [0] * len(new))
            counts[model][analysed.layer] = [a + b for a, b in zip(old, new, strict=True)]
    return Outcome(
        report["method"],
        "" if output is None else str(output),
        report["seconds"],
        tuple(_model(model, stages, counts[model["name"]]) for model in report["models"]),
        tuple(warning["text"] for warning in report["warnings"]),
        tuple(survival),
    )


def _model(
    model: Mapping[str, Any], stages: Sequence[str], by_layer: Mapping[int, Sequence[int]]
) -> ModelOutcome:
    """One model; `by_layer` counts its elements, and those that are left after each stage."""
    elements, *left = [sum(counts) for counts in zip(*by_layer.values(), strict=True)] or [0]
    return ModelOutcome(
        model["name"],
        model["weight"],
        model["seed"],
        model["drop_rate_asked"],
        model["drop_rate_realised"],
        float(model["largest_delta"]),  # text in a manifest, if it is not finite
        model["largest_delta_in"],
        {stage: count / elements for stage, count in zip(stages, left, strict=False) if elements},
        {
            layer: counts[-1] / counts[0]
            for layer, counts in sorted(by_layer.items())
            if stages and counts[0]
        },
    )
