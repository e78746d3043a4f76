"""Sources whose embedding and head have the output's rows, read where each row comes from.

Nothing is copied beforehand: elements are read from the sources that their rows come from, or
computed, at the moment they are asked for. `vocabulary` says which rows those are to be, and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import MismatchError
from dare.inputs.reading import Floats
from dare.inputs.sources import Raw, Source, SourceView
from dare.inputs.tokens import Vocabulary, row_tensors
from dare.kernels import reference
from dare.tensors.digest import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo

PIECE = 1 << 16
"""Elements that are converted or averaged at a time."""
SMALLEST_PREFETCH_BYTES = 4096

Rows = NDArray[np.int64]
"""For each row of the output, a row of the input; -1 for one that the input does not have."""
Owners = Mapping[int, Sequence[tuple[int, int, float]]]
"""For a new row, the models that have it: which one, its row there, its share."""
Fill = Callable[[int, Raw], None]
"""Fills an array with a tensor's elements from a position on."""


# ---------------------------------------------------------------- which row comes from where


@dataclass(frozen=True)
class RowOrigins:
    """What decides which row comes from where."""

    vocabulary: Vocabulary
    """The base's."""
    others: Sequence[Vocabulary | None]
    base: Source
    models: Sequence[Source]
    weights: Sequence[float]
    new: Mapping[str, int]
    rows: int

    def base_rows(self) -> Rows:
        """The base's row for each row of the output; new tokens may lie in its padding."""
        rows = np.full(self.rows, -1, np.int64)
        rows[: self.vocabulary.rows] = np.arange(self.vocabulary.rows)
        rows[list(self.new.values())] = -1
        return rows

    def model_rows(self, other: Vocabulary) -> Rows:
        """A model's row for each row of the output; only for those that the base has as well."""
        base = self.vocabulary
        shared = min(base.rows, other.rows)
        rows = np.full(self.rows, -1, np.int64)
        rows[:shared] = np.arange(shared)
        if base.tokens is not None and other.tokens is not None and base.ids != other.ids:
            rows[[number for number in other.ids.values() if number < shared]] = -1
            for token, number in base.ids.items():
                rows[number] = other.ids.get(token, -1)
        rows[list(self.new.values())] = -1
        return rows

    def owners(self, base: TensorInfo) -> Owners:
        """By new row, the models that have it; shares go by weights if all are positive."""
        fitting = {
            index: other.ids
            for index, (model, other) in enumerate(zip(self.models, self.others, strict=True))
            if other is not None and not model.holds_delta(base.name)
            if (info := row_tensors(model, other.rows).get(base.name)) is not None
            if info.shape[1:] == base.shape[1:]
        }
        owners = {}
        for token, number in self.new.items():
            having = {index: ids[token] for index, ids in fitting.items() if token in ids}
            if not having:
                raise MismatchError(
                    f"{base.name}: none of the models with the token {token!r} has a row for "
                    'it here; set vocabulary = "base" to leave new tokens out'
                )
            weights = [self.weights[index] for index in having]
            if min(weights) <= 0:
                weights = [1.0] * len(having)
            owners[number] = [
                (index, row, weight / math.fsum(weights))
                for (index, row), weight in zip(having.items(), weights, strict=True)
            ]
        return owners


def present(origins: RowOrigins) -> list[Source]:
    """The base and the models with their rows in the output's order."""
    inputs = [origins.base, *origins.models]
    base_rows = origins.base_rows()
    stored = row_tensors(origins.base, origins.vocabulary.rows)
    owners = {name: origins.owners(info) for name, info in stored.items()}
    bases = {
        name: RowTensor(
            origins.base, info, info.dtype, base_rows, _means(info, origins.models, owners[name])
        )
        for name, info in stored.items()
    }
    mappings = [None if other is None else origins.model_rows(other) for other in origins.others]
    digests = [None if rows is None else bytes_digest(rows.tobytes()) for rows in mappings]
    decided = bytes_digest(json.dumps([origins.rows, digests, owners], sort_keys=True).encode())
    sources: list[Source] = [AlignedSource(origins.base, inputs, bases, decided)]
    for model, other, rows in zip(origins.models, origins.others, mappings, strict=True):
        tensors = {}
        if other is not None and rows is not None:
            tensors = {
                name: _model_tensor(model, info, rows, bases[name])
                for name, info in row_tensors(model, other.rows).items()
                if name in bases and info.shape[1:] == bases[name].info.shape[1:]
            }
        sources.append(AlignedSource(model, inputs, tensors, decided))
    return sources


def _model_tensor(model: Source, info: TensorInfo, rows: Rows, base: RowTensor) -> RowTensor:
    """A model's tensor, with the base's rows where it has none; of a delta, rows of zeros.

    The base's rows are the base's to the bit: if the types differ, both are presented in float32.
    """
    if model.drop_of(info.name) is not None:
        raise MismatchError(f"{info.name}: its rows cannot move; first run `dare apply`")
    if model.holds_delta(info.name):
        return RowTensor(model, info, info.dtype, rows, _zeros)
    base_type = base.info.dtype
    if info.dtype == base_type or (rows >= 0).all():
        return RowTensor(model, info, info.dtype, rows, base.read)
    return RowTensor(model, info, STORAGE_TYPES["F32"], rows, _InFloat32(base.read, base_type))


