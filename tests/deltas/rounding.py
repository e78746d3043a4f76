"""Rounding to a few bits, plainly: what the kernels' quantiser is about, for tests of choosing."""

from __future__ import annotations

import ml_dtypes
import numpy as np

GROUP = 256


def rounded(values, bits):
    """Kept values as they come back: groups of 256, each with a scale in bfloat16."""
    groups = np.zeros((-(-values.size // GROUP), GROUP), np.float32)
    groups.reshape(-1)[: values.size] = values
    counts = np.minimum(GROUP, values.size - GROUP * np.arange(len(groups)))[:, None]
    mean = np.abs(groups).sum(axis=1, keepdims=True) / counts
    if bits in (8, 4):
        most = 2 ** (bits - 1) - 1
        scale = stored_scale(np.abs(groups).max(axis=1, keepdims=True) / most)
        levels = np.clip(np.rint(groups / np.where(scale, scale, 1)), -most, most)
    elif bits == 2:  # four levels, those that suit a Gaussian
        scale = stored_scale(mean)
        levels = np.where(np.abs(groups) < 1.23 * scale, 0.567, 1.893) * np.sign(groups)
    else:
        scale, levels = stored_scale(mean), np.sign(groups)
    return (scale * levels).astype(np.float32).reshape(-1)[: values.size]


def stored_scale(scale):
    return scale.astype(ml_dtypes.bfloat16).astype(np.float32)
