"""Make the models of every world, merge them in every way, and write down what the merges can do.

    python experiments/run.py                       # all worlds, into experiments/results/sets
    python experiments/run.py glyphs words --models /tmp/models --processes 2

A set that is in the results already is left alone, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pretrained import PRETRAINED
from sets import ModelSet, sets_of
from worlds import WORLDS

WORLDS = WORLDS | PRETRAINED

HERE = Path(__file__).parent


def main() -> None:
    """Score the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("worlds", nargs="*", default=list(WORLDS))
    parser.add_argument("--models", type=Path, default=HERE / "models")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "sets")
    parser.add_argument("--kinds", nargs="*", help="kinds of sets; all, if not given")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    asked.results.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
        jobs = {
            pool.submit(
                score_world, name, asked.models, asked.results, asked.kinds, asked.device
            ): name
            for name in asked.worlds
        }
        for job in as_completed(jobs):
            print(f"{jobs[job]}: {job.result():.0f} s", flush=True)


def score_world(
    name: str, models: Path, results: Path, kinds: list[str] | None, device: str
) -> float:
    """Score the sets of a world; return the seconds it took."""
    import torch
    from scoring import score_set
    from tuning import Workshop

    torch.set_num_threads(1)
    started = time.perf_counter()
    shop = Workshop(WORLDS[name], models, device)
    file = results / f"{name}.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for members in sets_of(WORLDS[name]):
        if members.kind in known or (kinds and members.kind not in kinds):
            continue
        found = score_set(shop, members) | {"features": features(shop, members)}
        known[members.kind] = found
        file.write_text(json.dumps(known, separators=(",", ":")))
        print(f"{name}, {members.kind}: {time.perf_counter() - started:.0f} s", flush=True)
    return time.perf_counter() - started


def features(shop: Any, members: ModelSet) -> dict[str, Any]:
    """What `dare analyze` sees in the weights of a set."""
    import dare
    from dare.analysis.judge.advice import judge

    files = [str(shop.file(tune.name)) for tune in members.tunes]
    shop.base()
    analysis = dare.analyze(str(shop.file("base-0")), files)
    document = analysis.to_dict()
    readiness, advice = judge(analysis)
    return {
        "models": [
            {
                "total": _without_details(model["total"]),
                "by_kind": {k: _without_details(v) for k, v in model["by_kind"].items()},
                "origin": model["origin"],
                "rank": model["likely_rank"],
                "spectra": [
                    {
                        k: t["spectrum"][k]
                        for k in ("effective_rank", "stable_rank", "outlier_share")
                    }
                    | {"elements": t["statistics"]["elements"]}
                    for t in model["tensors"]
                    if t["spectrum"]
                ],
            }
            for model in document["models"]
        ],
        "pairs": [pair["total"] | {"ratio": pair["ratio"]} for pair in document["pairs"]],
        "together": {k: document["together"][k] for k in ("cancelled", "conflicted")},
        "verdict": str(readiness.verdict),
        "rules": [finding.rule for finding in readiness.findings],
        "advice": {k: v for k, v in advice.recipe.items() if k not in ("base", "models", "output")},
        "left_out": [analysis.names.index(name) for name in advice.left_out],
    }


def _without_details(statistics: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in statistics.items() if k not in ("histogram", "quantiles")}


if __name__ == "__main__":
    main()
