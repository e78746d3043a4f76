"""Model Breadcrumbs: the middle of each delta, by magnitude."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dare.kernels import Band
from dare.stages.blocks import Block, DeltaView, Floats
from dare.stages.ranks import (
    CutRows,
    Keys,
    magnitudes_left,
    row_length,
    select,
    survey_rows,
    work_on_rows,
)
from dare.stages.registry import delta_stage, meaning
from dare.stages.trim import Rescaled, band_between, find_cuts

KeepMiddle = Annotated[
    float, meaning("Share of each delta's elements to keep, β, the middle ones.", gt=0, le=1)
]
DropLargest = Annotated[
    float, meaning("Share to drop at the top, γ, as far as β leaves room for it.", ge=0, lt=1)
]
Scope = Annotated[
    Literal["tensor", "row"], meaning("Compare the elements of a tensor, or of a row.")
]


Middle = Band | CutRows


def survey_middle(
    view: DeltaView, *, keep_middle: float, drop_largest: float, per: Scope, rescale: Rescaled
) -> tuple[Middle, float]:
    """Find the magnitudes that bound a tensor's middle, or the middles of rows that are cut.

    The factor is that which keeps the L1 norm, if it is asked for.
    """
    share = keep_middle, drop_largest
    found: Middle
    if per == "row":
        work = partial(_select_middle, share)
        found = survey_rows(view, row_length(view.shape), magnitudes_left, work)
    else:
        found = band_between(*find_cuts(view, partial(_ranks, share)))
    return found, view.l1_ratio(partial(_keep_middle, share, found)) if rescale else 1.0


@delta_stage(
    paper="arXiv:2312.06795",
    sees="tensor",
    survey=survey_middle,
    surveys_when=lambda settings: settings["keep_middle"] < 1,
    is_lazy=lambda settings: settings["per"] == "tensor",
    is_identity=lambda settings: settings["keep_middle"] == 1,
)
def breadcrumbs(
    block: Block,
    *,
    keep_middle: KeepMiddle = 0.9,
    drop_largest: DropLargest = 0.01,
    per: Scope = "tensor",  # noqa: ARG001 (read by the survey)
    rescale: Rescaled = False,  # noqa: ARG001 (likewise)
) -> None:
    """Drop the smallest and the very largest elements, keep the middle.

    Of n elements the t = min(⌊γ·n⌋, n - k) largest are dropped, the next k = max(1, ⌊β·n⌋) are
    kept as they are, and the n - k - t smallest are dropped. n counts the elements of the tensor,
    or with `per = "row"` of the row, that no earlier stage has dropped. Of elements with equal
    magnitude, those with the lowest index count as larger. `rescale = "l1"` scales what is kept to
    the L1 norm of the whole delta, as mergekit can.
    """
    if keep_middle < 1:
        found, factor = block.summary
        _keep_middle((keep_middle, drop_largest), found, block)
        block.factor *= factor


def _keep_middle(share: tuple[float, float], found: Middle, block: Block) -> None:
    if isinstance(found, CutRows):
        keep = work_on_rows(block, found, magnitudes_left(block), partial(_select_middle, share))
        block.kernels.multiply_kept(block.values, keep)
        block.leave(keep != 0)
        return
    block.keep(found)


def _ranks(share: tuple[float, float], elements: int) -> tuple[int, int]:
    """Return the ranks of the smallest element that is kept and of the last one above those."""
    kept, top = _shares(elements, *share)
    return kept + top, top


def _shares(elements: int, keep_middle: float, drop_largest: float) -> tuple[int, int]:
    """Return how many of so many elements are kept, and how many are dropped above those."""
    kept = max(1, int(keep_middle * elements))
    return kept, max(0, min(int(drop_largest * elements), elements - kept))


def _select_middle(share: tuple[float, float], kernels: Any, keys: Keys) -> Floats:
    columns = keys.shape[1]
    kept, top = _shares_of_left(columns, *share)
    return select(kernels, keys, columns - top - kept, columns - top)


@lru_cache
def _shares_of_left(columns: int, keep_middle: float, drop_largest: float) -> NDArray[np.int64]:
    """Return the shares for each number of elements that may be left of a row."""
    return np.array([_shares(left, keep_middle, drop_largest) for left in range(columns + 1)]).T
