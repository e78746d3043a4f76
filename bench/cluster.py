"""What a cluster costs: two nodes of one core each beside two threads, from first batch to last.

    python bench/cluster.py [--data bench/data] [--parameters 0.95e9] [--models 3] [--runs 5]

Both merge the same models by `dare+linear` into the same place. Their kernels are loaded before the
clock starts: nodes load theirs when they join, in the time that starting Ray's workers takes, which
is given apart. Runs take turns, so that a busy machine slows both; the ratio is of medians. The
cluster is in a network of its own, which has nothing but loopback (see tests/cluster/inside.py).
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

ROOT = Path(__file__).parents[1]
CLUSTER_TESTS = ROOT / "tests" / "cluster"
NODES = ("127.0.0.2", "127.0.0.3")
sys.path.insert(0, str(CLUSTER_TESTS))


def recipe_of(folders: list[Path], output: Path, **more: object):
    from dare.recipe.schema import Recipe

    return Recipe(
        base=folders[0],
        models=folders[1:],
        output=output,
        method="dare+linear",
        verbose=False,
        **more,
    )


def run_threads(folders: list[Path], output: Path) -> dict[str, float]:
    """Merge with two threads; the clock runs while chunks are merged."""
    import dare
    from dare import api
    from dare.run.merge_job import warm_up

    seconds = {}
    plan = dare.plan(recipe_of(folders, output, threads=len(NODES)))
    warm_up(plan)
    execute = api.execute

    def timed(*arguments, **more):
        started = time.perf_counter()
        records = execute(*arguments, **more)
        seconds["work"] = time.perf_counter() - started
        return records

    api.execute = timed
    api.merge(plan)
    return seconds


def run_cluster(folders: list[Path], output: Path, log: Path) -> dict[str, float]:
    """Merge on the cluster; its log says when the nodes were there and when the last batch was."""
    import dare

    log.unlink(missing_ok=True)
    dare.merge(recipe_of(folders, output, cluster=f"{NODES[0]}:6379", cluster_log=log))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    joined = max(line["at"] for line in lines if line["event"] == "joined")
    batches = [line for line in lines if line["event"] == "batch"]
    return {
        "work": max(line["at"] for line in batches) - joined,
        "starting": joined,
        "batches": len(batches),
        "in batches": sum(line["seconds"] for line in batches),
    }


def measure(kind: str, folders: list[Path], place: Path) -> dict[str, float]:
    """One merge in a process of its own."""
    output = place / "merged"
    command = [sys.executable, __file__, "--one", kind, str(output), *map(str, folders)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(output)
    return json.loads(found)


def start_nodes(folder: Path) -> list[subprocess.Popen[str]]:
    nodes = []
    for address in NODES:
        command = [sys.executable, str(CLUSTER_TESTS / "raylet.py"), address, NODES[0], str(folder)]
        pipe = subprocess.PIPE
        nodes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        nodes[-1].stdout.readline()
    return nodes


def compare(folders: list[Path], place: Path, runs: int) -> None:
    rays = Path(tempfile.mkdtemp(prefix="ray-"))
    nodes = start_nodes(rays)
    try:
        found: dict[str, list[dict[str, float]]] = {"threads": [], "cluster": []}
        for number in range(1 + runs):
            for kind, measured in found.items():
                one = measure(kind, folders, place)
                print(kind, {name: round(value, 3) for name, value in one.items()}, flush=True)
                if number:  # the first run fills the page cache
                    measured.append(one)
    finally:
        for node in reversed(nodes):
            node.stdin.close()
            node.wait(30)
        shutil.rmtree(rays, ignore_errors=True)
    middle = {kind: statistics.median(r["work"] for r in runs) for kind, runs in found.items()}
    ratio = middle["cluster"] / middle["threads"]
    print(
        f"two threads {middle['threads']:.2f} s, two nodes of one core {middle['cluster']:.2f} s: "
        f"× {ratio:.3f} (medians of {runs})"
    )
    busy = [run["in batches"] / (len(NODES) * run["work"]) for run in found["cluster"]]
    starting = statistics.median(run["starting"] for run in found["cluster"])
    print(f"nodes were ready after {starting:.1f} s, and busy {statistics.median(busy):.1%} then")


def main() -> None:
    from inside import COMMAND, why_not

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("bench/data"))
    parser.add_argument("--place", type=Path, help="Where outputs go; beside the models else.")
    parser.add_argument("--parameters", type=float, default=0.95e9)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, output, *folders = options.one
        places = [Path(folder) for folder in folders], Path(output)
        log = Path(f"{output}.jsonl")
        one = run_threads(*places) if kind == "threads" else run_cluster(*places, log)
        print(json.dumps(one))
        return
    if not options.inside:
        if reason := why_not():
            sys.exit(reason)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        again = [*COMMAND, sys.executable, *sys.argv, "--inside"]
        os.execvp(again[0], again)
    shape = shape_for(options.parameters)
    make_models(options.data, shape, options.models)
    folders = [path.absolute() for path in model_folders(options.data, shape, options.models)]
    compare(folders, (options.place or folders[0].parent).absolute(), options.runs)


if __name__ == "__main__":
    main()
