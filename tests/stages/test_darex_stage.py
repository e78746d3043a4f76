"""DARE divided by q: values, limits, moments."""

import math

import numpy as np
import pytest
from combining import combine
from hypothesis import given, settings
from hypothesis import strategies as st

import dare
from dare import RecipeError, TensorRule, keep_mask


@pytest.fixture(params=["reference", "cpu"])
def merged(request):
    def run(delta, **parameters):
        stages = {"darex": parameters}
        return combine("darex+sum", delta, stages=stages, backend=request.param).tolist()

    return run


def test_what_the_mask_of_dare_keeps_is_divided_by_q(merged):
    delta = np.arange(1, 65, dtype=np.float32)
    keep = keep_mask("w", 64, 0.75, seed=42)
    assert merged(delta, drop_rate=0.75, q=0.5) == np.where(keep, 2 * delta, 0).tolist()


def test_epsilon_is_what_q_is_above_the_keep_rate(merged):
    delta = np.arange(1, 65, dtype=np.float32)
    by_q = merged(delta, drop_rate=0.75, q=0.5)
    assert merged(delta, drop_rate=0.75, epsilon=0.25) == by_q


@pytest.mark.parametrize("drop_rate", [0.0, 0.5, 0.9, 0.99])
def test_without_q_it_is_dare_bit_for_bit(drop_rate):
    delta = np.random.default_rng(0).standard_normal(5000)
    stages = {"dare": {"drop_rate": drop_rate}}
    expected = combine("dare+linear", delta, delta, stages=stages)
    stages = {"darex": {"drop_rate": drop_rate}}
    assert (combine("darex", delta, delta, stages=stages) == expected).all()


def test_the_variance_is_bounded(merged):
    # √(0.99·0.01 / 0.99) = 0.1, in place of 0.01
    keep = keep_mask("w", 1000, 0.99, seed=42)
    found = np.array(merged(np.ones(1000), drop_rate=0.99, max_variance=0.99))
    assert found == pytest.approx(10 * keep, rel=1e-6)


def test_a_bound_that_holds_anyway_changes_nothing(merged):
    delta = np.ones(1000)
    assert merged(delta, drop_rate=0.9, max_variance=10.0) == merged(delta, drop_rate=0.9)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 0.99), st.floats(0.01, 1), st.none() | st.floats(0.1, 100), st.integers(-8, 8))
def test_moments_and_scaling(drop_rate, q, max_variance, power):
    """One element's mean is (1 - p)/q and its variance p·(1 - p)/q², at five standard errors."""
    size = 20_000
    q = max(q, 1 - drop_rate)
    parameters = {"drop_rate": drop_rate, "q": q}
    if max_variance is not None:
        parameters["max_variance"] = max_variance
    found = combine("darex+sum", np.ones(size), stages={"darex": parameters})
    largest = found.max(initial=0)
    if largest:
        divisor = 1 / float(largest)
        assert divisor >= q * (1 - 1e-6)
        spread = math.sqrt(drop_rate * (1 - drop_rate)) / divisor
        bound = 5 * spread / math.sqrt(size) + 1e-6 / divisor
        assert abs(found.mean(dtype=float) - (1 - drop_rate) / divisor) <= bound
        if max_variance is not None:
            assert spread**2 <= max_variance * (1 + 1e-5)
    scaled = combine("darex+sum", np.full(size, 2.0**power), stages={"darex": parameters})
    assert (scaled == found * np.float32(2.0**power)).all()


def test_q_may_change_from_layer_to_layer_and_by_rule():
    ones = {f"h.{layer}.w": np.ones(64, np.float32) for layer in range(3)} | {
        "head": np.ones(64, np.float32)
    }
    zeros = {name: np.zeros_like(array) for name, array in ones.items()}
    found, _ = dare.merge_arrays(
        zeros,
        [ones],
        method="darex+sum",
        stages={"darex": {"drop_rate": 0.875, "q": [0.25, 0.75]}},
        tensors=(TensorRule(match="head", settings={"q": 0.125}),),
        verbose=False,
    )
    factors = {name: set(array.tolist()) - {0} for name, array in found.items()}
    third = float(np.float32(1 / 0.75))
    assert factors == {"h.0.w": {4}, "h.1.w": {2}, "h.2.w": {third}, "head": {8}}


def test_a_q_that_is_the_keep_rate_but_for_rounding_is_taken():
    assert 0.3 < 1 - 0.7
    assert combine("darex+sum", [1.0], stages={"darex": {"drop_rate": 0.7, "q": 0.3}}).size


def test_a_q_found_for_another_rate_is_refused_by_tensor_and_model():
    """At 0.5 the q of 0.99 would multiply the changes of an embedding by 16.7."""
    ones = {"embed.weight": np.ones(64, np.float32), "h.0.w": np.ones(64, np.float32)}
    text = r"embed.weight of model 0: \[darex\] q = 0.03 at drop_rate = 0.5: .* by 16.7 on average"
    for rates in (
        {"embedding_drop_rate": 0.5},
        {"tensors": [TensorRule(match="embed*", settings={"drop_rate": 0.5})]},
        {"model_settings": [{"drop_rate": 0.5}]},
    ):
        with pytest.raises(RecipeError, match=text):
            dare.merge_arrays(
                ones,
                [ones],
                method="darex+sum",
                stages={"darex": {"drop_rate": 0.99, "q": 0.03}},
                verbose=False,
                **rates,
            )
