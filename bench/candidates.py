"""Count candidates per hour of a search: in memory, and by merging to disk and loading that.

Every candidate is a merge of three fine-tunes of SmolLM2-135M by `dare+linear` at another drop
rate, scored by its mean loss on the same held-out text. The ways take turns, in one process:

  memory    dare.Candidates writes into a live transformers model, which is scored
  disk      dare.merge writes a model directory, transformers loads it, it is scored
  mergekit  the same, merged by mergekit in a process that stays (what mergekit-evolve does)

Fine-tunes are real, by a few steps on Python's own library, and stored in bf16.

    python bench/candidates.py /tmp/candidates --peers-python .venv-peers/bin/python
    python bench/candidates.py /tmp/candidates --device cuda
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from measure import print_table, write_json
from models import made_once
from transformers import AutoModelForCausalLM, AutoTokenizer

import dare

TOKENS, BATCH = 128, 16
RATE = 1e-4
SEED = 42
FIRST_DROP_RATE, STEP = 0.5, 0.01
PARTS = "make", "load", "score"
"""Of the seconds that a candidate takes."""


# ---------------------------------------------------------------- models and text


def make_models(data: Path) -> list[Path]:
    """SmolLM2 and three fine-tunes of it, made if they are not there."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "real"))
    from training import TEXTS, fine_tune, save_smollm2

    texts = {"base": "", **TEXTS, "tables": inspect.getsource(statistics)}
    for name, text in texts.items():
        with made_once(data / name) as folder:
            if folder:
                made = (
                    fine_tune(data / "base", folder, text, RATE) if text else save_smollm2(folder)
                )
                in_bfloat16(made)
    return [data / name for name in texts]


def in_bfloat16(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def held_out(base: Path, windows: int) -> torch.Tensor:
    """Windows of tokens of a text that no fine-tune has seen."""
    text = inspect.getsource(difflib)
    tokens = AutoTokenizer.from_pretrained(base)(text, return_tensors="pt").input_ids[0]
    return tokens[: windows * TOKENS].reshape(windows, TOKENS)


# ---------------------------------------------------------------- ways


class Search:
    """What all ways share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.folders = make_models(options.data)
        self.windows = held_out(self.folders[0], options.windows)
        self.digests: dict[str, str] = {}
        """Of the last candidate, by way."""
        self.output = options.data / "merged"
        self.recipe = dare.Request.of(
            base=self.folders[0],
            models=self.folders[1:],
            output=self.output,
            stages={"dare": {"drop_rate": FIRST_DROP_RATE}},
            seed=SEED,
            verbose=False,
        )

    def load(self, folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
        return model.to(self.device).eval()

    @torch.inference_mode()
    def score(self, model: Any) -> float:
        """The mean loss over all windows."""
        batches = self.windows.to(self.device).split(BATCH)
        losses = [model(input_ids=batch, labels=batch).loss.double() for batch in batches]
        return float(sum(losses)) / len(losses)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


Way = Callable[[float], tuple[float, Sequence[float]]]
"""From a drop rate to the loss of the candidate, and the seconds of its parts."""


def in_memory(search: Search) -> Way:
    started = search.clock()
    candidates = dare.Candidates(search.recipe)
    read = search.clock()
    model = search.load(search.folders[0])
    print(
        f"memory: {candidates.memory_bytes / 1e9:.2f} GB read in {read - started:.2f} s, "
        f"the model loaded in {search.clock() - read:.2f} s, once"
    )

    def way(drop_rate: float) -> tuple[float, Sequence[float]]:
        began = search.clock()
        search.digests["memory"] = candidates.write_into(model, {"drop_rate": drop_rate})
        made = search.clock()
        loss = search.score(model)
        return loss, (made - began, 0.0, search.clock() - made)

    return way


def by_disk(search: Search, merge: Callable[[float], None]) -> Way:
    """Let something write a model directory, load it and score it."""

    def way(drop_rate: float) -> tuple[float, Sequence[float]]:
        shutil.rmtree(search.output, ignore_errors=True)
        began = search.clock()
        merge(drop_rate)
        made = search.clock()
        model = search.load(search.output)
        loaded = search.clock()
        loss = search.score(model)
        return loss, (made - began, loaded - made, search.clock() - loaded)

    return way


def with_dare(search: Search) -> Way:
    def merge(drop_rate: float) -> None:
        report = dare.merge(search.recipe.changed(stages={"dare": {"drop_rate": drop_rate}}))
        search.digests["disk"] = report.digests.output

    return by_disk(search, merge)


def with_mergekit(search: Search, python: Path) -> Way:
    command = [python, Path(__file__).with_name("tools.py"), "mergekit"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    base, *tuned = map(str, search.folders)

    def merge(drop_rate: float) -> None:
        share = {"weight": 1 / len(tuned), "density": 1 - drop_rate}
        configuration = {
            "merge_method": "dare_linear",
            "base_model": base,
            "models": [{"model": path, "parameters": share} for path in tuned],
            "dtype": "bfloat16",
        }
        job = {"configuration": configuration, "output": str(search.output)}
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise SystemExit("mergekit has failed; its message stands above")

    return by_disk(search, merge)


# ---------------------------------------------------------------- the run


def main() -> None:
    """Let the ways take turns; the first round warms up and does not count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a directory for models and merges")
    parser.add_argument("--device", default="cpu", help="where the model is scored")
    parser.add_argument("--dtype", default="float32", help="of the model that is scored")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=64, help=f"of {TOKENS} tokens, to score on")
    parser.add_argument("--peers-python", type=Path, help="python that has mergekit")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    search = Search(options)
    ways = {"memory": in_memory(search), "disk": with_dare(search)}
    if options.peers_python:
        ways["mergekit"] = with_mergekit(search, options.peers_python)
    found: dict[str, list[Sequence[float]]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        drop_rate = FIRST_DROP_RATE + STEP * number
        for name, way in ways.items():
            loss, seconds = way(drop_rate)
            told = ", ".join(f"{part} {s:.2f} s" for part, s in zip(PARTS, seconds, strict=True))
            print(f"  p = {drop_rate:.2f}  {name:<9} loss {loss:.6f}  {told}", flush=True)
            found[name] += [seconds] if number else []
        if search.digests["memory"] != search.digests["disk"]:
            raise SystemExit("the weights in memory and on the disk must be the same")
    rows = []
    score = statistics.median(seconds[2] for runs in found.values() for seconds in runs)
    for name, runs in found.items():  # scoring is the same work in all ways, and has one median
        make, load = (statistics.median(seconds[part] for seconds in runs) for part in (0, 1))
        whole = make + load + score
        rows.append([name, *(f"{s:.3f} s" for s in (make, load, score)), f"{3600 / whole:.0f}"])
    print_table(("", *PARTS, "candidates per hour"), rows)
    if options.json:
        write_json(options.json, {"cores": os.cpu_count(), "seconds": found})


if __name__ == "__main__":
    main()
