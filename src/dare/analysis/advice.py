"""A recipe that suits some models, as far as their weights can show.

    advice = advise(analyze("base", ["math", "code"]))
    print(advice)
    request_from_document(advice.recipe, "advice")

Models that no setting can help are left out: those that do not come from this base, copies of the
base, the second of two equal models. The others are averaged, or merged by `tsv` within the limits
in `advice.toml`. That file also has common recommendations, which are quoted but decide nothing.
"""

from __future__ import annotations

import json
import math
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.resources import files
from itertools import chain
from types import SimpleNamespace
from typing import Any

from dare.analysis.prediction import OUTER, exposures_of, mean_bounded_error, predict
from dare.analysis.readiness import Readiness, Verdict, are_opposite, assess, body_of, readiness_for
from dare.analysis.results import AnalysisData, ModelAnalysis, Origin
from dare.documents.document import Code, Document, Section, Table, Tone
from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.shown import Shown, json_ready
from dare.documents.words import amount, counted, value_text
from dare.errors import RecipeError, printable
from dare.recipe.entries import in_our_form, write_toml
from dare.stores.locations import usual_output

EVIDENCE = "docs/evidence.md#what-the-advice-does"
RULES = "docs/readiness.md"
DOCUMENT_RATES = (*(step / 20 for step in range(1, 20)), 0.98, 0.99)
TEXTS: dict[str, Any] = tomllib.loads(
    files("dare.analysis").joinpath("advice.toml").read_text("utf-8")
)
LEFT_OUT = "left out"
"""The value that advice gives to a model that it does not merge."""
# Findings whose models no setting can make fit.
UNFIT_CODES = ("nothing_compared", "not_finite", "unrelated", "equals_base")


def _table(rows: list[dict[str, Any]], **usual: Any) -> list[Any]:
    """Return the rows of a table as objects, with default values for missing ones."""
    return [SimpleNamespace(**{**usual, **row}) for row in rows]


ANY = (0.0, math.inf)
SMALL = SimpleNamespace(**TEXTS["small"])
GUIDELINES = _table(TEXTS["others"]["guidelines"], parameters=ANY, steps=ANY, is_lora=False)
HABITS = _table(TEXTS["others"]["habits"], relation="diverse", parameters=ANY)


class Evidence(StrEnum):
    """The strength of the evidence for a piece of advice."""

    STRONG = "strong"
    """It follows from what was measured."""
    FAIR = "fair"
    """Published experiments agree on it."""


@dataclass(frozen=True)
class Suggestion:
    """One setting of a recipe, and why."""

    setting: str
    """The name in a recipe: `method`, `scale`, `on_missing`; or `models`, for one left out."""
    value: float | str
    """For `models`: left out."""
    model: str | None
    """Whose setting it is; None: of the whole recipe."""
    reason: str
    source: str
    """Where the rule comes from."""
    evidence: Evidence

    def __str__(self) -> str:
        """The setting with its value."""
        if self.setting == "models":
            return f"{self.model} is {self.value}"
        whose = f" for {self.model}" if self.model else ""
        return f"{self.setting} = {value_text(self.value)}{whose}"


