"""One candidate: made, scored on all items or on some, held against objective and guards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from dare.errors import DareError, EvaluationError
from dare.recipe.schema import Recipe
from dare.studies.asking import Asked
from dare.studies.evaluators import Scorer
from dare.studies.items import estimate, scores_of
from dare.studies.results import Scored, Subset, Trial
from dare.studies.scores import check_items
from dare.studies.study import Claim


class Interrupted(Exception):  # noqa: N818
    """The search is ending: what was under way is left for the next time."""


@dataclass(frozen=True)
class Terms:
    """By what candidates are scored, which is the same for all of them."""

    asked: Asked
    stop: Event
    singles: Sequence[Mapping[str, float]] = ()
    """The scores of each model alone."""
    reference: Scored | None = None
    """What all scores must look like: the same names, the same items."""
    has_items: bool = True
    """Whether items are the same each time, so that they can be compared."""
    subset: Subset | None = None
    rungs: Sequence[Sequence[str]] = ()
    """Growing parts of the items, of which each has what is new in it."""


def score_candidate(
    scorer: Scorer, claim: Claim, recipe: Recipe, terms: Terms, known: Mapping[str, Trial]
) -> Trial:
    """Score a candidate and write down what came of it; `known` are scored weights by digest."""
    began = time.perf_counter()
    notes: dict[str, Any] = {"seed": recipe.seed}
    stopped = ""
    try:
        notes["digest"] = digest = scorer.make(recipe)
        if (twin := known.get(digest)) is not None and twin.scored is not None:
            scored = replace(twin.scored, seconds=0.0)
            notes |= {"message": f"the same weights as {_called(twin)}"}
            notes |= {} if twin.name else {"same_as": twin.number}
        elif terms.rungs:
            scored, stopped = _race(scorer, claim, terms)
        else:
            scored = _scored(scorer, terms)
        _check_alike(scored, terms)
    except DareError as error:
        if terms.stop.is_set():
            raise Interrupted from None
        output = error.output if isinstance(error, EvaluationError) else ""
        spent = time.perf_counter() - began
        return claim.fail(str(error), output=output, seconds=spent, **notes)
    if not terms.has_items:
        scored = replace(scored, items={})
    if terms.reference is None:
        terms.asked.check_names(scored.scores)
    judged = terms.asked.judge(scored, terms.singles)
    notes |= {"broken": judged.broken, "seconds": time.perf_counter() - began}
    if stopped:
        return claim.stop(scored, judged.objective, stopped, **notes)
    return claim.finish(scored, judged.objective, slacks=judged.slacks, **notes)


def _called(trial: Trial) -> str:
    return trial.name or f"trial {trial.number}"


def _scored(scorer: Scorer, terms: Terms) -> Scored:
    if terms.subset is None:
        return scorer.score()
    scored = scorer.score(terms.subset.ids)
    estimated, _ = estimate(terms.subset, scored.items)
    return replace(scored, scores={**scored.scores, **estimated})


def _race(scorer: Scorer, claim: Claim, terms: Terms) -> tuple[Scored, str]:
    """Score on one part of the items after the other; stop when it is among the worse."""
    items: dict[str, float] = {}
    scores: dict[str, float] = {}
    seconds = 0.0
    total = sum(map(len, terms.rungs))
    for rung, part in enumerate(terms.rungs):
        found = scorer.score(part)
        seconds += found.seconds
        items |= found.items
        scores = {**found.scores, **scores, **scores_of(items)}
        scored = Scored(scores, items, seconds, found.output)
        if len(items) == total:
            return scored, ""
        if claim.report(terms.asked.objective.value(scores), rung):
            return scored, (
                f"stopped after {len(items)} of {total} items: it was in the lower two thirds"
            )
    raise AssertionError("the last part has all that is left")


def _check_alike(scored: Scored, terms: Terms) -> None:
    """Refuse scores that cannot be compared with those of the others."""
    if terms.reference is None:
        return
    named = replace(scored, items=terms.reference.items)  # then only the names are compared
    compares_items = terms.has_items and terms.subset is None and not terms.rungs
    difference = check_items(terms.reference, scored if compares_items else named)
    if difference is not None:
        raise EvaluationError(f"the evaluator gave different scores: {difference}", scored.output)
