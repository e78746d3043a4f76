"""The figures: one function for each, from an analysis to a chart with a table of its numbers.

A function returns None if there is nothing to draw. What is said about a figure is in
`figures.toml`. Colours come from `themes` when a figure is shown. Every chart has a parameter
`model`, empty at first: the model to bring out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dare.analysis.judge.judgement import Advice, limit
from dare.analysis.judge.readiness import chance_cancelled
from dare.analysis.page import series
from dare.analysis.page.series import Outcome
from dare.analysis.page.words import cosine, layer_name
from dare.analysis.results import OUTSIDE, Analysis, ModelAnalysis, Origin
from dare.documents.charts import (
    DASHES,
    FAINT,
    SHAPES,
    Figure,
    Spec,
    alt,
    bright_if,
    by_name,
    finish_chart,
    logarithmic,
    make_figure,
    read_texts,
    repeated,
    room_for,
    tooltip_of,
    zoom,
)
from dare.documents.document import Columns, Row, Table, finite, listing
from dare.documents.words import listed, number, share, times

LEAST_SHARE = 0.0005
"""Octaves with fewer of the elements are out of sight until one drags the figure."""
MOST_MAPS = 4
"""Models with a heat map each; of more there is one for all, and theirs are folded."""
ROOM_FOR_TEXT = 5
"""Models whose matrices have a text in every cell; of more only what is notable has one."""
NOISE = 0.05
"""Shares that differ by less look alike, and their figures are folded."""
MOST_LAYERS_BESIDE = 48
"""Heat maps with more layers need the whole width."""
WIDE_RANGE = 5
"""Largest over smallest change from which colours follow the logarithm."""
CHOSEN = "!model || datum.model === model"
CHOSEN_PAIR = "!model || datum.model === model || datum.other === model"
CONTRAST = "luminance(scale('color', datum.{field})) > 0.3 ? '#111417' : '#ffffff'"
"""The colour of text on a cell of a matrix."""
LEFT_OUT = "left_out"
"""The parameter with the names of models that the advice does not merge."""
MARKED = f"(indexof({LEFT_OUT}, datum.label) >= 0 ? '⚠ ' : '') + datum.label"
"""A model's name on an axis or in a legend; a sign stands before those that are left out."""
TEXTS = read_texts("dare.analysis.page")


def draw_figures(analysis: Analysis, advice: Advice, outcome: Outcome | None) -> list[Figure]:
    """Draw all figures that there is something to draw in."""
    drawn = [
        predicted_error(analysis, advice),
        *(draw(analysis) for draw in (cosines, conflicts, cancelled)),
        changes(analysis),
        *(relative_change(analysis, model) for model in analysis.models),
        magnitudes(analysis),
        spectra(analysis),
    ]
    if outcome is not None:
        drawn += [survival(outcome), kept(outcome)]
    found = [figure for figure in drawn if figure is not None]
    for figure in found:
        for parameter in figure.spec["params"]:
            if parameter["name"] == LEFT_OUT:
                parameter["value"] = list(advice.left_out)
    return found


def _figure(name: str, spec: Spec, table: Table, **known: str) -> Figure:
    """A figure with its texts, in which the known values are filled in."""
    return make_figure(TEXTS[name], name, spec, table, known)


# ---------------------------------------------------------------- one model


