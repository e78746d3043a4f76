"""Sums and means: mergekit's linear, task_arithmetic and dare_linear, PEFT's task_arithmetic."""

from __future__ import annotations

import pytest
import torch
from peft.utils import merge_utils as peft
from side_by_side import assert_same, assert_within, compares, make_models, merge_ours, merge_theirs

import dare

SHAPES = [(), (1,), (37, 53), (300, 301)]
"""A scalar, one element, an odd size, and more than one of our blocks of 65536 elements."""
KEEP_ALL = {"dare": {"drop_rate": 0.0}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
class TestUpToFourModels:
    """torch adds up to four models from first to last, as we do: the same bits."""

    @compares("task_arithmetic", "mergekit")
    def test_dare_that_drops_nothing_is_task_arithmetic(self, count, shape):
        base, models = make_models(count, shape)
        ours = merge_ours(base, models, "dare+sum", stages=KEEP_ALL)
        assert_same(ours, merge_theirs(base, models, "dare_linear", density=1.0, weight=1.0))
        assert_same(ours, merge_theirs(base, models, "task_arithmetic", weight=1.0))

    @compares("dare_linear", "mergekit")
    def test_linear_is_task_arithmetic_with_weights_that_add_up_to_one(self, count, shape):
        base, models = make_models(count, shape)
        ours = merge_ours(base, models, "dare+linear", stages=KEEP_ALL)
        weight = 1 / count
        assert_same(ours, merge_theirs(base, models, "dare_linear", density=1.0, weight=weight))

    @compares("task_arithmetic", "PEFT")
    def test_sum_of_deltas_is_pefts(self, count, shape):
        _, deltas = make_models(count, shape)
        ours = merge_ours(torch.zeros(shape), deltas, "sum")
        assert_same(ours, peft.task_arithmetic(deltas, torch.ones(count)))


@compares("linear", "mergekit")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 0.7, 1.1), (3.0, 1.0, 2.0, 0.5, 0.1)])
def test_a_mean_of_weights_is_the_first_and_a_mean_of_changes_to_it(weights, shape):
    # Theirs rounds a product and a sum for each model and a division; ours a difference, a product
    # and a sum, shares that are rounded, and the base at the end.
    first, others = make_models(len(weights) - 1, shape)
    theirs = merge_theirs(first, others, "linear", weight=list(weights))
    shares = [weight / sum(weights) for weight in weights[1:]]
    ours = merge_ours(first, others, "linear", weights=shares)
    assert_within(ours, theirs, 2 * (len(weights) + 1), first.abs() + sum(o.abs() for o in others))


@compares("linear", "mergekit")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 0.7, 1.1), (3.0, -1.0, 2.0, 0.5, 0.1)])
def test_a_sum_of_whole_models_may_have_the_base_among_them(weights, normalize):
    base, others = make_models(len(weights) - 1)
    theirs = merge_theirs(base, others, "linear", weight=list(weights), normalize=normalize)
    stages = {"linear": {"on": "weights", "normalize": normalize}}
    ours = merge_ours(base, [base, *others], "linear", weights=weights, stages=stages)
    largest = max(map(abs, weights)) * (base.abs() + sum(other.abs() for other in others))
    assert_within(ours, theirs, 2 * (len(weights) + 2), largest)


@compares("task_arithmetic", "mergekit")
@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.7), (1.0, -0.3, 2.0), (1.0, -1.0, 0.0)])
def test_a_sum_can_be_divided_by_that_of_the_weights(weights):
    base, models = make_models(3)
    stages = {"sum": {"normalize": True}}
    ours = merge_ours(base, models, "sum", weights=weights, stages=stages)
    theirs = merge_theirs(base, models, "task_arithmetic", weight=list(weights), normalize=True)
    assert_within(ours, theirs, 8, base.abs() + sum((model - base).abs() for model in models))


