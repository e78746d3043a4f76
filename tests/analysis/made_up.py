"""Analyses of arrays, computed by NumPy alone: a reference for, and independent of, the kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dare.analysis.document import Analysis
from dare.analysis.results import (
    OUTSIDE,
    Cell,
    Histogram,
    Inliers,
    Interference,
    Kind,
    ModelAnalysis,
    Origin,
    Overlap,
    PairAnalysis,
    Quantiles,
    Spectrum,
    Statistics,
    TensorAnalysis,
)

Arrays = Mapping[str, np.ndarray]
KINDS = {
    "embed": Kind.EMBEDDING,
    "lm_head": Kind.HEAD,
    "norm": Kind.NORM,
    "attn": Kind.ATTENTION,
    "mlp": Kind.MLP,
}


def kind(name: str) -> Kind:
    return next((kind for word, kind in KINDS.items() if word in name), Kind.OTHER)


def layer(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), OUTSIDE)


def statistics(
    delta: np.ndarray,
    base: np.ndarray,
    parts: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
) -> Statistics:
    every = np.asarray(delta, np.float64).ravel()
    values = every[np.isfinite(every)]
    sizes = np.abs(values)
    changed = sizes[sizes > 0]
    largest = float(sizes.max(initial=0.0))
    deviation = float(values.std()) if values.size else 0.0
    mean = float(values.mean()) if values.size else 0.0
    fourth = float(((values - mean) ** 4).mean()) if values.size else 0.0
    octaves = np.floor(np.log2(changed)).astype(int)
    lowest = int(octaves.min(initial=0)) if octaves.size else 0
    at = np.quantile(sizes, [0.01, 0.05, 0.5, 0.95, 0.99]) if sizes.size else np.zeros(5)
    return Statistics(
        elements=every.size,
        zeros=int((values == 0).sum()),
        not_finite=every.size - values.size,
        mean=mean,
        std=deviation,
        mean_magnitude=float(sizes.mean()) if sizes.size else 0.0,
        smallest=float(changed.min()) if changed.size else 0.0,
        largest=largest,
        quantiles=Quantiles(*map(float, at)),
        negligible=float((sizes < 0.01 * largest).mean()) if largest else float(bool(sizes.size)),
        norm=float(np.sqrt((values**2).sum())),
        base_norm=float(np.sqrt((np.asarray(base, np.float64) ** 2).sum())),
        excess_kurtosis=fourth / deviation**4 - 3 if deviation else 0.0,
        histogram=Histogram(lowest, tuple(np.bincount(octaves - lowest).tolist())),
        inliers=inliers([(np.asarray(delta, np.float64), base)] if parts is None else parts),
        base_product=float(np.nansum(every * np.asarray(base, np.float64).ravel())),
    )


def is_inlier(values: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The rule of outliers, on the sorted magnitudes of a tensor."""
    sizes = np.abs(values)
    changed = np.sort(sizes[sizes > 0])
    bound = np.inf
    if changed.size >= 32:
        few = int(0.002 * changed.size)
        bound = (1.75 if few else 16) * changed[-max(few, 1) - 1]
    elif changed.size <= 0.002 * values.size:
        bound = float(np.sqrt(np.square(np.asarray(base, np.float64)).mean()))
    matters = (sizes[sizes > bound] ** 4).sum() >= 0.05 * (sizes**4).sum()
    return (sizes <= bound) | (not matters)


def inliers(tensors: Sequence[tuple[np.ndarray, np.ndarray]]) -> Inliers:
    """Of deltas, each with its base."""
    finite = [np.where(np.isfinite(delta), delta, 0.0) for delta, _ in tensors]
    kept = [is_inlier(delta, base) for delta, (_, base) in zip(finite, tensors, strict=True)]
    count = sum(int(np.isfinite(delta).sum()) for delta, _ in tensors)
    left = np.abs(joined([delta[kept] for delta, kept in zip(finite, kept, strict=True)]))
    outliers = sum(int((~each).sum()) for each in kept)
    squares, largest = float((left**2).sum()), float(left.max(initial=0.0))
    small = np.abs(joined(finite)) < 0.01 * largest
    return Inliers(
        outliers=outliers,
        norm=math.sqrt(squares),
        mean_magnitude=float(left.sum()) / (count - outliers) if count > outliers else 0.0,
        largest=largest,
        negligible=float(small.mean()) if largest else float(bool(count)),
        concentration=(count - outliers) * float((left**4).sum()) / squares**2 if squares else 0.0,
    )


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.asarray(a, np.float64).ravel() for a in arrays)])


