"""The verdict on models with its findings, and the advice with its reasons: plain data."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from dare.documents.document import Code, Document, Section, Table, Tone
from dare.documents.notices import Notice
from dare.documents.shown import Shown
from dare.documents.words import named, times, value_text
from dare.errors import printable
from dare.recipe.entries import in_our_form, write_toml

LEFT_OUT = "left out"
"""The value that advice gives to a model that it does not merge."""


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
        models, found = named(list(self.by_model)), times(len(self.findings), "finding")
        return printable(f"<Readiness: {self.verdict}{method}, {models}, {found}>")


class Evidence(StrEnum):
    """The strength of the evidence for a piece of advice."""

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
        hint = "Save it as recipe.toml, and measure it: dare search recipe.toml --data …"
        return Document(
            title=f"Advice for {times(len(recipe['models']), 'model')}: {recipe['method']}",
            code=Code("The recipe", "recipe", write_toml(recipe), hint),
            **known,
        )

    def __repr__(self) -> str:
        """The settings in a line."""
        if not self.recipe:
            return "<Advice: do not merge these models>"
        settings = (f"{s.setting} = {s.value}" for s in self.suggestions if s.model is None)
        return printable(f"<Advice: {', '.join(settings)}>")
