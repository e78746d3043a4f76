"""Spherical interpolation: mergekit's slerp on weights, its nuslerp with a base on deltas.

The peer is run in float64 where it lets us, so that the tolerance is for our roundings alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from side_by_side import assert_within, compares, make_models, merge_ours, merge_theirs

pytestmark = compares("slerp", "mergekit")

FRACTIONS = [0.0, 0.1, 0.5, 0.8, 1.0]
LIMIT = 0.9995
"""Beyond this cosine both we and mergekit's slerp take the straight line."""
EITHER_SIDE = [LIMIT - 2e-5, LIMIT + 2e-5]


def make_pair(cosine: float, size: int = 1961):
    """Return two tensors of different length with (very nearly) that cosine between them."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, size, generator=generator, dtype=torch.float64)
    first /= first.norm()
    second -= (second @ first) * first
    second /= second.norm()
    turned = cosine * first + math.sqrt(1 - cosine**2) * second
    return first.float(), (1.5 * turned).float()


def arc_coefficients(cosine: float, t: float) -> tuple[float, float]:
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def merge_slerp(base, models, t, on="weights"):
    return merge_ours(base, models, "slerp", stages={"slerp": {"t": t, "on": on}})


@pytest.mark.parametrize("t", FRACTIONS)
@pytest.mark.parametrize(
    "cosine", [-1.0, *[-c for c in EITHER_SIDE], -0.5, 0.0, 0.3, 0.9, *EITHER_SIDE, 1.0]
)
def test_slerp_at_any_angle(cosine, t):
    first, second = make_pair(cosine)
    theirs = merge_theirs(first, [second], "slerp", dtype=torch.float64, t=t)
    ours = merge_slerp(torch.zeros_like(first), [first, second], t)
    # Each of two coefficients is rounded, multiplied with and added. Near the opposite direction
    # they grow to 1/sin Ω ≈ 32, and so does what a rounded input can do to the cosine, but that
    # both sides see alike.
    straight = abs(cosine) > LIMIT
    weights = (1 - t, t) if straight else arc_coefficients(cosine, t)
    magnitude = weights[0] * first.abs() + weights[1] * second.abs()
    assert_within(ours, theirs, 3, magnitude)


@pytest.mark.parametrize("cosine", EITHER_SIDE)
def test_the_two_sides_of_the_limit_can_be_told_apart(cosine):
    """So that the test above would notice a limit at another place."""
    first, second = make_pair(cosine)
    ours = merge_slerp(torch.zeros_like(first), [first, second], 0.5).double()
    straight = (first.double() + second.double()) / 2
    length = (ours.norm() / straight.norm()).item()
    arc = 2 * arc_coefficients(cosine, 0.5)[0]
    assert arc > 1.0001
    assert length == pytest.approx(1.0 if cosine > LIMIT else arc, abs=1e-6)


@pytest.mark.parametrize("t", FRACTIONS)
def test_slerp_in_float32_as_its_users_run_it(t):
    # Both sides round their coefficients, products and sums: twice the bound above, and 2 for the
    # peer's angle, which it has from a float32 cosine.
    _, (first, second) = make_models(2)
    theirs = merge_theirs(first, [second], "slerp", t=t)
    ours = merge_slerp(torch.zeros_like(first), [first, second], t)
    assert_within(ours, theirs, 2 * 3 + 2, first.abs() + second.abs())


@pytest.mark.parametrize("t", FRACTIONS)
@pytest.mark.parametrize("cosine", [-0.9, -0.5, 0.0, 0.3, 0.9, EITHER_SIDE[0]])
@compares("nuslerp", "mergekit")
def test_slerp_on_deltas_is_nuslerp_with_a_base(cosine, t):
    base = make_models(1, shape=(1961,))[0]
    first, second = (base + delta for delta in make_pair(cosine))
    theirs = merge_theirs(base, [first, second], "nuslerp", dtype=torch.float64, weight=[1 - t, t])
    ours = merge_slerp(base, [first, second], t, on="deltas")
    # Two deltas are rounded, then coefficients, products, sums, and the base is added.
    weights = arc_coefficients(cosine, t)
    magnitude = base.abs() + weights[0] * (first - base).abs() + weights[1] * (second - base).abs()
    assert_within(ours, theirs, 5, magnitude)


@compares("nuslerp", "mergekit")
def test_difference_nuslerp_has_no_parallel_limit_in_mergekit():
    """It stays on the arc up to cos Ω = 1, so near it the two differ by a part in ten thousand."""
    first, second = make_pair(EITHER_SIDE[1])
    base = torch.zeros_like(first)
    theirs = merge_theirs(base, [first, second], "nuslerp", dtype=torch.float64, weight=[1.0, 1.0])
    ours = merge_slerp(base, [first, second], 0.5, on="deltas").double()
    growth = 2 * arc_coefficients(EITHER_SIDE[1], 0.5)[0]
    assert 1.0001 < growth < 1.00013
    torch.testing.assert_close(theirs, growth * ours, rtol=1e-6, atol=0)


@compares("nuslerp", "mergekit")
def test_difference_nuslerp_explodes_between_opposite_deltas_in_mergekit():
    first, second = make_pair(-EITHER_SIDE[1])
    base = torch.zeros_like(first)
    theirs = merge_theirs(base, [first, second], "nuslerp", dtype=torch.float64, weight=[1.0, 1.0])
    ours = merge_slerp(base, [first, second], 0.5, on="deltas")
    longest = max(first.norm(), second.norm())
    assert theirs.norm() > 5 * longest
    assert ours.norm() <= longest


def test_difference_the_angle_to_zero_is_zero():
    """They count zero as orthogonal to everything: sin(t·π/2) where we have t."""
    base, still, moved = torch.zeros(4), torch.zeros(4), torch.ones(4)
    assert merge_slerp(base, [still, moved], 0.5).tolist() == [0.5] * 4
    theirs = merge_theirs(still, [moved], "slerp", t=0.5)
    torch.testing.assert_close(theirs, torch.full((4,), math.sin(math.pi / 4)))
