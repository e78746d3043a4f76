"""Read a base and its fine-tunes as a merge does, chunk by chunk on all cores, and do nothing else.

python bench/read_side.py base tuned-1 tuned-2
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dare.inputs.opening import open_inputs
from dare.inputs.sources import hold_open
from dare.recipe.recipe import Recipe
from dare.tensors.chunks import CHUNK, chunk_spans
from dare.tensors.system import available_cores


def read(base: str, models: list[str]) -> None:
    """Read everything once."""
    _, inputs = open_inputs(Recipe(base=base, models=models))
    sources = (inputs.base, *inputs.models)
    widest = max(i.dtype.itemsize for source in sources for i in source.tensors.values())
    own = threading.local()

    def read_chunk(name: str, start: int, count: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = np.empty(CHUNK * widest, np.uint8)
        for source in sources:
            carrier = source.tensors[name].dtype.carrier
            source.read(name, start, own.buffer.view(carrier)[:count])

    with hold_open(sources), ThreadPoolExecutor(available_cores()) as pool:
        reads = [
            pool.submit(read_chunk, name, start, count)
            for name, info in inputs.base.tensors.items()
            for start, count in chunk_spans(info.elements)
        ]
        for each in reads:
            each.result()


if __name__ == "__main__":
    read(sys.argv[1], sys.argv[2:])
