"""Other views of a source: what it holds, presented in another way."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Self

from dare.inputs.sources import Drop, Raw, Source
from dare.tensors.header import TensorInfo


class SourceView(Source):
    """Another source as it is; what inherits from this presents some of it differently."""

    def __init__(
        self,
        inner: Source,
        tensors: Mapping[str, TensorInfo],
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.inner = inner
        self.tensors = tensors
        self.names = {} if names is None else names
        """The names of tensors in the source, where they are others there."""
        self.files, self.remarks = inner.files, inner.remarks
        self.is_partial, self.reading_bytes = inner.is_partial, inner.reading_bytes
        self.ties, self.was_dropped = inner.ties, inner.was_dropped
        self.ahead_bytes = inner.ahead_bytes

    def holds_delta(self, name: str) -> bool:
        return self.inner.holds_delta(self.names.get(name, name))

    def drop_of(self, name: str) -> Drop | None:
        return self.inner.drop_of(self.names.get(name, name))

    def original_digest(self, name: str) -> str | None:
        return self.inner.original_digest(self.names.get(name, name))

    def base_digest(self, name: str) -> str | None:
        return self.inner.base_digest(self.names.get(name, name))

    def fingerprint(self) -> list[Any]:
        names = sorted(self.names.items())
        return [*super().fingerprint(), names, self.inner.fingerprint()]

    def stamps(self) -> list[Any]:
        return self.inner.stamps()

    def read(self, name: str, start: int, into: Raw) -> None:
        self.inner.read(self.names.get(name, name), start, into)

    def place(self, name: str) -> Hashable:
        return self.inner.place(self.names.get(name, name))

    def prefetch(self, name: str, start: int, count: int) -> None:
        self.inner.prefetch(self.names.get(name, name), start, count)

    def limit_ahead(self, nbytes: int) -> None:
        self.inner.limit_ahead(nbytes)
        self.ahead_bytes = self.inner.ahead_bytes

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()


class _UnderNames(SourceView):
    """The tensors of a source as they are, under any names."""

    def bytes_for(self, name: str, count: int) -> int:
        return self.inner.bytes_for(self.names.get(name, name), count)

    def read_beside(self, name: str, start: int, into: Raw, base: Raw) -> None:
        self.inner.read_beside(self.names.get(name, name), start, into, base)


class RenamedSource(_UnderNames):
    """A source's tensors under other names; one that has no new name is not shown.

    Two names may stand for the same tensor.
    """

    def __init__(self, inner: Source, names: Mapping[str, str]) -> None:
        if isinstance(inner, RenamedSource):  # so that what is inside is found at once
            names = {new: inner.names[old] for new, old in names.items()}
            inner = inner.inner
        tensors = {new: replace(inner.tensors[old], name=new) for new, old in names.items()}
        super().__init__(inner, tensors, names)


class TiedSource(_UnderNames):
    """A source that shows one tensor under several names, beside all others as they are."""

    def __init__(self, inner: Source, names: Mapping[str, str], ties: Mapping[str, str]) -> None:
        shown = {new: replace(inner.tensors[old], name=new) for new, old in names.items()}
        super().__init__(inner, {**inner.tensors, **shown}, names)
        self.ties = ties
