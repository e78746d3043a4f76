"""What an analysis, a verdict and an advice look like in a notebook, as a page and as charts."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from dare.analysis.judge.advice import judge
from dare.analysis.judge.judgement import Advice, Readiness
from dare.analysis.page.assembly import draw, model_columns, page_text
from dare.analysis.page.words import cosine, headline
from dare.analysis.results import Analysis
from dare.documents.charts import THEMES, alt, vega_config
from dare.documents.document import Columns, listing
from dare.documents.notebook import card, facts, folded, remarks, table
from dare.documents.words import named, setting, share, times
from dare.errors import RecipeError, did_you_mean
from dare.output.places import short_name
from dare.output.targets import write_file
from dare.recipe.naming import in_our_form
from dare.recipe.toml import write_toml

MOST_PAIRS = 6
"""Pairs of models that are shown: those that have most to do with each other."""
PAIR_COLUMNS: Columns = {
    "models": lambda pair: f"{pair.first} and {pair.second}",
    "cosine >": lambda pair: cosine(pair.total.cosine),
    "opposed >": lambda pair: share(pair.total.conflict),
}
CHART_WIDTH = 640
"""In pixels; a notebook has no place whose width a chart could take."""


def analysis_card(analysis: Analysis) -> str:
    """The page's table of models, and the pairs that have most to do with each other."""
    readiness, advice = judge(analysis)
    columns = model_columns(analysis, readiness, advice)
    pairs = sorted(analysis.pairs, key=lambda pair: -abs(pair.total.cosine))[:MOST_PAIRS]
    return card(
        f"{headline(readiness)}: {named(analysis.names)} relative to {short_name(analysis.base)}",
        table(tuple(columns), listing(analysis.models, columns).rows),
        table(tuple(PAIR_COLUMNS), listing(pairs, PAIR_COLUMNS).rows),
        remarks(("note", note) for note in analysis.notes),
    )


def readiness_card(readiness: Readiness) -> str:
    """The verdict, each model's, and what to do."""
    findings = (
        (
            finding.severity.value,
            ", ".join(finding.models) or "all",
            f"{finding.seen}.",
            f"{finding.remedy}.",
        )
        for finding in readiness.findings
    )
    return card(
        headline(readiness),
        facts({name: verdict.value for name, verdict in readiness.by_model.items()}),
        table(("", "models", "seen", "what to do"), findings),
    )


def advice_card(advice: Advice) -> str:
    """The settings with their reasons, and the recipe."""
    if not advice.recipe:
        reasons = ((advised.model or "all", f"{advised.reason}.") for advised in advice.suggestions)
        return card("Do not merge these models", remarks(reasons))
    recipe = in_our_form(advice.recipe)
    rows = (
        (s.setting, setting(s.value), s.model or "all", s.evidence.value)
        for s in advice.suggestions
    )
    why = [f"{s.setting} of {s.model or 'all'}: {s.reason}." for s in advice.suggestions]
    why += [f"Caveat: {doubt}." for doubt in advice.doubts]
    known = {"method": recipe["method"]} if "method" in recipe else {}
    return card(
        f"Advice for {times(len(recipe['models']), 'model')}",
        facts(known),
        table(("setting", "value >", "of", "evidence"), rows),
        folded("Why, and caveats", "\n\n".join(why)),
        folded("As a recipe; dare.merge(advice) carries it out", write_toml(recipe)),
    )


def page(analysis: Analysis, path: str | PathLike[str] | None) -> str:
    """The report page; it is also written to a path, if one is given."""
    text = page_text(analysis, *judge(analysis))
    if path is not None:
        write_file(Path(path), text.encode(), "page")
    return text


def chart(analysis: Analysis, name: str | None) -> Any:
    """A figure of the report as an Altair chart; the one that decides most if none is named."""
    _, advice = judge(analysis)
    figures = {figure.name: figure for figure in draw(analysis, advice)}
    if name is not None and name not in figures:
        known = f"{did_you_mean(name, figures)}; there are {', '.join(figures)}"
        raise RecipeError(f"{name!r}: there is no such figure{known}")
    figure = figures[name] if name else next(iter(figures.values()))
    theme = THEMES["light"]
    config = {**vega_config(theme), "background": theme.colours["panel"], "padding": 12}
    looks = {"title": figure.title, "width": CHART_WIDTH, "config": config}
    spec = {**figure.spec, **looks}
    rows = spec.pop("datasets")
    chart = alt.LayerChart.from_dict(spec)
    chart.datasets = rows  # as they are: Altair would make an object of every number
    return chart
