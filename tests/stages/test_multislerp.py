import math

import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given

import dare

ON_DELTAS = {"multislerp": {"on": "deltas"}}


@pytest.fixture(params=BACKENDS)
def merged(request):
    def run(*deltas, on="deltas", normalize=True, **given):
        stages = {"multislerp": {"on": on, "normalize": normalize}}
        found = combine("multislerp", *deltas, backend=request.param, stages=stages, **given)
        return found.tolist()

    return run


def test_the_mean_of_directions_and_of_lengths(merged):
    half = math.sqrt(0.5)
    assert merged([3, 0], [0, 1]) == pytest.approx([2 * half, 2 * half], rel=1e-6)


@pytest.mark.parametrize("weights", [[3, 1], [0.75, 0.25]])
def test_weights_are_divided_by_their_sum(merged, weights):
    # The mean direction is (¾, ¼)/√⅝, its length ¾·3 + ¼·1.
    expected = [2.5 * 0.75 / math.sqrt(0.625), 2.5 * 0.25 / math.sqrt(0.625)]
    assert merged([3, 0], [0, 1], weights=weights) == pytest.approx(expected, rel=1e-6)


def test_weights_may_stay_as_they_are(merged):
    found = merged([3, 0], [0, 1], weights=[3, 1], normalize=False)
    assert found == pytest.approx([10 * 3 / math.sqrt(10), 10 / math.sqrt(10)], rel=1e-6)


def test_whole_tensors(merged):
    # (1, 0) and (0, 1) are base + delta
    found = merged([0.5, -0.5], [-0.5, 0.5], base=[0.5, 0.5], on="weights")
    assert found == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-6)


def test_directions_that_cancel_are_averaged_straight(merged):
    assert merged([3, 4], [-6, -8]) == pytest.approx([-1.5, -2], rel=1e-6)
    assert merged([0, 0], [0, 0], [0, 0], base=[1, 2]) == [1, 2]


def test_a_zero_counts_for_the_length_alone(merged):
    assert merged([0, 0], [4, 0]) == [2, 0]


def test_an_infinity_stays_where_it_is(merged):
    assert merged([np.inf, 1], [1, 3]) == [np.inf, 2]


def test_weights_that_cancel_are_refused(merged):
    with pytest.raises(dare.RecipeError, match="normalize = false"):
        merged([3, 0], [0, 1], weights=[1, -1])


@given(few_deltas(most=1))
def test_one_model_is_itself(deltas):
    assert (combine("multislerp", *deltas, stages=ON_DELTAS, weights=[0.3]) == deltas[0]).all()


def test_over_many_chunks():
    deltas = large_deltas(3)
    found = same_bits_however_cut("multislerp", deltas, stages=ON_DELTAS).reshape(-1)
    wide = np.array(deltas, np.float64).reshape(3, -1)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    mean = (wide / lengths).mean(axis=0)
    expected = mean / np.linalg.norm(mean) * lengths.mean()
    assert np.abs(found - expected).max() < 1e-5
