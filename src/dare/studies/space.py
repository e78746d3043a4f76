"""The space of a search, and the recipes of its settings and of the baselines.

A setting counts only in methods that have it, and only for models that take part, so candidates
have different settings. Everything is checked before the first candidate is made.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from dare.errors import RecipeError, did_you_mean
from dare.recipe.document import request_from_document
from dare.recipe.options import Choices, Range, Search
from dare.recipe.recipe import ModelEntry, Recipe
from dare.recipe.settings import (
    FIELDS,
    INCLUDE,
    MODEL_SETTINGS,
    get_by_name,
    has_effect,
    parameter_names,
    rows_without,
    with_settings,
)
from dare.stages import parse_method
from dare.studies.results import ALONE, Ranked, Role, Settings, StudyData, is_number, key_of

SEED_STEP = 1000  # model i has seed + i, so the seeds of two candidates must be far apart
MOST_IN_GRID = 100_000
METHOD = "method"
PLAN = "plan"  # the sampler of a search that is given no settings
_USUAL = tomllib.loads(files("dare.studies").joinpath("usual_merges.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Space:
    """The settings that are searched over, around a recipe."""

    recipe: Recipe
    over: Mapping[str, Choices | Range]

    @cached_property
    def methods(self) -> tuple[str, ...]:
        chosen = self.over.get(METHOD)
        return chosen if isinstance(chosen, tuple) else (self.recipe.method,)

    def names_in(self, method: str) -> list[str]:
        """Return the settings that affect a method, except `method`; choices of models first."""
        names = [name for name in self.over if name != METHOD and has_effect(name, method)]
        return sorted(names, key=lambda name: not name.startswith(INCLUDE))

    def counting(self, settings: Settings) -> dict[str, Any]:
        """Return the settings without those for another method or for models left out."""
        method = settings.get(METHOD, self.methods[0])
        return {
            name: value
            for name, value in settings.items()
            if name == METHOD
            or name.startswith(INCLUDE)
            or (has_effect(name, method) and settings.get(INCLUDE + name.partition(".")[2], True))
        }

    def has_models(self, settings: Settings) -> bool:
        """Tell if a setting leaves any model to merge."""
        names = self.recipe.names
        return any(settings.get(INCLUDE + name, True) for name in names)

    def check(self) -> None:
        """Refuse a space in which a name has no effect, or a value is not valid."""
        if isinstance(self.over.get(METHOD), Range):
            raise RecipeError("over method: must be a list of methods")
        for name, dimension in self.over.items():
            if name in FIELDS and isinstance(dimension, Range) and dimension.layers is not None:
                raise RecipeError(f"over {name}: has one value for all layers; leave out `layers`")
            if name.startswith(INCLUDE) and (
                isinstance(dimension, Range) or {repr(v) for v in dimension} != {"True", "False"}
            ):
                raise RecipeError(f"over {name}: write true,false, or change the recipe's models")
        if "seed" in self.over:
            raise RecipeError("over seed: set how many seeds each setting is tried with: seeds = 5")
        known = {*FIELDS, *MODEL_SETTINGS, *parameter_names()}
        for name, dimension in self.over.items():
            if "." not in name and name not in known:
                raise RecipeError(f"over: there is no setting {name!r}{did_you_mean(name, known)}")
            tried = [m for m in self.methods if name == METHOD or has_effect(name, m)]
            try:
                for method, value in itertools.product(tried or self.methods, _ends(dimension)):
                    self.candidate({METHOD: method, name: value})
                if not tried:
                    raise RecipeError(f"it has no effect in {', '.join(self.methods)}")
            except RecipeError as error:
                raise RecipeError(f"over {name}: {error}") from None

    def candidate(self, settings: Settings, shift: int = 0) -> Recipe:
        """Return the recipe of a setting, with all its seeds shifted."""
        recipe = with_settings(self.recipe, settings)
        if not shift:
            return recipe
        entries = tuple(
            entry if entry.seed is None else entry.changed(seed=entry.seed + shift)
            for entry in recipe.models
        )
        return recipe.changed(models=entries, seed=recipe.seed + shift)

    @property
    def is_listed(self) -> bool:
        """True if the number of settings is finite."""
        return all(_listed(dimension) is not None for dimension in self.over.values())

    def grid(self) -> list[dict[str, Any]]:
        """Return every setting once; none if nothing is searched over."""
        settings: dict[str, dict[str, Any]] = {}
        for method in self.methods:
            with_method = {METHOD: method} if METHOD in self.over else {}
            names = self.names_in(method)
            lists = [_listed(self.over[name]) or () for name in names]
            if math.prod(map(len, lists)) > MOST_IN_GRID:
                raise RecipeError(f"the grid has over {MOST_IN_GRID:,} settings; use random or tpe")
            for row in itertools.product(*lists):
                setting = self.counting({**with_method, **dict(zip(names, row, strict=True))})
                if setting and self.has_models(setting):
                    settings.setdefault(key_of(setting), setting)
        return list(settings.values())

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the setting that a sampler suggests for a trial of Optuna."""
        settings: dict[str, Any] = {}
        if METHOD in self.over:
            settings[METHOD] = trial.suggest_categorical(METHOD, self.methods)
        for name in self.names_in(settings.get(METHOD, self.methods[0])):
            dimension = self.over[name]
            if name not in self.counting({**settings, name: True}):
                continue
            if name.startswith(INCLUDE) and not self.has_models({**settings, name: False}):
                settings[name] = True  # nothing to choose: all others are left out
            elif isinstance(dimension, Range):
                start, to, log, step = dimension.start, dimension.to, dimension.log, dimension.step
                values = [
                    dimension.fitted(trial.suggest_float(part, start, to, log=log, step=step))
                    for part in _parts(name, dimension)
                ]
                settings[name] = values[0] if dimension.layers is None else values
            else:
                texts = [repr(choice) for choice in dimension]
                settings[name] = dimension[texts.index(trial.suggest_categorical(name, texts))]
        return settings

    def suggestion(self, settings: Settings) -> dict[str, Any]:
        """Return the parameters with which `suggest` returns this setting."""
        parameters: dict[str, Any] = {}
        for name, value in settings.items():
            dimension = self.over[name]
            if isinstance(dimension, Range):
                values = value if isinstance(value, list) else [value]
                parameters |= zip(_parts(name, dimension), values, strict=True)
            else:
                parameters[name] = value if name == METHOD else repr(value)
        return parameters

    def nearest(self) -> dict[str, Any] | None:
        """Return the setting nearest to the recipe; None if its method is not searched."""
        chain = [stage.name for stage in parse_method(self.recipe.method)]
        same = [m for m in self.methods if [stage.name for stage in parse_method(m)] == chain]
        if not same:
            return None
        settings: dict[str, Any] = {METHOD: same[0]} if METHOD in self.over else {}
        for name in self.names_in(same[0]):
            near = True if name.startswith(INCLUDE) else get_by_name(self.recipe, name)
            settings[name] = _snapped(self.over[name], near)
        return self.counting(settings)


