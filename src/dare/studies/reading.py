"""What a study holds, read from its file, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dare.recipe.document import recipe_from_document
from dare.recipe.schema import Recipe
from dare.recipe.search import Search
from dare.studies.baselines import baseline_recipes
from dare.studies.conclusions import conclude
from dare.studies.results import Conclusion, Ranked, Role, State, StudyData, Trial, key_of
from dare.studies.space import Space, seed_shifts
from dare.studies.study import BASELINE, FINAL, HOLDOUT, Study
from dare.tensors.sizes import times


def read_study(study: Study, *, resamples: int = 2000) -> tuple[StudyData, Conclusion]:
    """All that a study holds, and what is concluded from it."""
    data = study_data(study)
    conclusion = conclude(data, resamples=resamples)
    if study.subset is not None and data.subset is None:
        conclusion = replace(conclusion, subset_error=_subset_error(study))
    scored = study.beside(HOLDOUT)
    if not scored or conclusion.best is None:
        return data, conclusion
    data = replace(data, holdout=tuple(_by_role(scored, conclusion)))
    error = conclusion.subset_error
    return data, replace(conclude(data, resamples=resamples), subset_error=error)


def study_data(study: Study) -> StudyData:
    """All that a study holds, but for the holdout."""
    charter = study.charter
    recipe = recipe_from_document(charter.recipe, str(study.path))
    remarks = study.note("remarks") or []
    latest = {placed.place: placed.trial for placed in study.trials()}  # a retry comes later
    trials = sorted(latest.values(), key=lambda trial: trial.number)
    subset = study.subset
    if subset is not None and (finals := study.beside(FINAL)):
        trials, subset = _with_finals(trials, finals, len(subset.ids)), None
    return StudyData(
        recipe=charter.recipe,
        space=charter.space,
        sampler=charter.sampler,
        planned=study.note("planned") or len(trials),
        seeds=tuple(recipe.seed + shift for shift in seed_shifts(charter.seeds)),
        evaluator=charter.evaluator,
        objective=charter.objective,
        guards=charter.guards,
        baselines=tuple(study.beside(BASELINE)),
        trials=tuple(trials),
        subset=subset,
        holdout_evaluator=study.note("holdout"),
        advice=study.note("advice"),
        output=study.note("output"),
        remarks=tuple(remarks),
    )


def recipe_of(data: StudyData, ranked: Ranked) -> Recipe:
    """The recipe of a setting with its first seed, or of a baseline; with the study's output.

    Of several seeds it has the first: to take the best of them would be another choice by chance.
    """
    recipe = recipe_from_document(data.recipe, "the recipe of the study")
    if not ranked.baseline:
        made = Space(recipe, Search(over=data.space).over).candidate(ranked.settings)
    else:
        advice = None if data.advice is None else recipe_from_document(data.advice, "advice")
        made = baseline_recipes(recipe, advice)[ranked.baseline]
    return made.model_copy(update={"output": data.output})


def runner_up(conclusion: Conclusion) -> Ranked | None:
    """The second best setting, if there is one that keeps to the guards."""
    rest = [ranked for ranked in conclusion.ranking if ranked != conclusion.best]
    return next((ranked for ranked in rest if not ranked.broken), None)


def _by_role(scored: Sequence[Trial], conclusion: Conclusion) -> list[Trial]:
    """What was scored on the holdout, under the names that hold now.

    Candidates are kept by their settings: a search that went on may have another winner.
    """
    keys = {
        key_of(ranked.settings): role
        for role, ranked in (
            (Role.RUNNER_UP, runner_up(conclusion)),
            (Role.WINNER, conclusion.best),
        )
        if ranked is not None
    }
    named = []
    for trial in scored:
        if not trial.settings:
            named.append(trial)  # a baseline
        elif (role := keys.get(key_of(trial.settings))) is not None:
            named.append(replace(trial, name=role))
        elif trial.name.partition(" ")[0] == Role.WINNER:  # its settings follow
            named.append(replace(trial, name=Role.EARLIER_WINNER))
    return named


def _subset_error(study: Study) -> float:
    """How far scores on the subset were from those on all items, over what has both."""
    full = {final.name: final.objective for final in study.beside(FINAL) if final.is_done}
    estimated = {str(placed.trial.number): placed.trial.objective for placed in study.trials()}
    gaps = [(estimated[name] or 0.0) - (full[name] or 0.0) for name in full]
    return math.sqrt(sum(gap * gap for gap in gaps) / max(len(gaps), 1))


def _with_finals(trials: Sequence[Trial], finals: Sequence[Trial], count: int) -> list[Trial]:
    """Trials as they were scored on all items; others were scored on some, and count no more."""
    full = {final.name: final for final in finals if final.is_done}
    found = []
    for trial in trials:
        if (final := full.get(str(trial.number))) is not None:
            found.append(replace(trial, scored=final.scored, objective=final.objective))
        elif trial.is_done and full:
            told = f"stopped after {times(count, 'chosen item')}: it was not among the best on them"
            found.append(replace(trial, state=State.STOPPED, message=told))
        else:
            found.append(trial)
    return found
