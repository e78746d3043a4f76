"""An analysis in a terminal, 80 columns wide or 200: verdict, tables with small bars, advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dare.analysis.judge.judgement import Advice, Evidence, Readiness, Severity, Verdict
from dare.analysis.judge.prediction import predict
from dare.analysis.page.series import TABLE_RATES, kinds_of, suggested_rates
from dare.analysis.page.words import HEADLINES, cosine, origin
from dare.analysis.results import Analysis, ModelAnalysis, Overlap
from dare.errors import printable
from dare.output.page.words import NOTHING, amount, listed, number, setting, share
from dare.output.places import short_name
from dare.output.terminal import (
    EIGHTHS,
    can_write,
    draw_bar,
    make_table,
    print_titled,
    shown,
)
from dare.tensors.sizes import show_size, times

WIDE = 116
"""Columns from which all figures of a model stand in one line."""
SHORTEST_BAR, LONGEST_BAR = 4, 20
VERDICTS = {
    Verdict.READY: "bold green",
    Verdict.WITH_CHANGES: "bold yellow",
    Verdict.NOT_READY: "bold red",
}
SEVERITIES = {Severity.STOP: "bold red", Severity.CHANGE: "bold yellow", Severity.NOTE: "bold"}
EVIDENCE = {Evidence.STRONG: "green", Evidence.FAIR: "yellow", Evidence.WEAK: "dim"}

MATRICES: dict[str, Callable[[Overlap], str]] = {
    "Cosine of every two deltas": lambda overlap: cosine(overlap.cosine),
    "Changed by both, in opposite directions (chance: 50%)": lambda overlap: share(
        overlap.conflict
    ),
}
Cells = dict[str, Callable[[ModelAnalysis], str | Text]]
"""Columns by name, each with what it says of a model."""


def show_analysis(
    console: Console, analysis: Analysis, readiness: Readiness, advice: Advice
) -> None:
    """Show what was found, what is made of it, and what to do."""
    _show_verdict(console, analysis, readiness)
    _show_findings(console, readiness)
    if not analysis.models:
        return
    _show_models(console, analysis)
    _show_kinds(console, analysis)
    if analysis.pairs:
        _show_pairs(console, analysis)
    _show_predictions(console, analysis, advice)
    _show_advice(console, advice)


def _show_verdict(console: Console, analysis: Analysis, readiness: Readiness) -> None:
    models = times(len(analysis.models), "model")
    read = f"{show_size(analysis.bytes_read)} read in {analysis.seconds:.1f} s"
    base = short_name(analysis.base)
    headline = (HEADLINES[readiness.verdict], VERDICTS[readiness.verdict])
    console.print(Text.assemble(headline, f"  {models} onto {printable(base)}"))
    grid = Table.grid(padding=(0, 2))
    for name, verdict in readiness.by_model.items():
        grid.add_row(shown(name, "bold"), Text(HEADLINES[verdict].lower(), VERDICTS[verdict]))
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    notes = [read, *analysis.notes]
    if analysis.left_out:
        notes.append(f"{times(len(analysis.left_out), 'tensor')} left out")
    for note in notes:
        console.print(Text.assemble(("  note", "dim"), f"  {printable(note)}"))
    console.print()


def _show_findings(console: Console, readiness: Readiness) -> None:
    for finding in readiness.findings:
        severity = Text(finding.severity.capitalize(), SEVERITIES[finding.severity])
        grid = Table.grid(padding=(0, 2))
        grid.add_column(min_width=6)
        grid.add_column(overflow="fold")
        whose = f"{listed(finding.models)}  " if finding.models else ""
        grid.add_row(severity, Text.assemble((printable(whose), "bold"), printable(finding.seen)))
        grid.add_row("", shown(finding.matters, "dim"))
        grid.add_row(Text("remedy", "dim"), shown(finding.remedy))
        console.print(Padding(grid, (0, 0, 1, 0), expand=False))


# ---------------------------------------------------------------- tables


def _show_models(console: Console, analysis: Analysis) -> None:
    wide = console.width >= WIDE
    bars = _bars(console, 16 if wide else 10, [m.total.relative_norm for m in analysis.models])
    name: Cells = {"model": lambda model: model.name}
    change: Cells = {
        "parameters >": lambda model: amount(model.total.elements),
        "change": lambda model: bars(model.total.relative_norm),
        "origin": origin,
    }
    magnitudes: Cells = {
        "mean |δ| >": lambda model: number(model.total.mean_magnitude),
        "99% below >": lambda model: number(model.total.quantiles.p99),
        "largest >": lambda model: number(model.total.largest),
        "unchanged >": lambda model: share(model.total.sparsity),
        "kurtosis >": lambda model: number(model.total.excess_kurtosis),
    }
    tables = {
        "Models: change is ‖δ‖ / ‖base‖": name | change,
        "Magnitudes of changes": name | magnitudes,
    }
    if wide:
        tables = {"Models: ‖δ‖ / ‖base‖ and magnitudes": name | change | magnitudes}
    for title, columns in tables.items():
        table = make_table(*columns)
        for model in analysis.models:
            cells = (cell(model) for cell in columns.values())
            table.add_row(*(shown(cell) if isinstance(cell, str) else cell for cell in cells))
        print_titled(console, title, table)


def _show_kinds(console: Console, analysis: Analysis) -> None:
    changes = [s.relative_norm for model in analysis.models for s in model.by_kind.values()]
    bars = _bars(console, _room(console, len(analysis.models), 13), changes)
    table = make_table("kind", *analysis.names)
    for kind in kinds_of(analysis):
        cells = [
            bars(model.by_kind[kind].relative_norm) if kind in model.by_kind else Text(NOTHING)
            for model in analysis.models
        ]
        table.add_row(str(kind), *cells)
    print_titled(console, "Change by kind of tensor", table)


def _show_pairs(console: Console, analysis: Analysis) -> None:
    for title, say in MATRICES.items():
        print_titled(console, title, _matrix(analysis, say))
    console.print(
        f"{share(analysis.together.cancelled)} of all changes cancel out if the models are added "
        "up as they are.\n"
    )


def _matrix(analysis: Analysis, say: Callable[[Overlap], str]) -> Table:
    overlaps = {(pair.first, pair.second): pair.total for pair in analysis.pairs}
    table = make_table("", *(f"{name} >" for name in analysis.names))
    for row in analysis.names:
        cells = []
        for column in analysis.names:
            overlap = overlaps.get((row, column)) or overlaps.get((column, row))
            cells.append(Text(say(overlap)) if overlap else Text("·", "dim"))
        table.add_row(shown(row), *cells)
    return table


def _show_predictions(console: Console, analysis: Analysis, advice: Advice) -> None:
    advised = suggested_rates(analysis, advice)
    rates = sorted({*TABLE_RATES, *advised.values()})
    errors = {
        (model.name, rate): predict(model.total, rate).output_error
        for model in analysis.models
        for rate in rates
    }
    bars = _bars(console, _room(console, len(analysis.models), 11), list(errors.values()))
    table = make_table("drop rate >", *analysis.names)
    for rate in rates:
        stars = {name: advised.get(name) == rate for name in analysis.names}
        table.add_row(f"{rate:g}", *(bars(errors[n, rate], starred=s) for n, s in stars.items()))
    starred = " (* advised)" if advised else ""
    print_titled(console, f"Expected error of a layer's outputs{starred}", table)


def _show_advice(console: Console, advice: Advice) -> None:
    table = make_table("setting", "value", "evidence", "reason")
    for suggestion in advice.suggestions:
        whose = f"\nfor {printable(suggestion.model)}" if suggestion.model is not None else ""
        table.add_row(
            Text(f"{suggestion.setting}{whose}"),
            Text(setting(suggestion.value), "bold"),
            Text(suggestion.evidence, EVIDENCE[suggestion.evidence]),
            Text.assemble(printable(suggestion.reason), (f"\n{suggestion.source}", "dim")),
        )
    if advice.suggestions:
        print_titled(console, "Advice", table)
    for doubt in advice.doubts:
        console.print(Text.assemble(("Not known", "bold"), f"  {printable(doubt)}"))


# ---------------------------------------------------------------- bars


def _bars(console: Console, cells: int, values: Sequence[float]) -> Callable[..., Text]:
    """A function that writes a share with a bar beside it, the largest of the values the longest.

    Without room for bars, the numbers alone.
    """
    longest = max((value for value in values if math.isfinite(value)), default=0.0)
    solid = can_write(console, EIGHTHS)

    def draw(value: float, *, starred: bool = False) -> Text:
        cell = Text(f"{share(value):>7}")
        if starred:
            cell = cell.append(" *")
            cell.stylize("bold green")
        cell.pad_right(10 - len(cell))
        if cells < SHORTEST_BAR:
            return cell
        part = value / longest if longest and math.isfinite(value) else 0.0
        return cell.append(draw_bar(part, cells, solid=solid), "blue")

    return draw


def _room(console: Console, columns: int, first: int) -> int:
    """How long bars may be, beside numbers, if there are so many columns of them."""
    return min(LONGEST_BAR, (console.width - first) // columns - 14)
