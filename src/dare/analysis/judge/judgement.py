"""What is made of an analysis: a verdict with its findings, advice with its reasons, and limits."""

from __future__ import annotations

import glob
import json
import textwrap
import tomllib
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any

from dare.errors import printable
from dare.tensors.json_values import json_ready
from dare.tensors.sizes import named, times

WIDTH = 100
"""Columns of the texts."""
LEFT_OUT = "left out"
"""What advice says of a model that it does not merge."""
RULES_FILE: dict[str, Any] = tomllib.loads(
    files("dare.analysis.judge").joinpath("rules.toml").read_text("utf-8")
)
LIMITS: dict[str, float] = {name: entry[0] for name, entry in RULES_FILE["limits"].items()}
"""The numbers that judgements rest on; the file also has their meaning and where they come from."""


def limit(name: str) -> float:
    """The value of a limit.

    >>> limit("foreign_delta")
    0.03
    """
    return LIMITS[name]


class Verdict(StrEnum):
    """Whether to merge."""

    READY = "ready"
    WITH_CHANGES = "ready with changes"
    NOT_READY = "not ready"


class Severity(StrEnum):
    """What a finding does to the verdict: nothing, ready with changes, not ready."""

    NOTE = "note"
    CHANGE = "change"
    STOP = "stop"

    @property
    def verdict(self) -> Verdict:
        """The verdict on a model with such a finding and no graver one."""
        return _VERDICTS[self]


_VERDICTS = {
    Severity.NOTE: Verdict.READY,
    Severity.CHANGE: Verdict.WITH_CHANGES,
    Severity.STOP: Verdict.NOT_READY,
}
GRAVITY = (Severity.STOP, Severity.CHANGE, Severity.NOTE)
"""Severities, the gravest first."""


@dataclass(frozen=True)
class Finding:
    """Something that was seen, why it matters, and what to do."""

    rule: str
    """The name of the rule that found it: `not_homologous`."""
    severity: Severity
    models: tuple[str, ...]
    """Whom it concerns; empty: the base, or all of them."""
    seen: str
    matters: str
    remedy: str
    figures: dict[str, float]
    """The numbers behind it, by name, and the thresholds that they were held against."""
    only_for: str = ""
    """The stage without which it does not matter, such as `ties` or `dare`; empty: any merge."""

    def __str__(self) -> str:
        """One line, without the names of the models."""
        return f"{self.seen}. {self.matters}. {self.remedy}."


@dataclass(frozen=True, repr=False)
class Readiness:
    """The verdict on a set of models and on each of them."""

    verdict: Verdict
    by_model: dict[str, Verdict]
    findings: tuple[Finding, ...]
    """The gravest first."""
    method: str = ""
    """The method that the verdict is for; what matters only for others is a note."""

    def of(self, model: str) -> tuple[Finding, ...]:
        """The findings that concern a model, those about all of them included."""
        return tuple(f for f in self.findings if not f.models or model in f.models)

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain values, ready for JSON; what is not finite is a string."""
        return dict(json_ready(asdict(self)))

    def to_json(self) -> str:
        """The verdict as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def __repr__(self) -> str:
        """The verdict in a line."""
        method = f" for {self.method}" if self.method else ""
        models, found = named(list(self.by_model)), times(len(self.findings), "finding")
        return printable(f"<Readiness: {self.verdict}{method}, {models}, {found}>")

    def _repr_html_(self) -> str:
        """The verdict in a notebook."""
        from dare.analysis.notebook import readiness_card

        return readiness_card(self)

    def __str__(self) -> str:
        """The verdict, each model's, and the findings with what to do."""
        lines = [str(self.verdict)]
        lines += [f"  {name}: {verdict}" for name, verdict in self.by_model.items()]
        for finding in self.findings:
            whom = f"{', '.join(finding.models)}: " if finding.models else ""
            lines += _wrapped(f"{finding.severity}: ", f"{whom}{finding}")
        return "\n".join(lines)


class Evidence(StrEnum):
    """How well a piece of advice is founded."""

    STRONG = "strong"
    """It follows from what was measured."""
    FAIR = "fair"
    """Published experiments agree on it."""
    WEAK = "weak"
    """A rule of thumb, or experiments that disagree."""


