"""Compare merges by dare, mergekit and plain torch: time, CPU and memory, in one go.

The models are made once, under bench/data. Every run is a process of its own, measured from its
start to its end, with the inputs in the page cache and nothing left to write back. All jobs are run
equally often, in rounds, so that a slow minute of the machine hits all of them; the figures are
medians. The peers are taken from an environment of their own (requirements-peers.txt); a job that
cannot be run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jobs import BENCH, JOB_NAMES, Inputs, Job, make_jobs, make_our_job
from measure import Measurement, ProgramError, available_memory_bytes, measure, warm_page_cache
from models import missing_folders, shape_for
from rich import box
from rich.console import Console
from rich.table import Table

DATA = BENCH / "data"
PEERS_PYTHON = BENCH.parent / ".venv-peers" / "bin" / "python"
USUAL_PARAMETERS = 0.95e9
SCALING_PARAMETERS = (0.1e9, 0.3e9, 0.95e9)
SCALING_MODELS = (2, 3, 5, 8)
USUAL_MODELS = 3
LEAST_PARAMETERS = 1e6

console = Console()
console.width = max(console.width, 100)


@dataclass
class Result:
    """The runs of one job, or why there are none."""

    name: str
    title: str
    rival: str | None
    runs: list[Measurement] = field(default_factory=list)
    problem: str | None = None

    @property
    def median(self) -> Measurement:
        """The medians of what the runs took."""
        return Measurement(
            statistics.median(run.wall_seconds for run in self.runs),
            statistics.median(run.cpu_seconds for run in self.runs),
            _median_or_none(run.peak_bytes for run in self.runs),
            _median_or_none(run.own_peak_bytes for run in self.runs),
        )

    @property
    def spread(self) -> str:
        """The shortest and the longest run."""
        seconds = [run.wall_seconds for run in self.runs]
        return f"{min(seconds):.2f} – {max(seconds):.2f}"


def _median_or_none(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return int(statistics.median(known)) if known else None


@dataclass(frozen=True)
class ScalingPoint:
    """Our dare+linear on so many models of so many parameters."""

    parameters: int
    models: int
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int | None

    @property
    def ns_per_element_and_model(self) -> float:
        """Wall time for each element of each fine-tune."""
        return self.wall_seconds * 1e9 / (self.parameters * self.models)

    def to_dict(self) -> dict[str, Any]:
        """The point as plain values, ready for JSON."""
        return {**asdict(self), "ns_per_element_and_model": self.ns_per_element_and_model}


def main() -> int:
    """Compare or scale, as asked; 1 if a job failed."""
    options = parse_arguments()
    document: dict[str, Any] = {"machine": describe_machine(options.peers_python)}
    if options.scaling:
        points = run_scaling(options)
        fit = fit_scaling(points)
        print_scaling(points, fit)
        document |= {"scaling": [point.to_dict() for point in points], "fit": fit}
        failed = False
    else:
        results = run_comparison(options)
        print_comparison(results)
        document |= {
            "parameters": shape_for(options.parameters).parameters,
            "models": options.models,
            "mergekit_flags": options.mergekit_flags,
            "jobs": [asdict(result) for result in results],
        }
        failed = any(result.problem and result.problem.startswith("failed") for result in results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return int(failed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n"
        "  python bench/compare.py --repeat 5 --skip torch --json bench/results/compare.json\n"
        "  python bench/compare.py --parameters 20e6 --only ours-linear mergekit-linear floor\n\n"
        f"jobs: {', '.join(JOB_NAMES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parameters", type=float, default=USUAL_PARAMETERS, help="size of a model (0.95e9)")
    add("--models", type=int, default=USUAL_MODELS, help="how many fine-tunes (3)")
    add("--repeat", type=int, default=3, help="rounds, in each of which every job runs once (3)")
    add("--mergekit-flags", default="", metavar="FLAGS", help="such as '--num-threads 2'")
    add("--peers-python", type=Path, default=PEERS_PYTHON, metavar="PATH",
        help="python that has mergekit and torch (.venv-peers/bin/python)")  # fmt: skip
    add("--only", nargs="+", choices=JOB_NAMES, default=JOB_NAMES, metavar="JOB")
    add("--skip", nargs="+", choices=JOB_NAMES, default=(), metavar="JOB")
    add("--json", type=Path, metavar="PATH", help="also write all figures to this file")
    add("--scaling", action="store_true",
        help="instead, run dare+linear on models of 0.1, 0.3 and 0.95 billion parameters (or in "
        "these proportions up to --parameters), and on 2, 3, 5 and 8 of the largest")  # fmt: skip
    options = parser.parse_args()
    if options.models < 1 or options.repeat < 1 or options.parameters < LEAST_PARAMETERS:
        parser.error(f"at least 1 model, 1 run and {LEAST_PARAMETERS:g} parameters")
    return options


# ---------------------------------------------------------------- runs


def run_comparison(options: argparse.Namespace) -> list[Result]:
    """Run every job that was asked for."""
    chosen = [name for name in JOB_NAMES if name in options.only and name not in options.skip]
    inputs = provide_inputs([(options.parameters, options.models)])[0]
    with working_folders() as (work, output):
        flags = options.mergekit_flags.split()
        jobs = make_jobs(inputs, work, output, options.peers_python, flags)
        chosen_jobs = [job for job in jobs if job.name in chosen]
        return run_rounds(chosen_jobs, inputs, output, options.repeat)


def run_rounds(jobs: Sequence[Job], inputs: Inputs, output: Path, rounds: int) -> list[Result]:
    """Run every job once, then again, until there were so many rounds."""
    results = [
        Result(job.name, job.title, job.rival, problem=job.obstacle and f"skipped: {job.obstacle}")
        for job in jobs
    ]
    for number in range(1, rounds + 1):
        for job, result in zip(jobs, results, strict=True):
            if result.problem is None:
                run_again(job, result, inputs, output, f"round {number} of {rounds}")
    return results


def run_again(job: Job, result: Result, inputs: Inputs, output: Path, place: str) -> None:
    """Add a run to a job's result, or why it failed."""
    what = f"{place}: {job.title}, {len(inputs.tuned)} of {inputs.shape.folder_name}"
    try:
        result.runs.append(run_once(job, inputs, output))
    except ProgramError as error:
        result.problem = f"failed: {error}"
        return
    console.print(f"[dim]{what}: {result.runs[-1].wall_seconds:.2f} s[/dim]")


