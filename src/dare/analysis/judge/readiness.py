"""Whether models should be merged: rules that look at an analysis, and what they find.

    print(assess(analyze("base", ["math", "code"])))

A rule has a name, a condition on values (`CONDITIONS`), and texts that the values fill in
(`rules.toml`). What a rule finds is that the models it names, and the set as it is given, need
changes or cannot be merged; a note changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter

from dare.analysis.judge.groups import Link, Span, Values, connect, find_groups, listed
from dare.analysis.judge.judgement import (
    GRAVITY,
    LIMITS,
    RULES_FILE,
    Finding,
    Readiness,
    Severity,
    Verdict,
    limit,
)
from dare.analysis.judge.prediction import (
    OUTER,
    exposures_of,
    mean_bounded_error,
    tolerated_drop_rate,
)
from dare.analysis.results import Analysis, Kind, ModelAnalysis, Origin
from dare.checks.sample import is_far_from_base
from dare.documents.words import times
from dare.inputs.fit import LeftOut, Misfit
from dare.stages import parse_method
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.names import is_embedding

Configs = Mapping[str, Mapping[str, Any]]
"""What config.json says, by model; the base's under `BASE`."""
BASE = "base"
MEANING: list[str] = RULES_FILE["configuration"]["keys"]
"""Keys of config.json that decide what weights do."""
LIMIT = SimpleNamespace(**LIMITS)


def assess(
    analysis: Analysis,
    configs: Configs | None = None,
    *,
    output_error: float | None = None,
    method: str = "",
) -> Readiness:
    """Say whether models should be merged, and what to do about what stands against it.

    `configs` is what config.json says of each model, and under "base" of the base, if that is to
    be compared too; `output_error` is the error that dropping may bring to the layers' outputs,
    0.05 if not given. With a `method` the verdict is for a merge by it; without, for any.
    """
    bound = limit("output_error") if output_error is None else output_error
    subjects = list(_subjects(analysis, configs or {}, bound))
    findings = [finding for rule in RULES for finding in rule.find(subjects, bound)]
    readiness = conclude(analysis.names, findings)
    return readiness_for(readiness, method) if method else readiness


def readiness_for(readiness: Readiness, method: str) -> Readiness:
    """The verdict on a merge by a method: what does not matter for it becomes a note."""
    stages = parse_method(method)
    findings = [
        replace(finding, severity=Severity.NOTE)
        if finding.only_for and not any(getattr(stage, finding.only_for) for stage in stages)
        else finding
        for finding in readiness.findings
    ]
    return replace(conclude(readiness.by_model, findings), method=method)


def conclude(names: Iterable[str], findings: Iterable[Finding]) -> Readiness:
    """The verdict that findings come to, on each model and on all."""
    findings = sorted(findings, key=lambda finding: GRAVITY.index(finding.severity))
    by_model = {
        name: _verdict(f for f in findings if not f.models or name in f.models) for name in names
    }
    return Readiness(_verdict(findings), by_model, tuple(findings))


def _verdict(findings: Iterable[Finding]) -> Verdict:
    severities = {finding.severity for finding in findings}
    return next((s.verdict for s in GRAVITY if s in severities), Verdict.NO_DEFECT)


CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "nothing_compared": lambda m: not m.elements,
    "not_finite": lambda m: m.not_finite,
    "unrelated": lambda m: m.ratio >= LIMIT.unrelated_ratio,
    "not_homologous": lambda m: m.is_foreign and m.ratio < LIMIT.unrelated_ratio,
    "large_change": lambda m: (
        m.is_changed
        and not m.is_foreign
        and not m.was_dropped
        and m.tolerated_drop_rate < LIMIT.easy_rate
    ),
    "equals_base": lambda m: m.elements and not m.norm and not m.not_finite,
    "missing_tensors": lambda m: m.missing and not m.is_adapter,
    "lora": lambda m: m.is_lora,
    "rounding": lambda s: 0 < s.relative_norm <= LIMIT.rounding * s.rounding,
    "coarser_type": lambda s: s.relative_norm > LIMIT.rounding * s.rounding,
    "cancelling": lambda s: s.cancelled > s.chance + LIMIT.cancelled,
}
"""When a rule has found something; for the others, if there is anything to look at at all."""


