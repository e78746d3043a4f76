"""A merge on a cluster: slices that nodes make, and write into the same partial output.

A task makes one slice. It returns the records of its chunks when they are on the disk, so what was
journaled needs no second look, and what a dead machine has not synced is written again by the next.
What stages must know of whole models is looked up by tasks before, and concluded by the driver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import InputError, OutputError, RecipeError
from dare.inputs.formats import open_inputs
from dare.inputs.reading import read_stored
from dare.inputs.sources import Source
from dare.output.journal import Record
from dare.output.manifest import fingerprint
from dare.output.writer import OutputFiles, PartialOutput, explaining
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.planning.slices import MOST_SLICES, Division, Share
from dare.recipe.schema import Recipe
from dare.run.execute import do_census_steps, execute
from dare.run.graph import Conclude, Id, Look, Step, list_census_steps
from dare.run.ray import Cluster, Do, connect
from dare.run.worker import Progress
from dare.stages.methods import load_installed_stages, load_stages
from dare.stores.locations import StorePath
from dare.tensors.chunks import chunk_count, chunk_span
from dare.tensors.digest import bytes_digest

SLICES_PER_NODE, SLICES_PER_TASK = 16, 8
"""How many slices there are at least, for each node and for each task that runs at once."""
SLICE_BYTES = 1 << 30
"""What a slice reads and writes at the most, unless there would be too many."""
SAMPLES = 3
"""Chunks of each input whose digests are compared: the first, the last, and some between."""


# ---------------------------------------------------------------- the same inputs


Sample = dict[str, str]
"""Digests of an input's headers, by an empty name, and of some of its chunks, by tensor."""


def sample_inputs(sources: Sequence[Source]) -> tuple[Sample, ...]:
    """Say what inputs look like here, so that others can say whether they see the same."""
    with ExitStack() as stack:
        return tuple(_sample(stack.enter_context(source)) for source in sources)


def check_inputs(recipe: Recipe, sources: Sequence[Source], samples: Sequence[Sample]) -> None:
    """Refuse inputs that do not look like the driver's."""
    files = (recipe.base, *(entry.file for entry in recipe.models))
    for file, found, sample in zip(files, sample_inputs(sources), samples, strict=True):
        if differing := [name for name in sample if found.get(name) != sample[name]]:
            raise InputError(
                f"{file}: is another file here than where the work was started: "
                f"{differing[0] or 'its header'} differs; every node must see the same inputs"
            )


