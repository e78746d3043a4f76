"""Other views of a source: its tensors under other names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.io.header import TensorInfo
from dare.io.sources import Source


class RenamedSource:
    """A source's tensors under other names; one that has no new name is not shown."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = names
        """New name to the name in the source; two may stand for the same tensor."""
        self.tensors = {
            new: TensorInfo(new, info.dtype, info.shape, info.start)
            for new, old in names.items()
            for info in (source.tensors[old],)
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return self._source.files

    @property
    def is_partial(self) -> bool:
        return self._source.is_partial

    def holds_delta(self, name: str) -> bool:
        return self._source.holds_delta(self._names[name])

    def fingerprint(self) -> list[Any]:
        return [*self._source.fingerprint(), sorted(self._names.items())]

    def read(self, name: str, offset: int, into: NDArray[np.uint8]) -> None:
        self._source.read(self._names[name], offset, into)

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        self._source.prefetch(self._names[name], offset, nbytes)

    def __enter__(self) -> Self:
        self._source.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._source.__exit__(*error)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()
