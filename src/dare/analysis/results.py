"""The results of an analysis: plain, frozen data that goes to JSON and comes back.

    AnalysisData
    ├── models: ModelAnalysis, one for each model
    │   ├── total, by_kind, by_layer, cells    Statistics of sets of tensors
    │   └── tensors: TensorAnalysis            one for each tensor, perhaps with a Spectrum
    ├── pairs: PairAnalysis                    every two models
    └── together: Interference                 all models

Every number is of deltas, tuned - base, in float32. Shares are from 0 to 1.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Annotated, Any, Self

from dare.documents.notices import Notice
from dare.documents.shown import json_ready
from dare.documents.values import Before, Limits, Number, checked, read_json
from dare.documents.words import counted, named
from dare.errors import InputError, printable
from dare.output.receipt import ModelReport
from dare.planning.make import LeftOut
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import read_limited

SCHEMA = "dare-analysis/4"
"""The schema of the JSON document; the number changes when older versions could not read it."""
MAX_BYTES = 1 << 30
"""The largest document that is read, in bytes; one tensor of one model takes about 2,000."""
OUTSIDE = -1
"""The layer number of tensors outside all layers."""


def _read_layer(value: Any) -> Any:
    """Read a number that is a key in JSON."""
    is_key = isinstance(value, str) and re.fullmatch(r"-?\d{1,10}", value, re.ASCII)
    return int(value) if is_key else value


# What `dare analyze` could not have written is refused when a file is read, so that no rule, table
# or figure has to expect it. The square of any figure, and its product with a count, are finite.
Count = Annotated[int, Limits(ge=0, lt=1 << 63)]
Share = Annotated[float, Limits(ge=-1e-6, le=1 + 1e-6)]
Size = Annotated[float, Limits(ge=0, le=1e100)]
Signed = Annotated[float, Limits(ge=-1e100, le=1e100)]
Layer = Annotated[int, Before(_read_layer), Limits(ge=OUTSIDE, lt=1 << 31)]


class Kind(StrEnum):
    """The purpose of a tensor, by its name."""

    ATTENTION = "attention"
    MLP = "mlp"
    NORM = "norm"
    EMBEDDING = "embedding"
    HEAD = "head"
    OTHER = "other"


class Origin(StrEnum):
    """The way a delta was made, as far as its rank tells."""

    UNCHANGED = "unchanged"
    LORA = "lora"
    FULL = "full"
    UNKNOWN = "unknown"
    """No matrix was measured, or none was large enough to tell."""


@dataclass(frozen=True)
class Quantiles:
    """Magnitudes below which 1, 5, 50, 95 and 99% of the elements lie; right to 0.4%."""

    p1: Size
    p5: Size
    p50: Size
    p95: Size
    p99: Size


@dataclass(frozen=True)
class Histogram:
    """The number of elements of each magnitude: octaves, zeros left out.

    Bin i counts magnitudes from 2**(lowest + i) up to but not 2**(lowest + i + 1).
    """

    lowest: Annotated[int, Limits(ge=-1100, lt=1100)]
    counts: Annotated[tuple[Count, ...], Limits(max_length=2200)]


@dataclass(frozen=True)
class Inliers:
    """The same set without outliers.

    These are the few elements of a tensor, up to 0.2% of those that are changed, that are far
    above all others and hold much of its change.
    """

    outliers: Count
    """Elements that are left out."""
    norm: Size
    mean_magnitude: Size
    largest: Size
    negligible: Share
    """Share of elements whose magnitude is under 1% of the largest one that is not an outlier."""
    concentration: Size
    """n·Σδ⁴/(Σδ²)²: 1 if all magnitudes are equal, 3 for a Gaussian; 0 if nothing is changed."""


def ratio(norm: float, base_norm: float) -> float:
    """Return ‖δ‖ / ‖base‖; infinite where a base of zeros is changed."""
    return norm / base_norm if base_norm else float("inf") if norm else 0.0


@dataclass(frozen=True)
class Statistics:
    """Figures of the deltas of a set of tensors: one tensor, a layer, a kind, a whole model."""

    elements: Count
    zeros: Count
    not_finite: Count
    """NaN and infinite elements; all other figures leave them out."""
    mean: Signed
    std: Size
    mean_magnitude: Size
    smallest: Size
    """The smallest magnitude above zero; 0 if there is none."""
    largest: Size
    quantiles: Quantiles
    negligible: Share
    """Share of elements whose magnitude is under 1% of the largest, zeros included."""
    norm: Size
    base_norm: Annotated[Number, Limits(ge=0)]
    """Infinite if the base is."""
    excess_kurtosis: Signed
    """0 for a Gaussian, 3 for a Laplace distribution, -1.2 for a uniform one."""
    histogram: Histogram
    inliers: Inliers
    base_product: Number | None = None
    """Σδ·base; None in files of earlier versions."""

    def __post_init__(self) -> None:
        unusable = self.zeros + self.not_finite
        if unusable > self.elements or (self.norm and unusable == self.elements):
            raise ValueError("more elements are zero or not finite than there can be")

    @property
    def relative_norm(self) -> float:
        """The change: ‖δ‖ / ‖base‖ without outliers; infinite where a base of zeros is changed."""
        return ratio(self.inliers.norm, self.base_norm)

    @property
    def sparsity(self) -> float:
        """Share of elements that are zero."""
        return self.zeros / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one matrix's delta, or of a window of it."""

    rows: Count
    """The rows and columns measured: all of the tensor's, or fewer, evenly spread over it."""
    columns: Count
    values: Annotated[tuple[Size, ...], Limits(min_length=1)]
    """Up to 64 of them, the largest first: all, or evenly spread over all ranks."""
    ranks: tuple[Count, ...]
    """Their ranks, counted from 1."""
    effective_rank: Size
    """exp of the entropy of σ/Σσ."""
    stable_rank: Size
    """Σσ² / σ₁²."""
    rank_99: Count
    """The number of directions that hold 99% of Σσ²."""
    tail_share: Share
    """Share of Σσ² in the weaker half of the directions."""
    bulk_edge: Size
    """The largest singular value that noise as strong as the weaker half of the directions would
    have (Marchenko-Pastur)."""
    outliers: Count
    """Singular values above that edge: directions that are not noise."""
    outlier_share: Share
    """Their share of Σσ²."""
    low_rank: Count | None
    """The rank, if it is low, like a LoRA's; else None. Rows and columns that are far larger than
    the others do not count."""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.ranks):
            raise ValueError("a spectrum needs as many ranks as values")


