"""Whether an analysis that was read from a file can be one: ranges, counts, and who is named where.

Types are checked before. What `dare analyze` writes passes; what it could not have written is
refused here, so that no rule, table or figure has to expect it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from itertools import combinations
from typing import Any

from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import is_text

Analysis = Any
Statistics = Any
"""Of `dare.analysis.results`, which imports this module."""

SHARES = (
    *("negligible", "tail_share", "outlier_share", "agreeing", "top_conflict", "top_overlap"),
    *("cancelled", "conflicted"),
)
"""Fields from 0 to 1."""
SIGNED = ("mean", "cosine", "ratio", "excess_kurtosis")
"""Fields that may be negative."""
MAY_BE_ENDLESS = ("base_norm",)
"""Fields that are not finite if the base is not."""
ROUNDING = 1e-6
MOST = 1e100
"""Of a figure: the square of any, and the product of any with a count, can be computed."""
OCTAVES = range(-1100, 1100)
LAYERS = range(-1, 1 << 31)


def find_fault(analysis: Analysis) -> str | None:
    """What is wrong with an analysis, the place first; None if nothing is."""
    return next(_faults(analysis), None)


def _faults(analysis: Analysis) -> Iterator[str]:
    yield from _walk(analysis, "")
    names = list(analysis.names)
    if len(set(names)) < len(names):
        yield "models: two have the same name"
    found = [(pair.first, pair.second) for pair in analysis.pairs]
    if sorted(found) != sorted(combinations(names, 2)):
        yield "pairs: must be every two models, in their order"
    for model in analysis.models:
        place = f"models.{model.name}"
        yield from _statistics_faults(model.total, place)
        for part in (*model.by_kind.values(), *model.by_layer.values()):
            yield from _statistics_faults(part, place)
        for cell in model.cells:
            yield from _statistics_faults(cell.statistics, place)
        for tensor in model.tensors:
            yield from _statistics_faults(tensor.statistics, place)
            spectrum = tensor.spectrum
            if spectrum and not 0 < len(spectrum.values) == len(spectrum.ranks):
                yield f"{place}.{tensor.name}: a spectrum needs as many ranks as values"
    for dtypes in (analysis.base_dtypes, *(model.dtypes for model in analysis.models)):
        for name in dtypes:
            if name not in STORAGE_TYPES:
                yield f"dtypes: {name!a:.80} is no storage type"


def _statistics_faults(statistics: Statistics, place: str) -> Iterator[str]:
    counted = statistics.zeros + statistics.not_finite
    if counted > statistics.elements:
        yield f"{place}: more elements are zero or not finite than there are"
    histogram = statistics.histogram
    if histogram.lowest not in OCTAVES or len(histogram.counts) > len(OCTAVES):
        yield f"{place}: the histogram has magnitudes that float32 has not"
    if statistics.norm and statistics.elements == counted:
        yield f"{place}: has a norm, and no element that is not zero"


def _walk(value: Any, place: str) -> Iterator[str]:
    """Every number and text for itself; a field is known by its name."""
    if isinstance(value, tuple):
        for item in value:
            yield from _walk(item, place)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(key, f"{place}.{key}" if isinstance(key, str) else f"{place}.layer")
            yield from _walk(item, place)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            inner = f"{place}.{field.name}" if place else field.name
            yield from _walk(getattr(value, field.name), inner)
    elif (fault := _fault(value, place.rpartition(".")[2])) is not None:
        yield f"{place} {fault}"


def _fault(value: Any, name: str) -> str | None:
    if isinstance(value, str):
        return None if value.isprintable() or is_text(value) else "is not valid Unicode"
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        if name == "layer":
            return None if value in LAYERS else "is no layer"
        if name == "lowest":
            return None
        return None if 0 <= value < 1 << 63 else "is no count"
    if not math.isfinite(value):
        return None if name in MAY_BE_ENDLESS else "is not finite"
    if name in SHARES and not -ROUNDING <= value <= 1 + ROUNDING:
        return "is not from 0 to 1"
    if abs(value) > MOST or (value < 0 and name not in (*SHARES, *SIGNED, "by_layer")):
        return "is out of range"
    return None
