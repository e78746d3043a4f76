"""The verdict on models before a merge: rules that are applied to an analysis, and their findings.

    print(assess(analyze("base", ["math", "code"])))

A rule is a condition on values (`RULES`); the notice with the same code has the texts for the
values. A finding says that the models it names, or all models together, need changes or cannot be
merged; a note changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from dare.analysis.prediction import OUTER, exposures_of, mean_bounded_error, tolerated_drop_rate
from dare.analysis.results import AnalysisData, Kind, ModelAnalysis, Origin, PairAnalysis
from dare.checks.sample import find_real_base, is_unrelated
from dare.documents.document import Document, Tone
from dare.documents.notices import LIMIT, Notice, Severity, catalogue, notice
from dare.documents.shown import Shown
from dare.documents.words import counted, named
from dare.errors import printable
from dare.planning.make import LeftOut, Misfit
from dare.stages import parse_method
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.names import is_embedding, some_of

# The values of a subject: what it is `about`, the models it `concerns`, and values for texts.
Values = dict[str, Any]


class Verdict(StrEnum):
    """The state of the weights; none of these verdicts promises a good model."""

    NO_DEFECT = "no defect found"
    WITH_CHANGES = "needs changes"
    UNFIT = "cannot be merged"


HEADLINES = {
    Verdict.NO_DEFECT: "No defects found",
    Verdict.WITH_CHANGES: "Problems to fix before merging",
    Verdict.UNFIT: "Cannot be merged as given",
}
VERDICT_TONES = dict(zip(Verdict, (Tone.GOOD, Tone.FAIR, Tone.POOR), strict=True))


@dataclass(frozen=True, repr=False)
class Readiness(Shown):
    """The verdict on a set of models and on each of them."""

    verdict: Verdict
    by_model: dict[str, Verdict]
    findings: tuple[Notice, ...]
    """The most severe first."""
    method: str = ""
    """The method that the verdict is for; findings that matter only for others are notes."""

    def of(self, model: str) -> tuple[Notice, ...]:
        """Return the findings that concern a model, those about all of them included."""
        return tuple(f for f in self.findings if not f.subjects or model in f.subjects)

    @property
    def headline(self) -> str:
        """The verdict in words.

        >>> Readiness(Verdict.NO_DEFECT, {}, ()).headline
        'No defects found'
        """
        return HEADLINES[self.verdict]

    def document(self) -> Document:
        """Return the verdict, each model's, and the findings."""
        return Document(
            title=self.headline,
            kind="readiness",
            tone=VERDICT_TONES[self.verdict],
            facts=tuple((name, str(verdict)) for name, verdict in self.by_model.items()),
            notices=self.findings,
            models=tuple(self.by_model),
        )

    def __repr__(self) -> str:
        """The verdict in a line."""
        method = f" for {self.method}" if self.method else ""
        models, found = named(list(self.by_model)), counted(len(self.findings), "finding")
        return printable(f"<Readiness: {self.verdict}{method}, {models}, {found}>")


# ---------------------------------------------------------------- rules

STOPPING = {"nothing_compared", "not_finite"}  # with these findings, a model cannot be merged
SEVEREST_FIRST = list(reversed(Severity))
# Conditions, in the order in which they are tried; `bool` is true for every subject.
RULES: dict[str, Callable[[Any], Any]] = {
    "nothing_compared": lambda m: not m.elements,
    "not_finite": lambda m: m.not_finite,
    "unrelated": lambda m: m.is_unrelated,
    "oversized": bool,
    "large_change": lambda m: (
        m.is_changed
        and not m.is_unrelated
        and not m.was_dropped
        and m.tolerated_drop_rate < LIMIT.easy_rate
    ),
    "equals_base": lambda m: m.elements and not m.norm and not m.not_finite,
    "rounding": lambda s: 0 < s.relative_norm <= LIMIT.rounding * s.rounding,
    "coarser_type": lambda s: s.relative_norm > LIMIT.rounding * s.rounding,
    "missing_tensors": lambda m: m.missing and not m.is_adapter,
    "lora": lambda m: m.is_lora,
    **dict.fromkeys(("outliers", "same_model", "multiple", "contained"), bool),
    **dict.fromkeys(("alike", "opposed", "outweighed"), bool),
    **dict.fromkeys(("vocabulary", "mismatched", "integers_differ", "extra_tensors"), bool),
    "tied": bool,
}


