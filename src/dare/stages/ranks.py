"""Ranks within rows, for tensors whose rows are cut by the borders of chunks.

A stage that compares the elements of a row sees one chunk at a time, and a chunk of 524,288
elements holds whole rows only if their length divides that. So the survey gathers the rows that a
border cuts, works on each as a whole and remembers the results for the chunks that hold its
pieces; all other rows are worked on where they are met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.stages.blocks import Block, Floats, View
from dare.tensors.chunks import CHUNK, chunk_count

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

    def edges(self, block: Block) -> NDArray[Any]:
        """Return the results for a block's elements that are not in its whole rows."""
        pieces = self.pieces.get(block.start // CHUNK, ())
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)


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
    found, edges = work(block.kernels, whole).reshape(-1), cut.edges(block)
    return np.concatenate([edges[:head], found, edges[head:]]) if edges.size else found


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


def left_of(block: Block) -> NDArray[np.bool_]:
    """Return which elements of a block no earlier stage has dropped."""
    left = block.survivors()
    return np.ones(block.size, np.bool_) if left is None else left


def magnitudes_left(block: Block) -> Keys:
    """Return integers that order like the magnitudes, 0 for elements dropped by earlier stages."""
    return order_keys(block, left_of(block))


def order_keys(block: Block, left: NDArray[np.bool_]) -> Keys:
    """Return integers that order like the magnitudes, those of elements that are left above all."""
    keys = np.empty(block.size, np.uint32)
    block.kernels.order_keys(block.values, left, keys)
    return keys


def select(kernels: Any, keys: Keys, leasts: Any, ends: Any, factors: Any = 1) -> Floats:
    """Return a factor for elements whose rank in their row is from `least` to below `end`, else 0.

    The three are one for all rows, or arrays with one for each number of keys that are not 0.
    """
    size = keys.shape[1] + 1
    tables = (np.full(size, each) for each in (leasts, ends))
    found = np.empty(keys.shape, np.float32)
    kernels.select_ranks(
        np.ascontiguousarray(keys), *tables, np.full(size, factors, np.float32), found
    )
    return found


def rank_left(kernels: Any, keys: Keys) -> NDArray[np.uint32]:
    """Return each element's rank in its row, as the kernel of that name."""
    found = np.empty(keys.shape, np.uint32)
    kernels.rank_left(np.ascontiguousarray(keys), found)
    return found
