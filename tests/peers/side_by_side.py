"""Small models, our merge of them and a peer's, and how near the two must be.

A test here has one tensor, because every method but the mask works on tensors one by one; the mask
takes the tensor's name, so the tensor has one: NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import AGREEMENT
from mergekit.merge_methods import merge_tensors
from torch import Tensor

import dare

NAME = "model.layers.0.mlp.up_proj.weight"
SEED = 42
ROUNDING = 2.0**-24
"""The largest relative error of one float32 operation."""


compares = pytest.mark.compares
"""Says what a test compares: `@compares("ties", "mergekit")`."""
DEFINITION = "authors' definition"
"""The peer where a method's authors have published what they compute."""


def make_models(
    count: int, shape: Sequence[int] = (37, 53), dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return a base (σ = 0.02) and `count` fine-tunes of it (σ of the delta = 0.001)."""
    generator = torch.Generator().manual_seed(seed)
    base = 0.02 * torch.randn(shape, generator=generator)
    tuned = [base + 0.001 * torch.randn(shape, generator=generator) for _ in range(count)]
    return base.to(dtype), [model.to(dtype) for model in tuned]


def make_dyadic_deltas(count: int, shape: Sequence[int] = (37, 53), seed: int = 0) -> list[Tensor]:
    """Return deltas that are whole multiples of 2⁻¹⁰ and so add up without any rounding."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-64, 65, tuple(shape), generator=generator).float() / 1024
        for _ in range(count)
    ]


def far_models(count: int) -> list[Tensor]:
    """Tensors at angles of about 60°, of different lengths."""
    generator = torch.Generator().manual_seed(3)
    shared, *own = torch.randn((count + 1, 37, 53), generator=generator)
    return [(shared + each) * (1 + i) for i, each in enumerate(own)]


def merge_ours(base: Tensor, models: Sequence[Tensor], method: str, **settings: Any) -> Tensor:
    """Merge with dare."""
    settings = {"method": method, "seed": SEED, "verbose": False, **settings}
    merged, _ = dare.merge_arrays({NAME: base}, [{NAME: model} for model in models], **settings)
    return merged[NAME]


def merge_theirs(
    base: Tensor,
    models: Sequence[Tensor],
    method: str,
    *,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    **parameters: Any,
) -> Tensor:
    """Merge with mergekit's own function."""
    return merge_tensors(
        [base, *models],
        method,
        parameters=parameters,
        base_index=0,
        dtype=dtype,
        out_dtype=out_dtype,
    )


@contextmanager
def our_masks(drop_rate: float) -> Iterator[None]:
    """Let a peer draw, for one tensor of one model after the other, the masks that dare draws."""
    seeds = iter(range(SEED, SEED + 1000))

    def bernoulli(probabilities: Tensor) -> Tensor:
        asked = torch.full_like(probabilities, 1 - drop_rate)
        assert torch.equal(probabilities, asked), "the peer asks for another rate than the test"
        keep = dare.keep_mask(NAME, probabilities.numel(), drop_rate, next(seeds))
        return torch.from_numpy(keep).reshape(probabilities.shape).to(probabilities.dtype)

    with mock.patch("torch.bernoulli", bernoulli):
        yield


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Every element is equal, and of the same type (0 and -0 count as equal)."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    AGREEMENT.measure(ours, theirs)
    differing = (ours != theirs).sum().item()
    assert differing == 0, f"{differing} of {ours.numel()} elements differ"


def assert_within(ours: Tensor, theirs: Tensor, roundings: float, magnitude: Tensor) -> None:
    """Ours and theirs differ by no more than so many roundings of numbers of that magnitude."""
    assert ours.shape == theirs.shape
    AGREEMENT.measure(ours, theirs)
    distance = (ours.double() - theirs.double()).abs()
    bound = ROUNDING * magnitude.double().abs()
    worst = torch.where(distance == 0, 0, distance / bound).max().item()
    assert worst <= roundings, f"{worst:.1f} roundings apart; {roundings} are allowed"


def assert_near(ours: Tensor, theirs: Tensor, share: float) -> None:
    """The two differ, as a whole, by no more than this share of their norm."""
    assert ours.shape == theirs.shape
    AGREEMENT.measure(ours, theirs)
    found = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
    assert found <= share, f"{found:.1e} of the norm apart; {share:.1e} are allowed"
