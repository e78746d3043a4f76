"""Small models with a change of known size, and their analyses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dare import analyze_arrays
from dare.analysis.document import Analysis
from dare.analysis.results import Origin, Statistics

Arrays = Mapping[str, np.ndarray]

SHAPES = {
    "model.embed_tokens.weight": (64, 128),
    "layers.0.attn.q_proj.weight": (128, 128),
    "layers.0.mlp.up_proj.weight": (192, 128),
    "layers.0.norm.weight": (128,),
}
MATRIX = "layers.0.mlp.up_proj.weight"


def make_base(seed: int = 0, size: float = 0.02) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: (size * generator.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def tune(base: Arrays, ratio: float = 0.02, seed: int = 1) -> dict[str, np.ndarray]:
    """A fine-tune whose change is random and has, in each tensor, this size beside the base's."""
    generator = np.random.default_rng(seed)
    tuned = {}
    for name, weights in base.items():
        change = generator.standard_normal(weights.shape)
        change *= ratio * np.linalg.norm(weights) / np.linalg.norm(change)
        tuned[name] = (weights + change).astype(np.float32)
    return tuned


def mixed(base: Arrays, one: Arrays, share: float, other: Arrays, rest: float) -> dict:
    """The base with shares of two models' changes."""
    return {
        name: (weights + share * (one[name] - weights) + rest * (other[name] - weights)).astype(
            np.float32
        )
        for name, weights in base.items()
    }


def spoilt(model: Arrays, value: float = np.nan) -> dict[str, np.ndarray]:
    """A copy of a model with this value in one element."""
    copy = {name: values.copy() for name, values in model.items()}
    copy[MATRIX][0, 0] = value
    return copy


def analysis(
    base: Arrays,
    models: Mapping[str, Arrays],
    /,
    *,
    own: Mapping[str, Mapping[str, object]] | None = None,
    spectra: str = "none",
    **changes: object,
) -> Analysis:
    """An analysis of full fine-tunes; `own` has fields of single models that shall be different."""
    found = analyze_arrays(base, models, spectra=spectra)
    made = tuple(
        replace(
            model,
            **{
                "file": f"{model.name}.safetensors",
                "origin": Origin.FULL if model.total.norm else Origin.UNCHANGED,
                **(own or {}).get(model.name, {}),
            },
        )
        for model in found.models
    )
    return replace(found, **{"base": "base.safetensors", "models": made, **changes})


def statistics(delta: object, base: object = 0.0) -> Statistics:
    """The statistics of a single tensor."""
    change = np.asarray(delta, np.float32)
    given = np.broadcast_to(np.asarray(base, np.float32), change.shape)
    tuned = (given + change).astype(np.float32)
    return analyze_arrays({"w": given}, [{"w": tuned}], spectra="none").models[0].total
