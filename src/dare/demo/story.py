"""The demonstration, in order: models and their answers, scores, drop rates."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean

from rich.console import Console as Screen
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dare.demo.llama import Llama, read_weights
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
MODEL_NAMES = ("base", *TUNED)
DROPPED = ("sum", "ties")  # what DARE is tried with
TABLE_RATES = (0.0, 0.5, 0.9)  # drop rates that have a row in the table
FAVOURITE = DemoMerge("sum", 0.5, scale_for("sum", 0.5), FIRST_SEED)

# Held-out prompts whose answers are easily checked by eye.
SHOWN = (add(64, 19)[1], sort("garden")[1], say(128)[1])


@dataclass(frozen=True)
class Extent:
    """The extent of the measurements: by default, the models and one merge of them."""

    prompts: int = 100  # for each task
    seeds: tuple[int, ...] = (FIRST_SEED,)
    english_bytes: int = 4096
    plain: tuple[str, ...] = ()  # methods without DARE
    drop_rates: tuple[float, ...] = ()

    @property
    def merges(self) -> list[tuple[str, float]]:
        """Return the stages and drop rate of each merge of the three, the favourite first."""
        favourite = (FAVOURITE.combine, FAVOURITE.drop_rate)
        plain = ((combine, 0.0) for combine in self.plain)
        return list(dict.fromkeys([favourite, *plain, *product(DROPPED, self.drop_rates)]))


PICTURE = "demo.png"

FIRST = Extent()
FULL = Extent(
    seeds=(FIRST_SEED, 1042, 2042),  # no neighbours: model i is merged with seed + i
    plain=("linear", "sum", "ties", "trim+ties"),  # the last is TIES as published, which trims
    drop_rates=(0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
)


def run_demo(console: Console, *, output: Path | None = None, full: bool = False) -> DemoResult:
    """Merge the three fine-tunes, show what models and merge can do, return the numbers.

    With `output`, the merged model is left in that folder. `full` compares methods and drop rates,
    and leaves these merges and a picture too.
    """
    extent = FULL if full else FIRST
    began = time.perf_counter()
    if output is not None:  # made before a minute's work, not after it
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{output}: cannot be created: {error.strerror or error}") from None
        check_free(output / PICTURE, "demonstration", overwrite=True)
    parameters = sum(tensor.size for tensor in read_weights(BASE).values())
    writings = _writings(console)
    print_document(console, opening(parameters, writings))
    rows = _measure(console, _experiments(extent))
    curves = _curves(rows, extent) if full else ()
    seconds = time.perf_counter() - began
    result = DemoResult(
        parameters=parameters,
        prompts={task.name: len(task.examples("test", extent.prompts)) for task in TASKS},
        seeds=extent.seeds,
        rows=tuple(
            row for (kind, _, rate), row in rows.items() if kind != "alone" and rate in TABLE_RATES
        ),
        curves=curves,
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
    for combine, rate in extent.merges:
        seeds = extent.seeds if rate else (FIRST_SEED,)  # nothing else is random
        merges = [DemoMerge(combine, rate, scale_for(combine, rate), seed) for seed in seeds]
        row = Row(merges[0].label, (), merges[0].method, rate, merges[0].scale)
        planned["merge", combine, rate] = row, [everything(merge) for merge in merges]
    for name, rate in product(TUNED, extent.drop_rates):
        alone = [DemoMerge("sum", rate, 1.0, seed, (TUNED[name],)) for seed in extent.seeds]
        jobs = [Measurement(merge, extent.prompts, 0, (name,)) for merge in alone]
        planned["alone", name, rate] = Row(name, (), drop_rate=rate), jobs
    return planned


def _measure(
    console: Console, experiments: Mapping[Key, tuple[Row, list[Measurement]]]
) -> dict[Key, Row]:
    """Score everything, and show how far it is and how long the rest will take."""
    jobs = [job for _, own in experiments.values() for job in own]
    text = TextColumn("scoring {task.total} models and merges")
    columns = (text, BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    screen, is_hidden = Screen(stderr=console.stderr), not console.is_terminal
    with Progress(*columns, console=screen, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=len(jobs))
        found = dict(zip(jobs, measure_all(jobs, lambda _: bar.advance(task)), strict=True))
    return {
        key: replace(row, scores=tuple(found[job] for job in own))
        for key, (row, own) in experiments.items()
    }


def _curves(rows: Mapping[Key, Row], extent: Extent) -> tuple[Curve, ...]:
    """Return the share of right answers over drop rates: of models alone, and of merges."""
    rates = (0.0, *extent.drop_rates)
    merged = (
        Curve(
            f"dare+{combine} of all three",
            tuple((rate, rows["merge", combine, rate].mean) for rate in rates),
        )
        for combine in DROPPED
    )
    return _alone_curve(rows, rates), *merged


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


def _writings(console: Console) -> tuple[Texts, ...]:
    """Have each model, and then the three merged into one, continue the same prompts."""
    prompts = [example.prompt for example in SHOWN]
    screen = Screen(stderr=console.stderr, quiet=not console.is_terminal)
    with screen.status("merging"), one_blas_thread():
        models = [Llama(MODELS / name, CONFIG) for name in MODEL_NAMES]
        named = zip((*MODEL_NAMES, "merged"), (*models, FAVOURITE.load()), strict=True)
        return tuple(Texts(name, tuple(model.write(prompts))) for name, model in named)


# ---------------------------------------------------------------- what is said and kept


def _conclusion(rows: Mapping[Key, Row]) -> str:
    """Say in words what the figures show."""
    alone = fmean(rows["model", name, 0.0].correct(name).mean for name in TUNED)
    mean = {
        (combine, p): f"{row.mean.mean:.0f}%"
        for (kind, combine, p), row in rows.items()
        if kind == "merge"
    }
    rate = FAVOURITE.drop_rate
    found = (
        f"It gets {mean['sum', rate]} right, with {rate:.0%} of every change dropped. Each of the "
        f"three models gets {alone:.0f}% on its own task, on average."
    )
    if ("ties", rate) not in mean:
        return found
    return (
        f"{found} Here a plain sum does as well ({mean['sum', 0.0]}). "
        f"DARE rescues TIES: {mean['ties', 0.0]} without it, "
        f"{mean['ties', rate]} with it; so does trimming ({mean['trim+ties', 0.0]})."
    )


def _keep(output: Path, extent: Extent, curves: Sequence[Curve]) -> str | None:
    """Leave merged models, and the picture if it was asked for; return the picture's file."""
    for combine, rate in extent.merges:
        if combine in DROPPED and rate in TABLE_RATES:
            merge = DemoMerge(combine, rate, scale_for(combine, rate), FIRST_SEED)
            merge.carry_out(output / (merge.method + (f"-{rate:g}" if rate else "")))
    if not curves or find_spec("matplotlib") is None:
        return None
    file = output / PICTURE
    draw_curves(curves, extent, file)
    return str(file)


