"""Make the models of every world, merge them in every way, and write down what the merges can do.

    python experiments/run.py                       # all worlds, into experiments/results
    python experiments/run.py glyphs words --processes 2
    python experiments/run.py minilm --device cuda
    python experiments/run.py --minutes 60          # the sets that are scored by then
    python experiments/run.py --again               # 30 sets of two worlds, and a pair of MiniLM
    python experiments/run.py --again --quick       # four sets of one world

A set that is in the results already is left alone, so a run that was stopped goes on. With --again
a few scores are computed again and printed beside the stored ones. Training differs a little from
machine to machine, so scores do, too: what should come out again is which merge is better than
which, and by about how much.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scoring import score_briefly, score_set
from sets import ModelSet, sets_of
from tuning import Workshop
from worlds import WORLDS

import dare

HERE = Path(__file__).parent
AGAIN: dict[str, tuple[str, ...]] = {"diamonds": (), "teachers": (), "minilm": ("pair",)}
"""Worlds, and the kinds of sets; all, if there are none."""
QUICK = {"diamonds": ("pair", "usual", "seeds", "stranger")}
SHOWN = ("base", "linear", "sum", "ties", "tsv at 0.7", "dare+linear 0.9")


def main() -> None:
    """Score the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("worlds", nargs="*", help=", ".join(WORLDS))
    parser.add_argument("--models", type=Path, default=HERE / "models")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--kinds", nargs="*", default=(), help="kinds of sets; all, if not given")
    parser.add_argument("--processes", type=int, default=2, help="each makes worlds, one by one")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then begin nothing more")
    parser.add_argument("--again", action="store_true", help="only compare with what is stored")
    parser.add_argument("--quick", action="store_true", help="four sets, in five minutes")
    asked = parser.parse_args()
    asked.deadline = time.time() + 60 * asked.minutes
    parts = dict.fromkeys(asked.worlds or WORLDS, tuple(asked.kinds))
    if asked.again:
        subprocess.run([sys.executable, HERE / "data.py"], check=True)
        asked.models /= "again"
        parts = QUICK if asked.quick else AGAIN
        print(f"{'set':24}" + "".join(f"{name:>20}" for name in SHOWN))
    work = score_again if asked.again else score_world
    with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
        for job in as_completed([pool.submit(work, *part, asked) for part in parts.items()]):
            job.result()


def sets_to_score(name: str, kinds: tuple[str, ...]) -> list[ModelSet]:
    """The sets of a world that are of these kinds, or all."""
    return [each for each in sets_of(WORLDS[name]) if not kinds or each.kind in kinds]


def score_world(name: str, kinds: tuple[str, ...], asked: argparse.Namespace) -> None:
    """Score what a world still lacks, until the time is over."""
    torch.set_num_threads(asked.threads)
    file, began = asked.results / "sets" / f"{name}.json", time.time()
    known = json.loads(file.read_text()) if file.exists() else {}
    shop = Workshop(WORLDS[name], asked.models, asked.device)
    for members in sets_to_score(name, kinds):
        if members.name not in known and time.time() < asked.deadline:
            known[members.name] = score_one(shop, members, asked.threads)
            write(file, known)
            print(f"{time.time() - began:5.0f} s  {name}, {members.name}", flush=True)


def score_one(shop: Workshop, members: ModelSet, threads: int) -> dict[str, Any]:
    """Score a set; what is large is kept beside the models."""
    found, items = score_set(shop, members)
    models = [str(shop.file(tune.name)) for tune in members.tunes]
    analysis = dare.analyze(str(shop.file("base-0")), models, verbose=False, threads=threads)
    name = members.name.replace(", ", "-").replace(" ", "_")
    np.savez_compressed(shop.folder / f"{name}.items.npz", **items)
    document = analysis.to_json().replace(f"{shop.folder}/", "")
    (shop.folder / f"{name}.analysis.json.gz").write_bytes(gzip.compress(document.encode()))
    return found


def score_again(name: str, kinds: tuple[str, ...], asked: argparse.Namespace) -> None:
    """Print a line for each set of the first seed: the score as stored, and again."""
    torch.set_num_threads(asked.threads)
    shop = Workshop(WORLDS[name], asked.models, asked.device)
    stored = json.loads((HERE / "results" / "sets" / f"{name}.json").read_text())
    for members in (each for each in sets_to_score(name, kinds) if each.seed == 0):
        again, before = score_briefly(shop, members), stored[members.name]["scores"]
        cells = [f"{before[n]['score']:.1f} {again[n]['score']:.1f}" for n in SHOWN]
        title = f"{name}, {members.name}"
        print(f"{title:24}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def write(file: Path, document: dict[str, Any]) -> None:
    """One line for each entry, so that versions can be compared."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in document.items()]
    partial = file.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.rename(file)


if __name__ == "__main__":
    main()
