"""An analysis, its verdict and its advice as one JSON document (docs/analysis-schema.md)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from dare.analysis.judge.judgement import Advice, Readiness
from dare.analysis.judge.prediction import exposures_of, mean_bounded_error, predict
from dare.analysis.results import Analysis
from dare.tensors.json_values import json_ready

RATES = (*(step / 20 for step in range(1, 20)), 0.98, 0.99)
"""Drop rates for which errors are predicted; those that are advised are among them."""


def to_json(analysis: Analysis, readiness: Readiness, advice: Advice) -> str:
    """One document; `Analysis.from_json` takes the analysis out of it again."""
    predictions = [
        {
            "model": model.name,
            **asdict(predict(model.total, rate)),
            "bounded_error": mean_bounded_error(exposures, rate),
        }
        for model in analysis.models
        for exposures in [exposures_of(model)]
        for rate in RATES
    ]
    document: dict[str, Any] = {
        **json_ready(analysis.to_dict()),
        "predictions": json_ready(predictions),
        "readiness": readiness.to_dict(),
        "advice": advice.to_dict(),
    }
    return json.dumps(document, ensure_ascii=False, indent=1)
