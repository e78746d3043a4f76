"""The expectation of chains: E[δ̂]/δ of every stage and every pair of delta stages, as a table.

Changes are of one sign, |N(0, 1)|, so that a sum shows every factor; stages are at their defaults
but for drop rates of 0.5, so that both stages of a pair have much to drop. The interval is that of
the mean over seeds, at 95%.

    python bench/chains.py > /tmp/table.md      # the table in docs/numbers.md
"""

from __future__ import annotations

import statistics
import warnings

import numpy as np

import dare
from dare.stages import STAGES

SEEDS = 200
SHAPE = (256, 320)
NAME = "layers.0.weight"
RANDOM = ("dare", "darex", "della", "nm (random)")
VARIANTS: dict[str, dict[str, object]] = {
    **{name: {"drop_rate": 0.5} for name in ("dare", "darex", "della")},
    "nm (random)": {"choose": "random"},
    "nm (magnitude)": {},
    "trim": {"keep_ratio": 0.5},
    **{name: {} for name in ("breadcrumbs", "star", "fourier")},
}
"""Stages with their settings; what stands in brackets is no part of a stage's name."""


def stage_of(variant: str) -> str:
    return variant.partition(" ")[0]


def ratio(chain: tuple[str, ...]) -> tuple[float, float]:
    """The mean of Σδ̂/Σδ over seeds, and half of its interval."""
    delta = np.abs(np.random.default_rng(0).standard_normal(SHAPE, np.float32))
    stages = {stage_of(name): VARIANTS[name] for name in chain}
    how = {"method": "+".join([*stages, "linear"]), "stages": stages, "verbose": False}
    base, ratios = {NAME: np.zeros_like(delta)}, []
    for seed in range(SEEDS if set(chain) & set(RANDOM) else 2):
        merged, _ = dare.merge_arrays(base, [{NAME: delta}], seed=seed, **how)
        ratios.append(float(merged[NAME].sum(dtype=np.float64) / delta.sum(dtype=np.float64)))
    return statistics.mean(ratios), 2 * statistics.stdev(ratios) / len(ratios) ** 0.5


def cell(first: str, second: str) -> str:
    """One pair, or one stage by itself."""
    if first != second and stage_of(first) == stage_of(second):
        return "–"  # a stage stands in a chain once
    mean, half = ratio((first,) if first == second else (first, second))
    return f"{mean:.3f}" if half < 0.0005 else f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    """Print the table: rows are the first stage, columns the second, the diagonal one alone."""
    deltas = {name for name, stage in STAGES.items() if stage.kind == "delta"}
    assert set(map(stage_of, VARIANTS)) == deltas
    warnings.simplefilter("ignore", dare.DareWarning)
    print("| first ↓ then → |", " | ".join(VARIANTS), "|")
    print("|---" * (len(VARIANTS) + 1) + "|")
    for first in VARIANTS:
        cells = {second: cell(first, second) for second in VARIANTS}
        cells[first] = f"**{cells[first]}**"
        print(f"| {first} |", " | ".join(cells.values()), "|", flush=True)


if __name__ == "__main__":
    main()
