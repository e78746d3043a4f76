"""Whether models should be merged: rules that look at an analysis, and what they find.

    print(assess(analyze("base", ["math", "code"])))

Each rule is one function from an analysis to findings, listed in `RULES` with what it looks for.
The numbers that they hold measurements against are in `limits`. What a rule finds
makes the models it names, and the set as it is given, ready with changes or not ready; a note
changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dare.analysis.judge.judgement import GRAVITY, Finding, Readiness, Severity, Verdict
from dare.analysis.judge.limits import limit
from dare.analysis.judge.outliers import share_under, without_outliers
from dare.analysis.judge.prediction import (
    OUTER,
    exposure_of,
    exposures_of,
    mean_bounded_error,
    mean_carriers,
    surviving_drop_rate,
    tolerated_drop_rate,
)
from dare.analysis.results import Analysis, Kind, ModelAnalysis, Origin, PairAnalysis, Statistics
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.names import is_embedding

Configs = Mapping[str, Mapping[str, Any]]
"""What config.json says, by model; the base's under `BASE`."""
BASE = "base"
MEANING = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
)
"""Keys of config.json that decide what weights do."""
SHOWN = 3
"""How many names a finding lists."""


@dataclass(frozen=True)
class Seen:
    """What the rules look at."""

    analysis: Analysis
    configs: Configs
    output_error: float


@dataclass(frozen=True)
class Rule:
    """One thing to look for."""

    name: str
    severity: Severity
    looks_for: str
    find: Callable[[Seen], Iterator[Finding]]


RULES: list[Rule] = []
"""All rules, in the order in which they are tried."""


def assess(
    analysis: Analysis, configs: Configs | None = None, *, output_error: float | None = None
) -> Readiness:
    """Say whether models should be merged, and what to do about what stands against it.

    `configs` is what config.json says of each model, and under "base" of the base, if that shall
    be compared too; `output_error` is the error that dropping may bring to the layers' outputs,
    0.05 if not given.
    """
    bound = limit("output_error") if output_error is None else output_error
    seen = Seen(analysis, configs or {}, bound)
    findings = _joined(finding for rule in RULES for finding in rule.find(seen))
    findings.sort(key=lambda finding: GRAVITY.index(finding.severity))
    by_model = {
        name: _verdict(f for f in findings if not f.models or name in f.models)
        for name in analysis.names
    }
    return Readiness(_verdict(findings), by_model, tuple(findings))


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """One finding where several say the same of different models."""
    by_text: dict[tuple[str, str, str, str], Finding] = {}
    for finding in findings:
        key = finding.rule, finding.seen, finding.matters, finding.remedy
        first = by_text.get(key)
        models = () if first is None else first.models
        by_text[key] = replace(finding, models=(*models, *finding.models))
    return list(by_text.values())


def _verdict(findings: Iterable[Finding]) -> Verdict:
    severities = {finding.severity for finding in findings}
    return next((s.verdict for s in GRAVITY if s in severities), Verdict.READY)


@dataclass(frozen=True)
class Trouble:
    """What a rule has found; its name and severity are the rule's."""

    models: tuple[str, ...]
    seen: str
    matters: str
    remedy: str
    figures: dict[str, float]


def rule(severity: Severity) -> Callable[[Callable[[Seen], Iterator[Trouble]]], Rule]:
    """Make a rule of a function: its name, and what it looks for, are the function's."""

    def register(look: Callable[[Seen], Iterator[Trouble]]) -> Rule:
        name = look.__name__

        def find(seen: Seen) -> Iterator[Finding]:
            for each in look(seen):
                yield Finding(
                    name, severity, each.models, each.seen, each.matters, each.remedy, each.figures
                )

        RULES.append(Rule(name, severity, look.__doc__ or name, find))
        return RULES[-1]

    return register


# ---------------------------------------------------------------- one model and the base


@rule(Severity.STOP)
def nothing_compared(seen: Seen) -> Iterator[Trouble]:
    """A model that has no tensor to compare with the base's."""
    for model in seen.analysis.models:
        if not model.total.elements:
            yield Trouble(
                (model.name,),
                "None of its tensors has a counterpart in the base",
                "There is nothing that could be merged",
                f"Check {model.file}: it may be of another architecture, or its tensors may have "
                "other names",
                {"elements": 0},
            )


