import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given
from hypothesis import strategies as st

import dare

ROWS = {"model_stock": {"each": "row"}}


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda *deltas, **given: combine(
        "model_stock", *deltas, backend=request.param, **given
    ).tolist()


def test_two_models_at_sixty_degrees(merged):
    # cos 60° = ½: t = 2·½ / (1 + ½) = ⅔ of the mean. (1, 1, 0) and (1, 0, 1) are at 60°.
    found = merged([1, 1, 0], [1, 0, 1])
    assert found == pytest.approx([2 / 3, 1 / 3, 1 / 3], rel=1e-6)


def test_three_models_have_the_mean_of_three_cosines(merged):
    # (1, 0), (0, 1) and (2, 0): cosines 0, 1 and 0; t = 3·⅓ / (1 + 2·⅓) = 0.6
    assert merged([1, 0], [0, 1], [2, 0]) == pytest.approx([0.6, 0.2], rel=1e-6)


def test_parallel_models_are_averaged(merged):
    assert merged([1, 2], [3, 6]) == pytest.approx([2, 4], rel=1e-6)


def test_what_does_not_agree_leaves_the_base(merged):
    assert merged([1, 0], [0, 5], base=[3, 4]) == [3, 4]
    assert merged([1, 2], [-1, -2], base=[3, 4]) == [3, 4]
    assert merged([1, 2], [-2, 0], base=[3, 4]) == [3, 4]


def test_a_delta_of_zeros_agrees_with_nothing(merged):
    # cosines 1, 0, 0: t = 0.6 of the mean (1 + 1 + 0)/3
    assert merged([1], [1], [0]) == pytest.approx([0.4], rel=1e-6)
    assert merged([0], [0]) == [0]


def test_every_row_may_have_an_angle_of_its_own(merged):
    # The first rows are at 60°, the second are parallel, the third at 90°.
    first, second = [[1, 1, 0], [1, 2, 3], [1, 0, 0]], [[1, 0, 1], [3, 6, 9], [0, 1, 0]]
    expected = np.array([[2 / 3, 1 / 3, 1 / 3], [2, 4, 6], [0, 0, 0]])
    for shape in ((3, 3), (3, 1, 3), (1, 3, 3)):
        deltas = np.reshape(first, shape), np.reshape(second, shape)
        found = merged(*deltas, stages=ROWS)
        assert np.array(found) == pytest.approx(expected.reshape(shape), rel=1e-6)
    assert merged(first[0], second[0], stages=ROWS) == merged(first[0], second[0])


def test_an_infinity_stays_where_it_is(merged):
    assert merged([np.inf, 1], [1, 3]) == [np.inf, 2]


def test_it_takes_no_weights(merged):
    with pytest.raises(dare.RecipeError, match="model_stock takes no weights"):
        merged([1], [2], weights=[1, 2])


@given(few_deltas(most=1))
def test_one_model_is_itself(deltas):
    assert (combine("model_stock", *deltas) == deltas[0]).all()


@given(few_deltas(), st.randoms())
def test_the_order_of_models_makes_no_difference(deltas, random):
    # Sums of whole numbers are exact, and t does not depend on the order.
    shuffled = random.sample(list(deltas), len(deltas))
    found = combine("model_stock", *deltas)
    assert combine("model_stock", *shuffled) == pytest.approx(found, rel=1e-6, abs=1e-6)


@given(few_deltas(), st.sampled_from([-4.0, -1.0, 0.5, 2.0**-20]))
def test_scales_with_its_inputs(deltas, factor):
    expected = combine("model_stock", *deltas) * np.float32(factor)
    assert (combine("model_stock", *deltas * np.float32(factor)) == expected).all()


@given(few_deltas())
def test_it_is_a_part_of_the_mean(deltas):
    found, mean = combine("model_stock", *deltas), deltas.mean(axis=0)
    rounding = 1e-6 * np.abs(deltas).max()
    assert (np.abs(found) <= np.abs(mean) + rounding).all()
    assert (found * np.sign(mean) >= -rounding).all()


def test_over_many_chunks():
    deltas = large_deltas(3)
    found = same_bits_however_cut("model_stock", deltas)
    wide = np.array(deltas, np.float64).reshape(3, -1)
    units = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    cosine = (units @ units.T)[np.triu_indices(3, 1)].mean()
    expected = 3 * cosine / (1 + 2 * cosine) * wide.mean(axis=0)
    assert np.abs(found.reshape(-1) - expected).max() < 1e-6 * np.abs(wide).max()


def test_rows_over_many_chunks():
    deltas = large_deltas(2)
    found = same_bits_however_cut("model_stock", deltas, stages=ROWS)
    for row in range(3):
        alone = combine("model_stock", *(delta[row] for delta in deltas))
        assert np.abs(found[row] - alone).max() < 1e-5
