"""Dropping at random: the mask of `dare`, the divisor of `darex`, the ranks of `della`."""

import numpy as np
import pytest
from combining import combine
from definitions import della_keeps

import dare
from dare import RecipeError, TensorRule, keep_mask
from dare.kernels import core, reference
from dare.tensors.mask import keep_threshold, mask_key


@pytest.fixture(params=["reference", "cpu"])
def merged(request):
    def run(stage, *deltas, seed=42, **parameters):
        given = {"stages": {stage: parameters}, "seed": seed, "backend": request.param}
        return combine(f"{stage}+sum", *deltas, **given)

    return run


def test_model_i_uses_seed_plus_i(merged):
    second = merged("dare", np.zeros(100), np.ones(100), drop_rate=0.5, seed=6)
    assert second.tolist() == (2.0 * keep_mask("w", 100, 0.5, seed=7)).tolist()


@pytest.mark.parametrize("rescale", [True, False, "l1"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_at_rate_zero_dare_is_task_arithmetic(rescale, backend):
    base, *models = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    given = {"base": base, "backend": backend}
    stages = {"dare": {"drop_rate": 0.0, "rescale": rescale}}
    deltas = [model - base for model in models]
    with_dare = combine("dare+linear", *deltas, stages=stages, **given)
    assert (with_dare == combine("linear", *deltas, **given)).all()


def test_dropped_infinities_and_nans_do_not_spread(merged):
    keep = keep_mask("w", 64, 0.9, seed=42)
    delta = np.where(keep, 1.0, np.where(np.arange(64) % 2, np.inf, np.nan))
    found = merged("dare", delta, drop_rate=0.9)
    assert found.tolist() == (np.float32(1 / (1 - 0.9)) * keep).tolist()
    found = merged("della", np.tile([1, np.inf, np.nan, -np.inf], 16), drop_rate=0.5, window=0.5)
    keep, _ = della_keeps(np.tile([1, 2, 3, -2], 16), 0.5, 0.5)  # a NaN is above infinity
    assert (np.isfinite(found) == (~keep | (np.arange(64) % 4 == 0))).all()


@pytest.mark.parametrize("drop_rate", [0.0, 0.25, 0.9, 0.999])
@pytest.mark.parametrize(
    ("stage", "parameters"),
    [
        ("darex", {}),
        ("della", {"window": 0.0}),
        ("della", {"window": 0.0, "rescale": False}),
        ("della", {"window": 0.0, "rescale": "l1"}),
    ],
)
def test_without_q_or_window_it_is_dare_bit_for_bit(merged, stage, parameters, drop_rate):
    deltas = np.random.default_rng(0).standard_normal((2, 50, 60))
    rescale = parameters.get("rescale", True)
    by_dare = merged("dare", *deltas, drop_rate=drop_rate, rescale=rescale)
    assert (merged(stage, *deltas, drop_rate=drop_rate, **parameters) == by_dare).all()


# ---------------------------------------------------------------- darex


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


# ---------------------------------------------------------------- della


def test_each_is_divided_by_its_own_probability(merged):
    # Rates 0.25, 0.5, 0.75 for the ranks 0, 1, 2: what is kept becomes 4·4, 2·6 or 9/0.75.
    found = merged("della", np.tile([6, -9, 4], (100, 1)), drop_rate=0.5, window=0.5)
    for column, value in enumerate([12, -12, 16]):
        kept = found[:, column] != 0
        assert found[kept, column].tolist() == pytest.approx([value] * kept.sum(), rel=1e-6)
    # 100 coins with rates 0.5, 0.75 and 0.25, within 5 standard deviations
    counts = (found != 0).sum(axis=0)
    assert np.abs(counts - [50, 75, 25]).max() <= 25


def test_the_numbers_of_the_mask():
    """Held against one threshold they are the mask; both kernels have the same."""
    for name, seed, rate, start, size in (
        ("w", 42, 0.9, 0, 5000),
        ("lm_head.weight", 7, 0.5, 1 << 40, 257),
        ("größe", 0, 0.999, 128 * 999, 20_000),
    ):
        key0, key1 = map(np.uint32, mask_key(seed, name))
        numbers, turned = np.empty((2, size), np.uint64)
        reference.draw_uniform(numbers, start, key0, key1)
        core.draw_order(turned, start, key0, key1, size)
        assert (numbers == np.uint64(2**40) - turned).all()
        keep = keep_mask(name, size, rate, seed, start)
        assert ((numbers < np.uint64(keep_threshold(rate))) == keep).all()
