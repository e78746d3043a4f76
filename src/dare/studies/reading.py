"""What a study holds, read from its file, and what follows from it: a conclusion and recipes."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dare.errors import InputError, printable
from dare.recipe.document import recipe_from_document
from dare.recipe.entries import distinct
from dare.recipe.schema import ModelEntry, Recipe
from dare.recipe.search import Search
from dare.recipe.toml import write_toml
from dare.studies.conclusions import conclude
from dare.studies.results import ALONE, Conclusion, Ranked, Role, StudyData, Trial, key_of
from dare.studies.space import Space, seed_shifts
from dare.studies.study import BASELINE, HOLDOUT, Study
from dare.studies.words import grounds

PART = 0.4
"""Of task arithmetic: the factor that its authors recommend where none can be chosen."""
OUTPUT = "merged.safetensors"
SIGNED = ", found by `dare search`."
"""How the first line of a recipe ends: a search writes over its own, and over no others."""


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What a search has found."""

    study: Path
    data: StudyData
    conclusion: Conclusion
    best: Recipe | None
    """The recipe of the best setting, or of a baseline that beats it; None if there is nothing to
    merge, for which `conclusion.no_recipe` has the reason."""
    simplest: Recipe | None
    """The simplest recipe that cannot be told apart from the best and that no baseline beats."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, ready for JSON; the items stay in the study."""
        document = self.data.to_dict()
        for table in ("baselines", "trials", "holdout"):
            for trial in document[table]:
                scored = trial.pop("scored") or {}
                trial["scores"] = scored.get("scores")
                trial["items"] = len(scored.get("items", ()))
        for name in ("advice", "output", "importance"):
            document.pop(name)
        recipes = {
            name: None if recipe is None else recipe.to_document()
            for name, recipe in (("best", self.best), ("simplest", self.simplest))
        }
        conclusion = self.conclusion.to_dict()
        return {**document, "answer": str(self), "conclusion": conclusion, "recipes": recipes}

    def to_toml(self, *, simplest: bool = False, output: Path | None = None) -> str:
        """The best recipe, or the simplest, with what speaks for it as comments."""
        recipe = self.simplest if simplest else self.best
        if recipe is None:
            raise InputError(f"{self.study}: {self}; so there is no recipe to write")
        which = "simplest within noise" if simplest else "best"
        tables = {**recipe.to_tables(), "output": str(output or recipe.output or OUTPUT)}
        lines = [f"The {which} of {self.study.name}{SIGNED}"]
        for sentence in grounds(self.conclusion):
            lines += textwrap.wrap(printable(sentence), 96, subsequent_indent="  ")
        return "\n".join([*(f"# {line}" for line in lines), "", write_toml(tables)])

    def __repr__(self) -> str:
        """The study and its best setting in a line."""
        return f"<SearchResult of {self.study}: {self}>"

    def __str__(self) -> str:
        """What to take, with its interval."""
        chosen = self.conclusion.chosen
        if chosen is not None and not self.conclusion.no_recipe:
            return f"{chosen.label}: {chosen.objective}"
        return self.conclusion.no_recipe


def read_result(path: Path) -> SearchResult:
    """What a study shows by now, also while others work on it."""
    with closing(Study(path)) as study:
        return result_of(study)


def result_of(study: Study) -> SearchResult:
    """What an open study shows by now."""
    data, conclusion = read_study(study)
    best, simplest = (
        None if conclusion.no_recipe or ranked is None else recipe_of(data, ranked)
        for ranked in (conclusion.chosen, conclusion.simplest)
    )
    return SearchResult(study.path, data, conclusion, best, simplest)


