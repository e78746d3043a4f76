"""A merge that nodes share: what each opens for itself and compares with what the driver sees."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dare import kernels
from dare.errors import InputError, OutputError
from dare.inputs.opening import open_inputs
from dare.inputs.reading import read_stored
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread
from dare.output.fingerprint import fingerprint
from dare.output.journal import Record
from dare.output.writer import OutputFiles, PartialOutput, explaining
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe
from dare.run.backend import Backend
from dare.run.cluster import BATCH_BYTES, Settings, run_on_cluster
from dare.run.graph import Copy, Merge, Step, list_steps
from dare.run.node import bundle
from dare.run.schedule import Batch
from dare.run.worker import Worker
from dare.stages.outside import load_installed_stages, load_stages
from dare.tensors.chunks import chunk_count, chunk_span
from dare.tensors.digest import bytes_digest

SAMPLES = 3
"""Chunks of each input whose digests are compared: the first, the last, and some between."""


MARK = "node-"
"""How the files are called that nodes leave in the partial output, to be found by the driver."""


@dataclass(frozen=True)
class Sighting:
    """What an input looks like: its headers, and some of its chunks."""

    file: str
    headers: str
    """A digest of what they say."""
    chunks: Mapping[tuple[str, int], str]
    """Digests by tensor and chunk."""

    def check(self, source: Source) -> None:
        """Refuse an input that does not look like this one."""
        if _headers(source) != self.headers:
            raise InputError(
                f"{self.file}: is another file here than where the merge was started: its headers "
                "differ; every node must see the same inputs"
            )
        for (name, chunk), expected in self.chunks.items():
            if (digest := _digest(source, name, chunk)) != expected:
                raise InputError(
                    f"{self.file}: is another file here than where the merge was started: "
                    f"{name} differs (digest {digest}, there {expected}); "
                    "every node must see the same inputs"
                )


def look_at(file: str | Path, source: Source) -> Sighting:
    """See what an input looks like here; it must be open."""
    names = [name for name, info in source.tensors.items() if info.elements]
    last = max(len(names) - 1, 0)
    places = {last * part // max(SAMPLES - 1, 1) for part in range(SAMPLES)}
    chunks = {}
    for name in (names[place] for place in sorted(places) if names):
        chunk = chunk_count(source.tensors[name].elements) - 1
        chunks[name, chunk] = _digest(source, name, chunk)
    return Sighting(str(file), _headers(source), chunks)


def _headers(source: Source) -> str:
    return bytes_digest(repr(source.fingerprint()).encode())


def _digest(source: Source, name: str, chunk: int) -> str:
    info = source.tensors[name]
    start, count = chunk_span(chunk, info.elements)
    raw = read_stored(source, name, start, count, np.empty(count * info.dtype.itemsize, np.uint8))
    return bytes_digest(raw.data)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe for another process: what lies here is named from the root on."""

    def absolute(path: Path) -> Path:
        return path.absolute() if path.exists() else path  # else it is a name on the hub

    output = None if recipe.output is None else recipe.output.absolute()
    return recipe.with_files(
        absolute(recipe.base), [absolute(entry.file) for entry in recipe.models], output
    )


@dataclass(frozen=True)
class MergeJob:
    """A merge under way, for nodes that write into the same partial output."""

    recipe: Recipe
    backend: str
    stage_files: tuple[str, ...]
    fingerprint: str
    inputs: tuple[Sighting, ...]
    folder: Path
    """Of the partial output."""
    metadata: Mapping[str, str]
    """Of its files, which decides where their tensors begin."""

    @classmethod
    def of(cls, plan: Plan, folder: Path, metadata: Mapping[str, str]) -> MergeJob:
        """Describe a plan to others."""
        files = (plan.recipe.base, *(entry.file for entry in plan.recipe.models))
        sightings = []
        for file, source in zip(files, (plan.base, *plan.models), strict=True):
            with source:
                sightings.append(look_at(file, source))
        return cls(
            with_absolute_paths(plan.recipe),
            plan.backend,
            tuple(dict.fromkeys(stage.file for stage in plan.stages if stage.file)),
            fingerprint(plan),
            tuple(sightings),
            folder.absolute(),
            metadata,
        )

    def open(self, threads: int) -> OpenedMerge:
        """Open inputs and output, make the plan, and compare."""
        load_installed_stages()
        for file in self.stage_files:
            load_stages(file)
        here = self.recipe.model_copy(update={"threads": threads, "verbose": False})
        recipe, inputs = open_inputs(here, rescales=False)
        plan = make_plan(
            recipe, inputs.base, inputs.models, inputs.names, inputs.notes, backend=self.backend
        )
        return OpenedMerge(self, plan)

    def confirm(self, mark: str) -> None:
        """Find what a node has written, and take it away."""
        path = self.folder / mark
        try:
            found = path.read_text()
            path.unlink()
        except OSError:
            found = ""
        if found != mark:
            raise OutputError(
                f"{self.folder}: is another folder there: what is written does not arrive here; "
                "every node must see the same file system"
            )

    def clear_up(self) -> None:
        """Take away the marks of nodes that died before they were confirmed."""
        for path in self.folder.glob(f"{MARK}*"):
            path.unlink()


