"""Settings that suit some models, from what was measured and from what is usually recommended.

    advice = advise(analyze("base", ["math", "code"]))
    print(advice)
    recipe_from_document(advice.recipe, "advice")

What others recommend is in two tables, `GUIDELINES` for drop rates and `METHODS`. Reasons, whose
texts are in `advice.toml`, name what applies of them; what is measured decides:

- **Which models.** What no setting can mend is left out: models that are not ready, a copy of the
  base (in an average it would take a share of the weights and give nothing), the second of two that
  are the same or multiples of each other. A suggestion says so for each.
- **Method.** The average of n independent changes leaves a share 1/n of each, and a vote pays
  only where changes oppose each other. So: `sum` unless models are alike (then `linear`) or opposed
  (then `ties`).
- **Scale.** In a sum of n deltas with mean cosine c the change in the direction of each is
  1 + (n - 1)·c times its own; the scale undoes that.
- **Drop rate.** The largest at which the noise of all models together changes a layer's outputs
  by no more than 5 % (`prediction`), but when several are merged at most 0.6: the
  best rates for merging in the DARE authors' own records were mostly between 0.1 and 0.6, and what
  a model survives is not what is best for a merge.
- **Weights.** Only for `ties`, where the vote of a small delta is drowned: 1/‖δ‖ for each.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from dare.analysis.judge.groups import every, is_against, is_opposed, said_cosines
from dare.analysis.judge.judgement import (
    LEFT_OUT,
    Advice,
    Evidence,
    Protection,
    Readiness,
    Severity,
    Suggestion,
    limit,
)
from dare.analysis.judge.prediction import (
    OUTER,
    Exposure,
    exposure_of,
    exposures_of,
    mean_bounded_error,
    predict,
    surviving_drop_rate,
    tolerated_drop_rate,
)
from dare.analysis.judge.readiness import BASE, assess, readiness_for, settle
from dare.analysis.results import Analysis, Kind, ModelAnalysis, Origin, PairAnalysis
from dare.errors import RecipeError
from dare.inputs.formats import read_config
from dare.output.page.words import share
from dare.stages.darex import balanced_q
from dare.stores.locations import to_path
from dare.tensors.json_values import json_ready
from dare.tensors.mask import check_drop_rate

EMBEDDING_RATE = 0.5
"""Highest drop rate for embeddings and head: rows of rare tokens change seldom."""
EXCESS = 1.05
"""How far a sum may overshoot before it is scaled down."""
WORTH_A_Q = 0.05
"""A q that gives up less of the change than this is not suggested."""
STANDS_OUT = 1.25
"""How many times the error over all layers that of a layer is if it is to be protected."""
MOST_PROTECTED = 5
OUTPUT = "merged.safetensors"
"""Where the recipe merges to."""
RATE_STEP = 0.05
"""Suggested drop rates are multiples of this; more digits would be no more right."""
DOCUMENT_RATES = (*(step / 20 for step in range(1, 20)), 0.98, 0.99)
"""Drop rates for which errors are predicted; those that are advised are among them."""
TEXTS: dict[str, Any] = tomllib.loads(
    files("dare.analysis.judge").joinpath("advice.toml").read_text("utf-8")
)


@dataclass(frozen=True)
class Guideline:
    """A drop rate that is usually recommended."""

    applies_to: str
    lowest: float
    highest: float
    parameters: tuple[float, float] = (0.0, math.inf)
    """The sizes of model that it is for, from and to."""
    steps: tuple[int, int] | None = None
    """Steps of fine-tuning that it is for; None: any."""
    is_lora: bool = False


ABOUT_7B, ABOUT_13B = (5.6e9, 8.75e9), (10.4e9, 16.25e9)
"""Sizes up to a quarter larger, or as much smaller."""
GUIDELINES: tuple[Guideline, ...] = (
    Guideline("7B after 500 to 2,000 steps", 0.85, 0.90, ABOUT_7B, (500, 2_000)),
    Guideline("7B after 2,000 to 10,000 steps", 0.90, 0.95, ABOUT_7B, (2_000, 10_000)),
    Guideline("13B after 500 to 2,000 steps", 0.85, 0.90, ABOUT_13B, (500, 2_000)),
    Guideline("70B or more", 0.90, 0.95, (56e9, math.inf)),
    Guideline("a LoRA", 0.70, 0.85, is_lora=True),
)
"""Of an article on DARE that is often followed; it gives no measurements for them."""
MERGING = Guideline("merging", 0.1, 0.6)
"""Where the best drop rates for merges mostly were in the DARE authors' own records."""


