"""The demonstration, in order: models and their answers, scores, drop rates."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console as Screen
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dare.demo.llama import Floats, Llama, read_weights
from dare.demo.merges import (
    BASE,
    CONFIG,
    MODELS,
    TUNED,
    Curve,
    DemoMerge,
    DemoResult,
    MeanScore,
    Measurement,
    Row,
    Score,
    Texts,
    measure_all,
    scale_for,
)
from dare.demo.tasks import TASKS, Exercise, add, say, sort
from dare.documents.console import Console
from dare.documents.document import BARS, Columns, Document, Section, Table, Tone, tabulate
from dare.documents.terminal import print_document
from dare.errors import OutputError, install_command
from dare.kernels.linalg import one_blas_thread
from dare.output.targets import check_free

FIRST_SEED = 42

# Methods without DARE; the last is TIES as published, which trims to the largest fifth.
PLAIN = ("linear", "sum", "ties", "trim+ties")
DROPPED = ("sum", "ties")
MODEL_NAMES = ("base", *TUNED)
FIRST = (("merge", "sum", 0.0), ("merge", "sum", 0.5))  # merges that are scored and shown first
FAVOURITE = DemoMerge("sum", 0.5, scale_for("sum", 0.5), FIRST_SEED)

# Held-out prompts whose answers are easily checked by eye.
SHOWN = (add(64, 19)[1], sort("garden")[1], say(128)[1])


@dataclass(frozen=True)
class Extent:
    """The extent of the measurements."""

    prompts: int  # for each task
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
    models = {name: partial(Llama, MODELS / name, CONFIG) for name in MODEL_NAMES}
    tuned = _writings(console, models)
    print_document(console, opening(parameters, changes, tuned))
    merged = _writings(console, {FAVOURITE.label: FAVOURITE.load})
    how = f"by {FAVOURITE.method}, with {FAVOURITE.drop_rate:.0%} of every change dropped"
    print_document(console, answered(merged, "The three merged into one", how))
    writings = (*tuned, *merged)
    rows = _measure(console, _experiments(extent), extent)
    rates = (0.0, *extent.drop_rates)
    curves = [_alone_curve(rows, rates)]
    for combine in DROPPED:
        points = tuple((rate, rows["merge", combine, rate].mean) for rate in rates)
        curves.append(Curve(f"dare+{combine} of all three", points))
    table_rates = (0.0, *extent.table_rates)
    seconds = time.perf_counter() - began
    result = DemoResult(
        parameters=parameters,
        prompts={task.name: len(task.examples("test", extent.prompts)) for task in TASKS},
        seeds=extent.seeds,
        mean_change=changes,
        rows=tuple(
            row for (kind, _, rate), row in rows.items() if kind != "alone" and rate in table_rates
        ),
        curves=tuple(curves),
        writings=writings,
        picture=None if output is None else _keep(output, extent, curves),
        output=None if output is None else str(output),
        seconds=seconds,
    )
    print_document(console, outcome(result, _conclusion(rows)))
    return result


# ---------------------------------------------------------------- what is measured

# A model, a merge, or DARE on a model alone; of which name or stages; at which drop rate.
Key = tuple[str, str, float]


def _experiments(extent: Extent) -> dict[Key, tuple[Row, list[Measurement]]]:
    """Return all that is measured, in the order shown: a row, and a measurement for each seed."""
    everything = partial(Measurement, prompts=extent.prompts, english_bytes=extent.english_bytes)
    planned: dict[Key, tuple[Row, list[Measurement]]] = {}
    for name in MODEL_NAMES:
        planned["model", name, 0.0] = Row(name, ()), [everything(MODELS / name)]
    dropping = [(combine, rate) for combine in DROPPED for rate in extent.drop_rates]
    for combine, rate in [*((combine, 0.0) for combine in PLAIN), *dropping]:
        seeds = extent.seeds if rate else (FIRST_SEED,)  # nothing else is random
        merges = [DemoMerge(combine, rate, scale_for(combine, rate), seed) for seed in seeds]
        row = Row(merges[0].label, (), merges[0].method, rate, merges[0].scale)
        planned["merge", combine, rate] = row, [everything(merge) for merge in merges]
    for name, model in TUNED.items():
        for rate in extent.drop_rates:
            alone = [DemoMerge("sum", rate, 1.0, seed, (model,)) for seed in extent.seeds]
            jobs = [Measurement(merge, extent.prompts, 0, (name,)) for merge in alone]
            planned["alone", name, rate] = Row(name, (), drop_rate=rate), jobs
    return planned


def _measure(
    console: Console, experiments: Mapping[Key, tuple[Row, list[Measurement]]], extent: Extent
) -> dict[Key, Row]:
    """Score everything, and show the first rows while the others are still being scored."""
    first = [key for key in experiments if key[0] == "model" or key in FIRST]
    order = [*first, *(key for key in experiments if key not in first)]
    jobs = [job for key in order for job in experiments[key][1]]
    early = sum(len(experiments[key][1]) for key in first)
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen, is_hidden = Screen(stderr=console.stderr), not console.is_terminal
    with Progress(*columns, console=screen, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("scoring", total=len(jobs))

        def rows_of(keys: Iterable[Key], scores: Sequence[Score]) -> dict[Key, Row]:
            found = dict(zip(jobs, scores, strict=False))
            each = ((key, *experiments[key]) for key in keys)
            return {
                key: replace(row, scores=tuple(found[job] for job in own)) for key, row, own in each
            }

        def advance(done: Sequence[Score]) -> None:
            bar.advance(task)
            if len(done) == early:
                rows = rows_of(first, done).values()
                print_document(console, first_scores(rows, extent, len(jobs) - early))

        return rows_of(experiments, measure_all(jobs, advance))


def _alone_curve(rows: Mapping[Key, Row], rates: Sequence[float]) -> Curve:
    """Return how well fine-tunes do their own tasks, on average, over drop rates."""
    points = []
    for rate in rates:
        kind = "alone" if rate else "model"
        by_model = [rows[kind, name, rate].scores for name in TUNED]
        by_seed = [
            fmean(score.correct[name] for name, score in zip(TUNED, scores, strict=True))
            for scores in zip(*by_model, strict=True)
        ]
        points.append((rate, MeanScore.of(by_seed)))
    return Curve("each alone, on its task", tuple(points))


def _writings(console: Console, models: Mapping[str, Callable[[], Llama]]) -> tuple[Texts, ...]:
    """Have each model continue the same prompts."""
    prompts = [example.prompt for example in SHOWN]
    screen = Screen(stderr=console.stderr, quiet=not console.is_terminal)
    with screen.status("merging"), one_blas_thread():
        return tuple(Texts(name, tuple(load().write(prompts))) for name, load in models.items())


def _mean_change(base: Mapping[str, Floats], tuned: Mapping[str, Floats]) -> float:
    """Return the mean |delta| over the tensors that changed."""
    deltas = [np.abs(tuned[name] - tensor) for name, tensor in base.items()]
    changed = [delta.ravel() for delta in deltas if delta.any()]
    return float(np.concatenate(changed).mean())


# ---------------------------------------------------------------- what is said and kept


def _conclusion(rows: Mapping[Key, Row]) -> str:
    """Say in words what the figures show."""
    rate = FAVOURITE.drop_rate
    alone = fmean(rows["model", name, 0.0].correct(name).mean for name in TUNED)
    mean = {
        (combine, p): f"{row.mean.mean:.0f}%"
        for (kind, combine, p), row in rows.items()
        if kind == "merge"
    }
    return (
        f"It gets {mean['sum', rate]} right with {rate:.0%} of every change dropped; three "
        f"separate models get {alone:.0f}%. Here a plain sum does as well ({mean['sum', 0.0]}). "
        f"DARE rescues TIES: {mean['ties', 0.0]} without it, "
        f"{mean['ties', rate]} with it; so does trimming ({mean['trim+ties', 0.0]})."
    )


def _keep(output: Path, extent: Extent, curves: Sequence[Curve]) -> str | None:
    """Leave merged models and the picture in a folder; return the picture's file."""
    for combine in DROPPED:
        for rate in (0.0, *extent.table_rates):
            merge = DemoMerge(combine, rate, scale_for(combine, rate), FIRST_SEED)
            merge.carry_out(output / (merge.method + (f"-{rate:g}" if rate else "")))
    if find_spec("matplotlib") is None:
        return None
    file = output / PICTURE
    draw_curves(curves, extent, file)
    return str(file)


