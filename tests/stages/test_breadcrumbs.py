"""The middle of a delta: values by hand, ties, chunks, rows."""

import numpy as np
import pytest
from combining import CHUNK, combine, largest_first
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import dare
from dare import keep_mask


@pytest.fixture(params=["reference", "cpu"])
def merged(request):
    def run(delta, method="breadcrumbs+sum", **parameters):
        stages = {"breadcrumbs": parameters}
        return combine(method, delta, stages=stages, backend=request.param).tolist()

    return run


def middle(delta, keep_middle, drop_largest):
    """The definition, in NumPy, along the last dimension."""
    size = delta.shape[-1]
    kept = max(1, int(keep_middle * size))
    top = min(int(drop_largest * size), size - kept)
    order = largest_first(np.abs(delta))[..., top : top + kept]
    found = np.zeros_like(delta)
    np.put_along_axis(found, order, np.take_along_axis(delta, order, -1), -1)
    return found


def test_both_ends_are_dropped(merged):
    # n = 10: ⌊0.5·10⌋ = 5 kept below ⌊0.2·10⌋ = 2 dropped
    delta = [1, -10, 3, 4, 5, -6, 7, 8, 9, 2]
    found = merged(delta, keep_middle=0.5, drop_largest=0.2)
    assert found == [0, 0, 0, 4, 5, -6, 7, 8, 0, 0]


def test_rows_have_their_own_middle(merged):
    delta = [[1, 2, 3, 4], [-40, 30, 20, -10]]
    found = merged(delta, keep_middle=0.5, drop_largest=0.25, per="row")
    assert found == [[0, 2, 3, 0], [0, 30, 20, 0]]


def test_of_equals_the_first_count_as_larger(merged):
    # 1 dropped at the top, 3 kept: the first 5, then three of the other four
    assert merged([5, 5, 5, 5, 5, 1], keep_middle=0.5, drop_largest=0.2) == [0, 5, 5, 5, 0, 0]
    row = merged([[5, 5, 5, 5, 5, 1]], keep_middle=0.5, drop_largest=0.2, per="row")
    assert row == [[0, 5, 5, 5, 0, 0]]


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_an_empty_slice_at_the_top_keeps_all_of_the_top(merged, per):
    # ⌊0.01·4⌋ = 0 are dropped at the top
    assert merged([[1, 2, 3, 4]], keep_middle=0.75, drop_largest=0.01, per=per) == [[0, 2, 3, 4]]
    assert merged([[1, 2, 3, 4]], keep_middle=0.75, drop_largest=0.0, per=per) == [[0, 2, 3, 4]]


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_what_is_kept_goes_before_what_is_dropped(merged, per):
    # 3 of 4 shall be kept, so only 1 can be dropped at the top, not ⌊0.9·4⌋ = 3
    assert merged([[1, 2, 3, 4]], keep_middle=0.75, drop_largest=0.9, per=per) == [[1, 2, 3, 0]]
    assert merged([[7]], keep_middle=0.1, drop_largest=0.9, per=per) == [[7]]
    assert merged([[1, 2]], keep_middle=1.0, drop_largest=0.5, per=per) == [[1, 2]]


def test_scalars_and_empty_tensors(merged):
    assert merged(3.0, per="row") == 3.0
    assert merged(3.0) == 3.0
    assert merged(np.zeros((0, 5)), per="row") == []
    assert merged(np.zeros((3, 0)), per="row") == [[], [], []]


def test_after_dare_survivors_are_counted():
    delta = np.arange(1, 1001, dtype=np.float32)
    keep = keep_mask("w", 1000, 0.9, seed=42)
    stages = {
        "dare": {"drop_rate": 0.9, "rescale": False},
        "breadcrumbs": {"keep_middle": 0.5, "drop_largest": 0.1},
    }
    found = combine("dare+breadcrumbs+sum", delta, stages=stages)
    assert found[keep].tolist() == middle(delta[keep], 0.5, 0.1).tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60).flatmap(
        lambda size: arrays.arrays(
            np.float32, size, elements=st.integers(-9, 9).filter(bool).map(float)
        )
    ),
    st.floats(0.01, 1),
    st.floats(0, 0.99),
    st.sampled_from(["tensor", "row"]),
    st.integers(-8, 8),
)
def test_any_numbers(delta, keep_middle, drop_largest, per, power):
    parameters = {"keep_middle": keep_middle, "drop_largest": drop_largest, "per": per}
    stages = {"breadcrumbs": parameters}
    found = combine("breadcrumbs+sum", delta, stages=stages)
    assert found.tolist() == middle(delta, keep_middle, drop_largest).tolist()
    factor = np.float32(2.0**power)
    assert (combine("breadcrumbs+sum", factor * delta, stages=stages) == factor * found).all()


@pytest.mark.parametrize("max_memory", ["1GiB", "64MiB"])
def test_many_chunks(max_memory):
    # Few distinct magnitudes, so that both cuts fall among equals in several chunks.
    delta = np.random.default_rng(0).integers(1, 6, 2 * CHUNK + 99).astype(np.float32)
    stages = {"breadcrumbs": {"keep_middle": 0.55, "drop_largest": 0.25}}
    found = combine("breadcrumbs+sum", delta, stages=stages, max_memory=max_memory)
    assert (found == middle(delta, 0.55, 0.25)).all()


@pytest.mark.parametrize("shape", [(150, 7000), (3, 400_000), (2, 700_001), (1_200_000,)])
def test_rows_over_borders_of_chunks(shape):
    delta = np.random.default_rng(0).integers(1, 1000, shape).astype(np.float32)
    stages = {"breadcrumbs": {"keep_middle": 0.5, "drop_largest": 0.1, "per": "row"}}
    found = combine("breadcrumbs+sum", delta, stages=stages, threads=2)
    assert (found == middle(delta, 0.5, 0.1)).all()


def test_the_report_counts_what_is_left():
    for per in ("tensor", "row"):
        _, report = dare.merge_arrays(
            {"w": np.zeros(100, np.float32)},
            [{"w": np.arange(1, 101, dtype=np.float32)}],
            method="breadcrumbs",
            stages={"breadcrumbs": {"keep_middle": 0.4, "drop_largest": 0.1, "per": per}},
            verbose=False,
        )
        assert report.tensors[0].survivors == ((40,),)
