"""A merge that nodes share: what each opens for itself and compares with what the driver sees."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dare import kernels
from dare.errors import InputError, OutputError, RecipeError
from dare.inputs.opening import open_inputs
from dare.kernels.linalg import one_blas_thread
from dare.output.journal import Record
from dare.output.manifest import fingerprint
from dare.output.writer import ArraySink, OutputFiles, PartialOutput, explaining
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe
from dare.run.backend import Backend
from dare.run.calibration import sample_plan
from dare.run.cluster import BATCH_BYTES, Settings, run_on_cluster
from dare.run.execute import execute
from dare.run.graph import Copy, Merge, Step, list_steps
from dare.run.node import bundle
from dare.run.schedule import Batch
from dare.run.sightings import Sighting, look_at_all, with_absolute_paths
from dare.run.worker import Worker
from dare.stages.outside import load_installed_stages, load_stages
from dare.stores.locations import StorePath

SAMPLE_SIDE = 16
"""Of the matrix that is merged before the first batch."""
MARK = "node-"
"""How the files are called that nodes leave in the partial output, to be found by the driver."""


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
    fetches: bool = True
    """Whether models on the hub are fetched, or read from there."""

    @classmethod
    def of(cls, plan: Plan, folder: Path, metadata: Mapping[str, str]) -> MergeJob:
        """Describe a plan to others."""
        files = (file for source in (plan.base, *plan.models) for file in source.files)
        return cls(
            with_absolute_paths(plan.recipe),
            plan.backend,
            tuple(dict.fromkeys(stage.file for stage in plan.stages if stage.file)),
            fingerprint(plan),
            look_at_all(plan.recipe, (plan.base, *plan.models)),
            folder.absolute(),
            metadata,
            fetches=not any(isinstance(file, StorePath) for file in files),
        )

    def open(self, threads: int) -> OpenedMerge:
        """Open inputs and output, make the plan, and compare."""
        load_installed_stages()
        for file in self.stage_files:
            load_stages(file)
        here = self.recipe.model_copy(update={"threads": threads, "verbose": False})
        recipe, inputs = open_inputs(here, rescales=False, fetches=self.fetches)
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
            self._files.reserve()
            self.mark = MARK + secrets.token_hex(8)
            (job.folder / self.mark).write_text(self.mark)
        warm_up(plan)

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


def warm_up(plan: Plan) -> None:
    """Merge next to nothing, so that no batch has to wait for kernels to be loaded."""
    kernels.load(plan.backend)
    for tensor in itertools.islice(plan.merged(), 1):
        sample = sample_plan(plan, tensor, (SAMPLE_SIDE, SAMPLE_SIDE))
        execute(sample, ArraySink([replace(sample.tensors[0].base, dtype=tensor.dtype)]))


def check_for_cluster(plan: Plan) -> None:
    """Refuse what nodes cannot do together, before anything is written."""
    target = plan.recipe.output
    if plan.recipe.cluster is not None and isinstance(target, StorePath):
        raise RecipeError(
            f'cluster = "{plan.recipe.cluster}": nodes write to a file system that all of them '
            f"see, and {target} is in a store; merge into a folder and copy that, or leave "
            "cluster out"
        )


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
