"""Other parts of a recipe's file than the merge: how it runs, and what a search around it tries.

Neither changes a byte of an output. They may be given by a file, a table, keywords or flags;
reading them gives a `Request`, a recipe with `RunOptions`. A merge ignores the table `[search]`:

    [search]
    eval = "score.py:score"
    objective = { math = 1.0, loss = -0.5 }

    [search.over]
    drop_rate = [0.8, 0.85, 0.9, 0.95]
    "weight.math" = { from = 0.0, to = 1.0, layers = 3 }
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Annotated, Any, Literal, cast

from dare.documents.values import After, Before, Finite, Limits
from dare.errors import RecipeError
from dare.kernels import check_device
from dare.recipe.entries import AnyPath, as_tuple, parse_size
from dare.recipe.fields import NOT_RECORDED, Strict, described

DEFAULT_MEMORY = 1 << 30
"""The limit for buffers if `max_memory` is not given, unless a method needs more."""

Size = Annotated[int, Before(parse_size), Limits(gt=0, lt=1 << 63)]


class RunOptions(Strict):
    """Threads, memory, and the machines that do the work.

    >>> RunOptions(max_memory="512MiB").max_memory
    536870912
    """

    verbose: bool = described("Show progress and warnings.", True)
    max_memory: Size | None = described(
        "Memory for buffers, such as 512MiB; the process takes about 200 MB more. By default "
        "1 GiB, or for whole matrices up to half of what is free.",
        None,
    )
    threads: int | None = described("Worker threads; by default one for each core.", None, gt=0)
    cluster: str | None = described(
        "The Ray cluster that does the work: auto, or its address.",
        None,
        NOT_RECORDED,
        min_length=1,
    )
    scratch: AnyPath | None = described(
        "Folder in which an output for a store is made first. By default one in your cache.",
        None,
        NOT_RECORDED,
    )
    device: Annotated[str, After(check_device)] = described(
        "What computes: cpu, cuda, cuda:1 for that GPU alone; auto is the processor, and a GPU for "
        "candidates of a search. The bytes are the same, but for whole matrices on a named GPU.",
        "auto",
        NOT_RECORDED,
        old="backend",
    )
    max_gpu_memory: Size | None = described(
        "Memory for buffers on GPUs, such as 4GiB; by default what the threads' batches take.",
        None,
        NOT_RECORDED,
    )
    require_signed: Annotated[tuple[AnyPath, ...], Before(as_tuple)] = described(
        "Public keys or certificates, in PEM: base and models must be signed by one of them.",
        (),
        NOT_RECORDED,
    )


USUAL = RunOptions()


# ---------------------------------------------------------------- the table [search]


Sampler = Literal["grid", "random", "tpe"]
# Texts that earlier versions read as formulas; no score has such a name.
_FORMULA = re.compile(r"^-|[()+*]|\s[-/]\s|^(mean|min|max)?$")


class Range(Strict):
    """All numbers from one to another."""

    start: Finite = described("The smallest value.", key="from")
    to: Finite = described("The largest value.")
    log: bool = described("Whether to search on a logarithmic scale.", False)
    step: Finite | None = described("The step between values.", None, gt=0)
    layers: int | None = described(
        "Number of values from the first layer to the last.", None, ge=2, le=16
    )

    def check_together(self) -> None:
        wrong = ""
        if self.start >= self.to:
            wrong = "the range is empty; `from` must be below `to`"
        elif self.log and (self.start <= 0 or self.step is not None):
            wrong = "log needs a range above zero, and no step"
        if wrong:
            raise RecipeError(f"from = {self.start:g}, to = {self.to:g}: {wrong}")

    @property
    def values(self) -> tuple[float, ...] | None:
        """All its values, if it has a step."""
        if self.step is None:
            return None
        count = math.floor((self.to - self.start) / self.step + 1e-9) + 1
        return tuple(self.fitted(self.start + place * self.step) for place in range(count))

    def fitted(self, value: float) -> float:
        """Return a value for settings: a whole number if the start and the step are."""
        if self.step is None:
            return value
        is_whole = self.start.is_integer() and self.step.is_integer()
        return round(value) if is_whole else round(value, 12)


Choices = tuple[Any, ...]  # values to choose from: numbers, texts, or lists over the layers


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
            remedy = "write { math = 1.0, loss = -0.5 }, or leave it out for the mean of all scores"
            raise RecipeError(f"objective {text!r}: formulas are no longer read; {remedy}")
        try:
            weights[name if equals else weight] = float(weight) if equals else 1.0
        except ValueError:
            raise RecipeError(f"objective {text!r}: {weight!r} is not a number") from None
    return weights


def _files(value: Any) -> object:
    return (str(value),) if isinstance(value, str | PathLike) else tuple(map(str, value))


class Search(Strict):
    """The settings that a search tries, and its objective."""

    over: Annotated[dict[str, Choices | Range], Before(_over)] = described(
        "By setting: a list of values, or a range.", {}
    )
    sampler: Sampler | None = described(
        "How settings are chosen; grid if all are lists, else tpe.", None
    )
    trials: int | None = described(
        "How many candidates to score: 40 by default, all in a grid.", None, gt=0
    )
    seeds: int = described("How many seeds each setting is tried with.", 1, gt=0, le=1000)
    data: Annotated[tuple[str, ...], Before(_files)] = described(
        "Files of examples, one for each task: JSONL, CSV or Parquet.", ()
    )
    minutes: Finite | None = described(
        "About how long; 15 if no settings to try are given.", None, gt=0
    )
    eval: str | None = described("What scores a candidate, in place of examples.", None)
    holdout: str | None = described("Scores the winner once, on other data.", None)
    objective: Annotated[dict[str, Finite], Before(_weights)] = described(
        "The weight of each score; larger is better.", {}
    )
    guards: Annotated[tuple[str, ...], Before(as_tuple)] = described(
        "Conditions on scores, such as english:max:1.25 or *:keep:0.95.", ()
    )
    race: bool = described("Stop bad candidates early, after part of the items.", False)
    time_limit: Finite | None = described("Seconds that one scoring may take.", None, gt=0)


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
