"""DELLA: drop by magnitude rank, at random."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from dare.errors import RecipeError
from dare.stages.blocks import Block, DeltaView, Floats
from dare.stages.dare import DropRate, Rescale, drops
from dare.stages.ranks import (
    CutRows,
    cut_row_elements,
    left_of,
    magnitudes_left,
    rank_left,
    row_length,
    survey_rows,
)
from dare.stages.registry import Settings, delta_stage, meaning
from dare.tensors.mask import THRESHOLD_BITS

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
    return rows, view.l1_ratio(lambda b: _drop(b, rows, drop_rate, window, even=True))


def _survey_bytes(shape: tuple[int, ...], models: int) -> int:
    """Return the bytes for the ranks of the rows that are cut, and to find those of one row."""
    columns = row_length(shape)
    cut = cut_row_elements(shape, columns)
    return models * (4 * cut + 40 * columns) if cut else 0


@delta_stage(
    paper="arXiv:2406.11617",
    sees="tensor",
    survey=survey_ranks,
    surveys_when=drops,
    survey_bytes=_survey_bytes,
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
    _drop(block, rows, drop_rate, window, even=rescale is not True)
    if rescale:
        block.factor *= factor if rescale == "l1" else 1.0 / (1.0 - drop_rate)


def _drop(block: Block, rows: CutRows, drop_rate: float, window: float, *, even: bool) -> None:
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
