"""Count candidates per hour of a search: in memory, and by merging to disk and loading that.

Every candidate is a merge of three fine-tunes of SmolLM2-135M by `dare+linear` at another drop
rate, scored by its mean loss on the same held-out text. The ways take turns, in one process:

  memory    dare.Candidates writes into a live transformers model, which is scored
  disk      dare.merge writes a model directory, transformers loads it, it is scored
  mergekit  the same, merged by mergekit in a process that stays (what mergekit-evolve does)
  torch     the same, merged by a few lines of torch on the device, tensor by tensor

Fine-tunes are real, by a few steps on Python's own library, and stored in bf16; with --random all
weights are random and nothing but the shapes is SmolLM2's, for machines that do not have it.

    python bench/candidates.py /tmp/candidates --peers-python .venv-peers/bin/python
    python bench/candidates.py /tmp/candidates --random --device cuda
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dare

TOKENS, BATCH = 128, 16
RATE = 1e-4
DELTA_DEVIATION = 0.001
SEED = 42
FIRST_DROP_RATE, STEP = 0.5, 0.01

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

Seconds = dict[str, float]
"""What the parts of a candidate took: make, load, score."""


# ---------------------------------------------------------------- models and text


def real_models(data: Path) -> list[Path]:
    """SmolLM2 and three fine-tunes of it, made if they are not there."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "real"))
    from training import TEXTS, fine_tune, save_smollm2

    texts = {**TEXTS, "tables": inspect.getsource(statistics)}
    with made_once(data / "base") as folder:
        if folder:
            in_bfloat16(save_smollm2(folder))
    for name, text in texts.items():
        with made_once(data / name) as folder:
            if folder:
                in_bfloat16(fine_tune(data / "base", folder, text, RATE))
    return [data / name for name in ("base", *texts)]


