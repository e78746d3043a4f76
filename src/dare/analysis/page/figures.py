"""The figures: one function for each, from an analysis to a chart with a table of its numbers.

The only module that imports Altair, which writes Vega-Lite; colours come from `themes` when a
figure is shown. Every chart has a parameter `model`, empty at first: the model to bring out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dare.analysis.judge.judgement import Advice
from dare.analysis.judge.limits import limit
from dare.analysis.page import series
from dare.analysis.page.outcome import Outcome
from dare.analysis.page.series import Row
from dare.analysis.page.themes import DASHES, SHAPES
from dare.analysis.page.words import NOTHING, cosine, layer_name, listed, number, share, times
from dare.analysis.results import OUTSIDE, Analysis, ModelAnalysis

Spec = dict[str, Any]

CHOSEN = "!model || datum.model === model"
CHOSEN_PAIR = "!model || datum.model === model || datum.other === model"
FAINT = 0.12
CONTRAST = "luminance(scale('color', datum.{field})) > 0.3 ? '#111417' : '#ffffff'"
"""The colour of text on a cell of a matrix."""
LEAST_SHARE = 0.0005
"""Octaves with fewer of the elements are out of sight until one drags the figure."""
MOST_LAYERS_BESIDE = 48
"""Heat maps with more layers need the whole width."""
WIDE_RANGE = 5
"""Largest over smallest change from which colours follow the logarithm."""


@dataclass(frozen=True)
class Table:
    """Numbers as text; the first of every row says whose they are."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


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
    found = [magnitudes(analysis)] if series.magnitude_rows(analysis) else []
    found += [relative_change(analysis, model) for model in analysis.models if model.cells]
    if analysis.pairs:
        found += [cosines(analysis), conflicts(analysis), *_of_layers(analysis)]
    if series.spectra(analysis):
        found.append(spectra(analysis))
    if series.prediction_rows(analysis):
        found.append(predicted_error(analysis, advice))
    if outcome is not None:
        found += _of_merge(outcome)
    return found


def _of_layers(analysis: Analysis) -> Iterator[Figure]:
    if series.layer_pair_rows(analysis):
        yield layer_cosines(analysis)
    if any(layer != OUTSIDE for layer in analysis.together.by_layer):
        yield cancelled(analysis)


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
    import altair as alt

    rows = _dashed(series.magnitude_rows(analysis), analysis.names)
    kinds = [series.ALL_KINDS, *map(str, series.kinds_of(analysis))]
    kind = alt.param(
        name="kind",
        value=series.ALL_KINDS,
        bind=alt.binding_select(options=kinds, name="Tensors "),
    )
    chart = _lines(
        analysis.names,
        x=alt.X("middle:Q", title="magnitude of a change, |δ|")
        .scale(type="log", domain=_worth_seeing(rows), nice=False)
        .axis(_logarithmic("x")),
        y=alt.Y("share:Q", title="share of all elements").axis(format="~%", tickCount=5),
        tooltip=[
            alt.Tooltip("model:N"),
            alt.Tooltip("from:Q", title="|δ| from", format=".3~g"),
            alt.Tooltip("to:Q", title="below", format=".3~g"),
            alt.Tooltip("share:Q", title="share of elements", format=".2%"),
        ],
    )
    chart = chart.transform_filter("datum.kind === kind").add_params(kind)
    told = ", ".join(
        f"{model.name} {number(model.total.quantiles.p50)}" for model in analysis.models
    )
    return Figure(
        "magnitudes",
        "How large the changes are",
        "The share of elements whose change has which magnitude, in steps of a factor of two. "
        "DARE is at its best where nearly all changes are small. Elements that are not changed "
        "at all are left out.",
        f"Line chart of the magnitudes of changes of {listed(analysis.names)}. Medians: {told}.",
        _finished(chart, rows),
        _magnitude_table(analysis, rows),
        zooms=True,
    )


def _worth_seeing(rows: Sequence[Row]) -> list[float]:
    """The magnitudes to show at first: the tails go on where hardly anything is."""
    found = [row for row in rows if row["share"] >= LEAST_SHARE] or rows
    low = min((row["from"] for row in found), default=1e-6)
    return [low, max((row["to"] for row in found), default=1.0)]


