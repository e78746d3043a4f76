import numpy as np
import pytest
from hypothesis import given
from matrix_merges import (
    BACKENDS,
    gaussian,
    merge,
    polar,
    relative,
    rotation,
    seeds,
    sides,
    sketch_small,
    svd,
)

CTS = {"iso": {"variant": "cts"}}


def by_svd(*deltas):
    left, values, right = svd(np.sum(deltas, axis=0, dtype=np.float64))
    return values.mean() * left @ right


def cts_by_svd(*deltas, common_share=0.8):
    rank, models = min(deltas[0].shape), len(deltas)
    own = min(rank // models, round((rank - int(rank * common_share)) / models))
    common = rank - own * models
    left, values, right = svd(np.sum(deltas, axis=0, dtype=np.float64))
    lefts, all_values, rights = [left[:, :common]], [values[:common]], [right[:common]]
    for delta in deltas:
        outside = delta - lefts[0] @ (lefts[0].T @ delta)
        left, values, right = svd(outside)
        lefts.append(left[:, :own])
        all_values.append(values[:own])
        rights.append(right[:own])
    mean = np.concatenate(all_values).mean()
    return mean * polar(np.concatenate(lefts, axis=1)) @ polar(np.concatenate(rights, axis=0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    # The sum has singular values 6 and 2; their mean is 4.
    found = merge("iso", [[0, 1], [-2, 0]], [[0, 1], [-4, 0]], backend=backend)
    np.testing.assert_allclose(found, [[0, 4], [-4, 0]], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cts_by_hand(backend):
    # Two of four directions are common, 8 and 3 in the sum. One is left for each model: 2.5 for
    # the second, and none for the first, which has no change outside the common two.
    first, second = np.diag([4, 3, 0, 0]), np.diag([4, 0, 2.5, 1])
    stages = {"iso": {"variant": "cts", "common_share": 0.5}}
    found = merge("iso", first, second, stages=stages, backend=backend)
    mean = (8 + 3 + 2.5) / 3
    np.testing.assert_allclose(found, np.diag([mean, mean, mean, 0]), atol=1e-6)


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64), (200, 300)])
def test_as_by_svd(shape):
    deltas = [gaussian(*shape, seed=n) for n in range(3)]
    assert relative(merge("iso", *deltas), by_svd(*deltas)) < 1e-5


@pytest.mark.parametrize(
    ("shape", "common_share"),
    [((60, 90), 0.0), ((60, 90), 0.5), ((60, 90), 0.8), ((90, 60), 0.5), ((150, 200), 0.8)],
)
def test_cts_as_by_svd(shape, common_share):
    deltas = [gaussian(*shape, seed=n) for n in range(3)]
    stages = {"iso": {"variant": "cts", "common_share": common_share}}
    expected = cts_by_svd(*deltas, common_share=common_share)
    assert relative(merge("iso", *deltas, stages=stages), expected) < 1e-4


@pytest.mark.parametrize("sketches", [False, True])
def test_directions_that_are_not_there_stay_away(sketches, monkeypatch):
    if sketches:
        sketch_small(monkeypatch)
    # Rank 4 of 70: an SVD would make up the other 66.
    delta = gaussian(70, 4) @ gaussian(4, 90, seed=1)
    left, values, right = svd(delta)
    expected = values[:4].mean() * left[:, :4] @ right[:4]
    assert relative(merge("iso", delta), expected) < 1e-5
    assert relative(merge("iso", delta, stages=CTS), expected) < 1e-5


def test_small_singular_values_are_raised_exactly():
    left, _, right = svd(gaussian(60, 80))
    delta = ((left * np.geomspace(1, 1e-4, 60)) @ right).astype(np.float32)
    assert relative(merge("iso", delta), by_svd(delta)) < 1e-4


@given(sides, sides, seeds)
def test_all_common_is_the_variant_c(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    stages = {"iso": {"variant": "cts", "common_share": 1.0}}
    assert relative(merge("iso", *deltas, stages=stages), merge("iso", *deltas)) < 1e-4


@given(sides, sides, seeds)
def test_of_one_model_both_level_its_values(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    assert relative(merge("iso", delta), by_svd(delta)) < 1e-4
    assert relative(merge("iso", delta, stages=CTS), by_svd(delta)) < 1e-3


@given(sides, sides, seeds)
def test_turning_both_sides_turns_the_result(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    left, right = rotation(rows, seed), rotation(columns, seed + 1)
    values = svd(deltas[0] + deltas[1])[1]
    found = merge("iso", *(left @ delta @ right for delta in deltas))
    if values[-1] > 1e-2 * values[0]:
        assert relative(found, left @ merge("iso", *deltas).astype(np.float64) @ right) < 1e-3


@given(sides, sides, seeds)
def test_the_nuclear_norm_stays_and_all_values_are_equal(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    values = svd(merge("iso", *deltas))[1]
    expected = svd(deltas[0] + deltas[1])[1].mean()
    np.testing.assert_allclose(values, expected, rtol=1e-3)


def test_deltas_that_cancel_leave_what_is_their_own():
    delta = gaussian(6, 7)
    assert not merge("iso", delta, -delta).any()
    assert np.isfinite(merge("iso", delta, -delta, stages=CTS)).all()