def read_study(study: Study, *, resamples: int = 2000) -> tuple[StudyData, Conclusion]:
    """All that a study holds, and what is concluded from it."""
    charter = study.charter
    recipe = recipe_from_document(charter.recipe, str(study.path))
    latest = {placed.place: placed.trial for placed in study.trials()}  # a retry comes later
    trials = sorted(latest.values(), key=lambda trial: trial.number)
    data = StudyData(
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
        holdout_evaluator=study.note("holdout"),
        advice=study.note("advice"),
        left_out=tuple(study.note("left_out") or ()),
        output=study.note("output"),
        remarks=tuple(study.note("remarks") or ()),
        importance=study.importance(),
    )
    conclusion = conclude(data, resamples=resamples)
    scored = study.beside(HOLDOUT)
    if scored and conclusion.best is not None:
        data = replace(data, holdout=tuple(_by_role(scored, conclusion)))
        conclusion = conclude(data, resamples=resamples)
    return data, conclusion


def _by_role(scored: Sequence[Trial], conclusion: Conclusion) -> list[Trial]:
    """What was scored on the holdout, under the names that hold now.

    Candidates are kept by their settings: a search that went on may have another winner.
    """
    ranked = {Role.RUNNER_UP: runner_up(conclusion), Role.WINNER: conclusion.best}
    keys = {key_of(found.settings): role for role, found in ranked.items() if found is not None}
    named = []
    for trial in scored:
        if not trial.settings:
            named.append(trial)  # a baseline
        elif (role := keys.get(key_of(trial.settings))) is not None:
            named.append(replace(trial, name=role))
        elif trial.name.partition(" ")[0] == Role.WINNER:  # its settings follow
            named.append(replace(trial, name=Role.EARLIER_WINNER))
    return named


def runner_up(conclusion: Conclusion) -> Ranked | None:
    """The second best setting, if there is one that keeps to the guards."""
    rest = [ranked for ranked in conclusion.ranking if ranked != conclusion.best]
    return next((ranked for ranked in rest if not ranked.broken), None)


# ------------------------------------------------------------------------------------- recipes


def recipe_of(data: StudyData, ranked: Ranked) -> Recipe:
    """The recipe of a setting with its first seed, or of a baseline; with the study's output.

    Of several seeds it has the first: to take the best of them would be another choice by chance.
    """
    recipe = recipe_from_document(data.recipe, "the recipe of the study")
    if not ranked.baseline:
        made = Space(recipe, Search(over=data.space).over).candidate(ranked.settings)
    else:
        advice = None if data.advice is None else recipe_from_document(data.advice, "advice")
        made = baseline_recipes(recipe, advice, data.left_out, data.is_searched)[ranked.baseline]
    return made.model_copy(update={"output": data.output})


def baseline_recipes(
    recipe: Recipe, advised: Recipe | None, left_out: Collection[str], is_searched: bool
) -> dict[str, Recipe]:
    """A recipe for each baseline, by name; the average comes twice, for the evaluator's noise."""
    names = distinct([entry.name for entry in recipe.models])
    alone = {
        f"{name}{ALONE}": _plain(recipe, "sum", models=(entry,))
        for name, entry in zip(names, recipe.models, strict=True)
    }
    fit = [e for name, e in zip(names, recipe.models, strict=True) if name not in left_out]
    has_some = 1 < len(fit) < len(names)
    average, total = _plain(recipe, "linear"), _plain(recipe, "sum")
    is_more = not is_searched and recipe not in (average, total, advised)
    made = {
        Role.BASE: _plain(recipe, "sum", scale=0.0),
        **alone,
        Role.AVERAGE: average,
        Role.WITHOUT_STRANGERS: _plain(recipe, "linear", models=fit) if has_some else None,
        Role.SUM: total,
        Role.PART: _plain(recipe, "sum", scale=PART),
        Role.ADVICE: advised,
        Role.RECIPE: recipe if is_more else None,
        Role.AGAIN: average,
    }
    return {str(name): found for name, found in made.items() if found is not None}


def _plain(recipe: Recipe, method: str, **more: Any) -> Recipe:
    """A method with nothing set but what says how inputs fit together."""
    entries = tuple(ModelEntry(file=entry.file) for entry in more.pop("models", recipe.models))
    bare: dict[str, Any] = {"method": method, "stages": {}, "tensors": (), "scale": 1.0}
    bare |= {"embedding_drop_rate": None, "search": None, "output": None, "input_digests": None}
    return recipe.model_copy(update={**bare, "models": entries, **more})
