"""The figures of an analysis: rows of values, and a chart with a table of its numbers for each.

A function that draws returns None if there is nothing to draw. The texts are in `figures.toml`,
colours come from the theme when a figure is shown. Every chart has a parameter `model`, empty at
first: the model to highlight. A value that is not finite becomes None, which figures leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dare.analysis.advice import Advice
from dare.analysis.prediction import exposures_of, mean_bounded_error
from dare.analysis.readiness import cancelled_by_chance, chance_cancelled
from dare.analysis.results import (
    OUTSIDE,
    AnalysisData,
    Kind,
    ModelAnalysis,
    Origin,
    Outcome,
    Spectrum,
    Statistics,
)
from dare.checks.dropping import relative_error
from dare.checks.sample import evenly_spread
from dare.documents.charts import (
    DASHES,
    FAINT,
    SHAPES,
    alt,
    bright_if,
    by_name,
    fill_table,
    finish_chart,
    logarithmic,
    make_figure,
    read_texts,
    repeated,
    room_for,
    rows_named,
    tooltip_of,
    zoom,
)
from dare.documents.document import Figure, Row, Spec, Table, finite
from dare.documents.notices import LIMIT
from dare.documents.words import NOTHING, counted, listed, number, share
from dare.errors import InputError

ALL_KINDS = "all"
# Octaves with a smaller share of the elements are out of sight until one drags the figure.
LEAST_SHARE = 0.0005
MOST_MAPS = 4  # models with a heat map each; for more, there is one of all, and theirs are folded
MOST_LAYERS_BESIDE = 48  # heat maps with more layers need the whole width
# The most matrices whose spectra are drawn, of all models together and of one.
MOST_SPECTRA, MOST_SPECTRA_OF_A_MODEL = 96, 24
# Singular values below this share of the largest are not drawn: a LoRA's line just ends.
FAINTEST = 1e-4
# The most models with large cells, and with a number in each cell; else only notable ones have it.
MOST_LARGE_CELLS, MOST_NUMBERED = 5, 16
NOISE = 0.05  # shares that differ by less look the same, and their figures are folded
# The least ratio between the ends of a scale of changes, so that noise looks like noise.
LEAST_RANGE = 2.0
LABEL_HEIGHT = 14  # pixels between names at the ends of lines
WIDE_RANGE = 5  # largest over smallest change from which colours follow the logarithm
RATES = tuple(percent / 100 for percent in range(1, 100))
TABLE_RATES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
CHOSEN = "!model || datum.model === model"
CHOSEN_PAIR = f"{CHOSEN} || datum.other === model"
CONTRAST = "luminance(scale('color', datum.{field})) > 0.3 ? '#111417' : '#ffffff'"
LEFT_OUT = "left_out"  # the parameter with the names of models that the advice does not merge
# A model's name on an axis or in a legend, with a sign before those that are left out.
MARKED = f"(indexof({LEFT_OUT}, datum.label) >= 0 ? '⚠ ' : '') + datum.label"
TEXTS = read_texts("dare.analysis")
_figure = partial(make_figure, TEXTS)


def draw_figures(
    analysis: AnalysisData, advice: Advice, outcome: Outcome | None = None
) -> list[Figure]:
    """Draw all figures for which there are data."""
    if not analysis.models:
        raise InputError("the analysis has no models: there is nothing to show")
    drawn = [
        predicted_error(analysis, advice),
        *(draw(analysis) for draw in (cosines, conflicts, cancelled, changes)),
        *(relative_change(analysis, model) for model in analysis.models),
        magnitudes(analysis),
        spectra(analysis),
        *((survival(outcome), kept(outcome)) if outcome is not None else ()),
    ]
    figures = [figure for figure in drawn if figure is not None]
    for figure in figures:
        for parameter in figure.spec["params"]:
            if parameter["name"] == LEFT_OUT:
                parameter["value"] = list(advice.left_out)
    return figures


def _tooltip(name: str) -> list[Any]:
    return tooltip_of(*map(tuple, TEXTS[name]["tooltip"]))


# ---------------------------------------------------------------- one model


def magnitudes(analysis: AnalysisData) -> Figure | None:
    """Draw how large the changes of each model are."""
    names = analysis.names
    rows = _dashed(magnitude_rows(analysis), names)
    if not rows:
        return None
    picker = alt.binding_select(options=[ALL_KINDS, *_kinds(analysis)], name="Tensors ")
    frequent = [row for row in rows if row["share"] >= LEAST_SHARE] or rows  # without long tails
    domain = [min(row["from"] for row in frequent), max(row["to"] for row in frequent)]
    x = alt.X("middle:Q", title="magnitude of a change, |δ|")
    x = x.scale(type="log", domain=domain, nice=False).axis(logarithmic("x"))
    y = alt.Y("share:Q", title="share of all elements").axis(format="~%", tickCount=5)
    chart = _lines("magnitudes", names, x, y).transform_filter("datum.kind === kind")
    chart = chart.add_params(alt.param(name="kind", value=ALL_KINDS, bind=picker))
    medians = [f"{model.name} {number(model.total.quantiles.p50)}" for model in analysis.models]
    of_all = [row for row in rows if row["kind"] == ALL_KINDS]
    shares = {(row["from"], row["to"], row["model"]): row["share"] for row in of_all}
    cells = [
        (f"{number(low)} … {number(high)}", *(share(shares.get((low, high, n), 0)) for n in names))
        for low, high in sorted({(low, high) for low, high, _ in shares})
    ]
    unchanged = ("not changed", *(share(model.total.sparsity) for model in analysis.models))
    table = Table(("|δ| from … to", *(f"{name} >" for name in names)), (unchanged, *cells))
    texts = {"names": listed(names), "medians": ", ".join(medians)}
    return _figure("magnitudes", _finish(chart, rows), table, **texts)


def magnitude_rows(analysis: AnalysisData) -> list[Row]:
    """Return the share of elements in each octave of magnitude, in all and for each kind."""
    rows = []
    for model in analysis.models:
        for kind, found in ((ALL_KINDS, model.total), *model.by_kind.items()):
            counts, lowest = found.histogram.counts, found.histogram.lowest
            filled = [place for place, count in enumerate(counts) if count]
            for place in range(filled[0], filled[-1] + 1) if filled else ():
                ends = [finite(2.0 ** (lowest + place + part)) for part in (0, 1, 0.5)]
                known = dict(zip(("from", "to", "middle"), ends, strict=True))
                part = finite(counts[place] / found.elements)
                rows.append({"model": model.name, "kind": str(kind), **known, "share": part})
    return rows


def changes(analysis: AnalysisData) -> Figure | None:
    """Draw where each of many models differs from the base: models × layers."""
    if len(analysis.models) <= MOST_MAPS or len(analysis.layers) == 1:
        return None
    by_model = {model.name: model.by_layer for model in analysis.models}
    rows = [
        {"model": name, **_change(layer, found)}
        for name, by_layer in by_model.items()
        for layer, found in sorted(by_layer.items())
    ]
    largest = max(rows, key=lambda row: row["change"] or 0.0)
    chart = _change_map("changes", change_domain(rows), _model_axis(alt.Y, analysis.names))
    return _figure(
        "changes",
        _finish(chart, rows, 24 * len(analysis.models) + 10),
        _layer_table(by_model),
        names=listed(analysis.names),
        peak=f"{share(largest['change'])}, {largest['model']} in layer {largest['layer']}",
    )


def relative_change(analysis: AnalysisData, model: ModelAnalysis) -> Figure | None:
    """Draw where a model differs from the base: layers × kinds, if there are several cells."""
    rows, kinds = change_rows(model), _kinds(analysis)
    if len(rows) < 2:
        return None
    axis = alt.Y("kind:N", title=None, sort=kinds)
    everywhere = [row for each in analysis.models for row in change_rows(each)]
    chart = _change_map("change", change_domain(everywhere), axis)
    largest = max(rows, key=lambda row: row["change"] or 0.0)
    where = f"{largest['kind']} in layer {largest['layer']}"
    peak = f" The largest is {share(largest['change'])}, {where}." if largest["change"] else ""
    by_kind = {
        kind: {cell.layer: cell.statistics for cell in model.cells if cell.kind == kind}
        for kind in kinds
    }
    figure = _figure(
        "change",
        _finish(chart, rows, height=30 * len({row["kind"] for row in rows}) + 10),
        _layer_table(by_kind),
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


def change_rows(model: ModelAnalysis) -> list[Row]:
    """Return how far each kind in each layer is from the base."""
    return [
        {"kind": str(cell.kind), **_change(cell.layer, cell.statistics)}
        for cell in sorted(model.cells, key=lambda cell: cell.layer)
    ]


def _change(layer: int, found: Statistics) -> Row:
    return {
        "layer": layer_name(layer),
        "change": finite(found.relative_norm),
        "largest": finite(found.largest),
        "elements": found.elements,
    }


def change_domain(rows: Iterable[Row]) -> list[float]:
    """Return the least and the largest change, moved apart if they are too close."""
    changes = [row["change"] for row in rows if row["change"]]
    if not changes:
        return [0.0, 1.0]
    low, high = min(changes), max(changes)
    if high < LEAST_RANGE * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(LEAST_RANGE), middle * math.sqrt(LEAST_RANGE)
    return [low, high]


def _change_map(name: str, domain: list[float], y: Any) -> Any:
    """Draw relative changes over layers as colours."""
    low, high = domain
    scale = alt.Scale(type="log" if high > WIDE_RANGE * low > 0 else "linear", domain=domain)
    middle = math.sqrt(low * high) if scale.type == "log" else (low + high) / 2
    place = alt.Chart().encode(x=_layer_axis(), y=y, tooltip=_tooltip(name))
    colour = alt.Color("change:Q", title="‖δ‖ / ‖base‖").scale(scale)
    colour = colour.legend(
        format=".2~%", gradientLength=180, gradientThickness=10, values=[low, middle, high]
    )
    return alt.layer(
        place.mark_rect(fill="transparent", strokeWidth=1, strokeOpacity=0.4, stroke="#888"),
        place.mark_rect(cornerRadius=2).transform_filter("datum.change > 0").encode(color=colour),
    )


def _layer_table(columns: Mapping[str, Mapping[int, Statistics]]) -> Table:
    """Return a table of the changes in each layer."""
    found = columns.values()
    rows = tuple(
        (layer_name(n), *(share(c[n].relative_norm) if n in c else NOTHING for c in found))
        for n in sorted({layer for by_layer in found for layer in by_layer})
    )
    return Table(("layer", *(f"{name} >" for name in columns)), rows)


def spectra(analysis: AnalysisData) -> Figure | None:
    """Draw how many directions the changes have."""
    names, chosen = analysis.names, choose_spectra(analysis)
    if not chosen:
        return None
    rows = [_spectrum_row(line, *each) for line, each in enumerate(chosen)]
    available = sum(1 for model in analysis.models for tensor in model.tensors if tensor.spectrum)
    # Not `nearest`: the cells that Vega adds for it would have tooltips without values.
    near = alt.selection_point(name="near", fields=["line"], on="pointerover", empty=False)
    legend = _legend(names, symbolType="stroke", symbolSize=300)
    opacity = alt.when(near).then(alt.value(1)).when(CHOSEN).then(alt.value(0.45))
    x = alt.X("rank:Q", title="direction, the strongest first").scale(type="log", nice=False)
    y = alt.Y("value:Q", title="singular value, relative to the largest").scale(type="log")
    places = {"x": x.axis(logarithmic("x")), "y": y.axis(logarithmic("y")), "detail": "line:N"}
    chart = alt.Chart().encode(color=by_name(alt.Color, names, legend=legend), **places)
    lines = chart.mark_line(strokeWidth=1.5, aria=False).encode(
        strokeDash=by_name(alt.StrokeDash, names, DASHES, legend=legend),
        opacity=opacity.otherwise(alt.value(FAINT / 2)),
    )
    points = chart.mark_point(filled=True, size=60, aria=False).encode(
        opacity=alt.value(0), tooltip=_tooltip("spectra")
    )
    layers = alt.layer(lines, points.add_params(near)).transform_flatten(["rank", "value"])
    figure = _figure(
        "spectra",
        _finish(layers.add_params(zoom()), rows, height=300),
        chosen,
        names=listed(names),
        matrices=counted(len(rows), "matrix", "matrices"),
        shown=f" Shown are {len(rows)} of {available}." if len(rows) < available else "",
    )
    low_rank = any(model.origin is Origin.LORA for model in analysis.models)
    return replace(figure, folded=not low_rank)


def choose_spectra(analysis: AnalysisData) -> list[tuple[str, str, Spectrum]]:
    """Return model, matrix and spectrum of a limited number, evenly spread over each model."""
    most = min(MOST_SPECTRA_OF_A_MODEL, max(1, MOST_SPECTRA // max(1, len(analysis.models))))
    chosen = []
    for model in analysis.models:
        known = [
            (model.name, tensor.name, tensor.spectrum)
            for tensor in model.tensors
            if tensor.spectrum and any(tensor.spectrum.values)
        ]
        chosen += [known[place] for place in evenly_spread(len(known), most)]
    return chosen


def _spectrum_row(line: int, model: str, tensor: str, spectrum: Spectrum) -> Row:
    """Return one matrix; ranks and singular values as lists, relative to the largest."""
    values = [value / spectrum.values[0] for value in spectrum.values]
    drawn = [finite(value) for value in values if value > FAINTEST]
    return {
        "model": model,
        "tensor": tensor,
        "line": line,
        "rank": list(spectrum.ranks[: len(drawn)]),
        "value": drawn,
        "effective": finite(spectrum.effective_rank),
        "of": min(spectrum.rows, spectrum.columns),
        "outliers": spectrum.outliers,
    }


# ---------------------------------------------------------------- two models and all


def cosines(analysis: AnalysisData) -> Figure | None:
    """Draw the cosine of every two models' changes."""
    colour = alt.Color("cosine:Q", title="cosine").scale(domain=[-1, 1], range="diverging")
    return _matrix(analysis, "cosines", colour, "+.2f", 0.0, LIMIT.apart_cosine)


