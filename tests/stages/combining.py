"""Combine stages on deltas: by hand, by any backend, and over several chunks."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import dare

BACKENDS = ["reference", "cpu"]
CHUNK = 1 << 19
LARGE = (3, 200_003)
"""A shape of 600,009 elements: a chunk and a bit, with its border inside of a row."""


def combine(method, *deltas, base=None, **settings):
    """Merge deltas onto a base of zeros (or the one given); return the tensor."""
    deltas = [np.array(delta, np.float32) for delta in deltas]
    origin = np.zeros_like(deltas[0]) if base is None else np.array(base, np.float32)
    given = {"verbose": False, "threads": 1, "allow_not_finite": True, **settings}
    models = [{"w": origin + delta} for delta in deltas]
    return dare.merge_arrays({"w": origin}, models, method=method, **given)[0]["w"]


def largest_first(magnitudes):
    """Positions in the last dimension from the largest to the smallest, equals by index."""
    return np.argsort(-magnitudes, axis=-1, kind="stable")


def large_deltas(count, shape=LARGE):
    """Deltas that share a part, so that there is something to agree on."""
    generator = np.random.default_rng(0)
    shared, *own = generator.standard_normal((count + 1, *shape)).astype(np.float32)
    return [(shared + each) * np.float32(0.5 + i) for i, each in enumerate(own)]


def few_deltas(least=1, most=4):
    """Strategy: some deltas of up to 12 elements, whole numbers, so that sums are exact."""
    values = st.integers(-8, 8).map(float)
    shapes = st.tuples(st.integers(least, most), st.integers(1, 12))
    return shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=values))
