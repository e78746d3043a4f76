"""How a fine-tune is stored: what of its change is kept, and in how many bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Keep = Literal["random", "magnitude"]
Bits = Literal["native", 8, 4, 2, 1]

BITS: tuple[Bits, ...] = ("native", 8, 4, 2, 1)


USUAL_RATES: dict[Bits, float] = {"native": 0.9, 8: 0.9, 4: 0.8, 2: 0.6, 1: 0.25}
"""The drop rate for so many bits, if none is given: about 0.8 bits for each parameter at 16 bit
storage, and twice that for values as they are."""
USUAL_BITS: Bits = 2
"""What keeps most of a fine-tune in that size (docs/deltas-measured.md)."""


@dataclass(frozen=True)
class Scheme:
    """What is kept of every change, and how it is written down."""

    drop_rate: float
    bits: Bits
    keep: Keep = "random"


def usual_scheme(drop_rate: float | None, bits: Bits | None, keep: Keep) -> Scheme:
    """What is meant where a rate or bits are not given; a rate alone is for values as they are."""
    if bits is None:
        bits = USUAL_BITS if drop_rate is None else "native"
    return Scheme(USUAL_RATES[bits] if drop_rate is None else drop_rate, bits, keep)
