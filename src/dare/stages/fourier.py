"""High-pass filter."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from dare.stages.blocks import Block, Floats, Walk
from dare.stages.matrices import as_matrix, gather_delta, is_matrix, sides, take_chunk
from dare.stages.registry import delta_stage

Radius = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Frequencies nearer to zero than this are dropped; 1 is the highest of a side.",
    ),
]


def survey_filtered(walk: Walk, *, radius: float) -> Floats | None:
    """Filter the matrix; None for what is not a matrix."""
    if not is_matrix(walk.shape):
        return None
    rows, columns = as_matrix(walk.shape)
    waves = np.fft.rfft2(gather_delta(walk))
    across = np.square(2 * np.fft.rfftfreq(columns))
    for row, down in enumerate(np.square(2 * np.fft.fftfreq(rows))):
        waves[row, across + down < radius**2] = 0
    filtered: Floats = np.fft.irfft2(waves, s=(rows, columns)).astype(np.float32, copy=False)
    return filtered


def survey_bytes(shape: tuple[int, ...], _models: int) -> int:
    """The matrix, its waves while they are made, and the result."""
    short, long = sides(shape)
    return 4 * 8 * (short + 2) * (long + 2) if is_matrix(shape) else 0


@delta_stage(
    paper="arXiv:2411.16815",
    survey=survey_filtered,
    surveys_when=lambda settings: settings["radius"] > 0,
    survey_bytes=survey_bytes,
)
def fourier(block: Block, *, radius: Radius = 0.1) -> None:
    """Drop the low frequencies of each matrix, where models disturb each other most (FREE).

    F⁻¹(F(δ)·H), with F the two-dimensional Fourier transform and H(a, b) = 0 where
    √(a² + b²) < radius, else 1. The frequencies a and b run from -1 to 1 along either side, 1 being
    a change of sign from each element to the next, so radius 0.1 drops π·0.1²/4 = 0.8 % of them.
    Vectors and scalars stay as they are. Computed in float32, to 1e-5 of the norm.

    The radius is ours. The authors' code keeps what lies within 0.7 times the shorter side of the
    highest frequency (for vision models): of a square matrix that is about radius 0.02, and of one
    four times as long as wide it drops two thirds.
    """
    if radius > 0 and block.summary is not None:
        take_chunk(block)
