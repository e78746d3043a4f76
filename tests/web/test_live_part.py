"""Merge live, Predict first and Break it in a real browser, beside what the package computes."""

from __future__ import annotations

import json
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
    assert shown["tasks"] == [f"{expected[task]:.0f} %" for task in TASKS]
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
    command = page.inner_text("#live-text")
    assert "--drop-rate 0.9" in command
    assert "--seed 43 --scale 0.8" in command

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
    "live.m=own&live.c=dare%2Btrim%2Bties&live.sort=false&live.w=true&live.wadd=0.8&live.wsay=1.3"
    "&live.each=true&live.padd=0.2&live.psay=0.4&live.scale=1.5&live.seed=7"
    "&live.s=trim.keep_ratio-0.6%2Cties.divide_by-count&live.as=python&live.ask=say+347%3A"
    "&live.pins=m-sum+scale-0.9*m-own+c-trim%2Blinear+w-true"
)


def test_a_link_restores_everything(static_site, open_tab):
    tab = open_tab(f"{static_site.with_state(EVERYTHING)}#live")
    page = tab.page
    arrays = merge(
        "dare+trim+ties",
        ["add", "say"],
        weights=[0.8, 1.3],
        rates=[0.2, 0.4],
        scale=1.5,
        seed=7,
        stages={"trim": {"keep_ratio": 0.6}, "ties": {"divide_by": "count"}},
    )
    assert shown_digest(page) == digest(arrays)
    assert_scores(shown_scores(page), arrays)
    assert page.input_value("#control-live-c-1") == "trim"
    assert page.input_value("#control-trim-keep_ratio") == "0.6"
    assert page.input_value("#live-prompt") == "say 347:"
    assert not page.is_checked("#control-live-sort")
    assert "dare.ModelEntry(" in page.inner_text("#live-text")

    pinned = page.locator("#live-pins tbody tr")
    assert "sum of add, sort, say; λ 0.9, seed 42" in pinned.nth(0).inner_text()
    assert unquote(page.evaluate("location.search")) == f"?{unquote(EVERYTHING)}"
    pinned.nth(1).get_by_role("button", name="Load").press("Enter")
    page.wait_for_selector("#live-code[data-stale]", state="attached")
    assert shown_digest(page) == digest(merge("trim+linear", weights=[1.0, 1.0, 1.0]))
    assert tab.said == []


def test_runs_are_pinned_compared_and_loaded_back(static_site, open_tab):
    tab = open_tab(f"{static_site.with_state('live.m=sum')}#live")
    page = tab.page
    first = shown_digest(page)
    page.get_by_role("button", name="Pin this run").press("Enter")
    page.select_option("#control-live-m", "ties")
    page.get_by_role("button", name="Pin this run").press("Enter")
    rows = page.locator("#live-pins tbody tr")
    assert rows.count() == 2

    plain = score(merge("sum"))
    mean = fmean(plain[task] for task in TASKS)
    expected = [f"{value:.0f} %" for value in (*(plain[task] for task in TASKS), mean)]
    page.wait_for_function(
        "digest => document.querySelector('#live-pins tbody code').title === digest", arg=first
    )
    assert rows.nth(0).locator("td").all_inner_texts()[:4] == expected

    rows.nth(0).get_by_role("button", name="Load").press("Enter")
    assert page.input_value("#control-live-m") == "sum"
    assert shown_digest(page) == first
    rows.nth(1).get_by_role("button", name="Remove").press("Enter")
    assert rows.count() == 1
    assert tab.said == []


def test_what_the_engine_lacks_is_said_with_a_way_out(static_site, open_tab):
    tab = open_tab(f"{static_site.with_state('live.m=della%2Bsum')}#live")
    page = tab.page
    reason = page.locator("#live-scores [data-place=reason]")
    reason.wait_for()
    assert "della" in reason.inner_text()
    assert "dare playground" in reason.inner_text()
    assert "--method della+sum" in page.inner_text("#live-text")

    page.select_option("#control-live-m", "slerp")  # which merges two
    assert not page.is_checked("#control-live-say")
    assert reason.is_hidden()
    press(page, "live-say", "Space")
    assert "Take one out" in reason.inner_text()
    assert tab.said == []


def test_the_local_engine_has_what_the_browser_lacks(local_site, open_tab):
    tab = open_tab(f"{local_site.with_state('live.m=della%2Bsum&live.p=0.8')}#live")
    arrays = merge("della+sum", stages={"della": {"drop_rate": 0.8}})
    assert shown_digest(tab.page) == digest(arrays)
    assert_scores(shown_scores(tab.page), arrays)
    assert tab.said == []


def test_the_curve_for_this_setting_is_measured_and_can_be_cancelled(static_site, open_tab):
    tab = open_tab(f"{static_site.address}#live")
    page = tab.page
    page.get_by_role("button", name="Measure it for this setting").press("Enter")
    page.get_by_role("button", name="Cancel").press("Enter")
    progress = page.locator("#live-curve [data-place=progress]")
    page.wait_for_function("text => document.body.textContent.includes(text)", arg="Cancelled.")
    assert progress.inner_text() == "Cancelled."
    assert page.get_by_role("button", name="Measure it for this setting").is_enabled()
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
    assert "Most is lost in say" in page.inner_text("#breaking-scores")
    assert "they drop the same positions" in page.inner_text("#breaking-findings")

    page.select_option("#control-breaking-way", "nan")
    assert shown_scores(page, "breaking")["english"] == "NaN"
    assert "NaN or infinite" in page.inner_text("#breaking-findings")
    assert "demo-models/add-nan" in page.inner_text("#breaking-ways")
    assert tab.said == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling_and_controls_have_labels(static_site, open_tab, theme):
    tab = open_tab(f"{static_site.with_state(EVERYTHING)}#live", width=390, theme=theme)
    page = tab.page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = page.evaluate(
        """() => [...document.querySelectorAll("#live *, #predict *, #breaking *")]
            .filter((one) => one.getBoundingClientRect().right > 391)
            .filter((one) => !one.closest(".scroll, pre, .unseen"))
            .map((one) => one.tagName + "." + one.className)"""
    )
    assert wide == []
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("#live, #predict, #breaking")].flatMap((part) =>
            [...part.querySelectorAll("input, select")].filter((one) => !one.labels.length)
                .map((one) => one.id))"""
    )
    assert unnamed == []
    assert tab.said == []
