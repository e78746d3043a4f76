"""The figures: one function for each, from an analysis to a chart with a table of its numbers.

Colours come from `themes` when a figure is shown. Every chart has a parameter `model`, empty at
first: the model to bring out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dare.analysis.judge.judgement import Advice
from dare.analysis.judge.limits import limit
from dare.analysis.page import charts, series
from dare.analysis.page.charts import CHOSEN, CHOSEN_PAIR, CONTRAST, FAINT, Spec, Table, alt
from dare.analysis.page.outcome import Outcome
from dare.analysis.page.series import Row
from dare.analysis.page.themes import DASHES, SHAPES
from dare.analysis.page.words import cosine, listed, number, share
from dare.analysis.results import OUTSIDE, Analysis, Kind, ModelAnalysis
from dare.tensors.sizes import times

LEAST_SHARE = 0.0005
"""Octaves with fewer of the elements are out of sight until one drags the figure."""
MOST_LAYERS_BESIDE = 48
"""Heat maps with more layers need the whole width."""
WIDE_RANGE = 5
"""Largest over smallest change from which colours follow the logarithm."""


@dataclass(frozen=True)
class Figure:
    """A chart with what has to be said about it."""

    name: str
    """Of files and anchors: `magnitudes`."""
    title: str
    caption: str
    """What is seen, and how to read it."""
    description: str
    """For those who do not see it: what is drawn, and the most telling numbers."""
    spec: Spec
    """Vega-Lite, without colours."""
    table: Table
    models: tuple[str, ...] = ()
    """Whose figure it is, if it is not everybody's."""
    width: float = 1.0
    """The share of the page's width that it needs."""
    zooms: bool = False


def draw_figures(analysis: Analysis, advice: Advice, outcome: Outcome | None) -> list[Figure]:
    """Draw all figures that there is something to draw in."""
    return [*_of_models(analysis, advice), *(_of_merge(outcome) if outcome is not None else ())]


def _of_models(analysis: Analysis, advice: Advice) -> Iterator[Figure]:
    if series.magnitude_rows(analysis):
        yield magnitudes(analysis)
    for model in analysis.models:
        if model.cells:
            yield relative_change(analysis, model)
    if analysis.pairs:
        yield cosines(analysis)
        yield conflicts(analysis)
        if series.layer_pair_rows(analysis):
            yield layer_cosines(analysis)
        if any(layer != OUTSIDE for layer in analysis.together.by_layer):
            yield cancelled(analysis)
    if series.spectra(analysis):
        yield spectra(analysis)
    if series.prediction_rows(analysis):
        yield predicted_error(analysis, advice)


def _of_merge(outcome: Outcome) -> Iterator[Figure]:
    if series.kept_rows(outcome):
        yield kept(outcome)
    if series.kept_layer_rows(outcome):
        yield kept_by_layer(outcome)
    if outcome.survival:
        yield survival(outcome)


# ---------------------------------------------------------------- one model


def magnitudes(analysis: Analysis) -> Figure:
    """How large the changes of each model are."""
    names = analysis.names
    rows = charts.dashed(series.magnitude_rows(analysis), names)
    kinds = [series.ALL_KINDS, *map(str, series.kinds_of(analysis))]
    picker = alt.binding_select(options=kinds, name="Tensors ")
    chart = charts.lines(
        names,
        x=alt.X("middle:Q", title="magnitude of a change, |δ|")
        .scale(type="log", domain=_worth_seeing(rows), nice=False)
        .axis(charts.logarithmic("x")),
        y=alt.Y("share:Q", title="share of all elements").axis(format="~%", tickCount=5),
        tooltip=charts.tooltip_of(
            "model:N",
            ("from:Q", "|δ| from", ".3~g"),
            ("to:Q", "below", ".3~g"),
            ("share:Q", "share of elements", ".2%"),
        ),
    )
    chart = chart.transform_filter("datum.kind === kind")
    chart = chart.add_params(alt.param(name="kind", value=series.ALL_KINDS, bind=picker))
    medians = ", ".join(
        f"{model.name} {number(model.total.quantiles.p50)}" for model in analysis.models
    )
    return Figure(
        "magnitudes",
        "How large the changes are",
        "The share of elements whose change has which magnitude, in steps of a factor of two. "
        "DARE is at its best where nearly all changes are small. Elements that are not changed "
        "at all are left out.",
        f"Line chart of the magnitudes of changes of {listed(names)}. Medians: {medians}.",
        charts.finish(chart, rows),
        _magnitude_table(analysis, rows),
        zooms=True,
    )


