"""How a fine-tune is stored: what of its change is kept, and in how many bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dare.errors import RecipeError

Keep = Literal["random", "magnitude"]
Bits = Literal["native", 8, 4, 2, 1]

KEEP: tuple[Keep, ...] = ("random", "magnitude")
BITS: tuple[Bits, ...] = ("native", 8, 4, 2, 1)


USUAL_RATES: dict[Bits, float] = {"native": 0.9, 8: 0.9, 4: 0.8, 2: 0.62, 1: 0.25}
"""The drop rate for so many bits, if none is given: about 0.8 bits for each parameter at 16 bit
storage, and twice that for values as they are."""
USUAL_BITS: Bits = 2
"""What keeps most of a fine-tune in that size (docs/deltas-measured.md)."""


@dataclass(frozen=True)
class Scheme:
    """What is kept of every change, and how it is written down."""

    drop_rate: float
    bits: Bits = "native"
    keep: Keep = "random"


@dataclass(frozen=True)
class Asked:
    """What a user asks for; the rest is chosen."""

    seed: int
    keep: Keep
    bits: Bits | None
    drop_rate: float | None
    embedding_drop_rate: float | None
    drop_rates: Mapping[str, float]
    """Of the tensors whose names match a pattern."""
    target_size: int | None
    target_error: float | None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for word, value, known in (("bits", self.bits, BITS), ("keep", self.keep, KEEP)):
            if value not in (None, *known):
                said = ", ".join(map(str, known))
                raise RecipeError(f"{word} = {value!r}: not known; use one of {said}")
        targets = [self.target_size, self.target_error]
        if targets.count(None) == 0:
            raise RecipeError("target_size and target_error are both given; leave one out")
        if targets.count(None) == 1 and self.drop_rate is not None:
            raise RecipeError("a target chooses the drop rate; leave drop_rate out")

    @property
    def has_target(self) -> bool:
        """Whether rate and bits are to be chosen."""
        return self.target_size is not None or self.target_error is not None

    def usual_scheme(self) -> Scheme:
        """What is meant where a rate or bits are not given; a rate alone is for native values."""
        bits, rate = self.bits, self.drop_rate
        if bits is None:
            bits = USUAL_BITS if rate is None else "native"
        if rate is None:
            rate = USUAL_RATES[bits] if self.keep == "random" else USUAL_RATES["native"]
        return Scheme(rate, bits, self.keep)
