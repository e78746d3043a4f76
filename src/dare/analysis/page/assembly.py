"""The page: what was found, put into HTML with its figures, all in one text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import tomli_w

from dare.analysis.judge.judgement import (
    Advice,
    Evidence,
    Finding,
    Readiness,
    Severity,
    Suggestion,
    Verdict,
)
from dare.analysis.page import series
from dare.analysis.page.figures import Figure, Table
from dare.analysis.page.outcome import Outcome
from dare.analysis.page.themes import DARK, LIGHT, THEMES, css_variables, vega_config
from dare.analysis.page.words import NOTHING, amount, cosine, listed, number, share, times, weight
from dare.analysis.results import Analysis, ModelAnalysis, Origin
from dare.output.card import short_name
from dare.tensors.sizes import show_size

MOST_NAMES = 4
"""Models that are named in a sentence; more are counted."""
HEADLINES = {
    Verdict.READY: "Ready to merge",
    Verdict.WITH_CHANGES: "Ready with changes",
    Verdict.NOT_READY: "Not ready to merge",
}
TONES = {Verdict.READY: "ready", Verdict.WITH_CHANGES: "change", Verdict.NOT_READY: "stop"}
SEVERITIES = {Severity.STOP: "Stop", Severity.CHANGE: "Change", Severity.NOTE: "Note"}
ORIGINS = {
    Origin.UNCHANGED: "unchanged",
    Origin.LORA: "LoRA",
    Origin.FULL: "full fine-tune",
    Origin.UNKNOWN: "not known",
}


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    name: str
    title: str
    content: str


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
    sections = [
        Section("findings", "Findings", _findings(readiness)),
        Section("models", "Models", _models(analysis)),
        *_figure_sections(figures),
        *([Section("merge", "The merge", _merge(outcome, figures))] if outcome else []),
        Section("advice", "Advice", _advice(advice)),
        Section("inputs", "Inputs", _inputs(analysis)),
    ]
    return Template(_resource("page.html")).substitute(
        policy=_policy([start, library, script]),
        title=escape(f"{HEADLINES[readiness.verdict]}: {_subjects(analysis)} – dare"),
        style=_style(),
        start=start,
        choices=_choices(analysis),
        contents="".join(
            f'<li><a href="#{section.name}">{escape(section.title)}</a></li>'
            for section in sections
        ),
        body=_verdict(analysis, readiness)
        + _tiles(analysis, advice)
        + "".join(map(_section, sections)),
        footer=_footer(analysis),
        figures=_json([{"name": figure.name, "spec": _spec(figure)} for figure in figures]),
        themes=_json({name: vega_config(theme) for name, theme in THEMES.items()}),
        library=library,
        script=script,
    )


def _resource(name: str) -> str:
    return files("dare.analysis.page").joinpath(name).read_text("utf-8")


def _style() -> str:
    light, dark = css_variables(LIGHT), css_variables(DARK)
    return (
        f":root{{{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}" + _resource("page.css")
    )


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


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _spec(figure: Figure) -> dict[str, Any]:
    """What is drawn, with its description and without the address of a schema."""
    bare = {key: value for key, value in figure.spec.items() if key != "$schema"}
    return {**bare, "description": figure.description}


def _section(section: Section) -> str:
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>{section.content}</section>'
    )


# ---------------------------------------------------------------- the top


def _subjects(analysis: Analysis) -> str:
    if len(analysis.names) > MOST_NAMES:
        return times(len(analysis.names), "model")
    return listed(analysis.names)


def _verdict(analysis: Analysis, readiness: Readiness) -> str:
    names = ", ".join(f"<b>{escape(name)}</b>" for name in analysis.names)
    if len(analysis.names) > MOST_NAMES:
        names = times(len(analysis.names), "model")
    base = escape(short_name(analysis.base))
    each = "".join(
        f'<li class="{TONES[verdict]}"><b>{escape(name)}</b> <span>{escape(verdict)}</span></li>'
        for name, verdict in readiness.by_model.items()
    )
    return (
        f'<section class="verdict {TONES[readiness.verdict]}" aria-labelledby="verdict">'
        f'<h1 id="verdict">{HEADLINES[readiness.verdict]}</h1>'
        f'<p class="lead">{names} onto <b>{base}</b>: {_counted(readiness.findings)}.</p>'
        f'<ul class="each" aria-label="Verdict on each model">{each}</ul></section>'
    )


def _counted(findings: Sequence[Finding]) -> str:
    if not findings:
        return "nothing was found that speaks against it"
    counts = Counter(finding.severity for finding in findings)
    words = {
        Severity.STOP: ("reason to stop", "reasons to stop"),
        Severity.CHANGE: ("change to make", "changes to make"),
        Severity.NOTE: ("note", "notes"),
    }
    told = tuple(
        times(counts[severity], *words[severity]) for severity in words if counts[severity]
    )
    return listed(told)


def _tiles(analysis: Analysis, advice: Advice) -> str:
    largest = max(analysis.models, key=lambda model: model.total.relative_norm)
    tiles = [
        ("Parameters", amount(largest.total.elements), f"{', '.join(analysis.base_dtypes)} base"),
        (
            "Largest change",
            share(largest.total.relative_norm),
            f"{largest.name}, beside the base",
        ),
    ]
    if analysis.pairs:
        pair = max(analysis.pairs, key=lambda pair: abs(pair.total.cosine))
        tiles += [
            ("Closest pair", cosine(pair.total.cosine), f"cosine, {pair.first} and {pair.second}"),
            ("Cancelled", share(analysis.together.cancelled), "if all were added up as they are"),
        ]
    tiles += _advised_tiles(analysis, advice)
    return (
        f'<section aria-label="In short"><dl class="tiles" data-count="{len(tiles)}">'
        + "".join(
            f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd><dd>{escape(told)}</dd></div>"
            for what, value, told in tiles
        )
        + "</dl></section>"
    )


def _advised_tiles(analysis: Analysis, advice: Advice) -> Iterator[tuple[str, str, str]]:
    methods = [each for each in advice.suggestions if each.setting == "method"]
    rates = sorted(set(series.suggested_rates(analysis, advice).values()))
    if methods:
        yield "Advised method", str(methods[0].value), f"evidence: {methods[0].evidence}"
    if rates:
        span = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
        yield "Advised drop rate", span, "for all" if len(rates) == 1 else "by model"


def _choices(analysis: Analysis) -> str:
    names = "".join(
        f'<option value="{escape(name)}">{escape(name)}</option>' for name in analysis.names
    )
    return f'<option value="">all models</option>{names}'


# ---------------------------------------------------------------- findings, models, advice


def _findings(readiness: Readiness) -> str:
    if not readiness.findings:
        return '<p class="lead">Nothing was found that speaks against merging these models.</p>'
    return f'<ul class="findings">{"".join(map(_finding, readiness.findings))}</ul>'


def _finding(finding: Finding) -> str:
    tone = {Severity.STOP: "stop", Severity.CHANGE: "change", Severity.NOTE: "note"}
    concerns = f" data-models='{escape(_json(finding.models))}'" if finding.models else ""
    whose = f"<b>{escape(listed(finding.models))}</b> " if finding.models else ""
    figures = ", ".join(f"{name} {number(value)}" for name, value in finding.figures.items())
    return (
        f'<li class="{tone[finding.severity]}"{concerns}><div class="head">'
        f'<span class="badge">{SEVERITIES[finding.severity]}</span>'
        f"<h3>{whose}{escape(finding.seen)}</h3></div>"
        f'<p class="matters">{escape(finding.matters)}</p>'
        f"<p><b>What to do:</b> {escape(finding.remedy)}</p>"
        f'<p class="figures">{escape(finding.rule)}'
        f"{escape(f' · {figures}') if figures else ''}</p></li>"
    )


def _models(analysis: Analysis) -> str:
    columns = (
        "model",
        "relative change",
        "mean |δ|",
        "99% below",
        "largest |δ|",
        "not changed",
        "excess kurtosis",
        "origin",
    )
    longest = max(_drawable(model.total.relative_norm) for model in analysis.models) or 1.0
    rows = "".join(_model_row(model, longest) for model in analysis.models)
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    return (
        f'<div class="card"><div class="scroll" tabindex="0" role="region" aria-label="Models">'
        f'<table class="compact"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="hint">Relative change is ‖δ‖ / ‖base‖. Excess kurtosis says how much a few '
        "large changes stand out: 0 for a Gaussian, 3 for a Laplace distribution.</p></div>"
    )


def _drawable(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _model_row(model: ModelAnalysis, longest: float) -> str:
    total = model.total
    origin = ORIGINS[model.origin]
    if model.likely_rank is not None:
        origin += f", rank {model.likely_rank}"
    if model.is_adapter:
        origin += " (adapter)"
    bar = 100 * _drawable(total.relative_norm) / longest
    cells = (
        number(total.mean_magnitude),
        number(total.quantiles.p99),
        number(total.largest),
        share(total.sparsity),
        number(total.excess_kurtosis),
        origin,
    )
    return (
        f'<tr data-model="{escape(model.name)}"><th scope="row">{escape(model.name)}</th>'
        f"<td>{share(total.relative_norm)}"
        f'<span class="bar" aria-hidden="true"><i style="width:{bar:.1f}%"></i></span></td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
    )


def _advice(advice: Advice) -> str:
    items = "".join(map(_suggestion, advice.suggestions))
    doubts = "".join(f"<li>{escape(doubt)}</li>" for doubt in advice.doubts)
    told = (
        f'<div class="card"><h3>What this cannot know</h3><ul class="plain">{doubts}</ul></div>'
        if doubts
        else ""
    )
    return (
        f'<ul class="advice">{items}</ul>{told}'
        '<div class="card"><h3>As a recipe</h3>'
        f'<pre tabindex="0"><code id="recipe">{escape(tomli_w.dumps(advice.recipe))}</code></pre>'
        '<div class="tools"><button type="button" data-copies="recipe">Copy</button></div></div>'
    )


def _suggestion(suggestion: Suggestion) -> str:
    concerns = (
        f" data-models='{escape(_json([suggestion.model]))}'"
        if suggestion.model is not None
        else ""
    )
    whose = f" for {escape(suggestion.model)}" if suggestion.model is not None else ""
    tone = {Evidence.STRONG: "ready", Evidence.FAIR: "change", Evidence.WEAK: "note"}
    return (
        f'<li class="{tone[suggestion.evidence]}"{concerns}><div class="head">'
        f"<h3><code>{escape(suggestion.setting)} = {escape(_value(suggestion.value))}</code>"
        f'{whose}</h3><span class="badge">{escape(suggestion.evidence)} evidence</span></div>'
        f'<p>{escape(suggestion.reason)}</p><p class="figures">{escape(suggestion.source)}</p></li>'
    )


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _inputs(analysis: Analysis) -> str:
    files_read = [("base", analysis.base), *((m.name, m.file) for m in analysis.models)]
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="text">{escape(short_name(file))}</td>'
        "</tr>"
        for name, file in files_read
    )
    lists = {
        "What was done so that they fit": analysis.notes,
        "Left out": analysis.left_out,
        "Stored once, used twice": analysis.tied,
        **{
            f"Not in {model.name}, its delta counted as zero": model.missing
            for model in analysis.models
        },
    }
    told = "".join(
        f"<details><summary>{escape(title)} ({len(items)})</summary>"
        f'<ul class="plain">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul></details>'
        for title, items in lists.items()
        if items
    )
    return (
        '<div class="card"><div class="scroll tall" tabindex="0" role="region" '
        'aria-label="Inputs"><table><thead><tr><th scope="col">input</th>'
        f'<th scope="col" class="text">file</th></tr></thead><tbody>{rows}</tbody></table></div>'
        f"{told}</div>"
    )


def _footer(analysis: Analysis) -> str:
    return (
        f"{show_size(analysis.bytes_read)} read in {number(analysis.seconds)} s. δ is a model's "
        "weights less the base's. Made by dare; the page needs no network."
    )


# ---------------------------------------------------------------- figures

SECTIONS = {
    "changes": ("What changed", ("magnitudes", "change-", "spectra")),
    "together": ("Side by side", ("cosines", "conflicts", "layer-cosines", "cancelled")),
    "drop-rate": ("Drop rate", ("predicted-error",)),
}
MERGE_FIGURES = ("kept", "survival")


def _figure_sections(figures: Sequence[Figure]) -> Iterator[Section]:
    for name, (title, beginnings) in SECTIONS.items():
        found = [figure for figure in figures if figure.name.startswith(beginnings)]
        if found:
            yield Section(name, title, _grid(found))


def _grid(figures: Sequence[Figure]) -> str:
    return f'<div class="grid">{"".join(map(_figure, figures))}</div>'


def _figure(figure: Figure) -> str:
    name = figure.name
    concerns = f" data-models='{escape(_json(figure.models))}'" if figure.models else ""
    hint = '<p class="hint">Shift and wheel zooms, dragging moves.</p>' if figure.zooms else ""
    reset = f'<button type="button" data-resets="{name}">Reset</button>' if figure.zooms else ""
    return (
        f'<figure class="card" style="--width:{figure.width:.4f}" id="figure-{name}"{concerns} '
        f'aria-labelledby="title-{name}"><figcaption><h3 id="title-{name}">'
        f"{escape(figure.title)}</h3><p>{escape(figure.caption)}</p></figcaption>"
        f'<div class="chart" id="chart-{name}"></div>'
        f'<noscript><p>{escape(figure.description)}</p></noscript><div class="foot">'
        f'<details><summary>Numbers<span class="unseen"> of “{escape(figure.title)}”</span>'
        f"</summary>{_table(figure.table, figure.title)}</details>{hint}"
        f'<div class="tools">{reset}{_save(figure, "svg")}{_save(figure, "png")}</div></div>'
        "</figure>"
    )


def _save(figure: Figure, suffix: str) -> str:
    return (
        f'<button type="button" data-figure="{figure.name}" data-format="{suffix}" '
        f'aria-label="Save “{escape(figure.title)}” as {suffix.upper()}">{suffix.upper()}</button>'
    )


def _table(table: Table, title: str) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in table.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}, numbers">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


# ---------------------------------------------------------------- after a merge


def _rate(rate: float | None) -> str:
    """A drop rate, exactly enough to see that it was kept to."""
    return NOTHING if rate is None else f"{rate:.3%}"


def _merge(outcome: Outcome, figures: Sequence[Figure]) -> str:
    columns = ("model", "weight", "seed", "dropped", "asked", "largest |δ|", "in")
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = "".join(
        f'<tr data-model="{escape(model.name)}"><th scope="row">{escape(model.name)}</th>'
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                weight(model.weight),
                str(model.seed),
                _rate(model.drop_rate_realised),
                _rate(model.drop_rate_asked),
                number(model.largest_delta),
                model.largest_delta_in or NOTHING,
            )
        )
        + "</tr>"
        for model in outcome.models
    )
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in outcome.warnings)
    told = f'<h3>Warnings</h3><ul class="plain">{warnings}</ul>' if warnings else ""
    place = f" to {escape(short_name(outcome.output))}" if outcome.output else ""
    return (
        f'<p class="lead">Merged by <code>{escape(outcome.method)}</code>{place} in '
        f"{number(outcome.seconds)} s.</p>"
        '<div class="card"><div class="scroll tall" tabindex="0" role="region" '
        f'aria-label="Models in the merge"><table class="compact"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{told}</div>"
        + _grid([figure for figure in figures if figure.name.startswith(MERGE_FIGURES)])
    )
