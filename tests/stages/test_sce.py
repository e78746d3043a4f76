import numpy as np
import pytest
from combining import BACKENDS, combine, large_deltas, same_bits_however_cut

SELECTED = {"sce": {"select_ratio": 0.5}}


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda *deltas, **given: combine("sce", *deltas, backend=request.param, **given).tolist()


def test_models_weigh_as_their_squares_and_the_minority_is_erased(merged):
    # Squares 10 and 5: (⅔·3 + ⅓·1) / 1 where both agree; the second alone where the sum is -1.
    assert merged([3, 1], [1, -2]) == pytest.approx([7 / 3, -2], rel=1e-6)


def test_of_equal_variances_the_first_is_selected_and_only_it_weighs(merged):
    # Variances 4, 0, 4, 0: of two that are not 0 half is one. There the second model has nothing.
    assert merged([4, 1, 2, 0], [0, 1, -2, 0], stages=SELECTED) == [4, 0, 0, 0]


@pytest.mark.parametrize("deltas", [[[1, 2]], [[1, 2], [1, 2]], [[1, 2], [1, 5]]])
def test_what_is_not_selected_leaves_the_base(merged, deltas):
    assert merged(*deltas, base=[3, 4], stages=SELECTED) == [3, 4]


def test_small_changes_weigh_the_same(merged):
    assert merged([3e-4], [1e-4]) == pytest.approx([2e-4], rel=1e-6)


def test_a_sum_of_zero_is_plus(merged):
    assert merged([1], [-1]) == [1]


def test_a_nan_stays_where_it_is(merged):
    assert merged([np.nan, 1], [1, 1])[1] == 1
    assert np.isnan(merged([np.nan, 1], [1, 1])[0])
    assert np.isnan(merged([np.nan, 1], [1, 2], stages=SELECTED)[0])


def test_what_earlier_stages_have_scaled(merged):
    stages = {"dare": {"drop_rate": 0.5}}
    deltas = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    changed = [combine("dare+sum", d, stages=stages, seed=42 + i) for i, d in enumerate(deltas)]
    assert merged(*changed, stages=SELECTED) == pytest.approx(
        combine("dare+sce", *deltas, stages={**stages, **SELECTED}), rel=1e-6
    )


def test_over_many_chunks():
    deltas = np.round(np.array(large_deltas(4)))  # many equals, at the cut too; sums are exact
    found = same_bits_however_cut("sce", deltas, stages=SELECTED).reshape(-1)
    flat = deltas.reshape(4, -1).astype(np.float64)
    variance = flat.var(axis=0).astype(np.float32)
    order = np.argsort(-variance, kind="stable")
    kept = np.zeros_like(flat)
    chosen = order[: int(0.5 * np.count_nonzero(variance))]
    kept[:, chosen] = flat[:, chosen]
    weights = np.square(kept).sum(axis=1, keepdims=True)
    weights /= weights.sum()
    agree = np.sign(kept) == np.where(kept.sum(axis=0) >= 0, 1, -1)
    divisor = np.maximum((weights * agree).sum(axis=0), 1e-6)
    assert np.abs(found - (weights * agree * kept).sum(axis=0) / divisor).max() < 1e-5