class OpenedMerge:
    """A merge as one node has it open."""

    def __init__(self, job: MergeJob, plan: Plan) -> None:
        self._plan = plan
        self._stack = ExitStack()
        if plan.cost.matrix_bytes:
            self._stack.enter_context(one_blas_thread())
        for source, sighting in zip((plan.base, *plan.models), job.inputs, strict=True):
            self._stack.enter_context(source)
            sighting.check(source)
        if fingerprint(plan) != job.fingerprint:
            raise InputError(
                f"{job.recipe.output}: the plan is another one here than where the merge was "
                "started; every node must see the same inputs with the same configurations"
            )
        assert plan.layout is not None  # a merge in memory has no job
        self._files = OutputFiles(job.folder, plan.layout, job.metadata)
        with explaining(job.folder):
            self._files.join()
            self.mark = MARK + secrets.token_hex(8)
            (job.folder / self.mark).write_text(self.mark)
        kernels.load(plan.backend)

    @property
    def threads(self) -> int:
        return self._plan.cost.threads

    def make_worker(self, progress: Callable[[int], None]) -> Worker:
        return Worker(
            self._plan, Backend(self._plan), self._files, progress, stop=threading.Event()
        )

    def finish(self) -> None:
        with explaining(self._files.folder):
            for file in self._files.opened.values():
                file.sync()
        for source in (self._plan.base, *self._plan.models):
            source.check_unchanged()


def execute_on_cluster(
    plan: Plan,
    output: PartialOutput,
    metadata: Mapping[str, str],
    *,
    done: Sequence[Record] = (),
    progress: Callable[[int], None] = lambda _nbytes: None,
    announce: Callable[[str], None] = lambda _text: None,
) -> list[Record]:
    """Have the nodes of a cluster merge what is not `done` yet; return the records of all chunks.

    What a node has handed in before it died is read back from the disk, and done again if it is
    not there.
    """
    recipe = plan.recipe
    assert recipe.cluster is not None
    job = MergeJob.of(plan, output.folder, metadata)
    settings = Settings(
        recipe.cluster,
        recipe.threads,
        BATCH_BYTES // ((1 + len(plan.models)) * plan.cost.widest),
        recipe.cluster_log,
        announce,
    )
    records = {(record.tensor, record.chunk): record for record in done}

    def collect(steps: Sequence[Step], results: Sequence[Any]) -> None:
        pairs = zip(steps, results, strict=True)
        if made := [result for step, result in pairs if isinstance(step, Merge | Copy)]:
            output.record(made)
            records.update({(record.tensor, record.chunk): record for record in made})

    def conclude(batch: Batch[Step]) -> list[Any]:
        worker = Worker(plan, Backend(plan), output, progress, threading.Event())
        return list(worker.run_batch(batch))

    announce(f"merging on the cluster {recipe.cluster}")
    try:
        while steps := list_steps(plan, records):
            if plan.cost.matrix_bytes:  # what surveys leave of a tensor stays where it was made
                steps = bundle(steps, lambda step: step.group or None)
            doubtful = run_on_cluster(
                job, steps, settings, collect=collect, progress=progress, conclude=conclude
            )
            written = [result for _, result in doubtful if isinstance(result, Record)]
            lost = set(written) - set(output.intact(written))
            for record in lost:
                del records[record.tensor, record.chunk]
    finally:
        job.clear_up()
    for source in (plan.base, *plan.models):
        with source:  # which refuses one that has changed
            pass
    return list(records.values())
