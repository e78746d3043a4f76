"""An infinity that base and models share, as a stored causal mask has, is no change and stays."""

import numpy as np
import pytest

import dare
from dare.stages import STAGES
from helpers import method_of

CAUSAL = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
TAKES_ONE_OR_GRAMS = {"arcee_fusion", "passthrough", "regmean"}
CHAINS = [
    *(method_of(name) for name in STAGES if name not in TAKES_ONE_OR_GRAMS),
    *("dare+ties", "trim+ties", "dare+trim+ties", "dare+darex+linear"),
]


@pytest.fixture(params=["reference", "cpu"])
def merged(request):
    def run(base, models, method, **settings):
        result, report = dare.merge_arrays(
            {"w": base},
            [{"w": model} for model in models],
            **{"method": method, "verbose": False, "backend": request.param, **settings},
        )
        return result["w"], report

    return run


def changed(seed, kind=np.float32, base=CAUSAL):
    noise = np.random.default_rng(seed).integers(-8, 8, base.shape) / 8
    return (base + noise.astype(np.float32)).astype(kind)


@pytest.mark.parametrize("method", CHAINS)
def test_shared_infinities_stay_and_all_else_is_as_without_them(merged, method):
    base, models = CAUSAL.copy(), [changed(seed) for seed in (1, 2)]
    result, report = merged(base, models, method)
    finite = np.isfinite(CAUSAL)
    plain, _ = merged(*_without(base, models), method)
    assert (result[~finite] == -np.inf).all()
    assert result[finite].tobytes() == plain[finite].tobytes()
    assert (report.nans, report.overflowed) == (0, 0)
    assert np.isfinite([model.largest_delta for model in report.models]).all()


def test_arcee_fusion_keeps_shared_infinities(merged):
    result, report = merged(CAUSAL.copy(), [changed(1)], "arcee_fusion")
    assert (np.isinf(result) == np.isinf(CAUSAL)).all()
    assert report.nans == 0


def _without(base, models):
    return np.where(np.isinf(base), np.float32(0), base), [
        np.where(np.isinf(model), np.float32(0), model) for model in models
    ]


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_types_may_differ(merged, kind):
    result, report = merged(CAUSAL.copy(), [changed(1, kind), changed(2)], "dare+linear")
    assert (result[np.isinf(CAUSAL)] == -np.inf).all()
    assert np.isfinite(result[np.isfinite(CAUSAL)]).all()
    narrow, report = merged(CAUSAL.astype(kind), [changed(1), changed(2)], "dare+linear")
    assert (narrow[np.isinf(CAUSAL)] == -np.inf).all()
    assert (report.nans, report.overflowed) == (0, 0)


def test_an_infinity_that_changes_is_reported_if_it_is_allowed(merged):
    base = np.array([np.inf, np.inf, -np.inf, 1, np.nan], np.float32)
    tuned = np.array([np.inf, 2, np.inf, np.inf, np.nan], np.float32)
    result, report = merged(base, [tuned], "sum", allow_not_finite=True, scale=2)
    assert result[0] == np.inf
    assert np.isnan(result[[1, 2, 4]]).all()
    assert result[3] == np.inf
    assert (report.nans, report.overflowed) == (3, 1)


def test_where_one_model_has_it_and_another_not_the_first_changes_nothing(merged):
    base = np.array([np.inf, 1.0], np.float32)
    result, _ = merged(base, [base.copy(), np.array([3, 1], np.float32)], "sum", weights=[1, 0])
    assert result.tolist() == [np.inf, 1]


def test_numbers_beyond_float32_that_differ_are_not_taken_for_equal(merged):
    base, tuned = np.array([1e300, 1e299]), np.array([1e300, 1e300])
    result, report = merged(base, [tuned], "sum", scale=2, allow_not_finite=True)
    assert result[0] == 1e300
    assert np.isnan(result[1])
    assert report.nans == 1


def test_an_infinity_that_the_output_cannot_hold_is_reported(merged):
    how = {"dtype": "F8_E4M3", "allow_not_finite": True}
    result, report = merged(CAUSAL.copy(), [changed(1)], "linear", **how)
    assert report.overflowed == np.isinf(CAUSAL).sum()
    _, report = merged(CAUSAL.copy(), [changed(1)], "linear", dtype="F16")
    assert report.overflowed == 0
    assert result.shape == CAUSAL.shape
