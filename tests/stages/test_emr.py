import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda *deltas, **given: combine("emr", *deltas, backend=request.param, **given).tolist()


def test_the_largest_of_the_elected_sign(merged):
    # 3 + 1 - 2 > 0: 3; 1 + 2 - 4 < 0: -4; all agree: 6; 1 - 1 + 0 = 0
    assert merged([3, 1, 2, 1], [1, 2, 4, -1], [-2, -4, 6, 0]) == [3, -4, 6, 0]


def test_weights_count_in_the_vote_and_the_size(merged):
    # 3·1 - 2 > 0: 3·1
    assert merged([1], [-2], weights=[3, 1]) == [3]
    assert merged([1], [-np.inf], weights=[1, 0]) == [1]


def test_nans_come_through(merged):
    assert np.isnan(merged([np.nan, 1], [1, 1])).tolist() == [True, False]


@settings(max_examples=20)
@given(few_deltas(most=1))
def test_one_model_is_itself(deltas):
    assert (combine("emr", *deltas) == deltas[0]).all()


@settings(max_examples=20)
@given(few_deltas(), st.randoms())
def test_the_order_of_models_makes_no_difference(deltas, random):
    shuffled = random.sample(list(deltas), len(deltas))
    assert (combine("emr", *deltas) == combine("emr", *shuffled)).all()


@settings(max_examples=20)
@given(few_deltas(), st.sampled_from([-4.0, -1.0, 0.5, 1024.0]))
def test_scales_with_its_inputs(deltas, factor):
    expected = combine("emr", *deltas) * np.float32(factor)
    assert (combine("emr", *deltas * np.float32(factor)) == expected).all()


def test_over_many_chunks():
    deltas = large_deltas(3)
    found = same_bits_however_cut("emr", deltas)
    total = (deltas[0] + deltas[1]) + deltas[2]
    expected = np.where(total > 0, np.max(deltas, axis=0), np.min(deltas, axis=0))
    assert (found == expected).all()
