"""Questions on DARE that the sets do not answer: how much a single model bears, and how it is done.

Each answer is a list of scores in percent, by what was done; seeds of masks stand side by side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scoring import SEEDS, Scorer, mean_score
from tuning import Tune, Weights, Workshop

import dare
from dare.analysis.judge.prediction import exposures_of, mean_bounded_error
from dare.tensors.names import is_embedding

RATES = (0.5, 0.7, 0.9, 0.95, 0.99)
COUNTS = (2, 3, 4, 5, 6, 8)
SCHEMES: tuple[dict[str, Any], ...] = (
    {"bits": 4, "drop_rate": 0.0},
    {"bits": 2, "drop_rate": 0.0},
    {"bits": 2, "drop_rate": 0.3},
    {"bits": 2, "drop_rate": 0.5},
    {"bits": 2, "drop_rate": 0.62},
    {"bits": 4, "drop_rate": 0.8},
    {"bits": "native", "drop_rate": 0.9},
)


def answer_all(shop: Workshop) -> dict[str, Any]:
    """Every answer that a world gives."""
    tasks, is_large = shop.world.tasks, shop.world.is_large
    singles = [Tune(task, way=way) for way in ("full", "lora") for task in tasks[:3]]
    strengths = ("light", "harsh") if is_large else ("light", "gentle", "harsh")
    singles += [Tune(tasks[0], strength) for strength in strengths]
    return {
        "world": shop.world.name,
        "about": shop.world.about,
        "singles": [answer_single(shop, tune, stores=not is_large) for tune in singles],
        "counts": [count_models(shop, n) for n in COUNTS if n <= len(tasks)],
        "shared": compare_seeds(shop),
    }


def answer_single(shop: Workshop, tune: Tune, *, stores: bool) -> dict[str, Any]:
    """How much dropping one model bears, and what a delta file keeps of it."""
    scorer = Scorer(shop, [shop.make(tune)], [tune.task])
    analysis = dare.analyze(
        str(shop.file("base-0")), [str(shop.file(tune.name))], spectra="none", verbose=False
    )
    (model,) = analysis.models
    exposures = exposures_of(model)

    def dropped(stage: str, seeds: Sequence[int] = SEEDS, **settings: Any) -> list[float]:
        return [_score(scorer, scorer.merge(f"{stage}+sum", seed=s, **settings)) for s in seeds]

    found: dict[str, Any] = {
        "model": tune.name,
        "way": tune.way,
        "strength": tune.strength,
        "relative_norm": model.total.relative_norm,
        "mean_magnitude": model.total.inliers.mean_magnitude,
        "base": _score(scorer, scorer.base),
        "full": _score(scorer, scorer.models[0]),
        "rescaled": {rate: dropped("dare", drop_rate=rate) for rate in RATES},
        "not rescaled": {
            rate: dropped("darex", SEEDS[:1], drop_rate=rate, q=1.0) for rate in RATES
        },
        "predicted error": {rate: mean_bounded_error(exposures, rate) for rate in RATES},
    }
    if any(map(is_embedding, scorer.base)):
        found["embeddings"] = {
            "all 0.9": found["rescaled"][0.9],
            "others 0.9, these 0.5": dropped("dare", drop_rate=0.9, embedding_drop_rate=0.5),
            "others 0.9, these 0": dropped("dare", drop_rate=0.9, embedding_drop_rate=0.0),
            "others 0, these 0.9": dropped("dare", drop_rate=0.0, embedding_drop_rate=0.9),
        }
    if stores:
        found["stored"] = [_stored(shop, scorer, tune, scheme) for scheme in SCHEMES]
    return found


def _stored(shop: Workshop, scorer: Scorer, tune: Tune, scheme: dict[str, Any]) -> dict[str, Any]:
    """A scheme of `dare compress`: what the file takes, how far it is off, and scores."""
    scores = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.delta.safetensors"
        for seed in SEEDS[: None if scheme["drop_rate"] else 1]:
            models = str(shop.file("base-0")), str(shop.file(tune.name))
            report = dare.compress(
                *models, file, seed=seed, overwrite=True, verbose=False, threads=1, **scheme
            )
            restored = {name: array.copy() for name, array in scorer.arrays[0].items()}
            dare.load_delta(file).apply_(restored)
            weights = {k: torch.from_numpy(v).to(shop.device) for k, v in restored.items()}
            scores.append(_score(scorer, weights))
    return {
        **scheme,
        "bits_per_parameter": report.bits_per_parameter,
        "relative_error": report.relative_error,
        "weight_error": report.weight_error,
        "scores": scores,
    }


def count_models(shop: Workshop, count: int) -> dict[str, Any]:
    """With and without DARE under average, sum and a vote, for so many models."""
    scorer = _several(shop, shop.world.tasks[:count])
    found: dict[str, Any] = {"models": count, "base": _score(scorer, scorer.base)}
    for method in ("linear", "sum", "ties"):
        found[method] = _score(scorer, scorer.merge(method))
        for rate in (0.5, 0.9):
            found[f"dare+{method} {rate}"] = [
                _score(scorer, scorer.merge(f"dare+{method}", drop_rate=rate, seed=seed))
                for seed in SEEDS
            ]
    return found


def compare_seeds(shop: Workshop) -> dict[str, Any]:
    """Masks of their own for three models, or one mask for all."""
    scorer = _several(shop, shop.world.tasks[:3])
    found = {}
    for method in ("linear", "sum"):
        for rate in (0.5, 0.9):
            for name, step in (("own", 1), ("shared", 0)):
                found[f"dare+{method} {rate}, {name}"] = [
                    _score(
                        scorer,
                        scorer.merge(
                            f"dare+{method}",
                            drop_rate=rate,
                            seeds=[10 * seed + step * n for n in range(3)],
                        ),
                    )
                    for seed in SEEDS
                ]
    return found


def _several(shop: Workshop, tasks: Sequence[str]) -> Scorer:
    return Scorer(shop, [shop.make(Tune(task)) for task in tasks], tasks)


def _score(scorer: Scorer, weights: Weights) -> float:
    return round(mean_score(scorer.right(weights)), 2)
