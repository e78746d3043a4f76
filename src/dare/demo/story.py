"""What the demonstration does, in order: models, scores, drop rates, what they write."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from dare.demo.llama import Floats, Llama, read_weights
from dare.demo.merges import (
    BASE,
    CONFIG,
    MODELS,
    TUNED,
    Curve,
    DemoResult,
    Figure,
    Measurement,
    Merge,
    Row,
    Writing,
    measure_all,
    scale_for,
    write_once,
)
from dare.demo.tasks import TASKS, Example, add, say, sort
from dare.documents.terminal import EIGHTHS, can_write, draw_bar, make_table
from dare.errors import OutputError
from dare.kernels.linalg import one_blas_thread
from dare.output.targets import check_free

FIRST_SEED = 42

PLAIN = ("linear", "sum", "ties", "trim+ties")
"""What is tried without DARE; the last is TIES as published, which trims to the largest fifth."""
DROPPED = ("sum", "ties")
"""What is tried with it."""
FAVOURITE = Merge("sum", 0.5, scale_for("sum", 0.5), FIRST_SEED)
"""The merge that is shown at work."""

SHOWN = (add(64, 19)[1], sort("garden")[1], say(128)[1])
"""Held-out prompts whose answers are easily checked by eye."""


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    prompts: int
    """For each task."""
    seeds: tuple[int, ...]
    english_bytes: int
    drop_rates: tuple[float, ...]
    table_rates: tuple[float, ...] = (0.5, 0.9)


PICTURE = "demo.png"

FULL = Extent(
    prompts=100,
    seeds=(FIRST_SEED, 1042, 2042),  # no neighbours: model i is merged with seed + i
    english_bytes=4096,
    drop_rates=(0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
)
QUICK = Extent(prompts=25, seeds=(FIRST_SEED,), english_bytes=1024, drop_rates=(0.5, 0.9))


def run_demo(console: Console, *, output: Path | None = None, quick: bool = False) -> DemoResult:
    """Merge the three fine-tunes in several ways, show what the merges can do, return the numbers.

    With `output`, the merged models and a picture are left in that folder. `quick` takes few
    prompts, rates and seeds.
    """
    extent = QUICK if quick else FULL
    began = time.perf_counter()
    if output is not None:  # made before a minute's work, not after it
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{output}: cannot be created: {error.strerror or error}") from None
        check_free(output / PICTURE, "demonstration", overwrite=True)
    base = read_weights(BASE)
    parameters = sum(tensor.size for tensor in base.values())
    changes = {name: _mean_change(base, read_weights(path)) for name, path in TUNED.items()}
    _introduce(console, parameters, changes)

    writings = _writings(console)  # first: its merge compiles what all merges use
    console.print(writings_table(writings, SHOWN, console))
    console.print()
    rows = _measure(console, _experiments(extent))
    rates = (0.0, *extent.drop_rates)
    curves = [_alone_curve(rows, rates)]
    for combine in DROPPED:
        points = tuple((rate, rows["merge", combine, rate].mean) for rate in rates)
        curves.append(Curve(f"dare+{combine} of all three", points))
    table_rates = (0.0, *extent.table_rates)
    shown = tuple(
        row for (kind, _, rate), row in rows.items() if kind != "alone" and rate in table_rates
    )
    prompts = {task.name: len(task.examples("test", extent.prompts)) for task in TASKS}
    console.print(_conclusion(rows), highlight=False)
    console.print()
    console.print(scores_table(shown))
    counts = ", ".join(f"{count} {task}" for task, count in prompts.items())
    seeds = f"± is over {len(extent.seeds)} seeds. " if len(extent.seeds) > 1 else ""
    remarks = f"{seeds}Prompts: {counts}. Scales were chosen on other prompts."
    console.print(remarks, style="dim", highlight=False)
    console.print()
    console.print(curves_chart(curves, console))
    console.print()
    drawn = None if output is None else _keep(console, output, extent, curves)
    console.print(_what_next(), soft_wrap=True, highlight=False, markup=False)
    return DemoResult(
        parameters=parameters,
        prompts=prompts,
        seeds=extent.seeds,
        mean_change=changes,
        rows=shown,
        curves=tuple(curves),
        writings=writings,
        picture=None if drawn is None else str(drawn),
        output=None if output is None else str(output),
        seconds=time.perf_counter() - began,
    )


# ---------------------------------------------------------------- what is measured

Key = tuple[str, str, float]
"""A model, a merge, or DARE on a model alone; of which name or stages; at which drop rate."""


def _experiments(extent: Extent) -> dict[Key, tuple[Row, list[Measurement]]]:
    """All that is measured, in the order in which it is shown: a row, and a job for each seed."""
    everything = partial(Measurement, prompts=extent.prompts, english_bytes=extent.english_bytes)
    planned: dict[Key, tuple[Row, list[Measurement]]] = {}
    for name in ("base", *TUNED):
        planned["model", name, 0.0] = Row(name, ()), [everything(MODELS / name)]
    dropping = [(combine, rate) for combine in DROPPED for rate in extent.drop_rates]
    for combine, rate in [*((combine, 0.0) for combine in PLAIN), *dropping]:
        seeds = extent.seeds if rate else (FIRST_SEED,)  # nothing else is random
        merges = [Merge(combine, rate, scale_for(combine, rate), seed) for seed in seeds]
        row = Row(merges[0].label, (), merges[0].method, rate, merges[0].scale)
        planned["merge", combine, rate] = row, [everything(merge) for merge in merges]
    for name, model in TUNED.items():
        for rate in extent.drop_rates:
            alone = [Merge("sum", rate, 1.0, seed, (model,)) for seed in extent.seeds]
            jobs = [Measurement(merge, extent.prompts, 0, (name,)) for merge in alone]
            planned["alone", name, rate] = Row(name, (), drop_rate=rate), jobs
    return planned


def _measure(
    console: Console, experiments: Mapping[Key, tuple[Row, list[Measurement]]]
) -> dict[Key, Row]:
    jobs = [job for _, repeated in experiments.values() for job in repeated]
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("scoring", total=len(jobs))
        scores = dict(zip(jobs, measure_all(jobs, lambda: bar.advance(task)), strict=True))
    return {
        key: replace(row, scores=tuple(scores[job] for job in repeated))
        for key, (row, repeated) in experiments.items()
    }


def _alone_curve(rows: Mapping[Key, Row], rates: Sequence[float]) -> Curve:
    """The mean over fine-tunes of what each can do of its own task, over drop rates."""
    points = []
    for rate in rates:
        kind = "alone" if rate else "model"
        by_model = [rows[kind, name, rate].scores for name in TUNED]
        by_seed = [
            fmean(score.correct[name] for name, score in zip(TUNED, scores, strict=True))
            for scores in zip(*by_model, strict=True)
        ]
        points.append((rate, Figure.of(by_seed)))
    return Curve("each alone, on its task", tuple(points))


def _writings(console: Console) -> tuple[Writing, ...]:
    """Let the models, and a merge of all three, go on after the same prompts."""
    prompts = [example.prompt for example in SHOWN]
    files = {name: MODELS / name for name in ("base", *TUNED)}
    with tempfile.TemporaryDirectory() as folder, console.status("merging"), one_blas_thread():
        files[FAVOURITE.label] = FAVOURITE.carry_out(Path(folder) / "merged.safetensors")
        return tuple(
            Writing(name, tuple(Llama(file, CONFIG).write(prompts))) for name, file in files.items()
        )


def _mean_change(base: Mapping[str, Floats], tuned: Mapping[str, Floats]) -> float:
    """Mean |delta| over the tensors that changed at all."""
    deltas = [np.abs(tuned[name] - tensor) for name, tensor in base.items()]
    changed = [delta.ravel() for delta in deltas if delta.any()]
    return float(np.concatenate(changed).mean())


# ---------------------------------------------------------------- what is said and kept


def _introduce(console: Console, parameters: int, changes: Mapping[str, float]) -> None:
    console.print(
        f"A base model of {parameters:,} parameters that reads bytes and was trained on the King "
        f"James Bible, and three fine-tunes of it, each of which learned one task:",
        highlight=False,
    )
    for task, example in zip(TASKS, SHOWN, strict=True):
        console.print(
            f"  {task.name:5} {task.title:17} {example.prompt + example.answer:37} "
            f"mean |δ| {changes[task.name]:.4f}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print()


def _conclusion(rows: Mapping[Key, Row]) -> str:
    """What the figures say, in words."""
    rate = FAVOURITE.drop_rate
    alone = fmean(rows["model", name, 0.0].correct(name).mean for name in TUNED)
    mean = {
        (combine, p): f"{row.mean.mean:.0f}%"
        for (kind, combine, p), row in rows.items()
        if kind == "merge"
    }
    return (
        f"One model now does three tasks: {mean['sum', rate]} right with {rate:.0%} of every "
        f"change dropped; three separate models have {alone:.0f}%. Here a plain sum is as good "
        f"({mean['sum', 0.0]}). DARE rescues TIES: {mean['ties', 0.0]} without it, "
        f"{mean['ties', rate]} with it; trimming does so too ({mean['trim+ties', 0.0]})."
    )


def _keep(console: Console, output: Path, extent: Extent, curves: Sequence[Curve]) -> Path | None:
    """Leave merged models and the picture in a folder; return the picture's file."""
    for combine in DROPPED:
        for rate in (0.0, *extent.table_rates):
            merge = Merge(combine, rate, scale_for(combine, rate), FIRST_SEED)
            folder = output / (merge.method + (f"-{rate:g}" if rate else ""))
            folder.mkdir(parents=True, exist_ok=True)
            merge.carry_out(folder / "model.safetensors")
            for file in BASE.glob("*.json"):
                write_once(folder / file.name, file.read_bytes())
    console.print(f"merged models: {output}", soft_wrap=True, highlight=False)
    if find_spec("matplotlib") is None:
        how = "for the picture, install matplotlib: pip install 'dare-merge[demo]'"
        console.print(how, markup=False, soft_wrap=True)
        return None
    file = output / PICTURE
    seeds = f"{len(extent.seeds)} seeds" if len(extent.seeds) > 1 else "one seed"
    draw_curves(curves, f"Three tasks, mean of {extent.prompts} prompts each, {seeds}", file)
    console.print(f"picture: {file}", soft_wrap=True, highlight=False)
    return file


