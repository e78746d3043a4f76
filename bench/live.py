"""Measure how fast fine-tunes are switched in a live torch model, and what memory that takes.

The models are those of bench/models.py. Beside it stands what people do else: load the other
model, or subtract a dense delta and add another, as a merge of PEFT does, which is not exact.

    python bench/live.py /tmp/live --parameters 0.95e9
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from models import make_models, shape_for
from safetensors.torch import load_file

import dare

ROUNDS = 5
FINE_TUNES = 10
VARIANTS: dict[str, dict[str, Any]] = {
    "random-native": {"drop_rate": 0.9},
    "random-2": {"bits": 2, "drop_rate": 0.6},
    "random-4": {"bits": 4, "drop_rate": 0.9},
    "lossless": {"lossless": True},
}


def load(folder: Path) -> torch.nn.Module:
    """A module with a model's parameters, of which no page is the file's; it computes nothing."""
    root = torch.nn.Module()
    for name, tensor in load_file(folder / "model.safetensors").items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(last, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return root


class Times(dict[str, list[tuple[float, float]]]):
    """How long things took, each time: on the clock, and on all cores together."""

    def take(self, what: str, *work: Callable[[], object]) -> None:
        """Time all of this as one."""
        started = time.perf_counter(), time.process_time()
        for do in work:
            do()
        taken = time.perf_counter() - started[0], time.process_time() - started[1]
        self.setdefault(what, []).append(taken)

    def show(self) -> None:
        """Print medians; where cores are shared, those of the second kind tell more."""
        for what, found in self.items():
            clock, cores = (statistics.median(taken) for taken in zip(*found, strict=True))
            print(f"  {what:<40} {clock:6.2f} s, {cores:.2f} s of processor time", flush=True)


def memory_bytes(line: str) -> int:
    """Memory of this process: now (VmRSS), or the most since it was last forgotten (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{line}:")[2].split()[0])


def switch(folders: list[Path], data: Path, variant: str) -> None:
    """Time applying, removing and switching; report memory."""
    base, *tuned = folders
    files = [data / f"{folder.name}-{variant}.delta.safetensors" for folder in tuned]
    for folder, file in zip(tuned, files, strict=True):
        if not file.exists():
            dare.compress(base, folder, file, verbose=False, **VARIANTS[variant])
    print(f"{variant}: {files[0].stat().st_size / 1e6:.0f} MB")
    model = load(base)
    memory = {"the base alone": memory_bytes("VmRSS")}
    names = [data / f"{number}-{variant}.delta.safetensors" for number in range(FINE_TUNES)]
    for number, name in enumerate(names):
        name.unlink(missing_ok=True)
        os.link(files[number % len(files)], name)
    deltas = list(map(dare.load_delta, names))
    memory[f"with {FINE_TUNES} fine-tunes loaded"] = memory_bytes("VmRSS")
    for delta in deltas[:2]:  # files get into the page cache
        with delta.applied(model):
            pass
    Path("/proc/self/clear_refs").write_text("5")  # forgets the most
    times = Times()
    for first, second in pairwise(deltas[: ROUNDS + 1]):
        times.take("apply_", lambda first=first: first.apply_(model))
        times.take(
            "switch (remove_ one, apply_ another)",
            lambda first=first: first.remove_(model),
            lambda second=second: second.apply_(model),
        )
        memory["and one of them applied"] = memory_bytes("VmRSS")
        times.take("remove_", lambda second=second: second.remove_(model))
    memory["the most while switching"] = memory_bytes("VmHWM")
    times.show()
    state, original = model.state_dict(), load_file(base / "model.safetensors")
    bits = ((state[name].view(torch.int16), t.view(torch.int16)) for name, t in original.items())
    print(f"  the base is back, bit for bit: {all(torch.equal(*pair) for pair in bits)}")
    for what, nbytes in memory.items():
        print(f"  memory: {what:<34} {nbytes / 1e9:5.2f} GB")
    for name in names:
        name.unlink()


def peers(folders: list[Path]) -> None:
    """Time a dense delta that is added and subtracted, and loading another model."""
    print("without delta files")
    base, tuned = load(folders[0]).state_dict(), load_file(folders[1] / "model.safetensors")
    dense = {name: tensor - base[name] for name, tensor in tuned.items()}
    before = {name: tensor.clone() for name, tensor in base.items()}

    def add(alpha: int) -> None:
        for name, tensor in base.items():
            tensor.add_(dense[name], alpha=alpha)

    times = Times()
    for _ in range(ROUNDS):
        times.take("load the other model (page cache)", lambda: load(folders[2]))
        times.take("add a dense delta in place", lambda: add(1))
        times.take("subtract it", lambda: add(-1))
    times.show()
    changed = sum(int((base[name] != before[name]).sum()) for name in base)
    print(f"  elements that are not the base's after that: {changed:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a directory for models and delta files")
    parser.add_argument("--parameters", type=float, default=0.95e9)
    parser.add_argument("--only", choices=[*VARIANTS, "peers"])
    options = parser.parse_args()
    folders = make_models(options.data, shape_for(options.parameters), 2)
    if options.only is None:  # each in a process of its own, so that memory is its own
        for only in (*VARIANTS, "peers"):
            subprocess.run([sys.executable, *sys.argv, "--only", only], check=True)
    elif options.only == "peers":
        peers(folders)
    else:
        switch(folders, options.data, options.only)


if __name__ == "__main__":
    main()