def _magnitude_table(analysis: Analysis, rows: Sequence[Row]) -> Table:
    found = {
        (row["from"], row["to"], row["model"]): row["share"]
        for row in rows
        if row["kind"] == series.ALL_KINDS
    }
    octaves = sorted({(low, high) for low, high, _ in found})
    unchanged = ("not changed", *(share(model.total.sparsity) for model in analysis.models))
    return Table(
        ("|δ| from … to", *analysis.names),
        (
            unchanged,
            *(
                (
                    f"{number(low)} … {number(high)}",
                    *(share(found.get((low, high, name), 0.0)) for name in analysis.names),
                )
                for low, high in octaves
            ),
        ),
    )


def relative_change(analysis: Analysis, model: ModelAnalysis) -> Figure:
    """Where a model differs from the base: layers × kinds."""
    import altair as alt

    rows = series.change_rows(model)
    low, high = series.change_range(analysis)
    scale = alt.Scale(type="log" if high > WIDE_RANGE * low > 0 else "linear", domain=[low, high])
    place = alt.Chart().encode(
        x=alt.X("layer:N", title="layer", sort=None).axis(_layers()),
        y=alt.Y("kind:N", title=None, sort=[str(kind) for kind in series.kinds_of(analysis)]),
        tooltip=[
            alt.Tooltip("layer:N"),
            alt.Tooltip("kind:N"),
            alt.Tooltip("change:Q", title="‖δ‖ / ‖base‖", format=".3~%"),
            alt.Tooltip("largest:Q", title="largest |δ|", format=".3~g"),
            alt.Tooltip("elements:Q", format=","),
        ],
    )
    colour = alt.Color("change:Q", title="‖δ‖ / ‖base‖").scale(scale)
    middle = math.sqrt(low * high) if scale.type == "log" else (low + high) / 2
    colour = colour.legend(
        format=".2~%", gradientLength=180, gradientThickness=10, values=[low, middle, high]
    )
    chart = alt.layer(
        place.mark_rect(fill="transparent", strokeWidth=1, strokeOpacity=0.4, stroke="#888"),
        place.mark_rect(cornerRadius=2).transform_filter("datum.change > 0").encode(color=colour),
    )
    kinds = len({row["kind"] for row in rows})
    largest = max(rows, key=lambda row: row["change"] or 0.0, default=None)
    told = ""
    if largest is not None and largest["change"]:
        told = (
            f" The largest is {share(largest['change'])}, "
            f"{largest['kind']} in layer {largest['layer']}."
        )
    return Figure(
        f"change-{analysis.names.index(model.name) + 1}",
        f"Where {model.name} differs from the base",
        f"The size of its change beside that of the weights: {share(model.total.relative_norm)} "
        "over all. An empty cell has no change; “out” stands for tensors of no layer.",
        f"Heat map of the relative change of {model.name}, layers by kinds.{told}",
        _finished(chart, rows, height=30 * kinds + 10),
        _change_table(analysis, model),
        models=(model.name,),
        width=_width_of_maps(analysis),
    )


def _width_of_maps(analysis: Analysis) -> float:
    """Two or three beside each other, where there are not too many layers."""
    count = len(analysis.models)
    if count == 1 or len(analysis.layers) > MOST_LAYERS_BESIDE:
        return 1.0
    return 1 / 3 if count % 3 == 0 else 1 / 2


def _change_table(analysis: Analysis, model: ModelAnalysis) -> Table:
    kinds = series.kinds_of(analysis)
    cells = {(cell.layer, cell.kind): cell.statistics.relative_norm for cell in model.cells}
    return Table(
        ("layer", *map(str, kinds)),
        tuple(
            (layer_name(layer), *(share(cells.get((layer, kind))) for kind in kinds))
            for layer in sorted({layer for layer, _ in cells})
        ),
    )


