"""Small steps towards a model."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from dare.stages.blocks import Block
from dare.stages.registry import delta_stage, meaning

Step = Annotated[
    float, meaning("The largest magnitude that a change may have.", ge=0, allow_inf_nan=False)
]


@delta_stage()
def nearswap(block: Block, *, t: Step = 0.0001) -> None:
    """Limit every change to t: a small change is taken over whole, a large one in part.

    δ̂ᵢ = min(1, t/|δᵢ|)·δᵢ. Followed by `sum` it is mergekit's `nearswap`.
    """
    np.clip(block.delta, -np.float32(t), np.float32(t), out=block.values)