# ---------------------------------------------------------------- documents

GOOD = 80.0  # the percentage from which a cell is set off
# Okabe and Ito's, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKS = ("o", "s", "^", "D")


def opening(parameters: int, changes: Mapping[str, float], writings: Sequence[Texts]) -> Document:
    """Return the models, their tasks, and what each writes, right answers marked."""
    tasks = [
        (task.name, f"{task.title}: {''.join(example)} (mean |δ| {changes[task.name]:.4f})")
        for task, example in zip(TASKS, SHOWN, strict=True)
    ]
    lead = f"fine-tunes of one base: {parameters:,} parameters, trained on the Bible and exercises"
    return answered(writings, "Three models become one", lead, tuple(tasks))


def answered(
    writings: Sequence[Texts], title: str, lead: str, facts: tuple[tuple[str, str], ...] = ()
) -> Document:
    """Return a document with what models write."""
    answers = [
        tuple(_shown(text, example) for text, example in zip(writing.texts, SHOWN, strict=True))
        for writing in writings
    ]
    table = Table(
        ("", *(example.prompt for example in SHOWN)),
        tuple((writing.name, *cells) for writing, cells in zip(writings, answers, strict=True)),
        title="Answers to three held-out prompts (✓ is right)",
        tones={cell: Tone.GOOD for cells in answers for cell in cells if cell.endswith("✓")},
    )
    sections = (Section("writings", "Answers", (table,), is_brief=True),)
    return Document(title=title, kind="demonstration", lead=lead, facts=facts, sections=sections)