def _sample(source: Source) -> Sample:
    names = [name for name, info in source.tensors.items() if info.elements]
    last = max(len(names) - 1, 0)
    places = {last * part // (SAMPLES - 1) for part in range(SAMPLES)}
    sample = {"": bytes_digest(repr(source.fingerprint()).encode())}
    for name in (names[place] for place in sorted(places) if names):
        info = source.tensors[name]
        start, count = chunk_span(chunk_count(info.elements) - 1, info.elements)
        room = np.empty(count * info.dtype.itemsize, np.uint8)
        sample[name] = bytes_digest(read_stored(source, name, start, count, room).data)
    return sample


def portable_recipe(recipe: Recipe, memory: int) -> Recipe:
    """The recipe for tasks: one thread, so much memory, and what lies here named from the root."""

    def absolute(path: Path) -> Path:
        is_here = not isinstance(path, StorePath) and path.exists()
        return path.absolute() if is_here else path  # else it is in a store, or on the hub

    output = None if recipe.output is None else recipe.output.absolute()
    files = [absolute(entry.file) for entry in recipe.models]
    circumstances = {"cluster": None, "threads": 1, "max_memory": memory, "verbose": False}
    there = recipe.with_files(absolute(recipe.base), files, output)
    return there.model_copy(update=circumstances)


# ---------------------------------------------------------------- the merge


@dataclass(frozen=True)
class MergeJob:
    """A merge under way; a piece is a share of its chunks, or some looks."""

    recipe: Recipe
    backend: str
    stage_files: tuple[str, ...]
    fingerprint: str
    inputs: tuple[Sample, ...]
    folder: Path
    """Of the partial output."""
    metadata: Mapping[str, str]
    """Of its files, which decides where their tensors begin."""
    fetches: bool = True
    """Whether models on the hub are fetched, or read from there."""

    @classmethod
    def of(cls, plan: Plan, folder: Path, metadata: Mapping[str, str], memory: int) -> MergeJob:
        """Describe a plan to others."""
        files = (file for source in (plan.base, *plan.models) for file in source.files)
        return cls(
            portable_recipe(plan.recipe, memory),
            plan.backend,
            tuple(dict.fromkeys(stage.file for stage in plan.stages if stage.file)),
            fingerprint(plan),
            sample_inputs((plan.base, *plan.models)),
            folder.absolute(),
            metadata,
            fetches=not any(isinstance(file, StorePath) for file in files),
        )

    def open(self, stack: ExitStack) -> Do:
        """Open the inputs and make the plan; refuse others than the driver has."""
        load_installed_stages()
        for file in self.stage_files:
            load_stages(file)
        recipe, inputs = open_inputs(self.recipe, rescales=False, fetches=self.fetches)
        plan = make_plan(
            recipe, inputs.base, inputs.models, inputs.names, inputs.notes, backend=self.backend
        )
        for source in (plan.base, *plan.models):
            stack.enter_context(source)
        check_inputs(recipe, (plan.base, *plan.models), self.inputs)
        if fingerprint(plan) != self.fingerprint:
            raise InputError(
                f"{self.recipe.output}: the plan is another one here; every node must see the same "
                "inputs with the same configurations"
            )
        files = self.files(plan)
        is_sent = plan.layout is not None and plan.layout.is_sent

        def do(piece: Share | Sequence[Look], known: Mapping[Id, Any]) -> tuple[Any, int]:
            read: list[int] = []
            if not isinstance(piece, Mapping):
                return do_census_steps(plan, piece, known, progress=read.append), sum(read)
            with explaining(self.folder, resumable=True):
                files.join({files.places[name][0] for name in piece})
                if not is_sent:
                    files.reserve()
            try:
                records = execute(plan, files, progress=read.append, known=known, share=piece)
                with explaining(self.folder, resumable=True):
                    files.sync()
            finally:
                files.close()
            return records, sum(read)

        return do

    def files(self, plan: Plan) -> OutputFiles:
        """The files of the partial output, as this process sees them."""
        assert plan.layout is not None  # a merge in memory has no job
        return OutputFiles(self.folder, plan.layout, self.metadata)


def check_for_cluster(plan: Plan) -> None:
    """Refuse what nodes cannot do together, before anything is written."""
    recipe = plan.recipe
    is_sent = plan.layout is not None and plan.layout.is_sent
    if recipe.cluster is not None and is_sent and recipe.scratch is None:
        raise RecipeError(
            f'cluster = "{recipe.cluster}": {recipe.output} is in a store; name a folder that all '
            "nodes see with --scratch FOLDER, or leave cluster out"
        )


def execute_on_cluster(
    plan: Plan,
    output: PartialOutput,
    metadata: Mapping[str, str],
    *,
    done: Sequence[Record] = (),
    progress: Progress = lambda _nbytes: None,
    announce: Callable[[str], None] = lambda _text: None,
) -> list[Record]:
    """Have a cluster merge what is not `done` yet; return the records of all chunks."""
    recipe, cost = plan.recipe, plan.cost
    assert recipe.cluster is not None
    announce(f"merging on the cluster {recipe.cluster}")
    records = list(done)
    with connect(recipe.cluster, verbose=recipe.verbose) as cluster:
        tasks = cluster.share_out(
            cost.least_memory, cost.max_memory, recipe.max_memory, recipe.threads
        )
        division = Division(plan, _count_slices(plan, len(cluster.processors()), tasks))
        job = MergeJob.of(plan, output.folder, metadata, cluster.task_memory)
        left = list(_shares_left(division, done))
        known = _conclude(plan, division, job, cluster, progress) if left else {}
        files, arriving = job.files(plan), set[tuple[str, str]]()
        for node, made, nbytes in cluster.run(job, left, known):
            if node not in arriving:
                _check_arrival(node[1], files, made[0])
                arriving.add(node)
            output.record(made)
            records += made
            progress(nbytes)
    for source in (plan.base, *plan.models):
        with source:  # which refuses one that has changed
            pass
    return records


def _count_slices(plan: Plan, nodes: int, tasks: int) -> int:
    chunks = sum(tensor.chunks for tensor in plan.tensors)
    nbytes = plan.cost.bytes_read + plan.cost.bytes_written
    wanted = max(SLICES_PER_NODE * nodes, SLICES_PER_TASK * tasks, nbytes // SLICE_BYTES)
    return max(1, min(wanted, chunks, MOST_SLICES))


def _conclude(
    plan: Plan, division: Division, job: MergeJob, cluster: Cluster, progress: Progress
) -> dict[Id, Any]:
    """Have tasks look at the tensors of whole models; conclude from that, round by round."""
    known: dict[Id, Any] = {}
    looks: dict[int, list[Step]] = defaultdict(list)
    for step in list_census_steps(plan):
        if isinstance(step, Look):
            looks[division.owner(step.tensor)].append(step)
        elif isinstance(step, Conclude):
            found = dict(known)
            for _, results, nbytes in cluster.run(job, list(looks.values()), known):
                found |= results
                progress(nbytes)
            known |= do_census_steps(plan, [step], found)
            looks.clear()
    return known


def _shares_left(division: Division, done: Sequence[Record]) -> Iterator[Share]:
    """What the slices have to do, without the chunks that are done."""
    finished = {(record.tensor, record.chunk) for record in done}
    for share in division.shares():
        left = {n: [chunk for chunk in of if (n, chunk) not in finished] for n, of in share.items()}
        if left := {name: chunks for name, chunks in left.items() if chunks}:
            yield left


def _check_arrival(node: str, files: OutputFiles, record: Record) -> None:
    """Refuse a node that writes into another folder of the same name."""
    file, info = files.places[record.tensor]
    start, count = (n * info.dtype.itemsize for n in chunk_span(record.chunk, info.elements))
    with explaining(files.folder, resumable=True):
        files.join([file])
        found = files.read(record.tensor, start, count)
        files.close()
    if bytes_digest(found) != record.output:
        raise OutputError(
            f"node {node}: {files.folder}: is another folder there: what is written does not "
            "arrive here; every node must see the same file system"
        )
