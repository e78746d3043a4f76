"""Small steps: mergekit's nearswap."""

from __future__ import annotations

import pytest
import torch
from side_by_side import assert_within, compares, make_models, merge_ours, merge_theirs

pytestmark = compares("nearswap", "mergekit")


def merge_nearswap(base, model, t):
    return merge_ours(base, [model], "nearswap", stages={"nearswap": {"t": t}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [0.0, 1e-5, 1e-3, 0.1])
def test_every_change_is_limited(t, dtype):
    base, (model,) = make_models(1)
    theirs = merge_theirs(base, [model], "nearswap", dtype=dtype, t=t)
    # Theirs rounds a quotient, two products and a sum; ours a difference and a sum.
    assert_within(merge_nearswap(base, model, t), theirs, 6, base.abs() + model.abs())


def test_difference_a_change_below_a_millionth_is_taken_over():
    """They divide t by no less than 10⁻⁶, which shortens smaller changes at t < 10⁻⁶."""
    base, model = torch.zeros(1), torch.tensor([1e-8])
    assert merge_nearswap(base, model, 1e-7).item() == model.item()
    assert merge_theirs(base, [model], "nearswap", t=1e-7).item() < 0.2 * model.item()
