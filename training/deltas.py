"""What is left of real fine-tunes in delta files, and in what they are compared with.

    python training/deltas.py OUTPUT SCRATCH      # OUTPUT is where training/minilm.py has written

Prints tables: bytes, bits for each parameter, seconds, scores and the share of the fine-tune's gain
that is kept, with 95 % intervals over held-out items and masks. What each model did on each item
is kept in SCRATCH, so that a second run measures nothing again; the models are not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
import torch
from deltas_schemes import Scheme, schemes
from deltas_statistics import Estimate, Numbers, gain_kept, mean_of, score
from deltas_tunes import WEIGHTS, Tune, demo_tunes, text_tunes
from safetensors.torch import load_file
from threadpoolctl import threadpool_limits


@dataclass(frozen=True)
class Run:
    """One scheme with one seed on one fine-tune."""

    nbytes: int
    store_seconds: float
    restore_seconds: float
    right: list[int]
    likelihood: list[float]


def measure(tune: Tune, scheme: Scheme, seed: int, scratch: Path) -> Run:
    """Store, restore and score; or read what was found before."""
    file = scratch / "runs" / tune.name / f"{scheme.name}, seed {seed}.json"
    if file.exists():
        return Run(**json.loads(file.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        stored = scheme.store(tune.base, tune.model, Path(folder), seed)
        items = tune.score(Path(folder) / WEIGHTS)
    run = Run(
        stored.nbytes,
        stored.store_seconds,
        stored.restore_seconds,
        items.right.astype(int).tolist(),
        items.likelihood.tolist(),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(vars(run)), encoding="utf-8")
    return run


@dataclass(frozen=True)
class Row:
    """A scheme's runs on one fine-tune, beside base and fine-tune."""

    runs: Sequence[Run]
    base: Run
    tuned: Run

    @cached_property
    def score(self) -> Estimate:
        """Share of items that are answered right."""
        return score([_items(run.right) for run in self.runs])

    @cached_property
    def gain(self) -> Estimate:
        """Share of the fine-tune's gain in right answers that is kept."""
        runs = [_items(run.right) for run in self.runs]
        return gain_kept(runs, _items(self.base.right), _items(self.tuned.right))

    @cached_property
    def likelihood_gain(self) -> Estimate:
        """The same of the logarithm of the right answer's probability."""
        runs = [_items(run.likelihood) for run in self.runs]
        return gain_kept(runs, _items(self.base.likelihood), _items(self.tuned.likelihood))


def _items(values: Sequence[float]) -> Numbers:
    return np.array(values, np.float64)


def rows_of(tune: Tune, scratch: Path) -> dict[str, Row]:
    """Measure all schemes on one fine-tune."""
    runs: dict[str, list[Run]] = {}
    for scheme in schemes(tune.base):
        began = time.perf_counter()
        runs[scheme.name] = [measure(tune, scheme, seed, scratch) for seed in scheme.seeds]
        print(f"{tune.name}: {scheme.name}, {time.perf_counter() - began:.0f} s", flush=True)
    base, tuned = runs["the base"][0], runs["the fine-tune itself"][0]
    return {name: Row(found, base, tuned) for name, found in runs.items()}


def table(tunes: Sequence[Tune], rows: Sequence[dict[str, Row]]) -> Iterator[str]:
    """Schemes by size, with each fine-tune's score and the mean share of the gain."""
    parameters = sum(value.numel() for value in load_file(tunes[0].model / WEIGHTS).values())
    names = " | ".join(tune.name for tune in tunes)
    yield (
        f"| scheme | bytes | bits | store | restore | {names} "
        "| gain kept | gain in log-likelihood kept |"
    )
    yield "|---|" + "---:|" * (6 + len(tunes))
    sizes = {name: median(run.nbytes for row in rows for run in row[name].runs) for name in rows[0]}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        beside = [row[name] for row in rows]
        runs = [run for row in beside for run in row.runs]
        cells = [
            name,
            f"{sizes[name]:,.0f}",
            f"{8 * sizes[name] / parameters:.2f}",
            f"{median(run.store_seconds for run in runs):.2f} s",
            f"{median(run.restore_seconds for run in runs):.2f} s",
            *(_shown(row.score) for row in beside),
            _shown(mean_of([row.gain for row in beside])),
            _shown(mean_of([row.likelihood_gain for row in beside])),
        ]
        yield "| " + " | ".join(cells) + " |"


def _shown(estimate: Estimate) -> str:
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
    models = arguments.scratch / "models"
    for tunes in (demo_tunes(), text_tunes(arguments.output, models)):
        rows = [rows_of(tune, arguments.scratch) for tune in tunes]
        print("\n" + "\n".join(table(tunes, rows)) + "\n", flush=True)
    shutil.rmtree(models)


if __name__ == "__main__":
    main()
