"""What a study shows in words, the same in the page and in the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dare.output.page.words import NOTHING
from dare.studies.results import (
    NOT_MERGED,
    Conclusion,
    Difference,
    Estimate,
    Holdout,
    Ranked,
    State,
    StudyData,
    Trial,
)
from dare.tensors.sizes import times

Tone = Literal["ready", "change", "stop", "note"]
"""How good the news is; the names are those of the page's colours."""
MOST_NAMED = 3
"""Settings that are named in a sentence; more are counted."""
ROUNDING = 1e-12
VERDICTS: dict[str, Tone] = {
    "better": "ready",
    "worse": "stop",
    "no difference shown": "change",
    "not known": "note",
}


@dataclass(frozen=True)
class Summary:
    """What decides, in a headline and a few facts."""

    headline: str
    tone: Tone
    facts: tuple[tuple[str, str], ...]
    """Label and sentence."""


def summarize(data: StudyData, conclusion: Conclusion) -> Summary:
    """Say what was found, and how sure it is."""
    headline, tone = _headline(data, conclusion)
    return Summary(headline, tone, tuple(_facts(conclusion)))


def _headline(data: StudyData, conclusion: Conclusion) -> tuple[str, Tone]:
    verdicts = {item.verdict for item in conclusion.against}
    if not data.trials:
        return "No trials yet", "note"
    if conclusion.best is None:
        broken = bool(conclusion.ranking)
        return ("Every setting breaks a guard" if broken else "No setting is scored yet"), "stop"
    if conclusion.better:
        is_there = conclusion.chosen is not None and conclusion.chosen.role in NOT_MERGED
        advice = "Do not merge: a" if is_there else "A"
        return f"{advice} baseline is better than the best setting", "stop"
    if conclusion.tied:
        return f"The best is within noise of {times(len(conclusion.tied), 'other')}", "change"
    if verdicts == {"better"}:
        return "The best stands out", "ready"
    return "There is a best, but its certainty is not known", "note"


def _facts(conclusion: Conclusion) -> Iterator[tuple[str, str]]:
    best, simplest = conclusion.best, conclusion.simplest
    if best is None:
        return
    yield "Best setting" if conclusion.better else "Best", ranked_text(best)
    if conclusion.tied:
        yield "Within noise of it", _named(conclusion.tied)
    if conclusion.better:
        chosen, reason = conclusion.chosen, conclusion.no_recipe
        yield "Take instead", reason if reason or chosen is None else ranked_text(chosen)
    elif simplest is not None:
        same = simplest == best
        yield "Simplest within noise", "the best itself" if same else ranked_text(simplest)
    if conclusion.holdout is not None:
        yield "Holdout", holdout_text(conclusion.holdout)


def _named(tied: tuple[Ranked, ...]) -> str:
    labels = "; ".join(ranked.label for ranked in tied[:MOST_NAMED])
    more = len(tied) - MOST_NAMED
    return f"{labels}; and {more} more" if more > 0 else labels


def ranked_text(ranked: Ranked) -> str:
    """A setting with its objective and interval."""
    return f"{ranked.label}: {ranked.objective}"


def holdout_text(holdout: Holdout) -> str:
    """The winner on held-out data, beside the same weights where they were chosen."""
    said = (
        f"{holdout.objective} on held-out data, {value_text(holdout.validation)} where the same "
        f"weights were chosen: {_change(holdout.loss)}."
    )
    if holdout.usual_loss is not None:
        said += f" The baselines, on average: {_change(holdout.usual_loss)}."
        excess = holdout.loss - holdout.usual_loss
        said += (
            " So the choice may have favoured settings that were lucky on the data, by about "
            f"{value_text(excess)} (winner's curse)."
            if excess > ROUNDING
            else " So there is no sign of a lucky choice (winner's curse)."
        )
    if holdout.looks > 1:
        said += f" {holdout.looks} winners were scored on it, so it is no longer held out."
    return said


def _change(loss: float) -> str:
    """How a score has changed.

    >>> _change(0.25), _change(-0.25), _change(1e-17)
    ('0.25 lower', '0.25 higher', 'no change')
    """
    if abs(loss) <= ROUNDING:
        return "no change"
    return f"{value_text(abs(loss))} {'lower' if loss > 0 else 'higher'}"


def difference_text(difference: Difference) -> str:
    """How far the best is ahead, with its sign.

    >>> difference_text(Difference("base", Estimate(0.25, 0.125, 0.375), "better"))
    '+0.25 (+0.125 … +0.375)'
    """
    value, low, high = signed(difference.estimate)
    return value if low is None else f"{value} ({low} … {high})"


def signed(estimate: Estimate) -> tuple[str, str | None, str | None]:
    """Value and bounds, each with its sign."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.4g}", None, None
    return f"{estimate.value:+.4g}", f"{estimate.low:+.4g}", f"{estimate.high:+.4g}"


def interval_text(estimate: Estimate) -> str:
    """The bounds alone.

    >>> interval_text(Estimate(0.5, 0.4, 0.6)), interval_text(Estimate(0.5))
    ('0.4 … 0.6', '–')
    """
    if estimate.low is None or estimate.high is None:
        return NOTHING
    return f"{estimate.low:.4g} … {estimate.high:.4g}"


def value_text(value: Any) -> str:
    """The value of a setting, short.

    >>> value_text(0.61234567), value_text("dare+ties"), value_text([0.0, 1.0]), value_text(3)
    ('0.6123', 'dare+ties', '[0, 1]', '3')
    """
    match value:
        case {"from": start, "to": to, **more}:  # of a space
            ways = [f", {name} {value_text(how)}" for name, how in more.items() if name != "log"]
            scale = ", logarithmic" if more.get("log") else ""
            return f"{value_text(start)} to {value_text(to)}{''.join(ways)}{scale}"
        case list() | tuple():
            return f"[{', '.join(map(value_text, value))}]"
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings in a line.

    >>> settings_text({"method": "sum", "scale": 0.5})
    'method=sum scale=0.5'
    """
    return " ".join(f"{name}={value_text(value)}" for name, value in settings.items())


def trial_name(trial: Trial) -> str:
    """What a trial or a baseline is called."""
    return trial.name or f"trial {trial.number}"


def state_text(trial: Trial) -> str:
    """What became of a trial."""
    again = "" if trial.same_as is None else f", same weights as trial {trial.same_as}"
    return f"{trial.state}{again}"


def counted(data: StudyData) -> str:
    """How many trials there are, and what became of them.

    The trials that are done are counted against those that are planned.
    """
    counts = Counter(trial.state for trial in data.trials)
    others = [
        f"{counts[state]} {state}"
        for state in (State.STOPPED, State.FAILED, State.RUNNING)
        if counts[state]
    ]
    return ", ".join([f"{counts[State.DONE]} of {times(data.planned, 'trial')} done", *others])


def time_text(seconds: float) -> str:
    """A time as people say it.

    >>> [time_text(seconds) for seconds in (0.4, 59, 90, 3599, 5000, 90_000)]
    ['1 s', '59 s', '2 min', '60 min', '1 h 24 min', '25 h']
    """
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{max(1, math.ceil(seconds))} s"
    minutes = math.ceil(seconds / 60)
    if minutes <= 60:
        return f"{minutes} min"
    if minutes >= 24 * 60:
        return f"{minutes // 60} h"
    return f"{minutes // 60} h {minutes % 60} min"
