from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.stats

from dare.analysis.analyzing import analyze_arrays
from dare.analysis.results import Origin
from dare.analysis.tallies import KEPT, choose_window, spectrum_of
from dare.checks.sample import (
    find_noise_edge,
    find_rounding,
    median_of_noise,
    singular_values,
)
from dare.kernels.linalg import one_blas_thread


@pytest.fixture(autouse=True)
def _quick():
    with one_blas_thread():
        yield


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def low_rank(seed, rows, columns, rank, size=1e-3):
    factors = gaussian(seed, rows, rank), gaussian(seed + 1, rank, columns)
    return (size / math.sqrt(rank) * (factors[0] @ factors[1])).astype(np.float32)


@pytest.mark.parametrize("shape", [(40, 40), (33, 90), (90, 33), (1, 7), (7, 1)])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e25])
def test_singular_values_are_scipys(shape, size):
    matrix = np.float32(size) * gaussian(1, *shape)
    expected = scipy.linalg.svdvals(matrix.astype(np.float64))
    np.testing.assert_allclose(singular_values(matrix), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(40, 60), (200, 100)])
def test_figures_are_those_of_the_singular_values(shape):
    matrix = gaussian(2, *shape) * np.linspace(0.01, 1, shape[1], dtype=np.float32) ** 3
    values = scipy.linalg.svdvals(matrix.astype(np.float64))
    energies = values**2
    found = spectrum_of(matrix)
    assert (found.rows, found.columns) == shape
    assert found.effective_rank == pytest.approx(math.exp(scipy.stats.entropy(values)), rel=1e-6)
    assert found.stable_rank == pytest.approx(energies.sum() / energies[0], rel=1e-6)
    assert found.rank_99 == 1 + np.argmax(np.cumsum(energies) >= 0.99 * energies.sum())
    half = len(values) // 2
    assert found.tail_share == pytest.approx(energies[-half:].sum() / energies.sum(), rel=1e-6)
    assert found.outliers == np.count_nonzero(values > found.bulk_edge)
    assert found.outlier_share == pytest.approx(
        energies[: found.outliers].sum() / energies.sum(), abs=1e-9
    )
    assert len(found.values) == min(KEPT, len(values))
    assert (found.ranks[0], found.ranks[-1]) == (1, len(values))
    np.testing.assert_allclose(found.values, values[np.array(found.ranks) - 1], rtol=1e-6)


def test_a_spectrum_by_hand():
    found = spectrum_of(np.diag(np.array([0, 8, 4, 4], np.float32)))
    assert found.values == (8, 4, 4, 0)
    assert found.ranks == (1, 2, 3, 4)
    assert found.effective_rank == pytest.approx(2 * math.sqrt(2))  # entropy of 1/2, 1/4, 1/4
    assert found.stable_rank == pytest.approx(1.5)
    assert found.rank_99 == 3
    assert found.tail_share == pytest.approx(16 / 96)


def test_a_matrix_of_zeros_has_none():
    assert spectrum_of(np.zeros((40, 40), np.float32)) is None


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1])
def test_the_median_of_noise_halves_the_law(ratio):
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2

    def density(x):
        return math.sqrt((high - x) * (x - low)) / (2 * math.pi * ratio * x)

    mass, _ = scipy.integrate.quad(density, low, median_of_noise(ratio))
    assert mass == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("shape", [(64, 64), (64, 400), (300, 100)])
def test_noise_alone_has_nearly_no_outliers(shape):
    found = [spectrum_of(1e-3 * gaussian(seed, *shape)) for seed in range(40)]
    assert sum(spectrum.outliers for spectrum in found) <= 3
    edge = 1e-3 * (math.sqrt(shape[0]) + math.sqrt(shape[1]))
    assert np.mean([spectrum.bulk_edge for spectrum in found]) == pytest.approx(edge, rel=0.06)
    assert all(spectrum.low_rank is None for spectrum in found)


@pytest.mark.parametrize("spikes", [1, 3, 10])
@pytest.mark.parametrize("shape", [(100, 100), (80, 300)])
def test_directions_above_the_noise_are_counted(spikes, shape):
    noise = gaussian(3, *shape)
    left = np.linalg.qr(gaussian(4, shape[0], spikes))[0]
    right = np.linalg.qr(gaussian(5, shape[1], spikes))[0]
    edge = math.sqrt(shape[0]) + math.sqrt(shape[1])
    found = spectrum_of((noise + 2 * edge * left @ right.T).astype(np.float32))
    assert found.outliers == spikes
    assert found.bulk_edge == pytest.approx(edge, rel=0.1)
    assert found.low_rank is None  # nothing explains the noise


def test_noise_is_measured_beside_many_outliers():
    noise = scipy.linalg.svdvals(gaussian(6, 100, 200).astype(np.float64))
    values = np.concatenate([np.full(40, 1000.0), noise[:60]])
    edge, outliers = find_noise_edge(values, 200)
    assert outliers == 40
    assert edge < 40


@pytest.mark.parametrize("rank", [1, 4, 16, 40])
@pytest.mark.parametrize("shape", [(96, 96), (96, 300), (300, 96)])
def test_the_rank_of_a_low_rank_delta_is_found(rank, shape):
    found = spectrum_of(low_rank(7, *shape, rank))
    assert found.low_rank == found.outliers == rank
    assert found.rank_99 <= rank


