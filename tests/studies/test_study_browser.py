"""A study's page in a real browser: Debian's chromium, offline, driven by playwright."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import study_sample as sample

from dare.studies.document import SearchResult
from pages import Tab, open_address

DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "study.html"
    data = sample.make_search()
    SearchResult(path, data, sample.make_conclusion(data), None).to_html(path)
    return path


@pytest.fixture(scope="module")
def opened(browser, path) -> Tab:
    looks = {"viewport": DESKTOP, "color_scheme": "light", "offline": True}
    return open_address(browser, path.as_uri(), "html[data-drawn=light]", **looks)


@pytest.fixture
def tab(opened) -> Any:
    return opened.page


@pytest.fixture(autouse=True)
def nothing_is_said_or_asked_for(opened, path) -> Iterator[None]:
    yield
    assert opened.said == []
    assert [a for a in opened.asked if not a.startswith("data:")] == [path.as_uri()]


def names(page) -> list[str]:
    return page.locator("#sortable tbody tr:visible th").all_text_contents()


def test_the_figure_is_drawn_and_described(tab):
    charts = tab.locator(".chart")
    assert charts.count() == 1
    assert "12 settings and 5 baselines" in (charts.get_attribute("aria-label") or "")
    marks = charts.locator(".mark-symbol path")
    assert marks.count() >= 17


def test_headings_sort_by_keyboard_and_say_so(tab):
    heading = tab.locator("#sortable th button", has_text="objective")
    heading.focus()
    tab.keyboard.press("Enter")
    values = tab.locator("#sortable tbody tr td:nth-child(3)").all_text_contents()
    numbers = [float(value) for value in values if value != "–"]
    assert numbers == sorted(numbers, reverse=True)
    assert values[len(numbers) :] == ["–"] * 3  # failed, and last either way
    assert tab.get_attribute("#sortable th:nth-child(3)", "aria-sort") == "descending"
    assert tab.inner_text("#status") == "Sorted by objective, descending."
    tab.keyboard.press("Enter")
    values = tab.locator("#sortable tbody tr td:nth-child(3)").all_text_contents()
    assert values[0] == "0.05"
    assert values[-3:] == ["–"] * 3
    assert tab.get_attribute("#sortable th:nth-child(3)", "aria-sort") == "ascending"
    tab.locator("#sortable th button", has_text="trial").click()
    tab.locator("#sortable th button", has_text="trial").click()
    assert names(tab)[:3] == ["0", "1", "2"]


def test_words_and_conditions_filter(tab):
    tab.fill("#filter", "dare+ties objective>=0.5")
    wanted = [
        str(trial.number)
        for trial in sample.make_search().trials
        if trial.settings["method"] == "dare+ties" and (trial.objective or 0.0) >= 0.5
    ]
    assert names(tab) == wanted
    assert tab.inner_text("#matches") == f"{len(wanted)} of 29 rows"
    assert 0 < len(wanted) < 8
    tab.fill("#filter", "state=failed")
    assert names(tab) == ["5", "13", "21"]
    tab.fill("#filter", "")
    assert len(names(tab)) == 29


def test_two_rows_are_compared(tab):
    tab.get_by_label("Compare average", exact=True).check()
    assert "average" in tab.inner_text("#comparison-hint")
    tab.get_by_label("Compare 2", exact=True).check()
    rows = [row.split("\t") for row in tab.locator("#comparison table tr").all_inner_texts()]
    assert rows[0] == ["", "average", "trial 2", "difference"]
    by_name = {row[0]: row[1:] for row in rows[1:]}
    assert by_name["objective"] == ["0.6", "0.6", ""]
    assert by_name["method"] == ["–", "sum", ""]
    assert by_name["english"] == ["1.325", "1.329", "-0.004"]
    tab.get_by_label("Compare base", exact=True).check()  # the third takes the first one's place
    assert not tab.get_by_label("Compare average", exact=True).is_checked()


def test_hovering_shows_a_trial(tab):
    tab.locator("#chart-ranking .mark-symbol path").nth(2).hover()
    tab.wait_for_selector("#vg-tooltip-element.visible")
    assert tab.inner_text("#vg-tooltip-element").split()[0] == "name"
    tab.mouse.move(0, 0)


def test_the_keyboard_goes_from_mark_to_mark_and_says_what_it_is(tab):
    tab.focus("#chart-ranking")
    tab.keyboard.press("ArrowRight")
    tab.wait_for_selector("#vg-tooltip-element.visible")
    first = tab.inner_text("#status")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#status") not in ("", first)
    assert tab.locator("#chart-ranking .pointed").count() == 1
    tab.keyboard.press("ArrowLeft")
    assert tab.inner_text("#status") == first


@pytest.mark.parametrize("width", [360, 400, 768, 1600])
def test_no_width_needs_sideways_scrolling(tab, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.wait_for_timeout(400)
    tab.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)
    tab.set_viewport_size(DESKTOP)


def test_without_scripts_the_table_is_still_there(browser, path):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("#sortable tbody tr").count() == 29
    assert page.locator("noscript").first.is_visible()
    context.close()
