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


def by_svd(*deltas):
    rank = max(1, min(deltas[0].shape) // len(deltas))
    parts = [svd(delta) for delta in deltas]
    left = polar(np.concatenate([part[0][:, :rank] for part in parts], axis=1))
    right = polar(np.concatenate([part[2][:rank] for part in parts], axis=0))
    return (left * np.concatenate([part[1][:rank] for part in parts])) @ right


@pytest.mark.parametrize("backend", BACKENDS)
def test_orthogonal_shares_by_hand(backend):
    # One triple each: 3 at the upper left, 4 at the lower right. They do not touch.
    found = merge("tsv", [[3, 0], [0, 1]], [[2, 0], [0, 4]], backend=backend)
    np.testing.assert_allclose(found, [[3, 0], [0, 4]], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_directions_that_touch_are_turned_apart(backend):
    # Left vectors (1, 0) and (3, 4)/5: the nearest orthonormal pair is turned by half of what
    # the angle between them, arccos 3/5, lacks of 90°. Right vectors are orthonormal already.
    turned = (np.pi / 2 - np.arccos(0.6)) / 2
    first = np.array([np.cos(turned), -np.sin(turned)])
    second = np.array([np.sin(turned), np.cos(turned)])
    found = merge("tsv", [[2, 0], [0, 0]], [[0, 3], [0, 4]], backend=backend)
    np.testing.assert_allclose(found, np.stack([2 * first, 5 * second], axis=1), atol=1e-5)


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64), (200, 300)])
def test_as_by_svd(shape):
    deltas = [gaussian(*shape, seed=n) for n in range(3)]
    assert relative(merge("tsv", *deltas), by_svd(*deltas)) < 1e-4


def test_low_rank_deltas_as_by_svd(monkeypatch):
    sketch_small(monkeypatch)
    deltas = [gaussian(70, 5, seed=n) @ gaussian(5, 90, seed=9 - n) for n in range(3)]
    parts = [svd(delta) for delta in deltas]
    left = polar(np.concatenate([part[0][:, :5] for part in parts], axis=1))
    right = polar(np.concatenate([part[2][:5] for part in parts], axis=0))
    expected = (left * np.concatenate([part[1][:5] for part in parts])) @ right
    assert relative(merge("tsv", *deltas), expected) < 1e-5


@given(sides, sides, seeds)
def test_turning_both_sides_turns_the_result(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    left, right = rotation(rows, seed), rotation(columns, seed + 1)
    expected = left @ by_svd(*deltas) @ right
    found = merge("tsv", *(left @ delta @ right for delta in deltas))
    close_calls = [np.diff(svd(delta)[1]).max(initial=-1) for delta in deltas]
    if max(close_calls) < -0.05:  # singular values are apart, so that the cut is clear
        assert relative(found, expected) < 5e-3


@given(sides, sides, seeds)
def test_singular_values_are_those_of_the_shares(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    rank = min(rows, columns) // 2
    expected = np.sort(np.concatenate([svd(delta)[1][:rank] for delta in deltas]))[::-1]
    found = svd(merge("tsv", *deltas))[1]
    np.testing.assert_allclose(found[: 2 * rank], expected, rtol=1e-3)


def test_weights_multiply_deltas():
    deltas = [gaussian(8, 9, seed=n) for n in range(2)]
    found = merge("tsv", *deltas, weights=[0.5, -2])
    assert relative(found, by_svd(0.5 * deltas[0], -2 * deltas[1])) < 1e-5


def test_more_models_than_rank():
    deltas = [gaussian(2, 5, seed=n) for n in range(4)]
    assert relative(merge("tsv", *deltas), by_svd(*deltas)) < 1e-5
