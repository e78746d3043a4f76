"""Dropping at random, after DARE: `dare`, `darex` with another divisor, `della` by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from dare.documents.values import After
from dare.errors import RecipeError
from dare.stages.blocks import Block, DeltaView, Floats, Mask
from dare.stages.ranks import (
    CutRows,
    cut_row_elements,
    left_of,
    magnitudes_left,
    rank_left,
    row_length,
    survey_rows,
)
from dare.stages.registry import Settings, always, delta_stage, meaning
from dare.tensors.mask import THRESHOLD_BITS, check_drop_rate, keep_threshold, mask_key

DropRate = Annotated[
    float,
    After(partial(check_drop_rate, name="drop_rate")),
    meaning("Share of each delta's elements to drop, p.", ge=0, lt=1),
]
Rescale = Annotated[
    bool | Literal["l1"],
    meaning("Divide what is kept by 1 - p; l1: scale it to the delta's L1 norm."),
]


def drops(settings: Settings) -> bool:
    """Return whether anything is dropped at these settings."""
    return bool(settings["drop_rate"] > 0)


def survey_l1(view: DeltaView, *, drop_rate: float, rescale: Rescale) -> float:  # noqa: ARG001
    """Find the factor that gives the kept elements the L1 norm of the whole delta."""
    return view.l1_ratio(lambda block: _drop(block, drop_rate))


@delta_stage(
    paper="arXiv:2311.03099",
    sees="tensor",
    survey=survey_l1,
    surveys_when=lambda settings: settings["rescale"] == "l1" and drops(settings),
    is_lazy=always,
    is_random=drops,
    drops_at_random=True,
    for_delta_files=True,
    is_identity=lambda settings: not drops(settings),
    only_masks=lambda settings: settings["rescale"] != "l1",
)
def dare(block: Block, *, drop_rate: DropRate = 0.9, rescale: Rescale = True) -> None:
    """Drop each element with probability p and divide the others by 1 - p.

    δ̂ᵢ = mᵢ·δᵢ / (1 - p), mᵢ = 1 with probability 1 - p, else 0, so that E[δ̂] = δ.

    `rescale = false` leaves the others as they are (then E[δ̂] = (1 - p)·δ), and `rescale = "l1"`
    scales them to the L1 norm of the whole delta, as mergekit does.
    """
    _drop(block, drop_rate)
    if rescale and drop_rate > 0:
        block.factor *= block.summary if rescale == "l1" else 1.0 / (1.0 - drop_rate)


def make_up_for(block: Block, drop_rate: float, seed: int, name: str) -> None:
    """Apply `dare` to a delta from which as much was dropped before, by this mask."""
    _drop_by(block, mask_key(seed, name), drop_rate)
    block.factor *= 1.0 / (1.0 - drop_rate)


def _drop(block: Block, drop_rate: float) -> None:
    if drop_rate > 0:
        key0, key1 = block.key
        _drop_by(block, (int(key0), int(key1)), drop_rate)


def _drop_by(block: Block, key: tuple[int, int], drop_rate: float) -> None:
    high, low = divmod(keep_threshold(drop_rate), 1 << 32)
    if high < 256:  # else everything is kept
        block.drop(Mask(*key, high, low))


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
    only_masks=always,
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
    dare(block, drop_rate=drop_rate, rescale=False)
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


Window = Annotated[
    float, meaning("How far drop rates spread, ε: from p - ε/2 to p + ε/2.", ge=0, lt=1)
]


def _check_window(settings: Settings) -> None:
    drop_rate, window = settings["drop_rate"], settings["window"]
    room = 2 * min(drop_rate, 1 - drop_rate)
    if drop_rate > 0 and not (window < 2 * (1 - drop_rate) and window <= 2 * drop_rate):
        raise RecipeError(
            f"[della] window = {window} at drop_rate = {drop_rate}: rates from "
            f"{drop_rate - window / 2:.6g} to {drop_rate + window / 2:.6g} are not all in [0, 1); "
            f"use a window below {room:.6g}"
        )


def survey_ranks(
    view: DeltaView, *, drop_rate: float, window: float, rescale: Rescale
) -> tuple[CutRows, float]:
    """Rank the rows that are cut; find the factor that keeps the L1 norm, if that is asked for."""
    rows = survey_rows(view, row_length(view.shape), magnitudes_left, rank_left)
    if rescale != "l1":
        return rows, 1.0
    return rows, view.l1_ratio(lambda b: _drop_by_rank(b, rows, drop_rate, window, even=True))


def _della_bytes(shape: tuple[int, ...], models: int) -> int:
    """Return the bytes for the ranks of the rows that are cut, and to find those of one row."""
    columns = row_length(shape)
    cut = cut_row_elements(shape, columns)
    return models * (4 * cut + 40 * columns) if cut else 0


@delta_stage(
    paper="arXiv:2406.11617",
    sees="tensor",
    survey=survey_ranks,
    surveys_when=drops,
    survey_bytes=_della_bytes,
    check=_check_window,
    is_random=drops,
    drops_at_random=True,
    is_identity=lambda settings: not drops(settings),
)
def della(
    block: Block, *, drop_rate: DropRate = 0.9, window: Window = 0.14, rescale: Rescale = True
) -> None:
    """Drop small elements more often than large ones; divide each by its probability of being kept.

    δ̂ᵢ = mᵢ·δᵢ / kᵢ, mᵢ = 1 with probability kᵢ = 1 - p + ε·(rᵢ/(n - 1) - ½), else 0, where rᵢ is
    the rank of |δᵢ| among the n elements of its row, 0 for the smallest. So E[δ̂] = δ, and p is the
    mean drop rate. A row is the last dimension; of equal ones the first ranks higher. What earlier
    stages have dropped has no rank, and the ranks of the others are spread over the row.

    The randomness is that of `dare`: with ε = 0 this is `dare`. `rescale = false` leaves what is
    kept as it is, and `rescale = "l1"` scales it to the L1 norm of the whole delta, as mergekit
    does (whose epsilon is ε/2).
    """
    if drop_rate == 0:
        return
    rows, factor = block.summary
    _drop_by_rank(block, rows, drop_rate, window, even=rescale is not True)
    if rescale:
        block.factor *= factor if rescale == "l1" else 1.0 / (1.0 - drop_rate)


def _drop_by_rank(
    block: Block, rows: CutRows, drop_rate: float, window: float, *, even: bool
) -> None:
    """Drop by rank; unless it shall be even, multiply what is left by (1 - p)/kᵢ."""
    thresholds, factors = _tables(rows.columns, drop_rate, window)
    if even:
        factors = np.ones_like(factors)
    kept = np.empty(block.size, np.bool_)
    block.kernels.drop_by_rank(
        block.values,
        left_of(block),
        rows.columns,
        rows.edges(block),
        thresholds,
        factors,
        block.start,
        *block.key,
        kept,
    )
    block.leave(kept)


def _tables(columns: int, drop_rate: float, window: float) -> tuple[NDArray[np.uint64], Floats]:
    """Return for each rank the threshold of the mask, and the factor beside 1/(1 - p)."""
    mean = 1.0 - drop_rate
    places = np.arange(columns) / (columns - 1) if columns > 1 else np.full(1, 0.5)
    keep = mean + window * (places - 0.5)
    thresholds = np.rint(np.ldexp(keep, THRESHOLD_BITS)).astype(np.uint64)
    return thresholds, (mean / keep).astype(np.float32)