def conflicts(analysis: AnalysisData) -> Figure | None:
    """Draw the share of elements in which every two models disagree."""
    colour = alt.Color("conflict:Q", title="opposite (chance: 50%)")
    colour = colour.scale(domain=[0, 1], range="diverging", reverse=True)
    return _matrix(analysis, "conflicts", colour, ".0%", 0.5, LIMIT.conflict - 0.5)


def _matrix(
    analysis: AnalysisData, name: str, colour: Any, form: str, chance: float, notable: float
) -> Figure | None:
    """Draw a cell for every two models; the table's second column has the values.

    If there are many models, only cells with notable differences from chance have a text.
    """
    names, field = similar_together(analysis), name.removesuffix("s")
    rows: list[Row] = [
        {
            "model": first,
            "other": second,
            "cosine": finite(pair.total.cosine),
            "conflict": finite(pair.total.conflict),
            "both": pair.total.both,
        }
        for pair in analysis.pairs
        for first, second in ((pair.first, pair.second), (pair.second, pair.first))
    ]
    if not rows:
        return None
    few = len(names) <= MOST_LARGE_CELLS
    angle = 0 if len(names) <= 3 and max(map(len, names)) <= 8 else -90
    place = alt.Chart().encode(
        x=_model_axis(alt.X, names, "other", orient="top", labelAngle=angle),
        y=_model_axis(alt.Y, names),
        opacity=bright_if(CHOSEN_PAIR),
        tooltip=_tooltip(name),
    )
    ends = [2 * chance - 1, chance, 1]
    colour = colour.legend(format=form, gradientLength=160, gradientThickness=10, values=ends)
    cells = place.mark_rect(cornerRadius=3).encode(color=colour)
    contrast = alt.expr(CONTRAST.format(field=field))
    narrow = "bandwidth('x') < 32"  # pixels: two digits fit, `31` for 0.31 and 31%
    digits = f"abs(datum.{field}) >= 0.995 ? '1.0' : format(round(100 * abs(datum.{field})), '02d')"
    text = alt.expr(f"{narrow} ? ({digits}) : format(datum.{field}, '{form}')")
    wide = "clamp(bandwidth('x') / 3.2, 7, 13)"
    size = alt.expr(f"{narrow} ? min(11, bandwidth('x') / 1.7) : {wide}")
    is_notable = f"abs(datum.{field} - {chance}) >= {notable:g}"
    texts = place.transform_filter("true" if len(names) <= MOST_NUMBERED else is_notable)
    texts = texts.mark_text(fontSize=size, color=contrast, aria=False, text=text)
    largest = max(analysis.pairs, key=lambda pair: abs(getattr(pair.total, field) - chance))
    table = fill_table(TEXTS[name]["columns"], analysis.pairs)
    return _figure(
        name,
        _finish(alt.layer(cells, texts), rows, max(140, (48 if few else 32) * len(names))),
        table,
        largest=table.rows[analysis.pairs.index(largest)][1],
        first=largest.first,
        second=largest.second,
    )