def magnitudes(analysis: Analysis) -> Figure | None:
    """How large the changes of each model are."""
    names = analysis.names
    rows = dashed(series.magnitude_rows(analysis), names)
    if not rows:
        return None
    kinds = [series.ALL_KINDS, *map(str, series.kinds_of(analysis))]
    picker = alt.binding_select(options=kinds, name="Tensors ")
    frequent = [row for row in rows if row["share"] >= LEAST_SHARE] or rows  # tails go on far
    domain = [min(row["from"] for row in frequent), max(row["to"] for row in frequent)]
    chart = lines(
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
    shares = {
        (row["from"], row["to"], row["model"]): row["share"]
        for row in rows
        if row["kind"] == series.ALL_KINDS
    }
    cells = [
        (f"{number(low)} … {number(high)}", *(share(shares.get((low, high, n), 0)) for n in names))
        for low, high in sorted({(low, high) for low, high, _ in shares})
    ]
    unchanged = ("not changed", *(share(model.total.sparsity) for model in analysis.models))
    table = Table(("|δ| from … to", *names), (unchanged, *cells))
    texts = {"names": listed(names), "medians": ", ".join(medians)}
    return _figure("magnitudes", finish(chart, rows), table, **texts)


def changes(analysis: Analysis) -> Figure | None:
    """Where each of many models differs from the base: models × layers."""
    if len(analysis.models) <= MOST_MAPS:
        return None
    rows = series.layer_change_rows(analysis)
    largest = max(rows, key=lambda row: row["change"] or 0.0)
    chart = _change_map(series.change_domain(rows), model_axis(alt.Y, analysis.names), ("model:N",))
    by_model = {
        model.name: {layer: found.relative_norm for layer, found in model.by_layer.items()}
        for model in analysis.models
    }
    return _figure(
        "changes",
        finish(chart, rows, 24 * len(analysis.models) + 10),
        series.layer_table(by_model, share),
        names=listed(analysis.names),
        peak=f"{share(largest['change'])}, {largest['model']} in layer {largest['layer']}",
    )


def _change_map(domain: list[float], y: Any, whose: tuple[str, ...]) -> Any:
    """Relative changes over layers as colours, with a tooltip that begins with whose they are."""
    low, high = domain
    scale = alt.Scale(type="log" if high > WIDE_RANGE * low > 0 else "linear", domain=domain)
    middle = math.sqrt(low * high) if scale.type == "log" else (low + high) / 2
    place = alt.Chart().encode(
        x=layer_names(),
        y=y,
        tooltip=tooltip_of(
            *whose,
            "layer:N",
            ("change:Q", "‖δ‖ / ‖base‖", ".3~%"),
            ("largest:Q", "largest |δ|", ".3~g"),
            ("elements:Q", "", ","),
        ),
    )
    colour = alt.Color("change:Q", title="‖δ‖ / ‖base‖").scale(scale)
    colour = colour.legend(
        format=".2~%", gradientLength=180, gradientThickness=10, values=[low, middle, high]
    )
    return alt.layer(
        place.mark_rect(fill="transparent", strokeWidth=1, strokeOpacity=0.4, stroke="#888"),
        place.mark_rect(cornerRadius=2).transform_filter("datum.change > 0").encode(color=colour),
    )


def relative_change(analysis: Analysis, model: ModelAnalysis) -> Figure | None:
    """Where a model differs from the base: layers × kinds."""
    rows, kinds = series.change_rows(model), series.kinds_of(analysis)
    if not rows:
        return None
    axis = alt.Y("kind:N", title=None, sort=[str(kind) for kind in kinds])
    everywhere = [row for each in analysis.models for row in series.change_rows(each)]
    chart = _change_map(series.change_domain(everywhere), axis, ("kind:N",))
    largest = max(rows, key=lambda row: row["change"] or 0.0)
    where = f"{largest['kind']} in layer {largest['layer']}"
    peak = f" The largest is {share(largest['change'])}, {where}." if largest["change"] else ""
    by_kind = {
        str(kind): {c.layer: c.statistics.relative_norm for c in model.cells if c.kind == kind}
        for kind in kinds
    }
    figure = _figure(
        "change",
        finish(chart, rows, height=30 * len({row["kind"] for row in rows}) + 10),
        series.layer_table(by_kind, share),
        model=model.name,
        change=share(model.total.relative_norm),
        peak=peak,
    )
    count, width = len(analysis.models), 1.0
    if count > 1 and len(analysis.layers) <= MOST_LAYERS_BESIDE:
        width = 1 / 3 if count % 3 == 0 else 1 / 2
    name = f"change-{analysis.names.index(model.name) + 1}"
    folded = count > MOST_MAPS
    return replace(figure, name=name, models=(model.name,), width=width, folded=folded)


def spectra(analysis: Analysis) -> Figure | None:
    """In how many directions the changes go."""
    names, rows = analysis.names, series.spectrum_rows(analysis)
    if not rows:
        return None
    available = sum(1 for model in analysis.models for tensor in model.tensors if tensor.spectrum)
    # Not `nearest`: the cells that Vega adds for it would have tooltips without values.
    near = alt.selection_point(name="near", fields=["line"], on="pointerover", empty=False)
    legend = legend_of(names, symbolType="stroke", symbolSize=300)
    opacity = alt.when(near).then(alt.value(1)).when(CHOSEN).then(alt.value(0.45))
    chart = alt.Chart().encode(
        x=alt.X("rank:Q", title="direction, the strongest first")
        .scale(type="log", nice=False)
        .axis(logarithmic("x")),
        y=alt.Y("value:Q", title="singular value, relative to the largest")
        .scale(type="log")
        .axis(logarithmic("y")),
        color=by_name(alt.Color, names, legend=legend),
        detail="line:N",
    )
    lines = chart.mark_line(strokeWidth=1.5, aria=False).encode(
        strokeDash=by_name(alt.StrokeDash, names, DASHES, legend=legend),
        opacity=opacity.otherwise(alt.value(FAINT / 2)),
    )
    points = chart.mark_point(filled=True, size=60, aria=False).encode(
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
    figure = _figure(
        "spectra",
        finish(layers.add_params(zoom()), rows, height=300),
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
    low_rank = any(model.origin is Origin.LORA for model in analysis.models)
    return replace(figure, folded=not low_rank)


# ---------------------------------------------------------------- two models and all


def cosines(analysis: Analysis) -> Figure | None:
    """In how far every two models change the same way."""
    columns: Columns = {
        "models": series.pair_name,
        "cosine": lambda pair: cosine(pair.total.cosine),
        "multiple of the first nearest to the second": lambda pair: number(pair.ratio),
    }
    return _matrix(
        analysis,
        "cosines",
        alt.Color("cosine:Q", title="cosine").scale(domain=[-1, 1], range="diverging"),
        "+.2f",
        notable=f"abs(datum.cosine) >= {limit('apart_cosine')}",
        columns=columns,
    )


def conflicts(analysis: Analysis) -> Figure | None:
    """In how many elements every two models disagree."""
    columns: Columns = {
        "models": series.pair_name,
        "in opposite directions": lambda pair: share(pair.total.conflict),
        "elements both change": lambda pair: f"{pair.total.both:,}",
        "of the top 1%: shared": lambda pair: share(pair.total.top_overlap),
        "of those: opposite": lambda pair: share(pair.total.top_conflict),
    }
    return _matrix(
        analysis,
        "conflicts",
        alt.Color("conflict:Q", title="opposite (chance: 50%)").scale(
            domain=[0, 1], range="diverging", reverse=True
        ),
        ".0%",
        notable=f"abs(datum.conflict - 0.5) >= {limit('conflict') - 0.5:g}",
        columns=columns,
    )


def _matrix(
    analysis: Analysis, name: str, colour: Any, shown_as: str, *, notable: str, columns: Columns
) -> Figure | None:
    """A cell for every two models; the second of the columns shows what is drawn.

    Where there are many, only the cells have a text for which `notable` holds.
    """
    rows, names, field = series.pair_rows(analysis), analysis.names, name.removesuffix("s")
    if not rows:
        return None
    few = len(names) <= ROOM_FOR_TEXT
    angle = 0 if len(names) <= 3 and max(map(len, names)) <= 8 else -90
    place = alt.Chart().encode(
        x=model_axis(alt.X, names, "other", orient="top", labelAngle=angle),
        y=model_axis(alt.Y, names),
        opacity=bright_if(CHOSEN_PAIR),
        tooltip=tooltip_of(
            ("model:N", "model"),
            ("other:N", "and"),
            ("cosine:Q", "", "+.4f"),
            ("conflict:Q", "in opposite directions", ".2%"),
            ("both:Q", "elements both change", ","),
        ),
    )
    looks = {"gradientLength": 160, "gradientThickness": 10, "tickCount": 4}
    colour = colour.legend(format=shown_as, **looks)
    cells = place.mark_rect(cornerRadius=3).encode(color=colour)
    contrast = alt.expr(CONTRAST.format(field=field))
    size = alt.expr("bandwidth('x') < 22 ? 0 : clamp(bandwidth('x') / 3.2, 7, 13)")
    texts = place.transform_filter("true" if few else notable)
    texts = texts.mark_text(fontSize=size, color=contrast, aria=False)
    texts = texts.encode(text=alt.Text(f"{field}:Q", format=shown_as))
    chance = 0.5 if field == "conflict" else 0.0
    largest = max(analysis.pairs, key=lambda pair: abs(getattr(pair.total, field) - chance))
    _, shown, *_ = columns.values()
    return _figure(
        name,
        finish(alt.layer(cells, texts), rows, max(140, (48 if few else 32) * len(names))),
        listing(analysis.pairs, columns),
        largest=shown(largest),
        first=largest.first,
        second=largest.second,
    )


def cancelled(analysis: Analysis) -> Figure | None:
    """What a merge of all models would lose, layer by layer."""
    by_layer = analysis.together.by_layer
    if not analysis.pairs or by_layer.keys() <= {OUTSIDE}:
        return None
    rows: list[Row] = [
        {
            "layer": layer_name(layer),
            "cancelled": finite(by_layer[layer]),
            "chance": finite(series.layer_chance(analysis, layer)),
        }
        for layer in sorted(by_layer)
    ]
    place = alt.Chart().encode(
        x=layer_names(),
        tooltip=tooltip_of("layer:N", ("cancelled:Q", "", ".1%"), ("chance:Q", "by chance", ".1%")),
    )
    top = max(row[field] or 0.0 for row in rows for field in ("cancelled", "chance"))
    scale = {"domain": [0, max(top, 0.5)]}
    bars = place.mark_bar(cornerRadiusEnd=2, aria=False).encode(
        y=alt.Y("cancelled:Q", title="cancelled").scale(**scale).axis(format="~%", tickCount=5)
    )
    ticks = place.mark_tick(thickness=3, aria=False).encode(y="chance:Q")
    total = share(analysis.together.cancelled)
    chance = share(chance_cancelled(analysis))
    cells = ((row["layer"], share(row["cancelled"]), share(row["chance"])) for row in rows)
    table = Table(("layer", "cancelled", "by chance about"), (("all", total, chance), *cells))
    texts = {"total": total, "chance": chance}
    spec = finish(alt.layer(bars, ticks), rows, height=200)
    figure = _figure("cancelled", spec, table, **texts)
    far = max(abs((row["cancelled"] or 0.0) - (row["chance"] or 0.0)) for row in rows)
    return replace(figure, folded=far < NOISE)


# ---------------------------------------------------------------- drop rates


def predicted_error(analysis: Analysis, advice: Advice) -> Figure | None:
    """What dropping would cost at which rate."""
    out = advice.left_out
    models = [model for model in analysis.models if model.name not in out] or analysis.models
    names, everyone = [model.name for model in models], analysis.names
    curves = [row for model in models for row in series.prediction_rows(model, series.RATES)]
    if not (curves := [row for row in curves if row["error"]]):
        return None
    found = [row for m in models for row in series.prediction_rows(m, series.TABLE_RATES)]
    place = {
        "x": alt.X("rate:Q", title="drop rate").scale(domain=[0, 1]).axis(tickCount=10, grid=True),
        "y": alt.Y("error:Q", title="error of a layer's outputs, at most")
        .scale(type="log", nice=False)
        .axis(logarithmic("y", percent=True)),
        "tooltip": tooltip_of(
            "model:N",
            ("rate:Q", "drop rate"),
            ("error:Q", "error of outputs, at most", ".3~%"),
            ("relative:Q", "error of the delta", ".3~%"),
        ),
    }
    table = listing(
        found,
        {
            "drop rate": lambda row: f"{row['rate']:g}",
            "model": lambda row: row["model"],
            "error of outputs, at most": lambda row: share(row["error"]),
            "error of the delta": lambda row: share(row["relative"]),
        },
    )
    return _figure(
        "predicted-error",
        finish(lines(everyone, shown=names, **place), dashed(curves, everyone), height=320),
        table,
        names=listed(tuple(names)),
        out=f" Left out: {listed(out)}." if out else "",
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
    chart = model_bars(
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
        finish(chart, rows, height=max(100, 30 * len(rows))),
        listing(rows, columns),
        shares="; ".join(f"{row['model']} after {row['label']}" for row in rows),
    )


def survival(outcome: Outcome) -> Figure | None:
    """How much of each model's delta is in the merged one, and how well their directions agree."""
    rows: list[Row] = [
        {
            "model": pair.first,
            "ratio": finite(pair.ratio) or 0.0,
            "label": share(pair.ratio) if math.isfinite(pair.ratio) else "not a number",
            "cosine": cosine(pair.total.cosine),
        }
        for pair in outcome.survival
    ]
    if not rows:
        return None
    ratios = [row["ratio"] for row in rows]
    chart = model_bars(
        [row["model"] for row in rows],
        x=alt.X("ratio:Q", title="share of the model's delta in the merged one")
        .scale(domain=[min(0.0, *ratios), 1.3 * max(0.01, *ratios)])
        .axis(format="~%", tickCount=5),
        text="label:N",
        tooltip=tooltip_of(
            "model:N",
            ("label:N", "share of its delta"),
            ("cosine:N", "cosine with the merged delta"),
        ),
    )
    columns: Columns = {
        "model": lambda row: row["model"],
        "share of its delta": lambda row: row["label"],
        "cosine with the merged delta": lambda row: row["cosine"],
    }
    return _figure(
        "survival",
        finish(chart, rows, height=max(90, 36 * len(rows))),
        listing(rows, columns),
        shares="; ".join(f"{row['model']} {row['label']}" for row in rows),
    )


# ---------------------------------------------------------------- what figures share


def lines(
    names: Sequence[str],
    *,
    x: Any,
    y: Any,
    tooltip: list[Any],
    points: bool = True,
    shown: Sequence[str] = (),
) -> Any:
    """A line for each model, told apart by colour, dashes and shapes, that can be zoomed.

    If only some have a line, `shown` names them; each has the looks that it has among all.
    """
    legend = legend_of(shown or names)
    colour = by_name(alt.Color, names, legend=legend)
    chart = alt.Chart().encode(x=x, y=y, color=colour, opacity=bright_if(CHOSEN))
    # Dashes by number: by name they would get into the legend, as dashed outlines.
    dashes = alt.Scale(domain=list(range(len(names))), range=repeated(DASHES, len(names)))
    curves = chart.mark_line(aria=False, clip=True, interpolate="monotone")
    curves = curves.encode(strokeDash=alt.StrokeDash("dash:O").scale(dashes).legend(None))
    marks = chart.mark_point(filled=True, size=55 if points else 220, aria=False, clip=True)
    shape = by_name(alt.Shape, names, SHAPES, legend=legend)
    marks = marks.encode(shape=shape, tooltip=tooltip)
    if not points:  # only there to be hovered over
        marks = marks.encode(opacity=alt.value(0))
    return alt.layer(curves, marks.add_params(zoom()))


def model_bars(names: Sequence[str], *, text: Any, **places: Any) -> Any:
    """A bar for each model, with a text behind it."""
    model = model_axis(alt.Y, names)
    chart = alt.Chart().encode(y=model, opacity=bright_if(CHOSEN), **places)
    bars = chart.mark_bar(cornerRadiusEnd=2, aria=False)
    bars = bars.encode(color=by_name(alt.Color, names, legend=None))
    return alt.layer(bars, chart.mark_text(align="left", dx=5, aria=False).encode(text=text))


def legend_of(names: Sequence[str], **looks: Any) -> Any:
    """A legend of models, in as many columns as there is room for."""
    return alt.Legend(columns=room_for(names), values=list(names), labelExpr=MARKED, **looks)


def model_axis(channel: Any, names: Sequence[str], field: str = "model", **looks: Any) -> Any:
    """Models one after the other."""
    return channel(f"{field}:N", title=None, sort=list(names)).axis(
        labelExpr=MARKED, labelLimit=110, labelOverlap=False, **looks
    )


def dashed(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows with the number of their dashes."""
    return [{**row, "dash": names.index(row["model"])} for row in rows]


def layer_names() -> Any:
    """Layers, and what stands outside of them in a short word."""
    label = "datum.label === 'outside' ? 'out' : datum.label"
    x = alt.X("layer:N", title="layer", sort=None)
    return x.axis(labelAngle=0, labelOverlap="greedy", labelExpr=label)


def finish(chart: Any, rows: Sequence[Row], height: int = 280) -> Spec:
    """The chart as Vega-Lite, with the parameters `model` and `left_out`."""
    chosen, left_out = alt.param(name="model", value=""), alt.param(name=LEFT_OUT, value=[])
    return finish_chart(chart.add_params(chosen, left_out), rows, height)
