import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix_merges import BACKENDS, gaussian, merge, relative, seeds, sides

from dare import RecipeError


def fourier(delta, radius=0.1, **settings):
    return merge("fourier+sum", delta, stages={"fourier": {"radius": radius}}, **settings)


def by_full_transform(delta, radius):
    rows, columns = delta.shape
    down, across = 2 * np.fft.fftfreq(rows)[:, None], 2 * np.fft.fftfreq(columns)
    kept = down**2 + across**2 >= radius**2
    return np.fft.ifft2(np.fft.fft2(delta.astype(np.float64)) * kept).real


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    # The only frequency below 0.1 in so small a matrix is zero: the mean, 4.
    found = fourier([[1, 2, 3], [5, 6, 7]], backend=backend)
    np.testing.assert_allclose(found, [[-3, -2, -1], [1, 2, 3]], atol=1e-6)


def test_the_highest_frequency_passes_and_the_lower_does_not():
    checks = np.array([[1, -1, 1, -1], [-1, 1, -1, 1]], np.float32)
    waves = np.array([[1, 0, -1, 0], [1, 0, -1, 0]], np.float32)  # at half of the highest
    found = fourier(5 + checks + waves, 0.6)
    np.testing.assert_allclose(found, checks, atol=1e-6)
    np.testing.assert_allclose(fourier(5 + checks + waves, 0.5), checks + waves, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_radius_of_zero_is_the_delta_itself(backend):
    delta = gaussian(13, 8)
    assert (fourier(delta, 0.0, backend=backend) == delta).all()


@pytest.mark.parametrize("shape", [(60, 91), (91, 60), (2, 2), (3, 5), (700, 900)])
@pytest.mark.parametrize("radius", [0.05, 0.1, 0.7, 1.0])
def test_as_by_the_full_transform(shape, radius):
    delta = gaussian(*shape)
    expected = by_full_transform(delta, radius)
    np.testing.assert_allclose(fourier(delta, radius), expected, atol=1e-5)


@given(sides, sides, seeds, st.floats(0.05, 1))
def test_what_is_dropped_is_orthogonal_to_what_is_kept(rows, columns, seed, radius):
    delta = gaussian(rows, columns, seed=seed)
    kept = fourier(delta, radius).astype(np.float64)
    assert abs(((delta - kept) * kept).sum()) < 1e-4 * np.square(delta).sum()


@given(sides, sides, seeds, st.floats(0.05, 1))
def test_filtering_twice_is_filtering_once(rows, columns, seed, radius):
    once = fourier(gaussian(rows, columns, seed=seed), radius)
    np.testing.assert_allclose(fourier(once, radius), once, atol=1e-5)


@given(sides, sides, seeds)
def test_moving_all_elements_moves_the_result(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    moved = fourier(np.roll(delta, (1, 2), (0, 1)), 0.5)
    np.testing.assert_allclose(moved, np.roll(fourier(delta, 0.5), (1, 2), (0, 1)), atol=1e-5)


def test_filters_add_up():
    first, second = gaussian(40, 50), gaussian(40, 50, seed=1)
    expected = fourier(first).astype(np.float64) + fourier(second)
    found = merge("fourier+sum", first, second)
    assert relative(found, expected) < 1e-6


@pytest.mark.parametrize("radius", [-0.1, 1.1])
def test_radii_have_bounds(radius):
    with pytest.raises(RecipeError, match="radius"):
        fourier([[1]], radius)
