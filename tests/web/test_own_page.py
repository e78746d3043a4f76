"""Your own models in a browser, with the command behind it: choose, plan, analyze, merge."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from own_helpers import large, make_models, own_alone, recipe_of

import dare
from dare.analysis.readiness import HEADLINES, Verdict
from dare.output.verification import verify
from helpers import wait_until


@pytest.fixture(scope="session")  # as the server: tests of a module may come in several turns
def models(local_site) -> Path:
    """The folder that the server was started with."""
    return make_models(local_site.folder)


@pytest.fixture(scope="module")
def opened(browser, local_site, models) -> Iterator[tuple[Any, list[str]]]:
    size = {"width": 1280, "height": 900}
    with own_alone(browser, local_site.address, viewport=size) as opened:
        yield opened


@pytest.fixture
def page(opened, models) -> Iterator[Any]:
    """The page as at first, but for the jobs; it has nothing to complain of but refusals."""
    page, said = opened
    open_path(page, models)
    page.uncheck("#own-overwrite")
    page.evaluate("ownState.set({ 'own.recipe': '' })")
    page.wait_for_selector("#own-entries [data-name=sort]")
    yield page
    assert [text for text in said if "status of 403" not in text] == []


def open_path(page, path: Path | str) -> None:
    page.fill("#own-path", str(path))
    page.press("#own-path", "Enter")


def wait_for_recipe(page, text: str) -> None:
    """Wait until the recipe says something."""
    page.wait_for_function(
        "text => document.getElementById('own-toml').textContent.includes(text)", arg=text
    )


def choose(page, name: str, action: str) -> None:
    page.click(f"#own-entries [data-name='{name}'] button:text-is('{action}')")


def choose_two(page) -> None:
    choose(page, "base", "Use as base")
    choose(page, "add", "Add")
    choose(page, "say", "Add")
    page.wait_for_selector("#own-analyze:enabled")


def set_output(page, output: Path) -> None:
    page.fill("#own-output", str(output))
    page.press("#own-output", "Enter")
    wait_for_recipe(page, str(output))


def job(page, kind: str, state: str) -> Any:
    """The latest card of a kind, when it is in a state."""
    card = page.locator(f"#own-{kind} > li").first
    page.wait_for_selector(f"#own-{kind} > li:first-child[data-state={state}]")
    return card


def test_from_models_to_a_merge(page, models):
    choose_two(page)
    facts = page.inner_text("#own-plan-text .own-facts")
    assert "47 merged" in facts
    assert page.input_value("#own-output") == str(models / "merged")
    assert page.input_value("#own-method") == "linear"
    assert tomllib.loads(page.text_content("#own-toml"))["method"] == "linear"
    assert page.is_hidden("#control-own-rate")

    page.click("#own-analyze")
    job(page, "analyses", "done")
    page.wait_for_selector("#own-analysis .verdict")
    assert page.inner_text("#own-analysis .verdict h3") == HEADLINES[Verdict.NO_DEFECT]
    page.fill("#own-method", "sum")
    page.press("#own-method", "Enter")
    wait_for_recipe(page, '"sum"')
    page.click("text=Use this recipe")
    advised = page.text_content("#analysis-recipe")
    wait_for_recipe(page, '"linear"')
    assert page.evaluate("document.activeElement.id") == "own-method"
    shown = tomllib.loads(page.text_content("#own-toml"))
    assert shown == tomllib.loads(advised) | {"output": str(models / "merged")}

    page.fill("[aria-label='Weight of say']", "2")
    page.fill("#own-seed", "7")
    page.press("#own-seed", "Enter")
    wait_for_recipe(page, "seed = 7")
    recipe = tomllib.loads(page.text_content("#own-toml"))
    assert recipe["models"][1] == {"file": str(models / "say"), "weight": 2}
    page.click("#own-start:enabled")
    card = job(page, "merges", "done")
    page.wait_for_selector("#own-merges .own-sha")
    regions = page.eval_on_selector_all("[role=region]", "all => all.map(e => e.ariaLabel)")
    assert "Models" in regions
    assert len(set(regions)) == len(regions)
    digest = card.locator(".own-sha code").inner_text()
    assert digest == verify(models / "merged").sha256
    elsewhere = models / "by-the-recipe"
    again = {**recipe, "output": str(elsewhere)}
    dare.merge(recipe_of({**again, "verbose": False}))
    assert verify(elsewhere).sha256 == digest

    card.locator("button:has-text('Verify')").click()
    checked = job(page, "merges", "done")
    page.wait_for_selector("#own-merges > li:first-child:has-text('intact')")
    assert digest in checked.inner_text()
    assert page.is_hidden("#own-output-problem"), "this merge wrote it"
    page.fill("#own-seed", "8")
    page.press("#own-seed", "Enter")
    page.wait_for_selector("#own-output-problem:visible")
    assert "exists already" in page.inner_text("#own-output-problem")
    assert page.is_disabled("#own-start")
    page.check("#own-overwrite")
    page.wait_for_selector("#own-start:enabled")


def test_the_advised_recipe_is_taken_over_until_a_setting_is_changed(page):
    advice = iter(["sum", "ties"])

    def advise(route) -> None:
        answer = route.fetch()
        document = answer.json()
        document["advice"]["recipe"]["method"] = next(advice)
        route.fulfill(response=answer, json=document)

    page.route("**/analysis", advise)
    choose_two(page)
    page.click("#own-analyze")
    wait_for_recipe(page, '"sum"')
    page.click("#own-analyze")
    page.wait_for_function(
        "document.querySelector('#analysis-recipe').textContent.includes('ties')"
    )
    assert tomllib.loads(page.text_content("#own-toml"))["method"] == "sum"
    page.unroute("**/analysis")


@contextmanager
def held(page, number: int) -> Iterator[None]:
    """A job that stands still after some of its work; its second half takes the time."""

    def look() -> dict[str, Any]:
        return page.evaluate("fetch('api/own/jobs').then(found => found.json())")[number - 1]

    wait_until(lambda: look()["done_bytes"] > 0.6 * look()["total_bytes"] > 0, "half of the work")
    pid = look()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_merge_is_cancelled_and_resumed_by_another_page(local_site, browser, models):
    output, undisturbed = models / "resumed.safetensors", models / "undisturbed.safetensors"
    slow = {"method": "iso"}  # which takes seconds: time to cancel it, on a busy machine too
    dare.merge(recipe_of(large(models, undisturbed) | slow))
    with own_alone(browser, local_site.address) as (page, said):
        for name, action in (("base", "Use as base"), ("one", "Add"), ("two", "Add")):
            choose(page, f"large-{name}.safetensors", action)
        page.fill("#own-method", "iso")
        page.press("#own-method", "Enter")
        wait_for_recipe(page, '"iso"')
        set_output(page, output)
        page.click("#own-start:enabled")
        number = int(job(page, "merges", "running").get_attribute("data-job"))
        with held(page, number):
            page.wait_for_function("document.querySelector('#own-merges progress').value > 0.6")
            progress = page.inner_text("#own-merges .own-progress")
            assert re.fullmatch(r"merging: [\d.]+ MB of 201 MB(, about .*)?", progress)
            page.click("#own-merges button:has-text('Cancel')")
            page.wait_for_selector("#own-merges .own-progress:has-text('stopping')")
        job(page, "merges", "stopped")
        state = page.url.partition("?")[2]
        assert said == []
    assert not output.exists()
    with own_alone(browser, local_site.with_state(state)) as (page, said):
        assert page.inner_text("#own-base") == str(models / "large-base.safetensors")
        page.wait_for_selector("#own-interrupted:has-text('resumed.safetensors.partial')")
        job(page, "merges", "stopped").locator("button:has-text('Resume')").click()
        page.wait_for_selector("#own-merges > li:first-child:has-text('reused from')")
        assert said == []
    assert output.read_bytes() == undisturbed.read_bytes()


def test_what_does_not_fit_or_is_elsewhere_is_said(page, models):
    open_path(page, "/etc")
    page.wait_for_selector("#own-open-problem:has-text('is outside')")
    choose(page, "base", "Use as base")
    choose(page, "large-one.safetensors", "Add")
    page.wait_for_selector("#own-plan-text .own-problem")
    assert page.is_hidden("#own-save"), "a recipe that would be refused"
    assert page.is_disabled("#own-start")
    assert page.is_disabled("#own-analyze")
    page.click("#own-models button")
    page.wait_for_selector("#own-plan-text:has-text('Choose a base and at least one')")
    choose(page, "add", "Add")
    page.wait_for_selector("#own-start:enabled, #own-output-problem:visible")
    assert page.is_visible("#own-save")
    page.fill("#own-method", "dare+sun")
    page.press("#own-method", "Enter")
    page.wait_for_selector("#own-plan-text:has-text(\"did you mean 'sum'\")")
