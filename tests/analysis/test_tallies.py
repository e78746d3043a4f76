from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dare.analysis.measure.tallies import (
    BIN_SHIFT,
    BINS,
    NONE,
    Magnitudes,
    Sums,
    bin_edge,
    statistics_of,
    top_bin,
)
from dare.analysis.results import Histogram, Quantiles

SHARES = (0.01, 0.05, 0.5, 0.95, 0.99)


def tally(values, base_squares=0.0):
    """The definition, in NumPy, of what the kernels count."""
    values = np.asarray(values, np.float32).reshape(-1)
    finite = values[np.isfinite(values)].astype(np.float64)
    changed = np.abs(finite[finite != 0])
    bits = changed.astype(np.float32).view(np.uint32) >> np.uint32(BIN_SHIFT)
    sums = Sums(
        values.size,
        finite.size - changed.size,
        values.size - finite.size,
        tuple(float((finite**power).sum()) for power in (1, 2, 3, 4)),
        float(changed.sum()),
        float(changed.min(initial=math.inf)),
        float(changed.max(initial=0)),
        base_squares,
    )
    first = int(bits.min(initial=BINS - 1))
    return sums, Magnitudes(first, np.bincount(bits - first)) if bits.size else NONE


def quantiles(values):
    found = np.quantile(np.abs(values.astype(np.float64)), SHARES, method="inverted_cdf")
    return np.array(found)


def as_tuple(found: Quantiles):
    return (found.p1, found.p5, found.p50, found.p95, found.p99)


def test_statistics_by_hand():
    found = statistics_of(*tally([3, 0, -4, 0, 1, np.nan, np.inf], base_squares=16.0))
    assert (found.elements, found.zeros, found.not_finite) == (7, 2, 2)
    assert found.mean == 0
    assert found.std == pytest.approx(math.sqrt(26 / 5))
    assert found.mean_magnitude == pytest.approx(8 / 5)
    assert (found.smallest, found.largest) == (1, 4)
    assert found.norm == pytest.approx(math.sqrt(26))
    assert (found.base_norm, found.relative_norm) == (4, pytest.approx(math.sqrt(26) / 4))
    assert found.excess_kurtosis == pytest.approx((81 + 256 + 1) / 5 / (26 / 5) ** 2 - 3)
    assert as_tuple(found.quantiles) == (0, 0, 1.001953125, 4, 4)  # the middle of 1's bin
    assert found.negligible == pytest.approx(2 / 5)
    assert found.histogram == Histogram(0, (1, 1, 1))
    assert found.sparsity == 2 / 7


def test_nothing():
    found = statistics_of(*tally([]))
    assert (found.elements, found.mean, found.std, found.largest, found.smallest) == (0, 0, 0, 0, 0)
    assert as_tuple(found.quantiles) == (0, 0, 0, 0, 0)
    assert (found.negligible, found.excess_kurtosis, found.sparsity) == (0, 0, 0)
    assert (found.relative_norm, found.histogram) == (0, Histogram(0, ()))


def test_zeros_alone():
    found = statistics_of(*tally(np.zeros(9)))
    assert (found.zeros, found.negligible, found.norm) == (9, 1, 0)
    assert as_tuple(found.quantiles) == (0, 0, 0, 0, 0)


def test_what_is_not_finite_alone():
    found = statistics_of(*tally([np.nan, -np.inf]))
    assert (found.elements, found.not_finite, found.zeros, found.largest) == (2, 2, 0, 0)
    assert as_tuple(found.quantiles) == (0, 0, 0, 0, 0)