def _worth_seeing(rows: Sequence[Row]) -> list[float]:
    """The magnitudes to show at first: the tails go on where hardly anything is."""
    frequent = [row for row in rows if row["share"] >= LEAST_SHARE] or rows
    low = min((row["from"] for row in frequent), default=1e-6)
    return [low, max((row["to"] for row in frequent), default=1.0)]


def _magnitude_table(analysis: Analysis, rows: Sequence[Row]) -> Table:
    shares = {
        (row["from"], row["to"], row["model"]): row["share"]
        for row in rows
        if row["kind"] == series.ALL_KINDS
    }
    octaves = sorted({(low, high) for low, high, _ in shares})
    cells = [
        [share(shares.get((*octave, name), 0.0)) for name in analysis.names] for octave in octaves
    ]
    return Table(
        ("|δ| from … to", *analysis.names),
        (
            ("not changed", *(share(model.total.sparsity) for model in analysis.models)),
            *(
                (f"{number(low)} … {number(high)}", *row)
                for (low, high), row in zip(octaves, cells, strict=True)
            ),
        ),
    )


def relative_change(analysis: Analysis, model: ModelAnalysis) -> Figure:
    """Where a model differs from the base: layers × kinds."""
    rows = series.change_rows(model)
    kinds = series.kinds_of(analysis)
    low, high = series.change_range(analysis)
    scale = alt.Scale(type="log" if high > WIDE_RANGE * low > 0 else "linear", domain=[low, high])
    middle = math.sqrt(low * high) if scale.type == "log" else (low + high) / 2
    place = alt.Chart().encode(
        x=charts.layer_names(),
        y=alt.Y("kind:N", title=None, sort=[str(kind) for kind in kinds]),
        tooltip=charts.tooltip_of(
            "layer:N",
            "kind:N",
            ("change:Q", "‖δ‖ / ‖base‖", ".3~%"),
            ("largest:Q", "largest |δ|", ".3~g"),
            ("elements:Q", "", ","),
        ),
    )
    colour = alt.Color("change:Q", title="‖δ‖ / ‖base‖").scale(scale)
    colour = colour.legend(
        format=".2~%", gradientLength=180, gradientThickness=10, values=[low, middle, high]
    )
    chart = alt.layer(
        place.mark_rect(fill="transparent", strokeWidth=1, strokeOpacity=0.4, stroke="#888"),
        place.mark_rect(cornerRadius=2).transform_filter("datum.change > 0").encode(color=colour),
    )
    largest = max(rows, key=lambda row: row["change"] or 0.0)
    where = f"{largest['kind']} in layer {largest['layer']}"
    peak = f" The largest is {share(largest['change'])}, {where}." if largest["change"] else ""
    return Figure(
        f"change-{analysis.names.index(model.name) + 1}",
        f"Where {model.name} differs from the base",
        f"The size of its change beside that of the weights: {share(model.total.relative_norm)} "
        "over all. An empty cell has no change; “out” stands for tensors of no layer.",
        f"Heat map of the relative change of {model.name}, layers by kinds.{peak}",
        charts.finish(chart, rows, height=30 * len({row["kind"] for row in rows}) + 10),
        charts.layer_table({str(kind): _change_by_layer(model, kind) for kind in kinds}, share),
        models=(model.name,),
        width=_width_of_maps(analysis),
    )


def _width_of_maps(analysis: Analysis) -> float:
    """Two or three beside each other, where there are not too many layers."""
    count = len(analysis.models)
    if count == 1 or len(analysis.layers) > MOST_LAYERS_BESIDE:
        return 1.0
    return 1 / 3 if count % 3 == 0 else 1 / 2


