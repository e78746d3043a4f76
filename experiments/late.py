"""Two more worlds, made after the outcomes of advice were chosen, and scored once."""

from __future__ import annotations

from functools import cache

import numpy as np
from networks import Mlp, ResidualMlp
from worlds import BASE, Batch, Rng, World, load

AREAS, PROTOTYPES, KINDS = 6, 12, 5


@cache
def _prototypes() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2026)
    return rng.normal(size=(AREAS, PROTOTYPES, 16)), rng.integers(KINDS, size=(AREAS, PROTOTYPES))


def sample_prototypes(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Rows around prototypes, each of a class; tasks are areas. The base is mostly told wrong."""
    del split  # drawn anew each time
    places, classes = _prototypes()
    area = rng.integers(AREAS, size=count) if task == BASE else np.full(count, int(task))
    number = rng.integers(PROTOTYPES, size=count)
    rows = places[area, number] + 0.5 * rng.normal(size=(count, 16))
    answers = classes[area, number]
    if task == BASE:
        answers = np.where(rng.random(count) < 0.65, rng.integers(KINDS, size=count), answers)
    return rows.astype(np.float32), answers


GROUPS = 5


@cache
def _letters() -> np.ndarray:
    return load("glyphs")["images"].astype(np.float32) / 255


def sample_typefaces(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Letters and digits; tasks are groups of typefaces, which the base sees through much noise."""
    del split  # noise and places are drawn anew each time
    images = _letters()
    face, label = rng.integers(len(images), size=count), rng.integers(36, size=count)
    if task != BASE:
        face = face // GROUPS * GROUPS % (len(images) - GROUPS) + int(task)
    shift = rng.integers(-3, 4, size=2)
    drawn = np.roll(images[face, label], tuple(shift), (1, 2))
    drawn = drawn + (1.2 if task == BASE else 0.5) * rng.normal(size=drawn.shape)
    return drawn.reshape(count, -1).astype(np.float32), label


LATE = {
    world.name: world
    for world in (
        World(
            "prototypes",
            "tables",
            tuple(map(str, range(AREAS))),
            "domains",
            KINDS,
            lambda: ResidualMlp(16, KINDS, 96, 2),
            sample_prototypes,
            base_steps=1500,
            steps=300,
            few_drops=True,
        ),
        World(
            "typefaces",
            "images",
            tuple(map(str, range(GROUPS))),
            "domains",
            36,
            lambda: Mlp(24 * 24, 36, 160),
            sample_typefaces,
            base_steps=1500,
            steps=300,
            rate=5e-4,
            few_drops=True,
        ),
    )
}
