"""Structured sparsity: which neighbours are kept, as definitions say, and chunks."""

import numpy as np
import pytest
from combining import CHUNK, combine, largest_first
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import dare
from dare.kernels import reference
from dare.tensors.mask import mask_key


def deltas(most_rows, elements):
    """Strategy: rows of up to 40 of these whole numbers."""
    shapes = st.tuples(st.integers(1, most_rows), st.integers(1, 40))
    return shapes.flatmap(
        lambda shape: arrays.arrays(np.float32, shape, elements=elements.map(float))
    )


def pairs(groups):
    """Strategy: n and m, for m from these groups."""
    return groups.flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m)))


# ---------------------------------------------------------------- nm


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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_at_random_the_lowest_numbers_are_kept(backend):
    delta = np.arange(1, 65, dtype=np.float32)
    keep = kept(-numbers(64), 2, 4)
    found = combine("nm+sum", delta, stages={"nm": {"choose": "random"}}, backend=backend)
    assert found.tolist() == np.where(keep, 2 * delta, 0).tolist()


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
    deltas(4, st.integers(-9, 9).filter(bool)),
    pairs(st.integers(1, 12)),
    st.sampled_from(["magnitude", "random"]),
    st.integers(-8, 8),
)
def test_nm_as_defined(delta, pair, choose, power):
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


# ---------------------------------------------------------------- cabs


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


@settings(max_examples=30, deadline=None)
@given(
    deltas(4, st.integers(-9, 9)),
    pairs(st.sampled_from([1, 2, 4, 8, 16])),
    st.integers(-8, 8),
)
def test_cabs_as_defined(deltas, pair, power):
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