@dataclass(frozen=True)
class Suggestion:
    """One setting of a recipe, and why."""

    setting: str
    """As in a recipe: `method`, `drop_rate`, `embedding_drop_rate`, `weight`, `q`, `scale`; or
    `models`, for one that is not to take part."""
    value: float | str
    """For `models`: left out."""
    model: str | None
    """Whose setting it is; None: of the whole recipe."""
    reason: str
    source: str
    """Where the rule comes from."""
    evidence: Evidence


@dataclass(frozen=True)
class Protection:
    """A part of the models that dropping hurts more than the rest."""

    layer: int
    """-1 for tensors that stand in no layer."""
    kind: str
    error: float
    """What the outputs' error stays under there, at the advised drop rates."""
    drop_rate: float
    """The rate, for all models, at which it would be no larger than over all layers."""
    tensors: tuple[str, ...] = ()
    """Their names."""

    @property
    def rule(self) -> dict[str, Any]:
        """The entry of `[[tensors]]` that sets the rate."""
        return {"match": [glob.escape(name) for name in self.tensors], "drop_rate": self.drop_rate}


@dataclass(frozen=True, repr=False)
class Advice:
    """Settings that suit the models, each with its reason, and the recipe made of them."""

    suggestions: tuple[Suggestion, ...]
    recipe: dict[str, Any]
    """The document of a recipe, ready for TOML; empty if no model is fit."""
    doubts: tuple[str, ...]
    """Caveats: what the advice cannot know."""
    predicted_error: float = 0.0
    """What the error of the layers' outputs stays under, from the dropping of all models."""
    error_bound: float = 0.0
    """What that error may be."""
    error_share: float = 0.0
    """What the dropping of one model may bring to its outputs, so that the merge's error stays
    within the bound."""
    protect: tuple[Protection, ...] = ()
    """Where lower drop rates would pay most, the worst first; empty if no layer stands out."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The models that it does not merge."""
        unfit = [s.model for s in self.suggestions if s.value == LEFT_OUT]
        return tuple(name for name in unfit if name is not None)

    def own(self, setting: str) -> dict[str, float]:
        """The values of a setting that models have of their own, by name."""
        return {
            s.model: float(s.value)
            for s in self.suggestions
            if s.setting == setting and s.model is not None and not isinstance(s.value, str)
        }

    def to_dict(self) -> dict[str, Any]:
        """The advice as plain values, ready for JSON; what is not finite is a string."""
        return dict(json_ready(asdict(self)))

    def to_json(self) -> str:
        """The advice as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def __repr__(self) -> str:
        """The settings in a line."""
        if not self.recipe:
            return "<Advice: not to merge these models>"
        settings = (f"{s.setting} = {s.value}" for s in self.suggestions if s.model is None)
        return printable(f"<Advice: {', '.join(settings)}>")

    def _repr_html_(self) -> str:
        """The advice in a notebook."""
        from dare.analysis.notebook import advice_card

        return advice_card(self)

    def __str__(self) -> str:
        """The settings with their reasons, the layers to protect, and the caveats."""
        lines = []
        for advised in self.suggestions:
            whose = f" ({advised.model})" if advised.model else ""
            value = advised.value if isinstance(advised.value, str) else f"{advised.value:.4g}"
            grounds = f"{advised.reason}. {advised.source}; evidence: {advised.evidence}"
            said = f"{advised.setting} = {value}{whose}"
            if advised.setting == "models":
                said = f"{advised.model}: {value}"
            lines += [said, *_wrapped("  ", grounds)]
        for part in self.protect:
            where = f"layer {part.layer}, {part.kind}" if part.layer >= 0 else part.kind
            lines.append(f"to protect {where}: drop_rate = {part.drop_rate:g} there")
        lines += [line for doubt in self.doubts for line in _wrapped("caveat: ", doubt)]
        return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    """A text in lines, its label before the first of them."""
    text = printable(text)
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    indent = " " * min(len(label), 4)
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=indent, **whole)