def is_random(recipe: Recipe) -> bool:
    """Tell if a stage draws random numbers, for any model, tensor or layer."""

    def most(value: Any) -> Any:
        return max(value) if isinstance(value, list | tuple) else value

    overrides = [{}, *(entry.settings for entry in recipe.models)]
    overrides += [rule.settings for rule in recipe.tensors]
    if recipe.embedding_drop_rate is not None:
        overrides.append({"drop_rate": recipe.embedding_drop_rate})
    return any(
        stage.is_random({name: most(changed.get(name, value)) for name, value in settings.items()})
        for stage, settings in recipe.all_stages
        for changed in overrides
    )


def seed_shifts(count: int) -> tuple[int, ...]:
    """Return the numbers to add to a recipe's seeds, for `count` repetitions of a setting."""
    return tuple(SEED_STEP * place for place in range(count))


# ---------------------------------------------------------------- without settings


@dataclass(frozen=True)
class UsualMerges:
    """The merges to try if no settings are given.

    First methods at a few scales, then the best of these without each model in turn: a model that
    learnt wrong answers, or too much of its own, cannot be recognised by its weights. Then the best
    of all at nearby scales. The sum is among the baselines: it is the average at a scale equal to
    the number of models.
    """

    recipe: Recipe
    grams: str | None  # the file with Gram matrices for RegMean, if it can be made
    left_out: tuple[str, ...] = ()

    @cached_property
    def first(self) -> list[dict[str, Any]]:
        """The methods, each setting once; the recipe's own comes first."""
        without = {INCLUDE + name: False for name in self.left_out}
        methods = [{"method": self.recipe.method, "scales": [self.recipe.scale]}, *_USUAL["tried"]]
        if self.grams:
            given = {"gathered": self.grams}
            methods.append({"method": "regmean", "scales": [1.0, 1.5], "settings": given})
        tried = [
            {METHOD: each["method"], **each.get("settings", {}), "scale": scale, **without}
            for each in methods
            for scale in each["scales"]
        ]
        chains = (with_settings(self.recipe, settings).chain for settings in tried)
        effects = [repr([(stage.name, dict(used)) for stage, used in chain]) for chain in chains]
        pairs = zip(effects, tried, strict=True)
        return list(
            {f"{effect} {settings['scale']}": settings for effect, settings in pairs}.values()
        )

    def _without_each(self, best: Settings) -> list[dict[str, Any]]:
        kept = [name for name in self.recipe.names if best.get(INCLUDE + name, True)]
        return [{**best, INCLUDE + name: False} for name in kept] if len(kept) > 2 else []

    def _rescaled(self, best: Settings) -> list[dict[str, Any]]:
        nearby = (
            {**best, "scale": round(factor * best["scale"], 4)} for factor in _USUAL["factors"]
        )
        return [settings for settings in nearby if settings not in self.first][:3]

    @property
    def count(self) -> int:
        """The total number of settings."""
        one = self.first[0]
        return len(self.first) + len(self._without_each(one)) + len(self._rescaled(one))

    def at(self, place: int, best_before: Callable[[int], Settings | None]) -> dict[str, Any]:
        """Return the setting at a place; `best_before` gives the best of those before a place."""
        start, best = 0, self.first[0]
        for part in (lambda _: self.first, self._without_each, self._rescaled):
            settings = part(best)
            if place < start + len(settings):
                return settings[place - start]
            start += len(settings)
            best = dict(best_before(start) or best)
        raise IndexError(place)

    @property
    def space(self) -> dict[str, Choices]:
        """The values of each setting; each model may also be left out."""
        values_of: dict[str, dict[str, Any]] = {}
        for settings in self.first:
            for name, value in settings.items():
                values_of.setdefault(name, {})[repr(value)] = value
        names = self.recipe.names
        choices = {name: tuple(values.values()) for name, values in values_of.items()}
        return choices | {f"{INCLUDE}{name}": (True, False) for name in names if len(names) > 1}