@dataclass(frozen=True)
class Habit:
    """A method that is usually recommended."""

    applies_to: str
    method: str
    models: tuple[int, float]
    """How many models it is for, from and to."""
    relation: str = "diverse"
    """Of the models: diverse, alike or lora; or large, whatever else they are."""


METHODS: tuple[Habit, ...] = (
    Habit("one model", "dare+linear", (1, 1)),
    Habit("2 models of one domain", "linear", (2, 2), "alike"),
    Habit("2 diverse models", "dare+linear", (2, 2)),
    Habit("3 to 5 models of mixed domains", "dare+ties", (3, 5)),
    Habit("more than 5 models", "dare+ties", (6, math.inf)),
    Habit("LoRAs", "dare+linear", (2, math.inf), "lora"),
    Habit("70B or more", "dare", (1, math.inf), "large"),
)
"""Of the same article; the last names no way to combine."""
LARGE = GUIDELINES[3].parameters[0]
"""Parameters from which a model counts as one of 70B or more."""

POLICIES = {
    "missing_tensors": ("on_missing", "base"),
    "mismatched": ("on_mismatch", "base"),
    "extra_tensors": ("on_extra", "drop"),
    "vocabulary": ("vocabulary", "base"),
}
"""Findings that a setting of the recipe takes care of."""


@dataclass
class Member:
    """A model that takes part, and the settings it gets."""

    model: ModelAnalysis
    weight: float | None = None
    """None: the method's own."""
    drop_rate: float = 0.0


@dataclass
class Draft:
    """Advice in the making."""

    analysis: Analysis
    members: list[Member]
    combine: str = "linear"
    scale: float = 1.0
    q: float | None = None
    embedding_drop_rate: float | None = None
    policies: dict[str, str] = field(default_factory=dict)
    suggestions: list[Suggestion] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def suggest(
        self, setting: str, value: float | str, ground: str, model: str | None = None, **known: Any
    ) -> None:
        """Add a suggestion, on one of the grounds in `advice.toml`."""
        text = TEXTS["grounds"][ground]
        reason, source = (text[part].format_map(known) for part in ("reason", "source"))
        evidence = Evidence(text["evidence"])
        self.suggestions.append(Suggestion(setting, value, model, reason, source, evidence))

    def doubt(self, name: str, **known: Any) -> None:
        """Add something that the advice cannot know."""
        self.doubts.append(TEXTS["doubts"][name].format_map(known))

    @property
    def count(self) -> int:
        """How many models take part."""
        return len(self.members)

    @property
    def pairs(self) -> list[PairAnalysis]:
        """The pairs of members."""
        names = {member.model.name for member in self.members}
        return [pair for pair in self.analysis.pairs if {pair.first, pair.second} <= names]

    @property
    def cosines(self) -> list[float]:
        """Those of the pairs."""
        return [pair.total.cosine for pair in self.pairs]

    @property
    def norms(self) -> dict[str, float]:
        """How large each member's delta is, by name."""
        return {member.model.name: member.model.total.inliers.norm for member in self.members}

    @property
    def is_average(self) -> bool:
        """Whether several models are averaged, which are alike then."""
        return self.combine == "linear" and self.count > 1

    @property
    def drops(self) -> bool:
        """Whether anything is dropped."""
        return any(member.drop_rate for member in self.members)

    @property
    def stage(self) -> str:
        """The stage that drops."""
        return "dare" if self.q is None else "darex"

    @property
    def method(self) -> str:
        """The method, with what drops."""
        return f"{self.stage}+{self.combine}" if self.drops else self.combine

    @property
    def share(self) -> float:
        """How much of a model's error is in the merge."""
        return abs(self.scale) / (self.count if self.combine == "linear" else 1)

    @property
    def bound(self) -> float:
        """The error that each model's own outputs may have so that the merge's stay in bounds."""
        return limit("output_error") / (self.share * math.sqrt(self.count))


