"""What an analysis is called in words, the same in the page and in the terminal."""

from __future__ import annotations

from collections.abc import Callable

from dare.analysis.judge.groups import is_against
from dare.analysis.judge.judgement import Finding, Readiness, Verdict
from dare.analysis.judge.readiness import RULES
from dare.analysis.results import OUTSIDE, ModelAnalysis, Origin
from dare.documents.words import NOTHING, number

HEADLINES = {
    Verdict.NO_DEFECT: "No defect found in the weights",
    Verdict.WITH_CHANGES: "Changes are needed",
    Verdict.UNFIT: "Cannot be merged as given",
}
ORIGINS = {
    Origin.UNCHANGED: "unchanged",
    Origin.LORA: "LoRA",
    Origin.FULL: "full fine-tune",
    Origin.UNKNOWN: "not known",
}

FEW_WORDS = {rule.name: rule.few_words for rule in RULES if rule.few_words}
"""What a rule has found, for a line of a table; `lora` has none, because the origin says it."""
OPPOSITE = "the opposite of {others}"
"""The words for a multiple that goes against the others."""


def headline(readiness: Readiness) -> str:
    """The verdict, with the method that it is for.

    >>> headline(Readiness(Verdict.NO_DEFECT, {}, (), method="linear"))
    'No defect found in the weights, for linear'
    >>> headline(Readiness(Verdict.UNFIT, {}, (), method="sum"))
    'Cannot be merged as given'
    """
    words = HEADLINES[readiness.verdict]
    # What stops a merge stops it by any method.
    if not readiness.method or readiness.verdict is Verdict.UNFIT:
        return words
    return f"{words}, for {readiness.method}"


def few_words(finding: Finding, model: str, names: Callable[[tuple[str, ...]], str]) -> str:
    """What a finding says of a model, in the words for a table; `names` lists the others."""
    others = tuple(name for name in finding.models if name != model)
    said = FEW_WORDS[finding.rule]
    if finding.rule == "multiple":
        against = tuple(name for name in others if is_against(finding.figures, model, name))
        said, others = (OPPOSITE, against) if against else (said, others)
    return said.format(others=names(others) if others else "another")


def cosine(value: float) -> str:
    """A cosine, always with its sign.

    >>> cosine(0.0123), cosine(-0.5)
    ('+0.012', '-0.500')
    """
    return f"{value:+.3f}"


def layer_name(layer: int) -> str:
    """A layer's number, or a word for what stands in none.

    >>> layer_name(3), layer_name(-1)
    ('3', 'outside')
    """
    return "outside" if layer == OUTSIDE else str(layer)


def weight(value: float | list[float]) -> str:
    """A model's weight, or those over its layers.

    >>> weight(1 / 3), weight([0.0, 1.0])
    ('0.333', '0 to 1')
    """
    if isinstance(value, list):
        return " to ".join(map(number, value))
    return number(value)


def rate(value: float | None) -> str:
    """A drop rate, exactly enough to see that it was kept to.

    >>> rate(0.9), rate(None)
    ('90.000%', '–')
    """
    return NOTHING if value is None else f"{value:.3%}"


def origin(model: ModelAnalysis) -> str:
    """How a model's delta was made, with its rank if that tells."""
    rank = "" if model.likely_rank is None else f", rank {model.likely_rank}"
    return f"{ORIGINS[model.origin]}{rank}{' (adapter)' if model.is_adapter else ''}"
