"""CABS: structured sparsity in which models take different places."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from dare.documents.values import After
from dare.errors import RecipeError
from dare.stages.blocks import Deltas, Floats
from dare.stages.ranks import Keys, order_keys, select
from dare.stages.registry import combine_stage, meaning
from dare.tensors.chunks import CHUNK


def _check_group(m: int) -> int:
    if CHUNK % m:
        raise RecipeError(f"m = {m}: must be a power of two, up to {CHUNK}")
    return m


Kept = Annotated[int, meaning("How many of every m neighbours a model may take.", ge=1)]
Group = Annotated[
    int,
    meaning("How many neighbours make a group; a power of two.", ge=1),
    After(_check_group),
]
Rescaling = Annotated[bool, meaning("Multiply what is kept by m/n.")]


@combine_stage(paper="arXiv:2503.01874")
def cabs(deltas: Deltas, *, n: Kept = 2, m: Group = 8, rescale: Rescaling = False) -> Floats:
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
