"""Structured sparsity: n of every m neighbours, by model or shared out among models."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dare.documents.values import After
from dare.errors import RecipeError
from dare.stages.blocks import Block, Deltas, Floats, View
from dare.stages.ranks import (
    CutRows,
    Keys,
    magnitudes_left,
    order_keys,
    row_length,
    select,
    survey_rows,
    work_on_rows,
)
from dare.stages.registry import Settings, combine_stage, delta_stage, meaning
from dare.tensors.chunks import CHUNK

Kept = Annotated[int, meaning("How many of every m neighbours to keep.", ge=1)]
Group = Annotated[
    int, meaning("How many neighbours in the last dimension make a group.", ge=1, le=4096)
]
Choice = Annotated[
    Literal["magnitude", "random"], meaning("Which n to keep: the largest, or random ones.")
]
Turn = Annotated[
    int, meaning("0 takes the first n in a group's order, 1 the next n, and so on.", ge=0)
]
Rescaling = Annotated[bool, meaning("Multiply what is kept by m/n.")]


def _check_turn(settings: Settings) -> None:
    n, m, turn = settings["n"], settings["m"], settings["turn"]
    if (turn + 1) * n > m:
        raise RecipeError(f"[nm] n = {n}, m = {m}, turn = {turn}: (turn + 1)·n may be at most m")


def survey_groups(
    view: View, *, n: int, m: int, choose: Choice, turn: int, rescale: bool
) -> CutRows:
    """Work on the groups that the borders of chunks cut: none, if m divides 524,288."""
    columns = row_length(view.shape)
    unit = m if columns % m == 0 else columns  # a row that ends in a short group is taken whole
    return survey_rows(
        view, unit, partial(_keys_of, choose, m), partial(_select, n, m, turn, rescale)
    )


@delta_stage(
    paper="arXiv:2503.01874",
    sees="tensor",
    survey=survey_groups,
    surveys_when=lambda settings: settings["n"] < settings["m"],
    check=_check_turn,
    is_random=lambda settings: settings["choose"] == "random" and settings["n"] < settings["m"],
    is_identity=lambda settings: settings["n"] == settings["m"],
)
def nm(
    block: Block,
    *,
    n: Kept = 2,
    m: Group = 4,
    choose: Choice = "magnitude",
    turn: Turn = 0,
    rescale: Rescaling = True,
) -> None:
    """Keep n of every m neighbours in the last dimension (2:4, 4:8, …), multiplied by m/n.

    A row whose length is not a multiple of m ends in a group of r < m, of which ⌈n·r/m⌉ are kept
    and multiplied by r/⌈n·r/m⌉. By magnitude, the first of equal elements is kept. A group of which
    earlier stages have left s elements counts as a group of s: ⌈n·s/m⌉ are kept, multiplied by
    s/⌈n·s/m⌉. At random, every element is kept with probability n/m, so that E[δ̂] = δ: the n with
    the lowest numbers of the mask.

    `turn` makes models take different places: at random and with one seed for all models, those
    with the turns 0, 1, 2, … keep different elements of each group. By magnitude, turn 1 keeps
    a model's own next best n, whatever other models keep: a delta stage sees only one model. The
    combine stage `cabs` sees them all.
    """
    if n == m:
        return
    selection = partial(_select, n, m, turn, rescale)
    factors = work_on_rows(block, block.summary, _keys_of(choose, m, block), selection)
    block.kernels.multiply_kept(block.values, factors)
    block.leave(factors != 0)
    if rescale:
        block.factor *= m / n


def _keys_of(choose: Choice, m: int, block: Block) -> Keys:
    """Return the magnitudes, or numbers of the mask, turned around: the largest are kept."""
    if choose == "magnitude":
        return magnitudes_left(block)
    numbers = np.empty(block.size, np.uint64)
    block.kernels.draw_order(numbers, block.start, *block.key, m)
    return numbers


def _select(n: int, m: int, turn: int, rescale: bool, kernels: Any, keys: Keys) -> Floats:
    """Return 0 for the dropped elements of whole rows, for the others their factor beside m/n.

    An element whose key is 0 is not there: its group is the smaller.
    """
    rows, columns = keys.shape
    short = columns % m
    groups = keys[:, : columns - short].reshape(-1, m)
    factors = _take(turn, rescale, kernels, groups, n).reshape(rows, -1)
    if not short:
        return factors
    kept = -(-n * short // m)
    rest = _take(turn, rescale, kernels, keys[:, columns - short :], kept)
    if rescale:
        rest *= np.float32(short * n / (kept * m))
    return np.hstack([factors, rest])


def _take(turn: int, rescale: bool, kernels: Any, groups: Keys, kept: int) -> Floats:
    size = groups.shape[1]
    left = np.arange(size + 1)
    kept_of_left = -(-kept * left // size)
    factors = left * kept / (np.maximum(kept_of_left, 1) * size) if rescale else 1
    end = size - turn * kept_of_left  # ranks from here on had their turn
    return select(kernels, groups, end - kept_of_left, end, factors)


def _check_group(m: int) -> int:
    if CHUNK % m:
        raise RecipeError(f"m = {m}: must be a power of two, up to {CHUNK}")
    return m


Taken = Annotated[int, meaning("How many of every m neighbours a model may take.", ge=1)]
FlatGroup = Annotated[
    int,
    meaning("How many neighbours make a group; a power of two.", ge=1),
    After(_check_group),
]


@combine_stage(paper="arXiv:2503.01874")
def cabs(deltas: Deltas, *, n: Taken = 2, m: FlatGroup = 8, rescale: Rescaling = False) -> Floats:
    """Let each model in turn keep n of every m neighbours that are still free, and add these up.

    Σ wᵢ·mᵢ·δᵢ, where mᵢ has the n largest magnitudes of each group among the places that are free;
    once none is free, among all. The models come in the recipe's order, so put the most important
    one first. As long as n times their number is at most m, no two change the same element.
    Groups are taken from the flat tensor; the last one, of r < m, gives ⌈n·r/m⌉. Of equal ones
    the first is taken. Each weight is 1 unless given. The authors' code drops what does not fill a
    whole group. `rescale` multiplies what a model keeps by m/n; where earlier stages have left s
    elements of a group, of which k are kept, by s/k.
    """
    free = np.ones(deltas.size, np.bool_)
    for block in deltas.blocks:
        survivors = block.survivors()
        keep = _largest(deltas.kernels, order_keys(block, free), min(n, m), m)
        deltas.kernels.multiply_kept(block.values, keep)
        free &= keep == 0
        if rescale and survivors is not None:
            shares = _shares(survivors, keep != 0, m) * np.float32(min(n, m) / m)
            deltas.kernels.multiply_kept(block.values, shares)
    factor = m / min(n, m) if rescale else 1.0
    return deltas.sum([weight * factor for weight in deltas.weights])


def _largest(kernels: Any, keys: Keys, n: int, m: int) -> Floats:
    """Return 1 for the n largest of each m, and as large a share of the rest at the end, else 0."""
    rest = keys.size % m
    groups = keys[: keys.size - rest].reshape(-1, m)
    keep = select(kernels, groups, m - n, m).reshape(-1)
    if not rest:
        return keep
    last = keys[groups.size :][np.newaxis]
    return np.append(keep, select(kernels, last, rest - -(-n * rest // m), rest))


def _shares(survivors: NDArray[np.bool_], keep: NDArray[np.bool_], m: int) -> Floats:
    """Return for each element how many of its group were left for each one that is kept."""
    starts = np.arange(0, keep.size, m)
    left = np.add.reduceat(survivors, starts, dtype=np.int64)
    kept = np.add.reduceat(survivors & keep, starts, dtype=np.int64)
    shares = (left / np.maximum(kept, 1)).astype(np.float32)
    return np.repeat(shares, m)[: keep.size]
