"""The demonstration's models scored for a search: by prompts to choose by, and by others to test.

    dare search recipe.toml --eval dare.demo.scoring:validation --holdout dare.demo.scoring:holdout

The scores are shares of right answers on each task, and `english`, the bits needed for a byte of
English, of which fewer are better; an item is a prompt. The objective is `add sort say`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.demo.llama import Llama
from dare.demo.merges import CONFIG
from dare.demo.tasks import TASKS, Split, held_out_english

PROMPTS = 100
"""Prompts of each task, on the page too."""
ENGLISH_BYTES = 4096

Tensors = Mapping[str, NDArray[Any]]


def validation(tensors: Tensors, items: Sequence[str] | None = None) -> dict[str, Any]:
    """Score weights on the prompts to choose by."""
    return score(tensors, "validation", items, slice(0, ENGLISH_BYTES))


def holdout(tensors: Tensors, items: Sequence[str] | None = None) -> dict[str, Any]:
    """Score weights on other prompts, which choose nothing."""
    return score(tensors, "test", items, slice(ENGLISH_BYTES, 2 * ENGLISH_BYTES))


def score(
    tensors: Tensors, split: Split, items: Sequence[str] | None, english: slice
) -> dict[str, Any]:
    """Return the share of right answers on each task, each prompt's result, and English."""
    model = Llama(tensors, CONFIG)
    wanted = None if items is None else set(items)
    right: dict[str, float] = {}
    scores: dict[str, float] = {}
    for task in TASKS:
        examples = {
            f"{task.name}/{example.prompt}": example for example in task.examples(split, PROMPTS)
        }
        chosen = [name for name in examples if wanted is None or name in wanted]
        found = model.are_right([examples[name] for name in chosen]) if chosen else []
        right |= zip(chosen, map(float, found), strict=True)
        scores[task.name] = float(np.mean(found)) if found else 0.0
    scores["english"] = model.bits_per_byte(held_out_english()[english])
    return {**scores, "items": right}