def assess(
    analysis: AnalysisData, *, output_error: float = LIMIT.output_error, method: str = ""
) -> Readiness:
    """Say whether models should be merged, and what to do about problems.

    `output_error` is the error that dropping may cause in the layers' outputs, 0.05 by default.
    With a `method` the verdict is for a merge by it, else for any merge.
    """
    subjects = list(_subjects(analysis, output_error))
    limits = SimpleNamespace(**vars(LIMIT) | {"output_error": output_error})
    limited = [{**subject, "limit": limits} for subject in subjects]
    findings = [finding for code in RULES for finding in _find(code, limited)]
    findings += (note for note in analysis.notes if note.severity is not Severity.NOTE)
    readiness = make_readiness(analysis.names, findings)
    return readiness_for(readiness, method) if method else readiness


def _find(code: str, subjects: Iterable[Values]) -> list[Notice]:
    """Return the notices of a rule; models with the same text share one."""
    entry, notices = catalogue()[code], dict[object, Notice]()
    for values in subjects:
        known = SimpleNamespace(**values)
        if known.about != (entry.subject or code) or not RULES[code](known):
            continue
        figures = {name: attrgetter(name)(known) for name in entry.figures}
        models = values["concerns"]
        said = notice(code, *models, figures={**values.get("ratios", {}), **figures}, **values)
        key = models if len(models) > 1 else (), said.text, said.remedy
        earlier = notices[key].subjects if key in notices else ()
        notices[key] = replace(said, subjects=(*earlier, *models))
    return list(notices.values())


def readiness_for(readiness: Readiness, method: str) -> Readiness:
    """Return the verdict on a merge by a method: findings that do not matter become notes."""
    stages = parse_method(method)

    def matters(finding: Notice) -> bool:
        trait = catalogue()[finding.code].only_for
        return not trait or any(getattr(stage, trait) for stage in stages)

    findings = [f if matters(f) else replace(f, severity=Severity.NOTE) for f in readiness.findings]
    return replace(make_readiness(readiness.by_model, findings), method=method)


def make_readiness(names: Iterable[str], findings: Iterable[Notice]) -> Readiness:
    """Return the verdict that follows from findings, on each model and on all."""
    findings = sorted(findings, key=lambda finding: SEVEREST_FIRST.index(finding.severity))
    by_model = {
        name: _verdict(f for f in findings if not f.subjects or name in f.subjects)
        for name in names
    }
    return Readiness(_verdict(findings), by_model, tuple(findings))


def _verdict(findings: Iterable[Notice]) -> Verdict:
    codes = {finding.code for finding in findings if finding.severity is not Severity.NOTE}
    if codes & STOPPING:
        return Verdict.UNFIT
    return Verdict.WITH_CHANGES if codes else Verdict.NO_DEFECT


# ---------------------------------------------------------------- subjects of rules


def _subjects(analysis: AnalysisData, output_error: float) -> Iterator[Values]:
    """Yield the subjects of rules, with values for conditions and texts."""
    bodies = {model.name: body_of(model) for model in analysis.models}
    for model in analysis.models:
        yield _model_values(model, bodies[model.name], output_error)
        yield from _storage(analysis, model)
        yield from _outliers(model)
    related = [model for model in analysis.models if not bodies[model.name].is_unrelated]
    files = {model.name: model.file for model in related if model.total.norm}
    sizes = {name: body.ratio for name, body in bodies.items()}
    links = [Link(pair, min(sizes[pair.first], sizes[pair.second])) for pair in analysis.pairs]
    yield from find_groups(analysis.names, links)
    apart = (link for link in links if not link.is_one_direction)
    relations = {link.ends: (link.cosine, link.pair.ratio) for link in apart}
    if values := find_real_base(analysis.base, files, relations):
        yield {"about": "contained", **values}
    yield from _outweighed(related)
    yield from _tied(analysis)
    yield from _unfit(analysis)


