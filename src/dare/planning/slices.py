"""A plan cut into slices, for processes that share only the plan.

Which chunks belong to which slice follows from the plan alone. A slice is a run of chunks in the
order of the output's files; all slices have about the same number of bytes. So a slice reads and
writes long runs, and few pages of a file have bytes of two slices. Tensors that a stage surveys as
a whole stay whole.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dare.errors import RecipeError
from dare.planning.plan import Plan
from dare.tensors.chunks import chunk_span

MOST_SLICES = 10_000


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """One of the parts that a merge is divided into, counted from 1.

    >>> print(Slice.parse("3/16"))
    3/16
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Read `3/16`."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        number, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= count <= MOST_SLICES:
            raise RecipeError(f"slice {text!r}: write NUMBER/OF, as in 3/16, at most {MOST_SLICES}")
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


Share = Mapping[str, Sequence[int]]  # the chunks of a slice, by tensor; without other tensors


class Division:
    """The division of a plan's chunks among slices."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.count = count
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._whole = {tensor.name for tensor in plan.tensors if plan.is_surveyed(tensor)}
        self._together = {t.name: plan.chunks_together(t) for t in plan.tensors}
        self._start: dict[str, int] = {}  # bytes that are read and written before a tensor
        self._nbytes: dict[str, int] = {}
        done = 0
        for tensor in plan.tensors:
            written = tensor.elements * tensor.dtype.itemsize
            self._start[tensor.name] = done
            self._nbytes[tensor.name] = plan.cost.bytes_read_of(tensor) + written
            done += self._nbytes[tensor.name]
        self.total = max(done, 1)  # bytes that are read and written in all

    def owner(self, name: str, chunk: int = 0) -> int:
        """Return the number of the slice that a chunk belongs to: the one with its middle byte."""
        elements = max(self._tensors[name].elements, 1)
        together = self._together[name]
        start, count = chunk_span(chunk - chunk % together, elements, together)
        if name in self._whole:
            start, count = 0, elements
        # The middle byte times 2 · elements, and the total likewise, so that both are integers.
        middle = 2 * self._start[name] * elements + self._nbytes[name] * (2 * start + count)
        end = 2 * self.total * elements
        return min(middle * self.count // end, self.count - 1) + 1

    def share(self, number: int) -> Share:
        """Return the chunks of one slice."""
        return self.shares()[number - 1]

    def shares(self) -> list[Share]:
        """Return the chunks of each slice."""
        shares: list[dict[str, range]] = [{} for _ in range(self.count)]
        for name, tensor in self._tensors.items():
            chunks, first = range(tensor.chunks), 0
            while first < tensor.chunks:
                owner = self.owner(name, first)
                end = bisect_right(chunks, owner, first, key=lambda chunk: self.owner(name, chunk))
                shares[owner - 1][name] = range(first, end)
                first = end
        return list(shares)

    def nbytes(self, share: Share) -> int:
        """Return about how many bytes of the total belong to a share."""
        return sum(self._nbytes[n] * len(c) // self._tensors[n].chunks for n, c in share.items())
