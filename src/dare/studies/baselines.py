"""What every search is held against: the base, each model, plain merges, and the advice."""

from __future__ import annotations

from typing import Any

from dare.analysis.judge.advice import judge
from dare.analysis.measure.analyzing import analyze
from dare.errors import DareError
from dare.recipe.document import recipe_from_document
from dare.recipe.entries import distinct
from dare.recipe.schema import ModelEntry, Recipe
from dare.studies.results import ALONE, Role

PART = 0.4
"""Of task arithmetic: the factor that its authors recommend where none can be chosen."""


def baseline_recipes(recipe: Recipe, advised: Recipe | None) -> dict[str, Recipe]:
    """A recipe for each baseline, by name; the average comes twice, for the evaluator's noise."""
    names = distinct([entry.name for entry in recipe.models])
    alone = {
        f"{name}{ALONE}": _plain(recipe, "sum", models=(entry,))
        for name, entry in zip(names, recipe.models, strict=True)
    }
    return {
        str(Role.BASE): _plain(recipe, "sum", scale=0.0),
        **alone,
        str(Role.AVERAGE): _plain(recipe, "linear"),
        str(Role.SUM): _plain(recipe, "sum"),
        str(Role.PART): _plain(recipe, "sum", scale=PART),
        **({} if advised is None else {str(Role.ADVICE): advised}),
        str(Role.AGAIN): _plain(recipe, "linear"),
    }


def _plain(recipe: Recipe, method: str, **more: Any) -> Recipe:
    """A method with nothing set but what says how inputs fit together."""
    entries = tuple(ModelEntry(file=entry.file) for entry in more.pop("models", recipe.models))
    bare: dict[str, Any] = {"method": method, "stages": {}, "tensors": (), "scale": 1.0}
    bare |= {"embedding_drop_rate": None, "search": None, "output": None, "input_digests": None}
    return recipe.model_copy(update={**bare, "models": entries, **more})


def advised_recipe(recipe: Recipe, *, verbose: bool = False) -> tuple[Recipe | None, str]:
    """The recipe that `dare advise` gives, or None and why there is none."""
    try:
        analysis = analyze(
            recipe.base,
            [entry.file for entry in recipe.models],
            allow_pickle=recipe.allow_pickle,
            threads=recipe.threads,
            verbose=verbose,
        )
        _, advice = judge(analysis)
        if not advice.recipe:
            return None, "There is no advice: none of the models should be merged."
        advised = recipe_from_document(advice.recipe, "advice")
    except DareError as error:
        return None, f"There is no advice: {error}."
    policies = {
        name: getattr(recipe, name)
        for name in ("on_missing", "on_extra", "on_mismatch", "vocabulary", "dtype", "seed")
    }
    return advised.model_copy(update={**policies, "threads": recipe.threads, "output": None}), ""
