"""A plan cut into slices, for processes that know nothing of each other but the plan.

Which chunks belong to which slice follows from the plan alone. A slice is a run of chunks in the
order of the output's files, as many bytes as any other: so it reads and writes long runs, and
few pages of a file have bytes of two slices. What a stage surveys as a whole stays whole.
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
    """One of so many parts of a merge, counted from 1.

    >>> print(Slice.parse("3/16"))
    3/16
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Read `3/16`."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of <= MOST_SLICES:
            raise RecipeError(f"slice {text!r}: write NUMBER/OF, as in 3/16, at most {MOST_SLICES}")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


Share = Mapping[str, Sequence[int]]  # the chunks of a slice, by tensor, for tensors that it has


class Division:
    """The division of a plan's chunks among so many slices."""

    def __init__(self, plan: Plan, of: int) -> None:
        self.of = of
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
        """The number of the slice that has a chunk: the one that has its middle byte."""
        elements = max(self._tensors[name].elements, 1)
        together = self._together[name]
        start, count = chunk_span(chunk - chunk % together, elements, together)
        if name in self._whole:
            start, count = 0, elements
        twice_middle = 2 * self._start[name] * elements
        twice_middle += self._nbytes[name] * (2 * start + count)
        return min(twice_middle * self.of // (2 * self.total * elements), self.of - 1) + 1

    def share(self, number: int) -> Share:
        """Return the chunks of one slice."""
        return self.shares()[number - 1]

    def shares(self) -> list[Share]:
        """Return the chunks of each slice."""
        shares: list[dict[str, range]] = [{} for _ in range(self.of)]
        for name, tensor in self._tensors.items():
            chunks, first = range(tensor.chunks), 0
            while first < tensor.chunks:
                owner = self.owner(name, first)
                end = bisect_right(chunks, owner, first, key=lambda chunk: self.owner(name, chunk))
                shares[owner - 1][name] = range(first, end)
                first = end
        return list(shares)

    def nbytes(self, share: Share) -> int:
        """About how many bytes of the total belong to a share."""
        return sum(self._nbytes[n] * len(c) // self._tensors[n].chunks for n, c in share.items())
