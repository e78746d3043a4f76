"""The share of a delta that can be dropped: the analyzer that descriptions of DARE refer to.

    analysis = DARESparsityAnalyzer().analyze("base.safetensors", "math.safetensors")
    print(analysis.recommended_drop_rate)
    print(dare_merge_readiness(analysis))

The names are those of the published description; the results depend on the data:

- *sparsity*: the share of elements under `sparsity_threshold` times the largest magnitude;
- *relative norm*: ‖δ‖/‖base‖;
- *essential fraction*: the share that carries the change, (Σδ²)²/(n·Σδ⁴): 0.56 for a uniform
  distribution, 0.33 for a Gaussian, 0.17 for a Laplace distribution, smaller for heavy tails;
- *recommended drop rate*: the largest at which the outputs of the layers are off by no more than
  `output_error` with probability 0.95 (`prediction`), and at most `droppable_percentile`;
  0 if that is below 0.1, which is not worth its noise.

All except the recommended rate leave out outliers. The weights are read by the pass of an analysis,
and the verdict is that of `dare.assess`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any

import numpy as np

from dare.analysis.analyzing import make_analysis, measure, open_to_compare, plan_measuring
from dare.analysis.measuring import Tally, TensorSums
from dare.analysis.prediction import (
    exposure_of,
    exposures_of,
    mean_bounded_error,
    mean_square,
    tolerated_drop_rate,
)
from dare.analysis.readiness import Readiness, Verdict, assess
from dare.analysis.results import AnalysisData, Statistics, TensorAnalysis
from dare.analysis.tallies import Sums, share_below
from dare.checks.dropping import NO_MAGNITUDES, Exposure
from dare.documents.notices import LIMIT, catalogue, notice
from dare.documents.shown import json_ready
from dare.documents.words import counted
from dare.errors import InputError, RecipeError
from dare.inputs.arrays import Arrays, array_source, named_arrays
from dare.inputs.sources import ArraySource, DeltaInfo, Source, SourceView, open_source
from dare.recipe.recipe import Request
from dare.tensors.dtypes import STORAGE_TYPES

Given = Arrays | str | PathLike[str]  # arrays by name (or lists of numbers), or a file or folder

SIGNIFICANT = 0.9  # a layer has significant updates if its sparsity is below this
NAME = "delta"


@dataclass(frozen=True)
class Configuration:
    """Settings: which tensors to analyse, and what to allow.

    >>> Configuration.aggressive().droppable_percentile
    0.99
    """

    sparsity_threshold: float = 0.01
    """An element counts as nearly zero under this share of the largest magnitude."""
    droppable_percentile: float = 0.95
    """The highest drop rate that is recommended."""
    analysis_layers: tuple[str, ...] | None = None
    """Patterns for the names of tensors to analyse, with * and ? as in a shell; None: all."""
    compute_per_layer_metrics: bool = True
    output_error: float = LIMIT.output_error
    """The largest acceptable error of the layers' outputs due to dropping, relative to them."""
    base_deviation: float = 0.02
    """Standard deviation assumed for the base's weights if no base is given: that of new weights in
    most language models."""

    def __post_init__(self) -> None:
        for name, is_allowed, bounds in (
            ("sparsity_threshold", 0 <= self.sparsity_threshold <= 1, "from 0 up to 1"),
            ("droppable_percentile", 0 <= self.droppable_percentile < 1, "from 0 up to but not 1"),
            ("output_error", self.output_error > 0, "above 0"),
            ("base_deviation", self.base_deviation > 0, "above 0"),
        ):
            if not is_allowed:
                raise RecipeError(f"{name} = {getattr(self, name)}: must be {bounds}")

    @classmethod
    def aggressive(cls) -> Configuration:
        """Count less as nearly zero, and allow drop rates up to 0.99."""
        return cls(sparsity_threshold=0.001, droppable_percentile=0.99)

    def selects(self, layer: str) -> bool:
        """Tell whether a tensor is analysed."""
        patterns = self.analysis_layers
        return patterns is None or any(fnmatchcase(layer, pattern) for pattern in patterns)


@dataclass(frozen=True)
class LayerSparsityMetrics:
    """One tensor."""

    layer_name: str
    parameter_count: int
    sparsity: float
    mean_magnitude: float
    max_magnitude: float
    essential_fraction: float
    has_significant_updates: bool
    relative_norm: float
    """‖δ‖ / ‖base‖; without a base, relative to weights of the assumed size."""
    recommended_drop_rate: float
    """For this tensor alone."""


@dataclass(frozen=True)
class MagnitudeStatistics:
    """The figures of all magnitudes together."""

    mean: float
    standard_deviation: float
    median: float
    max: float
    min_non_zero: float
    percentile1: float
    percentile5: float
    percentile95: float
    percentile99: float


