import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from matrix_merges import BACKENDS, gaussian, merge, relative, seeds, sides, sketch_small, svd

import dare


def by_svd(merged, deltas, alpha=None, rank=None):
    least = 1 / len(deltas) if alpha is None else alpha
    left, values, right = svd(merged)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    counted = np.zeros(len(values))
    for along in (left.T @ np.asarray(delta, np.float64) for delta in deltas):
        overlap = values * (along * right).sum(axis=1) / np.square(along).sum(axis=1)
        counted += np.maximum(least, overlap)
    return (left * (values * len(deltas) / counted)) @ right


def diagonal(*values):
    return np.diag(np.array(values, np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("method", "alpha", "expected"),
    [
        # The mean is (4, 1, 2). Both models have the first direction, once each: 4. Only the second
        # has the next, of which the mean holds half: 1 · 2 / (½ + ½). Of the last it holds 1/3 of
        # what the first has, and -1 times what the second has, and both count as ½.
        ("linear", None, (4, 2, 4)),
        ("linear", 1.0, (4, 1, 2)),
        # The sum is (8, 2, 4): 8 · 2 / (2 + 2), 2 · 2 / (½ + 1), 4 · 2 / (2/3 + ½).
        ("sum", None, (4, 8 / 3, 48 / 7)),
        # Of what agrees the mean is (4, 2, 6): 4, 2 · 2 / (½ + 1), 6 · 2 / (1 + ½).
        ("ties", None, (4, 8 / 3, 8)),
    ],
)
def test_by_hand(method, alpha, expected, backend):
    deltas = diagonal(4, 0, 6), diagonal(4, 2, -2)
    stages = {} if alpha is None else {"svc": {"alpha": alpha}}
    found = merge(f"{method}+svc", *deltas, stages=stages, backend=backend)
    np.testing.assert_allclose(found, diagonal(*expected), atol=1e-6)


@pytest.mark.parametrize("alpha", [None, 1.0, 0.1])
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        *((method, (60, 90)) for method in ("sum", "ties", "tsv")),
        *(("linear", shape) for shape in ((90, 60), (64, 64), (400, 500))),
    ],
)
def test_as_by_svd(method, shape, alpha):
    deltas = [gaussian(*shape) + gaussian(*shape, seed=n) for n in (1, 2, 3)]
    stages = {} if alpha is None else {"svc": {"alpha": alpha}}
    expected = by_svd(merge(method, *deltas), deltas, alpha)
    assert relative(merge(f"{method}+svc", *deltas, stages=stages), expected) < 1e-5


def test_low_rank_deltas_as_by_svd(monkeypatch):
    sketch_small(monkeypatch)
    deltas = [gaussian(70, 5, seed=n) @ gaussian(5, 90, seed=9 - n) for n in range(3)]
    expected = by_svd(sum(deltas), deltas, rank=15)
    assert relative(merge("sum+svc", *deltas), expected) < 1e-5


# ---------------------------------------------------------------- weights


def test_weights_keep_their_proportion():
    # The mean is (3, 1), and twice the weights are 3/2 and 1/2: (6, 0) and (0, 2) count, of each of
    # which the mean holds half.
    found = merge("linear+svc", diagonal(4, 0), diagonal(0, 4), weights=[0.75, 0.25])
    np.testing.assert_allclose(found, diagonal(6, 2), atol=1e-6)


def test_a_negative_weight_turns_its_model():
    found = merge("sum+svc", diagonal(4, 0), diagonal(0, 2), weights=[1.0, -1.0])
    np.testing.assert_allclose(found, diagonal(16 / 3, -8 / 3), atol=1e-6)


def test_a_model_of_weight_zero_does_not_count():
    deltas = [gaussian(7, 5, seed=n) for n in range(3)]
    found = merge("sum+svc", *deltas, weights=[1.0, 1.0, 0.0])
    np.testing.assert_array_equal(found, merge("sum+svc", *deltas[:2]))
    assert not merge("sum+svc", *deltas, weights=[0.0, 0.0, 0.0]).any()


def test_a_factor_on_all_weights_is_undone_where_models_overlap():
    deltas = [diagonal(3, 1), diagonal(3, 2)]
    for weight in (1.0, 5.0):
        found = merge("sum+svc", *deltas, weights=[weight] * 2)
        np.testing.assert_allclose(found, diagonal(3, 4 / 3), atol=1e-6)  # 3 · 2 / (3 + 3/2)


@given(sides, sides, seeds)
def test_one_matrix_is_itself_whatever_its_weight_below_one(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    assert relative(merge("sum+svc", delta, weights=[0.5]), delta / 2) < 1e-6


def test_one_model_is_given_back_bit_for_bit():
    base = {"w": gaussian(30, 20).astype(ml_dtypes.bfloat16)}
    model = {"w": gaussian(30, 20, seed=1).astype(ml_dtypes.bfloat16)}
    for method in ("linear+svc", "sum+svc"):
        merged, _ = dare.merge_arrays(base, [model], method=method, verbose=False)
        assert merged["w"].tobytes() == model["w"].tobytes()


@given(sides, sides, seeds)
def test_equal_models_are_one(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    for method in ("linear+svc", "sum+svc"):
        assert relative(merge(method, delta, delta, delta), delta) < 1e-5


@pytest.mark.parametrize("factor", [1e-12, 1e9])
def test_scaled_deltas_are_scaled_results(factor):
    deltas = [gaussian(8, 9, seed=n) for n in range(3)]
    found = merge("linear+svc", *(np.float32(factor) * delta for delta in deltas))
    assert relative(found / factor, merge("linear+svc", *deltas)) < 1e-5
