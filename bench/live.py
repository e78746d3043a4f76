"""Measure how fast fine-tunes are switched in a live torch model, and what memory that takes.

The models are those of bench/models.py. Beside it stand what people do else: add a dense delta in
place, as a merge of PEFT does (and subtract it, which is not exact), and load the other model.

    python bench/live.py /tmp/live --parameters 0.95e9
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import make_models, model_folders, shape_for
from safetensors.torch import load_file

import dare

ROUNDS = 5
FINE_TUNES = 10
VARIANTS: dict[str, dict[str, Any]] = {
    "random-native": {},
    "random-4": {"bits": 4},
    "magnitude-native": {"keep": "magnitude"},
    "lossless": {"lossless": True},
}


class Weights(torch.nn.Module):
    """The parameters of a model, without what computes with them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {name.replace(".", "/"): name for name in tensors}
        for key, name in self.names.items():
            self.register_parameter(key, torch.nn.Parameter(tensors[name], requires_grad=False))

    def state_dict(self, *given: Any, **settings: Any) -> Any:
        """Tensors under the names that they are stored by."""
        state = super().state_dict(*given, **settings)
        return {self.names[key]: tensor for key, tensor in state.items()}


def load(folder: Path) -> Weights:
    """A model in memory of its own, of which no page is the file's."""
    tensors = load_file(folder / "model.safetensors")
    return Weights({name: tensors.pop(name).clone() for name in list(tensors)})


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most it has been."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show(what: str, times: list[float]) -> None:
    middle, least, most = statistics.median(times), min(times), max(times)
    print(f"  {what:<44} {middle:6.2f} s   ({least:.2f} to {most:.2f})", flush=True)


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
    alone = resident_bytes()
    names = [data / f"{number}-{variant}.delta.safetensors" for number in range(FINE_TUNES)]
    for number, name in enumerate(names):
        name.unlink(missing_ok=True)
        os.link(files[number % len(files)], name)
    loading = time.perf_counter()
    deltas = [dare.load_delta(name) for name in names]
    loading = time.perf_counter() - loading
    loaded = resident_bytes()
    for delta in deltas[:2]:  # kernels are compiled, files in the page cache
        with delta.applied(model):
            pass
    applying, removing, switching = [], [], []
    applied = 0
    for round_number in range(ROUNDS):
        first, second = deltas[round_number], deltas[round_number + 1]
        applying.append(seconds(lambda first=first: first.apply_(model)))
        start = time.perf_counter()
        first.remove_(model)
        second.apply_(model)
        switching.append(time.perf_counter() - start)
        applied = resident_bytes()
        removing.append(seconds(lambda second=second: second.remove_(model)))
    show("apply_", applying)
    show("remove_", removing)
    show("switch (remove_ one, apply_ another)", switching)
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
    ):
        print(f"  resident: {what:<34} {nbytes / 1e9:5.2f} GB")
    for name in names:
        name.unlink()


def peers(folders: list[Path]) -> None:
    """Time a dense delta that is added and subtracted, and loading another model."""
    print("without delta files")
    model = load(folders[0])
    show(
        "load the other model (page cache)",
        [seconds(lambda: load(folders[2])) for _ in range(ROUNDS)],
    )
    base, tuned = model.state_dict(), load_file(folders[1] / "model.safetensors")
    dense = {name: tensor - base[name] for name, tensor in tuned.items()}
    before = {name: tensor.clone() for name, tensor in base.items()}

    def add(alpha: int) -> None:
        for name, tensor in base.items():
            tensor.add_(dense[name], alpha=alpha)

    adding, subtracting = [], []
    for _ in range(ROUNDS):
        adding.append(seconds(lambda: add(1)))
        subtracting.append(seconds(lambda: add(-1)))
    show("add a dense delta in place", adding)
    show("subtract it", subtracting)
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
        print(f"  peak {peak_bytes() / 1e9:.2f} GB, compressing counted if it was done")


if __name__ == "__main__":
    main()
