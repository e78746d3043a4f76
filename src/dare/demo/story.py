"""What the demonstration does, in order: models, scores, drop rates, what they write."""

from __future__ import annotations

import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dare.demo import picture, show
from dare.demo.llama import Floats, Llama, read_weights
from dare.demo.measure import Job, measure_all
from dare.demo.merges import BASE, CONFIG, MODELS, TUNED, Merge, scale_for
from dare.demo.results import Curve, DemoResult, Figure, Row, Score, Writing
from dare.demo.tasks import TASKS, add, say, sort
from dare.errors import OutputError

FIRST_SEED = 42
SEED_STEP = 1000
"""Model i is merged with seed + i: the seeds of two merges must not be neighbours."""

PLAIN = ("linear", "sum", "ties", "trim+ties")
"""What is tried without DARE; the last is TIES as published, which trims to the largest fifth."""
DROPPED = ("sum", "ties")
"""What is tried with it."""

SHOWN = (add(64, 19)[1], sort("garden")[1], say(128)[1])
"""Held-out prompts whose answers are easily checked by eye."""


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    prompts: int
    seeds: int
    english_bytes: int
    drop_rates: tuple[float, ...]
    table_rates: tuple[float, ...]

    def with_counts(self, prompts: int | None, seeds: int | None) -> Extent:
        """Take other counts where they are given."""
        return replace(self, prompts=prompts or self.prompts, seeds=seeds or self.seeds)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """One seed for each repetition."""
        return tuple(FIRST_SEED + SEED_STEP * index for index in range(self.seeds))


