import math

import numpy as np
import pytest
from combining import BACKENDS, LARGE, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dare.kernels import core, reference

HALF = math.sqrt(0.5)


@pytest.fixture(params=BACKENDS)
def merged(request):
    def run(*deltas, each="tensor", on="deltas", **given):
        stages = {"nuslerp": {"each": each, "on": on}}
        return combine("nuslerp", *deltas, stages=stages, backend=request.param, **given).tolist()

    return run


def by_definition(first, second, t, axis):
    """Line by line in float64."""
    first, second = np.float64(first), np.float64(second)
    product = (first * second).sum(axis=axis, keepdims=True)
    lengths = [np.sqrt((v * v).sum(axis=axis, keepdims=True)) for v in (first, second)]
    angle = np.arccos(product / lengths[0] / lengths[1])
    return (np.sin((1 - t) * angle) * first + np.sin(t * angle) * second) / np.sin(angle)


def test_weights_say_where_on_the_arc(merged):
    # A third of the way, 30°, from (1, 0) to (0, 1)
    found = merged([1, 0], [0, 1], weights=[2, 1])
    assert found == pytest.approx([math.cos(math.pi / 6), 0.5], rel=1e-6)


def test_halfway_unless_weights_are_given(merged):
    assert merged([1, 0], [0, 1]) == pytest.approx([HALF] * 2, rel=1e-6)
    assert merged([1, 0], [0, 1], weights=[1, -1]) == pytest.approx([HALF] * 2, rel=1e-6)


FIRST, SECOND = [[1, 0], [3, 0]], [[0, 1], [5, 0]]


def test_each_row_has_its_angle(merged):
    # The first rows are orthogonal, the second ones parallel.
    found = merged(FIRST, SECOND, each="row")
    assert found[0] == pytest.approx([HALF] * 2, rel=1e-6)
    assert found[1] == [4, 0]


def test_each_column_has_its_angle(merged):
    transposed = [np.transpose(delta).tolist() for delta in (FIRST, SECOND)]
    found = merged(*transposed, each="column")
    assert found == np.transpose(merged(FIRST, SECOND, each="row")).tolist()


def test_a_row_of_more_dimensions_is_all_with_one_first_index(merged):
    first, second = np.reshape(np.arange(24.0), (2, 3, 4)), np.ones((2, 3, 4))
    found = merged(first, second, each="row")
    flat = merged(first.reshape(2, 12), second.reshape(2, 12), each="row")
    assert np.reshape(found, (2, 12)).tolist() == flat


def test_whole_tensors_row_by_row(merged):
    # base + delta are (1, 0) and (0, 1) in the first row, and zeros in the second
    base = [[0.5, 0.5], [0, 0]]
    deltas = [[0.5, -0.5], [0, 0]], [[-0.5, 0.5], [0, 0]]
    found = merged(*deltas, base=base, each="row", on="weights")
    assert found[0] == pytest.approx([HALF] * 2, rel=1e-6)
    assert found[1] == [0, 0]


@pytest.mark.parametrize("other", [[[2.0, 4.0]], [[-2.0, -4.0]], [[0.0, 0.0]]])
@pytest.mark.parametrize("each", ["tensor", "row"])
def test_parallel_opposite_and_zero_rows_are_interpolated_straight(merged, other, each):
    expected = [[0.75 * a + 0.25 * b for a, b in zip([1.0, 2.0], other[0], strict=True)]]
    assert merged([[1.0, 2.0]], other, each=each, weights=[3, 1]) == expected


def test_an_infinity_stays_in_its_row(merged):
    found = merged([[np.inf, 1], [1, 0]], [[1, 1], [0, 1]], each="row")
    assert found[0] == [np.inf, 1]
    assert found[1] == pytest.approx([HALF] * 2, rel=1e-6)


@given(few_deltas(least=2, most=2))
def test_the_whole_is_slerp_on_deltas(deltas):
    stages = {"slerp": {"on": "deltas", "t": 0.25}}
    expected = combine("slerp", *deltas, stages=stages)
    assert (combine("nuslerp", *deltas, weights=[0.75, 0.25]) == expected).all()


@given(few_deltas(least=2, most=2), st.sampled_from(["tensor", "row", "column"]))
def test_the_two_can_change_places_with_their_weights(deltas, each):
    first, second = deltas.reshape(2, 1, -1)
    stages = {"nuslerp": {"each": each}}
    found = combine("nuslerp", first, second, weights=[1, 3], stages=stages)
    turned = combine("nuslerp", second, first, weights=[3, 1], stages=stages)
    assert found == pytest.approx(turned, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("each", "axis", "shape"),
    [("tensor", (0, 1), LARGE), ("row", 1, LARGE), ("column", 0, LARGE[::-1])],
)
@pytest.mark.parametrize("on", ["deltas", "weights"])
def test_over_many_chunks(each, axis, shape, on):
    first, second = (delta.reshape(shape) for delta in large_deltas(2))
    base = np.full(shape, 0.25, np.float32)
    found = same_bits_however_cut(
        "nuslerp",
        [first, second],
        base=base,
        weights=[1, 2],
        stages={"nuslerp": {"each": each, "on": on}},
    )
    first, second = (
        (base + delta) if on == "weights" else (base + delta) - base for delta in (first, second)
    )
    expected = by_definition(first, second, 2 / 3, axis) + (0 if on == "weights" else base)
    assert np.abs(found - expected).max() < 1e-5


# ---------------------------------------------------------------- the kernel


@given(
    arrays.arrays(np.float32, (2, 40), elements=st.floats(-8, 8, width=32)),
    st.integers(0, 30),
    st.integers(1, 50),
    st.booleans(),
)
def test_the_kernels_have_the_same_bits(pair, first, columns, by_column):
    found = []
    for kernels in (reference, core):
        sums = np.full(80, 0.1)
        kernels.add_products(pair[0], pair[1], first, columns, by_column, sums)
        found.append(sums.tobytes())
    assert found[0] == found[1]
