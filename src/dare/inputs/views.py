"""Other views of a source: what it holds, presented in another way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dare.inputs.sources import Raw, Source
from dare.tensors.header import TensorInfo


class SourceView:
    """Another source as it is; what inherits from this presents some of it differently."""

    def __init__(self, inner: Source, tensors: Mapping[str, TensorInfo]) -> None:
        self.inner = inner
        self.tensors = tensors

    @property
    def files(self) -> tuple[Path, ...]:
        return self.inner.files

    @property
    def remarks(self) -> tuple[str, ...]:
        return self.inner.remarks

    @property
    def is_partial(self) -> bool:
        return self.inner.is_partial

    @property
    def reading_bytes(self) -> int:
        return self.inner.reading_bytes

    def holds_delta(self, name: str) -> bool:
        return self.inner.holds_delta(name)

    def fingerprint(self) -> list[Any]:
        return self.inner.fingerprint()

    def read(self, name: str, start: int, into: Raw) -> None:
        self.inner.read(name, start, into)

    def prefetch(self, name: str, start: int, count: int) -> None:
        self.inner.prefetch(name, start, count)

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()


class RenamedSource(SourceView):
    """A source's tensors under other names; one that has no new name is not shown."""

    def __init__(self, inner: Source, names: Mapping[str, str]) -> None:
        described = {new: inner.tensors[old] for new, old in names.items()}
        tensors = {
            new: TensorInfo(new, info.dtype, info.shape, info.start)
            for new, info in described.items()
        }
        super().__init__(inner, tensors)
        self._names = names
        """New name to the name in the source; two may stand for the same tensor."""

    def holds_delta(self, name: str) -> bool:
        return self.inner.holds_delta(self._names[name])

    def fingerprint(self) -> list[Any]:
        return [*self.inner.fingerprint(), sorted(self._names.items())]

    def read(self, name: str, start: int, into: Raw) -> None:
        self.inner.read(self._names[name], start, into)

    def prefetch(self, name: str, start: int, count: int) -> None:
        self.inner.prefetch(self._names[name], start, count)
