import numpy as np
import pytest
from combining import BACKENDS, combine, large_deltas, same_bits_however_cut


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


def test_over_many_chunks():
    deltas = large_deltas(3)
    found = same_bits_however_cut("emr", deltas)
    total = (deltas[0] + deltas[1]) + deltas[2]
    expected = np.where(total > 0, np.max(deltas, axis=0), np.min(deltas, axis=0))
    assert (found == expected).all()
