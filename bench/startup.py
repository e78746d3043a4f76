"""What a merge of something small takes: as a whole process, and again within one.

    python bench/startup.py --runs 9

Programs take turns, and the figures are medians: wall time and processor time (user and system),
beside the time of what nobody can do without (Python itself, importing NumPy).
Models are four tensors in bfloat16, in a temporary directory. A run before the first fills caches,
those of Python too, as an installation does; PYTHONDONTWRITEBYTECODE does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from measure import measure
from safetensors.numpy import save_file

METHODS = ("dare+linear", "trim+ties", "della+linear")
FLOORS = {
    "python": "pass",
    "numpy": "import numpy",
}
MODELS = 3
MERGES = 6
"""Merges in one process; the first is left out of the figures."""


def make_models(folder: Path) -> list[Path]:
    """A base and its fine-tunes."""
    generator = np.random.default_rng(1)
    shapes = {"embed.weight": (64, 32), "layer.weight": (32, 32), "norm.weight": (32,), "b": (1,)}
    base = {name: generator.normal(0, 0.02, shape) for name, shape in shapes.items()}
    files = []
    for number in range(1 + MODELS):
        moved = {
            name: w + (number > 0) * generator.normal(0, 1e-3, w.shape) for name, w in base.items()
        }
        files.append(folder / f"{number}.safetensors")
        save_file({name: w.astype(ml_dtypes.bfloat16) for name, w in moved.items()}, files[-1])
    return files


def write_recipe(folder: Path, files: Sequence[Path], method: str) -> Path:
    recipe = folder / f"{method.replace('+', '-')}.toml"
    base, *tuned = map(str, files)
    recipe.write_text(
        f"method = {json.dumps(method)}\n[models]\nbase_file = {json.dumps(base)}\n"
        f"merge_files = {json.dumps(tuned)}\noutput_file = {json.dumps(f'{recipe}.safetensors')}\n"
    )
    return recipe


def merge_again(recipe: Path) -> None:
    """Merge one recipe several times in this process; print the seconds of each."""
    import dare

    rows = []
    for _ in range(MERGES):
        wall, processor = time.perf_counter(), time.process_time()
        dare.merge(recipe, overwrite=True)
        rows.append([time.perf_counter() - wall, time.process_time() - processor])
    print(json.dumps(rows))


def run_once(commands: Mapping[str, Sequence[str]]) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each program, and of merges within one process."""
    taken = {}
    for name, command in commands.items():
        if "--again" in command:
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            _, *rows = json.loads(said)
            taken[f"{name}, second"] = [tuple(rows[0])]
            taken[f"{name}, later"] = [tuple(row) for row in rows[1:]]
        else:
            found = measure(command)
            taken[name] = [(found.wall_seconds, found.cpu_seconds)]
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--again", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the medians here, too")
    given = parser.parse_args(arguments)
    if given.again:
        merge_again(given.again)
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = make_models(folder)
        python = sys.executable
        commands: dict[str, Sequence[str]] = {
            name: [python, "-c", code] for name, code in FLOORS.items()
        }
        commands["dare --version"] = [python, "-m", "dare", "--version"]
        for method in METHODS:
            recipe = write_recipe(folder, files, method)
            commands[method] = [python, "-m", "dare", "merge", str(recipe), "--overwrite"]
        for method in METHODS:
            recipe = write_recipe(folder, files, method)
            commands[f"{method} again"] = [python, __file__, "--again", str(recipe)]
        run_once(commands)
        runs = [run_once(commands) for _ in range(given.runs)]
    show(runs, given.json)


def show(runs: Sequence[Mapping[str, list[tuple[float, float]]]], file: Path | None) -> None:
    medians: dict[str, Any] = {}
    for name in runs[0]:
        wall, processor = zip(*(row for run in runs for row in run[name]), strict=True)
        medians[name] = {
            "wall_seconds": statistics.median(wall),
            "processor_seconds": statistics.median(processor),
        }
    floor = medians["numpy"]["wall_seconds"]
    print(f"{os.cpu_count()} cores, {len(runs)} runs, medians; ms")
    print(f"{'':28} {'wall':>8} {'processor':>10} {'× numpy':>8}")
    for name, found in medians.items():
        wall, processor = (1000 * found[key] for key in ("wall_seconds", "processor_seconds"))
        print(f"{name:28} {wall:8.1f} {processor:10.1f} {wall / 1000 / floor:8.2f}")
    if file is not None:
        file.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
