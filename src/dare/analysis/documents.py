"""An analysis, its verdict and its advice as files: one JSON document, or tables as CSV.

docs/analysis-schema.md describes both; its tables of fields are made from the data classes.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dare.analysis.judge.judgement import Advice, Readiness
from dare.analysis.judge.prediction import predict
from dare.analysis.results import Analysis, ModelAnalysis, Spectrum, Statistics
from dare.errors import OutputError
from dare.tensors.json_values import json_ready

RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
"""Drop rates for which errors are predicted."""
Row = dict[str, Any]


def to_json(analysis: Analysis, readiness: Readiness, advice: Advice) -> str:
    """One document; `Analysis.from_json` takes the analysis out of it again."""
    document = {
        **json.loads(analysis.to_json()),
        "predictions": json_ready(list(_predictions(analysis))),
        "readiness": readiness.to_dict(),
        "advice": advice.to_dict(),
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def write_tables(
    folder: Path, analysis: Analysis, readiness: Readiness, advice: Advice
) -> list[Path]:
    """Write every table as a CSV file; return the files."""
    tables = {
        "models": _models(analysis),
        "kinds": _kinds(analysis),
        "layers": _layers(analysis),
        "cells": _cells(analysis),
        "tensors": _tensors(analysis),
        "histograms": _histograms(analysis),
        "spectra": _spectra(analysis),
        "pairs": _pairs(analysis),
        "predictions": _predictions(analysis),
        "findings": (_flat(dataclasses.asdict(finding)) for finding in readiness.findings),
        "suggestions": (_flat(dataclasses.asdict(each)) for each in advice.suggestions),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / f"{name}.csv", rows) for name, rows in tables.items()]
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _write(path: Path, rows: Iterable[Row]) -> Path:
    """Write a table; columns in the order in which rows first have them."""
    found = list(rows)
    columns = list(dict.fromkeys(name for row in found for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(found)
    return path


def _flat(values: Row) -> Row:
    """Values for one row: sequences with spaces between, other structures as JSON."""
    flat: Row = {}
    for name, value in values.items():
        match value:
            case tuple() | list():
                flat[name] = " ".join(map(str, value))
            case dict():
                flat[name] = json.dumps(value, ensure_ascii=False)
            case None:
                flat[name] = ""
            case _:
                flat[name] = value
    return flat


def _statistics(found: Statistics) -> Row:
    plain = dataclasses.asdict(found)
    del plain["histogram"]
    return {
        **plain.pop("quantiles"),
        **plain,
        "relative_norm": found.relative_norm,
        "sparsity": found.sparsity,
    }


def _models(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        about = {
            "model": model.name,
            "file": model.file,
            "origin": model.origin,
            "likely_rank": model.likely_rank,
            "is_adapter": model.is_adapter,
            "dtypes": tuple(model.dtypes),
            "missing": len(model.missing),
        }
        yield _flat(about | _statistics(model.total))


def _kinds(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        for kind, found in model.by_kind.items():
            yield {"model": model.name, "kind": kind, **_statistics(found)}


def _layers(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        for layer, found in model.by_layer.items():
            yield {"model": model.name, "layer": layer, **_statistics(found)}


def _cells(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        for cell in model.cells:
            place = {"model": model.name, "layer": cell.layer, "kind": cell.kind}
            yield place | _statistics(cell.statistics)


def _tensors(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        for tensor in model.tensors:
            about = {
                "model": model.name,
                "tensor": tensor.name,
                "kind": tensor.kind,
                "layer": tensor.layer,
                "shape": tensor.shape,
                "dtype": tensor.dtype,
            }
            spectrum = {} if tensor.spectrum is None else _spectrum(tensor.spectrum)
            yield _flat(about | _statistics(tensor.statistics) | spectrum)


def _spectrum(found: Spectrum) -> Row:
    figures = dataclasses.asdict(found)
    for name in ("values", "ranks", "rows", "columns"):
        del figures[name]
    return figures


def _histograms(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        histogram = model.total.histogram
        for place, count in enumerate(histogram.counts):
            exponent = histogram.lowest + place
            yield {
                "model": model.name,
                "from": 2.0**exponent,
                "below": 2.0 ** (exponent + 1),
                "count": count,
            }


def _spectra(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        for tensor in model.tensors:
            if tensor.spectrum is not None:
                ranked = zip(tensor.spectrum.ranks, tensor.spectrum.values, strict=True)
                for rank, value in ranked:
                    yield {
                        "model": model.name,
                        "tensor": tensor.name,
                        "rank": rank,
                        "value": value,
                    }


def _pairs(analysis: Analysis) -> Iterator[Row]:
    for pair in analysis.pairs:
        for layer, found in (("all", pair.total), *pair.by_layer.items()):
            about = {"first": pair.first, "second": pair.second, "layer": layer}
            whole = {"ratio": pair.ratio} if layer == "all" else {}
            yield about | dataclasses.asdict(found) | {"conflict": found.conflict} | whole


def _predictions(analysis: Analysis) -> Iterator[Row]:
    for model in analysis.models:
        yield from (_prediction(model, rate) for rate in RATES)


def _prediction(model: ModelAnalysis, drop_rate: float) -> Row:
    return {"model": model.name, **dataclasses.asdict(predict(model.total, drop_rate))}
