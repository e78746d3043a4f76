"""The report's page: plain values for the templates, one of which each section has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tomli_w

from dare.analysis.judge.judgement import Advice, Finding, Readiness, Severity
from dare.analysis.page import series, words
from dare.analysis.page.outcome import Outcome
from dare.analysis.page.words import cosine
from dare.analysis.results import Analysis
from dare.output.page.shell import Section, render_page
from dare.output.page.tables import Columns, Table, bar_lengths, listing
from dare.output.page.words import NOTHING, amount, listed, number, setting, share
from dare.output.places import short_name
from dare.tensors.sizes import show_size, times

if TYPE_CHECKING:
    from dare.output.page.figures import Figure

MOST_NAMES = 4
"""Models that are named in a sentence; more are counted."""
COUNTED = {
    Severity.STOP: ("reason to stop", "reasons to stop"),
    Severity.CHANGE: ("change to make", "changes to make"),
    Severity.NOTE: ("note", "notes"),
}
FIGURE_SECTIONS = {
    "changes": ("What changed", ("magnitudes", "change-", "spectra")),
    "together": ("Side by side", ("cosines", "conflicts", "layer-cosines", "cancelled")),
    "drop-rate": ("Drop rate", ("predicted-error",)),
}
"""By name: the title, and how the names of its figures begin."""
MERGE_FIGURES = ("kept", "survival")
MODEL_COLUMNS: Columns = {
    "model": lambda model: model.name,
    "relative change": lambda model: share(model.total.relative_norm),
    "mean |δ|": lambda model: number(model.total.mean_magnitude),
    "99% below": lambda model: number(model.total.quantiles.p99),
    "largest |δ|": lambda model: number(model.total.largest),
    "not changed": lambda model: share(model.total.sparsity),
    "excess kurtosis": lambda model: number(model.total.excess_kurtosis),
    "origin": words.origin,
}
MERGED_COLUMNS: Columns = {
    "model": lambda model: model.name,
    "weight": lambda model: words.weight(model.weight),
    "seed": lambda model: str(model.seed),
    "dropped": lambda model: words.rate(model.drop_rate_realised),
    "asked": lambda model: words.rate(model.drop_rate_asked),
    "largest |δ|": lambda model: number(model.largest_delta),
    "in": lambda model: model.largest_delta_in or NOTHING,
}


def assemble_page(
    analysis: Analysis,
    readiness: Readiness,
    advice: Advice,
    outcome: Outcome | None,
    figures: Sequence[Figure],
    library: str,
) -> str:
    """Put everything into one text; `library` is the JavaScript that draws."""
    names = analysis.names
    many = times(len(names), "model") if len(names) > MOST_NAMES else ""
    headline = words.HEADLINES[readiness.verdict]
    inputs = [("base", analysis.base), *((model.name, model.file) for model in analysis.models)]
    return render_page(
        "dare.analysis.page",
        "report.html.jinja",
        figures=figures,
        library=library,
        script="report.js",
        filters={"listed": listed, "setting": setting, "short_name": short_name},
        title=f"{headline}: {many or listed(names)} – dare",
        sections=list(_sections(figures, outcome)),
        names=names,
        many=many,
        headline=headline,
        readiness=readiness,
        base=short_name(analysis.base),
        counted=_counted(readiness.findings),
        tiles=list(_tiles(analysis, advice)),
        models=listing(analysis.models, MODEL_COLUMNS),
        bars=bar_lengths([model.total.relative_norm for model in analysis.models]),
        outcome=outcome,
        merged=listing(outcome.models, MERGED_COLUMNS) if outcome else None,
        advice=advice,
        recipe=tomli_w.dumps(advice.recipe),
        inputs=Table(("input", "file"), tuple((name, short_name(file)) for name, file in inputs)),
        analysis=analysis,
        size_read=show_size(analysis.bytes_read),
        seconds=number(analysis.seconds),
    )


def _sections(figures: Sequence[Figure], outcome: Outcome | None) -> Iterator[Section]:
    def named(beginnings: tuple[str, ...]) -> tuple[Figure, ...]:
        return tuple(figure for figure in figures if figure.name.startswith(beginnings))

    yield Section("findings", "Findings", "findings.html.jinja")
    yield Section("models", "Models", "models.html.jinja")
    for name, (title, beginnings) in FIGURE_SECTIONS.items():
        if drawn := named(beginnings):
            yield Section(name, title, "figures.html.jinja", drawn)
    if outcome:
        yield Section("merge", "The merge", "merge.html.jinja", named(MERGE_FIGURES))
    yield Section("advice", "Advice", "advice.html.jinja")
    yield Section("inputs", "Inputs", "inputs.html.jinja")


def _counted(findings: Sequence[Finding]) -> str:
    if not findings:
        return "nothing was found that speaks against it"
    counts = Counter(finding.severity for finding in findings)
    return listed(
        tuple(times(counts[kind], *nouns) for kind, nouns in COUNTED.items() if counts[kind])
    )


def _tiles(analysis: Analysis, advice: Advice) -> Iterator[tuple[str, str, str]]:
    """Label, value and remark of the most telling numbers."""
    largest = max(analysis.models, key=lambda model: model.total.relative_norm)
    change = share(largest.total.relative_norm)
    yield "Parameters", amount(largest.total.elements), f"{', '.join(analysis.base_dtypes)} base"
    yield "Largest change", change, f"{largest.name}, beside the base"
    if analysis.pairs:
        pair = max(analysis.pairs, key=lambda pair: abs(pair.total.cosine))
        remark = f"cosine, {pair.first} and {pair.second}"
        lost = share(analysis.together.cancelled)
        yield "Closest pair", cosine(pair.total.cosine), remark
        yield "Cancelled", lost, "if all were added up as they are"
    for suggestion in [item for item in advice.suggestions if item.setting == "method"][:1]:
        yield "Advised method", str(suggestion.value), f"evidence: {suggestion.evidence}"
    rates = sorted(set(series.suggested_rates(analysis, advice).values()))
    if len(rates) == 1:
        yield "Advised drop rate", f"{rates[0]:g}", "for all"
    elif rates:
        yield "Advised drop rate", f"{rates[0]:g} to {rates[-1]:g}", "by model"