# ---------------------------------------------------------------- dimensions


def _listed(dimension: Choices | Range) -> Sequence[Any] | None:
    if isinstance(dimension, tuple):
        return dimension
    return dimension.values if dimension.layers is None else None


def _ends(dimension: Choices | Range) -> Sequence[Any]:
    """Return values of a dimension; if they are valid, all are."""
    if isinstance(dimension, tuple):
        return dimension
    ends = dimension.values or (dimension.start, dimension.to)
    ends = ends[0], ends[-1]
    return ends if dimension.layers is None else [[end] * dimension.layers for end in ends]


def _parts(name: str, dimension: Range) -> list[str]:
    count = dimension.layers
    return [name] if count is None else [f"{name}[{place + 1}]" for place in range(count)]


def _snapped(dimension: Choices | Range, value: Any) -> Any:
    """Return the value of a dimension that is nearest to another."""
    if isinstance(dimension, Range):
        middle = (dimension.start + dimension.to) / 2
        near = float(value) if is_number(value) else middle
        number = min(max(near, dimension.start), dimension.to)
        if dimension.values is not None:
            number = min(dimension.values, key=lambda listed: abs(listed - number))
        return number if dimension.layers is None else [number] * dimension.layers

    def gap(choice: Any) -> float:
        try:
            return abs(float(choice) - float(value))
        except (TypeError, ValueError):
            return 0.0 if choice == value else math.inf

    return min(dimension, key=gap)


# ---------------------------------------------------------------- recipes


def recipe_of(data: StudyData, ranked: Ranked) -> Recipe:
    """Return the recipe of a setting with its first seed, or of a baseline; to the study's output.

    With several seeds it has the first: choosing the best of them would be another choice by luck.
    """
    recipe = request_from_document(data.recipe, "the recipe of the study").recipe
    if ranked.baseline:
        made = baseline_recipes(recipe)[ranked.baseline]
    else:
        made = Space(recipe, Search(over=data.space).over).candidate(ranked.settings)
    more = {"gathered": Path(data.norms[ranked.key])} if ranked.key in data.norms else {}
    return made.changed(output=data.output, **more)


def baseline_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Return a recipe for each baseline, by name; the average twice, to measure the noise."""
    alone = {
        f"{name}{ALONE}": _plain(recipe, "sum", models=(entry,))
        for name, entry in zip(recipe.names, recipe.models, strict=True)
    }
    average = _plain(recipe, "linear")
    return {
        str(Role.BASE): _plain(recipe, "sum", scale=0.0),
        **alone,
        str(Role.AVERAGE): average,
        str(Role.SUM): _plain(recipe, "sum"),
        str(Role.AGAIN): average,
    }


def _plain(recipe: Recipe, method: str, **more: Any) -> Recipe:
    """Return a recipe with a method and only the settings that make the inputs fit together."""
    entries = tuple(ModelEntry(file=entry.file) for entry in more.pop("models", recipe.models))
    more |= rows_without(recipe, entries)
    bare: dict[str, Any] = {"method": method, "stages": {}, "tensors": (), "scale": 1.0}
    bare |= {"embedding_drop_rate": None, "search": None, "output": None, "input_digests": None}
    return recipe.changed(models=entries, **bare | more)
