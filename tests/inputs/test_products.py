"""Products of stored factors: the same bits whatever the pieces, in the memory that is said."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dare.inputs import adapter_tensors
from dare.inputs.adapter_tensors import Product
from dare.inputs.arrays import array_source
from dare.kernels import reference


@settings(deadline=None, max_examples=60)
@given(
    sides=st.tuples(st.integers(1, 5), *[st.integers(1, 9)] * 3),
    piece=st.integers(1, 40),
    transposed=st.booleans(),
    data=st.data(),
)
def test_any_elements_of_experts_are_those_of_the_whole(sides, piece, transposed, data):
    experts, rows, _, columns = sides
    source, left, right = expert_factors(*sides, transposed)
    start = data.draw(st.integers(0, experts * rows * columns - 1))
    count = data.draw(st.integers(1, experts * rows * columns - start))
    found = np.empty(count, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_tensors, "PIECE", piece)
        Product("left", "right", transposed, 0.7, experts).fill(source, start, found)
    expected = np.empty((experts, rows * columns), np.float32)
    for expert in range(experts):
        reference.low_rank(left[expert], right[expert], 0, np.float32(0.7), expected[expert])
    assert found.tobytes() == expected.reshape(-1)[start : start + count].tobytes()


def expert_factors(experts, rows, rank, columns, transposed):
    """Factors as PEFT stores them: lora_A by expert and direction, lora_B the other way."""
    generator = np.random.default_rng(0)
    left = generator.standard_normal((experts, rows, rank)).astype(np.float16)
    right = generator.standard_normal((experts, rank, columns)).astype(np.float16)
    ups = right.transpose(0, 2, 1) if transposed else left
    downs = left.transpose(0, 2, 1) if transposed else right
    up = ups.transpose(1, 2, 0).reshape(-1, rank * experts)
    down = downs.reshape(rank * experts, -1)
    kept = {"left": down if transposed else up, "right": up if transposed else down}
    source = array_source({n: v.copy() for n, v in kept.items()}, "adapter")
    return source, left.astype(np.float32), right.astype(np.float32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("sides", "experts"),
    [
        ((900, 256, 1000), 1),
        ((30, 64, 9000), 1),
        ((8, 1024, 900), 1),
        ((9000, 1024, 8), 1),
        ((300, 64, 200), 4),
        ((20, 8, 3000), 8),
    ],
)
def test_memory_is_what_is_said(sides, experts, transposed, monkeypatch):
    monkeypatch.setattr(adapter_tensors, "PIECE", 1 << 16)
    monkeypatch.setattr(adapter_tensors, "CHUNK", 1 << 16)
    rows, _, columns = sides
    source, _, _ = expert_factors(experts, *sides, transposed)
    product = Product("left", "right", transposed, 1.0, experts)
    into = np.empty(min(1 << 16, rows * columns), np.float32)
    product.fill(source, 0, into[:1])  # fills caches
    tracemalloc.start()
    product.fill(source, rows * columns - into.size, into)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    others = 64 << 10  # other threads of the test run allocate, too
    assert peak < product.reading_bytes(source) + others