@dataclass(frozen=True)
class SparsityAnalysis:
    """A whole delta."""

    total_parameters: int
    non_zero_parameters: int
    not_finite: int
    """NaN and infinite elements; all other figures leave them out."""
    outliers: int
    """Elements far above the others; only the totals and the magnitudes include them."""
    effective_sparsity: float
    essential_fraction: float
    per_layer_sparsity: dict[str, LayerSparsityMetrics]
    magnitude_stats: MagnitudeStatistics
    relative_norm: float
    recommended_drop_rate: float
    output_error: float
    """The bound on the error of the layers' outputs at that rate, with probability 0.95;
    infinite if the base of all that is changed is zero."""
    has_base: bool
    """True if a base was given; otherwise weights of the assumed size were used."""
    left_out: tuple[str, ...]
    """Tensors that could not be analysed, each with the reason."""
    readiness: Readiness
    """The verdict of `assess`."""
    computed_at: datetime
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {**asdict(self), "computed_at": self.computed_at.isoformat()}

    def to_json(self) -> str:
        """Everything as JSON; a number that is not finite becomes a string."""
        return json.dumps(json_ready(self.to_dict()), ensure_ascii=False)

    def __str__(self) -> str:
        """The main figures, in a few lines."""
        return (
            f"{self.total_parameters:,} parameters, {self.non_zero_parameters:,} changed, "
            f"{self.effective_sparsity:.1%} of all are nearly zero\n"
            f"the change is {_size(self)}\n"
            f"recommended drop rate {self.recommended_drop_rate}: {_promise(self, 'the layers')}"
        )


class DARESparsityAnalyzer:
    """Analyzes one delta, tuned - base."""

    def __init__(self, configuration: Configuration | None = None) -> None:
        self.configuration = configuration or Configuration()

    def analyze(self, first: Given, second: Given | None = None) -> SparsityAnalysis:
        """Analyze a delta or, with two arguments (base, tuned), the change by a fine-tune.

        Each is a dict of arrays, or a path: two paths to anything that `merge` reads, a single one
        to a safetensors file of deltas.

        >>> delta = np.random.default_rng(0).normal(0, 0.0005, (64, 1024)).astype(np.float32)
        >>> DARESparsityAnalyzer().analyze({"w": delta}).recommended_drop_rate
        0.75
        """
        started = time.perf_counter()
        base, tuned = _opened(first, second)
        has_base = base is not None
        if base is None:
            base, tuned = self._assumed_base(tuned), _Delta(tuned, tuned.tensors)
        request = Request.of(base=NAME, models=[NAME], verbose=False)
        selects = self.configuration.selects
        plan = plan_measuring(base, {NAME: tuned}, request, selects=selects)
        tally = measure(plan, keeps_all=True)
        file = str(second) if isinstance(second, str | PathLike) else NAME
        analysis = make_analysis(plan, tally, started, NAME, [file])
        if not has_base:
            analysis = replace(analysis, base_dtypes={})  # no types that were rounded from
        return self._summarise(tally, analysis, has_base=has_base)

    def _assumed_base(self, delta: Source) -> Source:
        """Return a base of weights that all have the assumed size."""
        size, full = np.float32(self.configuration.base_deviation), STORAGE_TYPES["F32"]
        return ArraySource(
            {
                name: (full, info.shape, np.broadcast_to(size, info.elements))
                if info.dtype.is_weight
                else (info.dtype, info.shape, np.zeros(info.nbytes, np.uint8))
                for name, info in delta.tensors.items()
            }
        )

    def _summarise(
        self, tally: Tally, analysis: AnalysisData, *, has_base: bool
    ) -> SparsityAnalysis:
        (model,), settings = analysis.models, self.configuration
        statistics, quantiles = model.total, model.total.quantiles
        parts = [tally.measured[tensor.name] for tensor in model.tensors]
        sums = sum((part.sums[0] for part in parts), Sums())
        magnitudes = sum((part.magnitudes[0] for part in parts), NO_MAGNITUDES)
        threshold = settings.sparsity_threshold * statistics.inliers.largest
        exposures = exposures_of(model)
        rate = self._rate(exposures)
        is_unbounded = all(math.isinf(each.relative_norm) for each in exposures if each.carriers)
        variance = mean_square(statistics) - statistics.mean_magnitude**2
        return SparsityAnalysis(
            total_parameters=statistics.elements,
            non_zero_parameters=statistics.elements - statistics.zeros - statistics.not_finite,
            not_finite=statistics.not_finite,
            outliers=statistics.inliers.outliers,
            effective_sparsity=share_below(threshold, sums, magnitudes),
            essential_fraction=_essential_fraction(statistics),
            per_layer_sparsity={
                tensor.name: self._metrics(tensor, part, threshold)
                for tensor, part in zip(model.tensors, parts, strict=True)
                if settings.compute_per_layer_metrics
            },
            magnitude_stats=MagnitudeStatistics(
                mean=statistics.mean_magnitude,
                standard_deviation=math.sqrt(max(0.0, variance)),
                median=quantiles.p50,
                max=statistics.largest,
                min_non_zero=statistics.smallest,
                **{f"percentile{n}": getattr(quantiles, f"p{n}") for n in (1, 5, 95, 99)},
            ),
            relative_norm=statistics.relative_norm,
            recommended_drop_rate=rate,
            output_error=math.inf if rate and is_unbounded else mean_bounded_error(exposures, rate),
            has_base=has_base,
            left_out=tuple(map(str, analysis.left_out)),
            readiness=assess(analysis, output_error=settings.output_error),
            computed_at=datetime.now(UTC),
            seconds=analysis.seconds,
        )

    def _metrics(
        self, tensor: TensorAnalysis, part: TensorSums, threshold: float
    ) -> LayerSparsityMetrics:
        sparsity = share_below(threshold, part.sums[0], part.magnitudes[0])
        return LayerSparsityMetrics(
            layer_name=tensor.name,
            parameter_count=tensor.statistics.elements,
            sparsity=sparsity,
            mean_magnitude=tensor.statistics.mean_magnitude,
            max_magnitude=tensor.statistics.largest,
            essential_fraction=_essential_fraction(tensor.statistics),
            has_significant_updates=sparsity < SIGNIFICANT,
            relative_norm=tensor.statistics.relative_norm,
            recommended_drop_rate=self._rate([exposure_of(tensor.statistics, tensor.shape)]),
        )

    def _rate(self, exposures: Sequence[Exposure]) -> float:
        settings = self.configuration
        rate = tolerated_drop_rate(exposures, settings.output_error, settings.droppable_percentile)
        return rate if rate >= LIMIT.useful_rate else 0.0