def spectrum(delta: np.ndarray) -> Spectrum | None:
    if delta.ndim != 2 or not delta.any():
        return None
    values = np.linalg.svd(delta, compute_uv=False)
    energy = values**2 / (values**2).sum()
    shares = values / values.sum()
    rank_99 = int(np.searchsorted(np.cumsum(energy), 0.99)) + 1
    edge = float(delta.std() * (np.sqrt(delta.shape[0]) + np.sqrt(delta.shape[1])))
    return Spectrum(
        rows=delta.shape[0],
        columns=delta.shape[1],
        values=tuple(values.tolist()),
        ranks=tuple(range(1, len(values) + 1)),
        effective_rank=float(np.exp(-(shares * np.log(np.maximum(shares, 1e-300))).sum())),
        stable_rank=float(1 / energy[0]),
        rank_99=rank_99,
        tail_share=float(energy[len(energy) // 2 :].sum()),
        bulk_edge=edge,
        outliers=int((values > edge).sum()),
        outlier_share=float(energy[values > edge].sum()),
        low_rank=rank_99 if rank_99 <= 8 else None,
    )


def model(
    name: str, base: Arrays, tuned: Arrays, *, detailed: bool = False, **changes: object
) -> ModelAnalysis:
    names = [tensor for tensor in base if tensor in tuned]
    deltas = {tensor: tuned[tensor].astype(np.float64) - base[tensor] for tensor in names}

    def over(wanted) -> Statistics:
        chosen = [tensor for tensor in names if wanted(tensor)]
        parts = [(deltas[t], base[t]) for t in chosen]
        return statistics(joined([d for d, _ in parts]), joined([b for _, b in parts]), parts)

    cells = sorted({(layer(tensor), kind(tensor)) for tensor in names})
    total = over(lambda _tensor: True)
    given: dict[str, object] = {
        "name": name,
        "file": f"{name}.safetensors",
        "total": total,
        "by_kind": {
            each: over(lambda t, each=each: kind(t) is each)
            for each in sorted(set(map(kind, names)))
        },
        "by_layer": {
            each: over(lambda t, each=each: layer(t) == each)
            for each in sorted(set(map(layer, names)))
        },
        "cells": tuple(
            Cell(*cell, over(lambda t, cell=cell: (layer(t), kind(t)) == cell)) for cell in cells
        ),
        "tensors": tuple(
            TensorAnalysis(
                tensor,
                kind(tensor),
                layer(tensor),
                base[tensor].shape,
                "F32",
                statistics(deltas[tensor], base[tensor]),
                spectrum(deltas[tensor]) if detailed else None,
            )
            for tensor in names
        ),
        "origin": Origin.FULL if total.norm else Origin.UNCHANGED,
        "likely_rank": None,
        "missing": tuple(sorted(base.keys() - tuned.keys())),
        "dtypes": {"F32": total.elements},
        "is_adapter": False,
    }
    return ModelAnalysis(**{**given, **changes})


def overlap(one: np.ndarray, other: np.ndarray) -> Overlap:
    both = (one != 0) & (other != 0)
    agreeing = np.sign(one[both]) == np.sign(other[both])
    length = np.linalg.norm(one) * np.linalg.norm(other)
    count = math.ceil(0.01 * one.size)
    tops = [set(np.argpartition(-np.abs(values), count - 1)[:count]) for values in (one, other)]
    shared = sorted(tops[0] & tops[1])
    opposed = np.sign(one[shared]) != np.sign(other[shared])
    return Overlap(
        cosine=float(one @ other / length) if length else 0.0,
        agreeing=float(agreeing.mean()) if agreeing.size else 0.0,
        both=int(both.sum()),
        top_conflict=float(opposed.mean()) if opposed.size else 0.0,
        top_overlap=len(shared) / max(count, 1),
    )


def cancelled(deltas: Sequence[np.ndarray]) -> float:
    apart = sum(float(np.abs(delta).sum()) for delta in deltas)
    return 1 - float(np.abs(np.sum(deltas, axis=0)).sum()) / apart if apart else 0.0


def analysis(
    base: Arrays,
    models: Mapping[str, Arrays],
    /,
    *,
    own: Mapping[str, Mapping[str, object]] | None = None,
    detailed: bool = False,
    **changes: object,
) -> Analysis:
    """An analysis of arrays; `own` has fields of single models that shall be different.

    With details it has spectra, and overlaps in each layer.
    """

    def delta(tuned: Arrays, tensor: str) -> np.ndarray:
        if tensor not in tuned:
            return np.zeros_like(base[tensor])
        values = tuned[tensor].astype(np.float64) - base[tensor]
        return np.where(np.isfinite(values), values, 0.0)

    def over(tensors: Sequence[str]) -> dict[str, np.ndarray]:
        return {n: joined([delta(tuned, t) for t in tensors]) for n, tuned in models.items()}

    deltas = over(list(base))
    layers = {
        number: over([tensor for tensor in base if layer(tensor) == number])
        for number in (sorted(set(map(layer, base))) if detailed else ())
    }
    pairs = []
    for first, second in itertools.combinations(models, 2):
        one, other = deltas[first], deltas[second]
        squares = float(np.sum(one**2))
        by_layer = {n: overlap(inside[first], inside[second]) for n, inside in layers.items()}
        ratio = float(np.sum(one * other)) / squares if squares else 0.0
        pairs.append(PairAnalysis(first, second, overlap(one, other), by_layer, ratio))
    inside = {number: cancelled(list(each.values())) for number, each in layers.items()}
    given: dict[str, object] = {
        "base": "base.safetensors",
        "base_dtypes": {"F32": sum(array.size for array in base.values())},
        "models": tuple(
            model(name, base, tuned, detailed=detailed, **(own or {}).get(name, {}))
            for name, tuned in models.items()
        ),
        "pairs": tuple(pairs),
        "together": Interference(cancelled(list(deltas.values())), 0.0, inside),
        "notes": (),
        "vocabularies": {},
        "left_out": (),
        "tied": (),
        "bytes_read": 0,
        "seconds": 0.0,
    }
    return Analysis(**{**given, **changes})


# ---------------------------------------------------------------- models to analyze

SHAPES = {
    "model.embed_tokens.weight": (64, 128),
    "layers.0.attn.q_proj.weight": (128, 128),
    "layers.0.mlp.up_proj.weight": (192, 128),
    "layers.0.norm.weight": (128,),
}


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
