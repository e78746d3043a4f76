import numpy as np
import pytest
from hypothesis import given
from matrix_merges import BACKENDS, gaussian, merge, relative, rotation, seeds, sides, svd


def knots(*deltas, keep_ratio=1.0, **settings):
    return merge("knots", *deltas, stages={"knots": {"keep_ratio": keep_ratio}}, **settings)


def low_rank(rows, columns, seed, rank=3):
    return gaussian(rows, rank, seed=seed) @ gaussian(rank, columns, seed=seed + 100)


def by_svd(*deltas, keep_ratio=1.0):
    """With TIES as one writes it down."""
    left, values, right = svd(np.concatenate(deltas, axis=1))
    rank = int(np.count_nonzero(values > 1e-6 * values[0]))
    parts = np.stack(np.split(right[:rank], len(deltas), axis=1))
    for part in parts:
        kept = max(1, int(keep_ratio * part.size))
        part[np.abs(part) < np.sort(np.abs(part), axis=None)[-kept]] = 0
    agrees = np.sign(parts) == np.sign(parts.sum(axis=0))
    merged = (parts * agrees).sum(axis=0) / np.maximum((agrees & (parts != 0)).sum(axis=0), 1)
    return (left[:, :rank] * values[:rank]) @ merged


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    # The models' changes all lie along (0.6, 0.8), with right parts (5, 0, 10) and (10, -5, -5);
    # of those the mean of 5 and 10, then -5 alone, then 10, which outweighs 5.
    direction = np.array([[0.6], [0.8]])
    first, second = direction * [5, 0, 10], direction * [10, -5, -5]
    found = knots(first, second, backend=backend)
    np.testing.assert_allclose(found, direction * [7.5, -5, 10], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_trimming_by_hand(backend):
    direction = np.array([[0.6], [0.8]])
    first, second = direction * [5, 0, 10], direction * [20, -5, -5]
    found = knots(first, second, keep_ratio=0.4, backend=backend)  # one of three is kept
    np.testing.assert_allclose(found, direction * [20, 0, 10], rtol=1e-5, atol=1e-6)


def test_weights_vote_and_divide():
    direction = np.array([[0.6], [0.8]])
    first, second = direction * [5, 1], direction * [10, -2]
    found = knots(first, second, weights=[3, 1])
    np.testing.assert_allclose(found, direction * [(3 * 5 + 10) / 4, 1], rtol=1e-5)


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (128, 150)])
@pytest.mark.parametrize("keep_ratio", [0.2, 1.0])
def test_as_by_svd(shape, keep_ratio):
    deltas = [low_rank(*shape, seed=n) for n in range(3)]
    expected = by_svd(*deltas, keep_ratio=keep_ratio)
    assert relative(knots(*deltas, keep_ratio=keep_ratio), expected) < 1e-4


@given(sides, sides, seeds)
def test_equal_models_are_that_model(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    assert relative(knots(delta, delta, delta), delta) < 1e-5


@given(sides, sides, seeds)
def test_turning_the_outputs_turns_the_result(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    values = svd(np.concatenate(deltas, axis=1))[1]
    left = rotation(rows, seed)
    found = knots(*(left @ delta for delta in deltas))
    if np.diff(values).max(initial=-1) < -0.1:  # the directions are unique
        aligned = left @ knots(*deltas).astype(np.float64)
        assert relative(found, aligned) < 1e-2