@dataclass(frozen=True)
class Rule:
    """One thing to look for, as `rules.toml` has it."""

    name: str
    severity: Severity
    looks_for: str
    seen: str
    matters: str
    remedy: str
    figures: str
    about: str = ""
    only_for: str = ""
    few_words: str = ""
    together: str = ""

    def find(self, subjects: Iterable[tuple[str, Values]], output_error: float) -> list[Finding]:
        """What the rule finds among all that it could be about, in words."""
        limits = SimpleNamespace(**LIMITS | {"output_error": output_error})
        condition = CONDITIONS.get(self.name, bool)
        found = [
            self._say(values | {"limit": limits})
            for about, values in subjects
            if about == (self.about or self.name) and condition(SimpleNamespace(**values))
        ]
        return _joined(found)

    def _say(self, known: Values) -> Finding:
        figures = dict(known.get("ratios", {}))
        for name in self.figures.split():
            figures[name] = attrgetter(name)(SimpleNamespace(**known))
        return Finding(
            self.name,
            self.severity,
            known["concerns"],
            self.seen.format_map(known),
            self.matters.format_map(known),
            self.remedy.format_map(known),
            figures,
            self.only_for,
        )


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """One finding where several say the same of one model each."""
    by_text: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        group = finding.models if len(finding.models) > 1 else ()
        key = group, finding.seen, finding.matters, finding.remedy
        models = by_text[key].models if key in by_text else ()
        by_text[key] = replace(finding, models=(*models, *finding.models))
    return list(by_text.values())


RULES = TypeAdapter(list[Rule]).validate_python(
    [{"name": name, **entry} for name, entry in RULES_FILE["rules"].items()]
)
"""All rules, in the order in which they are tried."""


# ---------------------------------------------------------------- what rules are about


def _subjects(
    analysis: Analysis, configs: Configs, output_error: float
) -> Iterator[tuple[str, Values]]:
    """Everything that a rule may be about, with the values that its condition and texts use."""
    bodies = {model.name: body_of(model) for model in analysis.models}
    for model in analysis.models:
        yield "model", _model_values(model, bodies[model.name], output_error)
        yield from _storage(analysis, model)
        yield from _outliers(model)
    near = [model for model in analysis.models if not bodies[model.name].is_foreign]
    fit = [model.name for model in near if model.total.norm]
    yield from find_groups(analysis, _links(analysis, bodies), fit)
    yield from _outweighed(near)
    yield from _together(analysis)
    yield from _unfit(analysis)
    yield from _configurations(analysis, configs)


def _links(analysis: Analysis, bodies: Mapping[str, Body]) -> list[Link]:
    return [
        Link(pair, (bodies[pair.first].ratio, bodies[pair.second].ratio)) for pair in analysis.pairs
    ]


def _model_values(model: ModelAnalysis, body: Body, bound: float) -> Values:
    total, exposures = model.total, exposures_of(model)
    rate = tolerated_drop_rate(exposures, bound=bound)
    return {
        "concerns": (model.name,),
        "file": model.file,
        "elements": total.elements,
        "not_finite": total.not_finite,
        "broken": times(total.not_finite, "element is", "elements are"),
        "where": listed(t.name for t in model.tensors if t.statistics.not_finite),
        "norm": total.norm,
        "mean_magnitude": body.mean_magnitude,
        "ratio": body.ratio,
        "left_out": body.left_out,
        "is_foreign": body.is_foreign,
        "is_changed": any(exposure.carriers for exposure in exposures),
        "tolerated_drop_rate": rate,
        "error": mean_bounded_error(exposures, LIMIT.easy_rate),
        "bound": bound,
        "missing": len(model.missing),
        "missing_count": times(len(model.missing), "tensor"),
        "missing_names": listed(model.missing),
        "is_adapter": model.is_adapter,
        "was_dropped": model.was_dropped,
        "is_lora": model.origin is Origin.LORA,
        "rank": float(model.likely_rank or 0),
        "about_rank": f" of about {model.likely_rank}" if model.likely_rank else "",
    }


