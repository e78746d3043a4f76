"""The arithmetic, on chunks of one tensor.

`reference` (NumPy) defines every function; `cpu` (Numba) has the same functions with the same
bits, fast, and `native` runs them. `load` returns a module with these functions.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.errors import RecipeError, did_you_mean

MODULES = {"cpu": "native", "reference": "reference"}
BACKENDS = tuple(MODULES)
LANES_MULTIPLE = 8192
"""Arrays of lanes have a multiple of this length, which kernels work on at a time, in caches."""
ROW = LANES_MULTIPLE + 16
"""Distance between rows of sums: not a power of two, or they would share cache sets."""
PLACES_AT_ONCE = 8  # places that are written for each 64 lanes without counting those that are set


class Operand(NamedTuple):
    """One model as an operand of `combine`."""

    tuned: NDArray[Any]  # stored elements, as carriers of their type
    mask: tuple[int, int, int, int] | None
    """Key words and the threshold's two parts; None keeps everything."""
    least: int  # bits of the least magnitude that is kept; 0 keeps everything
    weight: np.float32
    share: float  # the model's addition to the divisor of its side, when signs are elected


def check_backend(backend: str) -> str:
    """Refuse a name that no backend has."""
    if backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS)
        raise RecipeError(f"backend {backend!r}: not known{hint}; use one of {', '.join(BACKENDS)}")
    return backend


def load(backend: str) -> Any:
    """Import a backend's kernels; Numba is only imported when something must be compiled."""
    return importlib.import_module(f"dare.kernels.{MODULES[check_backend(backend)]}")
