import numpy as np
import pytest
from hypothesis import given
from matrix_merges import BACKENDS, gaussian, merge, relative, seeds, sides

SHAPES = [(40, 60), (60, 40), (20, 70)]


def interference(merged, deltas):
    return sum(
        np.square((merged - delta) @ delta.T).sum() / np.square(delta).sum() for delta in deltas
    )


def by_eigen(deltas, time=1300.0, rank_share=0.65):
    """As one writes it down, in float64; directions that no model has left out."""
    deltas = [np.asarray(delta, np.float64) for delta in deltas]
    shares = [1 / np.square(delta).sum() if delta.any() else 0.0 for delta in deltas]
    curvature = sum(share * d.T @ d for d, share in zip(deltas, shares, strict=True))
    aim = sum(share * d @ d.T @ d for d, share in zip(deltas, shares, strict=True))
    energies, vectors = np.linalg.eigh(curvature)
    held = energies > 1e-12 * energies[-1]
    energies, vectors = energies[held][::-1], vectors[:, held][:, ::-1]
    is_kept = np.arange(len(energies)) < np.ceil(rank_share * len(curvature))
    filters = np.where(is_kept, 1 - np.exp(-energies * time), 0)
    total = np.sum(deltas, axis=0)
    kept = total - total @ (vectors * filters) @ vectors.T
    return kept + aim @ (vectors * filters / energies) @ vectors.T


def kinds(rows, columns):
    """Random, falling, of low rank, nearly equal, equal, one of them nothing, a single one."""
    draws = [gaussian(rows, columns, seed=n) for n in range(3)]
    left, _, right = np.linalg.svd(draws[0], full_matrices=False)
    falling = (left * np.geomspace(1, 1e-3, min(rows, columns))) @ right
    low = [gaussian(rows, 4, seed=n) @ gaussian(4, columns, seed=n + 9) for n in range(3)]
    near = [draws[0] + 1e-3 * draw for draw in draws]
    return {
        "random": draws,
        "falling": [falling, draws[1] @ np.diag(np.geomspace(1, 1e-3, columns))],
        "low rank": low,
        "nearly equal": near,
        "equal": [draws[0]] * 3,
        "one is nothing": [draws[0], np.zeros((rows, columns)), draws[1]],
        "a single one": draws[:1],
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    # Both have all of their change in one column, the first: C is 2 there and 0 elsewhere. D is
    # 3·9/9 + 5·25/25 = 8 and θ·C is 8·2 = 16; (8 - 16)/2 = -4 is added to 8.
    found = merge("swudi", [[3, 0], [0, 0]], [[5, 0], [0, 0]], backend=backend)
    np.testing.assert_allclose(found, [[4, 0], [0, 0]], atol=1e-6)


def test_time_and_share_by_hand():
    # τ = diag(2, 1) twice: λ = 2·(4/5, 1/5), and θ = 2τ is to become τ.
    stages = {"swudi": {"time": 1.0, "rank_share": 0.5}}
    delta = np.diag([2.0, 1.0])
    found = merge("swudi", delta, delta, stages=stages)
    np.testing.assert_allclose(found, np.diag([2 + 2 * np.exp(-1.6), 2]), rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", kinds(8, 8))
def test_as_one_writes_it_down(shape, kind):
    deltas = kinds(*shape)[kind]
    assert relative(merge("swudi", *deltas), by_eigen(deltas)) < 1e-5
    stages = {"swudi": {"time": 30.0, "rank_share": 0.3}}
    assert relative(merge("swudi", *deltas, stages=stages), by_eigen(deltas, 30, 0.3)) < 1e-5


@pytest.mark.parametrize("shape", [(400, 450), (450, 400)])
def test_in_single_precision(shape):
    deltas = [gaussian(*shape, seed=n) for n in range(2)]
    assert relative(merge("swudi", *deltas), by_eigen(deltas)) < 1e-4


@given(sides, sides, seeds)
def test_models_that_do_not_meet_are_added(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    first, second = np.hstack([delta, 0 * delta]), np.hstack([0 * delta, delta])
    assert relative(merge("swudi", first, second), first + second) < 1e-5


def test_interference_is_less_than_in_the_sum():
    deltas = [1e-3 * gaussian(64, 64, seed=n) for n in range(4)]
    found = {
        "all": merge("swudi", *deltas, stages={"swudi": {"rank_share": 1.0}}),
        "usual": merge("swudi", *deltas),  # leaves 35 % of directions as they are in the sum
        "sum": np.sum(deltas, axis=0),
    }
    scores = [interference(each.astype(np.float64), deltas) for each in found.values()]
    assert scores == sorted(scores)


def test_weights_multiply_deltas():
    deltas = [gaussian(8, 9, seed=n) for n in range(2)]
    expected = by_eigen([0.5 * deltas[0], -2 * deltas[1]])
    assert relative(merge("swudi", *deltas, weights=[0.5, -2]), expected) < 1e-5