def _storage(analysis: Analysis, model: ModelAnalysis) -> Iterator[tuple[str, Values]]:
    """A model that is stored more coarsely than the base."""
    ratio = model.total.relative_norm
    if noise := rounding_norm(analysis, model):
        values: Values = {
            "concerns": (model.name,),
            "kind": _main_type(model.dtypes),
            "finer": _main_type(analysis.base_dtypes),
            "relative_norm": ratio,
            "rounding": noise,
            "share": min((noise / ratio) ** 2, 1.0) if ratio else 1.0,
        }
        yield "storage", values


def _outliers(model: ModelAnalysis) -> Iterator[tuple[str, Values]]:
    parts = {t.name: t.statistics for t in model.tensors if t.statistics.inliers.outliers}
    shares = {name: 1 - (part.inliers.norm / part.norm) ** 2 for name, part in parts.items()}
    named = [name for name, held in shares.items() if held >= LIMIT.outlier_share]
    if named:
        count = sum(parts[name].inliers.outliers for name in named)
        said = {"count": times(count, "outlier"), "names": listed(named)}
        figures = {"outliers": count, "share": max(shares.values())}
        yield "outliers", {"concerns": (model.name,), **figures, **said}


def _outweighed(models: Iterable[ModelAnalysis]) -> Iterator[tuple[str, Values]]:
    """Fine-tunes whose change is small beside that of another."""
    sizes = {model.name: model.total.inliers.norm for model in models}
    norms = {name: norm for name, norm in sizes.items() if norm}
    largest = max(norms, key=lambda name: norms[name], default="")
    ratios = {name: norms[largest] / norm for name, norm in norms.items()}
    small = {name: ratio for name, ratio in ratios.items() if ratio >= LIMIT.outweighed}
    if small:
        values: Values = {
            "concerns": tuple(small),
            "ratios": {f"ratio.{name}": ratio for name, ratio in small.items()},
            "their_change": "Its change is" if len(small) == 1 else "Their changes are",
            "span": Span(list(small.values())),
            "largest": largest,
            "weights": listed(f"{ratio:.2g} to {name}" for name, ratio in small.items()),
        }
        yield "outweighed", values


def _together(analysis: Analysis) -> Iterator[tuple[str, Values]]:
    """What all models do to each other, and what of the base they change twice."""
    changed = [model for model in analysis.models if model.total.norm]
    if len(changed) >= 3:  # of two models `opposed` tells more
        chance, cancelled = chance_cancelled(analysis), analysis.together.cancelled
        yield "cancelling", {"concerns": (), "cancelled": cancelled, "chance": chance}
    outer = [
        model.by_kind[k].norm for model in analysis.models for k in OUTER if k in model.by_kind
    ]
    if analysis.tied and any(outer):
        names = listed(analysis.tied)
        yield "tied", {"concerns": (), "tensors": len(analysis.tied), "names": names}


def _unfit(analysis: Analysis) -> Iterator[tuple[str, Values]]:
    """Tensors that do not fit the base's, by what can be done about them."""
    unfit: dict[str, list[LeftOut]] = {"vocabulary": [], "mismatched": [], "extra_tensors": []}
    for tensor in analysis.left_out:
        if tensor.reason is Misfit.NOT_IN_BASE:
            unfit["extra_tensors"].append(tensor)
        elif tensor.reason is Misfit.UNLIKE_BASE:
            is_vocabulary = is_embedding(tensor.tensor)
            unfit["vocabulary" if is_vocabulary else "mismatched"].append(tensor)
    for rule, tensors in unfit.items():
        differing = analysis.vocabularies if rule == "vocabulary" else {}
        owners = {*differing, *(name for tensor in tensors for name in tensor.models)}
        if owners:
            values: Values = {
                "concerns": tuple(name for name in analysis.names if name in owners),
                "tensors": len(tensors),
                "models": len(differing),
                "count": times(len(tensors), "tensor"),
                "line": listed([*map(str, tensors), *differing.values()], 1),
                "names": listed(tensor.tensor for tensor in tensors),
            }
            yield rule, values


