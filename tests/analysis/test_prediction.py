import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MATRIX, analysis, make_base, statistics, tune

from dare.analysis.prediction import (
    Prediction,
    exposure_of,
    exposures_of,
    mean_bounded_error,
    predict,
    relative_error,
    tolerated_drop_rate,
)
from dare.checks.dropping import Exposure, bounded_error
from dare.documents.notices import LIMIT
from dare.errors import RecipeError

DELTA = np.array([[3.0, 0.0], [0.0, -4.0]])
WEIGHTS = np.full((2, 2), 25.0)  # of norm 50, ten times the delta's

rates = st.floats(0.01, 0.99)


def test_a_prediction_by_hand():
    found = predict(statistics(DELTA, WEIGHTS), 0.8)
    assert found.relative_error == pytest.approx(2)  # √(0.8/0.2)
    assert found.output_error == pytest.approx(0.2)
    assert found.variance == pytest.approx(4 * 25 / 4)
    assert predict(statistics(DELTA, WEIGHTS), 0.0) == Prediction(0.0, 0.0, 0.0, 0.0)


def test_a_base_of_zeros_makes_the_output_error_infinite():
    zeros = np.zeros((2, 2))
    assert predict(statistics(DELTA, zeros), 0.5).output_error == math.inf
    assert predict(statistics(DELTA, zeros), 0.0).output_error == 0.0
    assert predict(statistics(zeros, zeros), 0.5).output_error == 0.0


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_rates_outside_are_refused(rate):
    with pytest.raises(RecipeError, match="drop_rate"):
        predict(statistics(DELTA, WEIGHTS), rate)


def test_elements_that_are_not_finite_do_not_count():
    broken = np.array([[3.0, np.nan], [np.inf, -4.0]])
    assert predict(statistics(broken, WEIGHTS), 0.5).variance == pytest.approx(25 / 2)


# ---------------------------------------------------------------- how few elements carry a change


@pytest.mark.parametrize(
    ("shape", "width"),
    [((4, 6), 6), ((24,), 24), ((2, 3, 4), 12), ((1, 24), 24), ((), 1)],
)
def test_a_row_is_what_makes_one_output(shape, width):
    delta = np.resize([1.0, -1.0], shape)
    assert exposure_of(statistics(delta, delta), shape).carriers == pytest.approx(width)
    assert exposure_of(statistics(0 * delta, delta), shape).carriers == 0


# ---------------------------------------------------------------- the bound


def test_the_bound_by_hand():
    # p = 0.8: 4 + √19·0.6·√(0.8/0.008/c); c = 100 makes the root 1.
    expected = 0.02 * math.sqrt(4 + math.sqrt(19) * 0.6)
    assert bounded_error(Exposure(1, 0.02, 100.0), 0.8) == pytest.approx(expected)
    assert bounded_error(Exposure(1, 0.02, 100.0), 0.5) == pytest.approx(0.02)  # always δ²
    assert bounded_error(Exposure(1, 0.02, 100.0), 0.0) == 0.0


@given(rates)
def test_with_many_carriers_the_bound_is_the_error(p):
    assert bounded_error(Exposure(1, 0.02, 1e18), p) == pytest.approx(
        0.02 * relative_error(p), rel=1e-3
    )


def test_the_mean_over_tensors_is_of_squares():
    pair = [Exposure(100, 0.03, 1e12), Exposure(300, 0.01, 1e12)]
    assert mean_bounded_error(pair, 0.5) == pytest.approx(math.sqrt((9e-4 + 3e-4) / 4))


def test_unchanged_tensors_count_in_the_mean_and_those_without_a_base_do_not():
    changed = Exposure(100, 0.04, 1e12)
    assert mean_bounded_error([changed, Exposure(300, 0.0, 0.0)], 0.5) == pytest.approx(0.02)
    assert mean_bounded_error([changed, Exposure(300, math.inf, 9.0)], 0.5) == pytest.approx(0.04)
    assert mean_bounded_error([], 0.5) == 0.0


# ---------------------------------------------------------------- the rate

sizes = st.floats(0.001, 0.5)
carriers = st.floats(1, 1e5)


@pytest.mark.parametrize(
    ("exposure", "expected"),
    [
        (Exposure(10, 0.05, 1e12), 0.5),  # 0.05·√(0.5/0.5)
        (Exposure(10, 0.0249, 1e12), 0.8),  # 0.0249·√(0.8/0.2)
        (Exposure(10, 0.0001, 1e12), 0.95),  # no higher one is recommended
        (Exposure(10, 0.0001, 4.0), 0.95),  # few carry it, but their error is small
        (Exposure(10, 0.005, 1.0), 0.89),  # 0.005·√(8.09 + √19·0.78·√(0.89/0.11³))
        (Exposure(10, 5.0, 1e12), 0.0),
        (Exposure(10, math.inf, 20.0), 0.8),  # nothing to compare with: four of twenty survive
        (Exposure(10, 0.0, 0.0), 0.0),  # nothing to drop
    ],
)
def test_rates_by_hand(exposure, expected):
    assert tolerated_drop_rate([exposure]) == expected


@given(sizes, carriers)
def test_the_rate_keeps_what_it_promises(size, count):
    exposure = Exposure(10, size, count)
    rate = tolerated_drop_rate([exposure])
    assert 0 <= rate <= LIMIT.highest_rate
    assert bounded_error(exposure, rate) <= LIMIT.output_error
    halves = [Exposure(5, size, count), Exposure(5, size, count)]
    assert tolerated_drop_rate(halves) == rate
    assert tolerated_drop_rate([exposure], bound=100.0, highest=0.333) == 0.33


@given(sizes, carriers, st.floats(1, 3), st.floats(1, 3))
def test_larger_and_more_concentrated_changes_bear_no_more(size, count, larger, fewer):
    rate = tolerated_drop_rate([Exposure(10, size, count)])
    assert tolerated_drop_rate([Exposure(10, size * larger, count / fewer)]) <= rate


def test_the_exposure_of_an_analysed_tensor():
    base = make_base()
    (model,) = analysis(base, {"m": tune(base, 0.04)}).models
    assert len(exposures_of(model)) == len(base) - 1  # without the embedding
    found = {t.name: exposure_of(t.statistics, t.shape) for t in model.tensors}[MATRIX]
    assert found.elements == 192 * 128
    assert found.relative_norm == pytest.approx(0.04, rel=1e-3)
    assert found.carriers == pytest.approx(128 / 3, rel=0.05)