# ---------------------------------------------------------------- documents

GOOD = 80.0  # the percentage from which a cell is set off
# Okabe and Ito's, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKS = ("o", "s", "^", "D")


def opening(parameters: int, writings: Sequence[Texts]) -> Document:
    """Return the models, their tasks, and what each and their merge write, right answers marked."""
    tasks = [
        (task.name, f"{task.title}: {''.join(example)}")
        for task, example in zip(TASKS, SHOWN, strict=True)
    ]
    how = f"by {FAVOURITE.method}, with {FAVOURITE.drop_rate:.0%} of every change dropped"
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
    return Document(
        title="Three models become one",
        kind="demonstration",
        lead=f"fine-tunes of one base with {parameters:,} parameters",
        facts=(*tasks, ("merged", how)),
        sections=(Section("writings", "Answers", (table,), is_brief=True),),
    )


def _shown(text: str, example: Exercise) -> str:
    printed = "".join(letter if letter.isprintable() else "·" for letter in text)
    return f"{printed} ✓" if text == example.answer else printed


def score_table(result: DemoResult) -> Table:
    """Return what models and merges can do."""
    columns: Columns = {
        "": lambda row: row.name,
        "scale >": lambda row: "" if row.scale is None else f"{row.scale:g}",
        **{f"{task.name} >": partial(_correct, task.name) for task in TASKS},
        "mean >": lambda row: _percentage(row.mean),
        "English >": lambda row: f"{row.bits_per_byte.mean:.3f}",
    }
    counts = ", ".join(f"{count} {task}" for task, count in result.prompts.items())
    spread = f"± is over {len(result.seeds)} seeds. " if len(result.seeds) > 1 else ""
    return tabulate(
        result.rows,
        columns,
        title="Right answers to held-out prompts, in %; English in bits per byte",
        hint=f"{spread}Prompts: {counts}. Scales were chosen on other prompts.",
        tones={
            _percentage(row.correct(task.name)): Tone.GOOD
            for row in result.rows
            for task in TASKS
            if row.correct(task.name).mean >= GOOD
        },
    )


def outcome(result: DemoResult, conclusion: str) -> Document:
    """Return what models and merges can do, how dropping changes it, and what to do next."""
    parts: list[str | Table] = [conclusion, score_table(result)]
    kept = [("kept in", result.output)] if result.output else []
    started = Path(sys.argv[0])  # `make demo` runs a program that is not on the path
    program = str(started) if started.name == "dare" and not shutil.which("dare") else "dare"
    own, how = "BASE MODEL MODEL", f"{FAVOURITE.method} --drop-rate {FAVOURITE.drop_rate:g}"
    steps = {
        "merge": f"{program} {own} -o merged --method {how}",
        "search": f"{program} search {own} --data EXAMPLES.jsonl -o best",
    }
    if result.curves:
        points = list(zip(*(curve.points for curve in result.curves), strict=True))
        rates = Table(
            ("drop rate", *(f"{curve.name} >" for curve in result.curves)),
            tuple((f"{at[0][0]:g}", *(f"{figure.mean:.1f}" for _, figure in at)) for at in points),
            title="Right answers over drop rates, in %",
            bars=tuple(at[0][1].mean for at in points),
            optional=(BARS,),
        )
        parts.append(rates)
        picture = result.picture or f"needs matplotlib: {install_command('demo')}"
        kept += [("picture", picture)] if kept else []
    else:
        steps["more"] = f"{program} demo --full"
    return Document(
        title="One model now does three tasks",
        kind="demonstration",
        tone=Tone.GOOD,
        sections=(Section("scores", "Scores", tuple(parts), is_brief=True),),
        facts=tuple(kept),
        steps=steps,
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
