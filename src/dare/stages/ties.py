"""Sign election and disjoint mean."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import combine_stage
from dare.stages.trim import KeepRatio

TrimFirst = Annotated[
    KeepRatio | None, Field(description="Share of each delta's elements to keep before electing.")
]
Divisor = Annotated[
    Literal["weights", "count", "nothing"],
    Field(description="Divide by the weights of the models that agree, their number, or nothing."),
]


@combine_stage(paper="arXiv:2306.01708", preceded_by={"keep_ratio": "trim"})
def ties(
    deltas: Deltas,
    *,
    keep_ratio: TrimFirst = None,  # noqa: ARG001 (read by the planner: see preceded_by)
    divide_by: Divisor = "weights",
) -> Floats:
    """Elect a sign for each element, then average the models that agree with it.

    P = Σ wᵢ·δ̂ᵢ over the positive terms, N over the negative ones. Where P + N > 0 the result is
    P / Σ wᵢ over the models that made up P, where P + N < 0 it is N / Σ wᵢ likewise, and where
    they cancel it is 0. `divide_by = "count"` divides by the number of those models, as PEFT does,
    and `divide_by = "nothing"` leaves P and N as they are, as mergekit's `dare_ties` does.
    `keep_ratio` trims each delta first, as the stage `trim` does.
    """
    weights = deltas.weights
    shares = {"weights": [abs(w) for w in weights], "count": [1.0] * len(weights)}
    return deltas.elect(weights, shares.get(divide_by, [0.0] * len(weights)))
