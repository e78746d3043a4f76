from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import sample

from dare.analysis import figures
from dare.analysis.advice import Evidence, Suggestion
from dare.analysis.prediction import exposures_of, mean_bounded_error
from dare.analysis.results import Histogram, Kind, Origin
from dare.documents.charts import DASHES, SHAPES, THEMES, vega_config
from dare.documents.words import number, share


@pytest.fixture(scope="module")
def drawn(subject):
    found = figures.draw_figures(subject.analysis, subject.advice, subject.outcome)
    return {figure.name: figure for figure in found}


def rows_of(figure):
    """The rows that a chart is drawn from."""
    return figure.spec["datasets"][figure.spec["data"]["name"]]


def test_there_is_a_figure_for_everything_that_was_found(drawn):
    assert list(drawn) == [
        *("predicted-error", "cosines", "conflicts", "cancelled"),
        *("change-1", "change-2", "change-3", "magnitudes", "spectra"),
        *("survival", "kept"),
    ]


def test_one_model_has_no_figures_of_pairs(subject):
    analysis = sample.make_analysis(("alone",))
    advice = sample.make_advice(("alone",))
    names = [figure.name for figure in figures.draw_figures(analysis, advice, None)]
    assert names == ["predicted-error", "change-1", "magnitudes", "spectra"]


def test_a_model_that_is_the_base_has_only_an_empty_map(subject):
    model = sample.make_analysis(("alone",)).models[0]
    unchanged = replace(model.total.inliers, norm=0.0)
    nothing = replace(
        model.total,
        zeros=model.total.elements,
        norm=0.0,
        histogram=Histogram(0, ()),
        inliers=unchanged,
    )
    model = replace(
        model,
        total=nothing,
        by_kind=dict.fromkeys(model.by_kind, nothing),
        cells=tuple(replace(cell, statistics=nothing) for cell in model.cells),
        tensors=(),
    )
    analysis = replace(subject.analysis, models=(model,), pairs=())
    (figure,) = figures.draw_figures(analysis, replace(subject.advice, suggestions=()), None)
    assert figure.name == "change-1"
    assert {cell for row in figure.table.rows for cell in row[1:]} == {"0%", "–"}


def test_every_figure_says_what_it_shows(drawn):
    for figure in drawn.values():
        assert figure.title
        assert figure.caption.endswith(".")
        assert figure.description.endswith(".")
        assert figure.table.rows
        assert {len(row) for row in figure.table.rows} == {len(figure.table.columns)}
        assert {"name": "model", "value": ""} in figure.spec["params"]
        assert "config" not in figure.spec  # colours are the theme's
        assert len(json.dumps(figure.spec, allow_nan=False)) < 100_000


def test_the_tables_hold_the_analysis(drawn, subject):
    analysis = subject.analysis
    (first, _, _) = analysis.pairs
    figures_of_pair = (figures.cosine_text(first.total.cosine), number(first.ratio))
    assert drawn["cosines"].table.rows[0] == ("math · code", *figures_of_pair)
    conflict = (share(1 - first.total.agreeing), f"{first.total.both:,}")
    assert drawn["conflicts"].table.rows[0][1:3] == conflict
    sizes = [model.total.mean_magnitude for model in analysis.models]
    chance = 1 - math.hypot(*sizes) / sum(sizes)
    cancelled = ("all", share(analysis.together.cancelled), share(chance))
    assert drawn["cancelled"].table.rows[0] == cancelled
    code = drawn["change-2"].table
    assert code.columns == ("layer", "attention >", "mlp >", "norm >", "embedding >")
    assert code.rows[0] == ("outside", "–", "–", "–", "0%")
    spectrum = next(t for t in analysis.models[0].tensors if t.spectrum).spectrum
    assert drawn["spectra"].table.rows[0][3] == number(spectrum.effective_rank)


