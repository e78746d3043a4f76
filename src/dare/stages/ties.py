"""A vote on signs, and a mean of those that agree."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import always, combine_stage, meaning
from dare.stages.trim import KeepRatio

TrimFirst = Annotated[
    KeepRatio | None,
    meaning("Trim each delta to this share of its elements first; default: no trimming."),
]
Divisor = Annotated[
    Literal["weights", "signed", "count", "nothing"],
    meaning(
        "Divide by the weights of the models that agree, these with their signs, their number, or "
        "nothing."
    ),
]
Vote = Annotated[
    Literal["sum", "count"],
    meaning("Whether the sign of the sum wins, or the one that more models have."),
]
Weighted = Annotated[bool, meaning("Whether a model's vote counts by its weight.")]


@combine_stage(
    paper="arXiv:2306.01708",
    votes=True,
    is_identity=always,
    is_lazy=lambda settings: settings["vote"] == "sum" and settings["weighted"],
)
def ties(
    deltas: Deltas,
    *,
    keep_ratio: TrimFirst = None,  # noqa: ARG001 (makes a stage of its own: see IMPLIED)
    divide_by: Divisor = "weights",
    vote: Vote = "sum",
    weighted: Weighted = True,
) -> Floats:
    """Let the models vote on the sign of each element, then average those that agree with it.

    P = Σ wᵢ·δ̂ᵢ over the positive terms, N over the negative ones. Where P + N > 0 the result is
    P / Σ wᵢ over the models that made up P, where P + N < 0 it is N / Σ wᵢ likewise, and where
    they cancel it is 0. `divide_by = "count"` divides by the number of those models, as PEFT does,
    and `divide_by = "nothing"` leaves P and N as they are, as mergekit's `dare_ties` does. Where
    weights are negative, Σ |wᵢ| is meant; `divide_by = "signed"` divides by Σ wᵢ, unless that is 0,
    as mergekit's `ties` does.
    `keep_ratio` trims each delta first, as the stage `trim` does; without it nothing is trimmed.
    (The published function `dare_ties_merge` trims unless told otherwise: to 0.2 of what DARE has
    kept on dicts, to 0.5 on files.)

    `weighted = false` counts votes by Σ ±δ̂ᵢ, the sign that of the weight, instead of P + N, and
    `vote = "count"` by the weights of the models on either side, or with `weighted = false` by
    their number. PEFT has `weighted = false`, `divide_by = "count"` and either vote.
    """
    weights = deltas.weights
    sizes, ones = [abs(w) for w in weights], [1.0] * len(weights)
    divisors = {"weights": sizes, "signed": weights, "count": ones}
    shares = divisors.get(divide_by, [0.0] * len(weights))
    if vote == "sum" and weighted:
        return deltas.elect(weights, shares)
    sums = deltas.sides(weights, shares)
    if vote == "count":
        _, _, above, below = deltas.sides(weights, sizes if weighted else ones)
        balance = above - below
    else:
        balance = deltas.sum([math.copysign(float(w != 0), w) for w in weights])
    merged = np.empty(deltas.size, np.float32)
    deltas.kernels.elect(sums.reshape(-1), balance, merged)
    return merged
