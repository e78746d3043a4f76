"""Make a part of the models again on this machine, and see whether the scores come out as stored.

    python experiments/again.py            # 30 sets of two small worlds, and a pair of MiniLM
    python experiments/again.py --quick    # four sets of one world

Training differs a little from machine to machine, so scores do, too: what should come out again is
which merge is better than which, and by about how much.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from data import DATA
from pretrained import PRETRAINED
from scoring import score_briefly
from sets import sets_of
from tuning import Workshop
from worlds import WORLDS

HERE = Path(__file__).parent
PARTS = {
    "diamonds": (),
    "teachers": (),
    "minilm": ("pair",),
}
"""Worlds, and the kinds of sets; all, if there are none."""
QUICK = {"diamonds": ("pair", "usual", "seeds", "stranger")}
SHOWN = ("base", "linear", "sum", "ties", "tsv at 0.7", "dare+linear 0.9")


def main() -> None:
    """Score the sets again, and print both scores of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="four sets, in five minutes")
    parser.add_argument("--models", type=Path, default=HERE / "models" / "again")
    asked = parser.parse_args()
    parts = QUICK if asked.quick else PARTS
    subprocess.run([sys.executable, HERE / "data.py"], check=True)
    if "minilm" in parts and not (DATA / "minilm.npz").exists():
        subprocess.run([sys.executable, HERE / "texts.py"], check=True)
    print(f"{'set':24}" + "".join(f"{name:>20}" for name in SHOWN))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = [
            pool.submit(score_world, name, kinds, asked.models) for name, kinds in parts.items()
        ]
        for job in jobs:
            for line in job.result():
                print(line, flush=True)


def score_world(name: str, kinds: tuple[str, ...], models: Path) -> list[str]:
    """A line for each set: the score as stored, and again."""
    torch.set_num_threads(1)
    world = (WORLDS | PRETRAINED)[name]
    shop = Workshop(world, models)
    stored = json.loads((HERE / "results" / "sets" / f"{name}.json").read_text())
    lines = []
    for members in sets_of(world):
        if members.seed == 0 and (not kinds or members.kind in kinds):
            again, before = score_briefly(shop, members), stored[members.name]["scores"]
            cells = [f"{before[n]['score']:.1f} {again[n]['score']:.1f}" for n in SHOWN]
            lines.append(f"{name + ', ' + members.name:24}" + "".join(f"{c:>20}" for c in cells))
    return lines


if __name__ == "__main__":
    main()
