"""What people see: plans, reports, stages. Plain text where nobody looks at a terminal."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dare.cli.flags import toml_word
from dare.errors import Concern, Notice, Strength, printable
from dare.output.terminal import SafeConsole, make_table, print_titled, shown
from dare.planning.data import Fate
from dare.planning.plan import Plan
from dare.stages import ALIASES, STAGES, Stage
from dare.tensors.json_values import printable_json
from dare.tensors.sizes import show_size, times

if TYPE_CHECKING:
    from dare.analysis.headers import HeaderComparison
    from dare.deltas.reports import DeltaReport, Restoration
    from dare.output.report import ModelReport, Report
    from dare.output.slices import SliceReport
    from dare.output.verification import Verification
    from dare.run.rates import Estimate

PIPE_WIDTH = 160
"""Columns where the output is not a terminal and has no width of its own."""
ROOM_FOR_NAMES = 100
"""Columns from which a report names the tensors."""


class _Console(SafeConsole):
    """A console that falls silent when nobody reads on, so that the work itself is finished."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def console(*, json: bool = False, quiet: bool = False) -> Console:
    """Where text for people goes: stdout, or stderr if JSON goes there."""
    output = _Console(stderr=json, quiet=quiet, highlight=False, emoji=False, markup=False)
    if not output.is_terminal:
        output.width = PIPE_WIDTH
    return output


def json(document: str) -> None:
    """A document on stdout, the same values in letters that leave a terminal alone."""
    print(printable_json(document))


def plan_summary(
    console: Console, plan: Plan, estimate: Estimate | None, *, detailed: bool = False
) -> None:
    """What will be merged, how and at what cost."""
    cost, elements = plan.cost, sum(tensor.elements for tensor in plan.tensors)
    fates = Counter(tensor.fate for tensor in plan.tensors)
    fates[Fate.LEFT_OUT] = len(plan.left_out)
    before = ", ".join(sorted({tensor.base.dtype.name for tensor in plan.tensors}))
    after = ", ".join(sorted({tensor.dtype.name for tensor in plan.tensors}))
    rows = {
        "method": _method(plan),
        "base": str(plan.recipe.base),
        "tensors": ", ".join(f"{fates[fate]} {fate.value}" for fate in Fate if fates[fate]),
        "weights": f"{elements:,} elements, {before}"
        + (f" stored as {after}" if after != before else ""),
        "reads": f"{show_size(cost.bytes_read)} in {times(cost.passes, 'pass', 'passes')}",
        "writes": _written(plan),
        "with": times(cost.threads, "thread"),
        "memory": cost.memory_line,
    }
    if estimate is not None:
        rows["takes"] = str(estimate)
    console.print(_facts("Plan", rows))
    console.print(_models_table(plan))
    for note in plan.notes:
        console.print(Text.assemble(("Note", "bold"), f"  {printable(note)}"))
    if detailed and plan.left_out:
        console.print(_facts("Left out", {"": ", ".join(plan.left_out)}))
    if detailed:
        warnings(console, plan.warnings)


def _method(plan: Plan) -> str:
    combine, settings = plan.recipe.chain[-1]
    chain = "+".join(stage.name for stage in plan.stages)
    combining = {f"{combine.name} {name}": value for name, value in settings.items()}
    return _listed({chain: "", **combining, "scale": plan.recipe.scale})