@rule(Severity.STOP)
def not_finite(seen: Seen) -> Iterator[Trouble]:
    """NaN or infinite elements."""
    for model in seen.analysis.models:
        if model.total.not_finite:
            where = [t.name for t in model.tensors if t.statistics.not_finite]
            yield Trouble(
                (model.name,),
                f"{model.total.not_finite:,} elements are NaN or infinite, in {_listed(where)}",
                "They go into the merged model wherever they are kept, and a single one can make "
                "every output NaN",
                "Take the model, or the checkpoint, from before it broke; if it is the base that "
                "is broken, all models show it",
                {"not_finite": model.total.not_finite},
            )


@rule(Severity.STOP)
def unrelated(seen: Seen) -> Iterator[Trouble]:
    """A model that shares nothing with the base but its shapes."""
    for model in seen.analysis.models:
        body = body_of(model)
        if body.ratio >= limit("unrelated_ratio"):
            yield Trouble(
                (model.name,),
                f"Its change is {body.ratio:.0%} of the base in size{body.left_out}, and two "
                "models of one size that were trained apart differ by 141%",
                "What one model's weight does the same weight of the other does not do, so that a "
                "sum of them does nothing",
                "Give the base that it was trained from as base_file, or take it out of "
                "merge_files",
                _with_limits(body, "unrelated_ratio"),
            )


@rule(Severity.STOP)
def not_homologous(seen: Seen) -> Iterator[Trouble]:
    """A model too far from the base to be merged by its delta."""
    for model in seen.analysis.models:
        body = body_of(model)
        if body.is_foreign and body.ratio < limit("unrelated_ratio"):
            yield Trouble(
                (model.name,),
                f"|δ| is {body.mean_magnitude:.2g} on average, and the change {body.ratio:.0%} of "
                f"the base in size{body.left_out}",
                f"DARE was seen to work where |δ| is around {limit('usual_delta')} and to fail "
                f"around {limit('foreign_delta')}, as after continued pre-training",
                "Give a base that is nearer to it as base_file, such as the model that "
                "pre-training was continued to, or take it out of merge_files",
                _with_limits(body, "foreign_ratio", "foreign_delta"),
            )


@rule(Severity.CHANGE)
def large_change(seen: Seen) -> Iterator[Trouble]:
    """A fine-tune of this base whose change is too large for a usual drop rate."""
    for model in seen.analysis.models:
        body, exposures = body_of(model), exposures_of(model)
        rate = tolerated_drop_rate(exposures, bound=seen.output_error)
        changed = any(exposure.carriers for exposure in exposures)
        if not changed or body.is_foreign or rate >= limit("easy_rate"):
            continue
        least = limit("useful_rate")
        if rate < least:
            error = mean_bounded_error(exposures, least)
            matters = f"At a drop rate of {least} the error of its layers' outputs is up to "
            matters += f"{error:.1%}, and {seen.output_error:.0%} is the bound"
            remedy = "Leave DARE out for it (drop_rate = 0 in its entry of merge_files), or merge "
            remedy += "an earlier checkpoint"
        else:
            matters = f"The error of its layers' outputs stays within {seen.output_error:.0%} up "
            matters += f"to a drop rate of {rate}, and 0.9 is usual"
            remedy = f"Set drop_rate = {rate} or less in its entry of merge_files"
        yield Trouble(
            (model.name,),
            f"Its change is {body.ratio:.1%} of the base in size{body.left_out}",
            matters,
            remedy,
            _with_limits(body, "easy_rate", "useful_rate")
            | {"tolerated_drop_rate": rate, "limit.output_error": seen.output_error},
        )


