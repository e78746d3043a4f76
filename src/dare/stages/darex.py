"""DARE with another factor: the kept elements are divided by q."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from dare.errors import RecipeError
from dare.stages.blocks import Block
from dare.stages.dare import DropRate, drops
from dare.stages.dare import dare as drop
from dare.stages.registry import always, delta_stage, meaning
from dare.tensors.mask import check_drop_rate

Divisor = Annotated[
    float | None, meaning("Divide what is kept by this, q; default: 1 - p.", gt=0, le=1)
]
Excess = Annotated[float | None, meaning("In place of q: q's excess over 1 - p, ε.", ge=0, lt=1)]
LargestVariance = Annotated[
    float | None,
    meaning("Raise q until Var[δ̂] is no more than this times δ², whatever p.", gt=0),
]


# The cost of a lost share of a learnt change, in that of noise of the same size: the best scales of
# the demonstration's merges come to this (0.8 at p = 0.9 and 0.6 at p = 0.95, n = 3).
COHERENCE = 100
ROUNDING = 1e-9  # 0.3 is as good as 1 - 0.7


@delta_stage(
    paper="arXiv:2410.09344",
    check=lambda settings: find_divisor(**settings),
    is_lazy=always,
    is_random=drops,
    drops_at_random=True,
    is_identity=lambda settings: not drops(settings),  # q is between 1 - p and 1
    redrops=always,
)
def darex(
    block: Block,
    *,
    drop_rate: DropRate = 0.9,
    q: Divisor = None,
    epsilon: Excess = None,
    max_variance: LargestVariance = None,
) -> None:
    """Drop each element with probability p and divide the others by q.

    δ̂ᵢ = mᵢ·δᵢ / q, with the mask of `dare`: mᵢ = 1 with probability 1 - p, else 0. So
    E[δ̂] = (1 - p)/q·δ and Var[δ̂] = p·(1 - p)/q²·δ². With q = 1 - p this is `dare`; a larger q
    gives up some of the mean for less variance, which pays where p is very high.

    Give q, or `epsilon` = q - (1 - p). A q below 1 - p would enlarge changes on average, and is
    refused: q belongs to the rate it was found for, so tensors with a rate of their own need a q of
    their own, or `epsilon`, which holds at any rate. `max_variance` = V balances the variance: q
    becomes max(q, √(p·(1 - p)/V)), so that Var[δ̂] ≤ V·δ² at any rate. `dare` has V = 9 at p = 0.9,
    and 99 at p = 0.99.
    """
    drop(block, drop_rate=drop_rate, rescale=False)
    block.factor *= 1.0 / find_divisor(drop_rate, q, epsilon, max_variance)


def find_divisor(
    drop_rate: float, q: float | None, epsilon: float | None, max_variance: float | None
) -> float:
    """Return the number that the kept elements are divided by.

    >>> find_divisor(0.75, None, 0.25, None), find_divisor(0.99, None, None, 9.0)
    (0.5, 0.033166247903...)
    """
    if q is not None and epsilon is not None:
        raise RecipeError(f"[darex] q = {q} and epsilon = {epsilon}: give one of them")
    keep = 1.0 - drop_rate
    divisor = keep if q is None else q
    if divisor < keep * (1 - ROUNDING):
        raise RecipeError(
            f"[darex] q = {q} at drop_rate = {drop_rate}: q must be at least 1 - p = {keep:.6g}, "
            f"or changes are multiplied by {keep / divisor:.3g} on average; q belongs to the rate "
            "it was found for: set q for these tensors too, or use epsilon"
        )
    if epsilon is not None:
        divisor += epsilon
        if divisor > 1:
            raise RecipeError(f"[darex] epsilon = {epsilon}: set epsilon at most {drop_rate:.6g}")
    if max_variance is not None:
        divisor = max(divisor, math.sqrt(drop_rate * (1.0 - drop_rate) / max_variance))
    return divisor


def balanced_q(drop_rate: float, models: int = 1) -> float:
    """Return the q of DAREx that balances loss against noise when n models are added up.

    Of each delta a share a = (1 - p)/q stays, and each adds noise a²·p/(1 - p) to what all are to
    do. A change that was learnt moves outputs in one direction and noise in all, so that losing
    some of it costs k² times as much as noise of the same size: (1 - a)²·k² + n·a²·p/(1 - p) is
    least at q = (1 - p) + n·p/k². k² is COHERENCE.

    >>> balanced_q(0.9, models=3), balanced_q(0.99)
    (0.127, 0.0199)
    """
    p = check_drop_rate(drop_rate)
    return min(round(1 - p + models * p / COHERENCE, 6), 1.0)


def suggest_q(rate: float, stages: Sequence[str], models: int, *, is_default: bool) -> str:
    """Return the q to use at a drop rate, the chain's default or another, and how to set it."""
    if not {"dare", "darex", "della"} & set(stages):
        return "the stage darex divides by a larger q, or bounds the variance"
    method = "+".join("darex" if name in ("dare", "della") else name for name in stages)
    q = balanced_q(rate, models)
    left = (1 - rate) / q
    way = f'set method = "{method}", and q = {q:g} beside this rate'
    if is_default:
        way = f'use --method {method} --q {q:g}, or method = "{method}" and q = {q:g} in [darex]'
    return (
        f"{way}: that keeps {left:.0%} of each change and {left**2:.0%} of its variance "
        "(a rule of thumb, 1 - p + p·models/100, from the demonstration's models; "
        "docs/guides/darex.md says how to find a better q)"
    )