def _change_by_layer(model: ModelAnalysis, kind: Kind) -> dict[int, float]:
    return {cell.layer: cell.statistics.relative_norm for cell in model.cells if cell.kind == kind}


def spectra(analysis: Analysis) -> Figure:
    """In how many directions the changes go."""
    names = analysis.names
    rows = series.spectrum_rows(analysis)
    available = sum(1 for model in analysis.models for tensor in model.tensors if tensor.spectrum)
    near = alt.selection_point(
        name="near", fields=["line"], on="pointerover", nearest=True, empty=False
    )
    legend = alt.Legend(columns=charts.room_for(names), symbolType="stroke", symbolSize=300)
    opacity = alt.when(near).then(alt.value(1)).when(CHOSEN).then(alt.value(0.45))
    chart = alt.Chart().encode(
        x=alt.X("rank:Q", title="direction, the strongest first")
        .scale(type="log", nice=False)
        .axis(charts.logarithmic("x")),
        y=alt.Y("value:Q", title="singular value beside the largest")
        .scale(type="log")
        .axis(charts.logarithmic("y")),
        color=charts.by_name(alt.Color, names, legend=legend),
        detail="line:N",
    )
    lines = chart.mark_line(strokeWidth=1.5, aria=False).encode(
        strokeDash=charts.by_name(alt.StrokeDash, names, DASHES, legend=legend),
        opacity=opacity.otherwise(alt.value(FAINT / 2)),
    )
    points = chart.mark_point(size=30, opacity=0, aria=False).encode(
        opacity=alt.value(0),
        tooltip=charts.tooltip_of(
            "model:N",
            "tensor:N",
            ("rank:Q", "direction"),
            ("value:Q", "σ / σ₁", ".3~g"),
            ("effective:Q", "effective rank", ".3~g"),
            ("of:Q", "of", ","),
            ("outliers:Q", "above the noise"),
        ),
    )
    layers = alt.layer(lines, points.add_params(near)).transform_flatten(["rank", "value"])
    shown = f" Shown are {len(rows)} of {available}." if len(rows) < available else ""
    return Figure(
        "spectra",
        "How many directions the changes have",
        "One line for each matrix: the singular values of its delta. A line that ends early or "
        f"falls off a cliff is a change of low rank, as a LoRA's is.{shown}",
        f"Line chart of the singular values of {times(len(rows), 'matrix', 'matrices')} of "
        f"{listed(names)}.",
        charts.finish(layers.add_params(charts.zoom()), rows, height=300),
        charts.listing(
            [(name, tensor.name, tensor.spectrum) for name, tensor in series.spectra(analysis)],
            {
                "matrix": lambda row: row[1],
                "model": lambda row: row[0],
                "shape": lambda row: f"{row[2].rows}×{row[2].columns}",
                "effective rank": lambda row: number(row[2].effective_rank),
                "stable rank": lambda row: number(row[2].stable_rank),
                "rank for 99%": lambda row: f"{row[2].rank_99:,}",
                "above the noise": lambda row: f"{row[2].outliers:,}",
                "their share": lambda row: share(row[2].outlier_share),
            },
        ),
        zooms=True,
    )


# ---------------------------------------------------------------- two models and all


def cosines(analysis: Analysis) -> Figure:
    """In how far every two models change the same way."""
    largest = max(analysis.pairs, key=lambda pair: abs(pair.total.cosine))
    return Figure(
        "cosines",
        "Do they pull in one direction?",
        "The cosine of every two deltas: near 0 they do not touch each other, above they share "
        "what they learned, below they work against each other.",
        f"Matrix of cosines between models. The largest is {cosine(largest.total.cosine)}, "
        f"{largest.first} and {largest.second}.",
        _matrix(analysis, "cosine", "cosine", "+.2f", "diverging", (-1, 1)),
        charts.listing(
            analysis.pairs,
            {
                "models": series.pair_name,
                "cosine": lambda pair: cosine(pair.total.cosine),
                "multiple of the first nearest to the second": lambda pair: number(pair.ratio),
            },
        ),
        width=1 / 2,
    )