@rule(Severity.NOTE)
def large_deltas(seen: Seen) -> Iterator[Trouble]:
    """Changes larger than those that DARE was tried on."""
    for model in seen.analysis.models:
        body = body_of(model)
        high = limit("usual_delta") < body.mean_magnitude < limit("foreign_delta")
        if high and body.ratio < limit("large_ratio"):
            yield Trouble(
                (model.name,),
                f"|δ| is {body.mean_magnitude:.2g} on average, the change {body.ratio:.1%} of the "
                f"base in size{body.left_out}",
                f"DARE was seen to work around {limit('usual_delta')}; what counts more is the "
                "size beside the base's, and that is small",
                "Look at the predicted error before you choose a high drop_rate",
                _with_limits(body, "usual_delta"),
            )


@rule(Severity.CHANGE)
def equals_base(seen: Seen) -> Iterator[Trouble]:
    """A model that is the base."""
    for model in seen.analysis.models:
        total = model.total
        if total.elements and not total.norm and not total.not_finite:
            yield Trouble(
                (model.name,),
                "It is the base, element by element",
                "It adds nothing to a merge, and takes its share of the weights in linear: each "
                "other model counts less",
                "Take it out of merge_files, and check that it is the file you meant",
                {"norm": 0.0},
            )


@rule(Severity.CHANGE)
def rounding(seen: Seen) -> Iterator[Trouble]:
    """A model whose change is not much more than rounding."""
    for model in seen.analysis.models:
        noise = rounding_norm(seen.analysis, model)
        ratio = model.total.relative_norm
        if noise and 0 < ratio <= limit("rounding") * noise:
            kind, finer = _main_type(model.dtypes), _main_type(seen.analysis.base_dtypes)
            yield Trouble(
                (model.name,),
                f"It is stored in {kind} and the base in {finer}; its change is {ratio:.2%} of the "
                f"base, and rounding to {kind} alone changes {noise:.2%}",
                "Most of its delta is rounding, which a merge would add up and DARE enlarge",
                f"Give the model in {finer}, or give the base in {kind} as base_file, so that both "
                "are rounded alike",
                {"relative_norm": ratio, "rounding": noise, "limit.rounding": limit("rounding")},
            )


@rule(Severity.NOTE)
def coarser_type(seen: Seen) -> Iterator[Trouble]:
    """A model that is stored more coarsely than the base."""
    for model in seen.analysis.models:
        noise = rounding_norm(seen.analysis, model)
        ratio = model.total.relative_norm
        if noise and ratio > limit("rounding") * noise:
            kind, finer = _main_type(model.dtypes), _main_type(seen.analysis.base_dtypes)
            share = min((noise / ratio) ** 2, 1.0)
            yield Trouble(
                (model.name,),
                f"It is stored in {kind} and the base in {finer}",
                f"Rounding makes about {share:.1%} of its delta, in squares, and every element "
                "counts as changed",
                f"Give the model in {finer} if there is such a file",
                {"relative_norm": ratio, "rounding": noise, "share": share},
            )


@rule(Severity.CHANGE)
def missing_tensors(seen: Seen) -> Iterator[Trouble]:
    """Tensors of the base that a model lacks."""
    for model in seen.analysis.models:
        if model.missing and not model.is_adapter:
            count = len(model.missing)
            yield Trouble(
                (model.name,),
                f"It lacks {_counted(count, 'tensor')} of the base: {_listed(model.missing)}",
                "A merge refuses that unless told otherwise, because it is often the wrong file",
                'Set on_missing = "base" to count its change there as zero',
                {"missing": count},
            )


@rule(Severity.NOTE)
def lora(seen: Seen) -> Iterator[Trouble]:
    """A LoRA, or a fine-tune made by one."""
    for model in seen.analysis.models:
        if model.origin is Origin.LORA:
            rank = f" of about {model.likely_rank}" if model.likely_rank else ""
            yield Trouble(
                (model.name,),
                f"Its delta has a low rank{rank}, as a LoRA's has",
                "A low rank is no sparsity: nearly every element is changed. Drop rates of 0.7 to "
                f"{limit('low_rank_rate')} are usual for LoRAs, lower than for full fine-tunes",
                f"Keep drop_rate at {limit('low_rank_rate')} or below for it",
                {
                    "rank": float(model.likely_rank or 0),
                    "limit.low_rank_rate": limit("low_rank_rate"),
                },
            )