def test_the_curve_is_what_is_predicted(drawn, subject):
    figure, model = drawn["predicted-error"], subject.analysis.models[0]
    (curve,) = (r for r in rows_of(figure) if (r["model"], r["rate"]) == ("math", 0.8))
    assert curve["relative"] == 2.0  # √(0.8 / 0.2)
    error = mean_bounded_error(exposures_of(model), 0.8)
    assert curve["error"] == pytest.approx(error, 1e-4)
    (row,) = (row for row in figure.table.rows if row[:2] == ("0.9", "math"))
    error = mean_bounded_error(exposures_of(model), 0.9)
    assert row[2:] == (share(error), "300%")  # √(0.9 / 0.1)


def test_models_that_are_left_out_have_a_sign_and_no_curve(subject):
    out = Suggestion("models", "left out", "code", "", "", Evidence.STRONG)
    advice = replace(subject.advice, suggestions=(out,))
    found = {f.name: f for f in figures.draw_figures(subject.analysis, advice, None)}
    for figure in found.values():
        assert {"name": "left_out", "value": ["code"]} in figure.spec["params"]
    assert {row["model"] for row in rows_of(found["predicted-error"])} == {"math", "chat"}
    assert "Left out: code." in found["predicted-error"].caption
    colour = found["predicted-error"].spec["layer"][0]["encoding"]["color"]
    assert colour["scale"]["domain"] == ["math", "code", "chat"]  # the colours of all figures


def test_names_at_the_ends_of_lines_do_not_touch(drawn):
    spec = drawn["predicted-error"].spec
    assert spec["layer"][2]["mark"]["clip"] is False  # they stand outside
    places = sorted(math.log(row["at"]) for row in spec["datasets"]["ends"])
    low, high = map(math.log, spec["layer"][0]["encoding"]["y"]["scale"]["domain"])
    gaps = [(b - a) / (high - low) * spec["height"] for a, b in itertools.pairwise(places)]
    assert min(gaps) >= figures.LABEL_HEIGHT - 0.1
    assert places[-1] <= high + 1e-4


def test_models_that_are_alike_stand_beside_each_other(subject):
    cosines = {("math", "code"): 0.0, ("math", "chat"): 0.9, ("code", "chat"): 0.0}
    pairs = tuple(
        replace(pair, total=replace(pair.total, cosine=cosines[pair.first, pair.second]))
        for pair in subject.analysis.pairs
    )
    assert figures.similar_together(replace(subject.analysis, pairs=pairs)) == [
        "math",
        "chat",
        "code",
    ]


def test_noise_looks_like_noise(subject):
    even = [{"change": 0.0100}, {"change": 0.0101}, {"change": None}]
    low, high = figures.change_domain(even)
    assert high / low == pytest.approx(2)
    assert figures.change_domain(figures.change_rows(subject.analysis.models[0]))[0] > 0


def test_spectra_wait_unless_a_rank_is_low(subject, drawn):
    assert not drawn["spectra"].folded
    models = tuple(replace(m, origin=Origin.FULL) for m in subject.analysis.models)
    assert figures.spectra(replace(subject.analysis, models=models)).folded


@pytest.fixture(scope="module")
def many(crowd):
    found = figures.draw_figures(crowd.analysis, crowd.advice, crowd.outcome)
    return {figure.name: figure for figure in found}


def test_many_models_have_one_map_and_their_own_are_folded(many):
    assert not many["changes"].folded
    assert all(many[f"change-{number}"].folded for number in range(1, 13))


@pytest.mark.parametrize("name", THEMES)
def test_twelve_models_look_different(name):
    colours = THEMES[name].models
    assert len(set(colours)) == len(colours) == 12
    looks = {
        (colours[n % len(colours)], SHAPES[n % len(SHAPES)], str(DASHES[n % len(DASHES)]))
        for n in range(84)
    }
    assert len(looks) == 84


