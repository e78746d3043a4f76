"""Changes of one or of several: mergekit's ram and ramplus_tl."""

from __future__ import annotations

import pytest
import torch
from side_by_side import assert_within, compares, make_models, merge_ours, merge_theirs

SHAPES = [(), (1,), (37, 53), (300, 301)]


def sparse_models(count, shape):
    """Fine-tunes of which each has left some elements as they were."""
    base, models = make_models(count, shape)
    generator = torch.Generator().manual_seed(1)
    kept = [torch.rand(shape, generator=generator) < 0.1 * (i + 2) for i in range(count)]
    return base, [torch.where(keep, model, base) for keep, model in zip(kept, models, strict=True)]


def check(method, theirs_name, count, shape, given, parameters, dtype):
    base, models = sparse_models(count, shape)
    ours = merge_ours(base, models, method, stages={method: given})
    theirs = merge_theirs(base, models, theirs_name, dtype=dtype, **parameters)
    # A difference, a sum, a quotient and the factor are rounded, in theirs too.
    magnitude = base.abs() + sum((model - base).abs() for model in models)
    assert_within(ours, theirs, 2 * (count + 3), magnitude)


@compares("ram", "mergekit")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "threshold"), [(1, 1e-5), (3, 1e-5), (3, 1e-3), (6, 0.0)])
def test_ram(count, threshold, shape, dtype):
    check("ram", "ram", count, shape, {"threshold": threshold}, {"epsilon": threshold}, dtype)


@compares("ramplus_tl", "mergekit")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("boost", "most", "threshold"), [(0.1, 0.2, 1e-5), (0.5, 0.6, 1e-3), (2.0, 9.0, 1e-4)]
)
def test_ramplus(boost, most, threshold, shape, dtype):
    given = {"boost": boost, "most": most, "threshold": threshold}
    parameters = {"r": boost, "alpha": most, "epsilon": threshold}
    check("ramplus", "ramplus_tl", 3, shape, given, parameters, dtype)
