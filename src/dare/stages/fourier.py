"""High-pass filter."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

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
    work_bytes=lambda m, n, _models: 4 * 8 * (m + 2) * (n + 2),  # if all waves are low
    acts_when=lambda settings: settings["radius"] > 0,
)
def fourier(matrix: Floats, *, radius: Radius = 0.1) -> Floats:
    """Drop the low frequencies of each matrix, where models disturb each other most (FREE).

    F⁻¹(F(δ)·H), with F the two-dimensional Fourier transform and H(a, b) = 0 where
    √(a² + b²) < radius, else 1. The frequencies a and b run from -1 to 1 along either side, 1 being
    a change of sign from each element to the next, so radius 0.1 drops π·0.1²/4 = 0.8 % of them:
    these are computed and subtracted. Vectors and scalars stay as they are; so do embeddings and
    heads, unless `embeddings = "matrices"`. Computed in float32, to 1e-5 of the norm.

    The radius is ours. The authors' code keeps what lies within 0.7 times the shorter side of the
    highest frequency (for vision models): for a square matrix that is about radius 0.02, and from
    one four times as long as wide it drops two thirds.
    """
    is_tall = len(matrix) > matrix.shape[1]
    tall = matrix if is_tall else matrix.T
    basis, across = _waves(tall.shape[1], radius)
    waves = np.fft.rfft(tall @ basis, axis=0)
    down = np.square(2 * np.fft.rfftfreq(len(tall)))
    for wave, own in zip(waves.T, across, strict=True):
        wave[own + down >= radius**2] = 0
    low = np.fft.irfft(waves, n=len(tall), axis=0).astype(np.float32, copy=False)
    del waves
    dropped: Floats = low @ basis.T if is_tall else basis @ low.T
    return np.subtract(matrix, dropped, out=dropped)


def _waves(length: int, radius: float) -> tuple[Floats, NDArray[np.float64]]:
    """Return an orthonormal basis of all waves below a frequency, and their squared frequencies.

    Its columns are the constant, cosines and sines.
    """
    numbers = np.arange(1, (length + 1) // 2)
    numbers = numbers[2 * numbers / length < radius]
    turns = np.outer(np.arange(length), numbers) % length
    angles = 2 * np.pi / length * np.arange(length)
    basis = np.full((length, 1 + 2 * numbers.size), length**-0.5, np.float32)
    for wave, start in ((np.cos, 1), (np.sin, 1 + numbers.size)):
        values = (np.sqrt(2 / length) * wave(angles)).astype(np.float32)
        np.take(values, turns, out=basis[:, start : start + numbers.size])
    return basis, np.square(2 / length * np.concatenate([[0], numbers, numbers]))
