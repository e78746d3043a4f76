"""Read a base and its fine-tunes as a merge does, chunk by chunk on all cores, and do nothing else.

python bench/read_side.py base tuned-1 tuned-2
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dare.inputs.formats import open_inputs
from dare.inputs.sources import Source
from dare.planning.cost import available_cores
from dare.recipe.schema import Recipe
from dare.run.threads import run_tasks
from dare.tensors.chunks import CHUNK, chunk_spans


@dataclass(frozen=True)
class ReadChunk:
    """One chunk of one tensor, of base and models."""

    sources: tuple[Source, ...]
    name: str
    start: int
    count: int

    def prefetch(self) -> None:
        """Ask for the elements."""
        for source in self.sources:
            source.prefetch(self.name, self.start, self.count)

    def run(self, buffers: list[NDArray[np.uint8]]) -> None:
        """Read them."""
        for source, buffer in zip(self.sources, buffers, strict=True):
            carrier = source.tensors[self.name].dtype.carrier
            source.read(self.name, self.start, buffer.view(carrier)[: self.count])


def read(base: str, models: list[str]) -> None:
    """Read everything once."""
    _, inputs = open_inputs(Recipe(base=base, models=models, verbose=False))
    sources = (inputs.base, *inputs.models)
    tasks = [
        ReadChunk(sources, name, start, count)
        for name, info in inputs.base.tensors.items()
        for start, count in chunk_spans(info.elements)
    ]
    widest = max(i.dtype.itemsize for source in sources for i in source.tensors.values())
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source)
        run_tasks(
            tasks,
            lambda _stop: [np.empty(CHUNK * widest, np.uint8) for _ in sources],
            available_cores(),
        )


if __name__ == "__main__":
    read(sys.argv[1], sys.argv[2:])
