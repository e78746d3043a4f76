"""What a merge would take on clusters that nobody has at hand: the real plan, simulated.

Two made-up models are described by their headers alone: one like a dense model of 405 billion
parameters, and a mixture of experts of a trillion. Their merge with four fine-tunes is planned,
listed as steps and handed out in batches by the code that a cluster runs (`make_plan`,
`list_steps`, `Schedule`). What the batches take is reckoned:

- a batch is done by one core, at the rate of a real merge by one thread on this machine, measured
  here, unless its share of the node's network or of the storage is slower (processor time is
  counted, so that a busy machine does not spoil it);
- the driver serves one batch after the other: taking, pickling, handing in and journalling is
  measured here, and what Ray itself takes for a call is given (--call-ms);
- a node has a few more batches than cores under way, as on the real thing.

Some nodes may be slow (stragglers), die and give their batches back, or join. Time and memory of
the driver before the first batch are measured in a process of its own.

    python bench/cluster_model.py                     the tables of docs/cluster-arithmetic.md
    python bench/cluster_model.py --models dense --nodes 64 --batches 16 64 256
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import dare
from dare.inputs.sources import Source
from dare.output.journal import Journal, Record
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe
from dare.run.graph import Merge, Step, list_steps
from dare.run.schedule import Batch, Schedule
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

MODELS = 4
BF16 = STORAGE_TYPES["BF16"]
BYTES_READ = 2 * (1 + MODELS)
"""For each element: the base's and the models'."""
BYTES_WRITTEN = 2
DIGEST = "0123456789abcdef" * 2
SAMPLED = 60_000
"""Steps whose cost to the driver is measured; that of all is reckoned from it."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


# ---------------------------------------------------------------- models without weights


def dense() -> Shapes:
    """126 layers of width 16384: 405.9 billion parameters."""
    hidden, inner, vocabulary = 16384, 53248, 128256
    matrices = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (8 * 128, hidden)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)),
        "mlp.down_proj": (hidden, inner),
    }
    yield from _frame(hidden, vocabulary)
    for layer in range(126):
        yield from _layer(layer, hidden, matrices)


def experts() -> Shapes:
    """61 layers with 384 experts and a shared one in each: 1046.7 billion parameters."""
    hidden, inner, vocabulary, heads = 7168, 2048, 163840, 64
    matrices = {
        "self_attn.q_proj": (heads * 192, hidden),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (8 * 128, hidden)),
        "self_attn.o_proj": (hidden, heads * 128),
        "mlp.gate": (384, hidden),
    }
    for expert in (*(f"mlp.experts.{number}" for number in range(384)), "mlp.shared_experts"):
        matrices |= dict.fromkeys((f"{expert}.gate_proj", f"{expert}.up_proj"), (inner, hidden))
        matrices[f"{expert}.down_proj"] = (hidden, inner)
    yield from _frame(hidden, vocabulary)
    for layer in range(61):
        yield from _layer(layer, hidden, matrices)


def _frame(hidden: int, vocabulary: int) -> Shapes:
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "lm_head.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)


def _layer(layer: int, hidden: int, matrices: dict[str, tuple[int, ...]]) -> Shapes:
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    for name, shape in {**matrices, **norms}.items():
        yield f"model.layers.{layer}.{name}.weight", shape


LAYOUTS = {"dense": dense, "experts": experts}
TITLES = {"dense": "405 B", "experts": "1 T"}


class Described(Source):
    """A model of which there are only names, types and shapes."""

    def __init__(self, shapes: Shapes) -> None:
        self.tensors = {}
        self.files = ()
        start = 0
        for name, shape in shapes:
            self.tensors[name] = TensorInfo(name, BF16, shape, start)
            start += self.tensors[name].nbytes


def plan_of(layout: str, method: str) -> Plan:
    """The plan of merging four models of a layout."""
    sources = [Described(LAYOUTS[layout]()) for _ in range(1 + MODELS)]
    names = [f"model{number}" for number in range(MODELS)]
    recipe = Recipe(base="base", models=names, output="out", method=method, shard_size="5GB")
    return make_plan(recipe, sources[0], sources[1:], names)


