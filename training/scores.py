"""Score merges of the demonstration's models by every method: the tables of docs/choose.md.

    python training/scores.py > scores.md

Each method has its usual settings. λ is 1, and then the one of `SCALES` that gets most right on
validation prompts; what is printed was counted on test prompts. Delta stages come before `sum`. No
GPU; some minutes on two cores.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from dare.demo.llama import Llama
from dare.demo.merges import CONFIG, TUNED, DemoMerge
from dare.demo.tasks import TASKS
from dare.stages import STAGES

SCALES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
VALIDATION, TEST = 100, 200
CHAINS = ("dare+ties", "trim+ties")
OF_TWO = ("slerp", "nuslerp", "linear", "sum", "ties", "trim+ties", "karcher", "model_stock")


def main() -> None:
    """Print a table for merges of all three models, and one for merges of two."""
    every = [
        name if stage.kind == "combine" else f"{name}+sum"
        for name, stage in STAGES.items()
        if stage.models is None and stage.kind != "refine" and not stage.takes_grams
    ]
    pairs = list(itertools.combinations(TUNED, 2))
    for methods, sets in (((*every, *CHAINS), [tuple(TUNED)]), (OF_TWO, pairs)):
        print("| method | λ = 1 | best λ | right with it |\n|---|---|---|---|")
        for method in methods:
            validated = {s: score(method, sets, s, "validation", VALIDATION) for s in SCALES}
            best = max(SCALES, key=lambda scale: (validated[scale], -abs(scale - 1)))
            plain, chosen = (score(method, sets, s, "test", TEST) for s in (1.0, best))
            print(f"| `{method}` | {plain:.1f} | {best:g} | {chosen:.1f} |", flush=True)
        print()


def score(
    method: str, sets: Sequence[tuple[str, ...]], scale: float, split: str, prompts: int
) -> float:
    """Right answers in %, of merges of each set of models, on the tasks of its models."""
    found = []
    for names in sets:
        with tempfile.TemporaryDirectory() as folder:
            merge = DemoMerge(method, scale=scale, models=tuple(TUNED[name] for name in names))
            model = Llama(merge.carry_out(Path(folder) / "merged.safetensors"), CONFIG)
        tasks = [task for task in TASKS if task.name in names]
        found += [100 * model.share_right(task.examples(split, prompts)) for task in tasks]
    return fmean(found)


if __name__ == "__main__":
    main()
