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

from measure import measure, print_table, write_json
from models import make_files

METHODS = ("dare+linear", "trim+ties", "della+linear")
FLOORS = {"python": "pass", "numpy": "import numpy"}
NAMES = ("base", "one", "two", "three")
SHAPES = {"embed.weight": (64, 32), "layer.weight": (32, 32), "norm.weight": (32,), "b": (1,)}
MERGES = 6
"""Merges in one process; the first is left out of the figures."""


def write_recipe(folder: Path, method: str) -> Path:
    recipe = folder / f"{method.replace('+', '-')}.toml"
    base, *tuned = (str(folder / f"{name}.safetensors") for name in NAMES)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--again", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the medians here, too")
    given = parser.parse_args()
    if given.again:
        merge_again(given.again)
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as place:
        folder, python = Path(place), sys.executable
        make_files(folder, NAMES, SHAPES)
        recipes = {method: str(write_recipe(folder, method)) for method in METHODS}
        commands = {name: [python, "-c", code] for name, code in FLOORS.items()}
        commands["dare --version"] = [python, "-m", "dare", "--version"]
        for method, recipe in recipes.items():
            commands[method] = [python, "-m", "dare", "merge", recipe, "--overwrite"]
        for method, recipe in recipes.items():
            commands[f"{method} again"] = [python, __file__, "--again", recipe]
        run_once(commands)
        runs = [run_once(commands) for _ in range(given.runs)]
    medians = {
        name: [
            statistics.median(taken)
            for taken in zip(*(row for run in runs for row in run[name]), strict=True)
        ]
        for name in runs[0]
    }
    print(f"{os.cpu_count()} cores, {given.runs} runs, medians; ms")
    floor, _ = medians["numpy"]
    rows = [
        (name, f"{1000 * wall:.1f}", f"{1000 * processor:.1f}", f"{wall / floor:.2f}")
        for name, (wall, processor) in medians.items()
    ]
    print_table(("", "wall", "processor", "× numpy"), rows)
    if given.json:
        keys = ("wall_seconds", "processor_seconds")
        write_json(given.json, {n: dict(zip(keys, m, strict=True)) for n, m in medians.items()})


if __name__ == "__main__":
    main()
