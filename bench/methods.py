"""Every method on one base and its fine-tunes: time and memory, beside mergekit where it has it.

Methods are taken from the registry: each combine stage alone, and each delta stage before `linear`.
Every run is a process of its own, as in `compare.py`.

    python bench/methods.py                         # 0.3 billion parameters, four fine-tunes
    python bench/methods.py --parameters 20e6 --only ties della+linear
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import (
    PEERS_PYTHON,
    Result,
    console,
    describe_machine,
    megabytes,
    provide_inputs,
    ratio,
    run_rounds,
    working_folders,
)
from jobs import Inputs, Job, mergekit_job, write_recipe
from rich import box
from rich.table import Table

from dare.stages import STAGES

USUAL_PARAMETERS = 0.3e9
USUAL_MODELS = 4
MEMORY = "8GiB"
"""What matrix stages may take; the others stay far below."""


@dataclass(frozen=True)
class Rival:
    """What mergekit calls a method, and the parameters that make it the same."""

    method: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """For each model."""
    models: int | None = None
    """How many it takes, if not any number."""


RIVALS = {
    "linear": Rival("task_arithmetic", {"weight": 0.25}),
    "sum": Rival("task_arithmetic", {"weight": 1.0}),
    "dare+linear": Rival("dare_linear", {"weight": 0.25, "density": 0.1}),
    "dare+ties": Rival("dare_ties", {"weight": 0.25, "density": 0.1}),
    "ties": Rival("ties", {"weight": 0.25, "density": 1.0}),
    "trim+ties": Rival("ties", {"weight": 0.25, "density": 0.2}),
    "breadcrumbs+linear": Rival("breadcrumbs", {"weight": 0.25, "density": 0.9, "gamma": 0.01}),
    "della+linear": Rival("della_linear", {"weight": 0.25, "density": 0.1, "epsilon": 0.05}),
    "slerp": Rival("slerp", models=2),
    "nuslerp": Rival("nuslerp", {"weight": 0.5}, models=2),
    "karcher": Rival("karcher"),
    "model_stock": Rival("model_stock"),
}


def all_methods() -> list[str]:
    """Each combine stage, each delta stage with `linear`, and some usual chains."""
    combines = [name for name, stage in STAGES.items() if stage.kind == "combine"]
    deltas = [name for name, stage in STAGES.items() if stage.kind == "delta"]
    chains = ("dare+ties", "trim+ties", "linear+svc")
    return [*combines, *(f"{name}+linear" for name in deltas), *chains]


def main() -> int:
    """Measure what was asked for; 1 if a job failed."""
    options = parse_arguments()
    inputs = provide_inputs([(options.parameters, options.models)])[0]
    machine = describe_machine(options.peers_python)
    results: dict[str, tuple[Result, Result | None]] = {}
    with working_folders() as (work, output):
        for method in options.only:
            chosen = fitting(method, inputs)
            jobs = [our_job(method, chosen, work, output)]
            if method in RIVALS and not options.without_mergekit:
                jobs.append(their_job(method, chosen, work, output, options.peers_python))
            ours, *theirs = run_rounds(jobs, chosen, output, options.repeat)
            results[method] = ours, theirs[0] if theirs else None
            if options.json:  # after each, since all of them take long
                write_json(options.json, machine, results)
    print_table(results)
    return int(any(ours.problem for ours, _ in results.values()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    methods = all_methods()
    add("--parameters", type=float, default=USUAL_PARAMETERS, help="size of a model (0.3e9)")
    add("--models", type=int, default=USUAL_MODELS, help="how many fine-tunes (4)")
    add("--repeat", type=int, default=3, help="rounds of both (3)")
    add("--only", nargs="+", choices=methods, default=methods, metavar="METHOD")
    add("--without-mergekit", action="store_true")
    add("--peers-python", type=Path, default=PEERS_PYTHON, metavar="PATH")
    add("--json", type=Path, metavar="PATH", help="also write all figures to this file")
    return parser.parse_args()


def fitting(method: str, inputs: Inputs) -> Inputs:
    """The inputs with as many models as the method takes."""
    wanted = STAGES[method.rpartition("+")[2]].models
    return inputs if wanted is None else Inputs(inputs.shape, inputs.base, inputs.tuned[:wanted])


def our_job(method: str, inputs: Inputs, work: Path, output: Path) -> Job:
    """One of our merges, with the usual parameters of its stages."""
    recipe = work / f"{method}.toml"
    text = write_recipe(inputs, output, method, (), drop_rate=None)
    recipe.write_text(f"max_memory = {json.dumps(MEMORY)}\n{text}")
    command = (sys.executable, "-m", "dare", str(recipe), "--overwrite")
    return Job(method, f"dare: {method}", [command])


def their_job(method: str, inputs: Inputs, work: Path, output: Path, peers_python: Path) -> Job:
    """The same by mergekit."""
    rival = RIVALS[method]
    models = [{"model": str(path), "parameters": rival.parameters} for path in inputs.tuned]
    configuration: dict[str, Any] = {
        "merge_method": rival.method,
        "base_model": str(inputs.base),
        "models": models,
        "dtype": "bfloat16",
        "out_dtype": "bfloat16",
    }
    if rival.method == "slerp":  # which interpolates between its base and one model
        configuration["base_model"] = str(inputs.tuned[0])
        configuration["models"] = [{"model": str(path)} for path in inputs.tuned]
        configuration["parameters"] = {"t": 0.5}
    return mergekit_job(
        f"mergekit-{method}", f"mergekit: {rival.method}", configuration, work, output, peers_python
    )


def print_table(results: dict[str, tuple[Result, Result | None]]) -> None:
    """Print one line for each method."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for heading in ("wall s", "CPU s", "memory MB", "mergekit s", "mergekit MB", "mergekit ÷ ours"):
        table.add_column(heading, justify="right")
    for method, (ours, theirs) in results.items():
        table.add_row(method, *figures(ours, theirs))
    console.print(table)
    for outcome in (result for pair in results.values() for result in pair if result is not None):
        if outcome.problem:
            console.print(f"{outcome.name}: {outcome.problem}", style="red", markup=False)


def figures(ours: Result, theirs: Result | None) -> Sequence[str]:
    """The cells of one line."""
    if not ours.runs:
        return ("–",)
    middle = ours.median
    cells = [
        f"{middle.wall_seconds:.2f}",
        f"{middle.cpu_seconds:.2f}",
        megabytes(middle.own_peak_bytes),
    ]
    if theirs is None or not theirs.runs:
        return [*cells, "", "", ""]
    rival = theirs.median
    return [
        *cells,
        f"{rival.wall_seconds:.2f}",
        megabytes(rival.own_peak_bytes),
        ratio(rival.wall_seconds, middle.wall_seconds),
    ]


def write_json(
    path: Path, machine: dict[str, Any], results: dict[str, tuple[Result, Result | None]]
) -> None:
    """Write all figures so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "methods": plain(results)}, indent=2) + "\n")


def plain(results: dict[str, tuple[Result, Result | None]]) -> dict[str, Any]:
    """The figures as plain values, ready for JSON."""
    return {
        method: {**best_of(ours, ""), **best_of(theirs, "mergekit_")}
        for method, (ours, theirs) in results.items()
    }


def best_of(result: Result | None, prefix: str) -> dict[str, float | None]:
    """The figures of the fastest run; None where there is none."""
    best = result.best if result is not None and result.runs else None
    return {
        f"{prefix}{name}": None if best is None else getattr(best, name)
        for name in ("wall_seconds", "cpu_seconds", "peak_bytes")
    }


if __name__ == "__main__":
    sys.exit(main())
