"""High-pass filter."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from dare.stages.blocks import Floats
from dare.stages.matrices import matrix_delta_stage
from dare.stages.registry import meaning

Radius = Annotated[
    float,
    meaning(
        "Frequencies nearer to zero than this are dropped; 1 is the highest of a side.", ge=0, le=1
    ),
]


@matrix_delta_stage(
    paper="arXiv:2411.16815",
    work_bytes=lambda m, n, _models: 4 * 8 * (m + 2) * (n + 2),  # the waves, while they are made
    acts_when=lambda settings: settings["radius"] > 0,
)
def fourier(matrix: Floats, *, radius: Radius = 0.1) -> Floats:
    """Drop the low frequencies of each matrix, where models disturb each other most (FREE).

    F⁻¹(F(δ)·H), with F the two-dimensional Fourier transform and H(a, b) = 0 where
    √(a² + b²) < radius, else 1. The frequencies a and b run from -1 to 1 along either side, 1 being
    a change of sign from each element to the next, so radius 0.1 drops π·0.1²/4 = 0.8 % of them.
    Vectors and scalars stay as they are. Computed in float32, to 1e-5 of the norm.

    The radius is ours. The authors' code keeps what lies within 0.7 times the shorter side of the
    highest frequency (for vision models): of a square matrix that is about radius 0.02, and of one
    four times as long as wide it drops two thirds.
    """
    rows, columns = matrix.shape
    waves = np.fft.rfft2(matrix)
    across = np.square(2 * np.fft.rfftfreq(columns))
    for row, down in enumerate(np.square(2 * np.fft.fftfreq(rows))):
        waves[row, across + down < radius**2] = 0
    filtered: Floats = np.fft.irfft2(waves, s=(rows, columns)).astype(np.float32, copy=False)
    return filtered
