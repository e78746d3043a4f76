"""Models for tests of how merges run, and a merge that stops on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest

from dare.output.journal import Record
from dare.output.output import Output

Arrays = dict[str, np.ndarray]
WHOLE_NUMBERS = "ids"


def base_and_tuned(
    shapes: Mapping[str, tuple[int, ...]], count: int = 2, size: float = 0.001
) -> tuple[Arrays, list[Arrays]]:
    """A base, and fine-tunes of it; whole numbers are in a tensor of one name, and stay."""
    generator = np.random.default_rng(0)

    def noise(shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(generator.standard_normal(shape, np.float32))

    base = {
        name: np.arange(*shape) if name == WHOLE_NUMBERS else noise(shape)
        for name, shape in shapes.items()
    }
    tuned = [
        {
            n: v if n == WHOLE_NUMBERS else v + np.float32(size) * noise(v.shape)
            for n, v in base.items()
        }
        for _ in range(count)
    ]
    return base, tuned


@contextmanager
def stopping(after: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Let the merge inside stop with an error when so many chunks are in its journal."""
    count, real = 0, Output.record

    def record(self: Output, records: list[Record]) -> None:
        nonlocal count
        real(self, records[: after - count])
        count += len(records)
        if count > after:
            raise error("injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "record", record)
        with pytest.raises(error, match="injected"):
            yield