def _configurations(analysis: Analysis, configs: Configs) -> Iterator[tuple[str, Values]]:
    base = configs.get(BASE, {})
    for model in analysis.models:
        config = configs.get(model.name, {})
        keys = [k for k in MEANING if k in config and k in base and config[k] != base[k]]
        if keys:
            said = ", ".join(f"{key} is {config[key]}, the base's {base[key]}" for key in keys)
            values = {"concerns": (model.name,), "keys": len(keys), "differences": said}
            yield "other_configuration", values


# ---------------------------------------------------------------- what is asked of models


@dataclass(frozen=True)
class Body:
    """A model's change without its embeddings, head and norms, if there is anything else."""

    mean_magnitude: float
    ratio: float
    """‖δ‖ / ‖base‖, outliers left out."""
    outliers: int

    @property
    def left_out(self) -> str:
        """What a sentence with the ratio must add."""
        return f", {times(self.outliers, 'outlier')} left out" if self.outliers else ""

    @property
    def is_foreign(self) -> bool:
        """Whether the model is too far from the base to count as a fine-tune of it."""
        return is_far_from_base(self.mean_magnitude, self.ratio)


def body_of(model: ModelAnalysis) -> Body:
    """How far the matrices of a model are from the base's.

    Embeddings may be frozen or grown, and say little about where a model comes from.
    """
    kinds = (Kind.ATTENTION, Kind.MLP, Kind.OTHER)
    parts = [model.by_kind[kind] for kind in kinds if kind in model.by_kind]
    parts = [part for part in parts if part.base_norm] or [model.total]
    finite = [part.elements - part.not_finite for part in parts]
    norm = math.hypot(*(part.inliers.norm for part in parts))
    base_norm = math.hypot(*(part.base_norm for part in parts))
    magnitude = sum(
        part.inliers.mean_magnitude * count for part, count in zip(parts, finite, strict=True)
    )
    return Body(
        magnitude / sum(finite) if any(finite) else 0.0,
        norm / base_norm if base_norm else 0.0,
        sum(part.inliers.outliers for part in parts),
    )


def chance_cancelled(analysis: Analysis) -> float:
    """The share of all change that independent models of these sizes lose when they are added up.

    It is what `analysis.together.cancelled` is to be held against: of two models of one size 29 %,
    of three 42 %.
    """
    return lost_by_chance([model.total.inliers.mean_magnitude for model in analysis.models])


def lost_by_chance(sizes: Sequence[float]) -> float:
    """The same of changes with such mean magnitudes.

    >>> lost_by_chance([1.0, 1.0])
    0.292...
    """
    return 1 - math.hypot(*sizes) / sum(sizes) if any(sizes) else 0.0


def find_copies(analysis: Analysis) -> list[tuple[str, ...]]:
    """Models that make the same change, each group of them in its usual order."""
    links = _links(analysis, {model.name: body_of(model) for model in analysis.models})
    return connect(analysis.names, (link for link in links if link.is_same))


def rounding_norm(analysis: Analysis, model: ModelAnalysis) -> float:
    """‖rounding‖ / ‖base‖ of storing the base as the model is stored; 0 if that is as fine.

    An element of the octave from 1 to 2 is off by a uniform error of at most half a step 2^-b,
    b the bits of the mantissa, whose root mean square is 2^-b/√12; that of an element itself, its
    logarithm spread evenly, is √(3/(2·ln 2)).
    """
    if model.is_adapter or not analysis.base_dtypes or not model.dtypes:
        return 0.0
    if model.total.sparsity >= limit("unrounded"):
        return 0.0  # what is equal to the bit has not been rounded: the base was before
    bits = STORAGE_TYPES[_main_type(model.dtypes)].mantissa_bits
    if not 0 < bits < STORAGE_TYPES[_main_type(analysis.base_dtypes)].mantissa_bits:
        return 0.0
    return float(2.0**-bits / math.sqrt(12) / math.sqrt(3 / (2 * math.log(2))))


def _main_type(dtypes: Mapping[str, int]) -> str:
    """The storage type that most elements have."""
    return max(dtypes, key=lambda name: dtypes[name])