@dataclass(frozen=True)
class TensorAnalysis:
    """One model's delta of one tensor."""

    name: str
    kind: Kind
    layer: Layer
    """-1 for a tensor outside all layers."""
    shape: tuple[Count, ...]
    dtype: str
    """The type of the model's copy."""
    statistics: Statistics
    spectrum: Spectrum | None


@dataclass(frozen=True)
class Cell:
    """All tensors of one kind in one layer."""

    layer: Layer
    kind: Kind
    statistics: Statistics


@dataclass(frozen=True, repr=False)
class ModelAnalysis:
    """One model."""

    name: str
    file: str
    total: Statistics
    by_kind: dict[Kind, Statistics]
    by_layer: dict[Layer, Statistics]
    cells: tuple[Cell, ...]
    tensors: tuple[TensorAnalysis, ...]
    origin: Origin
    likely_rank: Count | None
    """The largest rank that was seen, of a LoRA."""
    missing: tuple[str, ...]
    """Weights of the base that the model lacks.

    In comparisons of models its delta counts as zero there. An adapter's own figures count them as
    unchanged; those of other models leave them out.
    """
    dtypes: dict[str, Count]
    """Elements by the storage type of the model's copy."""
    is_adapter: bool
    """True if the model is given as an adapter, its delta computed from it."""
    was_dropped: bool = False
    """True if it is a delta file from which changes were dropped at random and rescaled."""

    def __repr__(self) -> str:
        """The model in a line."""
        return (
            f"<ModelAnalysis {printable(self.name)}: {self.origin}, change "
            f"{self.total.relative_norm:.2%}, {counted(len(self.tensors), 'tensor')}>"
        )


