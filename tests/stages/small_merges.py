"""Merges of one tensor `w`, to look at what stages do."""

from __future__ import annotations

from typing import Any

import numpy as np

import dare

CHUNK = 1 << 19


def merge_deltas(method: str, *deltas: Any, backend: str = "cpu", **settings: Any) -> np.ndarray:
    """Merge deltas onto zeros."""
    tuned = [np.array(delta, np.float32) for delta in deltas]
    given = {"verbose": False, "threads": 1, "allow_not_finite": True, **settings}
    result, _ = dare.merge_arrays(
        {"w": np.zeros_like(tuned[0])},
        [{"w": delta} for delta in tuned],
        method=method,
        backend=backend,
        **given,
    )
    return result["w"]


def largest_first(magnitudes: np.ndarray) -> np.ndarray:
    """Positions in the last dimension from the largest to the smallest, equals by index."""
    return np.argsort(-magnitudes, axis=-1, kind="stable")
