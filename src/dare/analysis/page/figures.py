"""The figures: one function for each, from an analysis to a chart with a table of its numbers.

A function returns None if there is nothing to draw. What is said about a figure is in
`figures.toml`. Colours come from `themes` when a figure is shown. Every chart has a parameter
`model`, empty at first: the model to bring out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dare.analysis.judge.judgement import Advice
from dare.analysis.judge.limits import limit
from dare.analysis.page import charts, series
from dare.analysis.page.charts import CHOSEN, CHOSEN_PAIR, CONTRAST
from dare.analysis.page.outcome import Outcome
from dare.analysis.page.words import cosine, layer_name
from dare.analysis.results import OUTSIDE, Analysis, ModelAnalysis
from dare.output.page.charts import (
    FAINT,
    Spec,
    alt,
    bright_if,
    by_name,
    level_line,
    logarithmic,
    room_for,
    tooltip_of,
    zoom,
)
from dare.output.page.figures import Figure, make_figure, read_texts
from dare.output.page.tables import Columns, Row, Table, finite, listing
from dare.output.page.themes import DASHES, SHAPES
from dare.output.page.words import listed, number, share
from dare.tensors.sizes import times

LEAST_SHARE = 0.0005
"""Octaves with fewer of the elements are out of sight until one drags the figure."""
MOST_LAYERS_BESIDE = 48
"""Heat maps with more layers need the whole width."""
WIDE_RANGE = 5
"""Largest over smallest change from which colours follow the logarithm."""
TEXTS = read_texts("dare.analysis.page")


def draw_figures(analysis: Analysis, advice: Advice, outcome: Outcome | None) -> list[Figure]:
    """Draw all figures that there is something to draw in."""
    drawn = [
        magnitudes(analysis),
        *(relative_change(analysis, model) for model in analysis.models),
        *(draw(analysis) for draw in (cosines, conflicts, layer_cosines, cancelled, spectra)),
        predicted_error(analysis, advice),
    ]
    if outcome is not None:
        drawn += [kept(outcome), kept_by_layer(outcome), survival(outcome)]
    return [figure for figure in drawn if figure is not None]


def _figure(name: str, spec: Spec, table: Table, **known: str) -> Figure:
    """A figure with its texts, in which the known values are filled in."""
    return make_figure(TEXTS[name], name, spec, table, known)


# ---------------------------------------------------------------- one model


def magnitudes(analysis: Analysis) -> Figure | None:
    """How large the changes of each model are."""
    names = analysis.names
    rows = charts.dashed(series.magnitude_rows(analysis), names)
    if not rows:
        return None
    kinds = [series.ALL_KINDS, *map(str, series.kinds_of(analysis))]
    picker = alt.binding_select(options=kinds, name="Tensors ")
    frequent = [row for row in rows if row["share"] >= LEAST_SHARE] or rows  # tails go on far
    domain = [min(row["from"] for row in frequent), max(row["to"] for row in frequent)]
    chart = charts.lines(
        names,
        x=alt.X("middle:Q", title="magnitude of a change, |δ|")
        .scale(type="log", domain=domain, nice=False)
        .axis(logarithmic("x")),
        y=alt.Y("share:Q", title="share of all elements").axis(format="~%", tickCount=5),
        tooltip=tooltip_of(
            "model:N",
            ("from:Q", "|δ| from", ".3~g"),
            ("to:Q", "below", ".3~g"),
            ("share:Q", "share of elements", ".2%"),
        ),
    )
    chart = chart.transform_filter("datum.kind === kind")
    chart = chart.add_params(alt.param(name="kind", value=series.ALL_KINDS, bind=picker))
    medians = [f"{model.name} {number(model.total.quantiles.p50)}" for model in analysis.models]
    shares: dict[tuple[float, float], dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: (row["from"], row["to"])):
        if row["kind"] == series.ALL_KINDS:
            shares.setdefault((row["from"], row["to"]), {})[row["model"]] = row["share"]
    table = Table(
        ("|δ| from … to", *names),
        (
            ("not changed", *(share(model.total.sparsity) for model in analysis.models)),
            *(
                (
                    f"{number(low)} … {number(high)}",
                    *(share(by_model.get(name, 0.0)) for name in names),
                )
                for (low, high), by_model in shares.items()
            ),
        ),
    )
    texts = {"names": listed(names), "medians": ", ".join(medians)}
    return _figure("magnitudes", charts.finish(chart, rows), table, **texts)


def relative_change(analysis: Analysis, model: ModelAnalysis) -> Figure | None:
    """Where a model differs from the base: layers × kinds."""
    rows, kinds = series.change_rows(model), series.kinds_of(analysis)
    if not rows:
        return None
    low, high = series.change_range(analysis)
    scale = alt.Scale(type="log" if high > WIDE_RANGE * low > 0 else "linear", domain=[low, high])
    middle = math.sqrt(low * high) if scale.type == "log" else (low + high) / 2
    place = alt.Chart().encode(
        x=charts.layer_names(),
        y=alt.Y("kind:N", title=None, sort=[str(kind) for kind in kinds]),
        tooltip=tooltip_of(
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
    by_kind = {
        str(kind): {c.layer: c.statistics.relative_norm for c in model.cells if c.kind == kind}
        for kind in kinds
    }
    figure = _figure(
        "change",
        charts.finish(chart, rows, height=30 * len({row["kind"] for row in rows}) + 10),
        series.layer_table(by_kind, share),
        model=model.name,
        change=share(model.total.relative_norm),
        peak=peak,
    )
    count, width = len(analysis.models), 1.0
    if count > 1 and len(analysis.layers) <= MOST_LAYERS_BESIDE:
        width = 1 / 3 if count % 3 == 0 else 1 / 2
    name = f"change-{analysis.names.index(model.name) + 1}"
    return replace(figure, name=name, models=(model.name,), width=width)


def spectra(analysis: Analysis) -> Figure | None:
    """In how many directions the changes go."""
    names, rows = analysis.names, series.spectrum_rows(analysis)
    if not rows:
        return None
    available = sum(1 for model in analysis.models for tensor in model.tensors if tensor.spectrum)
    near = alt.selection_point(
        name="near", fields=["line"], on="pointerover", nearest=True, empty=False
    )
    legend = alt.Legend(columns=room_for(names), symbolType="stroke", symbolSize=300)
    opacity = alt.when(near).then(alt.value(1)).when(CHOSEN).then(alt.value(0.45))
    chart = alt.Chart().encode(
        x=alt.X("rank:Q", title="direction, the strongest first")
        .scale(type="log", nice=False)
        .axis(logarithmic("x")),
        y=alt.Y("value:Q", title="singular value beside the largest")
        .scale(type="log")
        .axis(logarithmic("y")),
        color=by_name(alt.Color, names, legend=legend),
        detail="line:N",
    )
    lines = chart.mark_line(strokeWidth=1.5, aria=False).encode(
        strokeDash=by_name(alt.StrokeDash, names, DASHES, legend=legend),
        opacity=opacity.otherwise(alt.value(FAINT / 2)),
    )
    points = chart.mark_point(size=30, opacity=0, aria=False).encode(
        opacity=alt.value(0),
        tooltip=tooltip_of(
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
    return _figure(
        "spectra",
        charts.finish(layers.add_params(zoom()), rows, height=300),
        listing(
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
        names=listed(names),
        matrices=times(len(rows), "matrix", "matrices"),
        shown=f" Shown are {len(rows)} of {available}." if len(rows) < available else "",
    )


# ---------------------------------------------------------------- two models and all


def cosines(analysis: Analysis) -> Figure | None:
    """In how far every two models change the same way."""
    columns: Columns = {
        "models": series.pair_name,
        "cosine": lambda pair: cosine(pair.total.cosine),
        "multiple of the first nearest to the second": lambda pair: number(pair.ratio),
    }
    scale = {"domain": [-1, 1], "range": "diverging"}
    return _matrix(analysis, "cosines", "cosine", "cosine", "+.2f", scale, columns)


def conflicts(analysis: Analysis) -> Figure | None:
    """In how many elements every two models disagree."""
    columns: Columns = {
        "models": series.pair_name,
        "in opposite directions": lambda pair: share(pair.total.conflict),
        "elements both change": lambda pair: f"{pair.total.both:,}",
        "of the top 1%: shared": lambda pair: share(pair.total.top_overlap),
        "of those: opposite": lambda pair: share(pair.total.top_conflict),
    }
    scale, title = {"domain": [0, 1], "range": "heatmap"}, "in opposite directions"
    return _matrix(analysis, "conflicts", "conflict", title, ".0%", scale, columns)


def _matrix(
    analysis: Analysis,
    name: str,
    field: str,
    title: str,
    shown_as: str,
    scale: Spec,
    columns: Columns,
) -> Figure | None:
    """A cell for every two models; the second of the columns shows what is drawn."""
    rows, names = series.pair_rows(analysis), list(analysis.names)
    if not rows:
        return None
    place = alt.Chart().encode(
        x=alt.X("other:N", title=None, sort=names).axis(
            orient="top", labelAngle=0 if len(names) <= 4 else -40, labelLimit=100
        ),
        y=alt.Y("model:N", title=None, sort=names).axis(labelLimit=100),
        opacity=bright_if(CHOSEN_PAIR),
        tooltip=tooltip_of(
            ("model:N", "model"),
            ("other:N", "and"),
            ("cosine:Q", "", "+.4f"),
            ("conflict:Q", "in opposite directions", ".2%"),
            ("both:Q", "elements both change", ","),
        ),
    )
    cells = place.mark_rect(cornerRadius=3).encode(
        color=alt.Color(f"{field}:Q", title=title)
        .scale(**scale)
        .legend(format=shown_as, gradientLength=160, gradientThickness=10, tickCount=4)
    )
    contrast = alt.expr(CONTRAST.format(field=field))
    texts = place.mark_text(fontSize=13, color=contrast, aria=False)
    texts = texts.encode(text=alt.Text(f"{field}:Q", format=shown_as))
    largest = max(analysis.pairs, key=lambda pair: abs(getattr(pair.total, field)))
    _, shown, *_ = columns.values()
    return _figure(
        name,
        charts.finish(alt.layer(cells, texts), rows, height=max(140, 52 * len(names))),
        listing(analysis.pairs, columns),
        largest=shown(largest),
        first=largest.first,
        second=largest.second,
    )


def layer_cosines(analysis: Analysis) -> Figure | None:
    """Where every two models change the same way."""
    pairs = series.closest_pairs(analysis)
    names = tuple(map(series.pair_name, pairs))
    rows: list[Row] = [
        {
            "pair": series.pair_name(pair),
            "model": pair.first,
            "other": pair.second,
            "layer": layer,
            "cosine": finite(overlap.cosine),
            "conflict": finite(overlap.conflict),
        }
        for pair in pairs
        for layer, overlap in sorted(pair.by_layer.items())
        if layer != OUTSIDE
    ]
    if not rows:
        return None
    chart = charts.lines(
        names,
        x=charts.layer_numbers(),
        y=alt.Y("cosine:Q", title="cosine").axis(format="+.2~g", tickCount=5),
        tooltip=tooltip_of(
            ("pair:N", "models"),
            "layer:Q",
            ("cosine:Q", "", "+.4f"),
            ("conflict:Q", "in opposite directions", ".2%"),
        ),
        field="pair",
    )
    zero = alt.Chart().mark_rule(strokeDash=[2, 3], aria=False).encode(y=alt.datum(0))
    some = f" Shown are the {len(names)} closest pairs." if len(names) < len(analysis.pairs) else ""
    by_pair = {
        series.pair_name(pair): {layer: overlap.cosine for layer, overlap in pair.by_layer.items()}
        for pair in pairs
    }
    return _figure(
        "layer-cosines",
        charts.finish(alt.layer(zero, chart), charts.dashed(rows, names, "pair"), height=240),
        series.layer_table(by_pair, cosine),
        shown=some,
        pairs=times(len(names), "pair"),
    )


def cancelled(analysis: Analysis) -> Figure | None:
    """What a merge of all models would lose, layer by layer."""
    by_layer = analysis.together.by_layer
    if not analysis.pairs or by_layer.keys() <= {OUTSIDE}:
        return None
    rows: list[Row] = [
        {"layer": layer_name(layer), "place": layer, "cancelled": finite(by_layer[layer])}
        for layer in sorted(by_layer)
    ]
    chart = alt.Chart().mark_bar(cornerRadiusEnd=2, aria=False)
    chart = chart.encode(
        x=charts.layer_names(),
        y=alt.Y("cancelled:Q", title="cancelled").axis(format="~%", tickCount=5),
        tooltip=tooltip_of("layer:N", ("cancelled:Q", "", ".2%")),
    )
    chart = alt.layer(chart, level_line(analysis.together.cancelled))
    total = share(analysis.together.cancelled)
    cells = (("all", total), *((row["layer"], share(row["cancelled"])) for row in rows))
    table = Table(("layer", "cancelled"), cells)
    return _figure("cancelled", charts.finish(chart, rows, height=200), table, total=total)


# ---------------------------------------------------------------- drop rates


def predicted_error(analysis: Analysis, advice: Advice) -> Figure | None:
    """What DARE would do at which drop rate, and the rate that is advised."""
    names, curves = analysis.names, series.prediction_rows(analysis)
    if not curves:
        return None
    advised = series.suggested_rates(analysis, advice)
    points = [series.prediction_row(analysis.model(name), rate) for name, rate in advised.items()]
    points = charts.dashed([row for row in points if row["error"]], names)
    place = {
        "x": alt.X("rate:Q", title="drop rate").scale(domain=[0, 1]).axis(tickCount=10, grid=True),
        "y": alt.Y("error:Q", title="expected error of a layer's outputs")
        .scale(type="log", nice=False)
        .axis(logarithmic("y", percent=True)),
        "tooltip": tooltip_of(
            "model:N",
            ("rate:Q", "drop rate"),
            ("error:Q", "error of outputs", ".3~%"),
            ("relative:Q", "error beside the delta", ".3~%"),
        ),
    }
    marks = []
    for turn, dy in enumerate((-17, 19)):  # above and below: curves lie close to each other
        if rows := [row for row in points if row["dash"] % 2 == turn]:
            chart = alt.Chart({"values": rows}).encode(**place, opacity=bright_if(CHOSEN))
            mark = chart.mark_point(filled=True, size=170, strokeWidth=2, aria=False).encode(
                color=by_name(alt.Color, names),
                shape=by_name(alt.Shape, names, SHAPES),
            )
            label = chart.mark_text(fontWeight=600, dy=dy, aria=False)
            marks += [mark, label.encode(text=alt.Text("rate:Q", format=".2~f"))]
    bound = limit("output_error")
    data = {"values": [{"label": f"bound {bound:.0%}"}]}
    note = alt.Chart(data).mark_text(align="left", baseline="bottom", dx=4, dy=-3, aria=False)
    note = note.encode(x=alt.datum(0), y=alt.datum(bound), text="label:N")
    chart = alt.layer(
        level_line(bound, data), note, charts.lines(names, **place, points=False), *marks
    )
    rates = [f"{row['model']} {row['rate']:g} (error {share(row['error'])})" for row in points]
    steps = sorted({*series.TABLE_RATES, *advised.values()})
    table = listing(
        [series.prediction_row(model, rate) for model in analysis.models for rate in steps],
        {
            "drop rate": lambda row: f"{row['rate']:g}",
            "model": lambda row: row["model"],
            "error beside the delta": lambda row: share(row["relative"]),
            "error of outputs": lambda row: share(row["error"]),
            "": lambda row: "advised" if row["rate"] == advised.get(row["model"]) else "",
        },
    )
    return _figure(
        "predicted-error",
        charts.finish(chart, charts.dashed(curves, names), height=320),
        table,
        names=listed(names),
        marks="The marks are the rates that are advised." if points else "No rate is advised.",
        advised=f" Advised: {', '.join(rates)}." if rates else "",
    )


# ---------------------------------------------------------------- after a merge


def kept(outcome: Outcome) -> Figure | None:
    """What each stage left of each model."""
    rows: list[Row] = [
        {
            "model": model.name,
            "stage": stage,
            "step": step,
            "kept": finite(left),
            "label": f"{stage}  {share(finite(left))}",
        }
        for model in outcome.models
        for step, (stage, left) in enumerate(model.kept.items())
    ]
    if not rows:
        return None
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    chart = charts.model_bars(
        [model.name for model in outcome.models],
        x=alt.X("kept:Q", title="elements left")
        .scale(domain=[0, 1.15])  # room for what is written behind a bar
        .axis(format="~%", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
        yOffset=alt.YOffset("stage:N", sort=stages),
        text="label:N",
        tooltip=tooltip_of("model:N", ("stage:N", "after"), ("kept:Q", "left", ".3%")),
    )
    columns: Columns = {
        "model": lambda row: row["model"],
        "stage": lambda row: row["stage"],
        "elements left": lambda row: share(row["kept"]),
    }
    return _figure(
        "kept",
        charts.finish(chart, rows, height=max(100, 30 * len(rows))),
        listing(rows, columns),
        shares="; ".join(f"{row['model']} after {row['label']}" for row in rows),
    )


def kept_by_layer(outcome: Outcome) -> Figure | None:
    """What all stages left of each model, layer by layer."""
    names = tuple(model.name for model in outcome.models)
    rows: list[Row] = [
        {"model": model.name, "layer": layer, "kept": finite(left)}
        for model in outcome.models
        for layer, left in model.kept_by_layer.items()
        if layer != OUTSIDE
    ]
    if not rows:
        return None
    chart = charts.lines(
        names,
        x=charts.layer_numbers(),
        y=alt.Y("kept:Q", title="elements left").axis(format="~%", tickCount=5),
        tooltip=tooltip_of("model:N", "layer:Q", ("kept:Q", "left", ".3%")),
    )
    spec = charts.finish(chart, charts.dashed(rows, names), height=220)
    table = series.layer_table({model.name: model.kept_by_layer for model in outcome.models}, share)
    return _figure("kept-by-layer", spec, table, names=listed(names))


def survival(outcome: Outcome) -> Figure | None:
    """How much of each model's delta is in the merged one, and how well their directions agree."""
    rows: list[Row] = [
        {"model": pair.first, "ratio": finite(pair.ratio), "cosine": finite(pair.total.cosine)}
        for pair in outcome.survival
    ]
    if not rows:
        return None
    ratios = [row["ratio"] or 0.0 for row in rows]
    chart = charts.model_bars(
        [row["model"] for row in rows],
        x=alt.X("ratio:Q", title="share of the model's delta in the merged one")
        .scale(domain=[min(0.0, *ratios), 1.3 * max(0.01, *ratios)])
        .axis(format="~%", tickCount=5),
        text=alt.Text("ratio:Q", format=".1%"),
        tooltip=tooltip_of(
            "model:N",
            ("ratio:Q", "share of its delta", ".2%"),
            ("cosine:Q", "cosine with the merged delta", "+.3f"),
        ),
    )
    columns: Columns = {
        "model": lambda row: row["model"],
        "share of its delta": lambda row: share(row["ratio"]),
        "cosine with the merged delta": lambda row: cosine(row["cosine"]),
    }
    return _figure(
        "survival",
        charts.finish(chart, rows, height=max(90, 44 * len(rows))),
        listing(rows, columns),
        shares="; ".join(f"{row['model']} {share(row['ratio'])}" for row in rows),
    )