def dare_merge_readiness(analysis: SparsityAnalysis) -> Readiness:
    """Say whether a delta is fit for DARE, why, and what to do next; print it or use `to_json`.

    The verdict and the findings are those of `dare.assess`, which judges several models. A note
    has the recommended drop rate, if there is no defect and the rate is not 0.
    """
    readiness = analysis.readiness
    if readiness.verdict is not Verdict.NO_DEFECT or not analysis.recommended_drop_rate:
        return readiness
    figures = {name: getattr(analysis, name) for name in catalogue()["fit"].figures}
    size, promise = _size(analysis), _promise(analysis, "its layers")
    fit = notice("fit", NAME, figures=figures, size=size, promise=promise, **figures)
    return replace(readiness, findings=(*readiness.findings, fit))


def _size(analysis: SparsityAnalysis) -> str:
    """Return the size of the change, for sentences."""
    whole = "the base" if analysis.has_base else "weights of the assumed size"
    size = f"{analysis.relative_norm:.2%} of {whole}"
    if math.isinf(analysis.relative_norm):
        size = "relative to a base of zeros"
    left_out = f", {counted(analysis.outliers, 'outlier')} left out" if analysis.outliers else ""
    return f"{size}{left_out}, and {analysis.essential_fraction:.1%} of the elements carry it"


def _promise(analysis: SparsityAnalysis, layers: str) -> str:
    """Return the guarantee at the recommended drop rate, for sentences."""
    if math.isinf(analysis.output_error):
        return "enough of each output's change survives"
    return f"the outputs of {layers} stay within {analysis.output_error:.1%}"


def _essential_fraction(statistics: Statistics) -> float:
    """Return the share of elements that carries the change, (Σδ²)²/(n·Σδ⁴), without outliers."""
    concentration = statistics.inliers.concentration
    return 1 / concentration if concentration else 0.0


class _Delta(SourceView):
    """A source of deltas."""

    def delta_of(self, name: str) -> DeltaInfo:  # noqa: ARG002
        return DeltaInfo(is_change=True)


def _opened(first: Given, second: Given | None) -> tuple[Source | None, Source]:
    """Return base and tuned model, or no base and a delta."""
    if second is None:
        if isinstance(first, str | PathLike):
            return None, open_source(first)
        return None, _source(first, NAME)
    if isinstance(first, str | PathLike) and isinstance(second, str | PathLike):
        _, inputs = open_to_compare(first, [second], verbose=False)
        return inputs.base, inputs.models[0]
    if isinstance(first, str | PathLike) or isinstance(second, str | PathLike):
        raise InputError("base and tuned: give two dicts of arrays, or two paths")
    return _source(first, "base"), _source(second, "tuned")


def _source(given: Arrays, label: str) -> Source:
    """Return arrays as a source; lists of numbers become arrays."""
    arrays = {
        name: np.asarray(value, np.float32) if isinstance(value, list | tuple) else value
        for name, value in named_arrays(given, label).items()
    }
    return array_source(arrays, label)
