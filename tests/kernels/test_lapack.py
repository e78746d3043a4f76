"""Leading eigenvectors, by LAPACK's own steps and without them."""

import numpy as np
import pytest

from dare.kernels import lapack, linalg


def gram(size, kind, rank=None):
    rows = np.random.default_rng(size).standard_normal((size, rank or 2 * size))
    return (rows @ rows.T).astype(kind)


@pytest.fixture(params=["lapack", "numpy"])
def library(request, monkeypatch):
    """Find LAPACK's functions, or none, as where NumPy has another library."""
    if request.param == "numpy":
        monkeypatch.setattr(lapack, "FORMS", ())
        lapack._find.cache_clear()
    yield request.param
    lapack._find.cache_clear()


@pytest.mark.parametrize(("kind", "near"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize("size", [1, 3, 90])
@pytest.mark.parametrize("wanted", [0, 1, 0.3, 1.0, None])
def test_the_largest_values_with_their_vectors(size, wanted, kind, near, library):
    symmetric = gram(size, kind)
    count = round(wanted * size) if isinstance(wanted, float) else wanted
    expected = np.linalg.eigvalsh(symmetric.astype(np.float64))[::-1][:count]
    seen = []
    asked = (
        [count] if count is None else [count, lambda all_values: seen.append(all_values) or count]
    )
    for asking in asked:
        values, vectors = linalg.falling_eigen(symmetric, asking)
        np.testing.assert_allclose(values, expected, atol=near * symmetric.trace())
        assert vectors.shape == (size, len(expected))
        assert (
            np.abs(symmetric @ vectors - vectors * values).max(initial=0) < near * symmetric.trace()
        )
        assert np.abs(vectors.T @ vectors - np.eye(len(expected))).max(initial=0) < 50 * near
    assert all((np.diff(values) <= 0).all() and len(values) == size for values in seen)
    assert library == "numpy" or count is None or lapack._find("ssytrd")


def test_a_matrix_without_a_solution_is_left_to_numpy(monkeypatch):
    def fail(name, *_arguments):
        raise lapack.LapackError(name)

    monkeypatch.setattr(lapack, "_call", fail)
    symmetric = gram(30, np.float32)
    values, vectors = linalg.falling_eigen(symmetric, 4)
    assert np.abs(symmetric @ vectors - vectors * values).max() < 1e-4 * values[0]


def test_a_missing_rank_is_seen_in_the_values():
    values, vectors = linalg.falling_eigen(
        gram(60, np.float64, rank=20), lambda v: int((v > 1e-9).sum())
    )
    assert vectors.shape == (60, 20)
    assert len(values) == 20
