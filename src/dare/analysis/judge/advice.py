"""Settings that suit some models, from what was measured and from what is usually recommended.

    advice = advise(analyze("base", ["math", "code"]))
    print(advice)
    recipe_from_document(advice.recipe, "advice")

What others recommend is in two tables, `GUIDELINES` for drop rates and `METHODS`. Reasons name what
applies of them; what is measured decides:

- **Which models.** What no setting can mend is left out: models that are not ready, a copy of the
  base (in an average it would take a share of the weights and give nothing), the second of two that
  are the same or multiples of each other. A suggestion says so for each.
- **Method.** The average of n independent changes leaves a share 1/n of each, and an election pays
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
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dare.analysis.judge.judgement import Advice, Evidence, Readiness, Severity, Suggestion
from dare.analysis.judge.limits import limit
from dare.analysis.judge.prediction import (
    OUTER,
    Exposure,
    balanced_q,
    exposure_of,
    exposures_of,
    mean_bounded_error,
    surviving_drop_rate,
    tolerated_drop_rate,
)
from dare.analysis.judge.readiness import assess, body_of
from dare.analysis.results import Analysis, ModelAnalysis, Origin, PairAnalysis
from dare.errors import RecipeError
from dare.tensors.mask import check_drop_rate

EMBEDDING_RATE = 0.5
"""Highest drop rate for embeddings and head: rows of rare tokens change seldom."""
EXCESS = 1.05
"""How far a sum may overshoot before it is scaled down."""
WORTH_A_Q = 0.05
"""A q that gives up less of the change than this is not suggested."""
RATE_STEP = 0.05
"""Suggested drop rates are multiples of this; more digits would be no more right."""


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

    told: str
    method: str
    models: tuple[int, int | None]
    """How many models it is for, from and to."""
    relation: str = "diverse"
    """Of the models: diverse, alike or lora."""


METHODS: tuple[Habit, ...] = (
    Habit("one model", "dare+linear", (1, 1)),
    Habit("2 models of one domain", "linear", (2, 2), "alike"),
    Habit("2 diverse models", "dare+linear", (2, 2)),
    Habit("3 to 5 models of mixed domains", "dare+ties", (3, 5)),
    Habit("more than 5 models", "dare+ties", (6, None)),
    Habit("LoRAs", "dare+linear", (2, None), "lora"),
)
"""Of the same article."""

ARTICLE = "a common guideline"
MEASURED = "measured here"
DEMO = "the demonstration's models (docs/demo.md)"
MINILM = "fine-tunes of MiniLM (training/README.md)"
TRACKER = "arXiv:2311.03099, the authors' records"


@dataclass(frozen=True)
class Member:
    """A model that takes part, and the settings it gets."""

    model: ModelAnalysis
    weight: float | None = None
    """None: the method's own."""
    drop_rate: float = 0.0
    q: float | None = None

    @property
    def outer_exposures(self) -> list[Exposure]:
        """Of embeddings and head."""
        return [exposure_of(t) for t in self.model.tensors if t.kind in OUTER]


@dataclass
class Draft:
    """Advice in the making."""

    analysis: Analysis
    members: list[Member]
    combine: str = "linear"
    scale: float = 1.0
    embedding_drop_rate: float | None = None
    policies: dict[str, str] = field(default_factory=dict)
    suggestions: list[Suggestion] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def suggest(
        self,
        setting: str,
        value: float | str,
        reason: str,
        source: str,
        evidence: Evidence,
        *,
        model: str | None = None,
    ) -> None:
        """Add a suggestion."""
        self.suggestions.append(Suggestion(setting, value, model, reason, source, evidence))

    @property
    def pairs(self) -> list[PairAnalysis]:
        """The pairs of members."""
        names = {member.model.name for member in self.members}
        return [pair for pair in self.analysis.pairs if {pair.first, pair.second} <= names]

    def share(self, member: Member) -> float:
        """How much of a member's delta goes into the merge: what its noise is multiplied with."""
        usual = 1 / len(self.members) if self.combine == "linear" else 1.0
        weight = usual if member.weight is None or self.combine == "ties" else member.weight
        return abs(self.scale * weight)

    def bound(self, member: Member) -> float:
        """The error that a member's own outputs may have so that the merge's stay in bounds."""
        return limit("output_error") / (self.share(member) * math.sqrt(len(self.members)))


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
        draft.doubts.append("No model is left that could be merged; there is no recipe")
        return Advice(tuple(draft.suggestions), {}, tuple(draft.doubts))
    _choose_method(draft)
    _choose_scale(draft)
    _balance_votes(draft)
    size = _size(analysis) if parameters is None else parameters
    if drop_rate is None:
        _choose_drop_rates(draft, size, steps)
    else:
        _choose_q(draft, check_drop_rate(drop_rate), size, steps)
    _choose_embedding_rate(draft)
    _choose_policies(draft, readiness)
    _name_method(draft)
    _doubt(draft)
    return Advice(tuple(draft.suggestions), _recipe(draft), tuple(draft.doubts))