def judge(
    analysis: Analysis,
    *,
    steps: int | None = None,
    method: str = "",
    drop_rate: float | None = None,
) -> tuple[Readiness, Advice]:
    """The advice for models, and the verdict on merging them by a method: by default as advised.

    What the advised recipe takes care of is then a note. Configurations count where there are any.
    """
    inputs = {BASE: analysis.base} | {model.name: model.file for model in analysis.models}
    configs = {name: read_config(to_path(file)) or {} for name, file in inputs.items()}
    readiness = assess(analysis, configs)
    advice = advise(analysis, readiness, steps=steps, drop_rate=drop_rate)
    if method:
        return readiness_for(readiness, method), advice
    if advice.recipe:
        readiness = readiness_for(readiness, advice.recipe["method"])
    return settle(readiness, advice, analysis), advice


def to_json(analysis: Analysis, readiness: Readiness, advice: Advice) -> str:
    """All of it as one document (docs/analysis-schema.md), which `Analysis.from_json` reads too."""
    predictions = [
        {
            "model": model.name,
            **asdict(predict(model.total, rate)),
            "bounded_error": mean_bounded_error(exposures, rate),
        }
        for model in analysis.models
        for exposures in [exposures_of(model)]
        for rate in DOCUMENT_RATES
    ]
    document: dict[str, Any] = {
        **json_ready(analysis.to_dict()),
        "predictions": json_ready(predictions),
        "readiness": readiness.to_dict(),
        "advice": advice.to_dict(),
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def advise(
    analysis: Analysis,
    readiness: Readiness | None = None,
    *,
    drop_rate: float | None = None,
    parameters: float | None = None,
    steps: int | None = None,
) -> Advice:
    """Say which settings suit the models, and why.

    `drop_rate` is one that is wanted, and then q is sought for it; `parameters` is the size of the
    models if it is not that of the base, and `steps` for how long they were fine-tuned. Both only
    decide which guidelines are named; the measurement decides the drop rate.
    """
    if steps is not None and steps < 1:
        raise RecipeError(f"steps = {steps}: must be at least 1")
    readiness = assess(analysis) if readiness is None else readiness
    draft = Draft(analysis, [Member(model) for model in analysis.models])
    _leave_out(draft, readiness)
    if not draft.members:
        draft.doubt("nothing_left")
        return Advice(tuple(draft.suggestions), {}, tuple(draft.doubts))
    _choose_combine(draft)
    _choose_scale(draft)
    _balance_votes(draft)
    size = float(sum(analysis.base_dtypes.values())) if parameters is None else parameters
    guidelines = {
        member.model.name: _describe_guidelines(member.model, size, steps)
        for member in draft.members
    }
    if not any(member.model.was_dropped for member in draft.members):
        if drop_rate is None:
            _choose_drop_rates(draft, guidelines)
        else:
            _choose_q(draft, check_drop_rate(drop_rate), guidelines)
        _choose_embedding_rate(draft)
    elif drop_rate is not None:
        raise RecipeError("changes were dropped from a delta file already; leave drop_rate out")
    _choose_policies(draft, readiness)
    _name_method(draft, size)
    if any(finding.rule in ("contained", "other_base") for finding in readiness.findings):
        draft.doubt("base")
    _doubt(draft)
    error = _merged_error(draft, [exposures_of(member.model) for member in draft.members])
    return Advice(
        tuple(draft.suggestions),
        _recipe(draft),
        tuple(draft.doubts),
        predicted_error=error,
        error_bound=limit("output_error"),
        error_share=draft.bound,
        protect=tuple(_protected(draft, error)),
    )


def _leave_out(draft: Draft, readiness: Readiness) -> None:
    """Take out the models that no setting can make fit."""
    out: set[str] = set()
    for finding in readiness.findings:
        first, *others = [name for name in finding.models if name not in out] or [""]
        if finding.rule == "equals_base" or finding.severity is Severity.STOP:
            unfit, ground = [first, *others], "left_out"
        elif finding.rule in ("same_model", "multiple"):
            unfit, ground = others, finding.rule
        else:
            continue
        for name in filter(None, unfit):
            out.add(name)
            against = is_against(finding.figures, first, name)
            known = {"kept": first, "how": "opposite to" if against else "a multiple of"}
            draft.suggest("models", LEFT_OUT, ground, name, **known, **vars(finding))
    draft.members = [member for member in draft.members if member.model.name not in out]


# ---------------------------------------------------------------- how to combine


def _choose_combine(draft: Draft) -> None:
    if any(is_opposed(pair) for pair in draft.pairs):
        draft.combine = "ties"
    elif draft.count > 1 and _mean(draft.cosines) < limit("alike_cosine"):
        draft.combine = "sum"


def _name_method(draft: Draft, parameters: float) -> None:
    """Suggest the method, now that it is known whether anything is dropped."""
    relation = "diverse"
    if draft.count == 2 and draft.is_average:
        relation = "alike"
    elif draft.count > 1 and all(m.model.origin is Origin.LORA for m in draft.members):
        relation = "lora"
    habit = next(
        habit
        for habit in METHODS
        if habit.relation == relation and habit.models[0] <= draft.count <= habit.models[1]
    )
    usual = f". For {habit.applies_to} {habit.method} is usually recommended"
    if parameters >= LARGE:
        usual += TEXTS["large"]["usual"]
    undropped = ". Nothing is dropped, because "
    if draft.drops:
        undropped = ""
    elif draft.is_average:
        undropped += "such models are not in each other's way"
    else:
        undropped += "the bound on the error leaves nothing to drop"
    known: dict[str, Any] = {"usual": usual, "undropped": undropped}
    if draft.count == 1:
        ground = "one_model"
    elif draft.combine == "ties":
        ground = "opposed"
        worst = min(draft.pairs, key=lambda pair: pair.total.cosine - pair.total.conflict)
        known |= {"first": worst.first, "second": worst.second}
        known |= {"cosine": worst.total.cosine, "conflict": worst.total.conflict}
    elif draft.combine == "linear":
        ground = "alike"
        known |= {"mean": _mean(draft.cosines), "usual": usual if relation == "alike" else ""}
    else:
        ground = "apart"
        known |= {"cosines": said_cosines(draft.cosines), "share": 1 / draft.count}
    draft.suggest("method", draft.method, ground, **known)
    draft.suggestions.insert(0, draft.suggestions.pop())


def _choose_scale(draft: Draft) -> None:
    if draft.combine != "sum":
        return
    cosine = max(0.0, _mean(draft.cosines))
    excess = 1 + (draft.count - 1) * cosine
    draft.scale = 1.0 if excess < EXCESS else round(1 / excess, 2)
    draft.suggest("scale", draft.scale, "scale", cosine=cosine, excess=excess)
    draft.doubt("disturbance", average=1 / draft.count)
    smallest, *_, largest = sorted(draft.norms, key=lambda name: draft.norms[name])
    if draft.norms[largest] >= limit("outweighed") * draft.norms[smallest]:
        ratio = draft.norms[largest] / draft.norms[smallest]
        draft.doubt("unequal", largest=largest, smallest=smallest, ratio=ratio)


def _balance_votes(draft: Draft) -> None:
    """Give small deltas a louder voice in a vote; their size is not changed by it."""
    least, most = min(draft.norms.values()), max(draft.norms.values())
    if draft.combine != "ties" or not least or most < limit("outweighed") * least:
        return
    for member in draft.members:
        member.weight = round(most / draft.norms[member.model.name], 2)
        draft.suggest("weight", member.weight or 1.0, "weight", member.model.name)


# ---------------------------------------------------------------- how much to drop


def _choose_drop_rates(draft: Draft, guidelines: dict[str, str]) -> None:
    if draft.is_average:
        return  # alike models do not get in each other's way
    for member in draft.members:
        exposures = exposures_of(member.model)
        tolerated = tolerated_drop_rate(exposures, bound=draft.bound)
        highest = MERGING.highest if draft.count > 1 else limit("highest_rate")
        if member.model.origin is Origin.LORA:
            highest = min(highest, limit("low_rank_rate"))
        rate = member.drop_rate = _stepped(min(tolerated, highest))
        if not rate:
            ground = "worthless"
        elif rate > tolerated - RATE_STEP:
            ground = "bound"
        else:
            ground = "merging" if draft.count > 1 else "lora"
        known: dict[str, Any] = {"cost": _cost(draft, exposures, rate)}
        known |= {"guidelines": guidelines[member.model.name], "tolerated": tolerated}
        known |= {"rate": rate, "least": limit("useful_rate"), "merging": MERGING}
        draft.suggest("drop_rate", rate, ground, member.model.name, **known)


def _cost(draft: Draft, exposures: Sequence[Exposure], rate: float) -> str:
    """What dropping at a rate costs a model, for sentences; at the least useful rate if it is 0."""
    if not any(math.isfinite(each.relative_norm) for each in exposures if each.carriers):
        return "Its base is zero, so that there is no relative error; the survivors decide"
    dropped = f"Dropping {100 * rate:.4g}%" if rate else f"Dropping only {limit('useful_rate'):.0%}"
    dropped += "" if draft.q is None else f" with q = {draft.q:g}"
    error = share(mean_bounded_error(exposures, rate or limit("useful_rate"), draft.q))
    bound = f"{limit('output_error'):.0%} is the bound"
    if draft.count > 1:
        models = f"{every(draft.count)} models"
        scaled = "" if draft.scale == 1 else f" after the scale of {draft.scale:g}"
        together = f"the {limit('output_error'):.0%} that {models} may bring together{scaled}"
        bound = f"{share(draft.bound)} is its share of {together}"
    return (
        f"{dropped} is predicted to bring up to {error} error to the outputs of its layers; {bound}"
    )


def find_guidelines(is_lora: bool, parameters: float, steps: int | None) -> list[Guideline]:
    """The guidelines for a model: those of its kind, its size and, if given, its steps.

    >>> [row.applies_to for row in find_guidelines(False, 6.7e9, 1000)]
    ['7B after 500 to 2,000 steps']
    >>> find_guidelines(False, 6.7e9, 50_000)
    []
    """
    return [
        row
        for row in GUIDELINES
        if row.is_lora == is_lora
        and row.parameters[0] <= parameters <= row.parameters[1]
        and (steps is None or row.steps is None or row.steps[0] <= steps <= row.steps[1])
    ]


def _describe_guidelines(model: ModelAnalysis, parameters: float, steps: int | None) -> str:
    """The guidelines for a model, to follow a reason; nothing if there are none."""
    rows = find_guidelines(model.origin is Origin.LORA, parameters, steps)
    ranges = [f"{row.lowest} to {row.highest} for {row.applies_to}" for row in rows]
    return f". The guideline is {' and '.join(ranges)}" if ranges else ""


def _choose_q(draft: Draft, drop_rate: float, guidelines: dict[str, str]) -> None:
    """Keep to a drop rate that is wanted, and bound its noise by q where that is needed."""
    q = balanced_q(drop_rate, draft.count)
    lost = 1 - (1 - drop_rate) / q
    draft.q = q if lost >= WORTH_A_Q else None
    for member in draft.members:
        member.drop_rate, name = drop_rate, member.model.name
        cost = f". {_cost(draft, exposures_of(member.model), drop_rate)}" if drop_rate else ""
        known = {"cost": cost, "guidelines": guidelines[name]}
        draft.suggest("drop_rate", drop_rate, "wanted", name, **known)
    if draft.q is not None:
        models = "one model" if draft.count == 1 else f"{draft.count} models"
        draft.suggest("q", q, "q", rate=drop_rate, models=models, lost=lost)


def _choose_embedding_rate(draft: Draft) -> None:
    rates = []
    for member in draft.members:
        exposures = [exposure_of(t) for t in member.model.tensors if t.kind in OUTER]
        if any(exposure.carriers for exposure in exposures):
            tolerated = tolerated_drop_rate(exposures, bound=draft.bound)
            rates.append(min(tolerated, surviving_drop_rate(exposures)))
    others = [member.drop_rate for member in draft.members if member.drop_rate]
    if not rates or not others:
        return
    rate = _stepped(min([*rates, *others, EMBEDDING_RATE]))
    if rate < max(others):
        draft.embedding_drop_rate = rate
        rule = ". A q belongs to one drop rate, so that these tensors have a rule with both"
        known: dict[str, Any] = {"highest": min(rates), "rule": "" if draft.q is None else rule}
        known |= {"survivors": limit("survivors"), "most": EMBEDDING_RATE, "lowest": min(others)}
        draft.suggest("embedding_drop_rate", rate, "embeddings", **known)


# ---------------------------------------------------------------- what dropping costs


def _merged_error(
    draft: Draft, exposures: Sequence[Sequence[Exposure]], drop_rate: float | None = None
) -> float:
    """The bounded error of a merge's outputs, at the advised drop rates or at one for all.

    `exposures` are those of each member. Errors of different models are independent, so that their
    squares add up.
    """
    rates = [member.drop_rate if drop_rate is None else drop_rate for member in draft.members]
    errors = map(mean_bounded_error, exposures, rates, itertools.repeat(draft.q))
    return draft.share * math.hypot(*errors)


def _protected(draft: Draft, mean: float) -> list[Protection]:
    """The layers, by kind of tensor, whose error is far above the mean, the worst first."""
    if draft.q is not None or not mean:
        return []
    cells: dict[tuple[int, Kind], list[dict[str, Exposure]]] = {}
    for place, member in enumerate(draft.members):
        for tensor in member.model.tensors:
            cell = cells.setdefault((tensor.layer, tensor.kind), [{} for _ in draft.members])
            cell[place][tensor.name] = exposure_of(tensor)
    found = []
    for (layer, kind), cell in cells.items():
        exposures = [list(tensors.values()) for tensors in cell]
        error = _merged_error(draft, exposures)
        if kind not in OUTER and error >= STANDS_OUT * mean:
            steps = range(round(1 / RATE_STEP) - 1, -1, -1)
            rates = (round(step * RATE_STEP, 2) for step in steps)
            rate = next(rate for rate in rates if _merged_error(draft, exposures, rate) <= mean)
            names = tuple(dict.fromkeys(name for tensors in cell for name in tensors))
            found.append(Protection(layer, kind, error, _stepped(rate), names))
    return sorted(found, key=lambda each: -each.error)[:MOST_PROTECTED]


# ---------------------------------------------------------------- the rest of the recipe


def _choose_policies(draft: Draft, readiness: Readiness) -> None:
    for finding in readiness.findings:
        concerned = not finding.models or draft.norms.keys() & set(finding.models)
        setting, value = POLICIES.get(finding.rule, ("", ""))
        if setting and concerned and setting not in draft.policies:
            draft.policies[setting] = value
            draft.suggest(setting, value, "policy", **vars(finding))


def _doubt(draft: Draft) -> None:
    if draft.count == 1:
        draft.doubt("one_model")
    for name in ("untried_rates", "predicted") if draft.drops else ("untried",):
        draft.doubt(name)
    if draft.is_average:
        draft.doubt("weak_average")


def _recipe(draft: Draft) -> dict[str, Any]:
    """The document of a recipe, which can be run as it is."""
    rates = [member.drop_rate for member in draft.members]
    common = max(rates, key=lambda rate: (rates.count(rate), rate))  # what most members have
    document: dict[str, Any] = {
        "base": draft.analysis.base,
        "models": [_entry(member, common) for member in draft.members],
        "output": OUTPUT,
        "method": draft.method,
    }
    if draft.scale != 1:
        document["scale"] = draft.scale
    if draft.embedding_drop_rate is not None and draft.q is None:
        document["embedding_drop_rate"] = draft.embedding_drop_rate
    document |= draft.policies
    if draft.drops:
        q = {} if draft.q is None else {"q": draft.q}
        document[draft.stage] = {"drop_rate": common, **q}
    if draft.embedding_drop_rate is not None and draft.q is not None:
        outer = {t.name for m in draft.members for t in m.model.tensors if t.kind in OUTER}
        rule = {
            "match": [glob.escape(name) for name in sorted(outer)],
            "drop_rate": draft.embedding_drop_rate,
            "q": balanced_q(draft.embedding_drop_rate, draft.count),
        }
        document["tensors"] = [rule]
    return document


def _entry(member: Member, common: float) -> str | dict[str, Any]:
    """A model of the recipe: its file, with what differs from the others."""
    given = {} if member.weight is None else {"weight": member.weight}
    if member.drop_rate != common:
        given["drop_rate"] = member.drop_rate
    return {"file": member.model.file, **given} if given else member.model.file


def _stepped(rate: float) -> float:
    """Down to a multiple of the step, and to 0 where it is not worth its noise."""
    stepped = round(math.floor(rate / RATE_STEP + 1e-9) * RATE_STEP, 2)
    return stepped if stepped >= limit("useful_rate") else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
