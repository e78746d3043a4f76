"""What people see: plans, reports, stages. Plain text where nobody looks at a terminal."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dare.cli.flags import toml_word
from dare.errors import Concern, Notice, Strength, printable
from dare.output.targets import work_folder
from dare.output.terminal import SafeConsole, cut_middle, make_table, print_titled, shorten, shown
from dare.planning.data import Fate
from dare.planning.plan import Plan
from dare.stages import ALIASES, IMPLIED, STAGES, Stage
from dare.tensors.json_values import printable_json
from dare.tensors.sizes import show_size, times

if TYPE_CHECKING:
    from dare.deltas.reports import DeltaReport, Restoration
    from dare.output.report import ModelReport, Report
    from dare.output.slices import SliceReport
    from dare.output.verification import Verification
    from dare.run.rates import Estimate

PIPE_WIDTH = 160
"""Columns where the output is not a terminal and has no width."""
WORTH_WAITING_FOR = 5.0
"""Seconds from which a merge says beforehand how long it takes."""
ROOM_FOR_A_TENSOR = 20
"""Columns that a report must have left to name tensors."""


class _Console(SafeConsole):
    """A console that falls silent when nobody reads on, so that the work itself is finished."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def console(*, json: bool = False, quiet: bool = False) -> Console:
    """Where text for people goes: stdout, or stderr if JSON goes there."""
    output = _Console(stderr=json, quiet=quiet, highlight=False, emoji=False, markup=False)
    if not output.is_terminal and "COLUMNS" not in os.environ:
        output.width = PIPE_WIDTH
    return output


def json(document: str) -> None:
    """A document on stdout, the same values in letters that leave a terminal alone."""
    print(printable_json(document))


def plan_summary(
    console: Console, plan: Plan, estimate: Estimate, *, detailed: bool = False
) -> None:
    """What will be merged, how and at what cost; `detailed` with all settings and resources."""
    cost, elements = plan.cost, sum(tensor.elements for tensor in plan.tensors)
    fates = Counter(tensor.fate for tensor in plan.tensors)
    fates[Fate.LEFT_OUT] = len(plan.left_out)
    before = ", ".join(sorted({tensor.base.dtype.name for tensor in plan.tensors}))
    after = ", ".join(sorted({tensor.dtype.name for tensor in plan.tensors}))
    tensors = ", ".join(f"{fates[fate]} {fate.value}" for fate in Fate if fates[fate])
    stored = f" stored as {after}" if after != before else ""
    shared, different = _model_settings(plan, detailed=detailed)
    rows = {
        "method": _method(plan, shared, detailed=detailed),
        "base": str(plan.recipe.base),
        "tensors": f"{tensors}; {times(elements, 'element')}, {before}{stored}",
        "writes": _written(plan),
    }
    if detailed:
        rows["reads"] = f"{show_size(cost.bytes_read)} in {times(cost.passes, 'pass', 'passes')}"
        rows["with"] = times(cost.threads, "thread")
        rows["memory"] = cost.memory_line
    if detailed or estimate.high >= WORTH_WAITING_FOR:
        rows["takes"] = str(estimate)
    console.print(_facts("Plan", rows))
    console.print(_models_table(plan, console.width, different))
    for note in plan.notes:
        console.print(Text.assemble(("Note", "bold"), f"  {printable(note)}"))
    if detailed and plan.left_out:
        console.print(_facts("Left out", {"": ", ".join(plan.left_out)}))
    if detailed:
        warnings(console, plan.warnings)


def _method(plan: Plan, shared: Mapping[str, Any], *, detailed: bool) -> str:
    """The chain, with the settings that all models share, and of the others what is not usual."""
    combine, settings = plan.recipe.chain[-1]
    chain = "+".join(stage.name for stage in plan.stages)
    defaults = {name: parameter.default for name, parameter in combine.parameters.items()}
    given = {k: v for k, v in settings.items() if detailed or v != defaults[k]}
    combining = {
        f"{combine.name} {name}": value
        for name, value in given.items()
        if (combine.name, name) not in IMPLIED  # the stage that it makes has its own
    }
    scale = {"scale": plan.recipe.scale} if detailed or plan.recipe.scale != 1 else {}
    rates = {"embedding_drop_rate": plan.recipe.embedding_drop_rate}
    return _listed({chain: "", **shared, **rates, **combining, **scale})