# ---------------------------------------------------------------- what is measured


def measure_core(method: str) -> float:
    """Elements that one thread merges in a second of processor time: four models, cached files."""
    generator = np.random.default_rng(0)
    elements = 48 * CHUNK
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number in range(1 + MODELS):
            bits = generator.integers(0x3C00, 0x3C80, elements, np.uint16)
            header = {"w": {"dtype": "BF16", "shape": [elements // 4096, 4096]}}
            header["w"]["data_offsets"] = [0, 2 * elements]
            text = json.dumps(header).encode()
            files.append(Path(folder) / f"{number}.safetensors")
            files[-1].write_bytes(len(text).to_bytes(8, "little") + text + bits.tobytes())
        seconds = []
        for number in range(3):  # the first one compiles
            recipe = Recipe(
                base=files[0],
                models=files[1:],
                output=Path(folder) / f"out{number}.safetensors",
                method=method,
                threads=1,
                verbose=False,
            )
            started = time.process_time()
            dare.merge(recipe)
            seconds.append(time.process_time() - started)
        return elements / min(seconds[1:])


def record_of(step: Step) -> Record:
    """What a node would return for a step."""
    assert isinstance(step, Merge)
    digests = tuple(f"{step.chunk:08x}{place}{DIGEST[9:]}" for place in range(1 + MODELS))
    figures = ((985137152, 0, 302),) * MODELS
    return Record(step.tensor, step.chunk, digests, digests[0], figures, (0, 0))


def resident_bytes() -> int:
    """What the process has in memory now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_driver(layout: str, method: str) -> dict[str, float]:
    """Time and memory of the driver: before the first batch, for each step, and at the end."""
    found: dict[str, float] = {}
    last = time.process_time()

    def lap(name: str) -> None:
        nonlocal last
        found[f"{name}_s"] = time.process_time() - last
        found[f"{name}_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        last = time.process_time()

    plan = plan_of(layout, method)
    lap("plan")
    steps = list_steps(plan)
    lap("steps")
    found["steps"] = len(steps)
    schedule = Schedule(steps)
    lap("schedule")
    found["job_mb"] = len(pickle.dumps(plan)) / 1e6
    lap("pickling")
    if not all(isinstance(step, Merge) for step in steps):
        return found
    before = resident_bytes()
    limit = (64 << 20) // BYTES_READ
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal", DIGEST)
        journal.start()
        at_nodes = 0.0
        while len(records) < SAMPLED and (batch := schedule.take_now(limit)) is not None:
            pickle.dumps(batch)
            started = time.process_time()
            results = pickle.dumps([record_of(step) for step in batch.steps])
            at_nodes += time.process_time() - started
            taken = pickle.loads(results)
            schedule.hand_in(batch, taken)
            journal.add(taken)
            records += taken
        journal.close()
        lap("batches")
        found["batches_s"] -= at_nodes
        found["journal_mb"] = (Path(folder) / "journal").stat().st_size / 1e6
        found["record_bytes"] = (resident_bytes() - before) / len(records)
        read = Journal(Path(folder) / "journal", DIGEST)
        read.read()
        read.close()
        lap("reading")
    share = len(steps) / len(records)
    for figure in ("batches_s", "reading_s", "journal_mb"):
        found[figure] *= share
    found["end_mb"] = (before + found["record_bytes"] * len(steps)) / 1e6
    return found


# ---------------------------------------------------------------- the simulation


@dataclass(frozen=True)
class Cluster:
    """What there is, and what goes wrong with it."""

    nodes: int
    cores: int = 32
    network: float = 25e9 / 8
    """Bytes per second of one node, in each direction."""
    storage_reads: float = 100e9
    """Bytes per second of all nodes together."""
    storage_writes: float = 50e9
    core_rate: float = 1e8
    """Elements per second."""
    driver_step: float = 0.0
    """Seconds of the driver for a step."""
    driver_batch: float = 0.0
    """Seconds of the driver for a batch, its steps apart."""
    waiting: int = 2
    """Batches at a node beyond its cores."""
    noticing: float = 15.0
    """Seconds until the driver knows that a node is dead."""
    slow_share: float = 0.0
    slowness: float = 4.0
    """Times as long as on others."""
    lost_share: float = 0.0
    replaced_after: float | None = None
    """Seconds until another joins for one that is dead."""

    def limits(self, nodes: int) -> dict[str, float]:
        """Elements per second that each part allows one core of so many nodes."""
        threads = nodes * self.cores
        return {
            "cores": self.core_rate,
            "network": self.network / self.cores / BYTES_READ,
            "storage, reading": self.storage_reads / threads / BYTES_READ,
            "storage, writing": self.storage_writes / threads / BYTES_WRITTEN,
        }

    def count(self, share: float) -> int:
        """So many nodes are a share: at least one, unless it is none."""
        return max(1, round(share * self.nodes)) if share else 0


@dataclass
class Node:
    """A node at work."""

    speed: float
    running: dict[int, Batch[Step]] = field(default_factory=dict)
    queue: list[Batch[Step]] = field(default_factory=list)
    asked: int = 0
    """Batches that it waits for."""
    is_alive: bool = True


class Simulation:
    """Events in order of time, until the schedule is done."""

    def __init__(
        self, steps: Sequence[Step], cluster: Cluster, limit: int, expected: float, seed: int = 0
    ) -> None:
        self.cluster = cluster
        self.schedule = Schedule(steps, takers=cluster.nodes * cluster.cores)
        self.limit = limit
        self.now = self.driver_free = self.driver_busy = 0.0
        self.batches = self.done_again = 0
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, str, Node, Any]] = []
        self._count = 0
        self._alive = cluster.nodes
        self._is_dry = False
        """Whether all steps are taken, as far as is known."""
        self.nodes = [Node(1.0) for _ in range(cluster.nodes)]
        order = self._random.sample(self.nodes, len(self.nodes))
        slow = cluster.count(cluster.slow_share)
        for node in order[:slow]:
            node.speed = 1 / cluster.slowness
        for node in order[slow : slow + cluster.count(cluster.lost_share)]:
            self._at(self._random.uniform(0, expected), "dies", node)

    def run(self) -> float:
        """Seconds until everything is done."""
        for node in self.nodes:
            self._ask(node)
        while not self.schedule.is_done:
            self.now, _, what, node, more = heapq.heappop(self._events)
            getattr(self, f"_{what}")(node, more)
        return self.now

    def _at(self, when: float, what: str, node: Node, more: Any = None) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what, node, more))

    def _ask(self, node: Node, done: Batch[Step] | None = None) -> None:
        """Let the driver take in a batch and hand out as many as there is room for."""
        if done is not None:
            self._serve(len(done.steps) * self.cluster.driver_step)
            self._at(self.driver_free, "handed_in", node, done)
        room = self.cluster.cores + self.cluster.waiting
        room -= len(node.running) + len(node.queue) + node.asked
        for _ in range(0 if self._is_dry else room):
            self._serve(self.cluster.driver_batch)
            node.asked += 1
            self._at(self.driver_free, "offered", node)

    def _serve(self, seconds: float) -> None:
        self.driver_free = max(self.driver_free, self.now) + seconds
        self.driver_busy += seconds

    def _handed_in(self, _node: Node, batch: Batch[Step]) -> None:
        self.schedule.hand_in(batch, [None] * len(batch.steps))

    def _offered(self, node: Node, _more: None) -> None:
        node.asked -= 1
        batch = self.schedule.take_now(self.limit) if node.is_alive else None
        self._is_dry = batch is None and node.is_alive
        if batch is not None:
            self.batches += 1
            node.queue.append(batch)
            self._start(node)

    def _start(self, node: Node) -> None:
        while node.queue and len(node.running) < self.cluster.cores:
            batch = node.queue.pop(0)
            elements = sum(step.elements for step in batch.steps)
            rate = min(self.cluster.limits(self._alive).values()) * node.speed
            seconds = elements / rate * self._random.uniform(0.9, 1.1)
            node.running[batch.places[0]] = batch
            self._at(self.now + seconds, "ends", node, batch)

    def _ends(self, node: Node, batch: Batch[Step]) -> None:
        if node.is_alive:
            del node.running[batch.places[0]]
            self._start(node)
            self._ask(node, batch)

    def _dies(self, node: Node, _more: None) -> None:
        node.is_alive = False
        self._alive -= 1
        self._at(self.now + self.cluster.noticing, "noticed", node)

    def _noticed(self, node: Node, _more: None) -> None:
        lost = [*node.running.values(), *node.queue]
        for batch in lost:
            self.schedule.give_back(batch)
        self.done_again += len(lost)
        self._is_dry = False
        self.schedule.takers = self._alive * self.cluster.cores
        for other in self.nodes:
            if other.is_alive:
                self._ask(other)
        if self.cluster.replaced_after is not None:
            self._at(self.now + self.cluster.replaced_after, "joins", Node(1.0))

    def _joins(self, node: Node, _more: None) -> None:
        self._alive += 1
        self.nodes.append(node)
        self._ask(node)


@dataclass(frozen=True)
class Outcome:
    """How long it took, and what held it up."""

    seconds: float
    batches: int
    limit: str
    driver_share: float
    done_again: int


def simulate(steps: Sequence[Step], cluster: Cluster, batch_mib: int) -> Outcome:
    """Run the simulation, and say what limits."""
    elements = sum(step.elements for step in steps)
    limits = cluster.limits(cluster.nodes)
    slowest = min(limits, key=limits.__getitem__)
    expected = elements / limits[slowest] / cluster.nodes / cluster.cores
    simulation = Simulation(steps, cluster, (batch_mib << 20) // BYTES_READ, expected)
    seconds = simulation.run()
    driver = simulation.driver_busy / seconds
    limit = "driver" if driver > 0.95 else slowest
    return Outcome(seconds, simulation.batches, limit, driver, simulation.done_again)


# ---------------------------------------------------------------- tables


def show_time(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table in Markdown."""
    print(f"| {' | '.join(head)} |")
    print("|" + "---|" * len(head))
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    print()


def driver_in_process(layout: str, method: str) -> dict[str, float]:
    """The driver's figures, from a process that has done nothing else."""
    command = [sys.executable, __file__, "--driver", layout, "--method", method]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def show_driver(layouts: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, float]]:
    """The table of the driver's time and memory; return the figures of the first method."""
    figures = {
        (name, method): driver_in_process(name, method) for name in layouts for method in methods
    }

    def row(name: str, method: str) -> Iterator[str]:
        found = figures[name, method]
        yield from (TITLES[name], method, f"{found['steps']:,.0f}")
        for lap in ("plan", "steps", "schedule", "pickling"):
            yield f"{found[f'{lap}_s']:.1f} s"
        yield f"{found['job_mb']:.1f} MB"
        yield f"{found['schedule_mb']:,.0f} MB"
        for lap in ("batches", "reading"):
            yield f"{found[f'{lap}_s']:.1f} s" if f"{lap}_s" in found else "–"
        yield f"{found['journal_mb']:,.0f} MB" if "journal_mb" in found else "–"
        yield f"{found['end_mb']:,.0f} MB" if "end_mb" in found else "–"

    head = ["model", "method", "steps", "plan", "list steps", "schedule", "pickle the job"]
    head += ["job", "memory then", "all batches", "reading the journal"]
    table([*head, "journal", "memory at the end"], (row(*key) for key in figures))
    return {name: figures[name, methods[0]] for name in layouts}


TROUBLES: dict[str, dict[str, Any]] = {
    "5 % slow": {"slow_share": 0.05},
    "and 5 % lost": {"slow_share": 0.05, "lost_share": 0.05, "replaced_after": 60.0},
}


def show_bounds(layout: str, clusters: Sequence[Cluster], batches: Sequence[int]) -> None:
    """The table of one model without a simulation: what each part would take by itself."""
    elements = [math.prod(shape) for _, shape in LAYOUTS[layout]()]
    total, chunks = sum(elements), sum(-(-count // CHUNK) for count in elements)
    read, written = total * BYTES_READ / 1e12, total * BYTES_WRITTEN / 1e12
    print(
        f"**{TITLES[layout]}**: reads {read:.2f} TB, writes {written:.2f} TB, {chunks:,} chunks\n"
    )

    def rows() -> Iterator[list[str]]:
        for cluster in clusters:
            threads = cluster.nodes * cluster.cores
            times = [total / rate / threads for rate in cluster.limits(cluster.nodes).values()]
            for mib in batches:
                count = -(-total * BYTES_READ // (mib << 20))
                times.append(count * cluster.driver_batch + chunks * cluster.driver_step)
            yield [str(cluster.nodes), *map(show_time, times)]

    parts = [*clusters[0].limits(1), *(f"driver, {mib} MiB" for mib in batches)]
    table(["nodes", *parts], rows())


def show_cluster(
    layout: str, clusters: Sequence[Cluster], batches: Sequence[int], method: str
) -> None:
    """The table of one model: nodes by batches, with everything that goes wrong."""
    steps = list_steps(plan_of(layout, method))

    def rows() -> Iterator[list[str]]:
        for cluster in clusters:
            for mib in batches:
                even = simulate(steps, cluster, mib)
                troubled = [
                    simulate(steps, replace(cluster, **trouble), mib)
                    for trouble in TROUBLES.values()
                ]
                yield [
                    str(cluster.nodes),
                    f"{mib} MiB",
                    f"{even.batches:,}",
                    show_time(even.seconds),
                    even.limit,
                    f"{even.driver_share:.0%}",
                    *(f"{other.seconds / even.seconds - 1:+.0%}" for other in troubled),
                ]

    head = ["nodes", "batch", "batches", "time", "limit", "driver busy", *TROUBLES]
    print(f"**{TITLES[layout]}, {method}**\n")
    table(head, rows())


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64, 256], help="MiB")
    parser.add_argument("--cores", type=int, default=32)
    parser.add_argument("--network", type=float, default=25.0, help="Gbit/s of a node")
    parser.add_argument(
        "--storage", type=float, default=100.0, help="GB/s read, half as fast written"
    )
    parser.add_argument("--call-ms", type=float, default=1.3, help="what Ray takes for a batch")
    parser.add_argument("--method", default="dare+linear")
    parser.add_argument("--bounds", action="store_true", help="no simulation")
    parser.add_argument("--core-rate", type=float, help="million elements/s; else measured")
    parser.add_argument("--step-us", type=float, help="of the driver for a step; else measured")
    parser.add_argument("--driver", choices=LAYOUTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver:
        print(json.dumps(measure_driver(given.driver, given.method)))
        return
    rate = given.core_rate * 1e6 if given.core_rate else measure_core(given.method)
    print(
        f"one core: {rate / 1e6:.0f} million elements/s, {rate * BYTES_READ / 1e9:.2f} GB/s read\n"
    )
    drivers = {} if given.step_us else show_driver(given.models, [given.method, "trim+ties"])
    for layout in given.models:
        step = (given.step_us or 0) / 1e6
        if found := drivers.get(layout):
            step = found["batches_s"] / found["steps"]
        print(f"driver: {step * 1e6:.0f} µs for a step, {given.call_ms} ms for a batch\n")
        clusters = [
            Cluster(
                nodes,
                given.cores,
                given.network * 1e9 / 8,
                given.storage * 1e9,
                given.storage * 5e8,
                rate,
                step,
                given.call_ms / 1e3,
            )
            for nodes in given.nodes
        ]
        show_bounds(layout, clusters, given.batches)
        if not given.bounds:
            show_cluster(layout, clusters, given.batches, given.method)


if __name__ == "__main__":
    main()
