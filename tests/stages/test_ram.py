import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda method, *deltas, **given: combine(
        method, *deltas, backend=request.param, **given
    ).tolist()


def test_what_one_has_changed_is_kept_and_what_two_have_is_averaged(merged):
    assert merged("ram", [1, 2, 0, 1e-6], [3, 0, 0, -1e-5]) == [2, 2, 0, 0]
    assert merged("ram", [1, 4], [3, 1], stages={"ram": {"threshold": 1}}) == [3, 4]


def test_what_is_a_models_own_grows_with_what_it_shares(merged):
    # The first shares one and has two of its own: 1 + ½·½. The second: 1/1, of which ¾ count.
    stages = {"ramplus": {"boost": 0.5, "most": 0.75}}
    assert merged("ramplus", [4, 2, -8, 0], [2, 0, 0, 8], stages=stages) == [3, 2.5, -10, 11]


def test_shared_changes_alone_have_no_factor(merged):
    assert merged("ramplus", [4, 2], [2, 6]) == [3, 4]
    assert merged("ramplus", [4, 0], [0, 6]) == [4, 6]


@pytest.mark.parametrize("method", ["ram", "ramplus"])
def test_a_nan_is_a_change(merged, method):
    found = merged(method, [np.nan, 1], [0, 3])
    assert np.isnan(found[0])
    assert found[1] == 2


@given(few_deltas())
def test_without_a_boost_the_two_are_one(deltas):
    found = combine("ramplus", *deltas, stages={"ramplus": {"boost": 0.0}})
    assert (found == combine("ram", *deltas)).all()


def test_over_many_chunks():
    deltas = np.array(large_deltas(2))
    deltas[np.abs(deltas) < 1] = 0
    stages = {"ramplus": {"boost": 1.0, "most": 10.0}}
    found = same_bits_however_cut("ramplus", deltas, stages=stages)
    changed = deltas != 0
    shared = changed.all(axis=0)
    factors = [1 + shared.sum() / (own & ~shared).sum() for own in changed]
    expected = np.where(
        shared, deltas.mean(axis=0), deltas[0] * factors[0] + deltas[1] * factors[1]
    )
    assert np.abs(found - expected).max() < 1e-5