# ---------------------------------------------------------------- which models


def _leave_out(draft: Draft, readiness: Readiness) -> None:
    out: dict[str, None] = {}
    for finding in readiness.findings:
        if finding.rule == "equals_base" or finding.severity is Severity.STOP:
            gone = finding.models
        elif finding.rule in ("same_model", "multiple") and finding.models[0] not in out:
            gone = finding.models[1:]
        else:
            continue
        for name in gone:
            if name in out:
                continue
            out[name] = None
            reason = f"{finding.seen}. {finding.matters}"
            source = f"readiness, {finding.rule}"
            draft.suggest("merge_files", "left out", reason, source, Evidence.STRONG, model=name)
    draft.members = [member for member in draft.members if member.model.name not in out]


# ---------------------------------------------------------------- how to combine


def _choose_method(draft: Draft) -> None:
    count = len(draft.members)
    if count == 1:
        draft.combine = "linear"
        return
    cosines = [pair.total.cosine for pair in draft.pairs]
    if any(_is_opposed(pair) for pair in draft.pairs):
        draft.combine = "ties"
    elif cosines and _mean(cosines) >= limit("alike_cosine"):
        draft.combine = "linear"
    else:
        draft.combine = "sum"


def _name_method(draft: Draft) -> None:
    """Suggest the method, now that it is known whether anything is dropped."""
    count = len(draft.members)
    relation = _relation(draft)
    habit = next(h for h in METHODS if h.relation == relation and _covers(h.models, count))
    reason, source, evidence = _grounds(draft, habit)
    if not _drops(draft) and draft.combine == "linear" and count > 1:
        reason += "; nothing is dropped, because such models are not in each other's way"
    elif not _drops(draft):
        reason += "; nothing is dropped, because the bound on the error leaves nothing to drop"
    draft.suggestions.insert(
        0, Suggestion("method", _method(draft), None, reason, source, evidence)
    )


def _grounds(draft: Draft, habit: Habit) -> tuple[str, str, Evidence]:
    """Why the deltas are combined as they are, whence that comes, and how sure it is."""
    usual = f"; for {habit.told} {habit.method} is usually recommended"
    if len(draft.members) == 1:
        return "There is one model, and all methods are the same", "arithmetic", Evidence.STRONG
    cosines = [pair.total.cosine for pair in draft.pairs]
    if draft.combine == "ties":
        worst = min(draft.pairs, key=lambda pair: pair.total.cosine - pair.total.conflict)
        return (
            f"{worst.first} and {worst.second} oppose each other (cosine "
            f"{worst.total.cosine:.2f}, {worst.total.conflict:.0%} of their common elements in "
            f"opposite directions), and a vote settles each element{usual}",
            "arXiv:2306.01708",
            Evidence.FAIR,
        )
    if draft.combine == "linear":
        return (
            f"The models change the base in much the same direction (mean cosine "
            f"{_mean(cosines):.2f}), and a sum would take that more than once"
            f"{usual if habit.relation == 'alike' else ''}",
            ARTICLE,
            Evidence.WEAK,
        )
    share = 1 / len(draft.members)
    return (
        f"The models change the base in different directions (cosines {min(cosines):.2f} to "
        f"{max(cosines):.2f}): an average would leave {share:.0%} of each change, and there is "
        f"nothing to elect{usual}, but in a comparison of six methods on language models only "
        "the sum gained reliably; with fine-tunes of MiniLM the average was better",
        f"arXiv:2511.21437; {DEMO}; {MINILM}",
        Evidence.WEAK,
    )


