"""The report: a page, from plain values for templates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dare.analysis.judge.groups import every
from dare.analysis.judge.judgement import Advice, Finding, Readiness, Severity, Verdict
from dare.analysis.judge.readiness import chance_cancelled, find_copies
from dare.analysis.page import words
from dare.analysis.page.series import Outcome
from dare.analysis.page.words import cosine
from dare.analysis.results import Analysis, ModelAnalysis
from dare.documents.document import Columns, Table, bar_lengths, listing, spans_decades
from dare.documents.page import Section, check_installed, library_for, render_page
from dare.documents.words import NOTHING, amount, listed, number, setting, share, show_size, times
from dare.errors import InputError
from dare.output.places import short_name
from dare.output.targets import write_file
from dare.recipe.toml import write_toml

if TYPE_CHECKING:
    from dare.documents.charts import Figure

MOST_NAMES = 4
"""Models that are named in a sentence; more are counted."""
COUNTED = {
    Severity.STOP: ("reason to stop", "reasons to stop"),
    Severity.CHANGE: ("change to make", "changes to make"),
    Severity.NOTE: ("note", "notes"),
}
FIGURE_SECTIONS = {
    "together": ("Side by side", ("cosines", "conflicts", "cancelled")),
    "changes": ("What changed", ("changes", "change-", "magnitudes", "spectra")),
}
"""By name: the title, and how the names of its figures begin."""
MERGE_FIGURES = ("survival", "kept")
REMARKED = {"not_finite", "same_model"}
"""Rules whose findings the table of models remarks in its own words."""
NUMBER_COLUMNS: Columns = {
    "model": lambda model: model.name,
    "mean |δ|": lambda model: number(model.total.mean_magnitude),
    "99% below": lambda model: number(model.total.quantiles.p99),
    "largest |δ|": lambda model: number(model.total.largest),
    "not changed": lambda model: share(model.total.sparsity),
    "NaN or infinite": lambda model: f"{model.total.not_finite:,}",
    "excess kurtosis": lambda model: number(model.total.excess_kurtosis),
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


def write_page(
    path: Path,
    analysis: Analysis,
    readiness: Readiness,
    advice: Advice,
    outcome: Outcome | None = None,
) -> None:
    """Write one HTML page that needs nothing else; `outcome` is what a finished merge did."""
    write_file(path, page_text(analysis, readiness, advice, outcome).encode(), "page")


def page_text(
    analysis: Analysis, readiness: Readiness, advice: Advice, outcome: Outcome | None = None
) -> str:
    """The page itself."""
    figures = draw(analysis, advice, outcome)
    return assemble_page(analysis, readiness, advice, outcome, figures, library_for(figures))


def draw(analysis: Analysis, advice: Advice, outcome: Outcome | None = None) -> list[Figure]:
    """All figures that there is something to draw in."""
    check_installed()
    if not analysis.models:
        raise InputError("the analysis has no models: there is nothing to show")
    from dare.analysis.page.figures import draw_figures

    return draw_figures(analysis, advice, outcome)


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
    headline = words.headline(readiness)
    changes = [model.total.relative_norm for model in analysis.models]
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
        verdicts=_verdicts(readiness),
        base=short_name(analysis.base),
        parameters=amount(sum(analysis.base_dtypes.values())),
        counted=_counted(readiness.findings),
        tiles=list(_tiles(analysis, advice)),
        models=listing(analysis.models, model_columns(analysis, readiness, advice)),
        numbers=listing(analysis.models, NUMBER_COLUMNS),
        bars=bar_lengths(changes),
        logarithmic=spans_decades(changes),
        outcome=outcome,
        merged=listing(outcome.models, MERGED_COLUMNS) if outcome else None,
        advice=advice,
        recipe=write_toml(advice.recipe) if advice.recipe else "",
        left_out=advice.left_out,
        inputs=Table(("input", "file"), tuple((name, short_name(file)) for name, file in inputs)),
        analysis=analysis,
        size_read=show_size(analysis.bytes_read),
        seconds=number(analysis.seconds),
    )


def _sections(figures: Sequence[Figure], outcome: Outcome | None) -> Iterator[Section]:
    def named(beginnings: tuple[str, ...]) -> tuple[Figure, ...]:
        return tuple(figure for figure in figures if figure.name.startswith(beginnings))

    if outcome:
        yield Section("merge", "The merge", "merge.html.jinja", named(MERGE_FIGURES))
    yield Section("findings", "Problems found", "findings.html.jinja")
    yield Section("models", "Models", "models.html.jinja")
    if drawn := named(("predicted-error",)):
        yield Section("drop-rate", "Drop rate", "drop_rate.html.jinja", drawn)
    for name, (title, beginnings) in FIGURE_SECTIONS.items():
        if drawn := named(beginnings):
            yield Section(name, title, "figures.html.jinja", drawn)
    yield Section("advice", "Why these settings", "advice.html.jinja")
    yield Section("inputs", "Inputs", "inputs.html.jinja")


def _verdicts(readiness: Readiness) -> list[tuple[Verdict, tuple[str, ...]]]:
    """The models with each verdict, the gravest first."""
    return [
        (verdict, names)
        for verdict in reversed(Verdict)
        if (names := tuple(name for name, found in readiness.by_model.items() if found is verdict))
    ]


def model_columns(analysis: Analysis, readiness: Readiness, advice: Advice) -> Columns:
    """What decides about a model: the first number is its change."""
    out = advice.left_out
    copies = {name: same[0] for same in find_copies(analysis) for name in same[1:]}

    def verdict(model: ModelAnalysis) -> str:
        return str(readiness.by_model.get(model.name, NOTHING))

    def remark(model: ModelAnalysis) -> str:
        remarks = [f"⚠ left out{_reason(model.name, readiness, advice)}"] * (model.name in out)
        if model.total.not_finite:
            remarks.append(f"{times(model.total.not_finite, 'element')} NaN or infinite")
        if model.name in copies:
            remarks.append(f"the same as {copies[model.name]}")
        return ", ".join(remarks)

    columns: dict[str, Callable[[ModelAnalysis], str]] = {
        "model": lambda model: model.name,
        "change": lambda model: share(model.total.relative_norm),
        "verdict": verdict,
        "origin": words.origin,
    }
    if any(map(remark, analysis.models)):
        columns["remarks"] = remark
    return columns


def _reason(model: str, readiness: Readiness, advice: Advice) -> str:
    """Why a model is left out, after a colon; nothing for what another remark says."""
    rules = {s.source.rpartition(", ")[2] for s in advice.suggestions if s.model == model}
    for finding in readiness.of(model):
        if finding.rule in rules & set(words.FEW_WORDS) - REMARKED:
            return f": {words.few_words(finding, model, listed)}"
    return ""


def _counted(findings: Sequence[Finding]) -> str:
    if not findings:
        return "nothing was found that speaks against it"
    counts = Counter(finding.severity for finding in findings)
    return listed(
        tuple(times(counts[kind], *nouns) for kind, nouns in COUNTED.items() if counts[kind])
    )


def _tiles(analysis: Analysis, advice: Advice) -> Iterator[tuple[str, str, str]]:
    """Label, value and remark of the most telling numbers, about the models that are merged."""
    out = set(advice.left_out)
    models = [model for model in analysis.models if model.name not in out] or analysis.models
    largest = max(models, key=lambda model: model.total.relative_norm)
    change = share(largest.total.relative_norm)
    yield "Largest change", change, f"{largest.name}, relative to the base"
    names = {model.name for model in models}
    if pairs := [pair for pair in analysis.pairs if {pair.first, pair.second} <= names]:
        pair = max(pairs, key=lambda pair: abs(pair.total.cosine))
        yield "Closest pair", cosine(pair.total.cosine), f"cosine, {pair.first} and {pair.second}"
    if analysis.pairs:
        lost, chance = analysis.together.cancelled, chance_cancelled(analysis)
        whose = f"{every(len(analysis.models))} models; " if out else ""
        yield "Cancel if added up", share(lost), f"{whose}by chance about {share(chance)}"
