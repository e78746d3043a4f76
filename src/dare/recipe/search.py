"""The table `[search]`: the settings over which a recipe is searched, and the objective.

    [search]
    eval = "score.py:score"
    objective = { math = 1.0, loss = -0.5 }

    [search.over]
    drop_rate = [0.8, 0.85, 0.9, 0.95]
    "weight.math" = { from = 0.0, to = 1.0, layers = 3 }

A merge leaves it aside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from dare.errors import RecipeError
from dare.recipe.entries import Strict, as_tuple

Sampler = Literal["grid", "random", "tpe", "cmaes", "gp"]
_FORMULA = re.compile(r"^-|[()+*]|\s[-/]\s|^(mean|min|max)?$")
"""Texts that earlier versions read as a formula; no score has such a name."""


class Range(Strict, init=False):
    """All numbers from one to another."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    start: float = Field(alias="from", description="The smallest value.")
    to: float = Field(description="The largest value.")
    log: bool = Field(False, description="Whether a factor matters, not a difference.")
    step: float | None = Field(None, gt=0, description="Only values so far apart.")
    layers: int | None = Field(
        None, ge=2, le=16, description="So many values from the first layer to the last."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        wrong = ""
        if self.start >= self.to:
            wrong = "the range is empty; `from` must be below `to`"
        elif self.log and (self.start <= 0 or self.step is not None):
            wrong = "log needs a range above zero, and no step"
        if wrong:
            raise RecipeError(f"from = {self.start:g}, to = {self.to:g}: {wrong}")
        return self

    @property
    def values(self) -> tuple[float, ...] | None:
        """All its values, if it has a step."""
        if self.step is None:
            return None
        count = math.floor((self.to - self.start) / self.step + 1e-9) + 1
        return tuple(self.fitted(self.start + place * self.step) for place in range(count))

    def fitted(self, value: float) -> float:
        """Return a value as settings have it: whole if the start and the step are."""
        if self.step is None:
            return value
        is_whole = self.start.is_integer() and self.step.is_integer()
        return round(value) if is_whole else round(value, 12)


Choices = tuple[Any, ...]
"""Values to choose from: numbers, texts, or lists over the layers."""


def _over(value: object) -> object:
    if not isinstance(value, Mapping):
        raise RecipeError("over: must be a table, as in [search.over]")
    return {name: _dimension(name, dimension) for name, dimension in value.items()}


def _dimension(name: str, value: object) -> Choices | Range:
    try:
        if isinstance(value, Range | Mapping):
            return value if isinstance(value, Range) else Range(**value)
        if not isinstance(value, list | tuple) or not value:
            raise RecipeError(f"{value!r}: must be a list of values, or {{ from = …, to = … }}")
        if len({repr(choice) for choice in value}) < len(value):
            raise RecipeError(f"{list(value)}: has the same value twice")
    except RecipeError as error:
        raise RecipeError(f"over {name} = {error}") from None
    return tuple(value)


def _weights(value: Any) -> Any:
    """Read a name, names with or without `=WEIGHT`, or a table of weights."""
    if isinstance(value, Mapping):
        return value
    weights: dict[str, float] = {}
    for text in cast("Iterable[Any]", as_tuple(value)):
        name, equals, weight = str(text).strip().rpartition("=")
        if not equals and _FORMULA.search(weight):
            raise RecipeError(
                f"objective {text!r}: formulas are no longer read; write names with weights, as "
                'in ["math", "code"], { math = 1.0, loss = -0.5 } or --objective math loss=-0.5, '
                "or leave it out for the mean of all scores"
            )
        try:
            weights[name if equals else weight] = float(weight) if equals else 1.0
        except ValueError:
            raise RecipeError(f"objective {text!r}: {weight!r} is not a number") from None
    return weights


class Search(Strict, init=False):
    """The settings that a search tries, and its objective."""

    over: Annotated[dict[str, Choices | Range], BeforeValidator(_over)] = Field(
        default_factory=dict, description="By setting: a list of values, or a range."
    )
    sampler: Sampler | None = Field(
        None, description="How settings are chosen; grid if all are lists, else tpe."
    )
    trials: int | None = Field(
        None, gt=0, description="How many candidates are scored; by default 40, in a grid all."
    )
    seeds: int = Field(1, gt=0, le=1000, description="How many seeds each setting is tried with.")
    eval: str | None = Field(None, description="What scores a candidate.")
    holdout: str | None = Field(None, description="What scores the winner, once, on other data.")
    objective: Annotated[dict[str, float], BeforeValidator(_weights)] = Field(
        default_factory=dict, description="By score: its weight in the mean that is to be large."
    )
    guards: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), description="What scores must keep to, such as english:max:1.25 or *:keep:0.95."
    )
    race: bool = Field(False, description="Stop bad candidates early, on a part of the items.")
    time_limit: float | None = Field(None, gt=0, description="Seconds that one scoring may take.")


def search_table(value: object) -> object:
    """Read the table; errors in it begin with its name."""
    if value is None or isinstance(value, Search):
        return value
    try:
        if not isinstance(value, Mapping):
            raise RecipeError("must be a table")
        return Search(**value)
    except RecipeError as error:
        raise RecipeError(f"[search] {error}") from None
