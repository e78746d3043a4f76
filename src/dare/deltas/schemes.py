"""How a fine-tune is stored: what of its change is kept, and in how many bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Keep = Literal["random", "magnitude"]
Bits = Literal["native", 8, 4, 2, 1]

BITS: tuple[Bits, ...] = ("native", 8, 4, 2, 1)


@dataclass(frozen=True)
class Scheme:
    """What is kept of every change, and how it is written down."""

    drop_rate: float = 0.9
    bits: Bits = "native"
    keep: Keep = "random"