@rule(Severity.NOTE)
def outliers(seen: Seen) -> Iterator[Trouble]:
    """Few elements that are far larger than the others."""
    for model in seen.analysis.models:
        left = {t.name: without_outliers(t.statistics, t.shape) for t in model.tensors}
        named = {k: v for k, v in left.items() if 1 - v.squares >= limit("outlier_share")}
        if named:
            count = sum(tensor.outliers for tensor in named.values())
            share = max(1 - tensor.squares for tensor in named.values())
            yield Trouble(
                (model.name,),
                f"It has {_counted(count, 'outlier')}, in {_listed(named)}, with up to {share:.0%} "
                "of a tensor's squared change",
                "An outlier that is dropped or rescaled spoils the output that it belongs to; drop "
                "rates are judged by the other outputs",
                "Give these tensors drop_rate = 0 by a rule in [[tensors]], or use trim, which "
                "keeps the largest",
                {"outliers": count, "share": share} | _limits("outlier_share"),
            )


@rule(Severity.NOTE)
def sparse(seen: Seen) -> Iterator[Trouble]:
    """A delta that is mostly zero, or nearly so."""
    for model in seen.analysis.models:
        share = _negligible(model)
        if share > limit("sparse") and model.total.norm and not body_of(model).is_foreign:
            yield Trouble(
                (model.name,),
                f"{share:.0%} of its elements are under 1 % of the largest change, and "
                f"{model.total.sparsity:.0%} are zero",
                "Few elements carry the change, so that each one that is dropped is missed more",
                "Compare lower drop rates for it on held-out data",
                {"negligible": share, "limit.sparse": limit("sparse")},
            )


def _negligible(model: ModelAnalysis) -> float:
    """The share of elements under 1 % of the largest that is no outlier."""
    left = [without_outliers(t.statistics, t.shape) for t in model.tensors]
    if not any(tensor.outliers for tensor in left):
        return model.total.negligible
    return share_under(model.total, 0.01 * max(tensor.largest for tensor in left))


@rule(Severity.NOTE)
def concentrated(seen: Seen) -> Iterator[Trouble]:
    """Few elements that carry the change of an output."""
    for model in seen.analysis.models:
        inner = [t for t in model.tensors if len(t.shape) > 1 and t.kind not in OUTER]
        exposures = [exposure_of(tensor) for tensor in inner]
        carriers, careful = mean_carriers(exposures), surviving_drop_rate(exposures)
        rate = tolerated_drop_rate(exposures_of(model), bound=seen.output_error)
        is_few = careful < min(rate, limit("low_rank_rate"))
        if is_few and rate >= limit("useful_rate") and not body_of(model).is_foreign:
            survivors = (1 - rate) * carriers
            remedy = f"Compare a drop_rate of {careful} for it"
            if careful < limit("useful_rate"):
                remedy = "Compare low drop rates for it"
            yield Trouble(
                (model.name,),
                f"About {carriers:.2g} elements carry the change of one output of a layer",
                f"At a drop rate of {rate}, which the bound on the error allows, {survivors:.2g} "
                "of them are kept on average, and chance decides which",
                f"{remedy} on held-out data, or use trim, which keeps the largest",
                {
                    "carriers": carriers,
                    "survivors": survivors,
                    "tolerated_drop_rate": rate,
                    "limit.survivors": limit("survivors"),
                },
            )


# ---------------------------------------------------------------- two models


@rule(Severity.CHANGE)
def same_model(seen: Seen) -> Iterator[Trouble]:
    """Two models that are the same."""
    for pair in seen.analysis.pairs:
        if _is_one_direction(seen, pair) and _is_one_size(pair):
            yield Trouble(
                (pair.first, pair.second),
                f"{pair.first} and {pair.second} make the same change (cosine "
                f"{pair.total.cosine:.4f}, ratio {pair.ratio:.3f})",
                "Together they count twice, in a sum and in an election",
                f"Take {pair.second} out of merge_files",
                _pair_figures(pair),
            )


