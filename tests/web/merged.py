"""Merges of the demonstration's models made by the package, to compare the page with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dare
from dare.demo.llama import Llama
from dare.demo.merges import BASE, CONFIG, TUNED
from dare.demo.tasks import TASKS, held_out_english
from dare.studies.candidates import Candidates

Arrays = Mapping[str, NDArray[Any]]


def merge(
    method: str,
    models: Sequence[str] = tuple(TUNED),
    weights: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    **more: Any,
) -> Arrays:
    """The merged weights; weights and seeds are one for each model."""
    entries = [
        dare.ModelEntry(
            file=TUNED[name],
            weight=None if weights is None else weights[place],
            seed=None if seeds is None else seeds[place],
        )
        for place, name in enumerate(models)
    ]
    recipe = dare.Recipe(base=BASE, models=entries, method=method, **more)
    return _candidates().make(recipe).arrays


@cache
def _candidates() -> Candidates:
    return Candidates(dare.Request.of(base=BASE, models=list(TUNED.values()), verbose=False))


def digest(arrays: Arrays) -> str:
    """SHA-256 over the stored bytes of all tensors in order of name."""
    whole = hashlib.sha256()
    for name in sorted(arrays, key=str.encode):
        whole.update(np.ascontiguousarray(arrays[name]).view(np.uint8))
    return whole.hexdigest()


def score(arrays: Arrays, prompts: int = 100, english_bytes: int = 4096) -> dict[str, float]:
    """Right answers in per cent by task, and `english`, the bits for a byte of it."""
    model = Llama(arrays, CONFIG)
    right = {task.name: 100 * model.share_right(task.examples("test", prompts)) for task in TASKS}
    return {**right, "english": model.bits_per_byte(held_out_english()[:english_bytes])}
