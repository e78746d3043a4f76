"""Measure how fast fine-tunes are switched in a live torch model, and what memory that takes.

The models are those of bench/models.py. Beside it stand what people do else: add a dense delta in
place, as a merge of PEFT does (and subtract it, which is not exact), and load the other model.

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
from models import make_models, model_folders, shape_for
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


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module that has these parameters, without what computes with them."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def load(folder: Path) -> torch.nn.Module:
    """A model in memory of its own, of which no page is the file's."""
    tensors = load_file(folder / "model.safetensors")
    return module_of({name: tensors.pop(name).clone() for name in list(tensors)})


class Times:
    """How long something took, each time: on the clock, and on all cores together."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.cores: list[float] = []

    def take(self, *work: Callable[[], object]) -> None:
        """Time all of this as one."""
        started = time.perf_counter(), time.process_time()
        for do in work:
            do()
        self.clock.append(time.perf_counter() - started[0])
        self.cores.append(time.process_time() - started[1])

    def show(self, what: str) -> None:
        """Medians; where cores are shared, those of the second kind tell more."""
        clock, cores = statistics.median(self.clock), statistics.median(self.cores)
        print(
            f"  {what:<40} {clock:6.2f} s ({min(self.clock):.2f} to {max(self.clock):.2f}), "
            f"{cores:.2f} s of processor time",
            flush=True,
        )


def memory_bytes(line: str) -> int:
    """Memory of this process: now (VmRSS), or the most since `forget_peak` (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{line}:")[2].split()[0])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def compress(folders: list[Path], data: Path, variant: str) -> list[Path]:
    """The delta files of all fine-tunes, made if they are not there."""
    base, *tuned = folders
    files = [data / f"{folder.name}-{variant}.delta.safetensors" for folder in tuned]
    for folder, file in zip(tuned, files, strict=True):
        if not file.exists():
            dare.compress(base, folder, file, verbose=False, **VARIANTS[variant])
    return files


def switch(folders: list[Path], data: Path, variant: str) -> None:
    """Time applying, removing and switching; report memory."""
    files = compress(folders, data, variant)
    size = (folders[0] / "model.safetensors").stat().st_size
    print(f"{variant}: {files[0].stat().st_size / 1e6:.0f} MB of {size / 1e6:.0f} MB")
    model = load(folders[0])
    alone = memory_bytes("VmRSS")
    names = [data / f"{number}-{variant}.delta.safetensors" for number in range(FINE_TUNES)]
    for number, name in enumerate(names):
        name.unlink(missing_ok=True)
        os.link(files[number % len(files)], name)
    loading = time.perf_counter()
    deltas = [dare.load_delta(name) for name in names]
    loading = time.perf_counter() - loading
    loaded = memory_bytes("VmRSS")
    for delta in deltas[:2]:  # files get into the page cache
        with delta.applied(model):
            pass
    forget_peak()
    applying, removing, switching = Times(), Times(), Times()
    for first, second in pairwise(deltas[: ROUNDS + 1]):
        applying.take(lambda first=first: first.apply_(model))
        switching.take(
            lambda first=first: first.remove_(model), lambda second=second: second.apply_(model)
        )
        applied = memory_bytes("VmRSS")
        removing.take(lambda second=second: second.remove_(model))
    peak = memory_bytes("VmHWM")
    applying.show("apply_")
    removing.show("remove_")
    switching.show("switch (remove_ one, apply_ another)")
    state, original = model.state_dict(), load_file(folders[0] / "model.safetensors")
    is_base = all(
        torch.equal(state[name].view(torch.int16), original[name].view(torch.int16))
        for name in original
    )
    print(f"  the base is back, bit for bit: {is_base}")
    print(f"  {FINE_TUNES} delta files loaded in {loading:.2f} s")
    for what, nbytes in (
        ("the base alone", alone),
        (f"with {FINE_TUNES} fine-tunes loaded", loaded),
        ("and one of them applied", applied),
        ("the most while switching", peak),
    ):
        print(f"  memory: {what:<34} {nbytes / 1e9:5.2f} GB")
    for name in names:
        name.unlink()


def peers(folders: list[Path]) -> None:
    """Time a dense delta that is added and subtracted, and loading another model."""
    print("without delta files")
    model = load(folders[0])
    loading, adding, subtracting = Times(), Times(), Times()
    for _ in range(ROUNDS):
        loading.take(lambda: load(folders[2]))
    loading.show("load the other model (page cache)")
    base, tuned = model.state_dict(), load_file(folders[1] / "model.safetensors")
    dense = {name: tensor - base[name] for name, tensor in tuned.items()}
    before = {name: tensor.clone() for name, tensor in base.items()}

    def add(alpha: int) -> None:
        for name, tensor in base.items():
            tensor.add_(dense[name], alpha=alpha)

    for _ in range(ROUNDS):
        adding.take(lambda: add(1))
        subtracting.take(lambda: add(-1))
    adding.show("add a dense delta in place")
    subtracting.show("subtract it")
    changed = sum(int((base[name] != before[name]).sum()) for name in base)
    print(f"  elements that are not the base's after that: {changed:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a directory for models and delta files")
    parser.add_argument("--parameters", type=float, default=0.95e9)
    parser.add_argument("--only", choices=[*VARIANTS, "peers"])
    options = parser.parse_args()
    shape = shape_for(options.parameters)
    make_models(options.data, shape, 2)
    folders = model_folders(options.data, shape, 2)
    if options.only is None:  # each in a process of its own, so that memory is its own
        for only in (*VARIANTS, "peers"):
            subprocess.run([sys.executable, *sys.argv, "--only", only], check=True)
    elif options.only == "peers":
        peers(folders)
    else:
        switch(folders, options.data, options.only)


if __name__ == "__main__":
    main()