def _shown(text: str, example: Exercise) -> str:
    printed = "".join(letter if letter.isprintable() else "·" for letter in text)
    return f"{printed} ✓" if text == example.answer else printed


def first_scores(rows: Iterable[Row], extent: Extent, left: int) -> Document:
    """Return what is known after a few seconds."""
    counts = {task.name: len(task.examples("test", extent.prompts)) for task in TASKS}
    table = score_table(rows, counts, extent.seeds)
    return Document(
        title="First scores",
        kind="demonstration",
        lead=f"{left} more merges are being scored, to compare methods and drop rates",
        sections=(Section("scores", "Scores", (table,), is_brief=True),),
    )


def score_table(rows: Iterable[Row], prompts: Mapping[str, int], seeds: Sequence[int]) -> Table:
    """Return what models and merges can do."""
    columns: Columns = {
        "": lambda row: row.name,
        "scale >": lambda row: "" if row.scale is None else f"{row.scale:g}",
        **{f"{task.name} >": partial(_correct, task.name) for task in TASKS},
        "mean >": lambda row: _percentage(row.mean),
        "English >": lambda row: f"{row.bits_per_byte.mean:.3f}",
    }
    counts = ", ".join(f"{count} {task}" for task, count in prompts.items())
    spread = f"± is over {len(seeds)} seeds. " if len(seeds) > 1 else ""
    return tabulate(
        rows,
        columns,
        title="Right answers to held-out prompts, in %; English in bits per byte",
        hint=f"{spread}Prompts: {counts}. Scales were chosen on other prompts.",
        tones={
            _percentage(row.correct(task.name)): Tone.GOOD
            for row in rows
            for task in TASKS
            if row.correct(task.name).mean >= GOOD
        },
    )


def outcome(result: DemoResult, conclusion: str) -> Document:
    """Return what models and merges can do, and how dropping changes it."""
    scores = score_table(result.rows, result.prompts, result.seeds)
    points = list(zip(*(curve.points for curve in result.curves), strict=True))
    rates = Table(
        ("drop rate", *(f"{curve.name} >" for curve in result.curves)),
        tuple((f"{at[0][0]:g}", *(f"{figure.mean:.1f}" for _, figure in at)) for at in points),
        title="Right answers over drop rates, in %; the bars show the first column",
        bars=tuple(at[0][1].mean for at in points),
        optional=(BARS,),
    )
    here = Path.cwd()
    places = (p.relative_to(here) if p.is_relative_to(here) else p for p in (BASE, *TUNED.values()))
    base, *tuned = (shlex.quote(str(path)) for path in places)
    started = Path(sys.argv[0])  # `make demo` runs a program that is not on the path
    program = started if started.name == "dare" and not shutil.which("dare") else "dare"
    command = (
        f"{program} {base} {' '.join(tuned)} --method {FAVOURITE.method} --drop-rate "
        f"{FAVOURITE.drop_rate:g} --scale {FAVOURITE.scale:g} --output merged"
    )
    kept = [("merged models", result.output)] if result.output else []
    picture = result.picture or f"needs matplotlib: {install_command('demo')}"
    return Document(
        title="One model now does three tasks",
        kind="demonstration",
        tone=Tone.GOOD,
        sections=(Section("scores", "Scores", (conclusion, scores, rates), is_brief=True),),
        facts=(*kept, *([("picture", picture)] if kept else [])),
        steps={"repeat": command},
    )


def _correct(task: str, row: Row) -> str:
    return _percentage(row.correct(task))


def _percentage(figure: MeanScore) -> str:
    """Return a mean with its spread.

    >>> _percentage(MeanScore(92.0, 2.83)), _percentage(MeanScore(92.0, None))
    ('92.0 ±2.8', '92.0')
    """
    spread = "" if figure.spread is None else f" ±{figure.spread:.1f}"
    return f"{figure.mean:.1f}{spread}"


def draw_curves(curves: Sequence[Curve], extent: Extent, file: Path) -> None:
    """Draw the curves with their spread over seeds, as PNG, SVG or whatever the name ends in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    seeds = f"{len(extent.seeds)} seeds" if len(extent.seeds) > 1 else "one seed"
    caption = f"Three tasks, mean of {extent.prompts} prompts each, {seeds}"
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
