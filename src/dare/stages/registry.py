"""What a stage is, and the one table of them.

A stage is a function with keyword-only parameters. Those parameters, their defaults and their
ranges are the recipe's schema; its docstring is its documentation. There are two kinds:

- a *delta stage* changes one block of one model's delta in place:
  `dare(block, *, drop_rate, rescale)`
- a *combine stage* turns the deltas of all models, which come one after the other, into one:
  `linear(deltas)`

A stage sees one block at a time. One that must know something of the whole tensor first has a
*survey*: a function of the same parameters that walks over the tensor's blocks and returns
whatever the stage wants to find in `summary` later. `surveys_when` says for which parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from dare.errors import RecipeError, did_you_mean

Floats = NDArray[np.float32]
Settings = Mapping[str, Any]
"""Parameter values of one stage, complete and checked."""


class Block:
    """A run of elements of one model's delta, on its way through the stages.

    It is lazy: the difference of tuned and base is taken when `values` is asked for, or by
    `add_to`, in one loop with the sum. Until then a mask is only remembered. A factor that all
    elements share is never multiplied in; it is left to the weight in the combine stage.
    """

    def __init__(
        self,
        kernels: Any,
        tensor: str,
        start: int,
        seed: int,
        tuned: NDArray[Any],
        base: Floats,
        scratch: Scratch,
        threshold_bits: np.int32,
    ) -> None:
        self.kernels = kernels
        self.tensor = tensor
        self.start = start
        """Index of the first element in the tensor."""
        self.seed = seed
        self.size = tuned.size
        self.survivors = tuned.size
        """How many elements no stage has dropped yet."""
        self.factor = 1.0
        """What `values` still have to be multiplied by."""
        self.summary: Any = None
        """What the survey of the stage being applied returned."""
        self.peak = 0
        """Bits of the delta's largest magnitude, before any stage."""
        self.over = 0
        """How many magnitudes exceed the threshold, before any stage."""
        self._tuned = tuned
        self._base = base
        self._scratch = scratch
        self._threshold_bits = threshold_bits
        self._lanes = scratch.all_kept
        self._values: Floats | None = None
        self._measured = False

    @property
    def values(self) -> Floats:
        """The delta, to be changed in place, but for `factor`."""
        if self._values is None:
            self._values = self._scratch.values[: self.size]
            self._measure_by(self.kernels.delta, self._values)
        return self._values

    def measure(self) -> None:
        """Make sure that `peak` and `over` are known."""
        if not self._measured:
            _ = self.values

    def mask(self, draw: Callable[[NDArray[np.uint8]], int]) -> None:
        """Drop elements: `draw` sets the lanes of those to keep to 255, and returns how many."""
        if self._lanes is not self._scratch.all_kept:
            _ = self.values  # applies the mask that is pending
        lanes = self._scratch.lanes
        kept = draw(lanes)
        if self._values is None:
            self._lanes, self.survivors = lanes, kept
        else:
            self.survivors = self.kernels.keep_lanes(self._values, lanes)

    def write_to(self, out: Floats, weight: float) -> None:
        """out = (weight·factor)·delta."""
        combined = np.float32(weight * self.factor)
        if self._values is not None:
            self.kernels.scaled(self._values, combined, out)
        else:
            self._measure_by(self.kernels.weighted_delta, combined, out)

    def add_to(self, total: Floats, weight: float) -> None:
        """total += (weight·factor)·delta."""
        combined = np.float32(weight * self.factor)
        if self._values is not None:
            self.kernels.add_scaled(total, self._values, combined)
        else:
            self._measure_by(self.kernels.add_delta, combined, total)

    def _measure_by(self, kernel: Callable[..., tuple[int, int]], *arguments: Any) -> None:
        """Run one of the kernels that take the delta, and note the figures it returns."""
        self._measured = True
        self.peak, self.over = kernel(
            self._tuned, self._base, self._lanes, *arguments, self._threshold_bits
        )


class Scratch:
    """One thread's arrays for blocks, used again for each."""

    def __init__(self, size: int) -> None:
        self.values = np.empty(size, np.float32)
        self.lanes = np.empty(size, np.uint8)
        self.all_kept = np.full(size, 255, np.uint8)


class Walk(Protocol):
    """What a survey is given: the blocks of one tensor, as often as it asks for them."""

    spare_bytes: int
    """Memory the survey may use to remember what it has seen."""

    def __call__(self) -> Iterator[Any]:
        """Go over all blocks in order: `Block`s for a delta stage, `Deltas` for a combine stage."""


class Deltas:
    """The deltas of all models at one block, in recipe order; each is gone when the next comes."""

    def __init__(
        self,
        kernels: Any,
        base: Floats,
        weights: Sequence[float],
        rows: Sequence[Floats],
        stream: Iterator[Block],
        summary: Any = None,
    ) -> None:
        self.kernels = kernels
        self.base = base
        self.weights = weights
        self.summary = summary
        self._rows = rows
        self._stream = stream

    def __iter__(self) -> Iterator[tuple[Block, float]]:
        return zip(self._stream, self.weights, strict=True)

    def rows(self, count: int) -> list[Floats]:
        """Lend `count` arrays of the block's size; a stage declares how many it takes."""
        return [row[: self.base.size] for row in self._rows[:count]]

    def zeroed_rows(self, count: int) -> list[Floats]:
        """Lend `count` arrays full of zeros."""
        rows = self.rows(count)
        for row in rows:
            row.fill(0)
        return rows


