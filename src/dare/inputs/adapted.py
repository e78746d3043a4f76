"""Weights that an adapter makes of the base's: DoRA's magnitudes, and the rows of trained tokens.

Both read as whole weights in float32, computed for the elements that are asked for. `Read` fills an
array with elements of what they start from: the base's weights and the change by the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.inputs.sources import Floats, Source, read_floats
from dare.tensors.chunks import CHUNK

Read = Callable[[int, Floats], None]

_NORMS_LOCK = RLock()


@dataclass
class DoraMagnitudes:
    """DoRA: every row of W + ΔW, or every column, brought to a norm that is stored.

    PEFT takes norms over the inputs: those of rows, but of columns where the inputs come first, as
    in an embedding. Norms of columns are computed once, and kept.
    """

    key: str
    rows: int
    columns: int
    by_column: bool
    _norms: NDArray[np.float64] | None = field(default=None, repr=False)

    @property
    def reading_bytes(self) -> int:
        """The memory for whole rows with their squares, and for norms, beside reading them."""
        return 12 * max(CHUNK, self.columns) + 24 * max(self.rows, self.columns)

    def fill(self, read: Read, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        if not into.size:
            return
        wanted = read_floats(stored, self.key, 0, stored.tensors[self.key].elements)
        by_column = _quotient(wanted, self._column_norms(read)) if self.by_column else None
        end, bottom = start + into.size, -(-(start + into.size) // self.columns)
        for top, tuned in self._blocks(read, start // self.columns, bottom):
            if by_column is not None:
                tuned[:] *= by_column
            else:
                squares = [kernels.load("cpu").sum_products(row, row) for row in tuned]
                tuned[:] *= _quotient(wanted[top:][: len(tuned)], np.sqrt(squares))[:, None]
            first = top * self.columns
            begin, last = max(start, first), min(end, first + tuned.size)
            into[begin - start : last - start] = tuned.reshape(-1)[begin - first : last - first]

    def _blocks(self, read: Read, top: int, bottom: int) -> Iterator[tuple[int, Floats]]:
        """Yield some whole rows at a time, and the number of the first."""
        step = max(1, CHUNK // self.columns)
        for row in range(top, bottom, step):
            block = np.empty((min(step, bottom - row), self.columns), np.float32)
            read(row * self.columns, block.reshape(-1))
            yield row, block

    def _column_norms(self, read: Read) -> NDArray[np.float64]:
        with _NORMS_LOCK:
            if self._norms is None:
                total = np.zeros(self.columns)
                for _, block in self._blocks(read, 0, self.rows):
                    total += np.square(block, dtype=np.float64).sum(axis=0)
                self._norms = np.sqrt(total)
        return self._norms


def _quotient(wanted: Floats, norms: NDArray[np.float64]) -> Floats:
    return np.divide(wanted, norms, dtype=np.float64).astype(np.float32)


@dataclass(frozen=True)
class TrainedRows:
    """Rows of an embedding that were trained, in place of the base's."""

    key: str
    columns: int
    rows: tuple[int, ...]  # of the embedding, in the order of the stored ones

    reading_bytes = 0

    def fill(self, read: Read, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        read(start, into)
        for place, row in enumerate(self.rows):
            first = row * self.columns
            begin, last = max(start, first), min(start + into.size, first + self.columns)
            if begin < last:
                position = place * self.columns + begin - first
                part = read_floats(stored, self.key, position, last - begin)
                into[begin - start : last - start] = part