def _model_values(model: ModelAnalysis, body: Body, bound: float) -> Values:
    total, exposures = model.total, exposures_of(model)
    return {
        **vars(total),
        **vars(model),
        **vars(body),
        "about": "model",
        "concerns": (model.name,),
        "broken": counted(total.not_finite, "element is", "elements are"),
        "where": some_of([t.name for t in model.tensors if t.statistics.not_finite], 3),
        "left_out": f", {counted(body.outliers, 'outlier')} left out" if body.outliers else "",
        "is_changed": any(exposure.carriers for exposure in exposures),
        "tolerated_drop_rate": tolerated_drop_rate(exposures, bound=bound),
        "error": mean_bounded_error(exposures, LIMIT.easy_rate),
        "bound": bound,
        "missing": len(model.missing),
        "missing_count": counted(len(model.missing), "tensor"),
        "missing_names": some_of(model.missing, 3),
        "is_lora": model.origin is Origin.LORA,
        "rank": float(model.likely_rank or 0),
        "about_rank": f" of about {model.likely_rank}" if model.likely_rank else "",
    }


def _storage(analysis: AnalysisData, model: ModelAnalysis) -> Iterator[Values]:
    """Yield the values of a model that is stored more coarsely than the base."""
    ratio = model.total.relative_norm
    if noise := rounding_norm(analysis, model):
        yield {
            "about": "storage",
            "concerns": (model.name,),
            "kind": _main_type(model.dtypes),
            "finer": _main_type(analysis.base_dtypes),
            "relative_norm": ratio,
            "rounding": noise,
            "share": min((noise / ratio) ** 2, 1.0) if ratio else 1.0,
        }


def _outliers(model: ModelAnalysis) -> Iterator[Values]:
    parts = {t.name: t.statistics for t in model.tensors if t.statistics.inliers.outliers}
    shares = {name: 1 - (part.inliers.norm / part.norm) ** 2 for name, part in parts.items()}
    named = [name for name, held in shares.items() if held >= LIMIT.outlier_share]
    if named:
        count = sum(parts[name].inliers.outliers for name in named)
        yield {
            "about": "outliers",
            "concerns": (model.name,),
            "outliers": count,
            "share": max(shares.values()),
            "count": counted(count, "outlier"),
            "names": some_of(named, 3),
        }


