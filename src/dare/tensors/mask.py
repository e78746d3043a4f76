"""Mask v1: which elements of a delta are kept, as a function of position.

    keep(seed, tensor name, element index, drop rate) -> bool

Nothing else matters: not the shape, the block or thread that asks, the order of tensors, the file
they lie in or the other models. docs/mask.md is the specification with test vectors; this module
is its executable form, in NumPy, and the fast kernels are tested against it bit for bit.

The generator is Philox4x32 with seven rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011; seven rounds are the fewest that pass BigCrush there). Eight calls yield 128
bytes, one for each of 128 neighbouring elements. A byte decides 255 times out of 256; where it
equals the threshold's first byte, a 32-bit word of another call decides, so a rate is exact to
2**-41.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dare.errors import RecipeError

MASK_VERSION: Final = 1
# Version of the keys of a chain's later random stages: mask v1 has one draw.
LATER_DRAWS_VERSION = 1
ROUNDS = 7
CALLS_PER_GROUP = 8
GROUP = 128  # elements whose lanes come from the same eight calls
THRESHOLD_BITS = 40
# Third counter word of the calls that break ties; it is 0 in the calls that fill lanes.
TIE_BREAK = 1

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = NDArray[np.uint64]  # 32-bit words held in uint64, so that products do not overflow


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int], rounds: int = ROUNDS
) -> tuple[Words, Words, Words, Words]:
    """Run Philox4x32 on arrays of counter words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def mask_key(seed: int, name: str, draw: int = 0) -> tuple[int, int]:
    """Derive the Philox key of one tensor of one model.

    Each random stage of a chain has a draw of its own, so that what one keeps says nothing of what
    the next one keeps. The first, 0, is that of mask v1.
    """
    later = f" draw {draw}" if draw else ""
    text = f"dare mask v{MASK_VERSION}{later}\n{seed}\n{name}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def keep_threshold(drop_rate: float) -> int:
    """Return the keep probability 1 - p as a whole number of 2**-40.

    >>> keep_threshold(0.0) == 2**40, keep_threshold(0.5) == 2**39
    (True, True)
    """
    return round(math.ldexp(1.0 - check_drop_rate(drop_rate), THRESHOLD_BITS))


def check_drop_rate(drop_rate: float, name: str = "drop_rate") -> float:
    """Return the rate as a float if it lies in [0, 1), else say why it cannot be used."""
    try:
        rate = float(drop_rate)
    except (TypeError, ValueError):
        raise RecipeError(f"{name} = {drop_rate!r}: must be a number") from None
    if rate == 1:
        what = f"{name} = 1 would drop every change and leave nothing to rescale"
        other = ", or leave the model out" if name == "drop_rate" else ""
        raise RecipeError(f"{what}; use a rate below 1 (0.9 is usual){other}")
    if not 0 <= rate < 1:
        raise RecipeError(f"{name} = {drop_rate}: must be at least 0 and below 1")
    return rate


def keep_mask(
    name: str, size: int, drop_rate: float, seed: int, start: int = 0
) -> NDArray[np.bool_]:
    """Say which of the elements start … start + size of the tensor called `name` are kept.

    >>> whole = keep_mask("lm_head.weight", 1000, 0.9, seed=42)
    >>> bool((keep_mask("lm_head.weight", 10, 0.9, seed=42, start=500) == whole[500:510]).all())
    True
    """
    if size < 0 or start < 0:
        raise RecipeError(f"size = {size}, start = {start}: neither may be negative")
    threshold = keep_threshold(drop_rate)
    return keep_lanes(mask_key(seed, name), size, threshold >> 32, threshold & 0xFFFFFFFF, start)


def keep_lanes(
    key: tuple[int, int], size: int, high: int, low: int, start: int
) -> NDArray[np.bool_]:
    """Compute a mask from a derived key and the two parts of a threshold."""
    lanes = draw_lanes(key, size, start)
    keep = lanes < np.uint16(high)  # high is 256 when nothing is dropped
    ties = np.flatnonzero(lanes == np.uint16(high))
    keep[ties] = draw_tie_words(key, ties.astype(np.uint64) + np.uint64(start)) < np.uint64(low)
    return keep


def draw_lanes(key: tuple[int, int], size: int, start: int) -> NDArray[np.uint8]:
    """Draw a byte for each of the elements start … start + size."""
    first_group = start // GROUP
    groups = -(-(start + size) // GROUP) - first_group
    calls = np.arange(CALLS_PER_GROUP * groups, dtype=np.uint64)
    words = _call(calls + np.uint64(CALLS_PER_GROUP * first_group), 0, key)
    # All first words of a group's calls, then all second ones, and so on: one byte per element.
    by_word = np.stack(words).reshape(4, groups, CALLS_PER_GROUP).transpose(1, 0, 2)
    lanes = np.ascontiguousarray(by_word).astype("<u4").view(np.uint8).reshape(-1)
    skip = start - first_group * GROUP
    return lanes[skip : skip + size]


def draw_tie_words(key: tuple[int, int], elements: Words) -> Words:
    """Draw the words that break ties for some elements."""
    return _call(elements, TIE_BREAK, key)[0]


def _call(index: Words, domain: int, key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    third = np.full_like(index, domain)
    return philox4x32((index & _LOW, index >> _SHIFT, third, np.zeros_like(index)), key)
