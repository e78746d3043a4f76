"""The page's side of the local engine, in the browser, against the server."""

from __future__ import annotations

from typing import Any

import pytest
from sites import Site, Tab

from dare.demo.llama import Llama
from dare.demo.merges import CONFIG, TUNED

ASK = """async ([name, ...given]) => {
    const { openLocalEngine } = await import(new URL("local.js", location.href));
    const engine = openLocalEngine();
    const found = await engine[name](...given);
    return Number.isNaN(found?.bitsPerByte) ? "not a number" : found;
}"""
ABORT = """async (setting) => {
    const { openLocalEngine } = await import(new URL("local.js", location.href));
    const controller = new AbortController();
    const asked = openLocalEngine().merge(setting, controller.signal);
    setTimeout(() => controller.abort(), 300);
    return asked.catch((error) => error.name);
}"""


@pytest.fixture
def tab(local_site: Site, open_tab: Any) -> Tab:
    tab: Tab = open_tab(local_site.with_state("drop.p=0.5"))
    return tab


def setting(name: str, **others: Any) -> dict[str, Any]:
    return {"base": "base", "method": "sum", "models": [{"name": name}], **others}


def test_the_engine_in_the_page_is_the_package(tab, local_site):
    page = tab.page
    assert page.url == f"{local_site.origin}/?drop.p=0.5", "the token does not stay in the address"
    assert page.evaluate("document.cookie") == "", "nor can a script read it"
    assert len(page.evaluate(ASK, ["merge", setting("add")])) == 64
    assert page.evaluate(ASK, ["warnings", setting("add")]) == []
    amount = {"prompts": 5, "englishBytes": 256}
    score = page.evaluate(ASK, ["score", setting("add"), amount])
    assert score["asked"] == {"add": 5, "sort": 5, "say": 5}
    assert 1 < score["bitsPerByte"] < 2
    broken = ["score", setting("add-nan"), amount]
    assert page.evaluate(ASK, broken) == "not a number"
    nothing = ["score", setting("add-nan"), {"prompts": 1, "englishBytes": 0}]
    assert page.evaluate(ASK, nothing)["bitsPerByte"] is None
    prompts = ["37+58=", "é"]
    written = page.evaluate(ASK, ["write", setting("add"), prompts])
    assert written == Llama(TUNED["add"], CONFIG).write(prompts)
    slow = setting("add", method="wudi", stages={"wudi": {"steps": 2000}})
    assert page.evaluate(ABORT, slow) == "AbortError"
    assert tab.said == []
    assert tab.asked_elsewhere(local_site) == []


def test_what_makes_no_sense_is_said_to_the_reader(tab):
    with pytest.raises(Exception, match=r"there is no stage 'smu'.*did you mean 'sum'"):
        tab.page.evaluate(ASK, ["merge", setting("add", method="smu")])
    tab.page.route("**/api/merge", lambda route: route.abort())
    with pytest.raises(Exception, match="Is `dare playground` still running"):
        tab.page.evaluate(ASK, ["merge", setting("add")])
