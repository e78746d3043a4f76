"""An analysis of three small models, made with NumPy: what the tests of the page draw."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import made_up
import numpy as np

from dare.analysis.advice import Advice, Evidence, Suggestion
from dare.analysis.document import Analysis
from dare.analysis.readiness import Readiness, Verdict
from dare.analysis.results import Origin, Outcome, Overlap, PairAnalysis
from dare.documents.notices import Notice, Severity, notice
from dare.output.receipt import Digests, ModelReport, Report, TensorReport
from dare.planning.make import LeftOut, Misfit

LAYERS = 6
WIDTH = 48
NAMES = ("math", "code", "chat")
DROP_RATES = {"math": 0.9, "code": 0.75, "chat": 0.8}

Tensors = dict[str, np.ndarray]


def make_base(generator: np.random.Generator) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (4 * WIDTH, WIDTH)}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.attn.q"] = (WIDTH, WIDTH)
        shapes[f"layers.{layer}.attn.o"] = (WIDTH, WIDTH)
        shapes[f"layers.{layer}.mlp.up"] = (2 * WIDTH, WIDTH)
        shapes[f"layers.{layer}.norm"] = (WIDTH,)
    return {name: generator.normal(0, 0.1, shape) for name, shape in shapes.items()}


def make_delta(model: str, name: str, shape: tuple[int, ...], draw: np.random.Generator):
    layer = int(name.split(".")[1]) if name.startswith("layers") else 0
    if model == "code":  # a LoRA of rank 4 on the matrices of the layers
        if len(shape) == 1 or not name.startswith("layers"):
            return np.zeros(shape)
        return draw.normal(0, 0.004, (shape[0], 4)) @ draw.normal(0, 0.3, (4, shape[1]))
    sizes = {"math": 0.0012, "chat": 0.0016 * (1 + layer)}
    shared = np.random.default_rng([7, *name.encode()]).normal(0, 1, shape)
    return draw.laplace(0, sizes[model], shape) + sizes[model] * (1 - layer / LAYERS) * shared


def make_analysis(names: tuple[str, ...] = NAMES) -> Analysis:
    """The analysis; other names than the usual ones rename the models, in order."""
    base = make_base(np.random.default_rng(1))
    return _analysed(base, {name: (NAMES[n], n, 1.0) for n, name in enumerate(names)})


def make_many(count: int) -> Analysis:
    """The analysis of many models: sizes span decades, some are copies, one has a NaN."""
    base = make_base(np.random.default_rng(1))
    made = {many_name(n): (NAMES[n % 3], n, 3.0 ** (n % 5 - 1)) for n in range(count)}
    made |= dict.fromkeys((many_name(4), many_name(5)), made[many_name(3)])
    analysis = _analysed(base, made)
    models = [
        replace(model, total=replace(model.total, not_finite=1))
        if model.name == many_name(5)
        else model
        for model in analysis.models
    ]
    return replace(analysis, models=tuple(models))


def _analysed(base: Tensors, made: dict[str, tuple[str, int, float]]) -> Analysis:
    """Of models, by their kinds, seeds and sizes."""
    models = {
        name: {
            tensor: values
            + size * make_delta(kind, tensor, values.shape, np.random.default_rng([2, seed]))
            for tensor, values in base.items()
        }
        for name, (kind, seed, size) in made.items()
    }
    lora = {"origin": Origin.LORA, "likely_rank": 4, "is_adapter": True}
    own = {
        name: {"file": f"models/{kind}.safetensors", **(lora if kind == "code" else {})}
        for name, (kind, _, _) in made.items()
    }
    analysis = made_up.analysis(base, models, own=own, spectra="all")
    return replace(
        analysis,
        base="models/base.safetensors",
        together=replace(analysis.together, conflicted=0.47),
        notes=(notice("renamed", "code", done="The prefix 'model.' is added to 12 names"),),
        left_out=(LeftOut("extra.weight", Misfit.NOT_IN_BASE, ("code",)),),
        tied=("embed.weight",),
        bytes_read=123_456_789,
        seconds=1.25,
    )


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


def make_readiness(names: tuple[str, ...] = NAMES) -> Readiness:
    lora, large = names[1 % len(names)], names[-1]
    return Readiness(
        Verdict.WITH_CHANGES,
        {name: Verdict.WITH_CHANGES if name == large else Verdict.NO_DEFECT for name in names},
        (
            Notice(
                "large_change",
                Severity.WARNING,
                (large,),
                "Its last layers are changed by 13% of the base. DARE's error grows with the size "
                "of a delta; at 0.9 it would be 39% there",
                "Lower drop_rate to 0.8 for this model",
                {"relative_norm": 0.13, "threshold": 0.1},
            ),
            Notice(
                "lora",
                Severity.NOTE,
                (lora,),
                "Its delta has rank 4, as a LoRA's has. High drop rates hurt that",
                "Stay at a drop rate of 0.75 or below",
                {"rank": 4.0},
            ),
        ),
    )


def make_advice(names: tuple[str, ...] = NAMES) -> Advice:
    return Advice(
        (
            Suggestion(
                "method",
                "tsv",
                None,
                "The models change the base little, and each in its own way.",
                "docs/evidence.md",
                Evidence.FAIR,
            ),
            Suggestion("scale", 0.7, None, "Better so than at 1.", "default", Evidence.FAIR),
        ),
        {
            "base": "models/base.safetensors",
            "models": [f"models/{name}.safetensors" for name in names],
            "output": "merged.safetensors",
            "method": "tsv",
            "scale": 0.7,
        },
        (notice("only_data_tell"),),
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
    return Outcome.of_manifest(manifest, analysis, survival, output=report.output)
