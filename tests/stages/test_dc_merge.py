import numpy as np
import pytest
from hypothesis import given
from matrix_merges import BACKENDS, gaussian, merge, relative, seeds, sides, svd


def dc(*deltas, keep_ratio=0.1, max_ratio=None, **settings):
    stages = {"dc_merge": {"keep_ratio": keep_ratio, "max_ratio": max_ratio}}
    return merge("dc_merge", *deltas, stages=stages, **settings)


def present(matrix):
    left, values, right = svd(matrix)
    count = np.count_nonzero(values > 1e-6 * values[0])
    return left[:, :count], values[:count], right[:count]


def by_svd(*deltas, keep_ratio=0.1, max_ratio=None):
    """As one writes it down, in float64."""
    share = max(1, min(deltas[0].shape) // len(deltas))
    lefts, rights, parts = [], [], []
    for delta in deltas:
        left, values, right = present(delta)
        left, values, right = left[:, :share], values[:share], right[:share]
        if max_ratio is not None and values.size:
            line = np.linspace(min(max_ratio, values[0] / values[-1]), 1, len(values))
            values = line / line.sum() * values.sum()
        lefts.append(left)
        rights.append(right)
        parts.append((left * values) @ right)
    outputs, _, turn = present(np.concatenate(lefts, axis=1))
    outputs = outputs @ turn
    turn, _, inputs = present(np.concatenate(rights, axis=0))
    inputs = turn @ inputs
    aligned = np.stack([outputs.T @ part @ inputs.T for part in parts])
    kept = max(1, int(keep_ratio * aligned[0].size))
    for each in aligned:
        each[np.abs(each) < (1 - 1e-9) * np.sort(np.abs(each), axis=None)[-kept]] = 0
    agrees = np.sign(aligned) == np.sign(aligned.sum(axis=0))
    merged = (aligned * agrees).sum(axis=0) / np.maximum((agrees & (aligned != 0)).sum(axis=0), 1)
    owner = np.repeat(np.arange(len(lefts)), [left.shape[1] for left in lefts])
    return outputs @ (merged * (owner[:, None] == owner)) @ inputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_at_right_angles_by_hand(backend):
    first, second = np.diag([4, 3, 0, 0]), np.diag([0, 0, 2, 1])
    both = dc(first, second, keep_ratio=2 / 16, backend=backend)
    np.testing.assert_allclose(both, first + second, atol=1e-6)
    found = dc(first, second, keep_ratio=1 / 16, backend=backend)
    np.testing.assert_allclose(found, np.diag([4, 0, 2, 0]), atol=1e-6)


def test_directions_that_meet_by_hand():
    # Left vectors (1, 0) and (0.6, 0.8) become (3, -1)/√10 and (1, 3)/√10; the right ones stay.
    # Of 4 and 2 the part 3/√10 is along each model's own, and what lies across is left out.
    found = dc([[4, 0], [0, 0]], np.outer([0.6, 0.8], [0, 2]), keep_ratio=1.0)
    np.testing.assert_allclose(found, [[3.6, 0.6], [-1.2, 1.8]], rtol=1e-5)


@pytest.mark.parametrize(("size", "elected"), [(2, (1.9, 1.1)), (-2, (3.6, -1.8))])
def test_votes_by_hand(size, elected):
    # Now right vectors are the same as left ones: each model has 9/10 of its value along its own
    # direction, and 1/10 along the other's, where the larger sign wins.
    direction = np.array([0.6, 0.8])
    found = dc([[4, 0], [0, 0]], size * np.outer(direction, direction), keep_ratio=1.0)
    turned = np.array([[3, 1], [-1, 3]]) / np.sqrt(10)
    np.testing.assert_allclose(found, turned * elected @ turned.T, rtol=1e-5)


@pytest.mark.parametrize(
    ("max_ratio", "expected"),
    [(None, (6, 2)), (1.0, (4, 4)), (2.0, (16 / 3, 8 / 3)), (9.0, (6, 2))],
)
def test_smoothing_by_hand(max_ratio, expected):
    found = dc(np.diag([6, 2]), keep_ratio=1.0, max_ratio=max_ratio)
    np.testing.assert_allclose(found, np.diag(expected), atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
@pytest.mark.parametrize("max_ratio", [None, 5.0])
@pytest.mark.parametrize("rank", [None, 6])
def test_as_by_svd(shape, max_ratio, rank):
    deltas = [gaussian(*shape, seed=n) for n in range(3)]
    if rank:
        deltas = [gaussian(shape[0], rank, seed=n) @ delta[:rank] for n, delta in enumerate(deltas)]
    deltas[2] *= 0 if rank else 1
    for keep_ratio in (0.001, 0.1, 1.0):
        expected = by_svd(*deltas, keep_ratio=keep_ratio, max_ratio=max_ratio)
        assert relative(dc(*deltas, keep_ratio=keep_ratio, max_ratio=max_ratio), expected) < 1e-5


def test_in_single_precision():
    deltas = [gaussian(400, 450, seed=n) for n in range(2)]
    assert relative(dc(*deltas), by_svd(*deltas)) < 1e-4


@given(sides, sides, seeds)
def test_one_model_is_itself_and_equal_ones_their_first_directions(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    assert relative(dc(delta, keep_ratio=1.0), delta) < 1e-5
    left, values, right = svd(delta)
    half = max(1, min(rows, columns) // 2)
    if half == len(values) or values[half] < 0.9 * values[half - 1]:
        expected = (left[:, :half] * values[:half]) @ right[:half]
        # Each of two equal directions gets half of both models' votes.
        assert relative(dc(delta, delta, keep_ratio=1.0), expected / 2) < 1e-4