@dataclass(frozen=True, repr=False)
class Advice(Shown):
    """Settings that suit the models, each with its reason, and the recipe made of them."""

    suggestions: tuple[Suggestion, ...]
    recipe: dict[str, Any]
    """The document of a recipe, ready for TOML; empty if no model is fit."""
    doubts: tuple[Notice, ...]
    """Caveats: what the advice cannot know."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The models that it does not merge."""
        unfit = [s.model for s in self.suggestions if s.value == LEFT_OUT]
        return tuple(name for name in unfit if name is not None)

    @property
    def command(self) -> str:
        """The command that merges by this recipe, without a file for it."""
        inputs = [self.recipe["base"], *self.recipe["models"]]
        given = {**self.recipe, "base": None, "models": None}
        flags = [
            (f"--{key.replace('_', '-')}", "" if v is True else str(v))
            for key, v in given.items()
            if v is not None
        ]
        return shlex.join(["dare", *inputs, *filter(None, chain(*flags))])

    @property
    def reasons(self) -> Table:
        """Each setting with its reason, source and evidence."""
        rows = tuple((str(s), f"{s.reason}. {s.source}", s.evidence) for s in self.suggestions)
        return Table(("setting", "reason", "evidence"), rows)

    def document(self) -> Document:
        """Return the settings with their reasons, the recipe and the caveats."""
        reasons = Section("reasons", "Why these settings", (self.reasons,), is_brief=True)
        known: dict[str, Any] = {"kind": "advice", "sections": (reasons,), "notices": self.doubts}
        if not self.recipe:
            return Document("Do not merge these models", tone=Tone.POOR, **known)
        recipe = in_our_form(self.recipe)
        hint = "Save it as recipe.toml; to measure: dare search recipe.toml --data YOUR.jsonl"
        return Document(
            title=f"Advice for {counted(len(recipe['models']), 'model')}: {recipe['method']}",
            code=Code("The recipe", "recipe", write_toml(recipe), hint),
            **known,
        )

    def __repr__(self) -> str:
        """The settings in a line."""
        if not self.recipe:
            return "<Advice: do not merge these models>"
        settings = (f"{s.setting} = {s.value}" for s in self.suggestions if s.model is None)
        return printable(f"<Advice: {', '.join(settings)}>")


# ---------------------------------------------------------------- the verdict and the advice


def judge(
    analysis: AnalysisData, *, steps: int | None = None, method: str = ""
) -> tuple[Readiness, Advice]:
    """Return the verdict on merging models by a method, and the advice.

    The method is the advised one if none is given. Findings that do not matter for it are notes.
    """
    readiness = assess(analysis)
    advice = advise(analysis, readiness, steps=steps)
    if not advice.recipe:
        return replace(readiness, verdict=Verdict.UNFIT), advice
    return readiness_for(readiness, method or advice.recipe["method"]), advice


def to_json(analysis: AnalysisData, readiness: Readiness, advice: Advice) -> str:
    """Return everything as JSON (docs/analysis-schema.md); `Analysis.from_json` reads it."""
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
    analysis: AnalysisData,
    readiness: Readiness | None = None,
    *,
    parameters: float | None = None,
    steps: int | None = None,
) -> Advice:
    """Say how to merge the models, and why.

    `parameters` is the size of the models if it is not that of the base, and `steps` the length of
    their fine-tuning; both only decide which of the common recommendations are quoted.
    """
    if steps is not None and steps < 1:
        raise RecipeError(f"steps = {steps}: must be at least 1")
    readiness = assess(analysis) if readiness is None else readiness
    unfit = list(_left_out_models(readiness))
    left_out = {suggestion.model for suggestion in unfit}
    models = [model for model in analysis.models if model.name not in left_out]
    if not models:
        return Advice(tuple(unfit), {}, (notice("nothing_left"),))
    known = _features(analysis, models)
    chosen = [("method", "linear", "average" if len(models) > 1 else "single")]
    if _is_small(models, known):
        chosen = [("method", SMALL.method, "small"), ("scale", SMALL.scale, "scale")]
    reasons = {name: text.format(**known) for name, text in TEXTS["reasons"].items()}
    settings = [Suggestion(s, v, None, reasons[r], EVIDENCE, Evidence.FAIR) for s, v, r in chosen]
    policies = list(_policies(readiness, {model.name for model in models}))
    recipe = {
        "base": analysis.base,
        "models": [model.file for model in models],
        "output": usual_output(analysis.base),
        **{each.setting: each.value for each in (*settings, *policies)},
    }
    if parameters is None:
        parameters = float(sum(analysis.base_dtypes.values()))
    doubts = _doubts(models, known | {"parameters": parameters}, chosen[0][1], steps)
    if any(finding.code == "contained" for finding in readiness.findings):
        doubts = [notice("base_in_doubt"), *doubts]
    return Advice((*settings, *unfit, *policies), recipe, tuple(doubts))


