"""What merges of the fine-tunes of MiniLM can do, on held-out texts, beside what is predicted.

    python training/minilm_merges.py OUTPUT        # where training/minilm.py has written

Prints tables: each model alone at rising drop rates, and both under several methods.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from minilm import JOBS, Encoder, load_head, minilm, share_right
from minilm_data import TASKS, Task

import dare
from dare.analysis.judge.prediction import predict
from dare.analysis.measure.analyzing import analyze

RATES = (0.0, 0.5, 0.7, 0.9, 0.95, 0.99)
SEEDS = (42, 142, 242)
"""Model i of a merge uses seed + i, so that these have room between them."""
METHODS = (
    ("linear", None),
    ("sum", None),
    ("ties", None),
    ("dare+linear", 0.5),
    ("dare+linear", 0.9),
    ("dare+sum", 0.5),
    ("dare+sum", 0.9),
    ("dare+ties", 0.5),
    ("dare+ties", 0.9),
)


def merged(
    models: Sequence[Path], folder: Path, method: str, drop_rate: float | None, seed: int = 42
) -> Encoder:
    """Merge models into the base and read the result."""
    stages = {} if drop_rate is None else {"dare": {"drop_rate": drop_rate}}
    recipe = dare.Request.of(
        base=minilm(),
        models=models,
        output=folder / f"{method}-{drop_rate}-{seed}",
        method=method,
        stages=stages,
        seed=seed,
        on_missing="base",
        verbose=False,
    )
    dare.merge(recipe)
    return Encoder.load(folder / f"{method}-{drop_rate}-{seed}")


def tolerance(output: Path, name: str, task: Task, folder: Path) -> list[str]:
    """One model at rising drop rates, with its own head: predicted error and measured share."""
    head = load_head(output, name)
    total = analyze(minilm(), [output / name], spectra="none", verbose=False).model(name).total
    before = share_right(Encoder.load(minilm()), head, task.held_out)
    lines = [
        "| drop rate | predicted error of δ | predicted error of outputs | told right | "
        "of the full change's gain |",
        "|---|---|---|---|---|",
    ]
    full = before
    for rate in RATES:
        seeds = SEEDS if rate else SEEDS[:1]
        shares = [
            share_right(
                merged([output / name], folder, "dare+linear", rate, seed), head, task.held_out
            )
            for seed in seeds
        ]
        full = shares[0] if rate == 0 else full
        found = predict(total, rate)
        gain = (fmean(shares) - before) / (full - before)
        lines.append(
            f"| {rate:g} | {found.relative_error:.2f} | {found.output_error:.2%} | "
            f"{spread(shares)} | {gain:.0%} |"
        )
    lines.append(f"\nThe base with this head: {before:.1%}. {len(SEEDS)} seeds each.")
    return lines


def methods(output: Path, tasks: dict[str, Task], folder: Path) -> list[str]:
    """Several models merged into one, which is then tried on each of their tasks."""
    heads = {name: load_head(output, name) for name in tasks}
    models = [output / name for name in tasks]

    def row(told: str, encoders: Sequence[Encoder]) -> str:
        shares = [
            [share_right(encoder, heads[name], task.held_out) for encoder in encoders]
            for name, task in tasks.items()
        ]
        means = [fmean(each) for each in zip(*shares, strict=True)]
        return " | ".join(["", told, *map(spread, shares), spread(means), ""]).strip()

    lines = [f"| merge | {' | '.join(tasks)} | mean |", "|---" * (len(tasks) + 2) + "|"]
    lines.append(row("base", [Encoder.load(minilm())]))
    lines += [row(f"{name} alone", [Encoder.load(output / name)]) for name in tasks]
    for method, rate in METHODS:
        told = method if rate is None else f"{method} {rate}"
        seeds = SEEDS[:1] if rate is None else SEEDS
        lines.append(row(told, [merged(models, folder, method, rate, seed) for seed in seeds]))
    return lines


def spread(shares: Sequence[float]) -> str:
    """The mean of shares, and how far they are apart if there are several."""
    if len(shares) == 1:
        return f"{shares[0]:.1%}"
    return f"{fmean(shares):.1%} ± {100 * stdev(shares):.1f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    tasks = {name: TASKS[JOBS[name].task]() for name in ("docstrings", "sentiment")}
    for name, task in tasks.items():
        with tempfile.TemporaryDirectory(dir=output) as folder:
            lines = tolerance(output, name, task, Path(folder))
            print(f"{name}\n\n" + "\n".join(lines) + "\n", flush=True)
    with tempfile.TemporaryDirectory(dir=output) as folder:
        print("\n".join(methods(output, tasks, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
