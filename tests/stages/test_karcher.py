import math

import numpy as np
import pytest
from combining import BACKENDS, combine, large_deltas, same_bits_however_cut
from hypothesis import given
from hypothesis import strategies as st

import dare

DELTAS = {"stages": {"karcher": {"on": "deltas"}}}


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda *deltas, **given: combine(
        "karcher", *deltas, backend=request.param, **given
    ).tolist()


def mean_of(tensors, shares=None, steps=200):
    """The same by its definition, on the whole vectors, in float64."""
    tensors = np.array(tensors, np.float64).reshape(len(tensors), -1)
    shares = np.full(len(tensors), 1 / len(tensors)) if shares is None else np.array(shares)
    lengths = np.linalg.norm(tensors, axis=1)
    units = tensors / lengths[:, None]
    mean = shares @ units
    mean /= np.linalg.norm(mean)
    for _ in range(steps):
        cosines = np.clip(units @ mean, -1, 1)
        angles = np.arccos(cosines)
        stretch = np.where(angles < 1e-7, 1, angles / np.where(angles == 0, 1, np.sin(angles)))
        step = (shares * stretch) @ (units - cosines[:, None] * mean)
        length = np.linalg.norm(step)
        if length < 1e-13:
            break
        mean = math.cos(length) * mean + math.sin(length) * step / length
        mean /= np.linalg.norm(mean)
    return shares @ lengths * mean


def test_three_axes_meet_in_the_middle(merged):
    # The mean direction is (1, 1, 1)/√3, the mean length (1 + 2 + 6)/3 = 3.
    found = merged([1, 0, 0], [0, 2, 0], [0, 0, 6], **DELTAS)
    assert found == pytest.approx([math.sqrt(3)] * 3, rel=1e-6)


def test_weights_are_shares_of_the_arc_between_two(merged):
    # A quarter of the way from (1, 0) to (0, 1), for weights 3 and 1.
    found = merged([1, 0], [0, 1], weights=[3, 1], **DELTAS)
    angle = math.pi / 8
    assert found == pytest.approx([math.cos(angle), math.sin(angle)], rel=1e-6)


def test_whole_tensors_are_averaged_by_default(merged):
    # base + delta are (1, 0) and (0, 1)
    found = merged([0.5, -0.5], [-0.5, 0.5], base=[0.5, 0.5])
    assert found == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-6)


def test_a_zero_has_a_length_and_no_direction(merged):
    assert merged([2, 0], [0, 0], **DELTAS) == [1, 0]
    found = merged([2, 0], [0, 2], [0, 0], **DELTAS)
    assert found == pytest.approx([math.sqrt(0.5) * 4 / 3] * 2, rel=1e-6)
    assert merged([0, 0], [0, 0], **DELTAS) == [0, 0]


def test_what_cancels_or_is_opposite_is_averaged_straight(merged):
    assert merged([4, 0], [-2, 0], **DELTAS) == [1, 0]
    assert merged([4, 0], [-4, 0], weights=[3, 1], **DELTAS) == [2, 0]


def test_parallel_tensors_keep_their_direction(merged):
    assert merged([1, 2], [3, 6], **DELTAS) == pytest.approx([2, 4], rel=1e-6)


def test_an_infinity_stays_where_it_is(merged):
    assert merged([np.inf, 1], [1, 3], **DELTAS) == [np.inf, 2]


@pytest.mark.parametrize("weights", [[1, -1], [0, 0]])
def test_weights_that_make_no_mean_are_refused(merged, weights):
    with pytest.raises(dare.RecipeError, match=r"weights .*: karcher takes a mean"):
        merged([1], [2], weights=weights)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_it_is_the_mean_on_the_sphere(seed, count):
    generator = np.random.default_rng(seed)
    tensors = generator.standard_normal((count, 50)) + 0.5
    tensors = tensors.astype(np.float32)
    weights = generator.uniform(0.5, 2, count)
    found = combine("karcher", *tensors, weights=weights.tolist(), **DELTAS)
    assert found == pytest.approx(mean_of(tensors, weights / weights.sum()), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("on", ["weights", "deltas"])
def test_over_many_chunks(on):
    deltas = large_deltas(3)
    base = np.full_like(deltas[0], 0.25)
    found = same_bits_however_cut("karcher", deltas, base=base, stages={"karcher": {"on": on}})
    tuned = [base + delta for delta in deltas]
    if on == "weights":
        expected = mean_of(tuned)
    else:
        expected = 0.25 + mean_of([model - base for model in tuned])
    assert np.abs(found.reshape(-1) - expected).max() < 4e-6
