"""Finds the scales of the demonstration's merges on validation prompts.

    python training/choose_scales.py

Prints the table SCALES of dare.demo.merges. Test prompts are not looked at, nor is any seed that
the demonstration uses.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean

from dare.demo.llama import Llama
from dare.demo.merges import CONFIG, DemoMerge
from dare.demo.story import DROPPED
from dare.demo.tasks import TASKS

DROP_RATES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
CANDIDATES = {
    "sum": (0.6, 0.8, 1.0, 1.2),
    "ties": (0.6, 0.8, 1.0, 1.5, 2.0, 2.5),
    "trim+ties": (0.6, 0.8, 1.0, 1.5, 2.0, 2.5),
}
SEED = 7
PROMPTS = 120


def main() -> None:
    """Try every candidate at every rate; on a tie the smaller scale wins."""
    examples = [task.examples("validation", PROMPTS) for task in TASKS]
    with tempfile.TemporaryDirectory() as folder:

        def mean_correct(merge: DemoMerge) -> float:
            merged = Llama(merge.carry_out(Path(folder) / "merged.safetensors"), CONFIG)
            shares = [merged.share_right(prompts) for prompts in examples]
            return round(100 * fmean(shares), 6)  # so that equal shares make equal means

        for combine, scales in CANDIDATES.items():
            for rate in DROP_RATES if combine in DROPPED else (0.0,):
                found = {
                    scale: mean_correct(DemoMerge(combine, rate, scale, SEED)) for scale in scales
                }
                best = max(found, key=lambda scale: found[scale])
                tried = ", ".join(f"{scale}: {share:.1f}" for scale, share in found.items())
                print(f"{combine} {rate}: {best}    ({tried})", flush=True)


if __name__ == "__main__":
    main()