def conflicts(analysis: Analysis) -> Figure:
    """In how many elements every two models disagree."""
    largest = max(analysis.pairs, key=lambda pair: pair.total.conflict)
    return Figure(
        "conflicts",
        "How often do they disagree?",
        "The share, of the elements that both models change, that they change in opposite "
        "directions. Chance alone makes half of them.",
        f"Matrix of conflicts between models. The largest is {share(largest.total.conflict)}, "
        f"{largest.first} and {largest.second}.",
        _matrix(analysis, "conflict", "in opposite directions", ".0%", "heatmap", (0, 1)),
        charts.listing(
            analysis.pairs,
            {
                "models": series.pair_name,
                "in opposite directions": lambda pair: share(pair.total.conflict),
                "elements both change": lambda pair: f"{pair.total.both:,}",
                "of the top 1%: shared": lambda pair: share(pair.total.top_overlap),
                "of those: opposite": lambda pair: share(pair.total.top_conflict),
            },
        ),
        width=1 / 2,
    )


def _matrix(
    analysis: Analysis,
    field: str,
    title: str,
    shown_as: str,
    colours: str,
    domain: tuple[float, float],
) -> Spec:
    names = list(analysis.names)
    place = alt.Chart().encode(
        x=alt.X("other:N", title=None, sort=names).axis(
            orient="top", labelAngle=0 if len(names) <= 4 else -40, labelLimit=100
        ),
        y=alt.Y("model:N", title=None, sort=names).axis(labelLimit=100),
        opacity=charts.bright_if(CHOSEN_PAIR),
        tooltip=charts.tooltip_of(
            ("model:N", "model"),
            ("other:N", "and"),
            ("cosine:Q", "", "+.4f"),
            ("conflict:Q", "in opposite directions", ".2%"),
            ("both:Q", "elements both change", ","),
        ),
    )
    cells = place.mark_rect(cornerRadius=3).encode(
        color=alt.Color(f"{field}:Q", title=title)
        .scale(domain=list(domain), range=colours)
        .legend(format=shown_as, gradientLength=160, gradientThickness=10, tickCount=4)
    )
    contrast = alt.expr(CONTRAST.format(field=field))
    texts = place.mark_text(fontSize=13, color=contrast, aria=False)
    texts = texts.encode(text=alt.Text(f"{field}:Q", format=shown_as))
    rows = series.pair_rows(analysis)
    return charts.finish(alt.layer(cells, texts), rows, height=max(140, 52 * len(names)))


def layer_cosines(analysis: Analysis) -> Figure:
    """Where every two models change the same way."""
    by_layer = {
        series.pair_name(pair): {layer: overlap.cosine for layer, overlap in pair.by_layer.items()}
        for pair in series.closest_pairs(analysis)
    }
    names = tuple(by_layer)
    chart = charts.lines(
        names,
        x=charts.layer_numbers(),
        y=alt.Y("cosine:Q", title="cosine").axis(format="+.2~g", tickCount=5),
        tooltip=charts.tooltip_of(
            ("pair:N", "models"),
            "layer:Q",
            ("cosine:Q", "", "+.4f"),
            ("conflict:Q", "in opposite directions", ".2%"),
        ),
        field="pair",
    )
    zero = alt.Chart().mark_rule(strokeDash=[2, 3], aria=False).encode(y=alt.datum(0))
    some = len(names) < len(analysis.pairs)
    return Figure(
        "layer-cosines",
        "Where they meet",
        "The same cosine layer by layer: where models that learned different things share a "
        "change, or fight over one."
        + (f" Shown are the {len(names)} closest pairs." if some else ""),
        f"Line chart of cosines over layers, for {times(len(names), 'pair')} of models.",
        charts.finish(
            alt.layer(zero, chart),
            charts.dashed(series.layer_pair_rows(analysis), names, "pair"),
            height=240,
        ),
        charts.layer_table(by_layer, cosine),
    )