def _left_out_models(readiness: Readiness) -> Iterator[Suggestion]:
    """Yield the models that no setting can make fit, each with the reason."""
    out: set[str] = set()
    for finding in readiness.findings:
        first, *others = [name for name in finding.subjects if name not in out] or [""]
        if finding.code in UNFIT_CODES:
            unfit, ground = [first, *others], "left_out"
        elif finding.code in ("same_model", "multiple"):
            unfit, ground = others, finding.code
        else:
            continue
        for name in filter(None, unfit):
            out.add(name)
            against = are_opposite(finding.figures, first, name)
            how = "opposite to" if against else "a multiple of"
            reason = TEXTS["grounds"][ground].format(kept=first, how=how, text=finding.text)
            yield Suggestion("models", LEFT_OUT, name, reason, RULES, Evidence.STRONG)


def _policies(readiness: Readiness, names: set[str]) -> Iterator[Suggestion]:
    """Yield the settings that the merge needs so that it is not refused."""
    given = set()
    for finding in readiness.findings:
        setting, value = TEXTS["policies"].get(finding.code, ("", ""))
        concerned = not finding.subjects or names & set(finding.subjects)
        if setting and concerned and setting not in given:
            given.add(setting)
            yield Suggestion(setting, value, None, finding.text, RULES, Evidence.STRONG)


def _features(analysis: AnalysisData, models: list[ModelAnalysis]) -> dict[str, float]:
    """Return the number of models, their mean cosine and their largest change."""
    names = {model.name for model in models}
    cosines = [pair.total.cosine for pair in analysis.pairs if {pair.first, pair.second} <= names]
    return {
        "models": len(models),
        "cosine": sum(cosines) / len(cosines) if cosines else 0.0,
        "change": max(body_of(model).ratio for model in models),
    }


def _is_small(models: list[ModelAnalysis], known: dict[str, float]) -> bool:
    """Tell if several full fine-tunes of matrices have small, independent changes."""
    return (
        len(models) > 1
        and known["change"] <= SMALL.change
        and known["cosine"] < SMALL.cosine
        and all(model.origin is not Origin.LORA for model in models)
        and any(len(t.shape) > 1 and t.kind not in OUTER for t in models[0].tensors)
    )


# ---------------------------------------------------------------- caveats


def _doubts(
    models: list[ModelAnalysis], known: dict[str, float], method: str, steps: int | None
) -> list[Notice]:
    usual = _often_recommended(models, known["cosine"], known["parameters"], steps)
    doubts = [notice("only_data_tell"), notice("often_recommended", usual=usual)]
    outside = [
        f"{name}: {_short(known[name])}, not {_short(least)} to {_short(most)}"
        for name, (least, most) in TEXTS["measured"].items()
        if len(models) > 1 and not least <= known[name] <= most
    ]
    if outside:
        doubts.append(notice("extrapolates", outside="; ".join(outside)))
    if method == SMALL.method:
        doubts.append(notice("slow_method", method=method))
    return doubts


def _short(value: float) -> str:
    return amount(round(value)) if value >= 1 else f"{value:.2g}"


def _often_recommended(
    models: list[ModelAnalysis], cosine: float, parameters: float, steps: int | None
) -> str:
    """Return common recommendations for such models, or say that there is no evidence."""
    count, is_lora = len(models), all(model.origin is Origin.LORA for model in models)
    relation = "lora" if is_lora and count > 1 else "diverse"
    relation = "alike" if count == 2 and cosine >= LIMIT.alike_cosine else relation
    said = [
        f"{habit.method} for {habit.applies_to}"
        for habit in HABITS
        if habit.relation in (relation, "any") and habit.models[0] <= count <= habit.models[1]
        if habit.parameters[0] <= parameters <= habit.parameters[1]
    ]
    rows = find_guidelines(is_lora, parameters, steps)
    said += [f"drop rates of {r.lowest} to {r.highest} for {r.applies_to}" for r in rows]
    if not rows:
        said += [TEXTS["others"]["unknown"].format(_short(parameters), steps or "any number of")]
    return ", ".join(said)


def find_guidelines(is_lora: bool, parameters: float, steps: int | None) -> list[Any]:
    """Return the guidelines for a model: those of its kind, its size and, if given, its steps.

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
        and (steps is None or row.steps[0] <= steps <= row.steps[1])
    ]
