"""What figures and tables are made from: rows of values, few enough for a page of any model.

A value that is not finite becomes None, which JSON can hold and figures leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dare.analysis.judge.prediction import exposures_of, mean_bounded_error, relative_error
from dare.analysis.judge.readiness import lost_by_chance
from dare.analysis.page.words import layer_name
from dare.analysis.results import (
    Analysis,
    Kind,
    ModelAnalysis,
    PairAnalysis,
    Statistics,
    TensorAnalysis,
)
from dare.documents.document import Row, Table, finite
from dare.documents.words import NOTHING
from dare.errors import InputError

ALL_KINDS = "all"
MOST_SPECTRA = 96
"""Matrices whose spectra are drawn, of all models together."""
MOST_SPECTRA_OF_A_MODEL = 24
LEAST_RANGE = 2.0
"""Ends of a scale of changes are so many times apart at least, so that noise looks like noise."""
FAINTEST = 1e-4
"""Singular values below this share of the largest are not drawn: a LoRA's line just ends."""
RATES = tuple(percent / 100 for percent in range(1, 100))
"""Drop rates of the curves."""
TABLE_RATES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Drop rates of the tables."""


def kinds_of(analysis: Analysis) -> tuple[Kind, ...]:
    """The kinds that there are, in their usual order."""
    return tuple(kind for kind in Kind if any(kind in model.by_kind for model in analysis.models))


# ---------------------------------------------------------------- one model


def magnitude_rows(analysis: Analysis) -> list[Row]:
    """The share of elements in each octave of magnitude, for all tensors and for each kind."""
    return [
        row
        for model in analysis.models
        for kind, statistics in ((ALL_KINDS, model.total), *model.by_kind.items())
        for row in _octaves(model.name, str(kind), statistics)
    ]


def _octaves(model: str, kind: str, statistics: Statistics) -> list[Row]:
    counts, lowest = statistics.histogram.counts, statistics.histogram.lowest
    filled = [place for place, count in enumerate(counts) if count]
    return [
        {
            "model": model,
            "kind": kind,
            "from": finite(2.0 ** (lowest + place)),
            "to": finite(2.0 ** (lowest + place + 1)),
            "middle": finite(2.0 ** (lowest + place + 0.5)),
            "share": finite(counts[place] / statistics.elements),
        }
        for place in range(min(filled, default=0), max(filled, default=-1) + 1)
    ]


def change_rows(model: ModelAnalysis) -> list[Row]:
    """How far each kind in each layer is from the base."""
    return [
        {
            "layer": layer_name(cell.layer),
            "kind": str(cell.kind),
            **_change(cell.statistics),
        }
        for cell in sorted(model.cells, key=lambda cell: cell.layer)
    ]


def layer_change_rows(analysis: Analysis) -> list[Row]:
    """How far each layer of each model is from the base."""
    return [
        {
            "model": model.name,
            "layer": layer_name(layer),
            **_change(found),
        }
        for model in analysis.models
        for layer, found in sorted(model.by_layer.items())
    ]


def _change(found: Statistics) -> Row:
    change, largest = finite(found.relative_norm), finite(found.largest)
    return {"change": change, "largest": largest, "elements": found.elements}


def change_domain(rows: Iterable[Row]) -> list[float]:
    """The least and the largest change, those without one left out, and not too near each other."""
    changes = [row["change"] for row in rows if row["change"]]
    if not changes:
        return [0.0, 1.0]
    low, high = min(changes), max(changes)
    if high < LEAST_RANGE * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(LEAST_RANGE), middle * math.sqrt(LEAST_RANGE)
    return [low, high]


def chosen_spectra(model: ModelAnalysis, most: int) -> list[TensorAnalysis]:
    """Matrices with a spectrum, at most so many, evenly spread over the model."""
    known = [tensor for tensor in model.tensors if tensor.spectrum and any(tensor.spectrum.values)]
    count = min(most, len(known))
    return [known[(2 * place + 1) * len(known) // (2 * count)] for place in range(count)]


def spectra(analysis: Analysis) -> list[tuple[str, TensorAnalysis]]:
    """The matrices whose spectra are drawn, each with its model's name."""
    most = min(MOST_SPECTRA_OF_A_MODEL, max(1, MOST_SPECTRA // max(1, len(analysis.models))))
    return [
        (model.name, tensor) for model in analysis.models for tensor in chosen_spectra(model, most)
    ]


def spectrum_rows(analysis: Analysis) -> list[Row]:
    """One row for each matrix; ranks and singular values as lists, relative to the largest."""
    rows: list[Row] = []
    for name, tensor in spectra(analysis):
        spectrum = tensor.spectrum
        if spectrum is None:
            continue
        points = [
            (rank, finite(value / spectrum.values[0]))
            for rank, value in zip(spectrum.ranks, spectrum.values, strict=True)
            if value > FAINTEST * spectrum.values[0]
        ]
        rows.append(
            {
                "model": name,
                "tensor": tensor.name,
                "line": len(rows),
                "rank": [rank for rank, _ in points],
                "value": [value for _, value in points],
                "effective": finite(spectrum.effective_rank),
                "of": min(spectrum.rows, spectrum.columns),
                "outliers": spectrum.outliers,
            }
        )
    return rows


# ---------------------------------------------------------------- two models and all


def pair_rows(analysis: Analysis) -> list[Row]:
    """Every two models, in both orders, so that they fill a matrix."""
    return [
        {
            "model": first,
            "other": second,
            "cosine": finite(pair.total.cosine),
            "conflict": finite(pair.total.conflict),
            "both": pair.total.both,
        }
        for pair in analysis.pairs
        for first, second in ((pair.first, pair.second), (pair.second, pair.first))
    ]


def pair_name(pair: PairAnalysis) -> str:
    """Two models as one name."""
    return f"{pair.first} · {pair.second}"


def layer_chance(analysis: Analysis, layer: int) -> float:
    """The share of a layer's change that independent models would lose when they are added up."""
    found = [model.by_layer[layer] for model in analysis.models if layer in model.by_layer]
    return lost_by_chance([each.mean_magnitude for each in found])


# ---------------------------------------------------------------- drop rates


def prediction_rows(model: ModelAnalysis, rates: Iterable[float]) -> list[Row]:
    """A model's curve: what the error of its outputs stays under, which is what is bounded."""
    exposures = exposures_of(model)
    return [
        {
            "model": model.name,
            "rate": rate,
            "error": finite(mean_bounded_error(exposures, rate)),
            "relative": finite(relative_error(rate)),
        }
        for rate in rates
    ]


# ---------------------------------------------------------------- tables


def layer_table(columns: Mapping[str, Mapping[int, float]], shown: Callable[[float], str]) -> Table:
    """A row for each layer that any of the columns has."""
    return Table(
        ("layer", *columns),
        tuple(
            (
                layer_name(layer),
                *(shown(by[layer]) if layer in by else NOTHING for by in columns.values()),
            )
            for layer in sorted({layer for by_layer in columns.values() for layer in by_layer})
        ),
    )


# ---------------------------------------------------------------- a finished merge


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


def outcome_of_manifest(
    manifest: Mapping[str, Any],
    analysis: Analysis,
    survival: Sequence[PairAnalysis] = (),
    *,
    output: Path | None,
) -> Outcome:
    """Take from the manifest that lies beside an output what the page shows.

    `survival` has for each model a pair of it and of the output, from an analysis of both.
    """
    try:
        report = manifest["report"]
        counts = _count_left(report, analysis)
        stages = report["method"].split("+")[:-1]
        models = [_model(m, stages, counts.get(m["name"], [0])) for m in report["models"]]
        return Outcome(
            report["method"],
            "" if output is None else str(output),
            report["seconds"],
            tuple(models),
            tuple(warning["text"] for warning in report["warnings"]),
            tuple(survival),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fault = f"{output}: its manifest has no whole report of a merge ({error!r})"
        raise InputError(f"{fault}; pass the one that `dare merge` wrote") from None


def _count_left(report: Mapping[str, Any], analysis: Analysis) -> dict[str, list[int]]:
    """By model: elements that were analysed, and those that each stage left of them."""
    known = {tensor.name: tensor for model in analysis.models for tensor in model.tensors}
    counts: dict[str, list[int]] = {}
    for tensor in report["tensors"]:
        if (analysed := known.get(tensor["name"])) is None:
            continue
        for model, survivors in zip(tensor["models"], tensor["survivors"], strict=True):
            new = [analysed.statistics.elements, *survivors]
            old = counts.get(model, [0] * len(new))
            counts[model] = [a + b for a, b in zip(old, new, strict=True)]
    return counts


def _model(model: Mapping[str, Any], stages: Sequence[str], counts: Sequence[int]) -> ModelOutcome:
    """One model; of its elements, all are counted, and those that are left after each stage."""
    elements, *left = counts
    return ModelOutcome(
        model["name"],
        model["weight"],
        model["seed"],
        model["drop_rate_asked"],
        model["drop_rate_realised"],
        float(model["largest_delta"]),  # text in a manifest, if it is not finite
        model["largest_delta_in"],
        {stage: count / elements for stage, count in zip(stages, left, strict=False) if elements},
    )
