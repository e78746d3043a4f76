"""The page: plain values for the templates, which make one HTML text of them.

The only module that imports Jinja, which escapes every value. Each section of the page has a
template of its own; `parts` has what several of them share.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import tomli_w

from dare.analysis.judge.judgement import Advice, Finding, Readiness, Severity
from dare.analysis.page import series, words
from dare.analysis.page.outcome import Outcome
from dare.analysis.page.series import Columns, Table, listing
from dare.analysis.page.themes import THEMES, vega_config
from dare.analysis.page.words import NOTHING, amount, cosine, listed, number, share
from dare.analysis.results import Analysis
from dare.output.places import short_name
from dare.tensors.sizes import show_size, times

if TYPE_CHECKING:
    from dare.analysis.page.figures import Figure

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


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    name: str
    title: str
    template: str
    figures: tuple[Figure, ...] = ()


def assemble_page(
    analysis: Analysis,
    readiness: Readiness,
    advice: Advice,
    outcome: Outcome | None,
    figures: Sequence[Figure],
    library: str,
) -> str:
    """Put everything into one text; `library` is the JavaScript that draws."""
    start, script = _resource("start.js"), _resource("page.js")
    names = analysis.names
    many = times(len(names), "model") if len(names) > MOST_NAMES else ""
    headline = words.HEADLINES[readiness.verdict]
    inputs = [("base", analysis.base), *((model.name, model.file) for model in analysis.models)]
    return _render(
        policy=_policy([start, library, script]),
        title=f"{headline}: {many or listed(names)} – dare",
        colours={name: theme.colours for name, theme in THEMES.items()},
        style=_resource("page.css"),
        start=start,
        library=library,
        script=script,
        drawings=[{"name": figure.name, "spec": _spec(figure)} for figure in figures],
        themes={name: vega_config(theme) for name, theme in THEMES.items()},
        sections=list(_sections(figures, outcome)),
        names=names,
        many=many,
        headline=headline,
        readiness=readiness,
        base=short_name(analysis.base),
        counted=_counted(readiness.findings),
        tiles=list(_tiles(analysis, advice)),
        models=listing(analysis.models, MODEL_COLUMNS),
        bars=_bars([model.total.relative_norm for model in analysis.models]),
        outcome=outcome,
        merged=listing(outcome.models, MERGED_COLUMNS) if outcome else None,
        advice=advice,
        recipe=tomli_w.dumps(advice.recipe),
        inputs=Table(("input", "file"), tuple((name, short_name(file)) for name, file in inputs)),
        analysis=analysis,
        size_read=show_size(analysis.bytes_read),
        seconds=number(analysis.seconds),
    )


def _render(**values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("dare.analysis.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "listed": listed,
        "number": number,
        "setting": words.setting,
        "short_name": short_name,
    }
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    return environment.get_template("page.html.jinja").render(values)


def _resource(name: str) -> str:
    return files("dare.analysis.page").joinpath("templates", name).read_text("utf-8")


def _policy(scripts: Iterable[str]) -> str:
    """Nothing is fetched, and only the page's own scripts run (Vega compiles its expressions)."""
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    )
    return (
        f"default-src 'none'; script-src {digests} 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _spec(figure: Figure) -> dict[str, Any]:
    """What is drawn, with its description and without the address of a schema."""
    bare = {key: value for key, value in figure.spec.items() if key != "$schema"}
    return {**bare, "description": figure.description}


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


def _bars(values: Sequence[float]) -> list[str]:
    """Lengths in per cent of the longest; what is not finite has none."""
    drawable = [value if math.isfinite(value) else 0.0 for value in values]
    longest = max(drawable) or 1.0
    return [f"{100 * value / longest:.1f}" for value in drawable]