def spectra(analysis: Analysis) -> Figure:
    """In how many directions the changes go."""
    import altair as alt

    rows = series.spectrum_rows(analysis)
    tensors = series.spectra(analysis)
    available = sum(1 for model in analysis.models for each in model.tensors if each.spectrum)
    near = alt.selection_point(
        name="near", fields=["line"], on="pointerover", nearest=True, empty=False
    )
    lines = (
        alt.Chart()
        .mark_line(strokeWidth=1.5, aria=False)
        .encode(
            x=alt.X("rank:Q", title="direction, the strongest first")
            .scale(type="log", nice=False)
            .axis(_logarithmic("x")),
            y=alt.Y("value:Q", title="singular value beside the largest")
            .scale(type="log")
            .axis(_logarithmic("y")),
            color=_model_colour(analysis.names, _strokes(analysis.names)),
            strokeDash=alt.StrokeDash("model:N", title=None, sort=list(analysis.names))
            .scale(domain=list(analysis.names), range=_repeated(DASHES, len(analysis.names)))
            .legend(_strokes(analysis.names)),
            detail="line:N",
            opacity=alt.when(near)
            .then(alt.value(1))
            .when(CHOSEN)
            .then(alt.value(0.45))
            .otherwise(alt.value(FAINT / 2)),
        )
    )
    points = lines.mark_point(size=30, opacity=0, aria=False).encode(
        opacity=alt.value(0),
        strokeDash=alt.Undefined,
        tooltip=[
            alt.Tooltip("model:N"),
            alt.Tooltip("tensor:N"),
            alt.Tooltip("rank:Q", title="direction"),
            alt.Tooltip("value:Q", title="σ / σ₁", format=".3~g"),
            alt.Tooltip("effective:Q", title="effective rank", format=".3~g"),
            alt.Tooltip("of:Q", title="of", format=","),
            alt.Tooltip("outliers:Q", title="above the noise"),
        ],
    )
    chart = alt.layer(lines, points.add_params(near)).transform_flatten(["rank", "value"])
    chart = chart.add_params(_zoom())
    shown = f" Shown are {len(rows)} of {available}." if len(rows) < available else ""
    return Figure(
        "spectra",
        "How many directions the changes have",
        "One line for each matrix: the singular values of its delta. A line that ends early or "
        f"falls off a cliff is a change of low rank, as a LoRA's is.{shown}",
        f"Line chart of the singular values of {times(len(rows), 'matrix', 'matrices')} of "
        f"{listed(analysis.names)}.",
        _finished(chart, rows, height=300),
        Table(
            (
                "matrix",
                "model",
                "shape",
                "effective rank",
                "stable rank",
                "rank for 99%",
                "above the noise",
                "their share",
            ),
            tuple(
                (
                    tensor.name,
                    model,
                    f"{found.rows}×{found.columns}",
                    number(found.effective_rank),
                    number(found.stable_rank),
                    f"{found.rank_99:,}",
                    f"{found.outliers:,}",
                    share(found.outlier_share),
                )
                for model, tensor in tensors
                if (found := tensor.spectrum)
            ),
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
        Table(
            ("models", "cosine", "multiple of the first nearest to the second"),
            tuple(
                (series.pair_name(pair), cosine(pair.total.cosine), number(pair.ratio))
                for pair in analysis.pairs
            ),
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
        Table(
            (
                "models",
                "in opposite directions",
                "elements both change",
                "of the top 1%: shared",
                "of those: opposite",
            ),
            tuple(
                (
                    series.pair_name(pair),
                    share(pair.total.conflict),
                    f"{pair.total.both:,}",
                    share(pair.total.top_overlap),
                    share(pair.total.top_conflict),
                )
                for pair in analysis.pairs
            ),
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
    import altair as alt

    rows = series.pair_rows(analysis)
    place = alt.Chart().encode(
        x=alt.X("other:N", title=None, sort=list(analysis.names)).axis(
            orient="top", labelAngle=0 if len(analysis.names) <= 4 else -40, labelLimit=100
        ),
        y=alt.Y("model:N", title=None, sort=list(analysis.names)).axis(labelLimit=100),
        opacity=alt.when(CHOSEN_PAIR).then(alt.value(1)).otherwise(alt.value(FAINT)),
        tooltip=[
            alt.Tooltip("model:N", title="model"),
            alt.Tooltip("other:N", title="and"),
            alt.Tooltip("cosine:Q", format="+.4f"),
            alt.Tooltip("conflict:Q", title="in opposite directions", format=".2%"),
            alt.Tooltip("both:Q", title="elements both change", format=","),
        ],
    )
    scale = alt.Scale(domain=list(domain), range=colours)
    cells = place.mark_rect(cornerRadius=3).encode(
        color=alt.Color(f"{field}:Q", title=title)
        .scale(scale)
        .legend(format=shown_as, gradientLength=160, gradientThickness=10, tickCount=4)
    )
    texts = place.mark_text(
        fontSize=13, color=alt.expr(CONTRAST.format(field=field)), aria=False
    ).encode(text=alt.Text(f"{field}:Q", format=shown_as))
    layers = alt.layer(cells, texts)
    return _finished(layers, rows, height=max(140, 52 * len(analysis.names)))


def layer_cosines(analysis: Analysis) -> Figure:
    """Where every two models change the same way."""
    import altair as alt

    pairs = series.closest_pairs(analysis)
    names = [series.pair_name(pair) for pair in pairs]
    rows = _dashed(series.layer_pair_rows(analysis), names, "pair")
    lines = (
        alt.Chart()
        .mark_line(aria=False)
        .encode(
            x=alt.X("layer:Q", title="layer")
            .scale(padding=12, nice=False, zero=False)
            .axis(tickMinStep=1, format="d"),
            y=alt.Y("cosine:Q", title="cosine").axis(format="+.2~g", tickCount=5),
            color=alt.Color("pair:N", title=None, sort=names)
            .scale(domain=names)
            .legend(_columns(names)),
            strokeDash=_dash(names),
            opacity=alt.when(CHOSEN_PAIR).then(alt.value(1)).otherwise(alt.value(FAINT)),
        )
    )
    points = lines.mark_point(filled=True, size=55, aria=False).encode(
        strokeDash=alt.Undefined,
        shape=alt.Shape("pair:N", title=None, sort=names)
        .scale(domain=names, range=_repeated(SHAPES, len(names)))
        .legend(_columns(names)),
        tooltip=[
            alt.Tooltip("pair:N", title="models"),
            alt.Tooltip("layer:Q"),
            alt.Tooltip("cosine:Q", format="+.4f"),
            alt.Tooltip("conflict:Q", title="in opposite directions", format=".2%"),
        ],
    )
    shown = (
        f" Shown are the {len(pairs)} closest pairs." if len(pairs) < len(analysis.pairs) else ""
    )
    zero = alt.Chart().mark_rule(strokeDash=[2, 3], aria=False).encode(y=alt.datum(0))
    found = {
        (series.pair_name(pair), layer): overlap.cosine
        for pair in pairs
        for layer, overlap in pair.by_layer.items()
    }
    return Figure(
        "layer-cosines",
        "Where they meet",
        "The same cosine layer by layer: where models that learned different things share a "
        f"change, or fight over one.{shown}",
        f"Line chart of cosines over layers, for {times(len(names), 'pair')} of models.",
        _finished(alt.layer(zero, lines, points), rows, height=240),
        Table(
            ("layer", *names),
            tuple(
                (
                    layer_name(layer),
                    *(
                        cosine(found[name, layer]) if (name, layer) in found else NOTHING
                        for name in names
                    ),
                )
                for layer in sorted({layer for _, layer in found})
            ),
        ),
    )


def cancelled(analysis: Analysis) -> Figure:
    """What a merge of all models would lose, layer by layer."""
    import altair as alt

    rows = series.cancelled_rows(analysis)
    chart = (
        alt.Chart()
        .mark_bar(cornerRadiusEnd=2, aria=False)
        .encode(
            x=alt.X("layer:N", title="layer", sort=None).axis(_layers()),
            y=alt.Y("cancelled:Q", title="cancelled").axis(format="~%", tickCount=5),
            tooltip=[
                alt.Tooltip("layer:N"),
                alt.Tooltip("cancelled:Q", format=".2%"),
            ],
        )
    )
    whole = alt.Chart().mark_rule(strokeDash=[4, 3], size=1.5, aria=False)
    whole = whole.encode(y=alt.datum(analysis.together.cancelled))
    told = share(analysis.together.cancelled)
    return Figure(
        "cancelled",
        "What adding them up would lose",
        "The share of all changes that cancels out when the models are added up as they are. "
        f"The dashed line is the whole: {told}.",
        f"Bar chart over layers of the share of changes that cancel out; {told} over all.",
        _finished(alt.layer(chart, whole), rows, height=200),
        Table(
            ("layer", "cancelled"),
            (
                ("all", told),
                *((row["layer"], share(row["cancelled"])) for row in rows),
            ),
        ),
    )


# ---------------------------------------------------------------- drop rates


def predicted_error(analysis: Analysis, advice: Advice) -> Figure:
    """What DARE would do at which drop rate, and the rate that is advised."""
    import altair as alt

    rows = _dashed(series.prediction_rows(analysis), analysis.names)
    advised = _dashed(series.suggestion_rows(analysis, advice), analysis.names)
    y = (
        alt.Y("error:Q", title="expected error of a layer's outputs")
        .scale(type="log", nice=False)
        .axis(_logarithmic("y", percent=True))
    )
    tooltip = [
        alt.Tooltip("model:N"),
        alt.Tooltip("rate:Q", title="drop rate"),
        alt.Tooltip("error:Q", title="error of outputs", format=".3~%"),
        alt.Tooltip("relative:Q", title="error beside the delta", format=".3~%"),
    ]
    x = alt.X("rate:Q", title="drop rate").scale(domain=[0, 1]).axis(tickCount=10, grid=True)
    bound = limit("output_error")
    curves = _lines(analysis.names, x=x, y=y, tooltip=tooltip, points=False)
    marks = [
        layer
        for turn, dy in enumerate((-17, 19))  # above and below: curves lie close to each other
        if (rows_of_turn := [row for row in advised if row["dash"] % 2 == turn])
        for layer in _marked_points(rows_of_turn, analysis.names, x=x, y=y, tooltip=tooltip, dy=dy)
    ]
    rule = alt.Chart({"values": [{"told": f"bound {bound:.0%}"}]})
    line = rule.mark_rule(strokeDash=[4, 3], size=1.5, aria=False).encode(y=alt.datum(bound))
    note = rule.mark_text(align="left", baseline="bottom", dx=4, dy=-3, aria=False)
    note = note.encode(x=alt.datum(0), y=alt.datum(bound), text="told:N")
    told = ", ".join(
        f"{row['model']} {row['rate']:g} (error {share(row['error'])})" for row in advised
    )
    return Figure(
        "predicted-error",
        "What a drop rate costs",
        "The error that DARE is expected to bring to the outputs of a layer, beside the base's: "
        "√(p / (1 - p)) times the relative change, p being the drop rate. "
        "The dashed line is the error that a merge is taken to bear. "
        + ("The marks are the rates that are advised." if advised else "No rate is advised."),
        f"Line chart of the expected error over drop rates, for {listed(analysis.names)}."
        + (f" Advised: {told}." if told else ""),
        _finished(alt.layer(line, note, curves, *marks), rows, height=320),
        _prediction_table(analysis, advice),
        zooms=True,
    )


def _marked_points(
    rows: Sequence[Row], names: tuple[str, ...], *, x: Any, y: Any, tooltip: list[Any], dy: int
) -> tuple[Any, Any]:
    """Points that are set off, with the rate beside them."""
    import altair as alt

    chart = alt.Chart({"values": rows}).encode(x=x, y=y, tooltip=tooltip, opacity=_chosen_opacity())
    points = chart.mark_point(filled=True, size=170, strokeWidth=2, aria=False)
    labels = chart.mark_text(fontWeight=600, dy=dy, aria=False)
    return (
        points.encode(color=_model_colour(names), shape=_model_shape(names)),
        labels.encode(text=alt.Text("rate:Q", format=".2~f")),
    )


def _prediction_table(analysis: Analysis, advice: Advice) -> Table:
    rates = series.suggested_rates(analysis, advice)
    told = [
        (model, series.prediction_row(model, rate), rate == rates.get(model.name))
        for model in analysis.models
        for rate in sorted({*series.TOLD_RATES, *rates.values()})
    ]
    return Table(
        ("drop rate", "model", "error beside the delta", "error of outputs", ""),
        tuple(
            (
                f"{row['rate']:g}",
                model.name,
                share(row["relative"]),
                share(row["error"]),
                "advised" if is_advised else "",
            )
            for model, row, is_advised in told
        ),
    )


# ---------------------------------------------------------------- after a merge


def kept(outcome: Outcome) -> Figure:
    """What each stage left of each model."""
    import altair as alt

    rows = series.kept_rows(outcome)
    names = tuple(model.name for model in outcome.models)
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    chart = alt.Chart().encode(
        x=alt.X("kept:Q", title="elements left")
        .scale(domain=[0, 1.15])  # room for what is written behind a bar
        .axis(format="~%", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
        y=alt.Y("model:N", title=None, sort=list(names)),
        yOffset=alt.YOffset("stage:N", sort=stages),
        opacity=_chosen_opacity(),
        tooltip=[
            alt.Tooltip("model:N"),
            alt.Tooltip("stage:N", title="after"),
            alt.Tooltip("kept:Q", title="left", format=".3%"),
        ],
    )
    bars = chart.mark_bar(cornerRadiusEnd=2, aria=False).encode(color=_model_colour(names, None))
    texts = chart.mark_text(align="left", dx=5, aria=False).encode(text="told:N")
    rows = [{**row, "told": f"{row['stage']}  {share(row['kept'])}"} for row in rows]
    return Figure(
        "kept",
        "What was kept",
        "The share of each model's elements that is left after each delta stage.",
        "Bar chart of the share of elements kept. "
        + "; ".join(f"{row['model']} after {row['told']}" for row in rows)
        + ".",
        _finished(alt.layer(bars, texts), rows, height=max(100, 30 * len(rows))),
        Table(
            ("model", "stage", "elements left"),
            tuple((row["model"], row["stage"], share(row["kept"])) for row in rows),
        ),
    )


def kept_by_layer(outcome: Outcome) -> Figure:
    """What all stages left of each model, layer by layer."""
    import altair as alt

    names = tuple(model.name for model in outcome.models)
    rows = _dashed(series.kept_layer_rows(outcome), names)
    chart = _lines(
        names,
        x=alt.X("layer:Q", title="layer")
        .scale(padding=12, nice=False, zero=False)
        .axis(tickMinStep=1, format="d"),
        y=alt.Y("kept:Q", title="elements left").axis(format="~%", tickCount=5),
        tooltip=[
            alt.Tooltip("model:N"),
            alt.Tooltip("layer:Q"),
            alt.Tooltip("kept:Q", title="left", format=".3%"),
        ],
    )
    layers = sorted({layer for model in outcome.models for layer in model.kept_by_layer})
    return Figure(
        "kept-by-layer",
        "What was kept in each layer",
        "The share of elements that is left after all delta stages.",
        f"Line chart over layers of the share of elements kept of {listed(names)}.",
        _finished(chart, rows, height=220),
        Table(
            ("layer", *names),
            tuple(
                (
                    layer_name(layer),
                    *(share(model.kept_by_layer.get(layer)) for model in outcome.models),
                )
                for layer in layers
            ),
        ),
    )


def survival(outcome: Outcome) -> Figure:
    """How much of each model's delta is in the merged one."""
    import altair as alt

    rows = series.survival_rows(outcome)
    names = tuple(row["model"] for row in rows)
    ratios = [row["ratio"] or 0.0 for row in rows]
    chart = alt.Chart().encode(
        x=alt.X("ratio:Q", title="share of the model's delta in the merged one")
        .scale(domain=[min(0.0, *ratios), 1.3 * max(0.01, *ratios)])
        .axis(format="~%", tickCount=5),
        y=alt.Y("model:N", title=None, sort=list(names)),
        opacity=_chosen_opacity(),
        tooltip=[
            alt.Tooltip("model:N"),
            alt.Tooltip("ratio:Q", title="share of its delta", format=".2%"),
            alt.Tooltip("cosine:Q", title="cosine with the merged delta", format="+.3f"),
        ],
    )
    bars = chart.mark_bar(cornerRadiusEnd=2, aria=False).encode(color=_model_colour(names, None))
    texts = chart.mark_text(align="left", dx=5, aria=False).encode(
        text=alt.Text("ratio:Q", format=".1%")
    )
    told = "; ".join(f"{row['model']} {share(row['ratio'])}" for row in rows)
    return Figure(
        "survival",
        "How far each model survived",
        "How much of each model's delta is in the merged one: the multiple of it that comes "
        "nearest to the merged delta. A plain mean of unrelated models keeps one part in their "
        "number.",
        f"Bar chart of the share of each model's delta in the merged one: {told}.",
        _finished(alt.layer(bars, texts), rows, height=max(90, 44 * len(rows))),
        Table(
            ("model", "share of its delta", "cosine with the merged delta"),
            tuple((row["model"], share(row["ratio"]), cosine(row["cosine"])) for row in rows),
        ),
    )


# ---------------------------------------------------------------- what charts share


def _lines(
    names: tuple[str, ...],
    *,
    x: Any,
    y: Any,
    tooltip: list[Any],
    points: bool = True,
) -> Any:
    """A line for each model, told apart by colour, dashes and shapes; it can be zoomed."""
    import altair as alt

    chart = alt.Chart().encode(x=x, y=y, color=_model_colour(names), opacity=_chosen_opacity())
    lines = chart.mark_line(interpolate="monotone", aria=False, clip=True)
    lines = lines.encode(strokeDash=_dash(names))
    size = 55 if points else 220
    marks = chart.mark_point(filled=True, size=size, aria=False, clip=True).encode(
        shape=_model_shape(names), tooltip=tooltip
    )
    if not points:  # only there to be hovered over
        marks = marks.encode(opacity=alt.value(0))
    return alt.layer(lines, marks.add_params(_zoom()))


def _model_colour(names: tuple[str, ...], legend: Any = ...) -> Any:
    import altair as alt

    shown = _columns(names) if legend is ... else legend
    return (
        alt.Color("model:N", title=None, sort=list(names)).scale(domain=list(names)).legend(shown)
    )


def _dash(names: Sequence[str]) -> Any:
    """Dashes by number: by name they would get into the legend, as dashed outlines."""
    import altair as alt

    numbers = list(range(len(names)))
    scale = alt.Scale(domain=numbers, range=_repeated(DASHES, len(names)))
    return alt.StrokeDash("dash:O").scale(scale).legend(None)


def _model_shape(names: tuple[str, ...]) -> Any:
    import altair as alt

    scale = alt.Scale(domain=list(names), range=_repeated(SHAPES, len(names)))
    shape = alt.Shape("model:N", title=None, sort=list(names)).scale(scale)
    return shape.legend(_columns(names))


def _dashed(rows: Sequence[Row], names: Sequence[str], field: str = "model") -> list[Row]:
    """The rows with the number of their dashes."""
    return [{**row, "dash": names.index(row[field])} for row in rows]


def _repeated(values: Sequence[Any], count: int) -> list[Any]:
    return [values[place % len(values)] for place in range(count)]


def _chosen_opacity() -> Any:
    import altair as alt

    return alt.when(CHOSEN).then(alt.value(1)).otherwise(alt.value(FAINT))


def _columns(names: Sequence[str]) -> Any:
    """A legend with as many columns as there is room for."""
    import altair as alt

    return alt.Legend(columns=_room_for(names))


def _room_for(names: Sequence[str]) -> Any:
    import altair as alt

    pixels = min(190, 50 + 8 * max(map(len, names), default=0))  # labels are cut at 150
    return alt.expr(f"max(1, floor(width / {pixels}))")


def _strokes(names: Sequence[str]) -> Any:
    """A legend of lines, for charts without points."""
    import altair as alt

    return alt.Legend(columns=_room_for(names), symbolType="stroke", symbolSize=300)


def _layers() -> Any:
    """An axis of layers, and of what stands outside, in a short word."""
    import altair as alt

    return alt.Axis(
        labelAngle=0,
        labelOverlap="greedy",
        labelExpr="datum.label === 'outside' ? 'out' : datum.label",
    )


def _logarithmic(scale: str, *, percent: bool = False) -> Any:
    """A logarithmic axis with labels at powers of ten; also at 2 and 5 if it is short."""
    import altair as alt

    mantissa = "datum.value / pow(10, floor(log(datum.value * 1.0001) / LN10))"
    short = f"domain('{scale}')[1] < 1001 * domain('{scale}')[0]"
    plain = "datum.value > 0.0009 && datum.value < 90000"
    text = f"format(datum.value, {plain} ? '~g' : '~e')"
    if percent:
        text = "format(datum.value, '~%')"
    told = f"indexof({short} ? [1, 2, 5] : [1], round({mantissa})) >= 0"
    power = f"round({mantissa}) === 1"
    return alt.Axis(
        labelExpr=f"{told} ? {text} : ''",
        labelOverlap=False,
        grid=True,
        gridOpacity=alt.when(power).then(alt.value(1)).otherwise(alt.value(0.3)),
        ticks=False,
        labelPadding=6,
    )


def _zoom() -> Any:
    """Zoom with shift and the wheel, so that scrolling the page stays what it is."""
    import altair as alt

    return alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.shiftKey]")


def _finished(chart: Any, rows: Sequence[Row], height: int = 280) -> Spec:
    """The chart as Vega-Lite, as wide as its place, with the parameter `model`."""
    import altair as alt

    whole = chart.properties(
        data={"values": rows},
        width="container",
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    ).add_params(alt.param(name="model", value=""))
    spec: Spec = whole.to_dict()
    del spec["config"]
    return spec
