"""What a merge of models of 70 billion parameters takes: time, memory, disk and cost.

The plan is made by the program's own code, from headers alone. Rates were measured on models of
0.95 billion (docs/performance.md), and are given below as ranges. What a disk delivers and what a
machine costs is assumed.

    python bench/seventy.py        the tables of docs/70b.md, in seconds
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dare.inputs.sources import Source
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.recipe import Request
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

HIDDEN, INNER, LAYERS, VOCABULARY, KEYS = 8192, 28672, 80, 128256, 1024
OF_LAYER = {
    "self_attn.q_proj self_attn.o_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj self_attn.v_proj": (KEYS, HIDDEN),
    "mlp.gate_proj mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm post_attention_layernorm": (HIDDEN,),
}
"""The shapes of a layer's tensors."""
MODELS = ("math", "code", "chat")
MEASURED_ELEMENTS = 0.95e9
MEASURED_SECONDS = {
    2: {"dare+linear": (2.85, 6.5), "dare+ties": (3.28, 6.7), "trim+ties": (13.5, 42.0)},
    16: {"dare+linear": (1.58, 2.4), "dare+ties": (1.54, 2.19), "trim+ties": (6.79, 8.96)},
}
"""For three models on so many cores: the fastest and the slowest run on x86 machines, with inputs
in memory. Whole processes, less 1 s for starting."""
MAX_MEMORY = {("trim+ties", 16): "5GB"}
"""So that every thread has room for what trim collects of an embedding; others take the default."""
DISKS = {"NVMe": (3.0e9, 1.5e9), "network": (0.3e9, 0.3e9)}
"""Bytes read and written in a second (assumed)."""
CORE_HOUR, DISK_HOUR = 0.05, 0.10
"""Dollars for a core with 4 GB of memory, and for a terabyte of disk, for an hour (assumed)."""


@dataclass(frozen=True)
class Row:
    """A merge on a machine."""

    method: str
    cores: int
    disk: str
    plan: Plan
    low: float
    """Seconds, if reading, computing and writing overlap and the cores are fast."""
    high: float
    """Seconds, if they follow each other and the cores are slow."""

    @property
    def dollars(self) -> tuple[float, float]:
        """The cost of cores and disk for that time."""
        rate = (self.cores * CORE_HOUR + disk_bytes(self.plan) / 1e12 * DISK_HOUR) / 3600
        return self.low * rate, self.high * rate


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama-like model of 70.6 billion parameters."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        for names, shape in OF_LAYER.items():
            for name in names.split():
                yield f"model.layers.{layer}.{name}.weight", shape


class Described(Source):
    """A model of which there are only names, types and shapes."""

    def __init__(self) -> None:
        self.tensors = {}
        self.files = ()
        start = 0
        for name, shape in shapes():
            self.tensors[name] = TensorInfo(name, STORAGE_TYPES["BF16"], shape, start)
            start += self.tensors[name].nbytes


def plan_of(method: str, cores: int) -> Plan:
    """Plan a merge of three models into shards of 5 GB."""
    asked = Request.of(
        base="base",
        models=MODELS,
        output="merged",
        method=method,
        shard_size="5GB",
        threads=cores,
        max_memory=MAX_MEMORY.get((method, cores)),
    )
    return make_plan(
        asked.recipe, Described(), [Described() for _ in MODELS], MODELS, options=asked.options
    )


def rows() -> Iterator[Row]:
    """Every method on every machine with every disk."""
    for cores, seconds in MEASURED_SECONDS.items():
        for method, (fast, slow) in seconds.items():
            plan = plan_of(method, cores)
            times = sum(tensor.elements for tensor in plan.tensors) / MEASURED_ELEMENTS
            for disk, (reads, writes) in DISKS.items():
                reading, writing = plan.cost.bytes_read / reads, plan.cost.bytes_written / writes
                low = max(times * fast, reading + writing)
                yield Row(method, cores, disk, plan, low, times * slow + reading + writing)


def disk_bytes(plan: Plan) -> int:
    """Return what inputs and output take; the output is made in its place."""
    inputs = sum(info.nbytes for info in plan.base.tensors.values())
    return (1 + len(plan.models)) * inputs + plan.cost.bytes_written


def span(low: float, high: float) -> str:
    """Write a range with two digits.

    >>> span(86.3, 141.2), span(0.0678, 0.1)
    ('86 – 140', '0.068 – 0.1')
    """
    return " – ".join(f"{float(f'{value:.2g}'):g}" for value in (low, high))


def tables() -> Iterator[str]:
    """The lines of both tables."""
    found = list(rows())
    yield "| method | threads | reads | writes | process, at most | disk for inputs and output |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        if row.disk == "NVMe":
            cost = row.plan.cost
            yield (
                f"| `{row.method}` | {cost.threads} | {cost.bytes_read / 1e9:.0f} GB | "
                f"{cost.bytes_written / 1e9:.0f} GB | {cost.peak_memory / 1e9:.2f} GB | "
                f"{disk_bytes(row.plan) / 1e9:.0f} GB |"
            )
    yield ""
    yield "| method | cores | disk | minutes | dollars |"
    yield "|---|---|---|---|---|"
    for row in found:
        minutes = span(row.low / 60, row.high / 60)
        yield f"| `{row.method}` | {row.cores} | {row.disk} | {minutes} | {span(*row.dollars)} |"


if __name__ == "__main__":
    print(*tables(), sep="\n")
