"""What is made of an analysis: a verdict with its findings, and advice with its reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


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


@dataclass(frozen=True)
class Readiness:
    """The verdict on a set of models and on each of them."""

    verdict: Verdict
    by_model: dict[str, Verdict]
    findings: tuple[Finding, ...]
    """The gravest first."""

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain values, ready for JSON."""
        return asdict(self)


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
    """As in a recipe: `method`, `drop_rate`, `embedding_drop_rate`, `weight`, `q`, `scale`."""
    value: float | str
    model: str | None
    """Whose setting it is; None: of the whole recipe."""
    reason: str
    source: str
    """Where the rule comes from."""
    evidence: Evidence


@dataclass(frozen=True)
class Advice:
    """Settings that suit the models, each with its reason, and the recipe made of them."""

    suggestions: tuple[Suggestion, ...]
    recipe: dict[str, Any]
    """The document of a recipe, ready for TOML, but for the output."""
    doubts: tuple[str, ...]
    """What the advice cannot know."""

    def to_dict(self) -> dict[str, Any]:
        """The advice as plain values, ready for JSON."""
        return asdict(self)