def similar_together(analysis: AnalysisData) -> list[str]:
    """Return the models' names, with similar or opposed models next to each other."""
    group = {name: [name] for name in analysis.names}
    for pair in sorted(analysis.pairs, key=lambda pair: -abs(pair.total.cosine)):
        first, second = group[pair.first], group[pair.second]
        if first is not second and abs(pair.total.cosine) >= LIMIT.apart_cosine:
            first += second
            group |= dict.fromkeys(second, first)
    return list(dict.fromkeys(name for each in group.values() for name in each))


def cancelled(analysis: AnalysisData) -> Figure | None:
    """Draw the share that a merge of all models would lose, layer by layer."""
    by_layer = analysis.together.by_layer
    if not analysis.pairs or by_layer.keys() <= {OUTSIDE}:
        return None
    sizes = {
        layer: [m.by_layer[layer].mean_magnitude for m in analysis.models if layer in m.by_layer]
        for layer in sorted(by_layer)
    }
    rows: list[Row] = [
        {
            "layer": layer_name(layer),
            "cancelled": finite(by_layer[layer]),
            "chance": finite(cancelled_by_chance(found)),
        }
        for layer, found in sizes.items()
    ]
    place = alt.Chart().encode(x=_layer_axis(), tooltip=_tooltip("cancelled"))
    top = max(row[field] or 0.0 for row in rows for field in ("cancelled", "chance"))
    y = alt.Y("cancelled:Q", title="cancelled").scale(domain=[0, max(top, 0.5)])
    bars = place.mark_bar(cornerRadiusEnd=2, aria=False)
    bars = bars.encode(y=y.axis(format="~%", tickCount=5))
    ticks = place.mark_tick(thickness=3, aria=False).encode(y="chance:Q")
    total, chance = share(analysis.together.cancelled), share(chance_cancelled(analysis))
    cells = ((row["layer"], share(row["cancelled"]), share(row["chance"])) for row in rows)
    table = Table(("layer", "cancelled >", "by chance about >"), (("all", total, chance), *cells))
    spec = _finish(alt.layer(bars, ticks), rows, height=200)
    figure = _figure("cancelled", spec, table, total=total, chance=chance)
    far = max(abs((row["cancelled"] or 0.0) - (row["chance"] or 0.0)) for row in rows)
    return replace(figure, folded=far < NOISE)