def _listed(settings: Mapping[str, Any]) -> str:
    """Settings in a line, without those that are not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    return ", ".join(f"{name} {toml_word(value)}".strip() for name, value in given.items())


def _written(plan: Plan) -> str:
    if plan.layout is None:
        return f"{show_size(plan.cost.bytes_written)} (no output is named yet)"
    files = times(len(plan.layout.files), "file")
    place = f"{show_size(plan.cost.bytes_written)} to {plan.layout.target} ({files})"
    return f"{place}, which exists already" if plan.layout.target.exists() else place


def _models_table(plan: Plan) -> Table:
    recipe = plan.recipe
    table = make_table("model", "file", "weight >", "seed >", "settings")
    for index, (name, entry) in enumerate(zip(plan.model_names, recipe.models, strict=True)):
        settings = {
            parameter: entry.settings.get(parameter, value)
            for _, values in recipe.chain[:-1]
            for parameter, value in values.items()
        }
        weight, seed = _weight(recipe.weights()[index]), str(recipe.seeds()[index])
        table.add_row(shown(name), shown(str(entry.file)), weight, seed, _listed(settings))
    return table


def _weight(weight: float | list[float]) -> str:
    if isinstance(weight, list):
        return f"[{', '.join(map(_weight, weight))}]"
    return f"{weight:.4g}"


def headers(console: Console, found: HeaderComparison) -> None:
    """What the headers of a base and its models say, and what does not fit."""
    table = make_table("model", "file", "tensors >", "parameters >", "types", "fit the base >")
    for model in (found.base, *found.models):
        fitting = "" if model is found.base else f"{model.fitting:,}"
        counts = f"{model.tensors:,}", f"{model.parameters:,}", ", ".join(model.types), fitting
        table.add_row(shown(model.name), shown(model.file), *counts)
    print_titled(console, "Headers", table)
    for model in found.models:
        for finding in model.findings:
            console.print(Text.assemble((model.name, "bold red"), f"  {printable(finding)}"))
        for note in model.notes:
            console.print(Text.assemble(("Note", "bold"), f"  {printable(note)}"))
    console.print("All models fit the base" if found.fits else "Not all models fit the base")


def report(console: Console, report: Report) -> None:
    """What was done, and what to do next."""
    speed = show_size(int(report.bytes_read / max(report.seconds, 1e-9)))
    title = f"Merged {times(len(report.tensors), 'tensor')} in {report.seconds:.1f} s"
    pace = f"{show_size(report.bytes_read)} read, {speed}/s"
    if report.resumed_chunks:
        pace += f", {times(report.resumed_chunks, 'piece')} taken over from the interrupted run"
    console.print(Text.assemble((title, "bold green"), f"  {pace}"))
    columns = ["model", "dropped >", "asked >", "largest |δ| >", "above threshold >", "in"]
    columns_shown = len(columns) if console.width >= ROOM_FOR_NAMES else -1
    table = make_table(*columns[:columns_shown])
    for model in report.models:
        table.add_row(*map(printable, _model_row(model)[:columns_shown]))
    console.print(table)
    warnings(console, report.warnings)
    if report.output is not None:
        output = shlex.quote(str(report.output))
        next_steps(
            console,
            f"{report.output} is written ({show_size(report.bytes_written)})",
            {"verify": f"dare verify {output}", "repeat": f"dare {output} --output OTHER"},
        )


def slice_report(console: Console, done: SliceReport) -> None:
    """What a slice did, and who is not done yet; the whole report, if it was the last."""
    title = f"Slice {done.slice} is done in {done.seconds:.1f} s"
    pace = f"{times(done.chunks, 'piece')}, {show_size(done.bytes_read)} read"
    if done.resumed_chunks:
        pace += f", {times(done.resumed_chunks, 'piece')} taken over from the interrupted run"
    console.print(Text.assemble((title, "bold green"), f"  {pace}"))
    if done.report is not None:
        report(console, done.report)
    elif done.unfinished:
        numbers = ", ".join(map(str, done.unfinished[:8]))
        more = len(done.unfinished) - 8
        others = f"{numbers} and {more} more" if more > 0 else numbers
        console.print(shown(f"Slices that are not done: {others}. The last one publishes."))
    else:
        console.print(shown("Another slice has published the output."))


def compressed(console: Console, report: DeltaReport) -> None:
    """What a delta file holds, and what to do with it."""
    size = f"{show_size(report.bytes_written)}, {report.ratio:.1f} times smaller than the model"
    title = f"Compressed in {report.seconds:.1f} s"
    console.print(Text.assemble((title, "bold green"), f"  {report.pace}"))
    for line in (f"{size} ({report.bits_per_parameter:.3g} bits for each parameter)", report.held):
        console.print(shown(f"  {line}"))
    for note in report.notes:
        console.print(shown(f"  note: {note}"))
    warnings(console, report.warnings)
    output = shlex.quote(str(report.output))
    next_steps(
        console,
        f"{report.output} is written",
        {"apply": f"dare apply BASE {output} -o MODEL", "verify": f"dare verify {output}"},
    )


def restored(console: Console, report: Restoration) -> None:
    """That a model is there again."""
    title = f"Restored {show_size(report.bytes_written)} in {report.seconds:.1f} s"
    console.print(Text.assemble((title, "bold green"), "  bit for bit"))
    output = shlex.quote(str(report.output))
    next_steps(console, f"{report.output} is written", {"verify": f"dare verify {output}"})


def _model_row(model: ModelReport) -> Sequence[str]:
    rates = (model.drop_rate_realised, model.drop_rate_asked)
    share = model.over_threshold / model.elements if model.elements else 0.0
    return (
        model.name,
        *("–" if rate is None else f"{rate:.3%}" for rate in rates),
        f"{model.largest_delta:.3g}",
        f"{model.over_threshold:,} ({share:.2%})",
        model.largest_delta_in or "–",
    )


STYLES = {
    Strength.NOTE: "bold",
    Strength.WARNING: "bold yellow",
    Strength.STRONG: "bold red",
}


def warnings(console: Console, notices: Iterable[Notice]) -> None:
    """Warnings, those of one kind together."""
    kinds: dict[tuple[Strength, Concern], list[Notice]] = {}
    for notice in notices:
        kinds.setdefault((notice.strength, notice.about), []).append(notice)
    for (strength, about), alike in kinds.items():
        console.print(Text.assemble((strength.capitalize(), STYLES[strength]), f"  {about}"))
        for notice in alike:
            console.print(Padding(shown(notice.text), (0, 0, 0, 4), expand=False))
    if kinds:
        console.print()


def verification(console: Console, result: Verification) -> None:
    """Whether an output is what was written."""
    path = printable(str(result.path))
    if result.ok:
        checked = f"{times(result.tensors, 'tensor')}, {show_size(result.bytes_checked)}"
        console.print(Text.assemble(("Intact", "bold green"), f"  {checked}, {path}"))
    else:
        verdict = "Not what was written" if result.tensors else "Cannot be verified"
        console.print(Text.assemble((verdict, "bold red"), f"  {path}"))
    for problem in (*result.problems, *result.changed):
        console.print(Padding(shown(problem), (0, 0, 0, 4), expand=False))
    if result.sha256 is not None:
        console.print(f"  SHA-256 of the weights  {result.sha256}", soft_wrap=True, highlight=False)


def next_steps(console: Console, done: str, steps: Mapping[str, str]) -> None:
    """Where the result is, and commands to go on with (unwrapped: they are copied)."""
    console.print(shown(done, "bold"))
    for word, command in steps.items():
        line = Text.assemble((f"  {word:8}", "dim"), printable(command))
        console.print(line, soft_wrap=True)


def stages(console: Console) -> None:
    """All stages and aliases."""
    for kind, title in (
        ("delta", "Delta stages change each model's delta; any number, in the order given."),
        ("combine", "Combine stages make one delta of all; exactly one, at the end."),
    ):
        table = make_table("stage", "does", "parameters", "paper")
        for stage in STAGES.values():
            if stage.kind == kind:
                settings = [f"{p.name} = {toml_word(p.default)}" for p in stage.parameters.values()]
                table.add_row(stage.name, stage.summary, "\n".join(settings), stage.paper)
        print_titled(console, title, table)
    table = make_table("alias", "is")
    for alias, chain in ALIASES.items():
        table.add_row(alias, chain)
    print_titled(console, "Other names", table)
    console.print(Text("dare methods STAGE explains one; chain them as in dare+ties."))


def stage(console: Console, stage: Stage) -> None:
    """One stage: meaning, formula, parameters."""
    console.print(Text.assemble((stage.name, "bold"), f"  ({stage.kind} stage)"))
    for paragraph in stage.documentation.split("\n\n"):
        text = Text(" ".join(paragraph.split()))
        console.print(Padding(text, (1, 0, 0, 2), expand=False))
    if not stage.parameters:
        console.print()
    else:  # whose table begins with an empty line
        table = make_table("parameter", "default", "range", "meaning")
        for p in stage.parameters.values():
            table.add_row(p.name, toml_word(p.default), p.range, p.description)
        console.print(table)
    if stage.paper:
        console.print(Padding(Text(f"Paper: {stage.paper}"), (0, 0, 1, 2), expand=False))


def _facts(title: str, rows: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for number, (name, value) in enumerate(rows.items()):
        table.add_row("" if number else title, name, shown(value))
    return table
