"""What the page shows without computing it was measured with these models and this program."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import fmean

import pytest

from dare.demo.llama import read_weights
from dare.demo.merges import BASE, ENGLISH_BYTES, PROMPTS, TUNED, Measurement, measure
from dare.web.assets import PAGE

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "playground_figures.py"))
MEASURED = json.loads((PAGE / "measured.json").read_text("utf-8"))


def test_the_base_scores_what_is_said():
    score = measure(Measurement(BASE, PROMPTS, ENGLISH_BYTES))
    said = MEASURED["models"]["base"]
    assert said["right"] == score.correct
    assert said["bits_per_byte"] == pytest.approx(score.bits_per_byte, abs=1e-4)


@pytest.mark.parametrize(("curve", "rate", "seed"), [(0, 0.9, 1042), (4, 0.5, 42), (7, 0.7, 2042)])
def test_points_of_the_curves_are_measured_again(curve, rate, seed):
    place = SCRIPT["SEEDS"].index(seed)
    described = SCRIPT["CURVES"][curve]
    score = measure(described.jobs(rate)[place])
    said = MEASURED["curves"][curve]
    assert said["name"] == described.name
    right = said["points"][SCRIPT["RATES"].index(rate)]["right"][place]
    mean = fmean(score.correct.values())
    assert right == pytest.approx(mean, abs=0.7)  # one prompt that is nearly a tie


def test_the_answers_that_the_page_opens_with_are_computed_again():
    opened = SCRIPT["OPENING"]
    assert [one["setting"] for one in MEASURED["opening"]] == [one.setting for one in opened]
    merged = len(opened) - 2
    said, found = MEASURED["opening"][merged], opened[merged].measure()
    assert found["sha256"] == said["sha256"]
    assert found["texts"] == said["texts"]
    assert found["right"] == pytest.approx(said["right"], abs=1)  # a prompt that is nearly a tie
    weight = MEASURED["weight"]
    for name, path in {"base": BASE, **TUNED}.items():
        values = read_weights(path)[weight["tensor"]].reshape(-1)
        assert values[weight["element"]] == weight["values"][name]


def test_the_findings_are_those_of_an_analysis():
    found = json.loads(json.dumps(SCRIPT["find_broken"]()))
    assert json.loads((PAGE / "broken.json").read_text("utf-8")) == found
