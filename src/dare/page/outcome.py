"""What became of each model in a finished merge, as far as its report or manifest tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dare.analysis.results import Analysis, PairAnalysis
from dare.errors import InputError
from dare.report import Report


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
    stages = report.method.split("+")[:-1]
    layers = {tensor.name: tensor.layer for model in analysis.models for tensor in model.tensors}
    sizes = {
        tensor.name: tensor.statistics.elements
        for model in analysis.models
        for tensor in model.tensors
    }
    left: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * len(stages))
    size: dict[tuple[str, int], int] = defaultdict(int)
    for tensor in report.tensors:
        if tensor.name not in layers:
            continue
        for name, survivors in zip(tensor.models, tensor.survivors, strict=True):
            place = (name, layers[tensor.name])
            size[place] += sizes[tensor.name]
            left[place] = [a + b for a, b in zip(left[place], survivors, strict=True)]
    return Outcome(
        report.method,
        "" if report.output is None else str(report.output),
        report.seconds,
        tuple(
            ModelOutcome(
                model.name,
                model.weight,
                model.seed,
                model.elements,
                model.drop_rate_asked,
                model.drop_rate_realised,
                model.largest_delta,
                model.largest_delta_in,
                _kept(model.name, stages, left, size),
                {
                    layer: left[name, layer][-1] / size[name, layer]
                    for name, layer in sorted(size)
                    if name == model.name and stages and size[name, layer]
                },
            )
            for model in report.models
        ),
        tuple(str(warning) for warning in report.warnings),
        tuple(survival),
    )


def _kept(
    model: str,
    stages: Sequence[str],
    left: Mapping[tuple[str, int], Sequence[int]],
    size: Mapping[tuple[str, int], int],
) -> dict[str, float]:
    places = [place for place in size if place[0] == model]
    elements = sum(size[place] for place in places)
    if not elements:
        return {}
    return {
        stage_name(stages, number): sum(left[place][number] for place in places) / elements
        for number in range(len(stages))
    }


def stage_name(stages: Sequence[str], number: int) -> str:
    """The name of a stage, numbered where a chain has it twice.

    >>> stage_name(["dare", "trim", "dare"], 1), stage_name(["dare", "trim", "dare"], 2)
    ('trim', 'dare (3)')
    """
    name = stages[number]
    return f"{name} ({number + 1})" if stages.count(name) > 1 else name


def outcome_of_manifest(
    manifest: Mapping[str, Any], survival: Sequence[PairAnalysis] = (), where: str = "manifest"
) -> Outcome:
    """Take from a manifest what the page shows; it does not tell what was kept in which layer."""
    try:
        report = manifest["report"]
        delta_stages = manifest["method"].split("+")[:-1]
        return Outcome(
            manifest["method"],
            str(manifest["recipe"]["models"].get("output_file", "")),
            report["seconds"],
            tuple(_of_document(model, delta_stages) for model in report["models"]),
            tuple(warning["text"] for warning in report["warnings"]),
            tuple(survival),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{where}: has no whole report of a merge ({error!r}); pass the manifest "
            "that `dare merge` wrote beside its output"
        ) from None


def _of_document(model: Mapping[str, Any], stages: Sequence[str]) -> ModelOutcome:
    realised = model["drop_rate_realised"]
    known = realised is not None and len(stages) == 1
    return ModelOutcome(
        **{
            name: model[name]
            for name in (
                "name",
                "weight",
                "seed",
                "elements",
                "drop_rate_asked",
                "drop_rate_realised",
                "largest_delta",
                "largest_delta_in",
            )
        },
        kept={stages[0]: 1 - realised} if known else {},
        kept_by_layer={},
    )
