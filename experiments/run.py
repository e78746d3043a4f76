"""Make the models of every world, merge them in every way, and write down what the merges can do.

    python experiments/run.py                       # all worlds, into experiments/results
    python experiments/run.py glyphs words --processes 2
    python experiments/run.py minilm smollm2 --device cuda
    python experiments/run.py --minutes 60          # the sets that are scored by then

A set that is in the results already is left alone, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import IMAGE_SETS, IMAGE_WORLDS, Releases
from late import LATE
from pretrained import PRETRAINED
from questions import answer_all
from scoring import score_set
from sets import ModelSet, sets_of
from tuning import Tune, Workshop
from worlds import WORLDS

import dare

HERE = Path(__file__).parent
ALL = WORLDS | PRETRAINED | IMAGE_WORLDS | LATE
QUESTIONS = "questions"


def main() -> None:
    """Score the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("worlds", nargs="*", default=list(ALL))
    parser.add_argument("--models", type=Path, default=HERE / "models")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--kinds", nargs="*", help="kinds of sets; all, if not given")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then begin nothing more")
    asked = parser.parse_args()
    started = time.perf_counter()
    with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
        shared = asked.models, asked.device, asked.threads
        run = Run(pool, asked.processes, asked.results, shared, started + 60 * asked.minutes)
        for name in asked.worlds:
            run.begin(name, asked.kinds)
        for done in run.finished():
            print(f"{time.perf_counter() - started:5.0f} s  {done}", flush=True)


@dataclass(frozen=True)
class Job:
    """Something that a process does for a world, and what comes after it."""

    world: str
    name: str
    then: Callable[[Any], None]
    work: Callable[..., Any]
    what: Any = None


@dataclass
class Run:
    """Jobs of several processes: a base, then what starts from it, and sets whose models are made.

    Sets come first and later worlds last, where there is a choice.
    """

    pool: ProcessPoolExecutor
    processes: int
    results: Path
    shared: tuple[Path, str, int]
    """Given to every job: the folder of models, the device, the number of threads."""
    deadline: float
    worlds: list[str] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    running: dict[Future[Any], Job] = field(default_factory=dict)

    def begin(self, name: str, kinds: list[str] | None) -> None:
        """Plan what a world still lacks."""
        self.worlds.append(name)
        (self.results / "sets").mkdir(parents=True, exist_ok=True)
        known = self.read(name)
        sets = [
            members
            for members in IMAGE_SETS.get(name) or sets_of(ALL[name])
            if members.name not in known and (not kinds or members.kind in kinds)
        ]
        asks = not kinds and name not in IMAGE_SETS and not self.file(name, QUESTIONS).exists()
        tunes = list(dict.fromkeys(tune for members in sets for tune in tunes_of(members)))
        ready: set[str] = set()

        def add(found: dict[str, Any]) -> None:
            write(self.file(name), self.read(name) | found)

        def answer(found: dict[str, Any]) -> None:
            write(self.file(name, QUESTIONS), found)

        def tune_all(base: str) -> None:
            for tune in tunes:
                self.submit(Job(name, tune.name, made, make, tune))
            made(base)

        def made(done: str) -> None:
            ready.add(done)
            for members in [m for m in sets if {t.name for t in tunes_of(m)} <= ready]:
                sets.remove(members)
                self.submit(Job(name, members.name, add, score_one, members))
            if asks and len(ready) > len(tunes):
                self.submit(Job(name, "questions", answer, ask))

        if sets or asks:
            self.submit(Job(name, "base", tune_all, make))

    def submit(self, job: Job) -> None:
        """Have something done, in its turn."""
        self.waiting.append(job)
        self.waiting.sort(key=lambda job: (self.worlds.index(job.world), job.work is make))

    def finished(self) -> Iterable[str]:
        """The jobs that are done, as they are; none begins after the deadline."""
        while True:
            while self.waiting and len(self.running) < self.processes and self.has_time:
                job = self.waiting.pop(0)
                begun = self.pool.submit(job.work, job.world, *self.shared, job.what)
                self.running[begun] = job
            if not self.running:
                return
            for done in wait(self.running, return_when=FIRST_COMPLETED).done:
                job = self.running.pop(done)
                if fault := done.exception():
                    yield f"{job.world}, {job.name} failed: {fault!r}"
                else:
                    job.then(done.result())
                    yield f"{job.world}, {job.name}"

    @property
    def has_time(self) -> bool:
        """Whether more may begin."""
        return time.perf_counter() < self.deadline

    def file(self, world: str, part: str = "sets") -> Path:
        """Where results lie."""
        return self.results / part / f"{world}.json"

    def read(self, world: str) -> dict[str, Any]:
        """The sets that were scored before, by name."""
        file = self.file(world)
        return dict(json.loads(file.read_text())) if file.exists() else {}


def tunes_of(members: ModelSet) -> list[Tune]:
    """The models that a set needs."""
    return [tune for tune in (*members.tunes, members.joint) if tune]


def write(file: Path, document: dict[str, Any]) -> None:
    """One line for each entry, so that versions can be compared."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in document.items()]
    partial = file.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.rename(file)


# ---------------------------------------------------------------- in the processes


@cache
def workshop(world: str, models: Path, device: str, threads: int) -> Workshop:
    """Where a world's models are made."""
    torch.set_num_threads(threads)
    return (Releases if world in IMAGE_SETS else Workshop)(ALL[world], models, device)


def make(world: str, models: Path, device: str, threads: int, tune: Tune | None) -> str:
    """Make a model, or the base."""
    shop = workshop(world, models, device, threads)
    if tune is None:
        shop.base()
        return "base"
    shop.make(tune)
    return tune.name


def ask(world: str, models: Path, device: str, threads: int, _: None) -> dict[str, Any]:
    """Answer the questions."""
    return answer_all(workshop(world, models, device, threads))


def score_one(
    world: str, models: Path, device: str, threads: int, members: ModelSet
) -> dict[str, Any]:
    """Score a set; what is large is kept beside the models."""
    shop = workshop(world, models, device, threads)
    found, items = score_set(shop, members)
    analysis = dare.analyze(
        str(shop.file("base-0")),
        [str(shop.file(tune.name)) for tune in members.tunes],
        verbose=False,
        threads=threads,
    )
    name = members.name.replace(", ", "-").replace(" ", "_")
    np.savez_compressed(shop.folder / f"{name}.items.npz", **items)
    document = analysis.to_json().replace(f"{shop.folder}/", "")
    (shop.folder / f"{name}.analysis.json.gz").write_bytes(gzip.compress(document.encode()))
    return {members.name: found}


if __name__ == "__main__":
    main()