@rule(Severity.CHANGE)
def multiple(seen: Seen) -> Iterator[Trouble]:
    """A model that is a multiple of another."""
    for pair in seen.analysis.pairs:
        if _is_one_direction(seen, pair) and not _is_one_size(pair):
            effect = "they cancel each other" if pair.ratio < 0 else "it counts more than once"
            yield Trouble(
                (pair.first, pair.second),
                f"The change of {pair.second} is {pair.ratio:.3g} times that of {pair.first} "
                f"(cosine {pair.total.cosine:.4f})",
                f"It is one direction and no second ability; in a sum {effect}",
                "Take one of them out of merge_files, and set weight or scale for the other",
                _pair_figures(pair),
            )


@rule(Severity.CHANGE)
def other_base(seen: Seen) -> Iterator[Trouble]:
    """Models that may share a base which is not the given one."""
    for pair in seen.analysis.pairs:
        ratios = _ratios(seen, pair)
        alike = pair.total.cosine >= limit("alike_cosine") and not _is_one_direction(seen, pair)
        if alike and min(ratios) >= limit("large_ratio"):
            yield Trouble(
                (pair.first, pair.second),
                f"Both have gone far from the base (by {ratios[0]:.0%} and {ratios[1]:.0%} of it), "
                f"and in one direction (cosine {pair.total.cosine:.2f})",
                "They may be fine-tunes of another model, which was trained from this base; what "
                "they have in common would be dropped, rescaled and added up twice",
                "Give the model that both were trained from as base_file",
                _pair_figures(pair)
                | {"first": ratios[0], "second": ratios[1]}
                | _limits("alike_cosine", "large_ratio"),
            )


@rule(Severity.NOTE)
def alike(seen: Seen) -> Iterator[Trouble]:
    """Two models that have learnt much the same."""
    for pair in seen.analysis.pairs:
        if pair.total.cosine >= limit("alike_cosine") and not _is_one_direction(seen, pair):
            yield Trouble(
                (pair.first, pair.second),
                f"{pair.first} and {pair.second} change the base in much the same direction "
                f"(cosine {pair.total.cosine:.2f})",
                "A sum takes what they share twice",
                'Average them: method = "linear", or a lower scale',
                _pair_figures(pair) | _limits("alike_cosine"),
            )


@rule(Severity.CHANGE)
def opposed(seen: Seen) -> Iterator[Trouble]:
    """Two models that undo each other's changes."""
    for pair in seen.analysis.pairs:
        against = pair.total.cosine <= -limit("apart_cosine")
        if (against or pair.total.conflict >= limit("conflict")) and not _is_one_direction(
            seen, pair
        ):
            yield Trouble(
                (pair.first, pair.second),
                f"{pair.first} and {pair.second} change {pair.total.conflict:.0%} of their common "
                f"elements in opposite directions (half would be chance; cosine "
                f"{pair.total.cosine:.2f})",
                "What one has learnt the other unlearns, and a sum has neither",
                'Elect signs, method = "dare+ties", with a weight for the one that matters more',
                _pair_figures(pair)
                | {"conflict": pair.total.conflict}
                | _limits("conflict", "apart_cosine"),
            )


@rule(Severity.CHANGE)
def outweighed(seen: Seen) -> Iterator[Trouble]:
    """A model whose change is small beside that of another fine-tune."""
    changed = [
        model
        for model in seen.analysis.models
        if model.total.norm and not body_of(model).is_foreign
    ]
    if len(changed) < 2:
        return
    largest = max(changed, key=lambda model: model.total.norm)
    ratios = {model.name: largest.total.norm / model.total.norm for model in changed}
    small = {name: ratio for name, ratio in ratios.items() if ratio >= limit("outweighed")}
    if small:
        weights = ", ".join(f"{ratio:.2g} to {name}" for name, ratio in small.items())
        yield Trouble(
            tuple(small),
            f"{'Its change is' if len(small) == 1 else 'Their changes are'} "
            f"{_span(small.values())} times smaller than that of {largest.name}",
            f"In an election {largest.name} has its way in nearly every element that it changes",
            'Use a method without election, such as "dare+sum", or in ties give a weight of '
            f"{weights}",
            {
                **{f"ratio.{name}": ratio for name, ratio in small.items()},
                "limit.outweighed": limit("outweighed"),
            },
        )


