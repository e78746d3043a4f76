"""Everything that an analysis shows in a terminal: tables whose rows are models, and reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dare.analysis.judge.judgement import Advice, Evidence, Readiness
from dare.analysis.judge.prediction import exposures_of, mean_bounded_error
from dare.analysis.judge.settling import LEFT_OUT
from dare.analysis.page.series import TABLE_RATES, kinds_of, suggested_rates
from dare.analysis.page.terminal import SEVERITIES, Names, print_labelled
from dare.analysis.page.words import cosine, layer_name
from dare.analysis.results import Analysis, Statistics
from dare.output.page.words import NOTHING, amount, number, setting, share
from dare.output.terminal import EIGHTHS, can_write, draw_bar, make_table, print_titled, shown
from dare.tensors.sizes import show_size, times

WIDE = 100
"""Columns from which tables have all their columns."""
SHORTEST_BAR, LONGEST_BAR = 4, 20
NUMBER = 7
"""Columns that a share takes."""
EVIDENCE = {Evidence.STRONG: "green", Evidence.FAIR: "yellow", Evidence.WEAK: "dim"}
Draw = Callable[[float], Text]


def show_findings(console: Console, analysis: Analysis, readiness: Readiness) -> None:
    """Show every finding: what was seen, why it matters, what to do."""
    names = Names(analysis.names, console)
    for finding in readiness.findings:
        whose = f"{names.list(finding.models)}  " if finding.models else ""
        seen = Text.assemble((whose, "bold"), names.in_text(finding.seen))
        label = finding.severity.capitalize()
        print_labelled(console, label, seen, SEVERITIES[finding.severity])
        print_labelled(console, "", Text(names.in_text(finding.matters), "dim"))
        print_labelled(console, "  remedy", names.in_text(finding.remedy), "dim")
        console.print()


def show_figures(console: Console, analysis: Analysis, advice: Advice) -> None:
    """Show what the findings rest on, and each setting that is advised with its reason."""
    names = Names(analysis.names, console)
    _show_magnitudes(console, analysis, names)
    _show_kinds(console, analysis, names)
    if analysis.pairs:
        _show_pairs(console, analysis, names)
    _show_predictions(console, analysis, advice, names)
    _show_protections(console, advice)
    _show_advice(console, advice, names)
    _show_notes(console, analysis)


# ---------------------------------------------------------------- tables


def _show_magnitudes(console: Console, analysis: Analysis, names: Names) -> None:
    cells: dict[str, Callable[[Statistics], str]] = {
        "parameters >": lambda total: amount(total.elements),
        "mean |δ| >": lambda total: number(total.mean_magnitude),
        "99% below >": lambda total: number(total.quantiles.p99),
        "largest >": lambda total: number(total.largest),
        "unchanged >": lambda total: share(total.sparsity),
        "kurtosis >": lambda total: number(total.excess_kurtosis),
    }
    if console.width < WIDE:
        del cells["parameters >"]
    table = make_table("model", *cells)
    for model in analysis.models:
        table.add_row(Text(names[model.name]), *(cell(model.total) for cell in cells.values()))
    print_titled(console, "Magnitudes of changes", table)


def _show_kinds(console: Console, analysis: Analysis, names: Names) -> None:
    kinds = kinds_of(analysis)
    changes = [s.relative_norm for model in analysis.models for s in model.by_kind.values()]
    draw = _bars(console, len(kinds), names, changes)
    table = make_table("model", *map(str, kinds))
    for model in analysis.models:
        parts = [model.by_kind.get(kind) for kind in kinds]
        cells = [draw(part.relative_norm) if part else Text(NOTHING) for part in parts]
        table.add_row(Text(names[model.name]), *cells)
    print_titled(console, "Change by kind of tensor: ‖δ‖ / ‖base‖", table)


def _show_pairs(console: Console, analysis: Analysis, names: Names) -> None:
    table = make_table("models", "", "cosine >", "opposite signs >")
    ranked = sorted(analysis.pairs, key=lambda pair: -abs(pair.total.cosine))
    for pair in ranked:
        signs = share(pair.total.conflict) if pair.total.both else NOTHING
        two = Text(names[pair.first]), Text(names[pair.second])
        table.add_row(*two, cosine(pair.total.cosine), signs)
    title = "Every two models, the closest first; by chance 50% have opposite signs"
    print_titled(console, title, table)


def _show_predictions(console: Console, analysis: Analysis, advice: Advice, names: Names) -> None:
    advised = suggested_rates(analysis, advice)
    rates = TABLE_RATES if console.width >= WIDE else TABLE_RATES[::2]
    table = make_table("model", "advised >", *(f"at {rate:g} >" for rate in rates))
    for model in analysis.models:
        exposures = exposures_of(model)
        errors = [mean_bounded_error(exposures, rate) for rate in rates]
        rate = advised.get(model.name)
        chosen = NOTHING
        if rate is not None and math.isfinite(rate):
            chosen = f"{share(mean_bounded_error(exposures, rate))} at {rate:g}"
        table.add_row(Text(names[model.name]), chosen, *map(share, errors))
    bound = f"; a model may bring {share(advice.error_share)}" if advice.error_share else ""
    print_titled(console, f"Predicted error of outputs, at most, by drop rate{bound}", table)


def _show_protections(console: Console, advice: Advice) -> None:
    if not advice.protect:
        return
    table = make_table("layer", "kind", "error >", "drop rate that would do >")
    for place in advice.protect:
        cells = layer_name(place.layer), place.kind, share(place.error), setting(place.drop_rate)
        table.add_row(*map(shown, cells))
    print_titled(
        console,
        "Layers to protect; the bound is for all layers together",
        table,
    )


# ---------------------------------------------------------------- advice


def _show_advice(console: Console, advice: Advice, names: Names) -> None:
    if advice.suggestions:
        console.print(Text("Advice", "bold"))
    for suggestion in advice.suggestions:
        whose = "" if suggestion.model is None else f" of {names[suggestion.model]}"
        value = f"{suggestion.setting}{whose} = {setting(suggestion.value)}"
        if suggestion.value == LEFT_OUT and suggestion.model is not None:
            value = f"{names[suggestion.model]}: {LEFT_OUT}"
        grounds = (f"  {suggestion.evidence} evidence", EVIDENCE[suggestion.evidence])
        console.print(Text.assemble("  ", (value, "bold"), grounds))
        for text, style in ((suggestion.reason, ""), (suggestion.source, "dim")):
            console.print(Padding(Text(names.in_text(text), style), (0, 0, 0, 4), expand=False))
    for doubt in advice.doubts:
        print_labelled(console, "Caveat", names.in_text(doubt))


def _show_notes(console: Console, analysis: Analysis) -> None:
    left_out = times(len(analysis.left_out), "tensor")
    notes = [*analysis.notes, *([f"{left_out} left out"] if analysis.left_out else [])]
    notes.append(f"{show_size(analysis.bytes_read)} read in {analysis.seconds:.1f} s")
    for note in notes:
        print_labelled(console, "note", note, "dim")


# ---------------------------------------------------------------- bars


def _bars(console: Console, columns: int, names: Names, values: Sequence[float]) -> Draw:
    """A function that writes a share with a bar after it, the largest of the values the longest.

    Without room for bars, the numbers alone.
    """
    longest = max((value for value in values if math.isfinite(value)), default=0.0)
    solid = can_write(console, EIGHTHS)
    name = max(map(len, names.short.values()))
    cells = min(LONGEST_BAR, (console.width - name - 2) // max(columns, 1) - NUMBER - 4)

    def draw(value: float) -> Text:
        cell = Text(f"{share(value):>{NUMBER}}")
        if cells < SHORTEST_BAR:
            return cell
        part = value / longest if longest and math.isfinite(value) else 0.0
        return cell.append(f" {draw_bar(part, cells, solid=solid)}", "blue")

    return draw
