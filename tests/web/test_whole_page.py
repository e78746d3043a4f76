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
    scroll_through(tab)
    assert tab.said == []
    assert tab.asked_elsewhere(site) == []
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.page.evaluate(SHIFTS) < 0.1


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_a_checker_of_accessibility_finds_nothing(site, open_tab, width, theme):
    axe = pytest.importorskip("axe_core_python", reason="axe is not installed")
    tab = open_tab(site.address, width, theme, bypass_csp=True)
    scroll_through(tab)
    tab.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    for setting in ("", OUTDATE):
        tab.page.evaluate(setting)
        found = tab.page.evaluate("axe.run()")["violations"]
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found] == []


def test_every_control_is_reached_by_the_tab_key(site, open_tab):
    tab = open_tab(site.address)
    assert tab.page.evaluate(REACHABLE) > 40
    for _ in range(MOST_TABS):
        tab.page.keyboard.press("Tab")
        tab.page.evaluate(MARK_FOCUSED)
        left = tab.page.locator("[data-reach=no]").count()
        if not left:
            break
    missed = tab.page.eval_on_selector_all("[data-reach=no]", "all => all.map(e => e.outerHTML)")
    assert missed == []


def scroll_through(tab: Tab) -> None:
    """Parts begin to work when they are seen."""
    for name in sections(tab):
        tab.page.evaluate(f"document.getElementById({name!r}).scrollIntoView()")
        tab.page.wait_for_timeout(300)
    shown_sha(tab)


def sections(tab: Tab) -> Iterator[str]:
    yield from tab.page.eval_on_selector_all("main section[id]", "all => all.map(e => e.id)")


def shown_sha(tab: Tab) -> str:
    """The SHA-256 that the page shows for its present setting."""
    tab.page.wait_for_function(
        "() => /^[0-9a-f]{64}$/.test(document.getElementById('live-digest').textContent)"
        " && !document.getElementById('live-code').dataset.stale"
    )
    return tab.page.inner_text("#live-digest")