def test_a_weak_last_direction_is_counted():
    left, right = (np.linalg.qr(gaussian(seed, 100, 6))[0] for seed in (14, 15))
    scales = np.array([100, 90, 80, 70, 60, 0.01], np.float32)
    assert spectrum_of((left * scales) @ right.T).low_rank == 6


def test_a_gentle_end_of_few_directions():
    left, right = (np.linalg.qr(gaussian(seed, 320, 20))[0] for seed in (16, 17))
    noise = 1e-3 * gaussian(18, 320, 320)
    scales = 5 * np.float32(0.7) ** np.arange(20, dtype=np.float32)  # into the noise
    found = spectrum_of((left * scales) @ right.T + noise)
    assert 8 <= found.low_rank == found.outliers <= 16


def test_one_strong_direction_does_not_make_a_low_rank():
    delta = 1e-3 * gaussian(8, 128, 128) + low_rank(9, 128, 128, 1, size=0.005)
    found = spectrum_of(delta)
    assert found.outliers == 1
    assert found.outlier_share > 0.9
    assert found.low_rank is None
    scales = np.arange(1, 129, dtype=np.float32) ** -0.7
    left, right = (np.linalg.qr(gaussian(seed, 128, 128))[0] for seed in (10, 11))
    assert spectrum_of((left * scales) @ right).low_rank is None
    assert spectrum_of(low_rank(7, 64, 64, 40)).low_rank is None


def test_rounding_by_hand():
    weights = np.array([[1.0, -3.0], [0.0, 0.01]], np.float32)
    steps = np.array([2.0**-7, 2.0**-6, 2.0**-14])  # of bfloat16 at 1, 2 and 2**-7
    most = np.square(steps / 2).sum()
    assert find_rounding(weights, "BF16", "BF16") == (pytest.approx(most), 0.5)
    assert find_rounding(weights, "F32", "BF16") == (pytest.approx(1.1 / 3 * most), 0)
    assert find_rounding(weights, "BF16", "F32")[0] < 1e-12


BF16 = ml_dtypes.bfloat16


def changed(base, change, size, dtype=np.float32):
    """The delta of a model that is stored in a type, and changes its base by a share."""
    tuned = base + size * np.linalg.norm(base) / np.linalg.norm(change) * change
    return tuned.astype(dtype).astype(np.float32) - base


@pytest.mark.parametrize("size", [2e-3, 2e-4, 5e-5])  # a step of bfloat16 is 1.2e-4 at 0.02
@pytest.mark.parametrize("shape", [(128, 128), (128, 512), (512, 128)])
def test_a_lora_that_was_merged_in_bfloat16_is_found_and_a_full_change_is_none(size, shape):
    base = (0.02 * gaussian(12, *shape)).astype(BF16)
    changes = low_rank(13, *shape, 8, size), size * gaussian(13, *shape)
    tuned = [{"w": (base.astype(np.float32) + change).astype(BF16)} for change in changes]
    lora, full = analyze_arrays({"w": base}, tuned).models
    assert (lora.origin, lora.likely_rank) == (Origin.LORA, 8)
    assert lora.tensors[0].spectrum.effective_rank > 10  # rounding has put something everywhere
    assert (full.origin, full.likely_rank) == (Origin.FULL, None)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("rank", "size", "shape"),
    [
        *((1, 0.001, (64, 64)), (8, 0.005, (64, 64)), (8, 0.002, (128, 256))),
        *((8, 0.001, (256, 1024)), (16, 0.001, (512, 512)), (16, 0.03, (256, 192))),
    ],
)
def test_a_lora_saved_in_bfloat16_beside_a_float32_base_is_found(rank, size, shape, seed):
    base = 0.02 * gaussian(seed, *shape)
    rounding = find_rounding(base, "F32", "BF16")
    lora = low_rank(seed + 5, *shape, rank, size=1)
    full = lora + gaussian(seed + 9, *shape)  # some directions stand out in most fine-tunes
    found = (
        spectrum_of(changed(base, c, s, BF16), rounding) for c, s in ((lora, size), (full, 0.005))
    )
    assert [spectrum.low_rank for spectrum in found] == [rank, None]


@pytest.mark.parametrize("factor", [5, 100, 1000])
@pytest.mark.parametrize("shape", [(64, 64), (128, 256), (512, 192)])
def test_large_rows_and_columns_make_no_lora_and_hide_none(shape, factor):
    base = 0.02 * gaussian(3, *shape)
    for place in (np.s_[5], np.s_[:, 7], np.s_[5:8], np.s_[:, [3, 30, 31]]):
        for change, rank in ((gaussian(4, *shape), None), (low_rank(4, *shape, 8), 8)):
            change[place] *= factor
            for dtype, name in ((np.float32, "F32"), (BF16, "BF16")):
                delta = changed(base, change, 0.03 * factor, dtype)
                assert spectrum_of(delta, find_rounding(base, "F32", name)).low_rank == rank


def test_windows_lie_evenly():
    window = choose_window((4096, 2048), whole=False)
    rows = np.concatenate([np.arange(first, first + count) for first, count in window.runs])
    assert len(rows) == len(set(rows.tolist())) == 1024
    assert len(set(window.columns.tolist())) == 256
    assert abs(rows.mean() - 2047.5) < 8
    assert abs(window.columns.mean() - 1023.5) < 8
    assert rows.min() >= 0
    assert rows.max() < 4096
    small = choose_window((2000, 32), whole=False)
    assert (sum(count for _, count in small.runs), small.columns.size) == (1024, 32)
