"""Places that models take in turn: values by hand, no overlap, chunks."""

import numpy as np
import pytest
from combining import CHUNK, combine
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays


@pytest.fixture(params=["reference", "cpu"])
def merged(request):
    def run(*deltas, weights=None, **parameters):
        return combine(
            "cabs", *deltas, stages={"cabs": parameters}, weights=weights, backend=request.param
        ).tolist()

    return run


def by_hand(deltas, n, m):
    """Group by group, model by model."""
    total = np.zeros(deltas[0].size, np.float32)
    for first in range(0, total.size, m):
        group = slice(first, first + m)
        size = total[group].size
        taken = np.zeros(size, bool)
        for delta in deltas:
            order = sorted(range(size), key=lambda i: (taken[i], -abs(delta[first + i]), i))
            chosen = order[: -(-n * size // m)]
            total[group][chosen] += delta[first:][chosen]
            taken[chosen] = True
    return total


def test_the_second_takes_what_the_first_has_left(merged):
    # The first takes 9 and -8; of the rest, the second takes 6 and 5, though its 7 is larger.
    assert merged([9, 1, -8, 2], [7, 6, 4, 5], n=2, m=4) == [9, 6, -8, 5]


def test_when_nothing_is_free_models_share(merged):
    # 9 to the first, 5 to the second; the third has its best of both
    assert merged([9, 1], [7, 5], [2, 3], n=1, m=2) == [9, 8]


def test_weights_and_rescaling(merged):
    # 4/1 · (0.5·9) and 4/1 · (2·6)
    found = merged([9, 1, 8, 2], [7, 6, 4, 5], n=1, m=4, rescale=True, weights=[0.5, 2])
    assert found == [18, 48, 0, 0]


def test_the_last_group_gives_its_share(merged):
    assert merged([1, 2, 3, 4, 5, 6], n=1, m=4) == [0, 0, 0, 4, 0, 6]


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 40)).flatmap(
        lambda shape: arrays.arrays(np.float32, shape, elements=st.integers(-9, 9).map(float))
    ),
    st.sampled_from([1, 2, 4, 8, 16]).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))),
    st.integers(-8, 8),
)
def test_any_numbers(deltas, pair, power):
    n, m = pair
    stages = {"cabs": {"n": n, "m": m}}
    found = combine("cabs", *deltas, stages=stages)
    assert found.tolist() == by_hand(deltas, n, m).tolist()
    factor = np.float32(2.0**power)
    assert (combine("cabs", *(factor * deltas), stages=stages) == factor * found).all()


def test_no_two_models_change_an_element():
    generator = np.random.default_rng(0)
    signs = [np.abs(generator.standard_normal(CHUNK + 1000)) + 1 for _ in range(4)]
    marked = [np.float32(1000**i) * (s > 0) for i, s in enumerate(signs)]
    stages = {"cabs": {"n": 2, "m": 8}}
    found = combine("cabs", *marked, stages=stages)
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [1, 1000, 1000**2, 1000**3]
    assert set(counts.tolist()) == {(CHUNK + 1000) // 4}