def _choose_scale(draft: Draft) -> None:
    if draft.combine != "sum":
        return
    count = len(draft.members)
    cosine = max(0.0, _mean([pair.total.cosine for pair in draft.pairs]))
    excess = 1 + (count - 1) * cosine
    draft.scale = 1.0 if excess < EXCESS else round(1 / excess, 2)
    shared = f"The mean cosine is {cosine:.2f}: a plain sum changes the base in the direction of "
    shared += f"each model {excess:.2f} times as much as that model does"
    draft.doubts.append(
        "Changes at right angles can disturb each other's tasks all the same, the more so where "
        "the base can do much of them already; try scales down to "
        f"{1 / count:.2g}, the average, too"
    )
    draft.suggest("scale", draft.scale, shared, MEASURED, Evidence.WEAK)
    members = sorted((member.model for member in draft.members), key=lambda m: m.total.norm)
    if members[-1].total.norm >= limit("outweighed") * members[0].total.norm:
        ratio = members[-1].total.norm / members[0].total.norm
        draft.doubts.append(
            f"{members[-1].name} changes the base {ratio:.2g} times as much as {members[0].name}; "
            "leave it out, or give it a smaller weight, unless the sum shall be mostly that model"
        )


def _balance_votes(draft: Draft) -> None:
    """Give small deltas a louder voice in an election; their size is not changed by it."""
    if draft.combine != "ties":
        return
    norms = [member.model.total.norm for member in draft.members]
    if not min(norms) or max(norms) < limit("outweighed") * min(norms):
        return
    draft.members = [
        replace(member, weight=round(max(norms) / norm, 2))
        for member, norm in zip(draft.members, norms, strict=True)
    ]
    for member in draft.members:
        draft.suggest(
            "weight",
            member.weight or 1.0,
            "The deltas differ in size, and the largest would win every vote; weights in ties "
            "weigh votes, and where a model is alone they change nothing",
            f"{DEMO}: 81 % of answers right with such weights, 59 % without",
            Evidence.WEAK,
            model=member.model.name,
        )


# ---------------------------------------------------------------- how much to drop


def _choose_drop_rates(draft: Draft, parameters: float, steps: int | None) -> None:
    if draft.combine == "linear" and len(draft.members) > 1:
        return  # alike models do not get in each other's way
    chosen = []
    for member in draft.members:
        tolerated = tolerated_drop_rate(exposures_of(member.model), bound=draft.bound(member))
        guidelines = _told_guidelines(member, parameters, steps)
        highest = MERGING.highest if len(draft.members) > 1 else limit("highest_rate")
        if member.model.origin is Origin.LORA:
            highest = min(highest, limit("low_rank_rate"))
        rate = _stepped(min(tolerated, highest))
        chosen.append(replace(member, drop_rate=rate))
        reason, source, evidence = _rate_grounds(draft, member, rate, tolerated, guidelines)
        draft.suggest("drop_rate", rate, reason, source, evidence, model=member.model.name)
    draft.members = chosen


def _rate_grounds(
    draft: Draft, member: Member, rate: float, tolerated: float, guidelines: str
) -> tuple[str, str, Evidence]:
    body, bound, least = body_of(member.model), limit("output_error"), limit("useful_rate")
    reason = f"Its change is {body.ratio:.1%} of the base{body.left_out}"
    if tolerated >= least:
        reason += f", which keeps the error of a layer's outputs within {bound:.0%} up to a drop "
        reason += f"rate of {tolerated}"
    else:
        error = mean_bounded_error(exposures_of(member.model), least) * bound / draft.bound(member)
        reason += f"; a drop rate of {least} brings an error of up to {error:.1%} to a layer's "
        reason += f"outputs, and {bound:.0%} is the bound"
    if len(draft.members) > 1:
        reason += f", the noise of {len(draft.members)} models together"
    reason += guidelines
    measured = f"{MEASURED}, by a bound that is a choice"
    if not rate:
        reason += f". Below {least} dropping is not worth its noise"
        return reason, measured, Evidence.FAIR
    if rate > tolerated - RATE_STEP:
        return reason, measured, Evidence.FAIR
    if len(draft.members) > 1:
        reason += (
            f". That is what a model survives; the best rates for merging were mostly "
            f"{MERGING.lowest} to {MERGING.highest}"
        )
        return reason, TRACKER, Evidence.WEAK
    return f"{reason}. Above {rate} is not usual for LoRAs", ARTICLE, Evidence.WEAK


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


