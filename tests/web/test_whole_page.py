"""The whole page, both engines: silent, by keyboard alone, and for those who do not see it.

The SHA-256 on the page is that of the merge which its command and its Python make.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import Tab

from dare.cli import main
from dare.output.verification import verify
from dare.web.single import single_page

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


def test_it_opens_from_the_disk_with_no_server(open_tab, tmp_path):
    page = tmp_path / "playground.html"
    page.write_bytes(single_page())
    tab = open_tab(f"{page.as_uri()}?live.m=dare%2Bties", offline=True)
    merged = tab.page.locator(".three figure:last-child li")
    merged.first.wait_for()
    assert [item.get_attribute("class") for item in merged.all()] == 3 * ["right"]
    tab.page.evaluate("document.getElementById('live').scrollIntoView()")
    assert len(shown_sha(tab)) == 64
    assert tab.said == []
    assert [a for a in tab.asked if not a.startswith(("file:", "blob:", "data:"))] == []


def test_page_command_and_python_give_one_sha256(site, open_tab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tab = open_tab(site.with_state("live.m=dare%2Btrim%2Bties&live.p=0.6&live.seed=7"))
    tab.page.evaluate("document.getElementById('live').scrollIntoView()")
    shown = shown_sha(tab)
    for line in shown_code(tab, "command").replace("\\\n", " ").splitlines():
        assert main(shlex.split(line)[1:]) == 0
    merged = Path("merged.safetensors")
    assert verify(merged).sha256 == shown
    merged.rename("by-command.safetensors")
    code = shown_code(tab, "python")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert verify(merged).sha256 == shown


def shown_sha(tab: Tab) -> str:
    """The SHA-256 that the page shows for its present setting."""
    tab.page.wait_for_function(
        "() => /^[0-9a-f]{64}$/.test(document.getElementById('live-digest').textContent)"
        " && !document.getElementById('live-code').dataset.stale"
    )
    return tab.page.inner_text("#live-digest")


def shown_code(tab: Tab, form: str) -> str:
    tab.page.select_option("#live-code select", form)
    return tab.page.inner_text("#live-text")
