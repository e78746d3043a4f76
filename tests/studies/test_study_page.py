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

from dare.documents.document import Tone
from dare.documents.notices import notice
from dare.documents.page import _version, render_page
from dare.errors import RecipeError
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


def drawn_figures(data, conclusion=None):
    drawn = figures.draw_figures(conclusion or sample.make_conclusion(data))
    return {figure.name: figure for figure in drawn}


MADE = {"search": sample.make_search, "sweep": sample.make_sweep}


@pytest.fixture(scope="module")
def all_drawn():
    return {name: drawn_figures(make()) for name, make in MADE.items()}


@pytest.fixture(params=MADE)
def drawn(request, all_drawn):
    return all_drawn[request.param]


@pytest.fixture(scope="module")
def text(all_drawn):
    return assemble(sample.make_search(), drawn=all_drawn["search"].values())


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


def test_the_verdict_names_the_best_and_what_may_be_as_good(text):
    top = text[text.index('<section class="verdict fair"') : text.index("</section>")]
    for fact in ("sum, scale 1, of add and sort", "80.0 %", "70–90", "the sum"):
        assert fact in top


def test_the_holdout_and_the_noise_are_facts_of_the_study(text):
    study = text[text.index('<section id="study"') :]
    for fact in ("0.78 (0.7 … 0.85)", "0.85", "0.07 lower", "0.002"):
        assert fact in study


def test_the_table_has_every_baseline_and_trial(outline):
    data = sample.make_search()
    head, *rows = outline.labelled["Baselines and trials"]
    columns = ["trial", "objective", *sample.SCORES, "method", "scale", "drop_rate", "seed"]
    assert head[1:] == [*columns, "state", "guards broken", "seconds"]
    assert len(rows) == len(data.baselines) + len(data.trials)
    assert rows[0][1:6] == ["base", "0.05", "0.1", "0", "1.475"]
    assert rows[5][1:] == [
        *("0", "0.45", "0.6", "0.3", "1.355", "dare+sum", "0.5", "0.1"),
        *("0", "done", "–", "2"),
    ]
    assert rows[5 + 5][2] == "–"
    assert rows[5 + 7][-2] == "english is 1.31, above 1.25"


def test_rows_without_scores_cannot_be_compared(outline):
    boxes = [a["aria-label"] for tag, a in outline.elements if a.get("type") == "checkbox"]
    assert len(boxes) == 5 + 24 - 3
    assert "Compare 5" not in boxes


def test_failures_have_their_message_and_output(text):
    failed = text[text.index('<section id="failed"') :]
    assert failed.count('<details class="fold"><summary>trial') == 3
    assert "trial 5: the command ended with status 1" in failed
    assert "Traceback …\nMemoryError" in failed


def test_the_recipe_of_the_best_can_be_used(text):
    (best,) = re.findall(r'<code id="best-recipe">(.*?)</code>', text, re.DOTALL)
    assert tomllib.loads(unescape(best)) == {
        "method": "sum",
        "base": "base",
        "models": ["add", "sort"],
    }  # a scale of 1 is the default
    assert 'data-copies="best-recipe"' in text


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
    data = sample.make_search(0, trials=tuple(
        sample.make_trial(n, {hostile: n / 10, f"{hostile}2": f"{hostile}{n % 2}"}, n / 10)
        for n in range(1, 9)
    ))  # fmt: skip
    for figure in drawn_figures(data).values():
        spec = json.dumps(figure.spec)
        code = re.findall(
            r'"(?:expr|signal|test|filter|calculate|labelExpr)": "((?:[^"\\]|\\.)*)"', spec
        )
        assert not any("alert" in text for text in code)


def test_the_same_study_makes_the_same_page(text, all_drawn):
    data = sample.make_search()
    assert assemble(data, drawn=drawn_figures(data).values()) == text


# ---------------------------------------------------------------- few, none, many


def test_without_trials_the_baselines_are_shown():
    text = assemble(sample.make_search(0, planned=8))
    assert "Not finished yet" in text
    assert "0 of 8 trials done" in text
    assert list(drawn_figures(sample.make_search(0))) == ["ranking"]
    nothing = sample.make_search(0, baselines=())
    assert drawn_figures(nothing) == {}
    assert "Not finished yet" in assemble(nothing)


def test_one_trial_makes_a_page():
    data = sample.make_search(1)
    assert list(drawn_figures(data)) == ["ranking"]
    found = sample.make_conclusion(data)
    better = replace(found, against=(replace(found.against[0], verdict="better"),))
    assert study_document(data, better).tone is Tone.GOOD


