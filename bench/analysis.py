"""Analyses by dare beside torch: time, CPU and memory; and beside what a merge takes.

- `read`: the same inputs read as a merge reads them, and nothing done with them. The floor.
- `analyze`: all of `dare.analyze`. `without-spectra`: the same without singular values.
- `merge`: the whole of `dare+linear`, output included.
- `torch`: fewer figures than ours by torch, tensor after tensor (bench/torch_statistics.py).

Every run is a process of its own, measured from its start to its end, with the inputs in the page
cache.

    python bench/analysis.py                          # 0.95 billion parameters, three fine-tunes
    python bench/analysis.py --parameters 20e6 --models 3 --skip torch
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compare import (
    PEERS_PYTHON,
    USUAL_MODELS,
    USUAL_PARAMETERS,
    Result,
    console,
    describe_machine,
    megabytes,
    provide_inputs,
    ratio,
    run_rounds,
    working_folders,
)
from jobs import BENCH, Inputs, Job, make_our_job
from measure import Measurement, ProgramError, measure, warm_page_cache
from rich import box
from rich.table import Table

ANALYZE = """
import sys
from dare.analysis.measure.analyzing import analyze
analyze(sys.argv[2], sys.argv[3:], spectra=sys.argv[1], verbose=False)
"""
JOB_NAMES = ("read", "analyze", "without-spectra", "merge", "torch")


def main() -> int:
    """Measure what was asked for; 1 if a job failed."""
    options = parse_arguments()
    chosen = [name for name in options.only if name not in options.skip]
    [inputs] = provide_inputs([(options.parameters, options.models)])
    jobs = make_jobs(inputs, options.peers_python)
    results = [run_reader(job, inputs, options.repeat) for job in jobs if job.name in chosen]
    if "merge" in chosen:
        with working_folders() as (work, output):
            job = make_our_job("ours-linear", inputs, work, output)
            [merged] = run_rounds([job], inputs, output, options.repeat)
        results.append(merged)
    print_table(results)
    if options.json:
        document: dict[str, Any] = {
            "machine": describe_machine(options.peers_python),
            "parameters": inputs.shape.parameters,
            "models": options.models,
            "jobs": [asdict(result) for result in results],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return int(any(result.problem for result in results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parameters", type=float, default=USUAL_PARAMETERS, help="size of a model (0.95e9)")
    add("--models", type=int, default=USUAL_MODELS, help="how many fine-tunes (3)")
    add("--repeat", type=int, default=3, help="runs of each job (3)")
    add("--only", nargs="+", choices=JOB_NAMES, default=JOB_NAMES, metavar="JOB")
    add("--skip", nargs="+", choices=JOB_NAMES, default=(), metavar="JOB")
    add("--peers-python", type=Path, default=PEERS_PYTHON, metavar="PATH",
        help="python that has torch (.venv-peers/bin/python)")  # fmt: skip
    add("--json", type=Path, metavar="PATH", help="also write all figures to this file")
    return parser.parse_args()


def make_jobs(inputs: Inputs, peers_python: Path) -> list[Job]:
    """All jobs that write nothing."""
    folders = tuple(map(str, (inputs.base, *inputs.tuned)))
    ours = (sys.executable, "-c", ANALYZE)
    torch = (str(peers_python), str(BENCH / "torch_statistics.py"), *map(str, inputs.files))
    obstacle = None if peers_python.exists() else "torch is not where --peers-python points"
    return [
        Job("read", "read alone", [(sys.executable, str(BENCH / "read_side.py"), *folders)]),
        Job("analyze", "dare.analyze", [(*ours, "auto", *folders)]),
        Job("without-spectra", "dare.analyze, no spectra", [(*ours, "none", *folders)]),
        Job("torch", "torch, fewer figures", [torch], obstacle=obstacle),
    ]


def run_reader(job: Job, inputs: Inputs, repeat: int) -> Result:
    """Run a job that writes nothing until it has been run often enough."""
    if job.obstacle:
        return Result(job.name, job.title, job.rival, [], f"skipped: {job.obstacle}")
    runs: list[Measurement] = []
    while len(runs) < repeat:
        what = f"{job.title}, {len(inputs.tuned)} of {inputs.shape.folder_name}"
        console.print(f"[dim]{what}, run {len(runs) + 1} …[/dim]")
        os.sync()
        warm_page_cache(inputs.files)
        try:
            runs.append(measure(job.commands[0], job.environment))
        except ProgramError as error:
            return Result(job.name, job.title, job.rival, runs, f"failed: {error}")
    return Result(job.name, job.title, job.rival, runs)


def print_table(results: Sequence[Result]) -> None:
    """Print one line for each job."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("job", no_wrap=True)
    for heading in ("runs", "wall s", "from – to", "CPU s", "memory MB", "this ÷ read"):
        table.add_column(heading, justify="right")
    floor = next((r.median.wall_seconds for r in results if r.name == "read" and r.runs), None)
    for result in results:
        if not result.runs:
            table.add_row(result.title, "–")
            continue
        middle = result.median
        table.add_row(
            result.title,
            str(len(result.runs)),
            f"{middle.wall_seconds:.2f}",
            result.spread,
            f"{middle.cpu_seconds:.2f}",
            megabytes(middle.own_peak_bytes),
            ratio(middle.wall_seconds, floor),
        )
    console.print(table)
    console.print("medians of the runs, start-up included; memory: without mapped files")
    for result in results:
        if result.problem:
            console.print(f"{result.title}: {result.problem}", style="red", markup=False)


if __name__ == "__main__":
    sys.exit(main())
