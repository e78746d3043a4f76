"""The expectation of chains: E[δ̂]/δ of every stage and every pair of delta stages, as a table.

Changes are of one sign, |N(0, 1)|, so that a sum shows every factor; stages are at their defaults
but for drop rates of 0.5, so that both stages of a pair have much to drop. The interval is that of
the mean over seeds, at 95 %.

    python bench/chains.py > /tmp/table.md      # the table in docs/numbers.md
"""

from __future__ import annotations

import itertools
import statistics
import warnings

import numpy as np

import dare
from dare.stages import STAGES

SEEDS = 200
SHAPE = (256, 320)
NAME = "layers.0.weight"
RANDOM = ("dare", "darex", "della", "nm (random)")
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "dare": ("dare", {"drop_rate": 0.5}),
    "darex": ("darex", {"drop_rate": 0.5}),
    "della": ("della", {"drop_rate": 0.5}),
    "nm (random)": ("nm", {"choose": "random"}),
    "nm (magnitude)": ("nm", {}),
    "trim": ("trim", {"keep_ratio": 0.5}),
    "breadcrumbs": ("breadcrumbs", {}),
    "star": ("star", {}),
    "fourier": ("fourier", {}),
}


def ratio(chain: tuple[str, ...]) -> tuple[float, float]:
    """The mean of Σδ̂/Σδ over seeds, and half of its interval."""
    delta = np.abs(np.random.default_rng(0).standard_normal(SHAPE, np.float32))
    method = "+".join([*(VARIANTS[name][0] for name in chain), "linear"])
    stages = {VARIANTS[name][0]: VARIANTS[name][1] for name in chain}
    is_random = any(name in RANDOM for name in chain)
    ratios = []
    for seed in range(SEEDS if is_random else 2):
        merged, _ = dare.merge_arrays(
            {NAME: np.zeros_like(delta)},
            [{NAME: delta}],
            method=method,
            stages=stages,
            seed=seed,
            verbose=False,
        )
        ratios.append(float(merged[NAME].sum(dtype=np.float64) / delta.sum(dtype=np.float64)))
    return statistics.mean(ratios), 2 * statistics.stdev(ratios) / len(ratios) ** 0.5


def cell(first: str, second: str) -> str:
    """One pair, or one stage by itself."""
    if first != second and VARIANTS[first][0] == VARIANTS[second][0]:
        return "–"  # a stage stands in a chain once
    mean, half = ratio((first,) if first == second else (first, second))
    return f"{mean:.3f}" if half < 0.0005 else f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    """Print the table: rows are the first stage, columns the second, the diagonal one alone."""
    assert {stage for stage, _ in VARIANTS.values()} == {
        name for name, stage in STAGES.items() if stage.kind == "delta"
    }
    warnings.simplefilter("ignore", dare.DareWarning)
    print("| first ↓ then → |", " | ".join(VARIANTS), "|")
    print("|---" * (len(VARIANTS) + 1) + "|")
    rows = {name: [] for name in VARIANTS}
    for first, second in itertools.product(VARIANTS, VARIANTS):
        text = cell(first, second)
        rows[first].append(f"**{text}**" if first == second else text)
    for name, cells in rows.items():
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
