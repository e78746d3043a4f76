"""What the tests of matrix stages share: merges of a single tensor, and their plans."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
from combining import combine
from hypothesis import strategies as st

from dare.inputs.arrays import array_source
from dare.kernels import linalg
from dare.planning.make import make_plan
from dare.recipe.recipe import ModelEntry, Request
from dare.stages import STAGES

seeds = st.integers(0, 2**32 - 1)
sides = st.integers(2, 12)


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rotation(size, seed):
    return np.linalg.qr(gaussian(size, size, seed=seed).astype(np.float64))[0]


def merge(method, *deltas, backend="reference", **settings):
    """Merge deltas onto a base of zeros."""
    return combine(method, *deltas, backend=backend, **settings)


def plan(method, shapes, models=1, **settings):
    named = shapes if isinstance(shapes, dict) else {f"w{i}": s for i, s in enumerate(shapes)}
    base = {name: np.broadcast_to(np.float32(0), shape) for name, shape in named.items()}
    names = [f"model {number}" for number in range(models)]
    entries = [ModelEntry(file=name) for name in names]
    asked = Request.of(base="base", models=entries, method=method, verbose=False, **settings)
    return make_plan(
        asked.recipe,
        array_source(base, "base"),
        [array_source(base, name) for name in names],
        names,
        options=asked.options,
    )


def relative(found, expected):
    norm = np.linalg.norm(np.asarray(expected, np.float64))
    return float(np.linalg.norm(found - np.asarray(expected, np.float64)) / norm)


def svd(matrix):
    return np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)


def polar(matrix):
    left, _, right = svd(matrix)
    return left @ right


def sketch_small(monkeypatch):
    """Look for low rank in small matrices too."""
    monkeypatch.setattr(linalg, "SKETCH", 24)
    monkeypatch.setattr(linalg, "SKETCHED_FROM", 64)


class FakeWalk:
    """A walk over arrays that are there already, in one chunk."""

    spare_bytes = 0
    kernels = None

    def __init__(self, kind, deltas):
        self.shape = deltas[0].shape
        blocks = [
            SimpleNamespace(values=d.reshape(-1), factor=1.0, start=0, size=d.size, tensor="w")
            for d in deltas
        ]
        weights = [1.0] * len(blocks)
        together = SimpleNamespace(blocks=blocks, weights=weights, size=deltas[0].size)
        self.yielded = blocks[0] if kind == "delta" else together

    def __call__(self):
        return iter([self.yielded])


def surveyed_bytes(name, deltas, **settings):
    """The most that a stage's survey has allocated, and what it says it may."""
    stage = STAGES[name]
    walk = FakeWalk(stage.kind, deltas)
    complete = stage.settings(settings, "")
    tracemalloc.start()
    try:
        if stage.kind == "refine":
            matrices = [delta.copy() for delta in deltas]
            stage.survey(sum(deltas), matrices, walk.yielded.weights, **complete)
        else:
            stage.survey(walk, **complete)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak, stage.survey_bytes(deltas[0].shape, len(deltas))
