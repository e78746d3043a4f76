"""The page's first parts in a browser: numbers and pictures beside NumPy and `dare.keep_mask`."""

from __future__ import annotations

import base64
import math
import re
from functools import cache

import numpy as np
import pytest

import dare
from dare.demo.llama import Llama, read_weights
from dare.demo.merges import BASE, CONFIG, TUNED, DemoMerge
from dare.demo.tasks import TASKS
from helpers import eventually

ATTENTION = "model.layers.4.self_attn.o_proj.weight"
VALUES = "model.layers.0.self_attn.v_proj.weight"
NAMES = ("add", "sort", "say")
PIXELS = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return btoa(data.reduce((text, byte) => text + String.fromCharCode(byte), ""));
}"""


@cache
def tensor(model: str, name: str) -> np.ndarray:
    folder = BASE if model == "base" else TUNED[model]
    return read_weights(folder / "model.safetensors")[name].astype(np.float32)


@cache
def delta_of(model: str, name: str) -> np.ndarray:
    return (tensor(model, name) - tensor("base", name)).ravel()


def after_dare(delta, name, rate, seed, *, rescale=True) -> np.ndarray:
    keep = dare.keep_mask(name, delta.size, rate, seed)
    return np.where(keep, delta * np.float32(1 / (1 - rate) if rescale else 1), np.float32(0))


def shown(tab, part: str, name: str) -> str:
    return tab.page.inner_text(f"#{part} [data-shows={name}]")


def pixels_of(tab, name: str) -> np.ndarray:
    """Red, green, blue and opacity of every element of a picture of the first part."""
    encoded = tab.page.eval_on_selector(f"#drop canvas[data-picture={name}]", PIXELS)
    return np.frombuffer(base64.b64decode(encoded), np.uint8).reshape(-1, 4)


def number(text: str) -> float:
    return float(re.search(r"-?[\d.]+", text.replace("−", "-").replace(",", "")).group())


def expect_laws(tab, name, rate, seed, model="add", *, rescale=True) -> None:
    """All readouts of the first part are what NumPy makes of the same delta and the same mask."""
    delta = delta_of(model, name)
    after = after_dare(delta, name, rate, seed, rescale=rescale).astype(np.float64)
    square = (delta.astype(np.float64) ** 2).sum()
    dropped = 1 - dare.keep_mask(name, delta.size, rate, seed).mean()

    def check() -> None:
        assert number(shown(tab, "drop", "dropped")) == round(100 * dropped, 1)
        average = (after * delta).sum() / square
        assert number(shown(tab, "drop", "average")) == pytest.approx(100 * average, abs=0.06)
        noise = math.sqrt(((after - delta) ** 2).sum() / square)
        assert number(shown(tab, "drop", "noise")) == pytest.approx(noise, abs=6e-3)

    eventually(check)


@pytest.fixture
def tab(static_site, open_tab):
    """The page with settings of its own; nothing goes wrong while a test looks at it."""
    state = "drop.p=0.8&drop.seed=7&signs.dare=true&signs.p=0.3"
    tab = open_tab(f"{static_site.with_state(state)}#drop")
    yield tab
    assert tab.said == []
    assert tab.asked_elsewhere(static_site) == []


def rate_of(tab) -> float:
    return float(tab.page.inner_text("#drop .slider output"))


def test_the_rate_moves_by_keyboard_and_mouse_and_all_numbers_follow(static_site, open_tab):
    tab = open_tab(f"{static_site.address}#drop")
    page = tab.page
    expect_laws(tab, ATTENTION, 0.5, 42)
    page.focus("#control-drop-p")
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    assert rate_of(tab) == 0.57
    expect_laws(tab, ATTENTION, 0.57, 42)

    slider = page.locator("#control-drop-p")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.57, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, middle, steps=4)
    page.mouse.up()
    assert 0.8 < rate_of(tab) < 0.97
    expect_laws(tab, ATTENTION, rate_of(tab), 42)

    page.click("#drop .panel button")
    expect_laws(tab, ATTENTION, rate_of(tab), 43)
    page.focus("#control-drop-rescale")
    page.keyboard.press("Space")
    expect_laws(tab, ATTENTION, rate_of(tab), 43, rescale=False)
    page.select_option("#control-drop-model", "sort")
    expect_laws(tab, ATTENTION, rate_of(tab), 43, "sort", rescale=False)
    assert tab.said == []
    assert tab.asked_elsewhere(static_site) == []


def test_the_model_writes_what_the_package_makes_it_write(static_site, open_tab, tmp_path):
    tab = open_tab(f"{static_site.with_state('drop.p=0.9')}#drop")
    tab.page.wait_for_selector("#drop .answers td")
    merge = DemoMerge("sum", 0.9, 1.0, 42, (TUNED["add"],))
    model = Llama(merge.carry_out(tmp_path / "merged.safetensors"), CONFIG)
    examples = TASKS[0].examples("test", 8)
    texts = [text.split("\n")[0] for text in model.write([prompt for prompt, _ in examples])]
    cells = tab.page.locator("#drop .answers tbody tr").all()
    written = [cell.locator("td").first.inner_text() for cell in cells]
    assert written == [text or "(nothing)" for text in texts]
    right = sum(text == answer for text, (_, answer) in zip(texts, examples, strict=True))
    assert 0 < right < 8
    assert shown(tab, "drop", "verdict") == f"{right} of 8 right at p = 0.90"
    assert len(tab.page.query_selector_all("#drop .answers .right")) == right

    tab.page.uncheck("#control-drop-rescale")
    tab.page.wait_for_function(
        "() => document.querySelectorAll('#chart-drop-tried .mark-symbol path').length > 3"
    )
    tab.page.click("[role=tab][href='#top']")
    tab.page.wait_for_selector("#top [data-answers] li")
    merged = tab.page.locator("#top figure").last.locator("li.right")
    assert merged.count() == 3
    assert tab.said == []
    assert tab.asked_elsewhere(static_site) == []


def test_one_weight_moves_by_slider_and_seed(static_site, open_tab):
    tab = open_tab(static_site.address)
    page = tab.page
    base, *tuned = (float(tensor(name, VALUES).ravel()[52]) for name in ("base", *NAMES))

    def check(rate: float, seed: int, noise: str) -> None:
        kept = [dare.keep_mask(VALUES, 53, rate, seed + place)[52] for place in range(3)]
        changes = [one - base for one in tuned]
        after = [one / (1 - rate) if keep else 0 for one, keep in zip(changes, kept, strict=True)]
        rows = page.locator("#one-weight [data-model] td:last-child").all_inner_texts()
        assert rows == [f"{one:+.5f}".replace("-", "−") if one else "dropped" for one in after]
        assert number(shown(tab, "top", "sum")) == pytest.approx(base + sum(after), abs=6e-6)
        assert number(shown(tab, "top", "plain")) == pytest.approx(base + sum(changes), abs=6e-6)
        assert noise in shown(tab, "top", "noise")

    check(0.5, 42, "as big as the change")
    page.focus("#control-top-p")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    eventually(lambda: check(0.79, 42, "1.9 times"))
    page.fill("#control-top-p", "0.2")
    page.click("#one-weight button")
    eventually(lambda: check(0.2, 45, "50% of the change"))
    page.click("[role=tab][href='#drop']")
    page.click("#drop a[href*=rescale]")  # a link to a setting sets it
    assert not page.is_checked("#control-drop-rescale")
    assert tab.said == []


def check_pictures(tab) -> None:
    keep = dare.keep_mask(ATTENTION, 128 * 128, 0.8, 7)
    delta = delta_of("add", ATTENTION)
    for name in ("mask", "after"):
        red, _, blue, alpha = pixels_of(tab, name).T
        assert np.array_equal(alpha == 255, keep)
        assert (red[keep & (delta > 0.002)] > blue[keep & (delta > 0.002)]).all()
        assert (red[keep & (delta < -0.002)] < blue[keep & (delta < -0.002)]).all()

    tab.page.focus("#drop canvas[data-picture=before]")
    for key in ("ArrowDown", "Shift+ArrowRight", "ArrowRight"):
        tab.page.keyboard.press(key)
    place = 41 * 128 + 75
    line = shown(tab, "drop", "element").replace("−", "-")
    assert line.startswith(f"Row 41, column 75: δ = {delta[place]:+.5f} → ")
    after = after_dare(delta, ATTENTION, 0.8, 7)[place]
    assert line.endswith(f"kept: {after:+.5f}" if keep[place] else "dropped: 0")


def votes(rate: float, seed: int, name: str) -> tuple[list[np.ndarray], np.ndarray]:
    terms = [
        after_dare(delta_of(model, name), name, rate, seed + place)
        for place, model in enumerate(NAMES)
    ]
    positive = sum(np.maximum(term, np.float32(0)) for term in terms)
    negative = sum(np.minimum(term, np.float32(0)) for term in terms)
    return terms, np.sign(positive + negative)


def check_signs(tab) -> None:
    terms, sign = votes(0.3, 42, VALUES)
    positive = sum(term > 0 for term in terms)
    negative = sum(term < 0 for term in terms)
    assert number(shown(tab, "signs", "meeting")) == round(
        100 * (positive + negative > 1).mean(), 1
    )
    conflicts = 100 * ((positive > 0) & (negative > 0)).mean()
    assert number(shown(tab, "signs", "conflicting")) == round(conflicts, 1)
    assert number(shown(tab, "signs", "empty")) == round(100 * (sign == 0).mean(), 1)

    tab.page.click("[role=tab][href='#signs']")
    tab.page.focus("#signs canvas[data-picture=vote]")
    tab.page.keyboard.press("Shift+ArrowDown")
    tab.page.focus("#signs canvas[data-patch]")
    tab.page.keyboard.press("ArrowRight")
    place = (58 + 5) * 128 + 48 + 6
    values = [term[place] for term in terms]
    winners = [value for value in values if value * sign[place] > 0]
    assert winners

    def check_election() -> None:
        text = shown(tab, "signs", "written-vote").replace("−", "-")
        assert "Row 63, column 54" in text
        for name, value in zip(NAMES, values, strict=True):
            assert re.search(rf"{name}\s+{re.escape(f'{value:+.5f}')}", text)
        assert f"is {np.mean(winners):+.5f}." in text

    eventually(check_election)
    tab.page.uncheck("#control-signs-dare")
    plain, _ = votes(0, 42, VALUES)
    conflicts = np.any(np.array(plain) > 0, axis=0) & np.any(np.array(plain) < 0, axis=0)

    def check_without() -> None:
        assert number(shown(tab, "signs", "conflicting")) == round(100 * conflicts.mean(), 1)

    eventually(check_without)


def test_pictures_and_votes_are_as_computed_apart_from_the_page(tab):
    """One visit for both: opening the page is what takes time."""
    check_pictures(tab)
    check_signs(tab)


def test_a_phone_in_the_dark_with_an_address_that_makes_no_sense(static_site, open_tab):
    state = "drop.p=7&drop.model=nobody&live.scale=x&signs.row=999&drop.seed=-3"
    tab = open_tab(static_site.with_state(state), width=390, theme="dark")
    page = tab.page
    assert rate_of(tab) == 0.99
    assert page.input_value("#control-drop-model") == "add"
    assert page.input_value("#control-live-scale") == "1"
    assert "Row 121, " in shown(tab, "signs", "written-vote")

    page.wait_for_selector("html[data-drawn=dark]", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    before = pixels_of(tab, "before").mean()
    page.select_option("#theme", "light")
    page.wait_for_selector("html[data-drawn=light]", state="attached")
    assert pixels_of(tab, "before").mean() > before + 20
    assert tab.said == []


def test_a_part_that_fails_says_so_and_leaves_the_others(static_site, browser):
    page = browser.new_page()
    page.route("**/models/sort.safetensors", lambda route: route.fulfill(status=404, body=""))
    page.goto(static_site.address)
    page.wait_for_selector("html[data-ready=true]", state="attached")
    assert "sort" in page.inner_text("#signs .failed")
    assert page.inner_text("#drop [data-shows=dropped]").endswith("%")
    assert page.locator("#drop .failed").count() == 0
    page.close()
