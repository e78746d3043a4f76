"""The whole page, with and without a server: silent, by keyboard, for those who do not see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import Tab

MOST_TABS = 400
LOOKS = [(1280, "light"), (390, "dark")]
SHIFTS = """() => new Promise((done) => {
    let sum = 0;
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) if (!entry.hadRecentInput) sum += entry.value;
    }).observe({ type: "layout-shift", buffered: true });
    setTimeout(() => done(sum), 500);
})"""
REACHABLE = """() =>
    [...document.querySelectorAll("button, input, select, a, canvas, summary, pre")]
    .filter((each) => each.tabIndex >= 0 && !each.disabled && each.checkVisibility())
    .map((each) => { each.dataset.reach = "no"; })
    .length"""
OUTDATE = """() => new Promise((done) => {
    for (const each of document.querySelectorAll(".card, #live-code, #live-scores"))
        each.dataset.stale = "true";
    setTimeout(done, 500);
})"""
MARK_FOCUSED = (
    "() => { const at = document.activeElement; at.dataset.reach = 'yes'; return at.id; }"
)


@pytest.fixture(params=["static_site", "local_site"])
def site(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_it_is_silent_and_steady_and_asks_nobody_else(site, open_tab, width, theme):
    tab = open_tab(site.address, width, theme)
    for _ in each_part(tab):
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.said == []
    assert tab.asked_elsewhere(site) == []
    assert tab.page.evaluate(SHIFTS) < 0.1


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_a_checker_of_accessibility_finds_nothing(site, open_tab, width, theme):
    axe = pytest.importorskip("axe_core_python", reason="axe is not installed")
    tab = open_tab(site.address, width, theme, bypass_csp=True)
    tab.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    for _ in each_part(tab):
        for setting in ("", OUTDATE):
            tab.page.evaluate(setting)
            found = tab.page.evaluate("axe.run()")["violations"]
            assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found] == []


def test_every_control_is_reached_by_the_tab_key(site, open_tab):
    tab = open_tab(site.address)
    reachable = 0
    for name in each_part(tab):
        reachable += tab.page.evaluate(REACHABLE)
        for _ in range(MOST_TABS):
            tab.page.keyboard.press("Tab")
            tab.page.evaluate(MARK_FOCUSED)
            if not tab.page.locator("[data-reach=no]").count():
                break
        missed = tab.page.locator("[data-reach=no]").evaluate_all(
            "all => all.map(e => e.outerHTML)"
        )
        assert missed == [], name
    assert reachable > 40


def test_parts_are_tabs_for_keys_links_and_the_way_back(static_site, open_tab):
    tab = open_tab(f"{static_site.address}#live-code")  # something in a part
    page = tab.page
    assert shown_parts(page) == ["live"]
    assert page.locator("#live-code").bounding_box()["y"] < 900
    page.focus("[role=tab][aria-selected=true]")
    page.keyboard.press("ArrowRight")
    assert shown_parts(page) == ["predict"]
    page.wait_for_selector("#chart-predict[data-drawn] svg")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert shown_parts(page) == ["top"]
    assert page.evaluate("location.hash") == "#top"
    page.keyboard.press("ArrowLeft")
    page.go_back()
    page.go_back()
    page.wait_for_selector("#own:not([hidden])")
    assert shown_parts(page) == ["own"]
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert shown_parts(page) == ["own"]
    assert tab.said == []


def shown_parts(page) -> list[str]:
    """The parts that are shown; their tabs are the selected ones, and alone in the tab order."""
    shown = "main > section:not([hidden])"
    found = page.eval_on_selector_all(shown, "all => all.map(e => e.id)")
    for mark in ("[aria-selected=true]", "[tabindex='0']"):
        tabs = page.eval_on_selector_all(f"[role=tab]{mark}", "all => all.map(e => e.hash)")
        assert tabs == [f"#{name}" for name in found]
    return found


def each_part(tab: Tab) -> Iterator[str]:
    """Show one part after the other, which begin to work when they are seen."""
    for name in tab.page.eval_on_selector_all("[role=tab]", "all => all.map(e => e.hash)"):
        tab.page.click(f"[role=tab][href='{name}']")
        tab.page.wait_for_timeout(300)
        if name == "#live":
            shown_sha(tab)
        yield name


def shown_sha(tab: Tab) -> str:
    """The SHA-256 that the page shows for its present setting."""
    tab.page.wait_for_function(
        "() => /^[0-9a-f]{64}$/.test(document.getElementById('live-digest').textContent)"
        " && !document.getElementById('live-code').dataset.stale"
    )
    return tab.page.inner_text("#live-digest")
