"""Delta files beside copying and zstd, and merging from them beside merging the models.

    python bench/deltas.py SCRATCH --parameters 0.95e9 --runs 3

Makes a base and three fine-tunes (bench/models.py) of 1.9 GB each. Every line is
a process of its own; times are medians, and the runs of all lines alternate, because machines are
shared. A file that is written is synced. Inputs are in the page cache if memory allows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from measure import Measurement, measure
from models import make_models, model_folders, shape_for

KINDS = {
    "native, p .9": "drop_rate=0.9",
    "2 bits, p .6": "bits=2, drop_rate=0.6",
    "4 bits, p .9": "bits=4, drop_rate=0.9",
    "lossless": "lossless=True",
}
QUIET = "verbose=False, overwrite=True"


def python(code: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", f"import dare; {code}"]


def compress_with_zstd(model: Path, output: Path) -> list[str]:
    code = (
        "import os, zstandard; "
        f"source, sink = open({str(model)!r}, 'rb'), open({str(output)!r}, 'wb'); "
        "zstandard.ZstdCompressor(level=3, threads=-1).copy_stream(source, sink); "
        "sink.flush(); os.fsync(sink.fileno())"
    )
    return [sys.executable, "-c", code]


def jobs(base: Path, models: list[Path], scratch: Path) -> dict[str, list[str]]:
    """What is timed, in an order in which everything is there when it is needed."""
    first = models[0] / "model.safetensors"
    copied = scratch / "copied.safetensors"
    found = {
        "cp and sync": ["sh", "-c", f"cp {first} {copied} && sync {copied}"],
        "zstd -3": compress_with_zstd(first, scratch / "model.zst"),
    }
    for kind, settings in KINDS.items():
        delta = scratch / f"{settings}.delta.safetensors"
        output = scratch / "applied.safetensors"
        paths = f"{str(base)!r}, {str(models[0])!r}, {str(delta)!r}"
        found[f"compress: {kind}"] = python(f"dare.compress({paths}, {settings}, {QUIET})")
        paths = f"{str(base)!r}, {str(delta)!r}, {str(output)!r}"
        found[f"apply: {kind}"] = python(f"dare.apply_delta({paths}, {QUIET})")
    one = merge(base, models[:1], scratch / "one.safetensors", "dare+sum")
    found["merge one model, dare+sum"] = one
    deltas = [scratch / f"{number}.delta.safetensors" for number in range(len(models))]
    for number, (model, delta) in enumerate(zip(models, deltas, strict=True)):
        paths = f"{str(base)!r}, {str(model)!r}, {str(delta)!r}"
        code = f"dare.compress({paths}, drop_rate=0.9, seed={42 + number}, {QUIET})"
        subprocess.run(python(code), check=True)
    for method in ("dare+linear", "dare+ties"):
        for kind, inputs in (("models", models), ("delta files", deltas)):
            output = scratch / f"merged from {kind} by {method}.safetensors"
            found[f"merge three {kind}, {method}"] = merge(base, inputs, output, method)
    return found


def merge(base: Path, models: list[Path], output: Path, method: str) -> list[str]:
    files = [str(model) for model in models]
    recipe = f"dare.Recipe(base={str(base)!r}, models={files!r}, output={str(output)!r}, "
    recipe += f"method={method!r}, verbose=False)"
    return python(f"dare.merge({recipe}, overwrite=True)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--parameters", type=float, default=0.95e9)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    shape = shape_for(given.parameters)
    make_models(given.scratch / "models", shape, 3)
    base, *models = model_folders(given.scratch / "models", shape, 3)
    scratch = given.scratch / "outputs"
    scratch.mkdir(exist_ok=True)
    todo = jobs(base, models, scratch)
    found: dict[str, list[Measurement]] = {name: [] for name in todo}
    for _ in range(1 + given.runs):  # the first warms up
        for name, command in todo.items():
            found[name].append(measure(command))
    rows = []
    for name, runs in found.items():
        wall = statistics.median(run.wall_seconds for run in runs[1:])
        cpu = statistics.median(run.cpu_seconds for run in runs[1:])
        peak = max(run.own_peak_bytes or 0 for run in runs)
        rows.append([name, round(wall, 2), round(cpu, 2), peak])
        print(
            f"{name:45} {wall:7.2f} s {cpu:7.2f} s of processors {peak / 1e6:6.0f} MB", flush=True
        )
    sizes = {path.name: path.stat().st_size for path in sorted(scratch.iterdir()) if path.is_file()}
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(scratch.glob("merged from*.safetensors"))
    }
    for name, size in sizes.items():
        if "manifest" not in name:
            print(f"{name:60} {size:13,} bytes", digests.get(name, "")[:16])
    print(json.dumps({"rows": rows, "sizes": sizes, "digests": digests}))
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
