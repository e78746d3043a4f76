"""n of every m: values by hand, short groups, turns, chunks."""

import numpy as np
import pytest
from combining import CHUNK, combine, largest_first
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import dare
from dare.kernels import reference
from dare.tensors.mask import mask_key


@pytest.fixture(params=["reference", "cpu"])
def merged(request):
    def run(delta, **parameters):
        stages = {"nm": parameters}
        return combine("nm+sum", delta, stages=stages, backend=request.param).tolist()

    return run


def numbers(size, seed=42):
    found = np.empty(size, np.uint64)
    reference.draw_uniform(found, 0, *mask_key(seed, "w"))
    return found.astype(np.float64)


def kept(keys, n, m, turn=0):
    """The definition, in NumPy: which elements are kept, the largest keys first."""
    keep = np.zeros(keys.shape, bool)
    columns = keys.shape[-1]
    for first in range(0, columns, m):
        group = keys[..., first : first + m]
        count = -(-n * group.shape[-1] // m)
        order = largest_first(group)[..., turn * count : (turn + 1) * count]
        np.put_along_axis(keep[..., first : first + m], order, True, -1)
    return keep


def test_two_of_four_are_kept_and_doubled(merged):
    assert merged([[1, -4, 3, 2, 5, 6, 7, -8]]) == [[0, -8, 6, 0, 0, 0, 14, -16]]


def test_without_rescaling(merged):
    assert merged([1, -4, 3, 2], n=1, rescale=False) == [0, -4, 0, 0]


def test_of_equals_the_first_are_kept(merged):
    assert merged([2, 2, 2, 2]) == [4, 4, 0, 0]


def test_a_short_group_keeps_its_share(merged):
    # rows of 6: groups of 4 and 2; of 2, ⌈1·2/4⌉ = 1 is kept and multiplied by 2/1, not 4/1
    assert merged([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]], n=1) == [
        [0, 0, 0, 16, 0, 12],
        [24, 0, 0, 0, 4, 0],
    ]
    assert merged([[3, 1, 2]], n=1, m=2, rescale=False) == [[3, 0, 2]]


def test_all_of_a_group_changes_nothing(merged):
    assert merged([1, 2, 3, 4, 5], n=4) == [1, 2, 3, 4, 5]
    assert merged([1, 2, 3], n=1, m=1) == [1, 2, 3]


def test_the_next_turn_takes_the_next_best(merged):
    assert merged([1, -4, 3, 2], turn=1) == [2, 0, 0, 4]


def test_scalars_and_empty_tensors(merged):
    assert merged(3.0) == 3.0
    assert merged(np.zeros((2, 0))) == [[], []]


def test_at_random_the_lowest_numbers_are_kept(merged):
    delta = np.arange(1, 65, dtype=np.float32)
    keep = kept(-numbers(64), 2, 4)
    assert merged(delta, choose="random") == np.where(keep, 2 * delta, 0).tolist()


def test_models_with_one_seed_and_other_turns_do_not_overlap():
    ones = np.ones((50, 64), np.float32)
    base = {"w": np.zeros_like(ones)}
    found = []
    for turn in range(4):
        stages = {"nm": {"n": 2, "m": 8, "choose": "random", "turn": turn, "rescale": False}}
        result, _ = dare.merge_arrays(
            base, [{"w": ones}], method="nm+sum", stages=stages, verbose=False
        )
        found.append(result["w"])
    assert (sum(found) == 1).all()
    assert all((part.reshape(-1, 8).sum(axis=1) == 2).all() for part in found)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 40)).flatmap(
        lambda shape: arrays.arrays(
            np.float32, shape, elements=st.integers(-9, 9).filter(bool).map(float)
        )
    ),
    st.integers(1, 12).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))),
    st.sampled_from(["magnitude", "random"]),
    st.integers(-8, 8),
)
def test_any_numbers(delta, pair, choose, power):
    n, m = pair
    parameters = {"n": n, "m": m, "choose": choose, "rescale": False}
    found = combine("nm+sum", delta, stages={"nm": parameters})
    keys = np.abs(delta) if choose == "magnitude" else -numbers(delta.size).reshape(delta.shape)
    assert found.tolist() == np.where(kept(keys, n, m), delta, 0).tolist()

    again = combine("nm+sum", found, stages={"nm": parameters})
    assert (again == found).all()  # what is kept once is kept again
    factor = np.float32(2.0**power)
    scaled = combine("nm+sum", factor * delta, stages={"nm": parameters})
    assert (scaled == factor * found).all()


@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 7)])
def test_at_random_the_mean_is_the_delta(n, m):
    # 200 seeds, 5 standard errors; rows of 20 have a short group where m = 7
    delta = np.arange(1, 41, dtype=np.float32).reshape(2, 20)
    stages = {"nm": {"n": n, "m": m, "choose": "random"}}
    found = combine("nm+linear", *[delta] * 200, stages=stages)
    assert (np.abs(found - delta) <= 5 * delta * np.sqrt(1.4 / 200)).all()


@pytest.mark.parametrize(
    ("shape", "n", "m"),
    [((CHUNK // 4096 + 1, 4096), 2, 4), ((200, 3000), 1, 3), ((80, 7001), 4, 8)],
)
@pytest.mark.parametrize("choose", ["magnitude", "random"])
def test_groups_over_borders_of_chunks(shape, n, m, choose):
    delta = np.random.default_rng(0).integers(1, 1000, shape).astype(np.float32)
    stages = {"nm": {"n": n, "m": m, "choose": choose, "rescale": False}}
    found = combine("nm+sum", delta, stages=stages, threads=2)
    keys = delta if choose == "magnitude" else -numbers(delta.size).reshape(shape)
    assert (found == np.where(kept(keys, n, m), delta, 0)).all()