def cancelled(analysis: Analysis) -> Figure:
    """What a merge of all models would lose, layer by layer."""
    rows = series.cancelled_rows(analysis)
    chart = alt.Chart().mark_bar(cornerRadiusEnd=2, aria=False)
    chart = chart.encode(
        x=charts.layer_names(),
        y=alt.Y("cancelled:Q", title="cancelled").axis(format="~%", tickCount=5),
        tooltip=charts.tooltip_of("layer:N", ("cancelled:Q", "", ".2%")),
    )
    total = share(analysis.together.cancelled)
    return Figure(
        "cancelled",
        "What adding them up would lose",
        "The share of all changes that cancels out when the models are added up as they are. "
        f"The dashed line is the whole: {total}.",
        f"Bar chart over layers of the share of changes that cancel out; {total} over all.",
        charts.finish(
            alt.layer(chart, charts.level_line(analysis.together.cancelled)), rows, height=200
        ),
        Table(
            ("layer", "cancelled"),
            (("all", total), *((row["layer"], share(row["cancelled"])) for row in rows)),
        ),
    )


# ---------------------------------------------------------------- drop rates


def predicted_error(analysis: Analysis, advice: Advice) -> Figure:
    """What DARE would do at which drop rate, and the rate that is advised."""
    names = analysis.names
    advised = charts.dashed(series.suggestion_rows(analysis, advice), names)
    place = {
        "x": alt.X("rate:Q", title="drop rate").scale(domain=[0, 1]).axis(tickCount=10, grid=True),
        "y": alt.Y("error:Q", title="expected error of a layer's outputs")
        .scale(type="log", nice=False)
        .axis(charts.logarithmic("y", percent=True)),
        "tooltip": charts.tooltip_of(
            "model:N",
            ("rate:Q", "drop rate"),
            ("error:Q", "error of outputs", ".3~%"),
            ("relative:Q", "error beside the delta", ".3~%"),
        ),
    }
    marks = [
        layer
        for turn, dy in enumerate((-17, 19))  # above and below: curves lie close to each other
        if (rows := [row for row in advised if row["dash"] % 2 == turn])
        for layer in _marked_points(rows, names, place, dy)
    ]
    bound = limit("output_error")
    data = {"values": [{"label": f"bound {bound:.0%}"}]}
    note = alt.Chart(data).mark_text(align="left", baseline="bottom", dx=4, dy=-3, aria=False)
    note = note.encode(x=alt.datum(0), y=alt.datum(bound), text="label:N")
    chart = alt.layer(
        charts.level_line(bound, data), note, charts.lines(names, **place, points=False), *marks
    )
    rates = ", ".join(
        f"{row['model']} {row['rate']:g} (error {share(row['error'])})" for row in advised
    )
    return Figure(
        "predicted-error",
        "What a drop rate costs",
        "The error that DARE is expected to bring to the outputs of a layer, beside the base's: "
        "√(p / (1 - p)) times the relative change, p being the drop rate. "
        "The dashed line is the error that a merge is taken to bear. "
        + ("The marks are the rates that are advised." if advised else "No rate is advised."),
        f"Line chart of the expected error over drop rates, for {listed(names)}."
        + (f" Advised: {rates}." if rates else ""),
        charts.finish(chart, charts.dashed(series.prediction_rows(analysis), names), height=320),
        _prediction_table(analysis, advice),
        zooms=True,
    )


def _marked_points(
    rows: Sequence[Row], names: Sequence[str], place: Mapping[str, Any], dy: int
) -> tuple[Any, Any]:
    """Points that are set off, with the rate beside them."""
    chart = alt.Chart({"values": rows}).encode(**place, opacity=charts.bright_if(CHOSEN))
    points = chart.mark_point(filled=True, size=170, strokeWidth=2, aria=False)
    labels = chart.mark_text(fontWeight=600, dy=dy, aria=False)
    return (
        points.encode(
            color=charts.by_name(alt.Color, names), shape=charts.by_name(alt.Shape, names, SHAPES)
        ),
        labels.encode(text=alt.Text("rate:Q", format=".2~f")),
    )