def _listed(settings: Mapping[str, Any]) -> str:
    """Settings in a line, without those that are not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    return ", ".join(f"{name} {toml_word(value)}".strip() for name, value in given.items())


def _written(plan: Plan) -> str:
    if plan.layout is None:
        return f"{show_size(plan.cost.bytes_written)} (no output is named yet)"
    files = times(len(plan.layout.files), "file")
    target = plan.layout.target
    place = f"{show_size(plan.cost.bytes_written)} to {target} ({files})"
    if target.exists():
        return f"{place}, which exists already"
    if plan.layout.is_sent:
        room = show_size(plan.layout.scratch_bytes)
        return f"{place}, file by file by way of {work_folder(plan.layout)}, which takes {room}"
    if target.parent.exists():
        return place
    return f"{place}; the folder {target.parent} is made for it"


def _models_table(plan: Plan, width: int, different: Sequence[Mapping[str, Any]]) -> Table:
    """Each model with its file, weight and seed, and the settings that not all share."""
    recipe = plan.recipe
    names = shorten(plan.model_names, max(12, width // 4))
    files = shorten([str(entry.file) for entry in recipe.models], max(12, width // 4))
    table = make_table(
        "model", "file", "weight >", "seed >", *(["settings"] if any(different) else [])
    )
    figures = zip(recipe.weights(), recipe.seeds(), strict=True)
    for name, entry, (weight, seed), settings in zip(
        plan.model_names, recipe.models, figures, different, strict=True
    ):
        cells = names[name], files[str(entry.file)], _weight(weight), str(seed)
        table.add_row(*cells, *([_listed(settings)] if any(different) else []))
    return table


def _model_settings(
    plan: Plan, *, detailed: bool
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The settings of delta stages: those that all models share, and each model's others."""
    every = [
        {
            parameter: value
            for stage, values in plan.recipe.chain[:-1]
            for parameter, default in values.items()
            if (value := entry.settings.get(parameter, default)) is not None
            and (detailed or _tells(stage, parameter, value))
        }
        for entry in plan.recipe.models
    ]
    shared = {k: v for k, v in every[0].items() if all(k in s and s[k] == v for s in every)}
    return shared, [{k: v for k, v in s.items() if k not in shared} for s in every]


def _tells(stage: Stage, parameter: str, value: object) -> bool:
    """Whether a delta stage's parameter is worth a word: numbers are, and what is not usual."""
    default = stage.parameters[parameter].default
    return value != default or (isinstance(default, float) and not isinstance(default, bool))


def _weight(weight: float | list[float]) -> str:
    if isinstance(weight, list):
        return f"[{', '.join(map(_weight, weight))}]"
    return f"{weight:.4g}"


def report(console: Console, report: Report) -> None:
    """What was done, and what to do next."""
    speed = show_size(int(report.bytes_read / max(report.seconds, 1e-9)))
    title = f"Merged {times(len(report.tensors), 'tensor')} in {report.seconds:.1f} s"
    pace = f"{show_size(report.bytes_read)} read, {speed}/s"
    _done(console, title, f"{pace}{_taken_over(report.resumed_chunks)}")
    console.print(_report_table(report, console.width))
    warnings(console, report.warnings)
    if report.output is not None:
        output = shlex.quote(str(report.output))
        next_steps(
            console,
            f"{report.output} is written ({show_size(report.bytes_written)})",
            {"verify": f"dare verify {output}", "repeat": f"dare {output} --output OTHER"},
        )


def _done(console: Console, title: str, pace: str) -> None:
    console.print(Text.assemble((title, "bold green"), f"  {pace}"))


def _taken_over(chunks: int) -> str:
    return f", {times(chunks, 'piece')} taken over from the interrupted run" if chunks else ""