def test_two_thousand_trials_fit_in_a_page():
    data = sample.make_search(2000)
    items = {f"task/{n}": float(n % 2) for n in range(1000)}
    trials = tuple(
        replace(t, scored=replace(t.scored, items=items)) if t.is_done else t for t in data.trials
    )
    data = replace(data, trials=trials)
    text = assemble(data, drawn=drawn_figures(data).values())
    assert len(text.encode()) < 5_000_000  # and 0.9 MB of library


def test_what_is_not_finite_is_never_drawn():
    broken = [
        sample.make_trial(n, {"scale": scale}, 0.5, objective=objective)
        for n, (scale, objective) in enumerate(
            [(math.inf, 0.5), (1.0, math.nan), (2.0, math.inf), (0.5, 0.4), (0.7, 0.6)]
        )
    ]
    data = sample.make_search(0, trials=tuple(broken))
    conclusion = sample.make_conclusion(data)
    odd = replace(conclusion.ranking[0], objective=Estimate(math.nan, -math.inf, math.inf))
    conclusion = replace(conclusion, ranking=(odd, *conclusion.ranking[1:]))
    found = drawn_figures(data, conclusion)
    assemble(data, conclusion, found.values())  # whose JSON must not have NaN
    assert list(found) == ["ranking"]
    for figure in found.values():
        assert "nan" not in str(figure.table.rows).lower()


# ---------------------------------------------------------------- figures


def test_a_search_and_a_sweep_have_their_figures(all_drawn):
    assert list(all_drawn["search"]) == list(all_drawn["sweep"]) == ["ranking"]


def test_every_figure_can_be_drawn(drawn):
    for figure in drawn.values():
        drawing = vl_convert.vegalite_to_svg(
            {**figure.spec, "width": 600}, vl_version=_version(figure.spec)
        )
        assert drawing.startswith("<svg")
        assert "NaN" not in drawing
        assert "undefined" not in drawing


def test_every_figure_says_what_it_shows(drawn):
    for figure in drawn.values():
        assert figure.caption.endswith(".")
        assert figure.description.endswith(".")
        assert figure.table.rows
        assert {len(row) for row in figure.table.rows} == {len(figure.table.columns)}
        assert "{" not in figure.title + figure.caption


def leaves(spec, data):
    """Every chart within a chart, with the name of its data."""
    data = spec.get("data", data)
    if "layer" in spec:
        for inner in spec["layer"]:
            yield from leaves(inner, data)
    else:
        yield spec, data


def test_tooltips_name_fields_that_the_data_have(drawn):
    seen = 0
    for figure in drawn.values():
        for chart, data in leaves(figure.spec, None):
            rows = figure.spec["datasets"][data["name"]]
            for tooltip in chart["encoding"].get("tooltip", []):
                seen += 1
                assert all(tooltip["field"] in row for row in rows), tooltip
    assert seen > 5


def test_every_baseline_is_in_the_ranking_however_far_away(all_drawn):
    rows = {row["name"]: row for row in all_drawn["search"]["ranking"].spec["datasets"]["rows"]}
    assert set(rows) > {"base", "add alone", "sort alone", "average", "sum", "trial 8"}
    assert rows["base"]["at"] == rows["base"]["objective"] == 0.05
    data = sample.make_search()
    conclusion = sample.make_conclusion(data)
    worst = replace(conclusion.baselines[0], objective=Estimate(-1e6))
    found = figures.ranking(replace(conclusion, baselines=(worst,)))
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


@pytest.fixture
def result():
    data = sample.make_search(1)
    return SearchResult("study.db", data, sample.make_conclusion(data), None)


def test_the_page_is_written_with_the_library_that_draws_it(result, tmp_path, monkeypatch):
    # The real one takes seconds to make; the browser's tests have it.
    monkeypatch.setattr("dare.documents.page.drawing_bundle", lambda version: f"/* {version} */")
    path = tmp_path / "folder" / "study.html"
    text = result.to_html(path)
    assert path.read_text("utf-8") == text
    assert re.search(r"<script>/\* \d+\.\d+ \*/</script>", text)


def test_a_notebook_shows_a_card_and_figures(result):
    card = result._repr_html_()
    assert "Merge: the sum of add and sort" in card
    assert "<script" not in card
    assert "layer" in result.plot("ranking").to_dict()
    with pytest.raises(RecipeError, match="ranking"):
        result.plot("spectra")