def _outweighed(models: Iterable[ModelAnalysis]) -> Iterator[Values]:
    """Yield fine-tunes whose change is far larger or smaller than that of the others."""
    sizes = {model.name: model.total.inliers.norm for model in models}
    norms = {name: norm for name, norm in sizes.items() if norm}
    # With two models the smaller one is named; with more, those that differ from the median.
    middle = sorted(norms.values())[(len(norms) - 1) // 2] if len(norms) > 2 else math.inf
    large = {n: norm / middle for n, norm in norms.items() if norm >= LIMIT.outweighed * middle}
    usual = {name: norm for name, norm in norms.items() if name not in large}
    largest = max(usual, key=lambda name: usual[name], default="")
    small = {name: usual[largest] / norm for name, norm in usual.items()}
    small = {name: ratio for name, ratio in small.items() if ratio >= LIMIT.outweighed}
    for about, ratios, power in (("oversized", large, -1), ("outweighed", small, 1)):
        if ratios:
            weights = [f"{ratio**power:.2g} to {name}" for name, ratio in ratios.items()]
            yield {
                "about": about,
                "concerns": tuple(ratios),
                "ratios": {f"ratio.{name}": ratio for name, ratio in ratios.items()},
                "their_change": "Its change is" if len(ratios) == 1 else "Their changes are",
                "span": ValueRange(list(ratios.values())),
                "largest": largest,
                "weights": some_of(weights, 3),
            }


def _tied(analysis: AnalysisData) -> Iterator[Values]:
    """Yield the tensors that are both embedding and head, if a model changes them."""
    outer = [m.by_kind[kind].norm for m in analysis.models for kind in OUTER if kind in m.by_kind]
    if analysis.tied and any(outer):
        names = some_of(analysis.tied, 3)
        yield {"about": "tied", "concerns": (), "tensors": len(analysis.tied), "names": names}


def _unfit(analysis: AnalysisData) -> Iterator[Values]:
    """Yield the tensors that do not fit the base's, by the rule for them."""
    rules = ("vocabulary", "mismatched", "integers_differ", "extra_tensors")
    unfit: dict[str, list[LeftOut]] = {rule: [] for rule in rules}
    for tensor in analysis.left_out:
        if tensor.reason is Misfit.NOT_IN_BASE:
            unfit["extra_tensors"].append(tensor)
        elif tensor.reason is Misfit.NOT_WEIGHTS and tensor.found:
            unfit["integers_differ"].append(tensor)
        elif tensor.reason is Misfit.UNLIKE_BASE:
            is_vocabulary = is_embedding(tensor.tensor)
            unfit["vocabulary" if is_vocabulary else "mismatched"].append(tensor)
    for rule, tensors in unfit.items():
        differing = analysis.vocabularies if rule == "vocabulary" else {}
        owners = {*differing, *(name for tensor in tensors for name in tensor.models)}
        if owners:
            yield {
                "about": rule,
                "concerns": tuple(name for name in analysis.names if name in owners),
                "tensors": len(tensors),
                "models": len(differing),
                "count": counted(len(tensors), "tensor"),
                "line": some_of([*map(str, tensors), *map(": ".join, differing.items())]),
                "names": some_of([tensor.tensor for tensor in tensors], 3),
            }


# ---------------------------------------------------------------- figures for rules


@dataclass(frozen=True)
class Body:
    """A model's change without its embeddings, head and norms, if it has other tensors."""

    ratio: float  # ‖δ‖ / ‖base‖, outliers left out
    outliers: int
    base_share: float  # the share of the base in the model: 1 in a fine-tune, 0 if unrelated
    is_unrelated: bool  # True if it contains almost nothing of the base


def body_of(model: ModelAnalysis) -> Body:
    """Return how far the matrices of a model are from the base's.

    Embeddings may be frozen or extended, and say little about a model's origin.
    """
    kinds = (Kind.ATTENTION, Kind.MLP, Kind.OTHER)
    parts = [model.by_kind[kind] for kind in kinds if kind in model.by_kind]
    parts = [part for part in parts if part.base_norm] or [model.total]
    norm = math.hypot(*(part.inliers.norm for part in parts))
    base_norm = math.hypot(*(part.base_norm for part in parts))
    ratio = norm / base_norm if base_norm else 0.0
    outliers = sum(part.inliers.outliers for part in parts)
    # Files of earlier versions lack the product: there only the ratio decides.
    products = (-(p.base_norm**2) if p.base_product is None else p.base_product for p in parts)
    base_share = 1 + sum(products) / base_norm**2 if base_norm else 1.0
    return Body(ratio, outliers, base_share, is_unrelated(ratio, base_share))


def chance_cancelled(analysis: AnalysisData) -> float:
    """Return the share of all changes that independent models of these sizes lose in a sum.

    Compare `analysis.together.cancelled` with it: for two models of one size it is 29%, for three
    42%.
    """
    return cancelled_by_chance([model.total.inliers.mean_magnitude for model in analysis.models])


def cancelled_by_chance(sizes: Sequence[float]) -> float:
    """Return the share that independent changes of these mean magnitudes lose.

    >>> cancelled_by_chance([1.0, 1.0])
    0.292...
    """
    return 1 - math.hypot(*sizes) / sum(sizes) if any(sizes) else 0.0


def rounding_norm(analysis: AnalysisData, model: ModelAnalysis) -> float:
    """Return ‖rounding‖ / ‖base‖ if the base were stored in the model's type; 0 if that is as fine.

    An element in the octave from 1 to 2 has a uniform error of at most half a step 2^-b, where b is
    the number of bits of the mantissa; its root mean square is 2^-b/√12. The root mean square of
    the element itself, if its logarithm is spread evenly, is √(3/(2·ln 2)).
    """
    # Equal bits show that the model was not rounded; the base was, before.
    is_exact = model.is_adapter or model.total.sparsity >= LIMIT.unrounded
    if is_exact or not analysis.base_dtypes or not model.dtypes:
        return 0.0
    types = (STORAGE_TYPES[_main_type(each)] for each in (model.dtypes, analysis.base_dtypes))
    bits, finer = (kind.mantissa_bits for kind in types)
    step = float(2.0**-bits / math.sqrt(12) / math.sqrt(3 / (2 * math.log(2))))
    return step if 0 < bits < finer else 0.0


def _main_type(dtypes: Mapping[str, int]) -> str:
    """Return the storage type that most elements have."""
    return max(dtypes, key=lambda name: dtypes[name])


# ---------------------------------------------------------------- models that are related

# A relation holds for two models. A finding is about all models that it links, directly or
# indirectly: three copies are one group, not three pairs.


class Link:
    """Two models and their relation; `size` is the smaller ‖δ‖/‖base‖ of their layers."""

    def __init__(self, pair: PairAnalysis, size: float) -> None:
        self.pair, self.ends, self.cosine = pair, (pair.first, pair.second), pair.total.cosine
        # Different models may have much in common, such as a base rounded to 4 bits.
        distance = size * math.sqrt(max(0.0, 1 - self.cosine**2))
        is_near = abs(self.cosine) >= LIMIT.same_cosine
        self.is_one_direction = is_near and distance <= LIMIT.same_distance
        self.is_same = self.is_one_direction and abs(pair.ratio - 1) <= LIMIT.same_size


RELATIONS: dict[str, Callable[[Link], bool]] = {
    "same_model": lambda link: link.is_same,
    "multiple": lambda link: link.is_one_direction,
    "alike": lambda link: link.cosine >= LIMIT.alike_cosine and not link.is_one_direction,
    "opposed": lambda link: link.cosine <= -LIMIT.alike_cosine and not link.is_one_direction,
}


def find_groups(order: Sequence[str], links: Sequence[Link]) -> Iterator[Values]:
    """Yield the values of every group of models, by its rule."""
    for rule, holds in RELATIONS.items():
        for names in connect(order, filter(holds, links)):
            inside = [link for link in links if set(link.ends) <= set(names)]
            if rule != "multiple" or not all(link.is_same for link in inside):
                yield _group(rule, names, inside)


def connect(order: Sequence[str], links: Iterable[Link]) -> list[tuple[str, ...]]:
    """Return the groups of models that links connect, in the order of the models."""
    sets: list[set[str]] = []
    for link in links:
        ends = set(link.ends)
        apart = [names for names in sets if not names & ends]
        sets = [*apart, ends.union(*(names for names in sets if names & ends))]
    groups = [tuple(name for name in order if name in names) for names in sets]
    return sorted(groups, key=lambda names: order.index(names[0]))


def _group(rule: str, names: tuple[str, ...], inside: Sequence[Link]) -> Values:
    """Return the values of a group, from the links for which the rule holds."""
    held = [link for link in inside if RELATIONS[rule](link)]
    whole = all(RELATIONS[rule](link) or link.is_one_direction for link in inside)
    cosines = [link.cosine for link in held]
    return {
        "about": rule,
        "concerns": names,
        "who": "They" if whole else some_of([" and ".join(link.ends) for link in held], 3),
        "how": f" or differ only by rounding ({cosines_text(cosines)})",
        "twice": "twice" if len(names) == 2 else f"{'' if whole else 'up to '}{len(names)} times",
        "cosine": min(cosines),
        "largest_cosine": max(cosines),
        "cosines": cosines_text(cosines),
        **_multiples(names[0], inside),
    }


def _multiples(first: str, links: Sequence[Link]) -> Values:
    """Return the factors between the changes of a group's first model and the others."""
    ratios = {link.pair.second: link.pair.ratio for link in links if link.pair.first == first}
    others = {name: r for name, r in ratios.items() if abs(r - 1) > LIMIT.same_size}
    is_opposite = min(ratios.values(), default=0) < 0
    return {
        "ratios": {f"ratio.{name}": ratio for name, ratio in ratios.items()},
        "multiples": some_of([f"{name} is {r:.3g} times {first}" for name, r in others.items()], 3),
        "direction": "opposite directions" if is_opposite else "the same direction",
        "effect": "they cancel each other out" if is_opposite else "it counts more than once",
    }


def are_opposite(figures: Mapping[str, float], one: str, other: str) -> bool:
    """Tell if two models change in opposite directions, by the ratios in a finding's figures."""
    return figures.get(f"ratio.{one}", 1.0) * figures.get(f"ratio.{other}", 1.0) < 0


# ---------------------------------------------------------------- words


@dataclass(frozen=True)
class ValueRange:
    """The least and the largest of some values; one text if both look the same.

    >>> f"{ValueRange([0.5, 0.2, 0.3]):.0%}, {ValueRange([0.501, 0.499]):.2f}"
    '20% to 50%, 0.50'
    """

    values: Sequence[float]

    def __format__(self, form: str) -> str:
        ends = dict.fromkeys(format(value, form) for value in (min(self.values), max(self.values)))
        return " to ".join(ends)


def cosines_text(values: Sequence[float]) -> str:
    """Return some cosines for a sentence, each with its sign.

    >>> cosines_text([-0.99999, 1.0]), cosines_text([0.0121, 0.0119])
    ('cosines -1.000 to +1.000', 'cosine +0.012')
    """
    ends = f"{ValueRange(values):+.3f}"
    return f"cosines {ends}" if " to " in ends else f"cosine {ends}"
