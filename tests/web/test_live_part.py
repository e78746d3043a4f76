"""Merge live, Predict first and Break it in a real browser, beside what the package computes."""

from __future__ import annotations

import json
import tomllib
from statistics import fmean
from typing import Any
from urllib.parse import unquote

import pytest
from merged import Arrays, digest, merge, score

from dare.demo.llama import Llama
from dare.demo.merges import CONFIG
from dare.web.assets import PAGE
from helpers import PATIENCE_SECONDS, eventually

TASKS = ("add", "sort", "say")
MEASURED = json.loads((PAGE / "measured.json").read_text("utf-8"))
AMOUNTS = {25: 1024, 100: 4096}
"""Bytes of English by prompts of each task."""


READ = """part => {
    const card = document.getElementById(`${part}-scores`);
    const value = (row) => card.querySelector(`${row} .value`).textContent;
    const tasks = ["add", "sort", "say"].map((task) => value(`[data-task=${task}]`));
    const prompts = Number(card.querySelector(".asked").dataset.prompts);
    return { prompts, tasks, english: value("[data-english]"), stale: card.dataset.stale };
}"""


def shown_scores(page: Any, part: str = "live", prompts: str = "") -> dict[str, Any]:
    """The scores of now as the page shows them: the first that come, or those from all prompts."""
    asked = f"[data-prompts='{prompts}']" if prompts else ""
    ready = f"#{part}-scores:not([data-stale]) .asked{asked}"
    page.wait_for_selector(ready, timeout=PATIENCE_SECONDS * 1000)
    shown = page.evaluate(READ, part)
    assert shown["stale"] is None
    return shown


def assert_scores(shown: dict[str, Any], arrays: Arrays) -> None:
    """Compare them with what the package measures, of as many prompts."""
    expected = score(arrays, shown["prompts"], AMOUNTS[shown["prompts"]])
    assert shown["tasks"] == [f"{expected[task]:.0f}%" for task in TASKS]
    assert float(shown["english"]) == pytest.approx(expected["english"], abs=0.0015)


def shown_digest(page: Any) -> str:
    page.wait_for_selector("#live-code:not([data-stale])", timeout=PATIENCE_SECONDS * 1000)
    return page.inner_text("#live-digest")


def press(page: Any, control: str, key: str, times: int = 1) -> None:
    """Use a control as people without a mouse do."""
    page.focus(f"#control-{control}")
    for _ in range(times):
        page.keyboard.press(key)


def test_moving_a_slider_by_keyboard_gives_the_merge_that_it_says(static_site, open_tab):
    tab = open_tab(f"{static_site.address}#live")
    page = tab.page
    opened = merge("dare+sum", stages={"dare": {"drop_rate": 0.5}})
    assert_scores(shown_scores(page), opened)

    press(page, "live-p", "ArrowRight", 40)
    press(page, "live-scale", "ArrowLeft", 4)
    press(page, "live-seed", "ArrowRight")
    arrays = merge("dare+sum", stages={"dare": {"drop_rate": 0.9}}, scale=0.8, seed=43)
    assert_scores(shown_scores(page), arrays)
    assert shown_digest(page) == digest(arrays)
    recipe = tomllib.loads(page.inner_text("#live-text"))
    assert (recipe["dare"]["drop_rate"], recipe["scale"], recipe["seed"]) == (0.9, 0.8, 43)

    page.fill("#live-prompt", "75+16=")
    (text,) = Llama(arrays, CONFIG).write(["75+16="])
    page.wait_for_function(
        "text => document.querySelector('[data-place=answer]')?.textContent === text", arg=text
    )
    assert page.inner_text("#live-samples tbody tr:first-child .written").startswith(("✓", "✗"))
    assert_scores(shown_scores(page, prompts="100"), arrays)
    assert tab.said == []
    assert tab.asked_elsewhere(static_site) == []


EVERYTHING = (
    "live.m=dare%2Btrim%2Bties&live.sort=false&live.w=true&live.wadd=0.8&live.wsay=1.3&live.p=0.4"
    "&live.rescale=false&live.keep=0.6&live.scale=1.5&live.seed=7&live.ask=say+347%3A"
)


