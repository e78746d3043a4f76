"""What each stage costs relative to `linear`: processor time, and passes over the weights.

    python bench/costs.py FOLDER                             # writes docs/method-costs.json
    python bench/costs.py FOLDER --parameters 5e6 --only knots tsv      # hours with larger ones

Merges run in this process on one set of made-up models in FOLDER, which are made if they are not
there: a base of 50 million parameters (100 MB in bfloat16) and three fine-tunes. Processor time
counts, so that other work on the machine matters little; methods take turns, and the median of the
rounds is kept. Start-up is not in it. A delta stage is followed by `linear`, a refine stage
follows it, and a stage that takes one or two models is held against `linear` of as many. Stages
that are in the file already and are not asked for stay there.

Passes are what a plan says: how often all weights are read. Stages that work on whole matrices take
longer, for each element, the wider these are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from models import make_models, shape_for

import dare
from dare.inputs.gathered import as_triangle, write_gathered
from dare.stages import STAGES, Stage

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "docs" / "method-costs.json"
PARAMETERS, MODELS, ROUNDS = 50e6, 3, 3
SLOW_SECONDS = 10
"""A method that takes longer is run once."""
MEMORY = "4GiB"


def main() -> None:
    """Measure every stage, or those that are named, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the models are, and merges go")
    parser.add_argument("--parameters", type=float, default=PARAMETERS, help="of a model (50e6)")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    parser.add_argument("--json", type=Path, default=COSTS, metavar="PATH")
    options = parser.parse_args()
    shape = shape_for(options.parameters)
    make_models(options.folder, shape, MODELS)
    work = options.folder / shape.folder_name
    stages = [STAGES[name] for name in options.only if STAGES[name].models != 0]
    measured = list(map(chain_of, stages))
    yardsticks = [("linear", models) for _, models in measured]
    chains = list(dict.fromkeys([*yardsticks, *measured]))
    times: dict[tuple[str, int], list[float]] = {chain: [] for chain in chains}
    for _ in range(ROUNDS):
        for chain, found in times.items():
            if not found or found[0] < SLOW_SECONDS:
                started = time.process_time()
                dare.merge(recipe_of(work, *chain), overwrite=True)
                found.append(time.process_time() - started)
                print(f"{chain[0]} of {chain[1]}: {found[-1]:.2f} s", flush=True)
    medians = {chain: statistics.median(found) for chain, found in times.items()}
    known = json.loads(options.json.read_text("utf-8")) if options.json.is_file() else {}
    for stage in stages:
        method, models = chain_of(stage)
        known[stage.name] = {
            "time": round(medians[method, models] / medians["linear", models], 2),
            "passes": dare.plan(recipe_of(work, method, models)).cost.passes,
            "parameters": shape.parameters,
        }
    found = {name: known[name] for name in STAGES if name in known}
    options.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def chain_of(stage: Stage) -> tuple[str, int]:
    """The method that a stage is measured by, and the number of its models."""
    methods = {"delta": f"{stage.name}+linear", "combine": stage.name}
    return methods.get(stage.kind, f"linear+{stage.name}"), stage.models or MODELS


def recipe_of(work: Path, method: str, models: int) -> dare.Request:
    """A merge of so many models by a method with its usual settings."""
    needs_inputs = method in STAGES and STAGES[method].takes_grams
    more = {"gathered": gather(work, models)} if needs_inputs else {}
    return dare.Request.of(
        base=work / "base",
        models=[work / f"tuned-{number}" for number in range(1, models + 1)],
        output=work / "merged.safetensors",
        method=method,
        max_memory=MEMORY,
        verbose=False,
        **more,
    )


def gather(work: Path, models: int) -> Path:
    """The file of Gram matrices of made-up inputs, for all matrices; written once."""
    file, random = work / "gathered.safetensors", np.random.default_rng(0)
    if not file.exists():
        plan = dare.plan(base=work / "base", models=[work / "tuned-1"], method="sum")
        sizes = {t.name: t.shape[1] for t in plan.tensors if len(t.shape) == 2}
        inputs = {size: random.normal(size=(256, size)) for size in set(sizes.values())}
        grams = {size: as_triangle(seen.T @ seen) for size, seen in inputs.items()}
        names = [f"tuned-{number}" for number in range(1, models + 1)]
        tensors = {
            f"gram/{n}/{tensor}": grams[size] for n in names for tensor, size in sizes.items()
        }
        write_gathered(file, tensors, rows=dict.fromkeys(names, 256))
    return file


if __name__ == "__main__":
    main()