def _what_next() -> str:
    base, *tuned = (shlex.quote(str(path)) for path in (BASE, *TUNED.values()))
    return (
        "Next, repeat a merge by hand:\n\n"
        f"  dare merge {base} {' '.join(tuned)} \\\n"
        f"       --method {FAVOURITE.method} --drop-rate {FAVOURITE.drop_rate:g} "
        f"--scale {FAVOURITE.scale:g} --output merged.safetensors"
    )


# ---------------------------------------------------------------- how it looks

GOOD, POOR = 80.0, 20.0
"""Percentages from which, and up to which, a cell is set off."""
LONGEST_BAR = 40

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart."""
MARKS = ("o", "s", "^", "D")


def scores_table(rows: Sequence[Row]) -> RenderableType:
    """One row for each model and merge, one column for each task."""
    names = (*(task.name for task in TASKS), "mean", "English")
    title = "Right answers to held-out prompts, in %; English in bits per byte"
    table = _table(title, "", "scale >", *(f"{name} >" for name in names))
    for _, alike in groupby(rows, lambda row: (row.method is None, row.drop_rate > 0)):
        table.add_section()
        for row in alike:
            table.add_row(
                row.name,
                "" if row.scale is None else f"{row.scale:g}",
                *(_percentage(row.correct(task.name)) for task in TASKS),
                Text.assemble((_figure(row.mean), "bold" if row.method else "")),
                f"{row.bits_per_byte.mean:.3f}",
            )
    return table


def curves_chart(curves: Sequence[Curve], console: Console) -> RenderableType:
    """Bars: one line for each drop rate, one column for each curve."""
    room = (console.width - 12) // len(curves) - 9
    longest = max(4, min(LONGEST_BAR, room))
    solid = can_write(console, EIGHTHS)
    table = _table(
        "Right answers over drop rates, in %",
        Column("drop\nrate", justify="right", vertical="bottom"),
        *(Column(curve.name, min_width=longest + 6, vertical="bottom") for curve in curves),
    )
    for points in zip(*(curve.points for curve in curves), strict=True):
        table.add_row(
            f"{points[0][0]:g}",
            *(_bar(figure.mean, longest, solid=solid) for _, figure in points),
        )
    return table


def writings_table(
    writings: Sequence[Writing], examples: Sequence[Example], console: Console
) -> RenderableType:
    """What each model writes, right answers marked."""
    mark = "✓" if can_write(console, "✓") else "*"
    title = f"What they write after three held-out prompts ({mark} is right)"
    table = _table(title, "", *(Column(example.prompt) for example in examples))
    for writing in writings:
        cells = []
        for text, example in zip(writing.texts, examples, strict=True):
            shown = "".join(letter if letter.isprintable() else "·" for letter in text)
            is_right = text == example.answer
            cells.append(Text(f"{shown} {mark}", "green") if is_right else Text(shown, "dim"))
        table.add_row(writing.name, *cells)
    return table


def draw_curves(curves: Sequence[Curve], caption: str, file: Path) -> None:
    """Draw the curves with their spread over seeds, as PNG, SVG or whatever the name ends in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve, colour, mark in zip(curves, COLOURS, MARKS, strict=False):
        rates = [rate for rate, _ in curve.points]
        means = [point.mean for _, point in curve.points]
        spreads = [point.spread or 0.0 for _, point in curve.points]
        axes.errorbar(rates, means, spreads, color=colour, marker=mark, capsize=3, label=curve.name)
    axes.set(xlabel="drop rate p", ylabel="right answers to held-out prompts (%)")
    axes.set(xlim=(-0.02, 1), ylim=(0, 103))
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.legend(frameon=False, loc="lower left")
    axes.set_title(caption, loc="left", fontsize=10)
    figure.savefig(file, metadata={"Software": "dare demo"})


def _table(title: str, *columns: str | Column) -> Table:
    return make_table(
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )


def _figure(figure: Figure) -> str:
    """A mean with its spread.

    >>> _figure(Figure(92.0, 2.83)), _figure(Figure(92.0, None))
    ('92.0 ±2.8', '92.0     ')
    """
    spread = "" if figure.spread is None else f"±{figure.spread:.1f}"
    return f"{figure.mean:.1f} {spread:<4}"


def _percentage(figure: Figure) -> Text:
    style = "green" if figure.mean >= GOOD else "dim" if figure.mean <= POOR else ""
    return Text(_figure(figure), style=style)


def _bar(percentage: float, longest: int, *, solid: bool) -> Text:
    """A bar and its number.

    >>> _bar(75, 4, solid=True).plain, _bar(40, 4, solid=False).plain
    ('███  75.0', '##   40.0')
    """
    bar = draw_bar(percentage / 100, longest, solid=solid)
    return Text.assemble((bar, "cyan"), f"{percentage:5.1f}")
