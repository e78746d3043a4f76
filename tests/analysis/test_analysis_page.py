from __future__ import annotations

import itertools
import json
import re
import tomllib
from dataclasses import replace
from html import unescape

import pytest
import sample

from dare.analysis.advice import judge
from dare.analysis.document import make_document
from dare.analysis.readiness import Readiness, Verdict, body_of
from dare.documents import page as pages_of
from dare.documents.notices import catalogue
from dare.documents.words import number, share
from dare.errors import InputError
from pages import Outline

HOSTILE = ('<script>alert("x")</script>', "'\"><img src=x onerror=alert(1)>", "a&b</title>")


def assemble(analysis, readiness, advice, outcome=None):
    document = make_document(analysis, readiness, advice, outcome)
    return pages_of.render_page(document, library="/* library */")


@pytest.fixture(scope="module")
def text(subject):
    return assemble(subject.analysis, subject.readiness, subject.advice, subject.outcome)


@pytest.fixture(scope="module")
def outline(text):
    return Outline(text)


def test_nothing_is_fetched(outline, text):
    for tag, attributes in outline.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), (tag, address)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = (a["content"] for tag, a in outline.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    assert "; script-src 'sha256-" in policy


def test_the_real_page_is_one_file_with_its_library(page):
    text = page.read_text("utf-8")
    assert 800_000 < len(text) < 1_500_000
    assert "window.vegaEmbed=" in text
    assert text.count("</script>") == 6


def test_names_cannot_become_elements():
    text = assemble(
        sample.make_analysis(HOSTILE), sample.make_readiness(HOSTILE), sample.make_advice(HOSTILE)
    )
    outline = Outline(text)
    assert [tag for tag, _ in outline.elements].count("script") == 6
    assert "img" not in {tag for tag, _ in outline.elements}
    assert not any(name.startswith("on") for _, a in outline.elements for name in a)
    values = [a.get("value") for tag, a in outline.elements if tag == "option"]
    assert values[1:4] == list(HOSTILE)
    (data,) = re.findall(r'id="figures">(.*?)</script>', text, re.DOTALL)
    assert "<" not in data
    assert HOSTILE[0] in json.dumps(json.loads(data)).replace('\\"', '"')


def test_every_figure_has_a_place_a_table_and_buttons(outline, text):
    (data,) = re.findall(r'id="figures">(.*?)</script>', text, re.DOTALL)
    names = [figure["name"] for figure in json.loads(data)]
    identities = [a["id"] for _, a in outline.elements if "id" in a]
    assert len(identities) == len(set(identities))
    for name in names:
        assert f"chart-{name}" in identities
        buttons = [a for tag, a in outline.elements if a.get("data-figure") == name]
        assert [button["data-format"] for button in buttons] == ["svg", "png"]
    assert text.count("<details><summary>Numbers") == len(names) == 11


def test_headings_do_not_skip_levels(outline):
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    heads = [attributes for tag, attributes in outline.elements if tag == "th"]
    assert {head["scope"] for head in heads} == {"col", "row"}
    identities = {a["id"] for _, a in outline.elements if "id" in a}
    ends = {a["href"][1:] for tag, a in outline.elements if tag == "a"}
    assert {"content", "notices", "models", "advice"} <= ends <= identities


def test_the_table_of_models_holds_the_analysis(outline, subject):
    (rows,) = (table for table in outline.tables if "verdict" in table[0])
    assert rows[0] == ["model", "change", "origin", "verdict", "remarks"]
    for row, model in zip(rows[1:], subject.analysis.models, strict=True):
        assert row[:2] == [model.name, share(body_of(model).ratio)]
    assert rows[3][3:] == ["needs changes", catalogue()["large_change"].title]
    assert rows[2][2] == "LoRA, rank 4 (adapter)"
    (numbers,) = (table for table in outline.tables if "excess kurtosis" in table[0])
    total = subject.analysis.models[0].total
    assert numbers[1] == [
        "math",
        number(total.mean_magnitude),
        number(total.quantiles.p99),
        number(total.largest),
        share(total.sparsity),
        "0",
        number(total.excess_kurtosis),
    ]


def test_a_model_with_a_nan_and_copies_are_named(crowd):
    outline = Outline(assemble(crowd.analysis, *judge(crowd.analysis)))
    (rows,) = (table for table in outline.tables if "remarks" in table[0])
    remarks = {row[0]: row[-1] for row in rows[1:]}
    assert remarks["model-4"] == "left out: same model twice, with model-3 and model-5"
    assert remarks["model-5"] == "left out: NaN or infinite values"


def test_the_recipe_is_whole(text, subject):
    (recipe,) = re.findall(r'<code id="recipe">(.*?)</code>', text, re.DOTALL)
    assert tomllib.loads(unescape(recipe)) == subject.advice.recipe
    calm = Readiness(Verdict.NO_DEFECT, {"math": Verdict.NO_DEFECT}, ())
    nothing = replace(subject.advice, recipe={}, suggestions=(), doubts=())
    text = assemble(subject.analysis, calm, nothing)
    assert "none of the models should be merged" in text
    assert 'id="recipe"' not in text
    assert 'id="merge"' not in text


def test_the_merge_is_told_to_three_digits(outline):
    (table,) = (table for table in outline.tables if "dropped" in table[0])
    assert table[1] == ["math", "0.3333", "42", "90.000%", "90.040%", "0.01", "layers.5.norm"]


def test_no_path_of_a_machine_is_told(subject):
    analysis = replace(subject.analysis, base="/home/someone/models/base.safetensors")
    text = assemble(analysis, subject.readiness, subject.advice)
    assert "someone" not in text
    assert "models/base.safetensors" in text


def test_a_model_of_80_layers_and_7_others_still_fits_in_a_page(subject):
    model = subject.analysis.models[0]
    inside = [cell for cell in model.cells if cell.layer == 0]
    tensors = [tensor for tensor in model.tensors if tensor.layer == 0]
    large = replace(
        model,
        cells=tuple(replace(cell, layer=n) for n in range(80) for cell in inside),
        tensors=tuple(
            replace(t, layer=n, name=f"layers.{n}.{t.name}") for n in range(80) for t in tensors
        ),
        by_layer=dict.fromkeys(range(80), model.total),
    )
    pair = subject.analysis.pairs[0]
    names = [f"model-{number}" for number in range(8)]
    analysis = replace(
        subject.analysis,
        models=tuple(replace(large, name=name) for name in names),
        pairs=tuple(
            replace(pair, first=a, second=b, by_layer=dict.fromkeys(range(80), pair.total))
            for a in names
            for b in names
            if a < b
        ),
    )
    text = assemble(analysis, subject.readiness, subject.advice)
    assert len(text.encode()) < 3_000_000  # and 0.9 MB of library


def test_an_analysis_without_models_is_refused(subject):
    empty = replace(subject.analysis, models=(), pairs=())
    with pytest.raises(InputError, match="has no models"):
        assemble(empty, subject.readiness, subject.advice)
    assert "0 models" in str(empty)


def test_a_library_cannot_end_its_element(monkeypatch):
    import vl_convert

    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda *_, **__: 'x = "</SCRIPT>"')
    assert pages_of.drawing_bundle.__wrapped__("6.4") == 'x = "<\\/SCRIPT>"'