@dataclass(frozen=True)
class Overlap:
    """The relation of two deltas, over some tensors."""

    cosine: Signed
    """0 if one of them is zero."""
    agreeing: Share
    """Share of the elements that both change that is changed in the same direction."""
    both: Count
    """Elements that both change."""
    top_conflict: Share
    """Share of the elements in the top 1% of both that is changed in opposite directions."""
    top_overlap: Share
    """Share of one model's top 1% (by magnitude, in each tensor that both change) that is in the
    other's too. All magnitudes within 0.4% of the last one are in the top with it; tensors of
    more than 524,288 elements are sampled."""

    @property
    def conflict(self) -> float:
        """Share of the elements that both change that is changed in opposite directions."""
        return 1 - self.agreeing if self.both else 0.0


@dataclass(frozen=True, repr=False)
class PairAnalysis:
    """Two models."""

    first: str
    second: str
    total: Overlap
    by_layer: dict[Layer, Overlap]
    ratio: Signed
    """The multiple of the first that comes nearest to the second: δ₁·δ₂ / ‖δ₁‖²; 0 if δ₁ = 0."""

    def __repr__(self) -> str:
        """The pair in a line."""
        names = printable(f"{self.first} and {self.second}")
        return (
            f"<PairAnalysis {names}: cosine {self.total.cosine:.3f}, "
            f"{self.total.conflict:.0%} opposed>"
        )


@dataclass(frozen=True)
class Interference:
    """How much of the models' changes cancels out in a merge with equal weights."""

    cancelled: Share
    """1 - Σ|Σᵢ δᵢ| / Σᵢ Σ|δᵢ|: 0 if no changes oppose each other."""
    conflicted: Share
    """Share of the elements that two or more models change where not all signs agree."""
    by_layer: dict[Layer, Share]
    """The first figure for each layer."""


@dataclass(frozen=True, repr=False)
class AnalysisData:
    """The findings about models that are to be merged."""

    base: str
    base_dtypes: dict[str, Count]
    """Elements by storage type."""
    models: tuple[ModelAnalysis, ...]
    pairs: tuple[PairAnalysis, ...]
    together: Interference
    notes: tuple[Notice, ...]
    """Notices about what was adjusted so that the inputs fit together."""
    vocabularies: dict[str, str]
    """Differences from the base's vocabulary, of models whose rows were matched by token."""
    left_out: tuple[LeftOut, ...]
    """Tensors that could not be compared."""
    tied: tuple[str, ...]
    """Tensors that the base stores once and uses twice, as far as its configuration tells."""
    bytes_read: Count
    seconds: Size

    def __repr__(self) -> str:
        """The analysis in a line."""
        return printable(f"<Analysis of {named(self.names)} relative to {self.base}>")

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers; -1, for tensors outside all layers, comes first."""
        return tuple(sorted({layer for model in self.models for layer in model.by_layer}))

    def model(self, name: str) -> ModelAnalysis:
        """The model of that name."""
        for model in self.models:
            if model.name == name:
                return model
        raise InputError(f"{name!r}: there is no such model; there are {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names."""
        return tuple(model.name for model in self.models)

    def to_dict(self) -> dict[str, Any]:
        """The analysis as plain values, ready for JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """The analysis as JSON; a number that is not finite becomes a string."""
        return json.dumps(json_ready(self.to_dict()), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "analysis") -> Self:
        """Read what `to_json` wrote."""
        try:
            document = read_json(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: is not an analysis: {error}") from None
        schema = document.pop("schema", None) if isinstance(document, dict) else None
        if schema != SCHEMA:
            is_other = str(schema).startswith("dare-analysis/")
            found = f"has format {schema:.40}" if is_other else "is not an analysis"
            known = f"this version of dare reads {SCHEMA}; run `dare analyze`"
            raise InputError(f"{where}: {found}, and {known}")
        for made_of_it in ("predictions", "readiness", "advice"):
            document.pop(made_of_it, None)
        try:
            analysis: Self = checked(document, cls)
            analysis.check_complete()
        except ValueError as fault:
            raise InputError(f"{where}: is not a complete analysis: {fault}") from None
        return analysis

    def check_complete(self) -> None:
        """Refuse models without a pair, types that nobody knows, and files without a name."""
        pairs = sorted((pair.first, pair.second) for pair in self.pairs)
        if len({*self.names}) < len(self.names) or pairs != sorted(combinations(self.names, 2)):
            raise ValueError("pairs must be every two models")
        dtypes = set(self.base_dtypes).union(*(model.dtypes for model in self.models))
        if unknown := dtypes - STORAGE_TYPES.keys():
            raise ValueError(f"unknown dtype {min(unknown)!a:.80}")
        if "" in (self.base, *(model.file for model in self.models)):
            raise ValueError("a file's name is empty")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an analysis from a file."""
        return cls.from_json(read_limited(path, MAX_BYTES), str(path))