def _prediction_table(analysis: Analysis, advice: Advice) -> Table:
    advised = series.suggested_rates(analysis, advice)
    rates = sorted({*series.TABLE_RATES, *advised.values()})
    return charts.listing(
        [series.prediction_row(model, rate) for model in analysis.models for rate in rates],
        {
            "drop rate": lambda row: f"{row['rate']:g}",
            "model": lambda row: row["model"],
            "error beside the delta": lambda row: share(row["relative"]),
            "error of outputs": lambda row: share(row["error"]),
            "": lambda row: "advised" if row["rate"] == advised.get(row["model"]) else "",
        },
    )


# ---------------------------------------------------------------- after a merge


def kept(outcome: Outcome) -> Figure:
    """What each stage left of each model."""
    rows = [
        {**row, "label": f"{row['stage']}  {share(row['kept'])}"}
        for row in series.kept_rows(outcome)
    ]
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    chart = charts.model_bars(
        [model.name for model in outcome.models],
        x=alt.X("kept:Q", title="elements left")
        .scale(domain=[0, 1.15])  # room for what is written behind a bar
        .axis(format="~%", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
        yOffset=alt.YOffset("stage:N", sort=stages),
        text="label:N",
        tooltip=charts.tooltip_of("model:N", ("stage:N", "after"), ("kept:Q", "left", ".3%")),
    )
    return Figure(
        "kept",
        "What was kept",
        "The share of each model's elements that is left after each delta stage.",
        "Bar chart of the share of elements kept. "
        + "; ".join(f"{row['model']} after {row['label']}" for row in rows)
        + ".",
        charts.finish(chart, rows, height=max(100, 30 * len(rows))),
        charts.listing(
            rows,
            {
                "model": lambda row: row["model"],
                "stage": lambda row: row["stage"],
                "elements left": lambda row: share(row["kept"]),
            },
        ),
    )


def kept_by_layer(outcome: Outcome) -> Figure:
    """What all stages left of each model, layer by layer."""
    names = tuple(model.name for model in outcome.models)
    chart = charts.lines(
        names,
        x=charts.layer_numbers(),
        y=alt.Y("kept:Q", title="elements left").axis(format="~%", tickCount=5),
        tooltip=charts.tooltip_of("model:N", "layer:Q", ("kept:Q", "left", ".3%")),
    )
    return Figure(
        "kept-by-layer",
        "What was kept in each layer",
        "The share of elements that is left after all delta stages.",
        f"Line chart over layers of the share of elements kept of {listed(names)}.",
        charts.finish(chart, charts.dashed(series.kept_layer_rows(outcome), names), height=220),
        charts.layer_table({model.name: model.kept_by_layer for model in outcome.models}, share),
    )


def survival(outcome: Outcome) -> Figure:
    """How much of each model's delta is in the merged one."""
    rows = series.survival_rows(outcome)
    ratios = [row["ratio"] or 0.0 for row in rows]
    chart = charts.model_bars(
        [row["model"] for row in rows],
        x=alt.X("ratio:Q", title="share of the model's delta in the merged one")
        .scale(domain=[min(0.0, *ratios), 1.3 * max(0.01, *ratios)])
        .axis(format="~%", tickCount=5),
        text=alt.Text("ratio:Q", format=".1%"),
        tooltip=charts.tooltip_of(
            "model:N",
            ("ratio:Q", "share of its delta", ".2%"),
            ("cosine:Q", "cosine with the merged delta", "+.3f"),
        ),
    )
    shares = "; ".join(f"{row['model']} {share(row['ratio'])}" for row in rows)
    return Figure(
        "survival",
        "How far each model survived",
        "How much of each model's delta is in the merged one: the multiple of it that comes "
        "nearest to the merged delta. A plain mean of unrelated models keeps one part in their "
        "number.",
        f"Bar chart of the share of each model's delta in the merged one: {shares}.",
        charts.finish(chart, rows, height=max(90, 44 * len(rows))),
        charts.listing(
            rows,
            {
                "model": lambda row: row["model"],
                "share of its delta": lambda row: share(row["ratio"]),
                "cosine with the merged delta": lambda row: cosine(row["cosine"]),
            },
        ),
    )
