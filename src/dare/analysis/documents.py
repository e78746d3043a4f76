"""An analysis, its verdict and its advice as files: one JSON document, or tables as CSV.

docs/analysis-schema.md describes both; its tables of fields are made from the data classes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dare.analysis.judge.judgement import Advice, Readiness
from dare.analysis.judge.prediction import exposures_of, mean_bounded_error, predict
from dare.analysis.measure.kinds import name_layers
from dare.analysis.results import Analysis, ModelAnalysis, PairAnalysis, Statistics, TensorAnalysis
from dare.errors import OutputError
from dare.output.targets import check_free
from dare.tensors.json_values import json_ready

RATES = (*(step / 20 for step in range(1, 20)), 0.98, 0.99)
"""Drop rates for which errors are predicted; those that are advised are among them."""
PARTS = ("kinds", "layers", "cells", "tensors", "histograms", "spectra")
TABLES = ("models", *PARTS, "pairs", "predictions", "findings", "suggestions")
Row = dict[str, Any]


def to_json(analysis: Analysis, readiness: Readiness, advice: Advice) -> str:
    """One document; `Analysis.from_json` takes the analysis out of it again."""
    document = {
        **json_ready(analysis.to_dict()),
        "predictions": json_ready(_predictions(analysis)),
        "readiness": readiness.to_dict(),
        "advice": advice.to_dict(),
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def write_tables(
    folder: Path, analysis: Analysis, readiness: Readiness, advice: Advice
) -> list[Path]:
    """Write every table as a CSV file; return the files."""
    tables: dict[str, Iterable[Row]] = {
        "models": map(_model, analysis.models),
        **{name: [] for name in PARTS},
        "pairs": [row for pair in analysis.pairs for row in _pair(pair)],
        "predictions": _predictions(analysis),
        "findings": map(asdict, readiness.findings),
        "suggestions": map(asdict, advice.suggestions),
    }
    for model in analysis.models:
        for name, rows in _parts(model).items():
            tables[name] = [*tables[name], *({"model": model.name, **row} for row in rows)]
    for name in tables:
        check_free(folder / f"{name}.csv", "table", overwrite=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / f"{name}.csv", rows) for name, rows in tables.items()]
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _write(path: Path, rows: Iterable[Row]) -> Path:
    """Write a table; columns in the order in which rows first have them."""
    table = [{name: _cell(value) for name, value in row.items()} for row in rows]
    columns = list(dict.fromkeys(name for row in table for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(table)
    return path


def _cell(value: Any) -> Any:
    """A value for one cell: sequences with spaces between, other structures as JSON."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _parts(model: ModelAnalysis) -> dict[str, Iterable[Row]]:
    """The rows of the tables of a model's parts."""
    lowest, counts = model.total.histogram.lowest, model.total.histogram.counts
    names = name_layers({tensor.name: tensor.layer for tensor in model.tensors})
    return {
        "kinds": [{"kind": kind, **_statistics(s)} for kind, s in model.by_kind.items()],
        "layers": [
            {"layer": layer, "name": names.get(layer, "outside"), **_statistics(s)}
            for layer, s in model.by_layer.items()
        ],
        "cells": [
            {"layer": cell.layer, "kind": cell.kind, **_statistics(cell.statistics)}
            for cell in model.cells
        ],
        "tensors": map(_tensor, model.tensors),
        "histograms": [
            {"from": 2.0**exponent, "below": 2.0 ** (exponent + 1), "count": count}
            for exponent, count in enumerate(counts, start=lowest)
        ],
        "spectra": [
            {"tensor": tensor.name, "rank": rank, "value": value}
            for tensor in model.tensors
            if (spectrum := tensor.spectrum) is not None
            for rank, value in zip(spectrum.ranks, spectrum.values, strict=True)
        ],
    }


def _statistics(statistics: Statistics) -> Row:
    plain = asdict(statistics)
    del plain["histogram"]
    inliers = {f"inlier_{name}": value for name, value in plain.pop("inliers").items()}
    shares = {"relative_norm": statistics.relative_norm, "sparsity": statistics.sparsity}
    return {**plain.pop("quantiles"), **plain, **shares, **inliers}


def _model(model: ModelAnalysis) -> Row:
    return {
        "model": model.name,
        "file": model.file,
        "origin": model.origin,
        "likely_rank": model.likely_rank,
        "is_adapter": model.is_adapter,
        "was_dropped": model.was_dropped,
        "dtypes": tuple(model.dtypes),
        "missing": len(model.missing),
        **_statistics(model.total),
    }


def _tensor(tensor: TensorAnalysis) -> Row:
    spectrum = {} if tensor.spectrum is None else asdict(tensor.spectrum)
    return {
        "tensor": tensor.name,
        "kind": tensor.kind,
        "layer": tensor.layer,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        **_statistics(tensor.statistics),
        **{k: v for k, v in spectrum.items() if k not in ("values", "ranks", "rows", "columns")},
    }


def _pair(pair: PairAnalysis) -> Iterator[Row]:
    for layer, overlap in (("all", pair.total), *pair.by_layer.items()):
        row = {"first": pair.first, "second": pair.second, "layer": layer}
        ratio = {"ratio": pair.ratio} if layer == "all" else {}
        yield {**row, **asdict(overlap), "conflict": overlap.conflict, **ratio}


def _predictions(analysis: Analysis) -> list[Row]:
    return [
        {
            "model": model.name,
            **asdict(predict(model.total, rate)),
            "bounded_error": mean_bounded_error(exposures, rate),
        }
        for model in analysis.models
        for exposures in [exposures_of(model)]
        for rate in RATES
    ]