@compares("linear", "mergekit")
def test_difference_weights_that_cancel_are_refused():
    """They divide by 0, and all is infinite or NaN."""
    base, models = make_models(1)
    stages = {"linear": {"on": "weights", "normalize": True}}
    with pytest.raises(dare.RecipeError, match="add up to 0"):
        merge_ours(base, [base, *models], "linear", weights=[1.0, -1.0], stages=stages)
    theirs = merge_theirs(base, models, "linear", weight=[1.0, -1.0])
    assert not theirs.isfinite().any()


@compares("magnitude_prune", "PEFT")
@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 0.25, -0.7)])
def test_trimming_and_adding_up_is_pefts_magnitude_prune(density, weights):
    _, deltas = make_models(3)
    stages = {"trim": {"keep_ratio": density}}
    ours = merge_ours(
        torch.zeros_like(deltas[0]), deltas, "trim+sum", stages=stages, weights=weights
    )
    assert_same(ours, peft.magnitude_prune(deltas, torch.tensor(weights), density))


@pytest.mark.parametrize("count", [5, 8, 17])
@compares("task_arithmetic", "mergekit")
def test_more_models_differ_only_by_the_order_of_torchs_sum(count):
    # torch adds more than four rows in interleaved partial sums. Each of the two orders rounds
    # once for each model, and once when the base is added.
    base, models = make_models(count)
    magnitude = base.abs() + sum((model - base).abs() for model in models)
    ours = merge_ours(base, models, "sum")
    theirs = merge_theirs(base, models, "task_arithmetic", weight=1.0)
    assert_within(ours, theirs, 2 * (count + 1), magnitude)


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.7), (1.0, -0.3, 2.0), (0.0, 1.0, 1e-3)])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@compares("task_arithmetic", "mergekit")
def test_weights_and_scale(weights, scale):
    base, models = make_models(3)
    ours = merge_ours(base, models, "sum", weights=weights, scale=scale)
    theirs = merge_theirs(
        base, models, "task_arithmetic", weight=list(weights), **{"lambda": scale}
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@compares("task_arithmetic", "mergekit")
def test_narrow_types_are_rounded_once(dtype):
    base, models = make_models(3, dtype=dtype)
    ours = merge_ours(base, models, "linear")
    weight = 1 / 3
    in_float32 = merge_theirs(
        base, models, "task_arithmetic", dtype=torch.float32, out_dtype=dtype, weight=weight
    )
    assert_same(ours, in_float32)


@compares("task_arithmetic", "mergekit")
def test_difference_mergekit_computes_in_the_storage_type_unless_told_otherwise():
    base, models = make_models(3, dtype=torch.bfloat16)
    exact = base.double() + sum((model.double() - base.double()) / 3 for model in models)
    ours = merge_ours(base, models, "linear")
    theirs = merge_theirs(base, models, "task_arithmetic", weight=1 / 3)

    our_error = (ours.double() - exact).abs()
    their_error = (theirs.double() - exact).abs()
    # bfloat16 has 8 bits, so the nearest one is at most 2⁻⁹ of the next power of two away; a
    # thousandth more is for the float32 arithmetic before that rounding.
    half_step = 2.0 ** (exact.abs().log2().floor() - 8)
    assert (our_error <= half_step * 1.001).all()
    assert (their_error > half_step * 1.001).any()
    assert their_error.sum() > our_error.sum()


@compares("dare_linear", "mergekit")
def test_difference_weights_default_to_one_over_n_in_linear():
    """mergekit has no default, and its `normalize` divides by Σw: that is our linear."""
    base, models = make_models(2)
    ours = merge_ours(base, models, "dare_linear", stages=KEEP_ALL)
    normalized = merge_theirs(base, models, "dare_linear", density=1.0, weight=1.0, normalize=True)
    assert_same(ours, normalized)
    with pytest.raises(TypeError, match="Missing required parameter weight"):
        merge_theirs(base, models, "dare_linear", density=1.0)
