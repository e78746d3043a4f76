from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import replace
from html import unescape

import pytest
import study_sample as sample
import vl_convert

from dare.documents.notices import notice
from dare.documents.page import _version, render_page
from dare.studies import figures
from dare.studies.conclusions import conclude
from dare.studies.document import SearchResult, study_document
from dare.studies.results import Estimate, State, Trial
from pages import Outline

HOSTILE = ('<script>alert("x")</script>', "'\"><img src=x onerror=alert(1)>", "a&b</title>${x}")


def assemble(data, conclusion=None, drawn=()):
    """The page; without figures, which take most of the time, unless they are given."""
    conclusion = conclusion or sample.make_conclusion(data)
    document = replace(study_document(data, conclusion), draw=lambda: list(drawn))
    return render_page(document, "/* library */")


def embedded(text, name):
    (found,) = re.findall(rf'id="{name}">(.*?)</script>', text, re.DOTALL)
    assert "<" not in found
    return json.loads(found)


def ranking(data, conclusion=None):
    """The one figure."""
    (found,) = figures.draw_figures(conclusion or sample.make_conclusion(data))
    assert found.name == "ranking"
    return found


@pytest.fixture(scope="module")
def text():
    data = sample.make_search()
    return assemble(data, drawn=[ranking(data)])


@pytest.fixture(scope="module")
def outline(text):
    return Outline(text)


# ---------------------------------------------------------------- the page


def test_sections_are_there_in_their_order(outline):
    sections = [a["id"] for tag, a in outline.elements if tag == "section" and "id" in a]
    assert sections == [
        *("tasks", "against", "trials"),
        *("failed", "recipe", "notices", "study"),
    ]
    assert len(outline.ids()) == len(set(outline.ids()))


