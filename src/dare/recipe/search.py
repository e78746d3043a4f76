"""The table `[search]`: over which settings a recipe is searched, and what decides.

    [search]
    eval = "score.py:score"
    seeds = 5

    [search.over]
    drop_rate = [0.8, 0.85, 0.9, 0.95]
    scale = { from = 0.5, to = 2.0 }
    "weight.math" = { from = 0.0, to = 1.0, layers = 3 }

A merge leaves it aside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from dare.errors import RecipeError
from dare.recipe.entries import Strict

Sampler = Literal["grid", "random", "tpe", "cmaes", "gp"]


class Range(Strict):
    """All numbers from one to another."""

    if TYPE_CHECKING:  # fields take more than they are declared to hold

        def __init__(self, **given: Any) -> None: ...

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    start: float = Field(alias="from", description="The smallest value.")
    to: float = Field(description="The largest value.")
    log: bool = Field(False, description="Whether a factor matters, not a difference.")
    step: float | None = Field(None, gt=0, description="Only values so far apart.")
    layers: int | None = Field(
        None, ge=2, le=16, description="So many values, spread from the first layer to the last."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        text = f"from = {self.start:g}, to = {self.to:g}"
        if self.start >= self.to:
            raise RecipeError(f"{text}: the range is empty; `from` must be below `to`")
        if self.log and self.start <= 0:
            raise RecipeError(f"{text}: log needs a range above zero")
        if self.log and self.step is not None:
            raise RecipeError(f"{text}: log and step do not go together; leave one out")
        return self

    @property
    def values(self) -> tuple[float, ...] | None:
        """All its values, if they are counted."""
        if self.step is None:
            return None
        count = math.floor((self.to - self.start) / self.step + 1e-9) + 1
        return tuple(self.fitted(self.start + place * self.step) for place in range(count))

    def fitted(self, value: float) -> float:
        """A value as settings have it: whole if the start and the step are."""
        if self.step is None:
            return value
        is_whole = self.start.is_integer() and self.step.is_integer()
        return round(value) if is_whole else round(value, 12)


Choices = tuple[Any, ...]
"""Values to choose from: numbers, texts, or lists over the layers."""


def _dimension(value: object) -> object:
    if isinstance(value, Range):
        return value
    if isinstance(value, Mapping):
        return Range(**value)
    if isinstance(value, list | tuple):
        if not value:
            raise RecipeError("[]: there must be a value to choose")
        distinct = list({repr(choice): choice for choice in value}.values())
        if len(distinct) < len(value):
            raise RecipeError(f"{list(value)}: a value stands there twice")
        return tuple(distinct)
    raise RecipeError(f"{value!r}: must be a list of values, or {{ from = …, to = … }}")


def _over(value: object) -> object:
    if not isinstance(value, Mapping):
        raise RecipeError("over: must be a table, as in [search.over]")
    found = {}
    for name, dimension in value.items():
        try:
            found[name] = _dimension(dimension)
        except RecipeError as error:
            raise RecipeError(f"over {name} = {error}") from None
    return found


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Search(Strict):
    """What a search tries, and by what it judges."""

    if TYPE_CHECKING:  # fields take more than they are declared to hold

        def __init__(self, **given: Any) -> None: ...

    over: Annotated[dict[str, Choices | Range], BeforeValidator(_over)] = Field(
        default_factory=dict, description="By setting: a list of values, or a range."
    )
    sampler: Sampler | None = Field(
        None, description="How settings are chosen; grid if all are lists, else tpe."
    )
    trials: int | None = Field(
        None,
        gt=0,
        description="How many candidates are scored; a grid has its own number, else 40.",
    )
    seeds: int = Field(1, gt=0, le=1000, description="With how many seeds each setting is tried.")
    eval: str | None = Field(None, description="What scores a candidate.")
    holdout: str | None = Field(None, description="What scores the winner, once, on other data.")
    objective: str = Field("mean", description="What is to be large, from the scores.")
    guards: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = Field(
        (), description="What scores must keep to, such as english:max:1.25 or *:keep:0.95."
    )
    race: bool = Field(False, description="Stop bad candidates early, on a part of the items.")
    items: int | None = Field(None, gt=0, description="Score on so many chosen items, not on all.")
    time_limit: float | None = Field(None, gt=0, description="Seconds that one scoring may take.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.race and self.items is not None:
            raise RecipeError("race and items do not go together; leave one out")
        return self


def search_table(value: object) -> object:
    """Read the table, with its name before what is wrong in it."""
    if value is None or isinstance(value, Search):
        return value
    if not isinstance(value, Mapping):
        raise RecipeError("search: must be a table, as in [search]")
    try:
        return Search(**value)
    except RecipeError as error:
        raise RecipeError(f"[search] {error}") from None