# ---------------------------------------------------------------- sources


class AlignedSource(SourceView):
    """A source whose embedding and head have the output's rows, some of them of other sources."""

    def __init__(
        self, inner: Source, inputs: Sequence[Source], rows: Mapping[str, RowTensor], decided: str
    ) -> None:
        presented = {name: tensor.info for name, tensor in rows.items()}
        super().__init__(inner, {**inner.tensors, **presented})
        self._inputs = inputs
        self._rows = rows
        self._decided = decided
        """A digest of all that decides which row comes from where."""

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), self._decided]

    def read(self, name: str, start: int, into: Raw) -> None:
        if name in self._rows:
            self._rows[name].read(start, into)
        else:
            self.inner.read(name, start, into)

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name in self._rows:
            self._rows[name].prefetch(start, count)
        else:
            self.inner.prefetch(name, start, count)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for source in self._inputs:
                stack.enter_context(source)
            stack.pop_all()  # if nothing went wrong, they stay open
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._inputs:
            source.__exit__(*error)


class RowTensor:
    """A tensor whose rows come from another one, in runs, or, where it has none, from `fill`."""

    def __init__(
        self, source: Source, stored: TensorInfo, kind: StorageType, rows: Rows, fill: Fill
    ) -> None:
        self.info = TensorInfo(stored.name, kind, (len(rows), *stored.shape[1:]), 0)
        self._source = source
        self._stored = stored
        self._width = math.prod(stored.shape[1:])
        self._rows = rows
        self._fill = fill
        self._read_stored: Fill = partial(source.read, stored.name)
        if kind != stored.dtype:
            self._read_stored = _InFloat32(self._read_stored, stored.dtype)

    def read(self, start: int, into: Raw) -> None:
        """Fill `into` with elements from `start` on."""
        for begin, end, there in self._pieces(start, start + into.size):
            part = into[begin - start : end - start]
            if there is None:
                self._fill(begin, part)
            else:
                self._read_stored(there, part)

    def prefetch(self, start: int, count: int) -> None:
        """Pass on what is read from the source itself, unless it is little."""
        size = self._stored.dtype.itemsize
        for begin, end, there in self._pieces(start, start + count):
            if there is not None and (end - begin) * size >= SMALLEST_PREFETCH_BYTES:
                self._source.prefetch(self._stored.name, there, end - begin)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """Cut a range of elements where runs of rows end; say where each lies in the source."""
        if begin >= end:
            return
        top = begin // self._width
        rows = self._rows[top : -(-end // self._width)]
        runs = np.flatnonzero(_begins_run(rows)).tolist()
        for run, next_run in zip(runs, [*runs[1:], rows.size], strict=True):
            stop = min(end, (top + next_run) * self._width)
            there = begin + (int(rows[run]) - top - run) * self._width
            yield begin, stop, None if rows[run] < 0 else there
            begin = stop


def _begins_run(rows: Rows) -> NDArray[np.bool_]:
    """Whether each row does not simply follow the one before.

    >>> _begins_run(np.array([0, 1, 2, -1, -1, 7])).tolist()
    [True, False, False, True, False, True]
    """
    before, after = rows[:-1], rows[1:]
    both_absent = (before < 0) & (after < 0)
    both_follow = (before >= 0) & (after == before + 1)
    return np.concatenate([[True], ~(both_absent | both_follow)])[: rows.size]


# ---------------------------------------------------------------- reading elements


def _zeros(_start: int, into: Raw) -> None:
    into[:] = 0


@dataclass(frozen=True)
class _InFloat32:
    """The same elements, decoded."""

    read: Fill
    stored: StorageType

    def __call__(self, start: int, into: Raw) -> None:
        raw = np.empty(min(PIECE, into.size), self.stored.carrier)
        for done in range(0, into.size, PIECE):
            part = into[done : done + PIECE]
            self.read(start + done, raw[: part.size])
            reference.decode(raw[: part.size], part)


def _means(base: TensorInfo, models: Sequence[Source], owners: Owners) -> Fill:
    readers = {}
    for index in {index for having in owners.values() for index, _, _ in having}:
        stored = models[index].tensors[base.name]
        readers[index] = _InFloat32(partial(models[index].read, stored.name), stored.dtype)
    return _Means(math.prod(base.shape[1:]), owners, readers)


@dataclass(frozen=True)
class _Means:
    """The rows of new tokens: the mean of their owners' rows; zeros where nobody has one."""

    width: int
    owners: Owners
    readers: Mapping[int, Fill]
    """Of the models that own a row, in float32."""

    def __call__(self, start: int, into: Raw) -> None:
        done = 0
        while done < into.size:
            row, column = divmod(start + done, self.width)
            part = into[done : done + min(self.width - column, PIECE)]
            if row in self.owners:
                reference.encode(self._mean(row, column, part.size), part)
            else:
                part[:] = 0
            done += part.size

    def _mean(self, row: int, column: int, count: int) -> Floats:
        """Σ share · row in float32, in the order of the models."""
        total: Floats | None = None
        with np.errstate(invalid="ignore", over="ignore"):
            for index, there, share in self.owners[row]:
                values = np.empty(count, np.float32)
                self.readers[index](there * self.width + column, values)
                values *= np.float32(share)
                total = values if total is None else total + values
        assert total is not None  # a new token has an owner
        return total
