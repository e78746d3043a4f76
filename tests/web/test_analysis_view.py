"""An analysis file on the static page: the view that the server's analyses have, too."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from own_helpers import own_alone

from dare.analysis.advice import judge, to_json
from dare.analysis.analyzing import analyze
from dare.analysis.document import Analysis, origin
from dare.analysis.figures import cosine_text
from dare.analysis.prediction import exposures_of, mean_bounded_error
from dare.analysis.readiness import body_of
from dare.demo.merges import BASE, TUNED
from dare.documents.words import amount, number, share

HOSTILE = '<img src=x onerror="document.title=1">${7*7}{{7*7}}\u202e'


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyze(BASE, list(TUNED.values()), spectra="none", verbose=False)


@pytest.fixture(scope="module")
def document(analysis) -> dict[str, Any]:
    return json.loads(to_json(analysis, *judge(analysis)))


@pytest.fixture(scope="module")
def opened(static_site, browser):
    with own_alone(browser, static_site.address) as opened:
        yield opened


@pytest.fixture
def page(opened):
    """The page, which must have nothing to complain of."""
    page, said = opened
    yield page
    assert said == []


def drop(page, text: str) -> None:
    """Drop a text on the page, as a file."""
    page.evaluate(
        """text => {
            const files = new DataTransfer();
            files.items.add(new File([text], "analysis.json"));
            const event = { dataTransfer: files, bubbles: true, cancelable: true };
            document.getElementById("own-drop").dispatchEvent(new DragEvent("drop", event));
        }""",
        text,
    )


def wait_for_figures(page) -> None:
    for name in ("error", "change"):
        page.wait_for_selector(f"#chart-analysis-{name} svg .mark-group path", state="attached")


def rows_of(page, table: str) -> list[list[str]]:
    return page.eval_on_selector_all(
        f"#own-analysis [aria-label='{table}'] tbody tr",
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))",
    )


def test_a_dropped_analysis_is_shown(page, analysis, document):
    drop(page, json.dumps(document))
    readiness, advice = judge(analysis)
    assert page.inner_text("#own-analysis .verdict h3") == readiness.headline
    findings = page.locator("#own-analysis .findings li").all_inner_texts()
    assert len(findings) == len(readiness.findings) > 0
    for shown, finding in zip(findings, readiness.findings, strict=True):
        assert all(t in shown for t in (finding.text, finding.remedy))
    models = [
        [
            model.name,
            share(body_of(model).ratio),
            number(model.total.mean_magnitude),
            number(model.total.quantiles.p99),
            number(model.total.largest),
            share(model.total.sparsity),
            origin(model),
        ]
        for model in analysis.models
    ]
    assert rows_of(page, "Models") == models
    pairs = [
        [
            f"{pair.first} · {pair.second}",
            cosine_text(pair.total.cosine),
            share(pair.total.conflict),
            amount(pair.total.both),
        ]
        for pair in analysis.pairs
    ]
    assert rows_of(page, "Pairs") == pairs
    rates = rows_of(page, "Error by drop rate")
    assert [row[0] for row in rates if row[0] == "0.9"] == ["0.9"]
    costs = [share(mean_bounded_error(exposures_of(m), 0.9)) for m in analysis.models]
    assert next(row for row in rates if row[0] == "0.9")[1:] == costs
    assert tomllib.loads(page.text_content("#analysis-recipe") or "") == advice.recipe
    wait_for_figures(page)
    assert page.evaluate("document.activeElement.textContent") == readiness.headline


def without(document: dict[str, Any], *path: Any) -> str:
    changed = json.loads(json.dumps(document))
    *way, last = path
    place = changed
    for key in way:
        place = place[key]
    del place[last]
    return json.dumps(changed)


WRONG = {
    "not JSON": (lambda _: "PK\x03\x04", "This file is not JSON."),
    "no analysis": (lambda _: '{"dare": 1}', "but not an analysis"),
    "null": (lambda _: "null", "but not an analysis"),
    "another version": (lambda _: '{"schema": "dare-analysis/3"}', "dare-analysis/4"),
    "only measured": (lambda d: without(d, "readiness"), "readiness is missing"),
    "a hole": (
        lambda d: without(d, "models", 1, "total", "norm"),
        "models.1.total.norm is missing",
    ),
    "no models": (lambda d: json.dumps({**d, "models": []}), "models.0 is missing"),
    "odd": (lambda d: json.dumps({**d, "pairs": {}}), "pairs is not a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_words(page, document, name):
    make, message = WRONG[name]
    content = make(document).encode()
    page.set_input_files("#own-file", {"name": "a", "mimeType": "", "buffer": content})
    page.wait_for_function(
        "text => document.getElementById('own-file-problem').textContent.includes(text)",
        arg=message,
    )
    assert page.is_hidden("#own-analysis")


def test_numbers_that_json_lacks_are_shown(page, document):
    odd = json.loads(json.dumps(document))
    odd["models"][0]["total"] |= {"largest": "inf", "mean_magnitude": "nan"}
    for cell in odd["models"][0]["cells"]:
        cell["statistics"]["base_norm"] = 0
    content = json.dumps(odd).encode()
    page.set_input_files("#own-file", {"name": "a", "mimeType": "", "buffer": content})
    page.wait_for_function(
        "document.querySelector('#own-analysis [aria-label=Models] td')?.textContent === '∞'"
    )
    assert rows_of(page, "Models")[0][:5] == ["add", "∞", "–", "0.00758", "∞"]


def rename(value: Any, old: str, new: str) -> Any:
    """A document in which a name is another one, wherever it stands."""
    if isinstance(value, dict):
        return {rename(k, old, new): rename(v, old, new) for k, v in value.items()}
    if isinstance(value, list):
        return [rename(entry, old, new) for entry in value]
    return value.replace(old, new) if isinstance(value, str) else value


@pytest.mark.parametrize("name", [HOSTILE, "__proto__", "constructor"])
def test_hostile_names_are_only_text(page, document, name):
    hostile = rename(document, "say", name)
    hostile["notes"] = [dict(one) for one in hostile["advice"]["doubts"]]
    notices = (*hostile["readiness"]["findings"], *hostile["advice"]["doubts"], *hostile["notes"])
    for notice in notices:
        notice["code"] = notice["text"] = notice["remedy"] = name
    hostile["models"][2]["file"] = hostile["base"] = f"/models/{name}"
    drop(page, json.dumps(hostile))
    page.wait_for_function(
        "name => document.querySelector('#own-analysis .verdict')?.textContent.includes(name)",
        arg=name,
    )
    wait_for_figures(page)
    assert page.locator("#own-analysis img").count() == 0
    assert page.title() == "dare playground"
    assert rows_of(page, "Models")[2][0] == name
    recipe = tomllib.loads(page.text_content("#analysis-recipe") or "")
    assert recipe["models"][2].endswith(name)


def test_on_the_whole_page_nothing_is_sent(static_site, open_tab, document):
    tab = open_tab(f"{static_site.address}#own", theme="dark")
    tab.page.wait_for_load_state("networkidle")
    drop(tab.page, json.dumps(document))
    wait_for_figures(tab.page)
    assert tab.said == []
    assert tab.asked_elsewhere(static_site) == []
    assert not any("analysis.json" in address for address in tab.asked)