# ---------------------------------------------------------------- drop rates


def predicted_error(analysis: AnalysisData, advice: Advice) -> Figure | None:
    """Draw the error of dropping at each rate."""
    out = advice.left_out
    models = [model for model in analysis.models if model.name not in out] or analysis.models
    names, everyone = [model.name for model in models], analysis.names
    curves = [row for model in models for row in prediction_rows(model, RATES) if row["error"]]
    if not curves:
        return None
    logarithms = {row["model"]: math.log(row["error"]) for row in curves}  # at the last rate
    errors, height = [row["error"] for row in curves], 320
    gap = min(LABEL_HEIGHT / height, 1 / len(logarithms)) * math.log(max(errors) / min(errors))
    places = keep_apart(logarithms, math.log(max(errors)), gap)
    at = [{"model": name, "at": finite(math.exp(place))} for name, place in places.items()]
    x = alt.X("rate:Q", title="drop rate").scale(domain=[0, 1]).axis(tickCount=10, grid=True)
    y = alt.Y("error:Q", title="error of a layer's outputs, at most")
    y = y.scale(type="log", domain=[min(errors), max(errors)], nice=False)
    y = y.axis(logarithmic("y", percent=True))
    chart = _lines("predicted-error", everyone, x, y, marked="round(datum.rate * 100) % 10 === 0")
    label = alt.Chart(rows_named("ends"))  # beside the plot, which zooming would clip
    label = label.mark_text(align="left", dx=8, limit=110, aria=False, clip=False)
    place = {"x": alt.value(alt.expr("width")), "y": "at:Q", "text": "model:N"}
    seen = bright_if(f"({CHOSEN}) && inrange(datum.at, domain('y'))")
    label = label.encode(**place, color=by_name(alt.Color, everyone, legend=None), opacity=seen)
    return _figure(
        "predicted-error",
        _finish(chart + label, _dashed(curves, everyone), height, ends=at),
        [row for model in models for row in prediction_rows(model, TABLE_RATES)],
        names=listed(tuple(names)),
        out=f" Left out: {listed(out)}." if out else "",
    )