def test_a_constant_has_no_spread():
    found = statistics_of(*tally(np.full(1000, 1e-3)))
    assert (found.std, found.excess_kurtosis) == (0, 0)
    assert found.mean == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("distribution", "kurtosis"),
    [(scipy.stats.norm, 0), (scipy.stats.laplace, 3), (scipy.stats.uniform(-1, 2), -1.2)],
)
def test_statistics_are_numpys_and_scipys(distribution, kurtosis):
    values = (1e-3 * distribution.rvs(size=200_000, random_state=1)).astype(np.float32)
    values[::7] = 0
    found = statistics_of(*tally(values))
    wide = values.astype(np.float64)
    assert found.mean == pytest.approx(wide.mean(), rel=1e-9, abs=1e-12)
    assert found.std == pytest.approx(wide.std(), rel=1e-9)
    assert found.excess_kurtosis == pytest.approx(scipy.stats.kurtosis(wide), rel=1e-6)
    np.testing.assert_allclose(as_tuple(found.quantiles), quantiles(values), rtol=0.002)
    under = np.mean(np.abs(wide) < 0.01 * np.abs(wide).max())
    assert found.negligible == pytest.approx(under, abs=1e-4)
    full = statistics_of(*tally(values[values != 0]))
    assert full.excess_kurtosis == pytest.approx(kurtosis, abs=0.15)


def test_the_histogram_counts_octaves():
    values = np.array([0.25, 0.3, -0.49, 1, 1.99, 4], np.float32)
    assert statistics_of(*tally(values)).histogram == Histogram(-2, (3, 0, 2, 0, 1))
    tiny = np.array([1e-45, 1e-39, 2e-38], np.float32)  # the first two are not normal
    assert statistics_of(*tally(tiny)).histogram == Histogram(-127, (2, 1))


def test_the_top_by_hand():
    values = np.arange(1, 101, dtype=np.float32)
    _, magnitudes = tally(values)
    assert float(bin_edge(top_bin(magnitudes, 1))) == 100
    assert float(bin_edge(top_bin(magnitudes, 3))) == 98
    assert float(bin_edge(top_bin(magnitudes, 1000))) == 1


def test_all_bins_are_below_their_neighbours_and_as_wide_as_promised():
    edges = bin_edge(np.arange(256, 0x7F80))  # normal numbers below the last octave
    widths = np.diff(edges) / edges[:-1]
    assert widths.min() > 0
    assert widths.max() <= 2**-8


finite = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
some = arrays(np.float32, st.integers(0, 60), elements=finite)


@settings(max_examples=40)
@given(some, st.integers(0, 60))
def test_parts_add_up_to_the_whole(values, cut):
    whole, parts = tally(values), [tally(values[:cut]), tally(values[cut:])]
    sums, magnitudes = zip(*parts, strict=True)
    added = statistics_of(sum(sums, Sums()), sum(magnitudes, NONE))
    found = statistics_of(*whole)
    assert added.histogram == found.histogram
    assert added.quantiles == found.quantiles
    assert (added.zeros, added.elements, added.largest) == (
        found.zeros,
        found.elements,
        found.largest,
    )
    assert added.norm == pytest.approx(found.norm, rel=1e-12)


@settings(max_examples=40)
@given(some.filter(lambda values: values.size))
def test_quantiles_are_numpys(values):
    found = as_tuple(statistics_of(*tally(values)).quantiles)
    np.testing.assert_allclose(found, quantiles(values), rtol=0.002)


@settings(max_examples=40)
@given(some)
def test_a_delta_of_twice_the_size(values):
    one, two = statistics_of(*tally(values)), statistics_of(*tally(2 * values))
    assert np.array_equal(as_tuple(two.quantiles), 2 * np.array(as_tuple(one.quantiles)))
    assert (two.largest, two.smallest, two.mean) == (
        2 * one.largest,
        2 * one.smallest,
        2 * one.mean,
    )
    assert two.std == pytest.approx(2 * one.std)
    assert two.norm == pytest.approx(2 * one.norm)
    assert two.negligible == pytest.approx(one.negligible)
    assert two.excess_kurtosis == pytest.approx(one.excess_kurtosis)
    assert two.histogram.counts == one.histogram.counts


def test_sets_with_nothing_in_common():
    low, high = Magnitudes(3, np.array([1, 2])), Magnitudes(10, np.array([4]))
    both = low + high
    assert (both.first, both.counts.tolist()) == (3, [1, 2, 0, 0, 0, 0, 0, 4])
    assert (low + NONE) is low
    assert (NONE + high) is high
