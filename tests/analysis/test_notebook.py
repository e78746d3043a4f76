"""Results in a notebook: short, harmless, and with the numbers that count."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import dare
from dare.errors import OutputError, RecipeError
from dare.studies.candidates import Candidates
from helpers import save

EVIL = "</td><script>alert('x')</script><img src=x onerror=alert(1)>&amp;\u202e"
TAGS = {
    *("div", "strong", "b", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"),
    *("details", "summary", "pre"),
}


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        assert [name for name, _ in attributes] in ([], ["style"])
        self.opened.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words += f"{data} "


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A result of every kind, of models with a hostile name."""
    folder = tmp_path_factory.mktemp("evil")
    generator = np.random.default_rng(3)
    base = {"layers.0.mlp.up.weight": generator.normal(0, 1, (64, 64)).astype(np.float32)}
    files = []
    for name in (EVIL.replace("/", "\N{DIVISION SLASH}"), "plain"):
        change = generator.normal(0, 0.01, (64, 64)).astype(np.float32)
        tuned = {tensor: array + change for tensor, array in base.items()}
        files.append(save(folder / f"{name}.safetensors", tuned))
    base_file = save(folder / "base.safetensors", base)
    asked = {"base": base_file, "models": files, "output": folder / "o.safetensors"}
    plan = dare.plan(**asked, drop_rate=0.5, verbose=False)
    analysis = dare.analyze(base_file, files, verbose=False)
    readiness, advice = dare.judge(analysis)
    made = (plan, dare.merge(plan), analysis, readiness, advice)
    return {type(result).__name__: result for result in made}


KINDS = ("Plan", "Report", "Analysis", "Readiness", "Advice")


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_name_stays_a_name(results, kind):
    text = results[kind]._repr_html_()
    tags = Tags(text)
    assert set(tags.opened) <= TAGS
    assert "\u202e" not in text
    if kind != "Advice":  # whose table names a model only where it differs from the others
        assert "alert('x')" in tags.words


@pytest.mark.parametrize("kind", KINDS)
def test_a_repr_is_a_line(results, kind):
    text = repr(results[kind])
    assert text.startswith(f"<{kind}")
    assert len(text) < 400
    assert "\n" not in text
    assert "\u202e" not in text


def test_cards_have_the_numbers_that_count(results):
    words = {kind: " ".join(Tags(results[kind]._repr_html_()).words.split()) for kind in KINDS}
    analysis, report, plan = results["Analysis"], results["Report"], results["Plan"]
    assert "dare+linear of 2 models" in words["Plan"]
    assert "4,096 elements" in words["Plan"]
    assert "plain 0.5 43" in words["Plan"]
    assert f"to {plan.layout.target}" in words["Plan"]
    assert f"{report.models[1].drop_rate_realised:.2%}" in words["Report"]
    assert "1.00%" in words["Analysis"]
    assert f"{analysis.pairs[0].total.cosine:+.3f}" in words["Analysis"]
    assert "Ready to merge by dare+sum" in words["Analysis"]
    assert "Ready to merge by dare+sum" in words["Readiness"]
    assert "method dare+sum" in words["Advice"]
    assert 'method = "dare+sum"' in words["Advice"]


def test_not_finite_elements_and_many_models_are_shown():
    base = {"w": np.zeros(10, np.float32)}
    models = {f"m{number}": {"w": np.full(10, 1e-3 * number, np.float32)} for number in range(30)}
    models["m3"]["w"][0] = np.nan
    analysis = dare.analyze_arrays(base, models)
    words = " ".join(Tags(analysis._repr_html_()).words.split())
    assert "NaN or infinite" in words
    assert "and 10 more" in words
    assert repr(analysis) == "<Analysis of 30 models (m0, m1, m2, m3, m4, …) relative to base>"


def test_warnings_are_shown_with_their_strength():
    base = {"w": np.ones(100, np.float32)}
    models = [{"w": np.full(100, 1.5, np.float32)}]
    _, report = dare.merge_arrays(base, models, drop_rate=0.999, verbose=False)
    words = " ".join(Tags(report._repr_html_()).words.split())
    assert report.warnings
    for warning in report.warnings:
        assert f"{warning.strength} {warning.text}" in words


def test_advice_against_merging_says_why():
    base = {"w": np.ones((64, 64), np.float32)}
    analysis = dare.analyze_arrays(base, {"broken": {"w": np.full((64, 64), np.nan, np.float32)}})
    _, advice = dare.judge(analysis)
    words = " ".join(Tags(advice._repr_html_()).words.split())
    assert repr(advice) == "<Advice: not to merge these models>"
    assert words.startswith("Do not merge these models broken ")


def test_what_a_result_is_made_of_is_short_too(results):
    analysis, report = results["Analysis"], results["Report"]
    for part in (*analysis.models, *analysis.pairs, report.digests):
        assert len(repr(part)) < 300
    assert repr(dare.Recipe(base="b", models=["m"], seed=42, scale=2.0)) == (
        "Recipe(models=(ModelEntry(file='m'),), base='b', scale=2.0)"
    )
    candidates = Candidates(results["Plan"].recipe)
    assert re.fullmatch(
        r"<Candidates of 2 models \(.*, plain\), .* kB in memory>", repr(candidates)
    )
    assert repr(candidates.make()) == "<Candidate by dare+linear: 1 array>"


def test_the_page_is_the_report(results, tmp_path):
    analysis = results["Analysis"]
    text = analysis.to_html(tmp_path / "report.html")
    assert text == (tmp_path / "report.html").read_text("utf-8")
    assert "Ready to merge by dare+sum" in text
    assert "<script>alert" not in text


def test_a_figure_is_a_chart(results):
    analysis = results["Analysis"]
    chart = analysis.plot().to_dict(validate=False)
    assert chart["title"] == "What a drop rate costs"
    assert chart["width"] == 640
    assert {row["model"] for row in chart["datasets"]["rows"]} == set(analysis.names)
    with pytest.raises(RecipeError, match=r"did you mean 'cosines'\?\); there are predicted-error"):
        analysis.plot("cosine")


def test_without_the_packages_for_it_there_is_no_page(results, monkeypatch):
    monkeypatch.setattr("dare.output.page.writing.find_spec", lambda _name: None)
    for make in (results["Analysis"].to_html, results["Analysis"].plot):
        with pytest.raises(OutputError, match=r"pip install 'dare-merge\[report\]'"):
            make()
