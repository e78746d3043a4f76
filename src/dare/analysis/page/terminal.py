"""An analysis in a terminal, 80 columns wide or 200: verdict, tables with small bars, advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dare.analysis.judge.judgement import Advice, Evidence, Readiness, Severity, Verdict
from dare.analysis.judge.prediction import predict
from dare.analysis.page.series import TABLE_RATES, kinds_of, suggested_rates
from dare.analysis.page.words import NOTHING, amount, cosine, listed, number, share, times
from dare.analysis.results import Analysis, ModelAnalysis, Origin, Overlap
from dare.output.card import short_name
from dare.tensors.sizes import show_size

WIDE = 116
"""Columns from which all figures of a model stand in one line."""
SHORTEST_BAR, LONGEST_BAR = 4, 20
EIGHTHS = " ▏▎▍▌▋▊▉"
VERDICTS = {
    Verdict.READY: ("Ready to merge", "bold green"),
    Verdict.WITH_CHANGES: ("Ready with changes", "bold yellow"),
    Verdict.NOT_READY: ("Not ready to merge", "bold red"),
}
SEVERITIES = {
    Severity.STOP: ("Stop", "bold red"),
    Severity.CHANGE: ("Change", "bold yellow"),
    Severity.NOTE: ("Note", "bold"),
}
EVIDENCE = {Evidence.STRONG: "green", Evidence.FAIR: "yellow", Evidence.WEAK: "dim"}

Cells = dict[str, Callable[[ModelAnalysis], Text]]
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
    told, style = VERDICTS[readiness.verdict]
    models = times(len(analysis.models), "model")
    read = f"{show_size(analysis.bytes_read)} read in {analysis.seconds:.1f} s"
    base = short_name(analysis.base)
    console.print(Text.assemble((told, style), f"  {models} onto {base}"))
    grid = Table.grid(padding=(0, 2))
    for name, verdict in readiness.by_model.items():
        word, style = VERDICTS[verdict]
        grid.add_row(Text(name, "bold"), Text(word.lower(), style))
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    console.print(Text.assemble(("  note", "dim"), f"  {read}"))
    for note in analysis.notes:
        console.print(Text.assemble(("  note", "dim"), f"  {note}"))
    if analysis.left_out:
        left_out = times(len(analysis.left_out), "tensor")
        console.print(Text.assemble(("  note", "dim"), f"  {left_out} left out"))
    console.print()


def _show_findings(console: Console, readiness: Readiness) -> None:
    for finding in readiness.findings:
        word, style = SEVERITIES[finding.severity]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(min_width=6)
        grid.add_column(overflow="fold")
        whose = f"{listed(finding.models)}  " if finding.models else ""
        grid.add_row(Text(word, style), Text.assemble((whose, "bold"), finding.seen))
        grid.add_row("", Text(finding.matters, "dim"))
        grid.add_row(Text("remedy", "dim"), Text(finding.remedy))
        console.print(Padding(grid, (0, 0, 1, 0), expand=False))


# ---------------------------------------------------------------- tables


def _show_models(console: Console, analysis: Analysis) -> None:
    wide = console.width >= WIDE
    bars = _bars(console, 16 if wide else 10, [m.total.relative_norm for m in analysis.models])
    first: Cells = {
        "model": lambda model: Text(model.name),
        "parameters >": lambda model: Text(amount(model.total.elements)),
        "change": lambda model: bars(model.total.relative_norm),
        "origin": _origin,
    }
    second: Cells = {
        "mean |δ| >": lambda model: Text(number(model.total.mean_magnitude)),
        "99% below >": lambda model: Text(number(model.total.quantiles.p99)),
        "largest >": lambda model: Text(number(model.total.largest)),
        "unchanged >": lambda model: Text(share(model.total.sparsity)),
        "kurtosis >": lambda model: Text(number(model.total.excess_kurtosis)),
    }
    if wide:
        _print_table(console, "Models: ‖δ‖ / ‖base‖ and magnitudes", analysis, {**first, **second})
        return
    name = {"model": first["model"]}
    _print_table(console, "Models: change is ‖δ‖ / ‖base‖", analysis, first)
    _print_table(console, "Magnitudes of changes", analysis, {**name, **second})


def _print_table(
    console: Console,
    title: str,
    analysis: Analysis,
    columns: Cells,
) -> None:
    table = _table(*columns)
    for model in analysis.models:
        table.add_row(*(cell(model) for cell in columns.values()))
    _print_titled(console, title, table)


def _origin(model: ModelAnalysis) -> Text:
    told = {Origin.LORA: "LoRA", Origin.FULL: "full fine-tune", Origin.UNKNOWN: "not known"}
    word = told.get(model.origin, str(model.origin))
    if model.likely_rank is not None:
        word += f", rank {model.likely_rank}"
    return Text(f"{word} (adapter)" if model.is_adapter else word)


def _show_kinds(console: Console, analysis: Analysis) -> None:
    kinds = kinds_of(analysis)
    found = [
        statistics.relative_norm
        for model in analysis.models
        for statistics in model.by_kind.values()
    ]
    bars = _bars(console, _room(console, len(analysis.models), 13), found)
    table = _table("kind", *analysis.names)
    for kind in kinds:
        cells = [
            bars(model.by_kind[kind].relative_norm) if kind in model.by_kind else Text(NOTHING)
            for model in analysis.models
        ]
        table.add_row(str(kind), *cells)
    _print_titled(console, "Change by kind of tensor", table)


def _show_pairs(console: Console, analysis: Analysis) -> None:
    cosines = _matrix(analysis, lambda overlap: cosine(overlap.cosine))
    conflicts = _matrix(analysis, lambda overlap: share(overlap.conflict))
    _print_titled(console, "Cosine of every two deltas", cosines)
    title = "Changed by both, in opposite directions (chance: 50%)"
    _print_titled(console, title, conflicts)
    console.print(
        f"{share(analysis.together.cancelled)} of all changes cancel out if the models are added "
        "up as they are.\n"
    )


def _matrix(analysis: Analysis, told: Callable[[Overlap], str]) -> Table:
    found = {(pair.first, pair.second): pair.total for pair in analysis.pairs}
    table = _table("", *(f"{name} >" for name in analysis.names))
    for row in analysis.names:
        cells = []
        for column in analysis.names:
            overlap = found.get((row, column)) or found.get((column, row))
            cells.append(Text(told(overlap)) if overlap else Text("·", "dim"))
        table.add_row(Text(row), *cells)
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
    table = _table("drop rate >", *analysis.names)
    for rate in rates:
        cells = [
            bars(errors[name, rate], starred=advised.get(name) == rate) for name in analysis.names
        ]
        table.add_row(f"{rate:g}", *cells)
    starred = " (* advised)" if advised else ""
    _print_titled(console, f"Expected error of a layer's outputs{starred}", table)


def _show_advice(console: Console, advice: Advice) -> None:
    table = _table("setting", "value", "evidence", "reason")
    for suggestion in advice.suggestions:
        whose = f"\nfor {suggestion.model}" if suggestion.model is not None else ""
        value = suggestion.value
        table.add_row(
            Text(f"{suggestion.setting}{whose}"),
            Text(value if isinstance(value, str) else f"{value:g}", "bold"),
            Text(suggestion.evidence, EVIDENCE[suggestion.evidence]),
            Text.assemble(suggestion.reason, (f"\n{suggestion.source}", "dim")),
        )
    if advice.suggestions:
        _print_titled(console, "Advice", table)
    for doubt in advice.doubts:
        console.print(Text.assemble(("Not known", "bold"), f"  {doubt}"))


# ---------------------------------------------------------------- bars


def _bars(console: Console, cells: int, values: Sequence[float]) -> Callable[..., Text]:
    """A function that writes a share with a bar beside it, the largest of the values the longest.

    Without room for bars, the numbers alone.
    """
    longest = max((value for value in values if math.isfinite(value)), default=0.0)
    solid = _can_write(console, EIGHTHS)

    def draw(value: float, *, starred: bool = False) -> Text:
        told = Text(f"{share(value):>7}")
        if starred:
            told = told.append(" *")
            told.stylize("bold green")
        told.pad_right(10 - len(told))
        if cells < SHORTEST_BAR:
            return told
        part = value / longest if longest and math.isfinite(value) else 0.0
        return told.append(_bar(part, cells, solid=solid), "blue")

    return draw


def _bar(part: float, cells: int, *, solid: bool) -> str:
    """A bar of at most so many cells, in eighths of a cell where they can be written.

    >>> _bar(0.5, 5, solid=True), _bar(0.5, 5, solid=False), _bar(0.0001, 5, solid=True)
    ('██▌  ', '##   ', '▏    ')
    """
    part = min(max(part, 0.0), 1.0)
    if not solid:
        return f"{'#' * round(part * cells):{cells}}"
    eighths = max(round(part * cells * 8), 1 if part else 0)
    whole, rest = divmod(eighths, 8)
    return f"{'█' * whole + (EIGHTHS[rest] if rest else ''):{cells}}"


def _room(console: Console, columns: int, first: int) -> int:
    """How long bars may be, beside numbers, if there are so many columns of them."""
    return min(LONGEST_BAR, (console.width - first) // columns - 14)


def _can_write(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _table(*columns: str) -> Table:
    """A table; a column whose name ends in > is aligned to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        right = column.endswith(" >")
        table.add_column(
            Text(column.removesuffix(" >")),
            justify="right" if right else "left",
            overflow="fold",
        )
    return table


def _print_titled(console: Console, title: str, table: Table) -> None:
    console.print(Text(title, "bold"))
    console.print(table)