@pytest.mark.parametrize("name", THEMES)
def test_models_stand_out_from_the_panel(name):
    # WCAG 2.2, 1.4.11: graphics need a contrast of 3 to 1, 1.4.3: text 4.5 to 1.
    colours = THEMES[name].colours
    for colour in (*THEMES[name].models, *vega_config(THEMES[name])["range"]["ramp"]):
        assert contrast(colour, colours["panel"]) >= 3
    for text in ("ink", "muted", "accent"):
        assert contrast(colours[text], colours["panel"]) >= 4.5
    for text in ("good", "fair", "poor"):
        assert contrast(colours[text], colours[f"{text}-tint"]) >= 4.5


def contrast(one, other):
    lights = sorted((luminance(one), luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_amounts_get_steadily_darker_in_the_light_and_lighter_in_the_dark():
    light = [luminance(colour) for colour in vega_config(THEMES["light"])["range"]["heatmap"]]
    dark = [luminance(colour) for colour in vega_config(THEMES["dark"])["range"]["heatmap"]]
    assert light == sorted(light, reverse=True)
    assert dark == sorted(dark)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("histogram", "expected"),
    [
        (
            Histogram(-3, (0, 2, 0, 6, 0)),
            [(0.25, 0.5, 0.125), (0.5, 1.0, 0.0), (1.0, 2.0, 0.375)],
        ),
        (Histogram(0, ()), []),
    ],
)
def test_octaves_hold_the_shares_of_a_hand_made_histogram(subject, histogram, expected):
    model = subject.analysis.models[0]
    total = replace(model.total, elements=16, zeros=8, histogram=histogram)
    model = replace(model, total=total, by_kind={})
    rows = figures.magnitude_rows(replace(subject.analysis, models=(model,)))
    assert [(row["from"], row["to"], row["share"]) for row in rows] == expected


def test_changes_are_relative_norms_by_layer_and_kind(subject):
    model = subject.analysis.models[2]
    rows = figures.change_rows(model)
    assert rows[0]["layer"] == "outside"
    cell = next(cell for cell in model.cells if (cell.layer, cell.kind) == (3, Kind.MLP))
    (row,) = (row for row in rows if (row["layer"], row["kind"]) == ("3", "mlp"))
    assert row["change"] == pytest.approx(cell.statistics.relative_norm, 1e-4)
    cell = replace(model.cells[0], statistics=replace(model.cells[0].statistics, base_norm=0.0))
    (row,) = figures.change_rows(replace(model, cells=(cell,)))
    assert row["change"] is None


@pytest.mark.parametrize(("available", "models"), [(1, 1), (23, 1), (40, 1), (40, 5), (9, 120)])
def test_chosen_spectra_are_spread_and_not_too_many(subject, available, models):
    tensor = next(t for t in subject.analysis.models[0].tensors if t.spectrum)
    tensors = tuple(replace(tensor, name=str(number)) for number in range(available))
    model = replace(subject.analysis.models[0], tensors=tensors)
    chosen = figures.choose_spectra(replace(subject.analysis, models=(model,) * models))
    numbers = [int(name) for _, name, _ in chosen[: len(chosen) // models]]
    assert len(numbers) == min(available, 24, max(1, 96 // models))
    assert numbers == sorted(set(numbers))


def test_spectra_are_relative_to_the_largest_and_end_with_the_rank(subject):
    rows = rows_of(figures.spectra(subject.analysis))
    assert all(row["value"][0] == 1 for row in rows)
    assert {len(row["rank"]) for row in rows if row["model"] == "code"} == {4}


def test_rows_go_to_json_whatever_the_numbers(subject):
    broken = replace(subject.analysis.models[0].total, base_norm=0.0, largest=math.inf)
    tensors = tuple(replace(t, statistics=broken) for t in subject.analysis.models[0].tensors)
    model = replace(subject.analysis.models[0], total=broken, tensors=tensors)
    json.dumps(figures.prediction_rows(model, figures.RATES), allow_nan=False)