def _span(numbers: Iterable[float]) -> str:
    """The lowest and the highest, if they differ.

    >>> _span([3.21, 14.02]), _span([3.21])
    ('3.2 to 14', '3.2')
    """
    found = sorted(numbers)
    return " to ".join(dict.fromkeys(f"{number:.2g}" for number in (found[0], found[-1])))


# ---------------------------------------------------------------- all of them


@rule(Severity.CHANGE)
def cancelling(seen: Seen) -> Iterator[Trouble]:
    """Changes of three models or more that cancel each other more than by chance."""
    sizes = [model.total.mean_magnitude for model in seen.analysis.models]
    sizes = [size for size in sizes if size]
    if len(sizes) < 3:
        return  # of two models `opposed` tells more
    chance = 1 - math.hypot(*sizes) / sum(sizes)
    cancelled = seen.analysis.together.cancelled
    if cancelled > chance + limit("cancelled"):
        yield Trouble(
            (),
            f"{cancelled:.0%} of all change is lost when the models are added up; with independent "
            f"ones it would be {chance:.0%}",
            "The models work against each other",
            'Elect signs, method = "dare+ties", or merge fewer of them',
            {"cancelled": cancelled, "chance": chance, "limit.cancelled": limit("cancelled")},
        )


@rule(Severity.CHANGE)
def vocabulary(seen: Seen) -> Iterator[Trouble]:
    """Embeddings or heads with other rows than the base's."""
    unfit = _unfit(seen.analysis)
    embeddings = [line for line in unfit if is_embedding(_tensor(line))]
    matched = [note for note in seen.analysis.notes if "rows are matched by token" in note]
    if embeddings or matched:
        yield Trouble(
            _named(seen.analysis, [*embeddings, *matched]),
            f"The vocabularies differ: {_listed([*embeddings, *matched], 1)}",
            "A row of the embedding is a token, and rows of different tokens must not be merged",
            'Set vocabulary = "base" to keep the base\'s tokens, or vocabulary = "union" to have '
            "all of them",
            {"tensors": len(embeddings), "models": len(matched)},
        )


@rule(Severity.CHANGE)
def mismatched(seen: Seen) -> Iterator[Trouble]:
    """Tensors that do not fit the base's."""
    others = [line for line in _unfit(seen.analysis) if not is_embedding(_tensor(line))]
    if others:
        count = len(others)
        yield Trouble(
            _named(seen.analysis, others),
            f"{_counted(count, 'tensor')} could not be compared: {_listed(others, 1)}",
            "A merge refuses that unless told otherwise: where shapes differ, models are seldom "
            "of one family",
            'Set on_mismatch = "base" to keep the base\'s, if you know why they differ',
            {"tensors": count},
        )


@rule(Severity.CHANGE)
def extra_tensors(seen: Seen) -> Iterator[Trouble]:
    """Tensors that the base does not have."""
    extra = [line for line in seen.analysis.left_out if line.endswith(", not in the base")]
    if extra:
        yield Trouble(
            _named(seen.analysis, extra),
            f"{_counted(len(extra), 'tensor')} of the models are not in the base: "
            f"{_listed(map(_tensor, extra))}",
            "A merge refuses that unless told otherwise: without a base there is no change to add",
            'Set on_extra = "drop" to leave them out',
            {"tensors": len(extra)},
        )


@rule(Severity.NOTE)
def tied(seen: Seen) -> Iterator[Trouble]:
    """Weights that are stored once and used twice."""
    changed = any(
        model.by_kind[kind].norm
        for model in seen.analysis.models
        for kind in OUTER
        if kind in model.by_kind
    )
    if seen.analysis.tied and changed:
        yield Trouble(
            (),
            f"The base uses {_listed(seen.analysis.tied)} for its embedding and for its head",
            "What is dropped there is felt at both ends",
            "Set embedding_drop_rate lower than drop_rate",
            {"tensors": len(seen.analysis.tied)},
        )