def random_models(data: Path) -> list[Path]:
    """A model of the shapes of SmolLM2 and three that differ from it a little."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2))
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = ("base", "first", "second", "third")
    for name in names:
        if name != "base":
            for key, tensor in model.state_dict().items():
                noise = DELTA_DEVIATION * torch.randn_like(tensor)
                tensor.copy_(original[key] + noise)
        with made_once(data / name) as folder:
            if folder:
                model.save_pretrained(folder)
                in_bfloat16(folder)
    return [data / name for name in names]


@contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Where to make a folder, which gets its name when it is complete; None if it is there."""
    if folder.is_dir():
        yield None
        return
    print(f"making {folder.name} …", flush=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(folder)


def in_bfloat16(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def held_out(base: Path, windows: int, *, is_random: bool) -> torch.Tensor:
    """Windows of tokens of a text that no fine-tune has seen."""
    if is_random:
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(SMOLLM2["vocab_size"], (windows, TOKENS), generator=generator)
    text = inspect.getsource(difflib)
    tokens = AutoTokenizer.from_pretrained(base)(text, return_tensors="pt").input_ids[0]
    return tokens[: windows * TOKENS].reshape(windows, TOKENS)


@torch.inference_mode()
def loss_of(model: Any, windows: torch.Tensor) -> float:
    """The mean loss over all windows."""
    batches = windows.to(model.device).split(BATCH)
    return float(sum(model(input_ids=b, labels=b).loss.double() for b in batches)) / len(batches)


# ---------------------------------------------------------------- ways


class Search:
    """What all ways share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.data: Path = options.data
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        make = random_models if options.random else real_models
        self.folders = make(self.data / ("random" if options.random else "smollm2"))
        self.windows = held_out(self.folders[0], options.windows, is_random=options.random)
        self.digests: dict[str, str] = {}
        """Of the last candidate, by way."""
        self.output = self.data / "merged"
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

    def score(self, model: Any) -> float:
        return loss_of(model, self.windows)


Way = Callable[[float], tuple[float, Seconds]]
"""From a drop rate to the loss of the candidate, and what it took."""


def in_memory(search: Search) -> Way:
    started = time.perf_counter()
    candidates = dare.Candidates(search.recipe)
    read = time.perf_counter()
    model = search.load(search.folders[0])
    print(
        f"memory: {candidates.memory_bytes / 1e9:.2f} GB read in {read - started:.2f} s, "
        f"the model loaded in {time.perf_counter() - read:.2f} s, once"
    )

    def way(drop_rate: float) -> tuple[float, Seconds]:
        began = time.perf_counter()
        search.digests["memory"] = candidates.write_into(model, {"drop_rate": drop_rate})
        synchronise(search.device)
        made = time.perf_counter()
        loss = search.score(model)
        return loss, {"make": made - began, "load": 0.0, "score": time.perf_counter() - made}

    return way


def by_disk(search: Search, merge: Callable[[float], None]) -> Way:
    """Let something write a model directory, load it and score it."""

    def way(drop_rate: float) -> tuple[float, Seconds]:
        shutil.rmtree(search.output, ignore_errors=True)
        began = time.perf_counter()
        merge(drop_rate)
        made = time.perf_counter()
        model = search.load(search.output)
        synchronise(search.device)
        loaded = time.perf_counter()
        loss = search.score(model)
        scored = time.perf_counter()
        return loss, {"make": made - began, "load": loaded - made, "score": scored - loaded}

    return way


def with_dare(search: Search) -> Way:
    def merge(drop_rate: float) -> None:
        stages = {"dare": {"drop_rate": drop_rate}}
        report = dare.merge(search.recipe.changed(stages=stages))
        search.digests["disk"] = report.digests.output

    return by_disk(search, merge)


def with_mergekit(search: Search, python: Path) -> Way:
    worker = Path(__file__).with_name("mergekit_worker.py")
    process = subprocess.Popen(
        [python, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
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


def with_torch(search: Search) -> Way:
    """Tensor by tensor on the device, with its random numbers, and stored as bf16."""

    def merge(drop_rate: float) -> None:
        search.output.mkdir()
        shutil.copy(search.folders[0] / "config.json", search.output)
        torch.manual_seed(SEED)
        device, keep = str(search.device), 1 - drop_rate
        files = [safe_open(f / "model.safetensors", "pt", device) for f in search.folders]
        merged = {}
        for name in files[0].keys():  # noqa: SIM118 (it is no dict)
            base, *tuned = (file.get_tensor(name).float() for file in files)
            total = torch.zeros_like(base)
            for tensor in tuned:
                kept = torch.bernoulli(torch.full_like(base, keep))
                total += (tensor - base) * kept / keep / len(tuned)
            merged[name] = (base + total).bfloat16().cpu()
        save_file(merged, search.output / "model.safetensors", {"format": "pt"})

    return by_disk(search, merge)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- the run


def measure(search: Search, ways: dict[str, Way], rounds: int) -> list[dict[str, Any]]:
    """Let the ways take turns; the first round warms up and does not count."""
    rows = []
    for number in range(rounds + 1):
        drop_rate = FIRST_DROP_RATE + STEP * number
        for name, way in ways.items():
            loss, seconds = way(drop_rate)
            total = sum(seconds.values())
            print(
                f"  p = {drop_rate:.2f}  {name:<9} loss {loss:.6f}  "
                + "  ".join(f"{part} {value:.2f} s" for part, value in seconds.items())
                + f"  in all {total:.2f} s",
                flush=True,
            )
            if number:
                row = {"way": name, "drop_rate": drop_rate, "loss": loss}
                rows.append({**row, **seconds, "total": total})
        if search.digests["memory"] != search.digests["disk"]:
            raise SystemExit("the weights in memory and on the disk must be the same")
    return rows


def show(rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> dict[str, dict[str, float]]:
    """Print and return medians; scoring is the same work in all ways, and has one."""
    score = statistics.median(row["score"] for row in rows)
    medians = {}
    print(f"\n{'':<10}{'make':>9}{'load':>9}{'score':>9}{'in all':>9}{'per hour':>10}")
    for way in ways:
        own = [row for row in rows if row["way"] == way]
        make, load = (statistics.median(row[part] for row in own) for part in ("make", "load"))
        total = make + load + score
        medians[way] = {"make": make, "load": load, "score": score, "per_hour": 3600 / total}
        seconds = "".join(f"{part:>8.3f}s" for part in (make, load, score, total))
        print(f"{way:<10}{seconds}{3600 / total:>10.0f}")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a directory for models and merges")
    parser.add_argument("--device", default="cpu", help="where the model is scored")
    parser.add_argument("--dtype", default="float32", help="of the model that is scored")
    parser.add_argument("--random", action="store_true", help="random weights, not SmolLM2's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=64, help=f"of {TOKENS} tokens, to score on")
    parser.add_argument("--peers-python", type=Path, help="python that has mergekit; else torch")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    search = Search(options)
    ways = {"memory": in_memory(search), "disk": with_dare(search)}
    if options.peers_python:
        ways["mergekit"] = with_mergekit(search, options.peers_python)
    else:
        ways["torch"] = with_torch(search)
    rows = measure(search, ways, options.rounds)
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if search.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    medians = show(rows, list(ways))
    if options.json:
        found = {"machine": machine, "medians": medians, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