@dataclass(frozen=True)
class Parameter:
    """One parameter of a stage: its place in the recipe, its default and its check."""

    name: str
    default: Any
    adapter: TypeAdapter[Any] = field(repr=False, compare=False)
    annotation: Any = field(repr=False, compare=False)

    def check(self, value: Any, where: str) -> Any:
        """Return the value if it fits, else say where it does not."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            cause = first.get("ctx", {}).get("error")
            reason = str(cause) if cause else f"{self.name} = {value!r}: {first['msg']}"
            raise RecipeError(where + reason) from None


@dataclass(frozen=True)
class Stage:
    """A registered stage."""

    name: str
    kind: Literal["delta", "combine"]
    apply: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    paper: str
    survey: Callable[..., Any] | None
    surveys_when: Callable[[Settings], bool]
    rows: int
    """Block-sized arrays that a combine stage borrows."""
    default_weight: Callable[[int], float] | None
    """A model's weight when the recipe gives none, from the number of models; None: unweighted."""
    models: int | None
    """How many models a combine stage takes, if not any number."""
    preceded_by: Mapping[str, str]
    """Parameters that, when given, put the delta stage named here before this one."""

    @property
    def summary_line(self) -> str:
        """The first sentence of the stage's documentation."""
        return (inspect.getdoc(self.apply) or "").split("\n")[0]

    def settings(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fill in defaults and check every value."""
        for name in given:
            if name not in self.parameters:
                hint = did_you_mean(name, self.parameters)
                known = ", ".join(self.parameters) or "none"
                raise RecipeError(
                    f"{where}{name}: {self.name} has no such parameter{hint}; it has: {known}"
                )
        return {
            name: parameter.check(given[name], where) if name in given else parameter.default
            for name, parameter in self.parameters.items()
        }


STAGES: dict[str, Stage] = {}
ALIASES: dict[str, str] = {
    "task_arithmetic": "sum",
    "dare_linear": "dare+linear",
    "dare_ties": "dare+ties",
    "dare_slerp": "dare+slerp",
    "dare_task_arithmetic": "dare+sum",
    "average": "linear",
    "dare": "dare+linear",
    "trim": "trim+linear",
}
"""Names that people bring along, as chains of ours."""


def delta_stage(
    *,
    paper: str = "",
    survey: Callable[..., Any] | None = None,
    surveys_when: Callable[[Settings], bool] = lambda _settings: True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function of one block as a delta stage."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _register(function, "delta", paper, survey, surveys_when)
        return function

    return register


def combine_stage(
    *,
    paper: str = "",
    survey: Callable[..., Any] | None = None,
    surveys_when: Callable[[Settings], bool] = lambda _settings: True,
    rows: int = 1,
    default_weight: Callable[[int], float] | None = lambda _models: 1.0,
    models: int | None = None,
    preceded_by: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register a function of all models' deltas as a combine stage."""

    def register(function: Callable[..., Floats]) -> Callable[..., Floats]:
        _register(
            function,
            "combine",
            paper,
            survey,
            surveys_when,
            rows=rows,
            default_weight=default_weight,
            models=models,
            preceded_by=preceded_by or {},
        )
        return function

    return register


def _register(
    function: Callable[..., Any],
    kind: Literal["delta", "combine"],
    paper: str,
    survey: Callable[..., Any] | None,
    surveys_when: Callable[[Settings], bool],
    *,
    rows: int = 0,
    default_weight: Callable[[int], float] | None = lambda _models: 1.0,
    models: int | None = None,
    preceded_by: Mapping[str, str] = MappingProxyType({}),
) -> None:
    hints = get_type_hints(function, include_extras=True)
    parameters = {
        name: Parameter(
            name,
            parameter.default,
            TypeAdapter(hints[name], config=ConfigDict(strict=True)),
            hints[name],
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    name = function.__name__
    STAGES[name] = Stage(
        name,
        kind,
        function,
        parameters,
        paper,
        survey,
        surveys_when if survey else lambda _settings: False,
        rows,
        default_weight,
        models,
        preceded_by,
    )


def parse_method(method: str) -> tuple[Stage, ...]:
    """Turn `"dare+ties"`, or an alias such as `"dare_ties"`, into its stages.

    >>> [stage.name for stage in parse_method("dare_ties")]
    ['dare', 'ties']
    """
    chain = ALIASES.get(method, method)
    stages = []
    for name in chain.split("+"):
        if name not in STAGES:
            known = [*STAGES, *ALIASES]
            hint = did_you_mean(name, known) or did_you_mean(method, known)
            raise RecipeError(
                f"method {method!r}: there is no stage {name!r}{hint}; "
                f"stages: {', '.join(STAGES)}; other names: {', '.join(ALIASES)}"
            )
        stages.append(STAGES[name])
    for stage in stages:
        if stages.count(stage) > 1:
            raise RecipeError(
                f"method {method!r}: {stage.name} stands in it more than once; "
                "the second would do the same again"
            )
    if [stage.kind for stage in stages] != ["delta"] * (len(stages) - 1) + ["combine"]:
        combiners = ", ".join(stage.name for stage in STAGES.values() if stage.kind == "combine")
        raise RecipeError(
            f"method {method!r}: a method is any delta stages and then one combine stage "
            f"({combiners}), as in 'dare+linear'"
        )
    return tuple(stages)