def _report_table(report: Report, width: int) -> Table:
    """What became of each model; where there is room, the tensor of its largest change too."""
    names = shorten([model.name for model in report.models], max(12, width // 4))
    rows = [[names[model.name], *map(printable, _model_row(model))] for model in report.models]
    columns = ["model", "dropped", "asked", "largest |δ|", f"above {report.delta_threshold:g}"]
    cells = zip(columns, *(row[: len(columns)] for row in rows), strict=True)
    room = width - sum(max(map(cell_len, column)) + 3 for column in cells) - 2
    table = make_table("model", *(f"{column} >" for column in columns[1:]))
    if room >= ROOM_FOR_A_TENSOR:
        table.add_column("largest in")
    for row in rows:
        *figures, tensor = row
        table.add_row(*figures, *([cut_middle(tensor, room)] if len(table.columns) > 5 else []))
    return table


def slice_report(console: Console, done: SliceReport) -> None:
    """What a slice did, and who is not done yet; the whole report, if it was the last."""
    title = f"Slice {done.slice} is done in {done.seconds:.1f} s"
    pace = f"{times(done.chunks, 'piece')}, {show_size(done.bytes_read)} read"
    _done(console, title, f"{pace}{_taken_over(done.resumed_chunks)}")
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
    _done(console, title, report.pace)
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
    _done(console, title, "bit for bit")
    output = shlex.quote(str(report.output))
    next_steps(console, f"{report.output} is written", {"verify": f"dare verify {output}"})


def _model_row(model: ModelReport) -> Sequence[str]:
    rates = (model.drop_rate_realised, model.drop_rate_asked)
    share = model.over_threshold / model.elements if model.elements else 0.0
    return (
        *("–" if rate is None else f"{rate:.3%}" for rate in rates),
        f"{model.largest_delta:.3g}",
        f"{model.over_threshold:,} ({share:.2%})",
        model.largest_delta_in or "–",
    )


STYLES = {Strength.NOTE: "bold", Strength.WARNING: "bold yellow", Strength.STRONG: "bold red"}


def warnings(console: Console, notices: Iterable[Notice]) -> None:
    """Warnings, those of one kind together."""
    kinds: dict[tuple[Strength, Concern], list[Notice]] = {}
    for notice in notices:
        kinds.setdefault((notice.strength, notice.about), []).append(notice)
    for (strength, about), alike in kinds.items():
        console.print(Text.assemble((strength.capitalize(), STYLES[strength]), f"  {about}"))
        for line in _said_once(notice.text for notice in alike):
            console.print(Padding(shown(line), (0, 0, 0, 4), expand=False))
    if kinds:
        console.print()


def _said_once(texts: Iterable[str]) -> list[str]:
    """Texts about several models, with what they have in common once, at the end.

    >>> _said_once(["math: is large; lower drop_rate", "code: is larger; lower drop_rate"])
    ['math: is large', 'code: is larger', 'Lower drop_rate']
    >>> _said_once([f"{name}: is large; lower drop_rate" for name in "abcde"])[-2:]
    ['and 2 more: d, e', 'Lower drop_rate']
    """
    by_end: dict[str, list[str]] = {}
    for text in texts:
        seen, _, end = text.partition("; ")
        by_end.setdefault(end, []).append(seen)
    lines = []
    for end, every in by_end.items():
        if not end or len(every) == 1:
            lines += [f"{seen}; {end}" if end else seen for seen in every]
            continue
        lines += every[:MOST_ALIKE]
        if more := [seen.partition(":")[0] for seen in every[MOST_ALIKE:]]:
            lines.append(f"and {len(more)} more: {', '.join(more)}")
        lines.append(end[0].upper() + end[1:])
    return lines


def verification(console: Console, result: Verification) -> None:
    """Whether an output is what was written."""
    path = printable(str(result.path))
    if result.ok:
        checked = f"{times(result.tensors, 'tensor')}, {show_size(result.bytes_checked)}"
        _done(console, "Intact", f"{checked}, {path}")
    else:
        verdict = "Not what was written" if result.tensors else "Cannot be verified"
        console.print(Text.assemble((verdict, "bold red"), f"  {path}"))
    for problem in (*result.problems, *result.changed):
        console.print(Padding(shown(problem), (0, 0, 0, 4), expand=False))
    if result.sha256 is not None:
        console.print(f"  SHA-256 of the weights  {result.sha256}", soft_wrap=True, highlight=False)


MOST_ALIKE = 3
"""Warnings of one kind that are told in full; the report's table has all models."""
STEP = 10
"""Columns before a command."""
WORD = re.compile(r"""(?:> )?(?:'[^']*'|"[^"]*"|\S)+""")
"""Of a command, as `shlex.quote` writes it."""


def next_steps(console: Console, done: str, steps: Mapping[str, str]) -> None:
    """Where the result is, and the commands that come next."""
    console.print(shown(done, "bold"), soft_wrap=True)
    for word, command in steps.items():
        for place, line in enumerate(fold_command(command, console.width - STEP)):
            label = "" if place else word
            console.print(Text.assemble((f"  {label:8}", "dim"), line), soft_wrap=True)


def fold_command(command: str, width: int) -> list[str]:
    r"""A command in lines that a shell takes as one when they are copied together.

    >>> fold_command("dare analyze base.safetensors 'my model' code --json", 32)
    ['dare analyze base.safetensors \\', "  'my model' code --json"]
    """
    lines = [""]
    for word in WORD.findall(printable(command)):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1].strip() and cell_len(longer) > width - 2:
            lines.append(f"  {word}")
        else:
            lines[-1] = longer
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


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