def test_a_link_restores_everything_and_start_again_forgets_it(static_site, open_tab):
    tab = open_tab(f"{static_site.with_state(EVERYTHING)}#live")
    page = tab.page
    stages = {"dare": {"drop_rate": 0.4, "rescale": False}, "trim": {"keep_ratio": 0.6}}
    settings = {"weights": [0.8, 1.3], "scale": 1.5, "seed": 7, "stages": stages}
    arrays = merge("dare+trim+ties", ["add", "say"], **settings)
    assert shown_digest(page) == digest(arrays)
    assert_scores(shown_scores(page), arrays)
    assert page.input_value("#control-live-keep") == "0.6"
    assert page.input_value("#live-prompt") == "say 347:"
    assert not page.is_checked("#control-live-sort")
    assert unquote(page.evaluate("location.search")) == f"?{unquote(EVERYTHING)}"
    page.get_by_role("button", name="Start again").press("Enter")
    opened = digest(merge("dare+sum", stages={"dare": {"drop_rate": 0.5}}))
    page.wait_for_selector(f"#live-code:not([data-stale]) :text('{opened}')")
    assert page.is_hidden("#control-live-wadd")
    assert tab.said == []


def test_slerp_goes_between_two_models(static_site, open_tab):
    tab = open_tab(f"{static_site.with_state('live.m=dare%2Bslerp&live.t=0.25&live.p=0.9')}#live")
    page = tab.page
    stages = {"dare": {"drop_rate": 0.9}, "slerp": {"t": 0.25}}
    arrays = merge("dare+slerp", ["add", "sort"], stages=stages)
    assert shown_digest(page) == digest(arrays)
    assert_scores(shown_scores(page), arrays)
    assert not page.is_visible("#control-live-w")
    assert page.is_disabled("#control-live-say")
    press(page, "live-sort", "Space")
    page.wait_for_selector("#live-scores [data-place=reason]:has-text('two models')")
    assert tab.said == []


def steady_box(page, element) -> dict[str, float]:
    """Where an element is, once the parts that came into view have filled themselves."""
    box = None
    while box != (box := element.bounding_box()):
        page.wait_for_timeout(700)
    return box


def test_a_guess_is_drawn_and_compared_with_what_was_measured(static_site, open_tab):
    tab = open_tab(f"{static_site.address}#predict")
    page = tab.page
    reveal = page.get_by_role("button", name="Show what happens")
    assert reveal.is_disabled()
    page.locator("#predict-panel summary").press("Enter")
    press(page, "predict-y-0", "End")
    press(page, "predict-y-7", "Home")
    guess = [100, 50, 50, 50, 50, 50, 50, 0]
    reveal.press("Enter")
    (curve,) = (one for one in MEASURED["curves"] if one["name"] == "sort alone")
    means = {point["drop_rate"]: fmean(point["right"]) for point in curve["points"]}
    rates = (0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)
    off = [abs(value - means[rate]) for value, rate in zip(guess, rates, strict=True)]
    verdict = page.inner_text("#predict-outcome [data-place=verdict]")
    assert f"off by {fmean(off):.0f} points" in verdict
    assert f"at p = {rates[off.index(max(off))]}" in verdict
    assert page.is_visible("#predict-larger")

    page.wait_for_selector("html[data-drawn=light]")  # nothing moves any more
    plot = page.locator("#chart-predict .role-frame .background").first
    plot.scroll_into_view_if_needed()

    def draw() -> list[int]:
        box = steady_box(page, plot)
        page.mouse.move(box["x"] + 1, box["y"] + 0.25 * box["height"])
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"], box["y"] + 0.25 * box["height"], steps=20)
        page.mouse.up()
        drawn = [int(page.input_value(f"#control-predict-y-{index}")) for index in range(8)]
        assert drawn == pytest.approx([75] * 8, abs=1)
        return drawn

    drawn = eventually(draw)  # a part above it may have filled itself in between
    page.wait_for_function(
        "text => location.search.includes(text)", arg=f"predict.on={'-'.join(map(str, drawn))}"
    )

    again = open_tab(page.url).page
    assert again.is_visible("#predict-larger")
    assert again.input_value("#control-predict-y-3") == str(drawn[3])
    assert tab.said == []


def test_one_seed_for_all_is_seen_in_the_answers_and_in_the_warning(static_site, open_tab):
    tab = open_tab(f"{static_site.address}#breaking")
    page = tab.page
    press(page, "breaking-on", "Space")
    page.wait_for_selector("#breaking-scores.failing")
    stages = {"dare": {"drop_rate": 0.7}}
    broken = merge("dare+ties", seeds=[40, 40, 40], stages=stages)
    assert_scores(shown_scores(page, "breaking"), broken)
    assert "say loses most" in page.inner_text("#breaking-scores")
    assert "they drop the same positions" in page.inner_text("#breaking-findings")

    page.select_option("#control-breaking-way", "nan")
    assert shown_scores(page, "breaking")["english"] == "NaN"
    assert "NaN or infinite" in page.inner_text("#breaking-findings")
    assert "demo-models/add-nan" in page.inner_text("#breaking-ways")

    for way, models in (("base", "add"), ("far", "add-far")):
        page.select_option("#control-breaking-way", way)
        assert page.inner_text("#breaking-findings h3 b >> nth=0") == models
    assert tab.said == []
