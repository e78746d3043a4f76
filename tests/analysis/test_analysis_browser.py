"""The page in a real browser: Debian's chromium, offline, driven by playwright."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sample

import pages
from dare.analysis.document import make_document
from dare.documents.page import render_page
from helpers import eventually

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
HOSTILE = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "${alert(3)}")


class Tab(pages.Tab):
    """A tab that shows a report."""

    def chart(self, name: str) -> str:
        return self.page.inner_html(f"#chart-{name} svg")

    def unfold(self) -> None:
        """Open what is folded, and wait for its figures."""
        self.page.evaluate("document.querySelectorAll('.fold').forEach(e => { e.open = true })")
        self.page.wait_for_function(
            "[...document.querySelectorAll('.chart')].every(chart => chart.dataset.drawn)"
        )


def open_tab(browser, path: Path, size=DESKTOP, theme="light", **settings) -> Tab:
    looks = {"viewport": size, "color_scheme": theme, "offline": True, **settings}
    return pages.open_address(browser, path.as_uri(), f"html[data-drawn={theme}]", Tab, **looks)


@pytest.fixture(scope="module")
def desktop(browser, page) -> Tab:
    return open_tab(browser, page)


@pytest.fixture(autouse=True)
def nothing_is_said(request) -> Iterator[None]:
    yield
    if "desktop" in request.fixturenames:
        assert request.getfixturevalue("desktop").said == []


def test_the_page_asks_for_nothing_but_itself(desktop, page):
    fetched = [address for address in desktop.asked if not address.startswith(("data:", "blob:"))]
    assert fetched == [page.as_uri()]


def test_what_is_folded_is_drawn_when_it_is_opened(browser, crowded_page):
    tab = open_tab(browser, crowded_page).page
    folded = "#chart-change-1"
    assert not tab.locator(f"{folded} svg").count()
    tab.locator("#changes .fold > summary").first.focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f"{folded} svg")
    assert tab.locator(f"{folded} svg").bounding_box()["width"] > 200
    tab.context.close()


def test_every_figure_is_drawn(desktop):
    desktop.unfold()
    drawings = desktop.page.eval_on_selector_all(
        ".chart",
        """charts => charts.map(chart => {
            const svg = chart.querySelector("svg");
            const marks = ".mark-rect path, .mark-line path, .mark-symbol path";
            const { width, height } = svg.getBoundingClientRect();
            const label = chart.getAttribute("aria-label");
            return [width, height, svg.querySelectorAll(marks).length, label];
        })""",
    )
    assert len(drawings) == 11
    for width, height, marks, label in drawings:
        assert width > 200
        assert height > 90
        assert marks >= 3
        assert label.endswith(".")


def test_picking_a_model_brings_it_out_everywhere(desktop):
    page = desktop.page
    before = {name: desktop.chart(name) for name in ("magnitudes", "cosines", "predicted-error")}
    page.select_option("#model", "code")
    page.wait_for_function("document.getElementById('status').textContent.includes('code')")
    assert page.is_visible("#figure-change-2")
    assert not page.is_visible("#figure-change-1")
    assert page.get_attribute("tr.chosen", "data-model") == "code"
    assert page.locator(".findings li:not([hidden])").count() == 1
    for name, drawing in before.items():
        assert desktop.chart(name) != drawing
    page.select_option("#model", "")
    page.wait_for_function("document.getElementById('status').textContent.includes('all')")
    for name, drawing in before.items():
        assert desktop.chart(name) == drawing


def test_shift_and_wheel_zoom_and_a_button_undoes_it(desktop):
    page = desktop.page
    before = desktop.chart("predicted-error")
    page.locator("#chart-predicted-error").scroll_into_view_if_needed()
    box = page.locator("#chart-predicted-error").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Shift")
    wait_for_change(desktop, "predicted-error", before)
    zoomed = desktop.chart("predicted-error")
    page.mouse.move(0, 0)
    page.click("#figure-predicted-error [data-resets]")
    wait_for_change(desktop, "predicted-error", zoomed)
    labels = page.locator("#chart-predicted-error .role-axis-label").first.locator("text")

    def is_undone() -> None:
        assert labels.all_text_contents()[:3] == ["0.0", "0.1", "0.2"]

    eventually(is_undone)


def wait_for_change(tab: Tab, name: str, before: str) -> None:
    tab.page.wait_for_function(
        "([name, before]) => ![undefined, before].includes("
        "document.querySelector(`#chart-${name} svg`)?.innerHTML)",
        arg=[name, before],
    )


def test_a_figure_can_be_saved(desktop, tmp_path):
    with desktop.page.expect_download() as download:
        desktop.page.click("[data-figure=cancelled][data-format=svg]")
    assert download.value.suggested_filename == "cancelled.svg"
    download.value.save_as(tmp_path / "cancelled.svg")
    assert (tmp_path / "cancelled.svg").read_text("utf-8").startswith("<svg")


def test_dark_colours_are_chosen_and_remembered(browser, page):
    tab = open_tab(browser, page, theme="dark")
    assert "#56b4e9" in tab.chart("cancelled")
    tab.page.emulate_media(color_scheme="light")
    tab.page.wait_for_selector("html[data-drawn=light]")
    assert "#0072b2" in tab.chart("cancelled")
    tab.page.select_option("#theme", "dark")
    tab.page.wait_for_selector("html[data-drawn=dark]")
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(18, 20, 23)"
    tab.page.reload()
    tab.page.wait_for_selector("html[data-drawn=dark]")
    assert tab.page.input_value("#theme") == "dark"
    assert tab.said == []


def test_the_keyboard_reaches_everything(desktop):
    page = desktop.page
    page.focus(".skip")  # which is the first
    reached = []
    for _ in range(110):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(e => e.id || e.dataset.figure || e.dataset.copies || e.tagName)"
                "(document.activeElement)"
            )
        )
    assert reached[:3] == ["model", "theme", "A"]
    assert {"SUMMARY", "cosines", "survival", "recipe"} <= set(reached)
    page.focus("#figure-cosines summary")
    page.keyboard.press("Enter")
    assert page.is_visible("#figure-cosines table")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")


def test_no_width_needs_sideways_scrolling(browser, page, crowded_page):
    for path, widths in ((page, (360, 768, 1600)), (crowded_page, (390, 820, 1280))):
        tab = open_tab(browser, path)
        tab.unfold()
        for width in widths:
            fits(tab, width)
        tab.page.context.close()


def test_hostile_names_do_nothing(browser, hostile_page):
    tab = open_tab(browser, hostile_page, PHONE)
    tab.page.on("dialog", lambda dialog: tab.said.append(dialog.message))
    tab.page.select_option("#model", HOSTILE[0])
    tab.page.locator("#chart-cosines .mark-rect path").first.hover(force=True)
    tab.page.wait_for_selector("#vg-tooltip-element.visible")
    assert tab.page.locator("img").count() == 0
    assert tab.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert tab.said == []
    assert tab.asked == [hostile_page.as_uri()]


def page_of(names: tuple[str, ...], folder: Path) -> Path:
    path = folder / "page.html"
    readiness, advice = sample.make_readiness(names), sample.make_advice(names)
    document = make_document(sample.make_analysis(names), readiness, advice)
    path.write_text(render_page(document), "utf-8")
    return path


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory) -> Path:
    return page_of(HOSTILE, tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def lonely_page(tmp_path_factory) -> Path:
    return page_of(("alone",), tmp_path_factory.mktemp("alone"))


TOOLTIPS = """() => {
    const found = {};
    const walk = (item, name) => {
        if (item.tooltip !== undefined && item.tooltip !== null) found[name].push(item.tooltip);
        for (const below of item.items ?? []) walk(below, name);
    };
    for (const chart of document.querySelectorAll(".chart")) {
        const name = chart.id.replace("chart-", "");
        found[name] = [];
        walk(darePage.view(name).scenegraph().root, name);
    }
    return found;
}"""
CHANGE = {"layer", "‖δ‖ / ‖base‖", "largest |δ|", "elements"}
PAIR = {"model", "and", "cosine", "in opposite directions", "elements both change"}
FIELDS = {
    "predicted-error": {"model", "drop rate", "error of outputs, at most", "error of the delta"},
    "cosines": PAIR,
    "conflicts": PAIR,
    "cancelled": {"layer", "cancelled", "by chance"},
    "changes": {"model", *CHANGE},
    "change": {"kind", *CHANGE},
    "magnitudes": {"model", "|δ| from", "below", "share of elements"},
    "spectra": {"model", "tensor", "direction", "σ / σ₁", "effective rank", "of"}
    | {"above the noise"},
    "kept": {"model", "after", "left"},
    "survival": {"model", "share of its delta", "cosine with the merged delta"},
}


@pytest.mark.parametrize("which", ["page", "crowded_page", "hostile_page", "lonely_page"])
def test_tooltips_of_every_figure_have_values(browser, which, request):
    tab = open_tab(browser, request.getfixturevalue(which))
    tab.unfold()
    for name, tooltips in tab.page.evaluate(TOOLTIPS).items():
        fields = FIELDS["change" if name.startswith("change-") else name]
        assert tooltips, name
        for tooltip in tooltips:
            assert set(tooltip) == fields, name
            for text in map(str, tooltip.values()):
                assert text.strip(), name
                assert not any(word in text for word in ("undefined", "NaN", "null", "None")), name
    assert tab.said == []
    tab.page.context.close()


def test_the_recipe_can_be_copied(browser, page, subject):
    tab = open_tab(browser, page).page
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.focus("[data-copies=recipe]")
    tab.keyboard.press("Enter")
    tab.wait_for_function("document.getElementById('status').textContent === 'Copied'")
    copied = tomllib.loads(tab.evaluate("navigator.clipboard.readText()"))
    assert copied == subject.advice.recipe
    tab.context.close()


@pytest.mark.parametrize(
    ("which", "width", "theme"),
    [
        ("crowded_page", 390, "light"),
        ("crowded_page", 1280, "dark"),
        ("hostile_page", 390, "dark"),
        ("lonely_page", 820, "light"),
    ],
)
def test_axe_finds_nothing(browser, which, width, theme, request):
    axe = pytest.importorskip("axe_core_python.sync_playwright").Axe()
    size = {"width": width, "height": 900}
    tab = open_tab(browser, request.getfixturevalue(which), size, theme)
    # Thousands of marks and cells are like their neighbours, and take axe minutes.
    alike = ".chart svg g g g, .foot tbody tr:nth-child(n + 3)"
    tab.page.eval_on_selector_all(alike, "all => all.forEach(each => each.remove())")
    found = axe.run(tab.page)["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    tab.page.context.close()


OVERLAPS = """() => {
    const found = [];
    for (const chart of document.querySelectorAll(".chart")) {
        const labels = [...chart.querySelectorAll(
            ".role-axis-label text, .role-legend-label text, .role-legend-symbol path"
        )].filter((e) => e.textContent.trim() && Number(getComputedStyle(e).opacity) > 0);
        const boxes = labels.map((e) => [e.textContent, e.getBoundingClientRect()]);
        for (const [i, [a, one]] of boxes.entries()) {
            for (const [b, other] of boxes.slice(i + 1)) {
                const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
                const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
                if (wide > 1 && high > 2) found.push([chart.id, a, b]);
            }
        }
    }
    return found;
}"""


def fits(tab: Tab, width: int) -> None:
    """Check that at this width nothing overlaps, and nothing needs sideways scrolling."""
    tab.page.set_viewport_size({"width": width, "height": 900})
    tab.page.wait_for_timeout(1200)

    def check() -> None:
        assert tab.page.evaluate(OVERLAPS) == []
        inner, whole = tab.page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
        assert whole == inner == width

    eventually(check)


def test_without_scripts_the_numbers_are_still_there(browser, page):
    context = browser.new_context(java_script_enabled=False, offline=True)
    tab = context.new_page()
    tab.goto(page.as_uri())
    assert tab.locator("noscript").first.is_visible()
    tab.locator("#figure-cosines summary").click()
    assert tab.locator("#figure-cosines table").is_visible()
    context.close()
