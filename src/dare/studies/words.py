"""What a study shows in words, the same in the page, in the terminal and in the best recipe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dare.documents.words import NOTHING, listed, times
from dare.studies.results import (
    NOT_MERGED,
    Conclusion,
    Holdout,
    State,
    StudyData,
    Trial,
    value_text,
)
from dare.studies.statistics import BETTER, NO_DIFFERENCE, NOT_KNOWN, WORSE

Tone = Literal["ready", "change", "stop", "note"]
"""How good the news is; the names are those of the page's colours."""
MOST_NAMED = 3
"""Settings that are named in a sentence; more are counted."""
ROUNDING = 1e-12
VERDICTS: dict[str, Tone] = {
    BETTER: "ready",
    WORSE: "stop",
    NO_DIFFERENCE: "change",
    NOT_KNOWN: "note",
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
    return Summary(headline, tone, tuple(facts(conclusion)))


def _headline(data: StudyData, conclusion: Conclusion) -> tuple[str, Tone]:
    chosen, verdicts = conclusion.chosen, {item.verdict for item in conclusion.against}
    if not data.is_searched and NOT_KNOWN not in verdicts:
        if chosen is None:
            return conclusion.no_recipe.capitalize(), "stop"
        merge = f"Merge: take the {chosen.label}"
        return ("Do not merge", "stop") if conclusion.no_recipe else (merge, "ready")
    if not data.candidates:
        return "No trials yet", "note"
    if conclusion.best is None:
        broken = bool(conclusion.ranking)
        return ("Every setting breaks a guard" if broken else "No setting is scored yet"), "stop"
    if conclusion.better:
        is_there = chosen is not None and chosen.role in NOT_MERGED
        advice = "Do not merge: a" if is_there else "A"
        return f"{advice} baseline is better than the best setting", "stop"
    if conclusion.tied:
        return f"The best is within noise of {times(len(conclusion.tied), 'other')}", "change"
    if verdicts == {BETTER}:
        return "The best stands out", "ready"
    return "The top score may be luck", "note"


def facts(conclusion: Conclusion) -> Iterator[tuple[str, str]]:
    """Label and sentence of what decides."""
    best, chosen, simplest = conclusion.best, conclusion.chosen, conclusion.simplest
    tied = [ranked.label for ranked in conclusion.tied]
    if best is None:
        return
    taken = "" if chosen is None else f"{chosen.label}: {chosen.objective}"
    if best.baseline:
        yield "Take", conclusion.no_recipe or taken
    else:
        label = "Best setting" if conclusion.better else "Best"
        yield label, f"{best.label}: {best.objective}"
    if tied:
        more = [f"and {len(tied) - MOST_NAMED} more"] if len(tied) > MOST_NAMED else []
        yield "Within noise of it", "; ".join([*tied[:MOST_NAMED], *more])
    if conclusion.better:
        yield "Take instead", conclusion.no_recipe or taken
    elif simplest is not None and not best.baseline:
        same = simplest == best
        shown = "the best itself" if same else f"{simplest.label}: {simplest.objective}"
        yield "Simplest within noise", shown
    if conclusion.holdout is not None:
        yield "Holdout", holdout_text(conclusion.holdout)
    if conclusion.noise is not None:
        noise = value_text(conclusion.noise)
        yield "Noise", f"two scorings of the same weights differ by {noise}"


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
    return said


def _change(loss: float) -> str:
    """How a score has changed.

    >>> _change(0.25), _change(-0.25), _change(1e-17)
    ('0.25 lower', '0.25 higher', 'no change')
    """
    if abs(loss) <= ROUNDING:
        return "no change"
    return f"{value_text(abs(loss))} {'lower' if loss > 0 else 'higher'}"


def grounds(conclusion: Conclusion) -> Iterator[str]:
    """What speaks for what is taken, and what does not, a line each."""
    for label, text in facts(conclusion):
        yield f"{label}: {text}"
    for difference in conclusion.against:
        yield f"Against {difference.other}: {difference.estimate:+}, {difference.verdict}."
    for difference in conclusion.holdout.against if conclusion.holdout else ():
        where = f"On the holdout against {difference.other}"
        yield f"{where}: {difference.estimate:+}, {difference.verdict}."
    yield from conclusion.remarks


def objective_text(weights: dict[str, float]) -> str:
    """What is to be large.

    >>> objective_text({}), objective_text({"add": 1.0}), objective_text({"add": 1.0, "loss": -2.0})
    ('the mean of all scores', 'add', 'the mean of add and loss × -2')
    """
    if not weights:
        return "the mean of all scores"
    named = [name if w == 1 else f"{name} × {w:g}" for name, w in weights.items()]
    return f"{'the mean of ' if len(named) > 1 else ''}{listed(tuple(named))}"


def range_text(values: Any) -> str:
    """What is searched over: a list of values, or a range."""
    if not isinstance(values, dict):
        return value_text(values)
    more = {name: how for name, how in values.items() if name not in ("from", "to")}
    ways = [f", {name}" if how is True else f", {name} {how:g}" for name, how in more.items()]
    return f"{value_text(values['from'])} to {value_text(values['to'])}{''.join(ways)}"


def state_text(trial: Trial) -> str:
    """What became of a trial."""
    again = "" if trial.same_as is None else f", same weights as trial {trial.same_as}"
    return f"{trial.state}{again}"


def counted(data: StudyData) -> str:
    """How many of the planned trials are done, and what became of the others."""
    counts = Counter(trial.state for trial in data.candidates)
    planned = times(data.planned, "trial" if data.is_searched else "baseline")
    others = [f"{counts[s]} {s}" for s in (State.STOPPED, State.FAILED, State.RUNNING) if counts[s]]
    return ", ".join([f"{counts[State.DONE]} of {planned} done", *others])


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
