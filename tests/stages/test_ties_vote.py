"""The elections of ties: by sum or by count, weighted or not."""

import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given
from hypothesis import strategies as st

KINDS = [{"vote": vote, "weighted": weighted} for vote in ("sum", "count") for weighted in (0, 1)]
KINDS = [{**kind, "weighted": bool(kind["weighted"])} for kind in KINDS]


@pytest.fixture(params=BACKENDS)
def elect(request):
    def run(*deltas, weights=None, **settings):
        stages = {"ties": settings}
        return combine(
            "ties", *deltas, weights=weights, stages=stages, backend=request.param
        ).tolist()

    return run


def test_the_sum_can_be_unweighted(elect):
    # unweighted, 2 - 1 > 0 elects the first: 1·2/1; weighted, 2 - 3 < 0 the second: -3/3
    assert elect([2], [-1], weights=[1, 3]) == [-1]
    assert elect([2], [-1], weights=[1, 3], weighted=False) == [2]


def test_the_count_can_outvote_the_sum(elect):
    # -5 outweighs 1 and 2, but they are two
    assert elect([1], [2], [-5]) == [-5]
    assert elect([1], [2], [-5], vote="count") == [1.5]


def test_the_count_can_be_weighted(elect):
    weights = [1, 1, 4]
    # 1 + 1 < 4; unweighted 2 > 1
    assert elect([1], [3], [-0.25], weights=weights, vote="count") == [-0.25]
    assert elect([1], [3], [-0.25], weights=weights, vote="count", weighted=False) == [2]


def test_equal_counts_elect_nothing(elect):
    assert elect([1, 0], [-5, 0], vote="count") == [0, 0]


def test_divisors_are_as_ever(elect):
    given = {"weights": [1, 3], "weighted": False}
    assert elect([2], [6], divide_by="count", **given) == [10]
    assert elect([2], [6], divide_by="nothing", **given) == [20]
    assert elect([2], [6], **given) == [5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_weight_turns_a_delta_around(elect, kind):
    assert elect([2], weights=[-1], **kind) == [-2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_zero_takes_no_part(elect, kind):
    assert elect([2], [-8], weights=[1, 0], **kind) == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_nans_come_through(elect, kind):
    assert np.isnan(elect([np.nan], [1.0], [1.0], **kind)).all()


@given(few_deltas())
def test_with_weights_of_one_unweighted_sums_are_the_default(deltas):
    stages = {"ties": {"weighted": False}}
    assert (combine("ties", *deltas, stages=stages) == combine("ties", *deltas)).all()


@given(few_deltas(), st.sampled_from(KINDS), st.sampled_from([-4.0, -1.0, 0.5]))
def test_scales_with_its_inputs(deltas, kind, factor):
    stages = {"ties": kind}
    expected = combine("ties", *deltas, stages=stages) * np.float32(factor)
    assert (combine("ties", *deltas * np.float32(factor), stages=stages) == expected).all()


@given(few_deltas(), st.sampled_from(KINDS), st.randoms())
def test_the_order_of_models_makes_no_difference(deltas, kind, random):
    shuffled, stages = random.sample(list(deltas), len(deltas)), {"ties": kind}
    found = [combine("ties", *models, stages=stages) for models in (deltas, shuffled)]
    assert (found[0] == found[1]).all()


def test_over_many_chunks():
    deltas = large_deltas(3)
    stages = {"ties": {"vote": "count", "weighted": False, "divide_by": "count"}}
    found = same_bits_however_cut("ties", deltas, stages=stages)
    side = np.sign(sum(np.sign(d) for d in deltas))
    agreeing = [np.where(np.sign(d) == side, d, 0).astype(np.float32) for d in deltas]
    count = sum((np.sign(d) == side).astype(np.float32) for d in deltas)
    assert (found == ((agreeing[0] + agreeing[1]) + agreeing[2]) / count).all()