FULL = Extent(
    prompts=100,
    seeds=3,
    english_bytes=4096,
    drop_rates=(0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    table_rates=(0.5, 0.9),
)
QUICK = Extent(
    prompts=25,
    seeds=1,
    english_bytes=1024,
    drop_rates=(0.5, 0.9),
    table_rates=(0.5, 0.9),
)


def tell(console: Console, extent: Extent, output: Path | None) -> DemoResult:
    """Run the whole demonstration."""
    began = time.perf_counter()
    if output is not None:
        _make_folder(output)
    base = read_weights(BASE)
    parameters = sum(tensor.size for tensor in base.values())
    changes = {name: _mean_change(base, read_weights(path)) for name, path in TUNED.items()}
    _introduce(console, parameters, changes)

    writings = _writings(console)  # first: its merge compiles what all merges use
    experiments = _experiments(extent)
    jobs = [job for repeated in experiments.values() for job in repeated]
    with _progress(console, len(jobs)) as advance:
        scores = dict(zip(jobs, measure_all(jobs, advance), strict=True))
    rows = {
        experiment: experiment.row([scores[job] for job in repeated])
        for experiment, repeated in experiments.items()
    }
    curves = (
        _alone_curve(rows, extent),
        *(_curve(rows, combine, (0.0, *extent.drop_rates)) for combine in DROPPED),
    )
    shown = tuple(
        row
        for experiment, row in rows.items()
        if not experiment.alone and row.drop_rate in (0.0, *extent.table_rates)
    )
    console.print(show.scores_table(shown))
    console.print(_remarks(extent), style="dim", highlight=False)
    console.print()
    console.print(show.curves_chart(curves, console))
    console.print()
    console.print(show.writings_table(writings, SHOWN, console))
    console.print()
    drawn = None if output is None else _keep(console, output, extent, curves)
    console.print(_what_next(), soft_wrap=True, highlight=False, markup=False)
    return DemoResult(
        parameters=parameters,
        prompts={task.name: len(task.examples("test", extent.prompts)) for task in TASKS},
        seeds=extent.all_seeds,
        mean_change=changes,
        rows=shown,
        curves=curves,
        writings=writings,
        picture=None if drawn is None else str(drawn),
        output=None if output is None else str(output),
        seconds=time.perf_counter() - began,
    )


def _make_folder(output: Path) -> None:
    """Make the folder before a minute's work, not after it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{output}: cannot be made: {error.strerror or error}") from None


@dataclass(frozen=True)
class Experiment:
    """What one row, or one point of a curve, is measured on."""

    name: str
    """A model's, or that of the stages after DARE."""
    drop_rate: float = 0.0
    merges: bool = False
    """Whether all three are merged, or one model is taken alone."""

    @property
    def alone(self) -> bool:
        """Whether DARE is applied to one model."""
        return not self.merges and self.drop_rate > 0

    def jobs(self, extent: Extent) -> list[Job]:
        """One job for each seed, if anything is random."""
        seeds = extent.all_seeds if self.drop_rate else (FIRST_SEED,)
        if self.merges:
            scale = scale_for(self.name, self.drop_rate)
            merges = [Merge(self.name, self.drop_rate, scale, seed) for seed in seeds]
            return [Job(merge, extent.prompts, extent.english_bytes) for merge in merges]
        if not self.alone:
            return [Job(MODELS / self.name, extent.prompts, extent.english_bytes)]
        models = (TUNED[self.name],)
        dropped = [Merge("sum", self.drop_rate, 1.0, seed, models) for seed in seeds]
        return [Job(merge, extent.prompts, 0, (self.name,)) for merge in dropped]

    def row(self, scores: Sequence[Score]) -> Row:
        """Sum up what the jobs found."""
        if not self.merges:
            return Row(self.name, tuple(scores), None, self.drop_rate)
        scale = scale_for(self.name, self.drop_rate)
        merge = Merge(self.name, self.drop_rate, scale)
        return Row(_label(merge), tuple(scores), merge.method, self.drop_rate, scale)


def _experiments(extent: Extent) -> dict[Experiment, list[Job]]:
    """All that is measured, in the order in which it is shown."""
    planned = [
        *(Experiment(name) for name in ("base", *TUNED)),
        *(Experiment(combine, merges=True) for combine in PLAIN),
        *(Experiment(name, rate, True) for name in DROPPED for rate in extent.drop_rates),
        *(Experiment(name, rate) for name in TUNED for rate in extent.drop_rates),
    ]
    return {experiment: experiment.jobs(extent) for experiment in planned}


def _curve(rows: Mapping[Experiment, Row], combine: str, drop_rates: Sequence[float]) -> Curve:
    """The mean over tasks of a merge, over drop rates."""
    points = ((rate, rows[Experiment(combine, rate, True)].mean) for rate in drop_rates)
    return Curve(f"dare+{combine} of all three", tuple(points))


def _alone_curve(rows: Mapping[Experiment, Row], extent: Extent) -> Curve:
    """The mean over fine-tunes of what each can do of its own task, over drop rates."""
    own = {
        rate: [rows[Experiment(name, rate)].scores for name in TUNED]
        for rate in (0.0, *extent.drop_rates)
    }
    points = []
    for rate, by_model in own.items():
        by_seed = [
            fmean(score.correct[name] for name, score in zip(TUNED, scores, strict=True))
            for scores in zip(*by_model, strict=True)
        ]
        points.append((rate, Figure.of(by_seed)))
    return Curve("each alone, its own task", tuple(points))


def _writings(console: Console) -> tuple[Writing, ...]:
    """Let the models, and a merge of all three, go on after the same prompts."""
    merge = _favourite()
    prompts = [example.prompt for example in SHOWN]
    files = {name: MODELS / name for name in ("base", *TUNED)}
    with tempfile.TemporaryDirectory() as folder, console.status("merging"):
        files[_label(merge)] = merge.carry_out(Path(folder) / "merged.safetensors")
        return tuple(
            Writing(name, tuple(Llama(file, CONFIG).write(prompts))) for name, file in files.items()
        )


def _favourite() -> Merge:
    """The merge that is shown at work."""
    return Merge("sum", 0.5, scale_for("sum", 0.5), FIRST_SEED)


def _label(merge: Merge) -> str:
    return merge.method + (f" p={merge.drop_rate:g}" if merge.drop_rate else "")


def _mean_change(base: Mapping[str, Floats], tuned: Mapping[str, Floats]) -> float:
    """Mean |delta| over the tensors that changed at all."""
    deltas = [np.abs(tuned[name] - tensor) for name, tensor in base.items()]
    changed = [delta.ravel() for delta in deltas if delta.any()]
    return float(np.concatenate(changed).mean())


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


def _remarks(extent: Extent) -> str:
    counts = ", ".join(
        f"{len(task.examples('test', extent.prompts))} {task.name}" for task in TASKS
    )
    seeds = f"±: over {extent.seeds} seeds. " if extent.seeds > 1 else ""
    return f"{seeds}Prompts: {counts}. Scales were chosen on other prompts."


def _keep(console: Console, output: Path, extent: Extent, curves: Sequence[Curve]) -> Path | None:
    """Leave merged models and the picture in a folder; return the picture's file."""
    for combine in DROPPED:
        for rate in (0.0, *extent.table_rates):
            merge = Merge(combine, rate, scale_for(combine, rate), FIRST_SEED)
            folder = output / (merge.method + (f"-{rate:g}" if rate else ""))
            folder.mkdir(parents=True, exist_ok=True)
            merge.carry_out(folder / "model.safetensors")
            for file in BASE.glob("*.json"):
                shutil.copyfile(file, folder / file.name)
    console.print(f"merged models: {output}", soft_wrap=True, highlight=False)
    if not picture.can_draw():
        console.print(picture.HOW_TO_GET, markup=False, soft_wrap=True)
        return None
    file = output / "demo.png"
    seeds = f"{extent.seeds} seeds" if extent.seeds > 1 else "one seed"
    picture.draw(curves, f"Three tasks, mean of {extent.prompts} prompts each, {seeds}", file)
    console.print(f"picture: {file}", soft_wrap=True, highlight=False)
    return file


def _what_next() -> str:
    merge = _favourite()
    base, *tuned = (shlex.quote(_from_here(path)) for path in (BASE, *TUNED.values()))
    return (
        "Next, repeat a merge by hand:\n\n"
        f"  dare --base {base} \\\n"
        f"       --merge {' '.join(tuned)} \\\n"
        f"       --method {merge.method} --drop-rate {merge.drop_rate:g} --scale {merge.scale:g} "
        "--output merged.safetensors"
    )


def _from_here(path: Path) -> str:
    """A path as short as it can be written in the folder we are in."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """Show how far it is, on a terminal; elsewhere nothing."""
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    visible = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not visible) as bar:
        task = bar.add_task("scoring", total=total)
        yield lambda: bar.advance(task)
