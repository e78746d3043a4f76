"""Drop And REscale."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from dare.documents.values import After
from dare.stages.blocks import Block, DeltaView, Mask
from dare.stages.registry import Settings, always, delta_stage, meaning
from dare.tensors.mask import check_drop_rate, keep_threshold, mask_key

DropRate = Annotated[
    float,
    After(partial(check_drop_rate, name="drop_rate")),
    meaning("Share of each delta's elements to drop, p.", ge=0, lt=1),
]
Rescale = Annotated[
    bool | Literal["l1"],
    meaning("Divide what is kept by 1 - p; l1: scale it to the delta's L1 norm."),
]


def drops(settings: Settings) -> bool:
    """Return whether anything is dropped at these settings."""
    return bool(settings["drop_rate"] > 0)


def survey_l1(view: DeltaView, *, drop_rate: float, rescale: Rescale) -> float:  # noqa: ARG001
    """Find the factor that gives the kept elements the L1 norm of the whole delta."""
    return view.l1_ratio(lambda block: _drop(block, drop_rate))


@delta_stage(
    paper="arXiv:2311.03099",
    sees="tensor",
    survey=survey_l1,
    surveys_when=lambda settings: settings["rescale"] == "l1" and drops(settings),
    is_lazy=always,
    is_random=drops,
    drops_at_random=True,
    for_delta_files=True,
    is_identity=lambda settings: not drops(settings),
    redrops=lambda settings: settings["rescale"] != "l1",
)
def dare(block: Block, *, drop_rate: DropRate = 0.9, rescale: Rescale = True) -> None:
    """Drop each element with probability p and divide the others by 1 - p.

    δ̂ᵢ = mᵢ·δᵢ / (1 - p), mᵢ = 1 with probability 1 - p, else 0, so that E[δ̂] = δ.

    `rescale = false` leaves the others as they are (then E[δ̂] = (1 - p)·δ), and `rescale = "l1"`
    scales them to the L1 norm of the whole delta, as mergekit does.
    """
    _drop(block, drop_rate)
    if rescale and drop_rate > 0:
        block.factor *= block.summary if rescale == "l1" else 1.0 / (1.0 - drop_rate)


def make_up_for(block: Block, drop_rate: float, seed: int, name: str) -> None:
    """Apply `dare` to a delta from which as much was dropped before, by this mask."""
    _drop_by(block, mask_key(seed, name), drop_rate)
    block.factor *= 1.0 / (1.0 - drop_rate)


def _drop(block: Block, drop_rate: float) -> None:
    if drop_rate > 0:
        key0, key1 = block.key
        _drop_by(block, (int(key0), int(key1)), drop_rate)


def _drop_by(block: Block, key: tuple[int, int], drop_rate: float) -> None:
    high, low = divmod(keep_threshold(drop_rate), 1 << 32)
    if high < 256:  # else everything is kept
        block.drop(Mask(*key, high, low))