def _told_guidelines(member: Member, parameters: float, steps: int | None) -> str:
    """The guidelines for a member, to follow a reason; nothing if there are none."""
    rows = find_guidelines(member.model.origin is Origin.LORA, parameters, steps)
    ranges = [f"{row.lowest} to {row.highest} for {row.applies_to}" for row in rows]
    return f"; the guideline is {' and '.join(ranges)}" if ranges else ""


def _choose_q(draft: Draft, drop_rate: float, parameters: float, steps: int | None) -> None:
    """Keep to a drop rate that is wanted, and bound its noise by q where that is needed."""
    count = len(draft.members)
    q = balanced_q(drop_rate, count)
    lost = 1 - (1 - drop_rate) / q
    for member in draft.members:
        reason = f"It is the one that was asked for{_told_guidelines(member, parameters, steps)}"
        name = member.model.name
        draft.suggest("drop_rate", drop_rate, reason, "you", Evidence.STRONG, model=name)
    draft.members = [replace(member, drop_rate=drop_rate) for member in draft.members]
    if lost < WORTH_A_Q:
        return
    draft.members = [replace(member, q=q) for member in draft.members]
    draft.suggest(
        "q",
        q,
        f"At {drop_rate} the noise of {_counted(count)} is large beside what is learnt; giving up "
        f"{lost:.0%} of each change for less of it pays",
        f"arXiv:2410.09344; its size: {DEMO}; a search on data finds a better one",
        Evidence.WEAK,
    )


def _choose_embedding_rate(draft: Draft) -> None:
    if not _drops(draft):
        return
    outer = [(draft.bound(member), member.outer_exposures) for member in draft.members]
    rates = [
        min(tolerated_drop_rate(exposures, bound=bound), surviving_drop_rate(exposures))
        for bound, exposures in outer
        if any(exposure.carriers for exposure in exposures)
    ]
    others = [member.drop_rate for member in draft.members if member.drop_rate]
    if not rates:
        return
    rate = _stepped(min([*rates, *others, EMBEDDING_RATE]))
    if rate >= max(others):
        return
    draft.embedding_drop_rate = rate
    reason = f"Up to {min(rates)} the error of embeddings and head is within the same bound and "
    reason += f"{limit('survivors')} of the elements that carry the change of a row survive; rows "
    reason += "of rare tokens change seldom, and what is dropped there is noticed"
    if _has_q(draft):
        reason += ". A q belongs to one drop rate, so these tensors have a rule with both"
    draft.suggest(
        "embedding_drop_rate",
        rate,
        reason,
        f"{ARTICLE}; {MEASURED}",
        Evidence.WEAK,
    )


# ---------------------------------------------------------------- the rest of the recipe

POLICIES = {
    "missing_tensors": ("on_missing", "base"),
    "mismatched": ("on_mismatch", "base"),
    "extra_tensors": ("on_extra", "drop"),
    "vocabulary": ("vocabulary", "base"),
}
"""Findings that a setting of the recipe takes care of."""


def _choose_policies(draft: Draft, readiness: Readiness) -> None:
    names = {member.model.name for member in draft.members}
    for finding in readiness.findings:
        if finding.rule in POLICIES and (not finding.models or names & set(finding.models)):
            setting, value = POLICIES[finding.rule]
            if setting not in draft.policies:
                draft.policies[setting] = value
                source = f"readiness, {finding.rule}"
                draft.suggest(setting, value, finding.seen, source, Evidence.STRONG)


def _doubt(draft: Draft) -> None:
    if len(draft.members) == 1:
        draft.doubts.append("There is only one model: nothing is merged, and dropping only costs")
    if _drops(draft):
        draft.doubts.append(
            "What the models can do was not measured. Try drop rates of 0, half of these and these "
            "on held-out data of every task"
        )
        draft.doubts.append(
            "Errors are predicted for inputs that prefer no direction; with the demonstration's "
            "texts those of single layers were 0.3 to 2 times as large"
        )
    else:
        draft.doubts.append(
            "What the models can do was not measured. Try the recipe on held-out data of every task"
        )
    if draft.combine == "linear" and len(draft.members) > 1:
        draft.doubts.append("An average is weaker than each model; try scales above 1")


