import numpy as np
import pytest
from combining import BACKENDS, combine, large_deltas, same_bits_however_cut

import dare


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda *deltas, **given: combine(
        given.pop("method", "consensus"), *deltas, backend=request.param, **given
    ).tolist()


def test_consensus_keeps_what_two_models_need(merged):
    # sums 4, 5, 1. At λ = 0.5: 3 ≥ 0.5·1, 1 < 0.5·3; 3 ≥ 0.5·2, 2 ≥ 0.5·3; 2 ≥ 0.5·1, 1 ≥ 0.5·2
    found = merged([3, 3, 2], [1, 2, -1], stages={"consensus": {"selectivity": 0.5}})
    assert found == [0, 5, 1]


def test_one_is_enough_if_the_recipe_says_so(merged):
    stages = {"consensus": {"selectivity": 0.5, "agree": 1}}
    # 1, 1 and 1 in three models: each 1 ≥ 0.5·2; of 4 and 1 only 4 needs it; at λ = 0.5 in the
    # last, 1 < 0.5·|0 - 1| is false, so both do, and the sum is 0
    assert merged([1, 4, 1], [1, 1, -1], [1, 0, 0], stages=stages) == [3, 5, 0]


def test_what_no_model_needs_is_dropped(merged):
    # each 1 < 2·|3 - 1|
    stages = {"consensus": {"selectivity": 2.0, "agree": 1}}
    assert merged([1], [1], [1], stages=stages) == [0]


def test_weights_make_the_sum_and_a_weight_of_zero_asks_nobody(merged):
    # s = 0.5·4 + 2 = 4; |4| ≥ 0.4·0, |2| ≥ 0.4·2
    assert merged([4], [2], weights=[0.5, 1]) == [4]
    # Only two are asked, and 1 < 0.4·3
    assert merged([3], [1], [4], weights=[1, 1, 0]) == [0]


def test_factors_of_earlier_stages_count(merged):
    keep = dare.keep_mask("w", 64, 0.5, seed=42)
    found = merged(np.ones(64), method="dare+consensus", stages={"dare": {"drop_rate": 0.5}})
    assert found == (2.0 * keep).tolist()


def test_nans_come_through(merged):
    assert np.isnan(merged([np.nan, 1], [1, 1])).tolist() == [True, False]


def test_over_many_chunks():
    deltas = large_deltas(3)
    found = same_bits_however_cut("consensus", deltas)
    total = (deltas[0] + deltas[1]) + deltas[2]
    needed = sum(np.abs(d) >= np.float32(0.4) * np.abs(total - d) for d in deltas)
    assert (found == np.where(needed >= 2, total, 0)).all()
    assert 0.1 < (found == 0).mean() < 0.9
