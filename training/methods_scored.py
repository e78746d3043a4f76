"""Every method on the demonstration's models: of all three, and of two.

    python training/methods_scored.py > scores.md

prints the tables of docs/choose.md. Each method has its usual settings. λ is 1, and then the one of
`SCALES` that gets most right on validation prompts; what is printed was counted on test prompts.
Delta stages come before `sum`. No GPU; some minutes on two cores.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dare.demo.llama import Llama
from dare.demo.merges import CONFIG, TUNED, DemoMerge
from dare.demo.tasks import TASKS
from dare.stages import STAGES

SCALES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
VALIDATION, TEST = 100, 200
CHAINS = ("dare+ties", "trim+ties")
OF_TWO = ("slerp", "nuslerp", "linear", "sum", "ties", "trim+ties", "karcher", "model_stock")


def main() -> None:
    """Print both tables."""
    methods = [
        name if stage.kind == "combine" else f"{name}+sum"
        for name, stage in STAGES.items()
        if stage.models is None
    ]
    print("| method | λ = 1 | best λ | right with it |\n|---|---|---|---|")
    for method in [*methods, *CHAINS]:
        print_row(method, [tuple(TUNED)])
    print("\n| method | λ = 1 | best λ | right with it |\n|---|---|---|---|")
    for method in OF_TWO:
        print_row(method, list(itertools.combinations(TUNED, 2)))


def print_row(method: str, sets: Sequence[tuple[str, ...]]) -> None:
    """Print a method's scores, each the mean over sets of models and their tasks."""
    validated = {s: score(method, sets, s, "validation", VALIDATION) for s in SCALES}
    best = max(SCALES, key=lambda scale: (validated[scale], -abs(scale - 1)))
    plain = score(method, sets, 1.0, "test", TEST)
    chosen = plain if best == 1 else score(method, sets, best, "test", TEST)
    print(f"| `{method}` | {plain:.1f} | {best:g} | {chosen:.1f} |", flush=True)


def score(
    method: str, sets: Sequence[tuple[str, ...]], scale: float, split: str, prompts: int
) -> float:
    """Right answers in %, of merges of each set of models, on the tasks of its models."""
    found = []
    for names in sets:
        with tempfile.TemporaryDirectory() as folder:
            merge = DemoMerge(method, scale=scale, models=tuple(TUNED[name] for name in names))
            model = Llama(merge.carry_out(Path(folder) / "merged.safetensors"), CONFIG)
        found += [
            100 * model.share_right(task.examples(split, prompts))
            for task in TASKS
            if task.name in names
        ]
    return statistics.mean(found)


if __name__ == "__main__":
    main()