# ---------------------------------------------------------------- a finished merge


@dataclass(frozen=True)
class Outcome:
    """The effect of a merge."""

    method: str
    output: str
    seconds: float
    models: tuple[ModelReport, ...]
    warnings: tuple[str, ...]
    kept: dict[str, dict[str, float]]
    """By model, the share of its elements that is left after each delta stage, if that is known."""
    survival: tuple[PairAnalysis, ...]
    """Each model's delta beside the merged one, if that was measured."""

    @classmethod
    def of_manifest(
        cls,
        manifest: Mapping[str, Any],
        analysis: AnalysisData,
        survival: Iterable[PairAnalysis] = (),
        *,
        output: Path | None,
    ) -> Self:
        """Read the outcome from the manifest of a merge of models that were analysed.

        `survival` has for each model a pair of it and of the output, from an analysis of both.
        """
        try:
            report = manifest["report"]
            stages, counts = report["method"].split("+"), _count_left(report, analysis)
            return cls(
                method=report["method"],
                output="" if output is None else str(output),
                seconds=report["seconds"],
                models=tuple(  # a number that is not finite is a text in a manifest
                    ModelReport(**{**model, "largest_delta": float(model["largest_delta"])})
                    for model in report["models"]
                ),
                warnings=tuple(warning["text"] for warning in report["warnings"]),
                kept={
                    name: {stage: left / all_ for stage, left in zip(stages, each, strict=False)}
                    for name, (all_, *each) in counts.items()
                    if all_
                },
                survival=tuple(survival),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fault = f"{output}: its manifest has no whole report of a merge ({error!r})"
            raise InputError(f"{fault}; pass the one that `dare merge` wrote") from None


def _count_left(report: Mapping[str, Any], analysis: AnalysisData) -> dict[str, list[int]]:
    """Return by model the elements that were analysed, and those that each stage left of them."""
    known = {tensor.name: tensor for model in analysis.models for tensor in model.tensors}
    counts: dict[str, list[int]] = {model["name"]: [] for model in report["models"]}
    for tensor in report["tensors"]:
        if (analysed := known.get(tensor["name"])) is None:
            continue
        for model, survivors in zip(tensor["models"], tensor["survivors"], strict=True):
            left = [analysed.statistics.elements, *survivors]
            counts[model] = [a + b for a, b in zip_longest(counts[model], left, fillvalue=0)]
    return {model: left for model, left in counts.items() if left}
