"""What a cluster costs: tasks on one node of two processors beside two threads.

    python bench/cluster.py [--data bench/data] [--parameters 0.95e9] [--models 3] [--runs 3]

Both merge the same models into the same place. The clock runs for all of `dare.merge`, each in a
process of its own that is connected to Ray already. In a first merge Ray starts processes, which
load dare; a second one in the same program finds them. Runs take turns, so that a busy machine
slows both; the ratios are of medians. The node listens on loopback only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from models import make_models, model_folders, shape_for

LOCAL = Path(__file__).parents[1] / "tests" / "cluster" / "local.py"
METHODS = ("dare+linear", "dare+ties")
THREADS = 2


def merge_twice(method: str, address: str, output: Path, folders: list[Path]) -> list[float]:
    """Merge twice, on a cluster if there is an address; return the seconds of each."""
    import dare
    from dare.recipe.recipe import Request

    recipe = Request.of(
        base=folders[0],
        models=folders[1:],
        output=output,
        method=method,
        threads=THREADS,
        verbose=False,
    )
    if address:
        import ray

        ray.init(address, log_to_driver=False, logging_level="CRITICAL")
        recipe = recipe.changed(cluster=address)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        dare.merge(recipe)
        seconds.append(time.perf_counter() - started)
        shutil.rmtree(output)
    return seconds


def compare(address: str, folders: list[Path], place: Path, runs: int) -> None:
    """Print how long threads and tasks take, in turns."""
    for method in METHODS:
        found: dict[str, list[list[float]]] = {"": [], address: []}
        for number in range(1 + runs):
            for where, measured in found.items():
                given = [method, where, str(place / "merged"), *map(str, folders)]
                command = [sys.executable, __file__, "--one", *given]
                one = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                print(method, where or "threads", [round(value, 2) for value in one], flush=True)
                if number:  # the first run fills the page cache
                    measured.append(one)
        (first, second), (cold, warm) = (
            [statistics.median(values) for values in zip(*measured, strict=True)]
            for measured in found.values()
        )
        print(
            f"{method}: threads {first:.2f} s, a first merge on Ray {cold:.2f} s "
            f"(× {cold / first:.2f}); threads again {second:.2f} s, "
            f"Ray again {warm:.2f} s (× {warm / second:.2f})"
        )


def main() -> None:
    """Start a node, compare, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("bench/data"))
    parser.add_argument("--place", type=Path, help="Where outputs go; beside the models else.")
    parser.add_argument("--parameters", type=float, default=0.95e9)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        method, address, output, *folders = options.one
        print(json.dumps(merge_twice(method, address, Path(output), list(map(Path, folders)))))
        return
    shape = shape_for(options.parameters)
    make_models(options.data, shape, options.models)
    folders = [path.absolute() for path in model_folders(options.data, shape, options.models)]
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else 127.0.0.1 is taken for another
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        os.environ["RAY_TMPDIR"] = folder
        pipe = subprocess.PIPE
        command = [sys.executable, str(LOCAL), "1", str(THREADS)]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as node:
            assert node.stdout is not None
            address = json.loads(node.stdout.readline())["address"]
            place = (options.place or folders[0].parent).absolute()
            compare(address, folders, place, options.runs)


if __name__ == "__main__":
    main()
