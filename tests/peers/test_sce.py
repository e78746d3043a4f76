"""Select, calculate, erase: mergekit's sce."""

from __future__ import annotations

import pytest
import torch
from side_by_side import assert_same, assert_within, compares, make_models, merge_ours, merge_theirs

pytestmark = compares("sce", "mergekit")


def merge_sce(base, models, ratio=1.0):
    return merge_ours(base, models, "sce", stages={"sce": {"select_ratio": ratio}})


def magnitude(base, models):
    return base.abs() + sum((model - base).abs() for model in models)


@pytest.mark.parametrize("shape", [(1,), (37, 53), (3, 5, 7), (300, 301)])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_models_with_shares_of_the_squares(count, ratio, shape):
    base, models = make_models(count, shape)
    models = [base + 100 * (i + 1) * (model - base) for i, model in enumerate(models)]
    theirs = merge_theirs(base, models, "sce", dtype=torch.float64, select_topk=ratio)
    # Deltas are rounded, weights, products, their sum and divisor, the quotient and the result.
    assert_within(merge_sce(base, models, ratio), theirs, 8 + count, magnitude(base, models))


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_small_changes_have_equal_weights(ratio):
    base, models = make_models(3)
    theirs = merge_theirs(base, models, "sce", select_topk=ratio)
    assert_within(merge_sce(base, models, ratio), theirs, 11, magnitude(base, models))


@pytest.mark.parametrize("ratio", [0.0, 0.0004])
def test_where_nothing_is_selected_the_base_stays(ratio):
    base, models = make_models(2)
    assert_same(merge_sce(base, models, ratio), base)
    assert_same(merge_theirs(base, models, "sce", select_topk=ratio), base)


def test_one_model_differs_from_none():
    base, models = make_models(1)
    assert_same(merge_sce(base, models, 0.5), base)
    assert_same(merge_theirs(base, models, "sce", select_topk=0.5), base)


def test_a_sum_of_zero_counts_as_plus():
    base, models = torch.zeros(2), [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 2.0])]
    ours = merge_sce(base, models)
    assert_same(ours, merge_theirs(base, models, "sce"))
    assert ours.tolist() == [1, 2]


def test_a_model_with_hardly_any_weight_counts_for_less():
    base = torch.zeros(2)
    models = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1e-4])]
    theirs = merge_theirs(base, models, "sce", dtype=torch.float64)
    assert theirs[1] < 1.1e-6  # 10⁻⁴·10⁻⁸/10⁻⁶
    assert_within(merge_sce(base, models), theirs, 4, theirs)
