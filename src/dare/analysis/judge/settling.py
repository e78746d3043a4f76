"""What of a verdict the advice takes care of already: it becomes a note that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dare.analysis.judge.groups import is_opposed, listed
from dare.analysis.judge.judgement import Advice, Finding, Readiness, Severity
from dare.analysis.judge.readiness import conclude
from dare.analysis.results import Analysis

LEFT_OUT = "left out"
"""What advice says of a model that it does not merge."""


def settle(readiness: Readiness, advice: Advice, analysis: Analysis) -> Readiness:
    """The verdict on a merge by the advised recipe: what the recipe takes care of is a note."""
    if not advice.recipe:
        return readiness
    findings = []
    for finding in readiness.findings:
        answer = _answer(finding, advice, analysis)
        noted = replace(finding, severity=Severity.NOTE, remedy=answer)
        findings.append(noted if answer and finding.severity is not Severity.STOP else finding)
    return replace(conclude(readiness.by_model, findings), method=readiness.method)


def advised(advice: Advice, setting: str) -> dict[str, float]:
    """The values of a setting that models have of their own, by name."""
    return {
        suggestion.model: float(suggestion.value)
        for suggestion in advice.suggestions
        if suggestion.setting == setting
        and suggestion.model is not None
        and not isinstance(suggestion.value, str)
    }


def left_out(advice: Advice) -> tuple[str, ...]:
    """The models that the advice does not merge."""
    return tuple(
        suggestion.model
        for suggestion in advice.suggestions
        if suggestion.value == LEFT_OUT and suggestion.model is not None
    )


def _answer(finding: Finding, advice: Advice, analysis: Analysis) -> str:
    """How the advice takes care of a finding; empty if it does not."""
    out = [name for name in left_out(advice) if name in finding.models]
    left = [name for name in finding.models if name not in out]
    without = f"The advice leaves {listed(out)} out" if out else ""
    if finding.rule == "large_change":
        return "; ".join(filter(None, (_dropped(advised(advice, "drop_rate"), left), without)))
    if finding.rule == "outweighed" and finding.severity is Severity.CHANGE:
        balanced = advised(advice, "weight").keys() & set(left)
        return "The advised weights take care of it" if balanced else without
    if finding.rule in ("alike", "opposed") and out and not _still(finding.rule, left, analysis):
        return without
    if finding.rule == "cancelling" and left_out(advice):
        others = [name for name in analysis.names if name not in left_out(advice)]
        kept = "" if _still("opposed", others, analysis) else "no two of the others are opposed"
        return kept and f"The advice leaves {listed(left_out(advice))} out, and {kept}"
    return ""


def _dropped(rates: Mapping[str, float], names: Collection[str]) -> str:
    """What the advised drop rates are for some models."""
    own = {name: rates.get(name, 0.0) for name in names}
    different = sorted(set(own.values()))
    if not own:
        return ""
    if different == [0.0]:
        return f"The advice drops nothing of {'it' if len(own) == 1 else 'them'}"
    if len(different) == 1:
        return f"The advised drop_rate of {different[0]:g} takes care of it"
    each = listed(f"{rate:g} for {name}" for name, rate in own.items())
    return f"The advised drop rates take care of it: {each}"


def _still(rule: str, names: Collection[str], analysis: Analysis) -> bool:
    """Whether two of the models that are left are related as a rule says."""
    pairs = [pair for pair in analysis.pairs if {pair.first, pair.second} <= set(names)]
    return bool(pairs) if rule == "alike" else any(map(is_opposed, pairs))