def test_nothing_is_fetched_and_nothing_runs_but_scripts_with_a_digest(outline, text):
    for tag, attributes in outline.elements:
        for name in ("src", "href", "action", "data"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), (tag, address)
        assert not any(name.startswith("on") for name in attributes)
    (policy,) = (a["content"] for _, a in outline.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    assert "; script-src 'sha256-" in policy
    scripts = [a for tag, a in outline.elements if tag == "script" and "type" not in a]
    assert policy.count("sha256-") == len(scripts) == 4


FACTS = {
    '<section class="verdict fair"': (
        "Merge add and sort",
        "sum, scale 1",
        "80.0%",
        "70–90",
        "the sum",
    ),
    '<section id="study"': ("0.78 (0.7 … 0.85)", "0.85", "0.07 lower", "0.002"),
    '<section id="failed"': (
        "trial 5: the command ended with status 1",
        "Traceback …\nMemoryError",
    ),
}


def test_sections_hold_what_decides_and_a_recipe_that_can_be_used(text):
    for start, facts in FACTS.items():
        section = text[text.index(start) :].partition("</section>")[0]
        assert [fact for fact in facts if fact not in section] == []
    assert text.count('<details class="fold"><summary>trial') == 3
    (best,) = re.findall(r'<code id="best-recipe">(.*?)</code>', text, re.DOTALL)
    files = {"base": "base", "models": ["add", "sort"]}
    assert tomllib.loads(unescape(best)) == {"method": "sum", **files}  # a scale of 1 is usual
    assert 'data-copies="best-recipe"' in text


def test_the_table_has_every_baseline_and_trial(outline):
    data = sample.make_search()
    head, *rows = outline.labelled["Baselines and trials"]
    columns = ["trial", "objective", *sample.SCORES, "method", "scale", "drop_rate", "seed"]
    assert head[1:] == [*columns, "state", "guards broken", "seconds"]
    assert len(rows) == len(data.baselines) + len(data.trials)
    assert rows[0][1:6] == ["base", "0.05", "0.1", "0", "1.48"]
    assert rows[5][1:] == [
        *("0", "0.45", "0.6", "0.3", "1.35", "dare+sum", "0.5", "0.1"),
        *("0", "done", "–", "2"),
    ]
    assert rows[5 + 5][2] == "–"
    assert rows[5 + 7][-2] == "english is 1.31, above 1.25"
    boxes = [a["aria-label"] for tag, a in outline.elements if a.get("type") == "checkbox"]
    assert len(boxes) == 5 + 24 - 3  # those with scores
    assert "Compare 5" not in boxes


def test_names_and_messages_cannot_become_elements():
    script, image, other = HOSTILE
    settings = {script: image, other: 0.5}
    failed = Trial(1, settings, 0, State.FAILED, message=image, output=script)
    trials = (
        sample.make_trial(0, {script: "a", other: 0.1}, 0.5, broken=(script,)),
        failed,
        sample.make_trial(2, {"scale": 0.5}, 0.9),
    )
    baseline = replace(sample.make_baselines()[0], name=f"{script} alone")
    files = {"base_file": "base", "merge_files": [script.replace("/", ""), image]}
    data = sample.make_search(
        0,
        trials=trials,
        planned=3,
        recipe={"method": "sum", "models": files},
        baselines=(baseline,),
        evaluator=image,
        objective={script: 1.0},
        guards=(f"{image}:max:1",),
        space={script: [image], other: [0, 1]},
        notices=(notice("no_advice", reason=other),),
    )
    conclusion = sample.make_conclusion(data)
    text = assemble(data, conclusion, figures.draw_figures(conclusion))
    title = re.findall("<h1[^>]*>(.*?)</h1>", text)[0]
    assert ("onerror=alert(1)" in title, "<" in title) == (True, False)
    outline = Outline(text)
    tags = [tag for tag, _ in outline.elements]
    assert tags.count("script") == 7
    assert "img" not in tags
    assert not any(name.startswith("on") for _, a in outline.elements for name in a)
    assert embedded(text, "sortable-data")["columns"][5] == script


def test_names_are_data_and_never_code():
    hostile = "');alert(1)//"
    settings = ({hostile: n / 10, f"{hostile}2": f"{hostile}{n % 2}"} for n in range(1, 9))
    trials = tuple(sample.make_trial(n, given, n / 10) for n, given in enumerate(settings, 1))
    spec = json.dumps(ranking(sample.make_search(0, trials=trials)).spec)
    keys = "expr|signal|test|filter|calculate|labelExpr"
    code = re.findall(rf'"(?:{keys})": "((?:[^"\\]|\\.)*)"', spec)
    assert not any("alert" in text for text in code)


def test_without_trials_the_baselines_are_shown():
    empty, nothing = sample.make_search(0, planned=8), sample.make_search(0, baselines=())
    assert ranking(empty)
    assert figures.draw_figures(sample.make_conclusion(nothing)) == []
    assert "0 of 8 trials done" in assemble(empty)
    assert all("Not finished yet" in assemble(data) for data in (empty, nothing))


def test_two_thousand_trials_fit_in_a_page():
    data = sample.make_search(2000)
    items = {f"task/{n}": float(n % 2) for n in range(1000)}
    trials = tuple(
        replace(t, scored=replace(t.scored, items=items)) if t.is_done else t for t in data.trials
    )
    data = replace(data, trials=trials)
    assert len(assemble(data, drawn=[ranking(data)]).encode()) < 5_000_000


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("make", [sample.make_search, sample.make_sweep])
def test_the_figure_is_drawn_described_and_always_the_same(make):
    found = ranking(make())
    assert ranking(make()) == found
    drawing = vl_convert.vegalite_to_svg(
        {**found.spec, "width": 600}, vl_version=_version(found.spec)
    )
    assert drawing.startswith("<svg")
    assert not {"NaN", "undefined"} & set(re.findall(r"\w+", drawing))
    assert found.caption.endswith(".")
    assert found.description.endswith(".")
    assert {len(row) for row in found.table.rows} == {len(found.table.columns)}
    assert "{" not in found.title + found.caption
    rows = found.spec["datasets"]["rows"]
    shown = [t["field"] for chart in found.spec["layer"] for t in chart["encoding"]["tooltip"]]
    assert len(shown) > 5
    assert all(row.keys() >= set(shown) for row in rows)


def test_what_is_not_finite_is_never_drawn():
    scores = [(math.inf, 0.5), (1.0, math.nan), (2.0, math.inf), (0.5, 0.4), (0.7, 0.6)]
    trials = tuple(
        sample.make_trial(n, {"scale": scale}, 0.5, objective=objective)
        for n, (scale, objective) in enumerate(scores)
    )
    data = sample.make_search(0, trials=trials)
    conclusion = sample.make_conclusion(data)
    odd = replace(conclusion.ranking[0], objective=Estimate(math.nan, -math.inf, math.inf))
    found = ranking(data, replace(conclusion, ranking=(odd, *conclusion.ranking[1:])))
    assemble(data, conclusion, [found])  # whose JSON must not have NaN
    assert "nan" not in str(found.table.rows).lower()


def test_every_baseline_is_in_the_ranking_however_far_away():
    data = sample.make_search()
    conclusion = sample.make_conclusion(data)
    rows = {row["name"]: row for row in ranking(data).spec["datasets"]["rows"]}
    assert set(rows) > {"base", "add alone", "sort alone", "average", "sum", "trial 8"}
    assert rows["base"]["at"] == rows["base"]["objective"] == 0.05
    worst = replace(conclusion.baselines[0], objective=Estimate(-1e6))
    found = ranking(data, replace(conclusion, baselines=(worst,)))
    row = next(row for row in found.spec["datasets"]["rows"] if row["name"] == "← base")
    assert row["objective"] == -1e6 < row["at"] == row["low"] == row["high"] < 0


def test_without_items_the_page_has_the_remedy_and_no_verdicts():
    data = sample.make_search(items=False, guards=())
    found = conclude(data, resamples=50)
    text = assemble(data, found)
    (code,) = re.findall(r'<code id="items-code">(.*?)</code>', text, re.DOTALL)
    made = {"QUESTIONS": [("1+1", "2"), ("2+2", "4")], "answer": lambda _path, _question: "2"}
    exec(unescape(code), made)
    assert made["score"]("merged") == {"items": {"math/0": 1.0, "math/1": 0.0}}
    assert not re.search('class="badge (good|fair|poor)"', text)
    assert "not known" not in text
    assert "no_items" in {notice.code for notice in found.notices}  # still in JSON
    assert "items-code" not in assemble(sample.make_search())


def test_settings_that_all_trials_share_are_said_once():
    trials = [sample.make_trial(n, {"method": "dare", "scale": n / 10}, 0.5) for n in range(1, 4)]
    data = sample.make_search(0, trials=tuple(trials))
    assert figures.split_settings(data) == (("scale",), {"method": "dare"})
    head, *_ = Outline(assemble(data)).labelled["Baselines and trials"]
    assert "method" not in head
    assert "All trials have method=dare." in assemble(data)


def test_the_page_is_written_with_the_library_that_draws_it(tmp_path, monkeypatch):
    # The real one takes seconds to make; the browser's tests have it.
    monkeypatch.setattr("dare.documents.page.drawing_bundle", lambda version: f"/* {version} */")
    data, path = sample.make_search(1), tmp_path / "folder" / "study.html"
    text = SearchResult("study.db", data, sample.make_conclusion(data), None).to_html(path)
    assert path.read_text("utf-8") == text
    assert re.search(r"<script>/\* \d+\.\d+ \*/</script>", text)
