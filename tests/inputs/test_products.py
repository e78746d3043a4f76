"""Products of stored factors: the same bits whatever the pieces, in the memory that is said."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dare.inputs import lora
from dare.inputs.arrays import array_source
from dare.inputs.lora import Product
from dare.kernels import reference


def factors(rows, rank, columns, transposed, dtype=np.float32):
    generator = np.random.default_rng(rows + 7 * rank + 31 * columns)
    left = generator.standard_normal((rows, rank)).astype(dtype)
    right = generator.standard_normal((rank, columns)).astype(dtype)
    kept = {"left": left.T if transposed else left, "right": right.T if transposed else right}
    source = array_source({name: value.copy() for name, value in kept.items()}, "adapter")
    return source, left.astype(np.float32), right.astype(np.float32)


@settings(deadline=None, max_examples=60)
@given(
    sides=st.tuples(*[st.integers(1, 9)] * 3),
    piece=st.integers(1, 40),
    transposed=st.booleans(),
    data=st.data(),
)
def test_any_elements_in_any_pieces_are_those_of_the_whole(sides, piece, transposed, data):
    rows, _, columns = sides
    source, left, right = factors(*sides, transposed, np.float16)
    start = data.draw(st.integers(0, rows * columns - 1))
    count = data.draw(st.integers(1, rows * columns - start))
    found, expected = np.empty((2, count), np.float32)
    reference.low_rank(left, right, start, np.float32(0.7), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "PIECE", piece)
        Product("left", "right", transposed, 0.7).fill(source, start, found)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "sides", [(900, 256, 1000), (30, 64, 9000), (8, 1024, 900), (9000, 1024, 8)]
)
def test_memory_is_what_is_said(sides, transposed, monkeypatch):
    monkeypatch.setattr(lora, "PIECE", 1 << 16)
    monkeypatch.setattr(lora, "CHUNK", 1 << 16)
    rows, _, columns = sides
    source, _, _ = factors(*sides, transposed)
    product = Product("left", "right", transposed, 1.0)
    into = np.empty(min(1 << 16, rows * columns), np.float32)
    product.fill(source, 0, into[:1])  # compiles
    tracemalloc.start()
    product.fill(source, rows * columns - into.size, into)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < product.reading_bytes(source) + (16 << 10)
