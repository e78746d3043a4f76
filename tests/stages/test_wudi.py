import numpy as np
import pytest
from hypothesis import given
from matrix_merges import BACKENDS, gaussian, merge, relative, seeds, sides


def wudi(*deltas, steps=20, rate=0.01, **settings):
    stages = {"wudi": {"steps": steps, "rate": rate}}
    return merge("wudi", *deltas, stages=stages, **settings)


def interference(merged, deltas):
    return sum(
        np.square((merged - delta) @ delta.T).sum() / np.square(delta).sum() for delta in deltas
    )


def by_adam(deltas, steps, rate):
    """As one writes it down, in float64."""
    deltas = [np.asarray(delta, np.float64) for delta in deltas]
    merged = np.sum(deltas, axis=0)
    first, second = np.zeros_like(merged), np.zeros_like(merged)
    for step in range(1, steps + 1):
        gradient = sum(2 * (merged - d) @ (d.T @ d) / np.square(d).sum() for d in deltas)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        size = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        merged = merged - rate * first / (1 - 0.9**step) / size
    return merged


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_by_hand(backend):
    # Adam's first step is by the rate, against the slope. Both models have changed the first
    # column, so it is too large in the sum (3 and 5 of their sum, 8); nothing else is touched.
    first, second = [[3, 0], [0, 0]], [[5, 0], [0, 0]]
    found = wudi(first, second, steps=1, rate=0.25, backend=backend)
    np.testing.assert_allclose(found, [[7.75, 0], [0, 0]], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_step_is_the_sum(backend):
    deltas = [gaussian(5, 7, seed=n) for n in range(3)]
    found = wudi(*deltas, steps=0, backend=backend)
    assert (found == deltas[0] + deltas[1] + deltas[2]).all()


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (300, 20), (20, 300)])
def test_as_one_writes_it_down(shape):
    deltas = [gaussian(*shape, seed=n) for n in range(3)]
    expected = by_adam(deltas, 30, 0.01)
    assert relative(wudi(*deltas, steps=30), expected) < 1e-5


def test_a_tensor_of_several_chunks_as_one_writes_it_down():
    deltas = [gaussian(8200, 64, seed=n) for n in range(2)]
    assert relative(wudi(*deltas, steps=3), by_adam(deltas, 3, 0.01)) < 1e-5


@given(sides, sides, seeds)
def test_models_that_do_not_meet_are_added(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    first, second = np.hstack([delta, 0 * delta]), np.hstack([0 * delta, delta])
    assert (wudi(first, second) == first + second).all()


@given(sides, sides, seeds)
def test_many_steps_reach_the_least_interference(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n).astype(np.float64) for n in (1, 2)]
    before = interference(deltas[0] + deltas[1], deltas)
    after = interference(wudi(*deltas, steps=100).astype(np.float64), deltas)
    assert after < before


def test_weights_multiply_deltas():
    deltas = [gaussian(8, 9, seed=n) for n in range(2)]
    found = wudi(*deltas, weights=[0.5, -2])
    assert relative(found, by_adam([0.5 * deltas[0], -2 * deltas[1]], 20, 0.01)) < 1e-5