def run_once(job: Job, inputs: Inputs, output: Path) -> Measurement:
    """Run a job once, from a clean start, and throw its output away."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    os.sync()
    warm_page_cache(inputs.files)
    parts = [measure(command, job.environment) for command in job.commands]
    written = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    shutil.rmtree(output)
    if written < inputs.shape.model_bytes:
        raise ProgramError(f"wrote {written:,} bytes; {inputs.shape.model_bytes:,} are expected")
    peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
    own_peaks = [part.own_peak_bytes for part in parts if part.own_peak_bytes is not None]
    return Measurement(
        sum(part.wall_seconds for part in parts),
        sum(part.cpu_seconds for part in parts),
        max(peaks, default=None),
        max(own_peaks, default=None),
    )


def run_scaling(options: argparse.Namespace) -> list[ScalingPoint]:
    """Measure our dare+linear at several sizes and several numbers of models."""
    largest = options.parameters
    sizes = [largest * size / SCALING_PARAMETERS[-1] for size in SCALING_PARAMETERS]
    asked = [(size, USUAL_MODELS) for size in sizes]
    asked += [(largest, models) for models in SCALING_MODELS if models != USUAL_MODELS]
    all_inputs = provide_inputs(asked)
    points = []
    with working_folders() as (work, output):
        for inputs in all_inputs:
            job = make_our_job("ours-linear", inputs, work, output)
            [result] = run_rounds([job], inputs, output, options.repeat)
            if result.problem:
                raise SystemExit(f"{job.title}: {result.problem}")
            middle = result.median
            points.append(
                ScalingPoint(
                    inputs.shape.parameters,
                    len(inputs.tuned),
                    middle.wall_seconds,
                    middle.cpu_seconds,
                    middle.own_peak_bytes,
                )
            )
    return points


def fit_scaling(points: Sequence[ScalingPoint]) -> dict[str, float]:
    """Fit wall = start + elements·(base + models·model) by least squares."""
    terms = [[1.0, p.parameters * 1e-9, p.parameters * p.models * 1e-9] for p in points]
    seconds = [point.wall_seconds for point in points]
    start, base, model = np.linalg.lstsq(np.array(terms), np.array(seconds))[0].tolist()
    return {"start_seconds": start, "base_ns_per_element": base, "model_ns_per_element": model}


# ---------------------------------------------------------------- what runs need


def provide_inputs(asked: Sequence[tuple[float, int]]) -> list[Inputs]:
    """Make the models that are not there yet, in a process of its own; refuse if the disk is full.

    Our own memory must stay small: see `measure`.
    """
    found = [Inputs.find(DATA, shape_for(size), models) for size, models in asked]
    missing = {
        folder: inputs.shape.model_bytes
        for inputs in found
        for folder in missing_folders(DATA, inputs.shape, len(inputs.tuned))
    }
    output_bytes = max(inputs.shape.model_bytes for inputs in found)
    needed = int(1.02 * (sum(missing.values()) + output_bytes)) + (100 << 20)
    DATA.mkdir(exist_ok=True)
    free = shutil.disk_usage(DATA).free
    if free < needed:
        raise SystemExit(
            f"{DATA} needs {needed / 1e9:.1f} GB of free disk ({len(missing)} models to make, one "
            f"merged model at a time), and has {free / 1e9:.1f} GB; ask for fewer --parameters or "
            "--models"
        )
    for size, models in asked if missing else ():
        command = [sys.executable, BENCH / "models.py", DATA]
        subprocess.run([*command, "--parameters", str(size), "--models", str(models)], check=True)
    input_bytes = max(inputs.shape.model_bytes * (1 + len(inputs.tuned)) for inputs in found)
    if input_bytes + output_bytes > available_memory_bytes():
        console.print("note: the page cache may not hold all inputs, so times include the disk's")
    return found


@contextmanager
def working_folders() -> Iterator[tuple[Path, Path]]:
    """Lend a folder for recipes and one for outputs, on the disk that holds the inputs."""
    with tempfile.TemporaryDirectory(dir=DATA, prefix="work-") as name:
        yield Path(name), Path(name) / "output"


def describe_machine(peers_python: Path) -> dict[str, Any]:
    """What a reader of the figures must know."""
    packages = {name: version(name) for name in ("dare-merge", "numpy")}
    if peers_python.exists():
        code = (
            "from importlib.metadata import version; "
            "print(*(n + '=' + version(n) for n in ('torch', 'mergekit')))"
        )
        told = subprocess.run(
            [peers_python, "-c", code], capture_output=True, text=True, check=False
        )
        packages |= dict(item.split("=", 1) for item in told.stdout.split())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": packages,
    }


# ---------------------------------------------------------------- tables


def print_comparison(results: Sequence[Result]) -> None:
    """Print one line for each job."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("job", no_wrap=True)
    headings = ("runs", "wall s", "from – to", "CPU s", "memory MB")
    for heading in (*headings, "mergekit ÷ this", "this ÷ floor"):
        table.add_column(heading, justify="right")
    seconds = {result.name: result.median.wall_seconds for result in results if result.runs}
    for result in results:
        if not result.runs:
            table.add_row(result.name, "–")
            continue
        middle = result.median
        table.add_row(
            result.name,
            str(len(result.runs)),
            f"{middle.wall_seconds:.2f}",
            result.spread,
            f"{middle.cpu_seconds:.2f}",
            megabytes(middle.own_peak_bytes),
            ratio(seconds.get(result.rival or ""), middle.wall_seconds),
            ratio(middle.wall_seconds, seconds.get("floor")),
        )
    console.print(table)
    console.print("medians of the runs, start-up included; memory: without mapped files")
    for result in results:
        if result.problem:
            console.print(f"{result.name}: {result.problem}", style="red", markup=False)


def print_scaling(points: Sequence[ScalingPoint], fit: dict[str, float]) -> None:
    """Print one line for each size, and the line through them."""
    table = Table(title="dare+linear, drop rate 0.9", box=box.SIMPLE_HEAD)
    for heading in (
        "parameters", "models", "wall s", "CPU s", "ns per element and model", "peak MB",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            f"{point.parameters / 1e9:.3f} billion",
            str(point.models),
            f"{point.wall_seconds:.2f}",
            f"{point.cpu_seconds:.2f}",
            f"{point.ns_per_element_and_model:.2f}",
            megabytes(point.peak_bytes),
        )
    console.print(table)
    console.print(
        f"wall ≈ {fit['start_seconds']:.2f} s + elements × ({fit['base_ns_per_element']:.2f} ns + "
        f"models × {fit['model_ns_per_element']:.2f} ns)"
    )


def megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:,.0f}"


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.1f}" if above and below else "–"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ProgramError as error:
        raise SystemExit(str(error)) from None
