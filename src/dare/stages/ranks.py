"""Ranks within rows, for tensors whose rows are cut by the borders of chunks.

A stage that compares the elements of a row sees one chunk at a time, and a chunk of 524,288
elements holds whole rows only if their length divides that. So the survey gathers the rows that a
border cuts, works on each as a whole and remembers the results for the chunks that hold its
pieces; all other rows are worked on where they are met. Rows are taken in slabs, so that the room
needed does not grow with the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Block, View
from dare.tensors.chunks import CHUNK, chunk_count

SLAB = 1 << 16  # elements whose ranks are found at a time, unless a single row has more

Keys = NDArray[Any]
# The numbers to rank by, one for each element of a block: unsigned integers.
KeysOf = Callable[[Block], Keys]
# A function of kernels and the keys of whole rows (rows × columns): a result for each element.
RowWork = Callable[[Any, Keys], NDArray[Any]]


@dataclass(frozen=True)
class CutRows:
    """Results for the rows of a tensor that lie in more than one chunk."""

    columns: int
    # Results by chunk, for the elements before its first whole row, and after its last.
    pieces: Mapping[int, tuple[NDArray[Any], ...]]


def row_length(shape: tuple[int, ...]) -> int:
    """Return the elements in a row: the last dimension, or all of a vector; a scalar has one.

    >>> row_length((4, 3, 2)), row_length((5,)), row_length(())
    (2, 5, 1)
    """
    return max(1, shape[-1]) if shape else 1


def cut_row_elements(shape: tuple[int, ...], columns: int) -> int:
    """Return the largest possible number of elements in rows that are cut."""
    elements = math.prod(shape)
    if CHUNK % columns == 0 or elements <= CHUNK:
        return 0
    return min(elements, (chunk_count(elements) - 1) * columns)


def survey_rows(view: View, columns: int, keys_of: KeysOf, work: RowWork) -> CutRows:
    """Work on the rows that are cut; without any, the tensor is not even read."""
    pieces: dict[int, tuple[NDArray[Any], ...]] = {}
    if not cut_row_elements(view.shape, columns):
        return CutRows(columns, pieces)
    waiting: list[tuple[int, Keys]] = []  # the pieces of the row that is not complete yet
    for block in view():
        head, tail = _edges(block, columns)
        keys = keys_of(block)
        if head:
            waiting.append((block.start // CHUNK, keys[:head].copy()))
            if (block.start + head) % columns == 0:
                _finish(waiting, partial(work, block.kernels), pieces)
                waiting = []
        if tail:
            waiting = [(block.start // CHUNK, keys[block.size - tail :].copy())]
    return CutRows(columns, pieces)


def work_on_rows(block: Block, cut: CutRows, keys: Keys, work: RowWork) -> NDArray[Any]:
    """Return the results for all elements of a block."""
    head, tail = _edges(block, cut.columns)
    whole = keys[head : block.size - tail].reshape(-1, cut.columns)
    rows = max(1, SLAB // cut.columns)
    slabs = [
        work(block.kernels, whole[row : row + rows]).reshape(-1)
        for row in range(0, len(whole), rows)
    ]
    found = cut.pieces.get(block.start // CHUNK, ())
    before, after = found[: bool(head)], found[bool(head) :]
    return np.concatenate([*before, *slabs, *after])


def _edges(block: Block, columns: int) -> tuple[int, int]:
    """Count elements before the first row that begins in the block, and after its last end."""
    head = min(-block.start % columns, block.size)
    return head, (block.size - head) % columns


def _finish(
    waiting: list[tuple[int, Keys]],
    work: Callable[[Keys], NDArray[Any]],
    pieces: dict[int, tuple[NDArray[Any], ...]],
) -> None:
    row = np.concatenate([keys for _, keys in waiting])
    results = work(row[np.newaxis])[0]
    done = 0
    for chunk, keys in waiting:
        part = results[done : done + keys.size].copy()
        pieces[chunk] = (*pieces.get(chunk, ()), part)
        done += keys.size


def magnitude_bits(block: Block) -> Keys:
    """Return the magnitudes of a block's values as integers that order like them."""
    return block.values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def magnitudes_left(block: Block) -> Keys:
    """Return integers that order like the magnitudes, 0 for elements dropped by earlier stages."""
    survivors = block.survivors()
    numbers = magnitude_bits(block) + np.uint32(1)
    return numbers if survivors is None else np.where(survivors, numbers, np.uint32(0))


def marks(kernels: Any, keys: Keys, least: Any, end: Any) -> NDArray[np.uint8]:
    """Return 255 for elements whose rank in their row is from `least` to below `end`, else 0.

    The two are numbers for all rows, or columns with one for each.
    """
    if isinstance(end, np.ndarray):
        places = ranks(kernels, keys)
        return np.where((places >= least) & (places < end), np.uint8(255), np.uint8(0))
    found = np.empty(keys.shape, np.uint8)
    kernels.mark_ranks(np.ascontiguousarray(keys), least, end, found)
    return found


def ranks(kernels: Any, keys: Keys) -> NDArray[np.uint32]:
    """Return each element's rank in its row, 0 for the smallest; of equals the first is larger."""
    found = np.empty(keys.shape, np.uint32)
    kernels.rank_rows(np.ascontiguousarray(keys), found)
    return found
