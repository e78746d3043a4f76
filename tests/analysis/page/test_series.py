from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import sample
from dare.output.page import words
from hypothesis import given
from hypothesis import strategies as st

from dare.analysis.judge.prediction import exposures_of, mean_bounded_error
from dare.analysis.page import series
from dare.analysis.results import Histogram, Kind


def test_octaves_hold_the_shares_of_a_hand_made_histogram(subject):
    total = replace(
        subject.analysis.models[0].total,
        elements=16,
        zeros=8,
        histogram=Histogram(-3, (0, 2, 0, 6, 0)),
    )
    rows = series._octaves("math", "all", total)
    assert [(row["from"], row["to"], row["share"]) for row in rows] == [
        (0.25, 0.5, 0.125),
        (0.5, 1.0, 0.0),
        (1.0, 2.0, 0.375),
    ]
    assert series._octaves("math", "all", replace(total, histogram=Histogram(0, ()))) == []


def test_all_octaves_and_the_unchanged_make_one(subject):
    rows = series.magnitude_rows(subject.analysis)
    for model in subject.analysis.models:
        for kind, statistics in model.by_kind.items():
            shares = [
                row["share"]
                for row in rows
                if row["model"] == model.name and row["kind"] == str(kind)
            ]
            assert sum(shares) + statistics.sparsity == pytest.approx(1, abs=1e-4)


def test_changes_are_relative_norms_by_layer_and_kind(subject):
    model = subject.analysis.models[2]
    rows = series.change_rows(model)
    assert rows[0]["layer"] == "outside"
    cell = next(cell for cell in model.cells if (cell.layer, cell.kind) == (3, Kind.MLP))
    (row,) = (row for row in rows if (row["layer"], row["kind"]) == ("3", "mlp"))
    assert row["change"] == pytest.approx(cell.statistics.relative_norm, 1e-4)
    cell = replace(model.cells[0], statistics=replace(model.cells[0].statistics, base_norm=0.0))
    (row,) = series.change_rows(replace(model, cells=(cell,)))
    assert row["change"] is None


@given(st.integers(1, 40), st.integers(1, 30))
def test_chosen_spectra_are_spread_and_not_too_many(available, most):
    tensor = next(t for t in SAMPLE.models[0].tensors if t.spectrum)
    tensors = tuple(replace(tensor, name=str(number)) for number in range(available))
    chosen = series.chosen_spectra(replace(SAMPLE.models[0], tensors=tensors), most)
    numbers = [int(tensor.name) for tensor in chosen]
    assert len(numbers) == min(available, most)
    assert numbers == sorted(set(numbers))


SAMPLE = sample.make_analysis()


def test_spectra_are_relative_to_the_largest_and_end_with_the_rank(subject):
    rows = series.spectrum_rows(subject.analysis)
    assert all(row["value"][0] == 1 for row in rows)
    assert {len(row["rank"]) for row in rows if row["model"] == "code"} == {4}


def test_predictions_follow_the_formula(subject):
    model = subject.analysis.models[0]
    (row,) = series.prediction_rows(model, [0.8])
    assert row["relative"] == 2.0  # √(0.8 / 0.2)
    assert row["error"] == pytest.approx(mean_bounded_error(exposures_of(model), 0.8), 1e-4)


def test_rows_go_to_json_whatever_the_numbers(subject):
    broken = replace(subject.analysis.models[0].total, base_norm=0.0, largest=math.inf)
    tensors = tuple(replace(t, statistics=broken) for t in subject.analysis.models[0].tensors)
    model = replace(subject.analysis.models[0], total=broken, tensors=tensors)
    json.dumps(series.prediction_rows(model, series.RATES), allow_nan=False)


@given(st.floats(1e-12, 1e6))
def test_a_share_can_be_read_back_to_three_digits(value):
    told = words.share(value)
    assert float(told.removesuffix("%").replace(",", "")) / 100 == pytest.approx(value, rel=0.006)


@given(st.integers(0, 10**14))
def test_an_amount_is_short_and_right(value):
    told = words.amount(value)
    assert len(told) <= 5 or value >= 10**15
    units = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number = float(told.rstrip("kMBT")) * units.get(told[-1], 1)
    assert number == pytest.approx(value, rel=0.006)