def prediction_rows(model: ModelAnalysis, rates: Iterable[float]) -> list[Row]:
    """Return a model's curve: an upper bound on the error of its outputs at each drop rate."""
    exposures = exposures_of(model)
    return [
        {
            "model": model.name,
            "rate": rate,
            "error": finite(mean_bounded_error(exposures, rate)),
            "relative": finite(relative_error(rate)),
        }
        for rate in rates
    ]


# ---------------------------------------------------------------- after a merge


def kept(outcome: Outcome) -> Figure | None:
    """Draw the share of each model's elements that each stage keeps."""
    rows: list[Row] = [
        {
            "model": model.name,
            "stage": stage,
            "step": step,
            "kept": finite(part),
            "label": f"{stage}  {share(finite(part))}",
        }
        for model in outcome.models
        for step, (stage, part) in enumerate(outcome.kept.get(model.name, {}).items())
    ]
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    x = alt.X("kept:Q", title="elements left").scale(domain=[0, 1.15])  # room for labels
    return _model_bars(
        *("kept", rows, 30),
        lambda row: f"{row['model']} after {row['label']}",
        x=x.axis(format="~%", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
        yOffset=alt.YOffset("stage:N", sort=stages),
    )


def survival(outcome: Outcome) -> Figure | None:
    """Draw how much of each model's delta is in the merged one, in the same direction."""
    rows: list[Row] = [
        {
            "model": pair.first,
            "ratio": finite(pair.ratio) or 0.0,
            "label": share(pair.ratio) if math.isfinite(pair.ratio) else "not a number",
            "cosine": cosine_text(pair.total.cosine),
        }
        for pair in outcome.survival
    ]
    ratios = [0.0, *(row["ratio"] for row in rows)]
    x = alt.X("ratio:Q", title="share of the model's delta in the merged one")
    return _model_bars(
        *("survival", rows, 36),
        lambda row: f"{row['model']} {row['label']}",
        x=x.scale(domain=[min(ratios), 1.3 * max(0.01, *ratios)]).axis(format="~%", tickCount=5),
    )


def _model_bars(
    name: str, rows: Sequence[Row], height: int, said: Callable[[Row], str], **places: Any
) -> Figure | None:
    """Draw a bar for each row, with its label after it."""
    if not rows:
        return None
    names = list(dict.fromkeys(row["model"] for row in rows))
    looks = {"y": _model_axis(alt.Y, names), "opacity": bright_if(CHOSEN)}
    chart = alt.Chart().encode(tooltip=_tooltip(name), **looks, **places)
    bars = chart.mark_bar(cornerRadiusEnd=2, aria=False)
    bars = bars.encode(color=by_name(alt.Color, names, legend=None))
    texts = chart.mark_text(align="left", dx=5, aria=False).encode(text="label:N")
    spec = _finish(alt.layer(bars, texts), rows, height=max(3 * height, height * len(rows)))
    return _figure(name, spec, rows, shares="; ".join(map(said, rows)))


# ---------------------------------------------------------------- parts of several figures


def layer_name(layer: int) -> str:
    """Return a layer's number as text, or a word for tensors outside all layers.

    >>> layer_name(3), layer_name(-1)
    ('3', 'outside')
    """
    return "outside" if layer == OUTSIDE else str(layer)


def cosine_text(value: float) -> str:
    """Return a cosine, always with its sign.

    >>> cosine_text(0.0123), cosine_text(-0.5)
    ('+0.012', '-0.500')
    """
    return f"{value:+.3f}"


def _kinds(analysis: AnalysisData) -> list[str]:
    """Return the kinds that occur, in their usual order."""
    return [str(kind) for kind in Kind if any(kind in model.by_kind for model in analysis.models)]


def _lines(name: str, names: Sequence[str], x: Any, y: Any, marked: str = "") -> Any:
    """Draw a line for each model, with its own colour, dashes and shape; it can be zoomed.

    With a condition for `marked` points there is no legend, as the names are shown elsewhere.
    """
    legend = None if marked else _legend(names)
    colour = by_name(alt.Color, names, legend=legend)
    chart = alt.Chart().encode(x=x, y=y, color=colour, opacity=bright_if(CHOSEN))
    # Dashes by number: by name they would be in the legend, as dashed outlines.
    dashes = alt.Scale(domain=list(range(len(names))), range=repeated(DASHES, len(names)))
    curves = chart.mark_line(aria=False, clip=True, interpolate="monotone")
    curves = curves.encode(strokeDash=alt.StrokeDash("dash:O").scale(dashes).legend(None))
    marks = chart.mark_point(filled=True, size=55, aria=False, clip=True)
    shape = by_name(alt.Shape, names, SHAPES, legend=legend)
    marks = marks.encode(shape=shape, tooltip=_tooltip(name)).add_params(zoom())
    return alt.layer(curves, marks.transform_filter(marked or "true"))


def _dashed(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Add to each row the number of its dash pattern."""
    return [{**row, "dash": names.index(row["model"])} for row in rows]


def _legend(names: Sequence[str], **looks: Any) -> Any:
    """Return a legend of models, in as many columns as there is room for."""
    return alt.Legend(columns=room_for(names), values=list(names), labelExpr=MARKED, **looks)


def _model_axis(channel: Any, names: Sequence[str], field: str = "model", **looks: Any) -> Any:
    """Return an axis with a place for each model."""
    return channel(f"{field}:N", title=None, sort=list(names)).axis(
        labelExpr=MARKED, labelLimit=110, labelOverlap=False, **looks
    )


def _layer_axis() -> Any:
    """Return an axis of layers, with a short word for tensors outside all layers."""
    label = "datum.label === 'outside' ? 'out' : datum.label"
    x = alt.X("layer:N", title="layer", sort=None)
    return x.axis(labelAngle=0, labelOverlap="greedy", labelExpr=label)


def keep_apart(values: Mapping[str, float], most: float, gap: float) -> dict[str, float]:
    """Move values apart by at least the gap, in the same order and up to a bound.

    >>> keep_apart({"a": 1.0, "b": 1.0, "c": 9.0}, 10.0, 2.0)
    {'a': 1.0, 'b': 3.0, 'c': 9.0}
    """
    places, free = {}, -math.inf
    for above, name in enumerate(sorted(values, key=lambda name: values[name]), 1 - len(values)):
        places[name] = max(free, min(values[name], most + gap * above))
        free = places[name] + gap
    return places


def _finish(chart: Any, rows: Sequence[Row], height: int = 280, **others: Sequence[Row]) -> Spec:
    """Return the chart as Vega-Lite, with the parameters `model` and `left_out`."""
    chosen, left_out = alt.param(name="model", value=""), alt.param(name=LEFT_OUT, value=[])
    return finish_chart(chart.add_params(chosen, left_out), rows, height, **others)
