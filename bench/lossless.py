"""How large a chunk is that is coded against its base, and how long that takes.

    python bench/lossless.py [BASE MODEL] …

Without files: the models of the demonstration, and pairs that are made up. Sizes are percent of the
model's bytes: zstd -3 of them as they are, zstd -1 of their byte planes, of the planes of XOR with
the base and of the difference, and what `dare` writes. Speeds are MB of the model in a second of
one thread's own time. Every chunk is packed and unpacked three times, and the best counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard
from models import DELTA_DEVIATION, WEIGHT_DEVIATION
from numpy.typing import NDArray

import dare.demo
from dare.inputs.sources import open_source, read_chunks
from dare.tensors.chunks import CHUNK
from dare.tensors.planes import pack, unpack

ELEMENTS = 8 * CHUNK
BF16 = np.dtype(ml_dtypes.bfloat16)
Array = NDArray[Any]
Pair = tuple[Array, Array | None]  # a chunk of the model and of the base, as whole numbers


def file_pairs(base: Path, model: Path) -> Iterator[Pair]:
    with open_source(model) as of_model, open_source(base) as of_base:
        for name in of_model.tensors:
            for _, (tuned, start) in read_chunks([of_model, of_base], name):
                yield from cut(tuned, start)


def made_up_pairs() -> Iterator[tuple[str, Iterator[Pair]]]:
    """A name and the chunks of pairs that are random numbers."""
    generator = np.random.default_rng(1)
    base, delta, other = generator.standard_normal((3, ELEMENTS), np.float32)
    base *= WEIGHT_DEVIATION
    for kind in (BF16, np.dtype(np.float16), np.dtype(np.float32)):
        stored = base.astype(kind)
        tuned = (stored.astype(np.float32) + DELTA_DEVIATION * delta).astype(kind)
        yield f"δ of 5 % of σ, {kind}", cut(tuned, stored)
    yield "δ of 0.1 % of each, float32", cut(base * (1 + np.float32(1e-3) * delta), base)
    stored = base.astype(BF16).view("<u2")
    for changed in (0.1, 0.01, 0.001):
        step = np.where(generator.random(ELEMENTS) < changed, np.where(delta > 0, 1, -1), 0)
        yield f"{changed:.1%} one step away, bfloat16", cut(stored + step.astype("<u2"), stored)
    yield "nothing in common, bfloat16", cut(other.astype(BF16), base.astype(BF16))
    yield "no base, bfloat16", ((model, None) for model, _ in cut(base.astype(BF16), other))


def cut(model: Array, base: Array) -> Iterator[Pair]:
    model, base = (array.view(f"<u{array.itemsize}") for array in (model, base))
    for start in range(0, model.size, CHUNK):
        yield model[start:][:CHUNK], base[start:][:CHUNK]


def folded(changes: Array) -> Array:
    signed = changes.view(f"<i{changes.itemsize}")
    return (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))


def planes_size(numbers: Array) -> int:
    planes = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T
    return sum(len(zstandard.compress(plane.tobytes(), 1)) for plane in planes)


def best_seconds(action: Callable[..., object], *arguments: object) -> float:
    times = []
    for _ in range(3):
        start = time.thread_time()
        action(*arguments)
        times.append(time.thread_time() - start)
    return min(times)


def measure(pairs: Iterator[Pair]) -> tuple[Array, float, float]:
    """Bytes: all, then in the order of the columns; seconds to pack and to unpack."""
    sizes, packing, unpacking = np.zeros(6, np.int64), 0.0, 0.0
    for model, base in pairs:
        data, against = model.view(np.uint8), None if base is None else base.view(np.uint8)
        blob, into = pack(data, against, model.itemsize), np.empty_like(data)
        packing += best_seconds(pack, data, against, model.itemsize)
        unpacking += best_seconds(unpack, blob, against, model.itemsize, into)
        assert np.array_equal(into, data)
        others = [model] * 3 if base is None else [model, model ^ base, folded(model - base)]
        zstd_alone = len(zstandard.compress(data.data, 3))
        sizes += [data.size, zstd_alone, *map(planes_size, others), len(blob)]
    return sizes, packing, unpacking


def main() -> None:
    demo = Path(dare.demo.__file__).parent / "models"
    paths = [Path(text) for text in sys.argv[1:]]
    pairs = [*zip(paths[::2], paths[1::2], strict=True)]
    pairs = pairs or [(demo / "base", demo / name) for name in ("add", "say", "sort")]
    files = ((model.name, file_pairs(base, model)) for base, model in pairs)
    cases = files if paths else chain(files, made_up_pairs())
    print(f"{'':32}     MB  zstd -3  planes     XOR  differ.    dare  pack  unpack")
    for name, chunks in cases:
        (size, *coded), packing, unpacking = measure(chunks)
        columns = " ".join(f"{part / size:8.2%}" for part in coded)
        speeds = f"{size / packing / 1e6:5.0f} {size / unpacking / 1e6:7.0f}"
        print(f"{name:32} {size / 1e6:6.1f} {columns} {speeds}", flush=True)


if __name__ == "__main__":
    main()
