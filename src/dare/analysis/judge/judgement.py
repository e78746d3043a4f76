"""What is made of an analysis: a verdict with its findings, advice with its reasons, and limits."""

from __future__ import annotations

import json
import textwrap
import tomllib
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any

from dare.documents.words import named, times
from dare.errors import printable
from dare.tensors.json_values import json_ready

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
    """What was seen in the weights; none of them promises a good model."""

    NO_DEFECT = "no defect found"
    WITH_CHANGES = "needs changes"
    UNFIT = "cannot be merged"


class Severity(StrEnum):
    """What a finding does to the verdict: nothing, needs changes, cannot be merged."""

    NOTE = "note"
    CHANGE = "change"
    STOP = "stop"

    @property
    def verdict(self) -> Verdict:
        """The verdict on a model with such a finding and no graver one."""
        return _VERDICTS[self]


_VERDICTS = {
    Severity.NOTE: Verdict.NO_DEFECT,
    Severity.CHANGE: Verdict.WITH_CHANGES,
    Severity.STOP: Verdict.UNFIT,
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
    """What a stage of the method must do for it to matter, such as `votes`; empty: any merge."""

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
    """As in a recipe: `method`, `scale`, `on_missing`; or `models`, for one that is left out."""
    value: float | str
    """For `models`: left out."""
    model: str | None
    """Whose setting it is; None: of the whole recipe."""
    reason: str
    source: str
    """Where the rule comes from."""
    evidence: Evidence


@dataclass(frozen=True, repr=False)
class Advice:
    """Settings that suit the models, each with its reason, and the recipe made of them."""

    suggestions: tuple[Suggestion, ...]
    recipe: dict[str, Any]
    """The document of a recipe, ready for TOML; empty if no model is fit."""
    doubts: tuple[str, ...]
    """Caveats: what the advice cannot know."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The models that it does not merge."""
        unfit = [s.model for s in self.suggestions if s.value == LEFT_OUT]
        return tuple(name for name in unfit if name is not None)

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
        """The settings with their reasons, and the caveats."""
        lines = []
        for advised in self.suggestions:
            whose = f" ({advised.model})" if advised.model else ""
            value = advised.value if isinstance(advised.value, str) else f"{advised.value:.4g}"
            grounds = f"{advised.reason}. {advised.source}; evidence: {advised.evidence}"
            said = f"{advised.setting} = {value}{whose}"
            if advised.setting == "models":
                said = f"{advised.model}: {value}"
            lines += [said, *_wrapped("  ", grounds)]
        lines += [line for doubt in self.doubts for line in _wrapped("caveat: ", doubt)]
        return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    """A text in lines, its label before the first of them."""
    text = printable(text)
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    indent = " " * min(len(label), 4)
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=indent, **whole)
