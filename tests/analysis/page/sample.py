"""An analysis of three small models, made with NumPy: what the tests of the page draw."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dare.analysis.judge.judgement import (
    Advice,
    Evidence,
    Finding,
    Protection,
    Readiness,
    Severity,
    Suggestion,
    Verdict,
)
from dare.analysis.page.series import Outcome, outcome_of_manifest
from dare.analysis.results import (
    OUTSIDE,
    Analysis,
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
from dare.output.report import Digests, ModelReport, Report, TensorReport

LAYERS = 6
WIDTH = 48
NAMES = ("math", "code", "chat")
DROP_RATES = {"math": 0.9, "code": 0.75, "chat": 0.8}

Tensors = dict[str, np.ndarray]


def kind_of(name: str) -> Kind:
    for word, kind in {
        "attn": Kind.ATTENTION,
        "mlp": Kind.MLP,
        "norm": Kind.NORM,
        "embed": Kind.EMBEDDING,
    }.items():
        if word in name:
            return kind
    raise AssertionError(name)


def layer_of(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else OUTSIDE


def make_base(generator: np.random.Generator) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (4 * WIDTH, WIDTH)}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.attn.q"] = (WIDTH, WIDTH)
        shapes[f"layers.{layer}.attn.o"] = (WIDTH, WIDTH)
        shapes[f"layers.{layer}.mlp.up"] = (2 * WIDTH, WIDTH)
        shapes[f"layers.{layer}.norm"] = (WIDTH,)
    return {name: generator.normal(0, 0.1, shape) for name, shape in shapes.items()}


def make_delta(model: str, name: str, shape: tuple[int, ...], draw: np.random.Generator):
    layer = max(layer_of(name), 0)
    if model == "code":  # a LoRA of rank 4 on the matrices of the layers
        if len(shape) == 1 or layer_of(name) == OUTSIDE:
            return np.zeros(shape)
        return draw.normal(0, 0.004, (shape[0], 4)) @ draw.normal(0, 0.3, (4, shape[1]))
    sizes = {"math": 0.0012, "chat": 0.0016 * (1 + layer)}
    shared = np.random.default_rng([7, *name.encode()]).normal(0, 1, shape)
    return draw.laplace(0, sizes[model], shape) + sizes[model] * (1 - layer / LAYERS) * shared


def statistics(deltas: list[np.ndarray], bases: list[np.ndarray]) -> Statistics:
    delta = np.concatenate([each.ravel() for each in deltas])
    magnitudes = np.abs(delta)
    changed = magnitudes[magnitudes > 0]
    places, counts = np.unique(np.floor(np.log2(changed)).astype(int), return_counts=True)
    octaves = Counter(dict(zip(places.tolist(), counts.tolist(), strict=True)))
    lowest = min(octaves, default=0)
    quantiles = np.quantile(magnitudes, [0.01, 0.05, 0.5, 0.95, 0.99]).tolist()
    std = float(delta.std())
    return Statistics(
        elements=delta.size,
        zeros=int((magnitudes == 0).sum()),
        not_finite=0,
        mean=float(delta.mean()),
        std=std,
        mean_magnitude=float(magnitudes.mean()),
        smallest=float(changed.min(initial=np.inf)) if changed.size else 0.0,
        largest=float(magnitudes.max()),
        quantiles=Quantiles(*quantiles),
        negligible=float((magnitudes < 0.01 * magnitudes.max()).mean()) if changed.size else 1.0,
        norm=float(np.linalg.norm(delta)),
        base_norm=float(np.linalg.norm(np.concatenate([each.ravel() for each in bases]))),
        excess_kurtosis=float(((delta - delta.mean()) ** 4).mean() / std**4 - 3) if std else 0.0,
        histogram=Histogram(
            lowest, tuple(octaves[lowest + i] for i in range(max(octaves, default=-1) - lowest + 1))
        ),
        inliers=Inliers(
            outliers=0,
            norm=float(np.linalg.norm(delta)),
            mean_magnitude=float(magnitudes.mean()),
            largest=float(magnitudes.max()),
            negligible=0.0,
            concentration=3.0,
        ),
    )


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


def model_analysis(name: str, base: Tensors, delta: Tensors) -> ModelAnalysis:
    def of(names: list[str]) -> Statistics:
        return statistics([delta[each] for each in names], [base[each] for each in names])

    places = sorted({(layer_of(each), kind_of(each)) for each in base})
    return ModelAnalysis(
        name=name,
        file=f"models/{name}.safetensors",
        total=of(list(base)),
        by_kind={
            kind: of([each for each in base if kind_of(each) is kind])
            for kind in dict.fromkeys(map(kind_of, base))
        },
        by_layer={
            layer: of([each for each in base if layer_of(each) == layer])
            for layer in range(OUTSIDE, LAYERS)
        },
        cells=tuple(
            Cell(
                layer,
                kind,
                of([each for each in base if (layer_of(each), kind_of(each)) == (layer, kind)]),
            )
            for layer, kind in places
        ),
        tensors=tuple(
            TensorAnalysis(
                each,
                kind_of(each),
                layer_of(each),
                base[each].shape,
                "BF16",
                of([each]),
                spectrum(delta[each]),
            )
            for each in base
        ),
        origin=Origin.LORA if name == "code" else Origin.FULL,
        likely_rank=4 if name == "code" else None,
        missing=(),
        dtypes={"BF16": sum(each.size for each in base.values())},
        is_adapter=name == "code",
    )


def overlap(first: np.ndarray, second: np.ndarray) -> Overlap:
    both = (first != 0) & (second != 0)
    norms = np.linalg.norm(first) * np.linalg.norm(second)
    agreeing = float((np.sign(first) == np.sign(second))[both].mean()) if both.any() else 0.0
    top = [np.abs(each) >= np.quantile(np.abs(each), 0.99) for each in (first, second)]
    shared = top[0] & top[1] & both
    return Overlap(
        cosine=float(first @ second / norms) if norms else 0.0,
        agreeing=agreeing,
        both=int(both.sum()),
        top_conflict=float((first * second < 0)[shared].mean()) if shared.any() else 0.0,
        top_overlap=float(shared.sum() / top[0].sum()),
    )


def flat(delta: Tensors, layer: int | None = None) -> np.ndarray:
    return np.concatenate(
        [each.ravel() for name, each in delta.items() if layer is None or layer_of(name) == layer]
    )


def pair(first: str, second: str, deltas: dict[str, Tensors]) -> PairAnalysis:
    one, other = deltas[first], deltas[second]
    return PairAnalysis(
        first,
        second,
        overlap(flat(one), flat(other)),
        {n: overlap(flat(one, n), flat(other, n)) for n in range(OUTSIDE, LAYERS)},
        float(flat(one) @ flat(other) / (flat(one) @ flat(one))),
    )


def cancelled(deltas: list[np.ndarray]) -> float:
    total = sum(np.abs(each).sum() for each in deltas)
    return float(1 - np.abs(np.sum(deltas, axis=0)).sum() / total) if total else 0.0


def make_analysis(names: tuple[str, ...] = NAMES) -> Analysis:
    """The analysis; other names than the usual ones rename the models, in order."""
    base = make_base(np.random.default_rng(1))
    deltas = {
        shown: {
            name: make_delta(model, name, values.shape, np.random.default_rng([2, number]))
            for name, values in base.items()
        }
        for number, (model, shown) in enumerate(zip(NAMES, names, strict=False))
    }
    return _analysed(base, deltas, dict(zip(names, NAMES, strict=False)))


def make_many(count: int) -> Analysis:
    """The analysis of many models: sizes span decades, some are copies, one has a NaN.

    For speed two models lie to each other in every layer as they do over all.
    """
    base = make_base(np.random.default_rng(1))
    kinds = {many_name(number): NAMES[number % 3] for number in range(count)}
    deltas = {
        name: {
            tensor: 3.0 ** (number % 5 - 1)
            * make_delta(kind, tensor, values.shape, np.random.default_rng([2, number]))
            for tensor, values in base.items()
        }
        for number, (name, kind) in enumerate(kinds.items())
    }
    for copy in (many_name(4), many_name(5)):
        deltas[copy], kinds[copy] = deltas[many_name(3)], kinds[many_name(3)]
    flats = {name: flat(delta) for name, delta in deltas.items()}
    analysis = replace(
        _analysed(base, deltas, kinds, paired=False),
        pairs=tuple(
            PairAnalysis(
                one,
                other,
                total := overlap(flats[one], flats[other]),
                dict.fromkeys(range(LAYERS), total),
                float(flats[one] @ flats[other] / (flats[one] @ flats[one])),
            )
            for one, other in itertools.combinations(deltas, 2)
        ),
    )
    models = [
        replace(model, total=replace(model.total, not_finite=1))
        if model.name == many_name(5)
        else model
        for model in analysis.models
    ]
    return replace(analysis, models=tuple(models))


def many_name(number: int) -> str:
    """Names of many models; one is long."""
    return "a-very-long-name-of-a-model-v2-instruct" if number == 9 else f"model-{number}"


def make_many_advice(analysis: Analysis) -> Advice:
    """What would be advised: to leave out what is broken or there twice."""
    out = (many_name(4), many_name(5))
    rest = tuple(name for name in analysis.names if name not in out)
    advice = make_advice(rest)
    suggested = tuple(
        Suggestion("models", "left out", name, "It is not fit", "readiness", Evidence.STRONG)
        for name in out
    )
    rates = tuple(
        Suggestion("drop_rate", 0.5 + 0.05 * (n % 3), name, "It fits", "DARE", Evidence.STRONG)
        for n, name in enumerate(rest)
    )
    return replace(advice, suggestions=(*advice.suggestions[:1], *suggested, *rates))


def _analysed(
    base: Tensors, deltas: dict[str, Tensors], kinds: dict[str, str], *, paired: bool = True
) -> Analysis:
    return Analysis(
        base="models/base.safetensors",
        base_dtypes={"BF16": sum(each.size for each in base.values())},
        models=tuple(
            replace(model_analysis(kinds[name], base, delta), name=name)
            for name, delta in deltas.items()
        ),
        pairs=tuple(pair(*two, deltas) for two in itertools.combinations(deltas, 2) if paired),
        together=Interference(
            cancelled=cancelled([flat(each) for each in deltas.values()]),
            conflicted=0.47,
            by_layer={
                layer: cancelled([flat(each, layer) for each in deltas.values()])
                for layer in range(OUTSIDE, LAYERS)
            },
        ),
        notes=("code: 12 matrices computed from an adapter",),
        left_out=("rotary.inv_freq: is in the base alone",),
        tied=("embed.weight",),
        bytes_read=123_456_789,
        seconds=1.25,
    )


def make_readiness(names: tuple[str, ...] = NAMES) -> Readiness:
    lora, large = names[1 % len(names)], names[-1]
    return Readiness(
        Verdict.WITH_CHANGES,
        {name: Verdict.WITH_CHANGES if name == large else Verdict.READY for name in names},
        (
            Finding(
                "large_deltas",
                Severity.CHANGE,
                (large,),
                "Its last layers are changed by 13% of the base",
                "DARE's error grows with the size of a delta; at 0.9 it would be 39% there",
                "Lower drop_rate to 0.8 for this model",
                {"relative_norm": 0.13, "threshold": 0.1},
            ),
            Finding(
                "low_rank",
                Severity.NOTE,
                (lora,),
                "Its delta has rank 4, as a LoRA's has",
                "Few directions carry all of it, and high drop rates hurt them",
                "Stay at a drop rate of 0.75 or below",
                {"rank": 4.0},
            ),
        ),
    )


def make_advice(names: tuple[str, ...] = NAMES) -> Advice:
    rates = dict(zip(names, DROP_RATES.values(), strict=False))
    return Advice(
        (
            Suggestion(
                "method",
                "dare+ties",
                None,
                "Signs of the models conflict in 47% of the elements that two of them change.",
                "TIES-Merging, arXiv:2306.01708",
                Evidence.FAIR,
            ),
            *(
                Suggestion(
                    "drop_rate",
                    rate,
                    name,
                    f"The predicted error of {name} stays below 30% of its delta's use.",
                    "DARE, arXiv:2311.03099, section 3",
                    Evidence.STRONG,
                )
                for name, rate in rates.items()
            ),
            Suggestion("scale", 1.0, None, "Nothing asks for another.", "default", Evidence.WEAK),
        ),
        {
            "base": "models/base.safetensors",
            "models": [f"models/{name}.safetensors" for name in names],
            "output": "merged.safetensors",
            "method": "dare+ties",
            "scale": 1.0,
        },
        ("What the models were trained for is not known here; measure the merged one.",),
        predicted_error=0.041,
        error_bound=0.05,
        error_share=0.05 / len(names) ** 0.5,
        protect=(Protection(5, "mlp", 0.09, 0.4, ("layers.5.mlp.up",)),),
    )


def make_report(analysis: Analysis) -> Report:
    """The report of a merge by dare+trim+ties: survivors fall from stage to stage."""
    rates = dict(zip(analysis.names, itertools.cycle(DROP_RATES.values()), strict=False))
    tensors = tuple(
        TensorReport(
            tensor.name,
            analysis.names,
            tuple(0.01 for _ in analysis.names),
            tuple(0 for _ in analysis.names),
            tuple(
                (kept := round(tensor.statistics.elements * (1 - rate)), kept // 2)
                for rate in rates.values()
            ),
        )
        for tensor in analysis.models[0].tensors
    )
    elements = analysis.models[0].total.elements
    return Report(
        method="dare+trim+ties",
        output=Path("merged.safetensors"),
        models=tuple(
            ModelReport(
                name, 42 + i, 1 / 3, elements, rate, rate + 0.0004, 0.01, "layers.5.norm", 0
            )
            for i, (name, rate) in enumerate(rates.items())
        ),
        tensors=tensors,
        delta_threshold=0.05,
        overflowed=0,
        nans=0,
        warnings=(),
        bytes_read=1,
        bytes_written=1,
        resumed_chunks=0,
        seconds=2.0,
        digests=Digests("", (), "", {}, (), {}),
    )


def make_survival(analysis: Analysis) -> tuple[PairAnalysis, ...]:
    """Each model beside the output, as if a third of every delta were left in it."""
    return tuple(
        PairAnalysis(
            name,
            "merged",
            Overlap(0.5 + 0.1 * number, 0.7, 1000, 0.1, 0.2),
            {},
            0.3 + 0.02 * number,
        )
        for number, name in enumerate(analysis.names)
    )


def outcome_of(
    report: Report, analysis: Analysis, survival: Sequence[PairAnalysis] = ()
) -> Outcome:
    """What a page shows of a merge, by its report."""
    manifest = {"report": report.to_dict()}
    return outcome_of_manifest(manifest, analysis, survival, output=report.output)
