"""A model as it is."""

from __future__ import annotations

from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import always, combine_stage


@combine_stage(default_weight=None, models=0, is_lazy=always)
def passthrough(deltas: Deltas) -> Floats:
    """Copy the base, which may be a stack of layers: no models are merged into it."""
    return deltas.sum(())