@rule(Severity.CHANGE)
def other_configuration(seen: Seen) -> Iterator[Trouble]:
    """Configurations that give the same weights another meaning."""
    base = seen.configs.get(BASE)
    if base is None:
        return
    for model in seen.analysis.models:
        own = seen.configs.get(model.name, {})
        differing = [key for key in MEANING if key in own and key in base and own[key] != base[key]]
        if differing:
            told = ", ".join(f"{key} is {own[key]}, the base's {base[key]}" for key in differing)
            yield Trouble(
                (model.name,),
                f"Its configuration is another: {told}",
                "The merged model has one configuration, and weights trained under the other do "
                "not do there what they did",
                "Check that the base is the right one; copy_from says whose configuration an "
                "output directory gets",
                {"keys": len(differing)},
            )


# ---------------------------------------------------------------- what rules ask


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
        return f", {_counted(self.outliers, 'outlier')} left out" if self.outliers else ""

    @property
    def is_foreign(self) -> bool:
        """Whether the model is too far from the base to count as a fine-tune of it."""
        return self.ratio >= limit("foreign_ratio") or self.mean_magnitude >= limit("foreign_delta")


def body_of(model: ModelAnalysis) -> Body:
    """How far the matrices of a model are from the base's.

    Embeddings may be frozen or grown, and say little about where a model comes from.
    """
    kinds = (Kind.ATTENTION, Kind.MLP, Kind.OTHER)
    parts = [model.by_kind[kind] for kind in kinds if kind in model.by_kind]
    parts = [part for part in parts if part.base_norm] or [model.total]
    counted = sum(_counted_elements(part) for part in parts)
    norm = math.hypot(*(part.norm for part in parts))
    base_norm = math.hypot(*(part.base_norm for part in parts))
    magnitude = sum(part.mean_magnitude * _counted_elements(part) for part in parts)
    tensors = [t for t in model.tensors if t.kind in kinds] or list(model.tensors)
    left = [without_outliers(t.statistics, t.shape) for t in tensors]
    squares = [t.statistics.norm**2 for t in tensors]
    if any(squares):
        inside = sum(s * part.squares for s, part in zip(squares, left, strict=True))
        norm *= math.sqrt(inside / sum(squares))
    return Body(
        magnitude / counted if counted else 0.0,
        norm / base_norm if base_norm else 0.0,
        sum(part.outliers for part in left),
    )


def _counted_elements(statistics: Statistics) -> int:
    return statistics.elements - statistics.not_finite


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


def _is_one_direction(seen: Seen, pair: PairAnalysis) -> bool:
    """Whether two deltas are multiples of each other; far from the base they may share a way."""
    name = "far_cosine" if min(_ratios(seen, pair)) >= limit("large_ratio") else "same_cosine"
    return abs(pair.total.cosine) >= limit(name)


def _ratios(seen: Seen, pair: PairAnalysis) -> tuple[float, float]:
    """How far both models of a pair are from the base."""
    first, second = (seen.analysis.model(name) for name in (pair.first, pair.second))
    return body_of(first).ratio, body_of(second).ratio


def _is_one_size(pair: PairAnalysis) -> bool:
    return abs(pair.ratio - 1) <= limit("same_size")


def _pair_figures(pair: PairAnalysis) -> dict[str, float]:
    return {"cosine": pair.total.cosine, "ratio": pair.ratio}


def _limits(*names: str) -> dict[str, float]:
    return {f"limit.{name}": limit(name) for name in names}


def _with_limits(body: Body, *names: str) -> dict[str, float]:
    return {"mean_magnitude": body.mean_magnitude, "ratio": body.ratio} | _limits(*names)


def _unfit(analysis: Analysis) -> list[str]:
    """What is left out because its shape or type is not the base's."""
    return [line for line in analysis.left_out if ": base is " in line]


def _tensor(line: str) -> str:
    """The tensor that a line of `left_out` is about."""
    return line.partition(":")[0].strip()


def _named(analysis: Analysis, lines: Iterable[str]) -> tuple[str, ...]:
    """The models that some lines about tensors are about."""
    texts = list(lines)
    return tuple(
        name
        for name in analysis.names
        if any(
            text.startswith(f"{name}: ") or re.search(rf"(: in |, ){re.escape(name)}(,| is )", text)
            for text in texts
        )
    )


def _listed(names: Iterable[str], shown: int = SHOWN) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    more = len(every) - shown
    return ", ".join(every[:shown]) + (f" and {more} more" if more > 0 else "")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
