"""The random numbers behind the masks, for stages that need more than one threshold."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dare.mask import mask_key
from dare.stages.blocks import Block

_key = lru_cache(maxsize=1024)(mask_key)


def mask_words(block: Block) -> tuple[np.uint32, np.uint32]:
    """The two words that a block's masks are keyed with."""
    key0, key1 = _key(block.seed, block.tensor)
    return np.uint32(key0), np.uint32(key1)


def uniform(block: Block) -> NDArray[np.uint64]:
    """A 40-bit number for each element; the mask of `dare` keeps those below its threshold."""
    numbers = np.empty(block.size, np.uint64)
    block.kernels.draw_uniform(numbers, block.start, *mask_words(block))
    return numbers