def _recipe(draft: Draft) -> dict[str, Any]:
    """The document of a recipe, but for the output."""
    document: dict[str, Any] = {"method": _method(draft)}
    if draft.scale != 1:
        document["scale"] = draft.scale
    if draft.embedding_drop_rate is not None and not _has_q(draft):
        document["embedding_drop_rate"] = draft.embedding_drop_rate
    document |= draft.policies
    common: dict[str, float] = {}
    if _drops(draft):
        stage = "darex" if _has_q(draft) else "dare"
        common = _common([_own(member) for member in draft.members])
        document[stage] = common
    document["models"] = {
        "base_file": draft.analysis.base,
        "merge_files": [_entry(member, common, _drops(draft)) for member in draft.members],
    }
    if draft.embedding_drop_rate is not None and _has_q(draft):
        document["tensors"] = [_outer_rule(draft, draft.embedding_drop_rate)]
    return document


def _outer_rule(draft: Draft, drop_rate: float) -> dict[str, Any]:
    """The drop rate of embeddings and head, and the q that belongs to it."""
    tensors = {t.name for member in draft.members for t in member.model.tensors if t.kind in OUTER}
    return {
        "match": [glob.escape(name) for name in sorted(tensors)],
        "drop_rate": drop_rate,
        "q": balanced_q(drop_rate, len(draft.members)),
    }


def _own(member: Member) -> dict[str, float]:
    """The settings of a member for the stage that drops."""
    q = {} if member.q is None else {"q": member.q}
    return {"drop_rate": member.drop_rate, **q}


def _common(settings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What most members have: it stands in the stage's table."""
    rates = [each["drop_rate"] for each in settings]
    common = {"drop_rate": max(rates, key=lambda rate: (rates.count(rate), rate))}
    divisors = [each.get("q") for each in settings]
    if divisors[0] is not None and divisors.count(divisors[0]) == len(divisors):
        common["q"] = divisors[0]
    return common


def _entry(member: Member, common: Mapping[str, float], drops: bool) -> str | dict[str, Any]:
    own = _own(member) if drops else {}
    differing = {name: value for name, value in own.items() if common.get(name) != value}
    weight = {} if member.weight is None else {"weight": member.weight}
    if not weight and not differing:
        return member.model.file
    return {"file": member.model.file, **weight, **differing}


# ---------------------------------------------------------------- what is asked of a draft


def _method(draft: Draft) -> str:
    if not _drops(draft):
        return draft.combine
    return f"{'darex' if _has_q(draft) else 'dare'}+{draft.combine}"


def _drops(draft: Draft) -> bool:
    return any(member.drop_rate for member in draft.members)


def _has_q(draft: Draft) -> bool:
    return any(member.q is not None for member in draft.members)


def _relation(draft: Draft) -> str:
    if len(draft.members) == 1:
        return "diverse"
    if len(draft.members) == 2 and draft.combine == "linear":
        return "alike"
    loras = all(member.model.origin is Origin.LORA for member in draft.members)
    return "lora" if loras else "diverse"


def _is_opposed(pair: PairAnalysis) -> bool:
    overlap = pair.total
    return overlap.cosine <= -limit("apart_cosine") or overlap.conflict >= limit("conflict")


def _stepped(rate: float) -> float:
    """Down to a multiple of the step, and to 0 where it is not worth its noise."""
    stepped = round(math.floor(rate / RATE_STEP + 1e-9) * RATE_STEP, 2)
    return stepped if stepped >= limit("useful_rate") else 0.0


def _counted(models: int) -> str:
    return "one model" if models == 1 else f"{models} models"


def _covers(models: tuple[int, int | None], count: int) -> bool:
    lowest, highest = models
    return lowest <= count and (highest is None or count <= highest)


def _size(analysis: Analysis) -> float:
    """Parameters of the base."""
    return float(sum(analysis.base_dtypes.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
