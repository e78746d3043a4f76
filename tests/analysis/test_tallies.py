"""The statistics of one tensor: by hand, beside NumPy and SciPy, and without outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_up import statistics

from dare import analyze_arrays
from dare.analysis.results import Histogram, Quantiles
from dare.checks.dropping import BIN_SHIFT, NO_MAGNITUDES, Magnitudes, bin_edge, top_bin

SHARES = (0.01, 0.05, 0.5, 0.95, 0.99)


def quantiles(values):
    return np.quantile(np.abs(values.astype(np.float64)), SHARES, method="inverted_cdf")


def as_tuple(found: Quantiles):
    return (found.p1, found.p5, found.p50, found.p95, found.p99)


def test_statistics_by_hand():
    found = statistics([3, 0, -4, 0, 1, np.nan, np.inf], base=[4, 0, 0, 0, 0, 0, 0])
    assert (found.elements, found.zeros, found.not_finite) == (7, 2, 2)
    assert found.mean == 0
    assert found.std == pytest.approx(math.sqrt(26 / 5))
    assert found.mean_magnitude == pytest.approx(8 / 5)
    assert (found.smallest, found.largest) == (1, 4)
    assert found.norm == pytest.approx(math.sqrt(26))
    assert (found.base_norm, found.relative_norm) == (4, pytest.approx(math.sqrt(26) / 4))
    assert found.base_product == 12
    assert found.excess_kurtosis == pytest.approx((81 + 256 + 1) / 5 / (26 / 5) ** 2 - 3)
    assert as_tuple(found.quantiles) == (0, 0, 1.001953125, 4, 4)  # the middle of 1's bin
    assert found.negligible == pytest.approx(2 / 5)
    assert found.histogram == Histogram(0, (1, 1, 1))
    assert found.sparsity == 2 / 7


def test_nothing():
    found = statistics([])
    assert (found.elements, found.mean, found.std, found.largest, found.smallest) == (0, 0, 0, 0, 0)
    assert as_tuple(found.quantiles) == (0, 0, 0, 0, 0)
    assert (found.negligible, found.excess_kurtosis, found.sparsity) == (0, 0, 0)
    assert (found.relative_norm, found.histogram) == (0, Histogram(0, ()))
    found = statistics(np.zeros(9))
    assert (found.zeros, found.negligible, found.norm) == (9, 1, 0)
    found = statistics([np.nan, -np.inf])
    assert (found.elements, found.not_finite, found.zeros, found.largest) == (2, 2, 0, 0)
    found = statistics(np.full(1000, 1e-3))
    assert (found.std, found.excess_kurtosis) == (0, 0)
    assert found.mean == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("distribution", "kurtosis"),
    [(scipy.stats.norm, 0), (scipy.stats.laplace, 3), (scipy.stats.uniform(-1, 2), -1.2)],
)
def test_statistics_are_numpys_and_scipys(distribution, kurtosis):
    values = (1e-3 * distribution.rvs(size=200_000, random_state=1)).astype(np.float32)
    full = statistics(values)
    assert full.excess_kurtosis == pytest.approx(kurtosis, abs=0.15)
    values[::7] = 0
    found, wide = statistics(values), values.astype(np.float64)
    assert found.mean == pytest.approx(wide.mean(), rel=1e-6, abs=1e-12)
    assert found.std == pytest.approx(wide.std(), rel=1e-6)
    assert found.excess_kurtosis == pytest.approx(scipy.stats.kurtosis(wide), rel=1e-4, abs=1e-4)
    under = np.mean(np.abs(wide) < 0.01 * np.abs(wide).max())
    assert found.negligible == pytest.approx(under, abs=1e-4)


finite = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)


@settings(max_examples=40)
@given(arrays(np.float32, st.integers(1, 60), elements=finite))
def test_quantiles_are_numpys(values):
    found = as_tuple(statistics(values).quantiles)
    np.testing.assert_allclose(found, quantiles(values), rtol=0.002)


def test_the_histogram_counts_octaves():
    values = np.array([0.25, 0.3, -0.49, 1, 1.99, 4], np.float32)
    assert statistics(values).histogram == Histogram(-2, (3, 0, 2, 0, 1))
    tiny = np.array([1e-45, 1e-39, 2e-38], np.float32)  # the first two are not normal
    assert statistics(tiny).histogram == Histogram(-127, (2, 1))


# ---------------------------------------------------------------- magnitudes in bins


def test_the_top_by_hand():
    magnitudes = Magnitudes.of(np.arange(1, 101, dtype=np.float32))
    tops = [float(bin_edge(top_bin(magnitudes, count))) for count in (1, 3, 1000)]
    assert tops == [100, 98, 1]


def test_all_bins_are_below_their_neighbours_and_as_wide_as_promised():
    edges = bin_edge(np.arange(256, 0x7F80))  # normal numbers below the last octave
    widths = np.diff(edges) / edges[:-1]
    assert widths.min() > 0
    assert widths.max() <= 2**-8


def test_sets_with_nothing_in_common():
    low, high = Magnitudes(3, np.array([1, 2])), Magnitudes(10, np.array([4]))
    both = low + high
    assert (both.first, both.counts.tolist()) == (3, [1, 2, 0, 0, 0, 0, 0, 4])
    assert (low + NO_MAGNITUDES) is low
    assert (NO_MAGNITUDES + high) is high


@given(arrays(np.float32, st.integers(0, 80), elements=st.floats(width=32)))
def test_magnitudes_are_counted_by_their_leading_bits(values):
    values[np.abs(values) < 2.0**-100] = 0
    counted = Magnitudes.of(values)
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    bins, counts = np.unique(sizes.view(np.uint32) >> np.uint32(BIN_SHIFT), return_counts=True)
    places = np.flatnonzero(counted.counts)
    assert (counted.first + places).tolist() == bins.tolist()
    assert counted.counts[places].tolist() == counts.tolist()


# ---------------------------------------------------------------- without outliers


def inliers(values, base=0.0):
    return statistics(values, base).inliers


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ([2.0, -2.0, 2.0, -2.0], 1.0),  # all alike
        ([5.0, -5.0, 0.0, 0.0], 2.0),  # half of them
        ([5.0] + 15 * [0.0], 16.0),  # one is all
        ([0.0, 0.0, 0.0, 0.0], 0.0),
    ],
)
def test_concentration_by_hand(delta, expected):
    assert inliers(delta).concentration == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "concentration"), [("uniform", 1.8), ("standard_normal", 3.0), ("laplace", 6.0)]
)
def test_usual_distributions_have_no_outliers(kind, concentration):
    values = getattr(np.random.default_rng(0), kind)(size=400_000).astype(np.float32)
    found, wide = inliers(values), values.astype(np.float64)
    assert found.outliers == 0
    assert found.norm == pytest.approx(np.linalg.norm(wide))
    assert found.mean_magnitude == pytest.approx(np.abs(wide).mean())
    assert found.largest == np.abs(values).max()
    assert found.concentration == pytest.approx(concentration, rel=0.03)


@pytest.mark.parametrize("density", [1.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 5.0, 1e4, 3e38])
@pytest.mark.parametrize("count", [1, 262])
def test_what_is_left_without_outliers_is_what_was_there_before(count, size, density):
    generator = np.random.default_rng(0)
    values = generator.normal(0, 1e-3, 512 * 512) * (generator.random(512 * 512) < density)
    plain = inliers(values)
    values[generator.choice(values.size, count, replace=False)] = size
    found = inliers(values)
    assert found.outliers == count
    assert found.norm == pytest.approx(plain.norm, rel=2e-3)
    assert found.mean_magnitude == pytest.approx(plain.mean_magnitude, rel=2e-3)
    assert found.concentration == pytest.approx(plain.concentration, rel=5e-3)
    assert found.largest == pytest.approx(plain.largest, rel=5e-3)
    assert found.negligible == pytest.approx(plain.negligible, abs=2e-3)


def test_one_large_element_of_a_tensor_that_is_unchanged_is_an_outlier():
    values = np.zeros(1000)
    values[7] = 5.0
    beside_small_weights = inliers(values, base=0.02)
    assert (beside_small_weights.outliers, beside_small_weights.norm) == (1, 0)
    assert inliers(values, base=10.0).norm == 5


def test_few_changed_elements_are_no_outliers_of_each_other():
    assert inliers([1.0, 1.0, 1.0, 100.0]).outliers == 0
    assert inliers([1.0] * 40 + [10.0]).outliers == 0
    assert inliers([1.0] * 40 + [17.0]).outliers == 1
    values = np.ones(10_000)
    values[:100] = 50.0
    assert inliers(values).outliers == 0
    values[11:100] = 1.0
    assert inliers(values).outliers == 11


def test_tensors_are_added_up_without_the_outliers_of_each():
    generator = np.random.default_rng(0)
    small, large = (generator.normal(0, size, 4096).astype(np.float32) for size in (1e-3, 1.0))
    small[5] = 1.0  # an outlier there, and none among the others
    base = {"a": np.zeros(4096, np.float32), "b": np.zeros(4096, np.float32)}
    (model,) = analyze_arrays(base, [{"a": small, "b": large}]).models
    assert model.total.inliers.outliers == 1
    expected = np.linalg.norm(np.concatenate([np.delete(small, 5), large]))
    assert model.total.inliers.norm == pytest.approx(expected)
