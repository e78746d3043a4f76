"""What a search is asked to do, checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dare.errors import InputError, RecipeError
from dare.recipe.document import INCLUDE
from dare.recipe.entries import distinct
from dare.recipe.schema import Recipe
from dare.recipe.search import Choices, Range, Search
from dare.studies.evaluators import check_evaluator
from dare.studies.judging import Judge
from dare.studies.space import Space, seed_shifts
from dare.studies.study import Charter

Evaluator = str | Callable[..., Any]
USUAL_TRIALS = 40
NEEDED = {"cmaes": ("cmaes",), "gp": ("scipy", "torch")}
"""Packages that a sampler of Optuna imports when it first has something to suggest."""
IDLE = ("sampler", "trials", "seeds", "race")
"""What has no effect where nothing is searched over."""


@dataclass(frozen=True)
class SearchRequest:
    """A search, completely described."""

    space: Space
    table: Search
    sampler: str
    planned: int
    evaluator: Evaluator
    holdout: Evaluator | None
    judge: Judge
    seed: int
    output: Path | None
    """Where the merge of the best will go; candidates are not written there."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that is searched around."""
        return self.space.recipe

    @property
    def shifts(self) -> tuple[int, ...]:
        """What is added to a setting's seeds, for each time that it is tried."""
        return seed_shifts(self.table.seeds)

    @property
    def charter(self) -> Charter:
        """What the study is about."""
        document = self.recipe.to_document()
        for name in ("threads", "verbose", "max_memory"):  # which change no candidate
            document.pop(name, None)
        table = self.table.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return Charter(
            recipe={"models": document.pop("models"), **document},
            space=table.get("over", {}),
            sampler=self.sampler,
            seeds=self.table.seeds,
            evaluator=evaluator_name(self.evaluator),
            objective=self.table.objective,
            guards=tuple(guard.text for guard in self.judge.guards),
            race=self.table.race,
            seed=self.seed,
        )


def make_request(
    recipe: Recipe,
    *,
    over: Mapping[str, Choices | Range] | None = None,
    evaluate: Evaluator | None = None,
    holdout: Evaluator | None = None,
    seed: int = 0,
    **settings: Any,
) -> SearchRequest:
    """Lay what is given over the recipe's table `[search]`, and refuse what makes no sense."""
    table = recipe.search or Search()
    fields = {name: getattr(table, name) for name in Search.model_fields}
    fields |= {name: value for name, value in settings.items() if value is not None}
    searched = {**table.over, **(over or {})}
    if (each := searched.pop(INCLUDE[:-1], None)) is not None:
        names = distinct([entry.name for entry in recipe.models])
        searched = {f"{INCLUDE}{name}": each for name in names} | searched
    table = Search(**fields | {"over": searched})
    idle = [name for name in IDLE if getattr(table, name) != Search.model_fields[name].default]
    if idle and not searched:
        how = f"add --over NAME=VALUES, or leave out {idle[0]} to score only the baselines"
        raise RecipeError(f"{idle[0]}: nothing to search over: {how}")
    space = Space(recipe.model_copy(update={"search": None, "output": None}), table.over)
    space.check()
    sampler = table.sampler or ("grid" if space.is_listed else "tpe")
    if lacking := [package for package in NEEDED.get(sampler, ()) if find_spec(package) is None]:
        how = f"pip install {' '.join(lacking)}, or use tpe"
        raise InputError(f"sampler {sampler}: needs {' and '.join(lacking)}: {how}")
    planned = count_grid(space, table.seeds) if sampler == "grid" else table.trials or USUAL_TRIALS
    judging = evaluate if evaluate is not None else table.eval
    if judging is None:
        raise RecipeError("no evaluator: add --eval score.py:score or 'python score.py {model}'")
    judge = Judge.by(table.objective, table.guards)
    held = holdout if holdout is not None else table.holdout
    for evaluator in (judging, held):
        if isinstance(evaluator, str):
            check_evaluator(evaluator)
    return SearchRequest(space, table, sampler, planned, judging, held, judge, seed, recipe.output)


def count_grid(space: Space, seeds: int) -> int:
    """How many candidates a grid has: another seed counts only where something is random."""
    if not space.is_listed:
        raise RecipeError("a grid needs lists or steps; else use random, tpe, cmaes or gp")
    return sum(seeds if space.is_random(settings) else 1 for settings in space.grid())


def evaluator_name(evaluator: Evaluator) -> str:
    """What an evaluator is called."""
    if isinstance(evaluator, str):
        return evaluator
    return f"{getattr(evaluator, '__module__', '?')}:{getattr(evaluator, '__qualname__', '?')}"
