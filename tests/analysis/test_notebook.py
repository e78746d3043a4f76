"""Results in a notebook: short, harmless, and with the numbers that count."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import dare
from dare.errors import OutputError, RecipeError, install_command
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
    text, line = results[kind]._repr_html_(), repr(results[kind])
    tags = Tags(text)
    assert set(tags.opened) <= TAGS
    assert "\u202e" not in text + line
    if kind != "Advice":  # whose table names a model only where it differs from the others
        assert "alert('x')" in tags.words
    assert line.startswith(f"<{kind}")
    assert len(line) < 400
    assert "\n" not in line


def test_cards_have_the_numbers_that_count(results):
    words = {kind: " ".join(Tags(results[kind]._repr_html_()).words.split()) for kind in KINDS}
    analysis, report, plan = results["Analysis"], results["Report"], results["Plan"]
    for wanted in ("dare+linear", "0.5 43", f"to {plan.layout.target}"):
        assert wanted in words["Plan"]
    assert f"{report.models[1].drop_rate_realised:.3%}" in words["Report"]
    assert f"{analysis.pairs[0].total.cosine:+.3f}" in words["Analysis"]
    for kind in ("Analysis", "Advice"):
        assert results["Advice"].recipe["method"] in words[kind]
    base, models = {"w": np.ones(100, np.float32)}, [{"w": np.full(100, 1.5, np.float32)}]
    _, report = dare.merge_arrays(base, models, drop_rate=0.999, verbose=False)
    (warning, *_) = report.warnings
    assert warning.text in " ".join(Tags(report._repr_html_()).words.split())


def test_not_finite_elements_and_many_models_are_shown():
    base = {"w": np.zeros(10, np.float32)}
    models = {f"m{number}": {"w": np.full(10, 1e-3 * number, np.float32)} for number in range(30)}
    models["m3"]["w"][0] = np.nan
    analysis = dare.analyze_arrays(base, models)
    words = " ".join(Tags(analysis._repr_html_()).words.split())
    assert "NaN or infinite" in words
    assert "and 10 more" in words
    assert len(repr(analysis)) < 100


def test_advice_against_merging_says_why():
    base = {"w": np.ones((64, 64), np.float32)}
    analysis = dare.analyze_arrays(base, {"broken": {"w": np.full((64, 64), np.nan, np.float32)}})
    _, advice = dare.judge(analysis)
    assert "broken" in Tags(advice._repr_html_()).words


def test_what_a_result_is_made_of_is_short_too(results):
    analysis, report = results["Analysis"], results["Report"]
    candidates = Candidates(results["Plan"].recipe)
    for part in (*analysis.models, *analysis.pairs, report.digests, candidates, candidates.make()):
        assert len(repr(part)) < 300
    assert repr(dare.Recipe(base="b", models=["m"], seed=42, scale=2.0)) == (
        "Recipe(base='b', models=(ModelEntry(file='m'),), scale=2.0)"
    )


def test_the_page_is_the_report(results, tmp_path):
    text = results["Analysis"].to_html(tmp_path / "report.html")
    assert text == (tmp_path / "report.html").read_text("utf-8")
    assert "<script>alert" not in text


def test_a_figure_is_a_chart(results):
    analysis = results["Analysis"]
    chart = analysis.plot().to_dict(validate=False)
    assert chart["width"] == 640
    assert {row["model"] for row in chart["datasets"]["rows"]} == set(analysis.names)
    with pytest.raises(RecipeError, match="did you mean 'cosines'"):
        analysis.plot("cosine")


def test_without_the_packages_for_it_there_is_no_page(results, monkeypatch):
    monkeypatch.setattr("dare.documents.page.find_spec", lambda _name: None)
    for make in (results["Analysis"].to_html, results["Analysis"].plot):
        with pytest.raises(OutputError, match=re.escape(install_command("report"))):
            make()
