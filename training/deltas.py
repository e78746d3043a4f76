"""What is left of real fine-tunes in delta files, and in what they are compared with.

    python training/deltas.py OUTPUT SCRATCH      # OUTPUT is where training/minilm.py has written

Prints tables: bytes, bits for each parameter, seconds, scores and the share of the fine-tune's gain
that is kept, with 95 % intervals over held-out items and masks. What each model did on each item
is kept in SCRATCH, so that a second run measures nothing again; the models are not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from deltas_schemes import Scheme, schemes
from deltas_statistics import Estimate, Scores, gain_kept
from deltas_tunes import WEIGHTS, Tune, demo_tunes, text_tunes
from safetensors.torch import load_file
from threadpoolctl import threadpool_limits

COST_COLUMNS = ("without header", "store", "restore")
GAIN_COLUMNS = ("gain kept", "of likelihood")
REPEATS = 3
"""Storing and restoring are timed so often, and the best time counts."""


@dataclass(frozen=True)
class Run:
    """One scheme with one seed on one fine-tune."""

    nbytes: int
    right: list[int]
    likelihood: list[float]


@dataclass(frozen=True)
class Costs:
    """What a scheme takes beside its values."""

    header_bytes: int
    store_seconds: float
    restore_seconds: float


def measure(tune: Tune, scheme: Scheme, seed: int, scratch: Path) -> Run:
    """Store, restore and score; or read what was found before."""
    file = scratch / "runs" / tune.name / f"{scheme.name}, seed {seed}.json"
    if file.exists():
        return Run(**json.loads(file.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        stored = scheme.store(tune.base, tune.model, Path(folder), seed)
        items = tune.score(Path(folder) / WEIGHTS)
    run = Run(stored.nbytes, items.right.astype(int).tolist(), items.likelihood.tolist())
    note(run, file)
    return run


def clock(tune: Tune, scheme: Scheme, scratch: Path) -> Costs:
    """Time a scheme on one fine-tune, with nothing else; or read what was found before."""
    file = scratch / "costs" / tune.name / f"{scheme.name}.json"
    if file.exists():
        return Costs(**json.loads(file.read_text(encoding="utf-8")))
    stores, restores = [], []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            stored = scheme.store(tune.base, tune.model, Path(folder), scheme.seeds[0])
        stores.append(stored.store_seconds)
        restores.append(stored.restore_seconds)
    costs = Costs(stored.header_bytes, min(stores), min(restores))
    note(costs, file)
    return costs


def note(found: Run | Costs, file: Path) -> None:
    """Write down what was found."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(vars(found)), encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A scheme's runs on one fine-tune, beside base and fine-tune."""

    runs: Sequence[Run]
    base: Run
    tuned: Run

    @property
    def nbytes(self) -> float:
        """Of a file; masks of some seeds keep a few elements more."""
        return fmean(run.nbytes for run in self.runs)

    @property
    def score(self) -> float:
        """Share of items that are answered right."""
        return fmean(share for run in self.runs for share in run.right)

    @property
    def answers(self) -> Scores:
        """Whether items are answered right."""
        return Scores(
            np.array([run.right for run in self.runs], np.float64),
            np.array(self.base.right, np.float64),
            np.array(self.tuned.right, np.float64),
        )

    @property
    def likelihoods(self) -> Scores:
        """Logarithms of the right answers' probabilities."""
        return Scores(
            np.array([run.likelihood for run in self.runs]),
            np.array(self.base.likelihood),
            np.array(self.tuned.likelihood),
        )


def rows_of(tune: Tune, scratch: Path) -> dict[str, Row]:
    """Measure all schemes on one fine-tune."""
    runs: dict[str, list[Run]] = {}
    for scheme in schemes(tune.base):
        print(f"{tune.name}: {scheme.name}", file=sys.stderr, flush=True)
        runs[scheme.name] = [measure(tune, scheme, seed, scratch) for seed in scheme.seeds]
    base, tuned = runs["the base"][0], runs["the fine-tune itself"][0]
    return {name: Row(found, base, tuned) for name, found in runs.items()}


def table(tunes: Sequence[Tune], scratch: Path, *, with_costs: bool) -> Iterator[str]:
    """Schemes by size: each fine-tune's score, and the share of the gain that is kept."""
    all_rows = [rows_of(tune, scratch) for tune in tunes]
    parameters = sum(value.numel() for value in load_file(tunes[0].model / WEIGHTS).values())
    costs = {s.name: clock(tunes[0], s, scratch) for s in schemes(tunes[0].base) if with_costs}
    names = [f"right, {tune.name}" for tune in tunes]
    columns = ["scheme", "bytes", "bits", *COST_COLUMNS * with_costs, *names, *GAIN_COLUMNS]
    yield "| " + " | ".join(columns) + " |"
    yield "|---|" + "---:|" * (len(columns) - 1)
    sizes = {name: fmean(rows[name].nbytes for rows in all_rows) for name in all_rows[0]}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        rows = [rows[name] for rows in all_rows]
        cells = [name, f"{size:,.0f}", f"{8 * size / parameters:.2f}"]
        if with_costs:
            cost = costs[name]
            cells.append(f"{8 * (size - cost.header_bytes) / parameters:.2f}")
            cells += [f"{cost.store_seconds:.2f} s", f"{cost.restore_seconds:.2f} s"]
        cells += [f"{100 * row.score:.1f} %" for row in rows]
        cells.append(shown(gain_kept([row.answers for row in rows])))
        cells.append(shown(gain_kept([row.likelihoods for row in rows])))
        yield "| " + " | ".join(cells) + " |"


def shown(estimate: Estimate) -> str:
    """A share in per cent, with its interval."""
    low, high = estimate.interval
    return f"{100 * estimate.mean:.1f} % ({100 * low:.1f} … {100 * high:.1f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("scratch", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    threadpool_limits(limits=1, user_api="blas")
    *full, lora = text_tunes(arguments.output, arguments.scratch / "models")
    families = {"demonstration": demo_tunes(), "MiniLM": full, "MiniLM by LoRA": [lora]}
    for title, tunes in families.items():
        lines = table(tunes, arguments.scratch, with_costs=len(tunes) > 1)
        print(f"## {title}\n\n" + "\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
