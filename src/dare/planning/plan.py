"""A plan: every tensor's fate, the cost, and the document that shows it.

Everything that can be found wrong without reading weights is found before there is a plan. The cost
is passes over the inputs, bytes read and written, memory and threads.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dare.documents.document import Document, Section, tabulate
from dare.documents.shown import Shown
from dare.documents.words import exact_text, named, show_size, times, weight_text
from dare.errors import RecipeError, printable
from dare.formats.recoding import Unit
from dare.inputs.sources import bytes_for
from dare.kernels import DEVICES, GROUP, Device
from dare.planning.data import Fate, PlanData, TensorPlan
from dare.recipe.options import DEFAULT_MEMORY
from dare.recipe.recipe import names_of
from dare.stages import IMPLIED, Stage
from dare.stages.registry import LATER_PARAMETERS
from dare.stores.uploading import sending_bytes

INTERPRETER_BYTES = 200 << 20  # about what Python, NumPy and the library take

# The draws of a chain that a block can note down: a mask or none, then a band or none.
ONE_MASK_ONE_BAND: tuple[list[int | None], ...] = ([], [0], [None], [0, None])

TENSOR_BYTES = 6000  # about what is kept of one tensor of the plan


@dataclass(frozen=True)
class Cost:
    """The figures of one plan."""

    plan: PlanData

    @cached_property
    def passes(self) -> int:
        """The most times that a tensor is read, if surveys can remember what they see."""
        return max(
            (self._survey_reads(t) + self._unit(t).reads for t in self.plan.tensors), default=1
        )

    @cached_property
    def surveys_first(self) -> bool:
        """True if a tensor is read for surveys before it is merged."""
        return any(map(self._survey_reads, self.plan.tensors))

    def _survey_reads(self, tensor: TensorPlan) -> int:
        if not tensor.is_merged:
            return 0
        return max(map(tensor.survey_reads, tensor.models), default=0) + tensor.joint_reads

    def _unit(self, tensor: TensorPlan) -> Unit:
        """Return what of a tensor is stored together, in the output's format."""
        recoding = self.plan.recoding
        return Unit() if recoding is None else recoding.unit(tensor.described)

    # ------------------------------------------------------------ bytes

    @cached_property
    def bytes_read(self) -> int:
        """Bytes that are read at least (a survey that cannot remember reads more than once)."""
        return sum(map(self.bytes_read_of, self.plan.tensors))

    def bytes_read_of(self, tensor: TensorPlan) -> int:
        """The same for one tensor."""
        base = tensor.base.nbytes
        models = [
            (m, bytes_for(self.plan.source_of(tensor, m), tensor.name, tensor.elements))
            for m in tensor.models
        ]
        once = base + sum(size for _, size in models)
        made = once * self._unit(tensor).reads
        if not tensor.is_merged:
            return made
        surveys = sum(tensor.survey_reads(m) * (base + size) for m, size in models)
        return made + surveys + once * tensor.joint_reads

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of weights in the output."""
        if self.plan.layout is not None and self.plan.recoding is not None:
            return sum(self.plan.layout.sizes)
        return sum(tensor.elements * tensor.dtype.itemsize for tensor in self.plan.tensors)

    # ------------------------------------------------------------ memory and threads

    @cached_property
    def max_memory(self) -> int:
        """The limit of all buffers.

        Unless it is given, whole matrices may take half of what is free, so that no thread idles.
        """
        least, given = self.least_memory, self.plan.options.max_memory
        if given is None and self.matrix_work:
            threads, free = self._wanted_threads, available_memory() or 0
            buffers = threads * self._workspace_for(self._device.chunks_at_once)
            wanted = self._matrices_for(threads) + buffers + self.shared_bytes
            least = max(least, min(wanted, free // 2))
        return memory_limit(given, least)

    @property
    def takes_more(self) -> bool:
        return self.plan.options.max_memory is None and self.max_memory > DEFAULT_MEMORY

    @cached_property
    def chunks_at_once(self) -> int:
        """Chunks that a thread reads and writes together, in half the memory of all threads."""
        half, other = self.max_memory // 2, self.least_memory - self._workspace_for(1)
        chunks = self._device.chunks_at_once
        while chunks > 1 and (
            chunks * (2 + len(self.plan.models)) > self._device.chunks_held
            or self._wanted_threads * self._workspace_for(chunks) > half
            or other + self._workspace_for(chunks) > self.max_memory
        ):
            chunks //= 2
        return chunks

    @property
    def _wanted_threads(self) -> int:
        return self.plan.options.threads or available_cores()

    @property
    def workspace_bytes(self) -> int:
        """Buffers of one thread, and what the sources keep for it, as factors of LoRAs."""
        return self._workspace_for(self.chunks_at_once)

    def _workspace_for(self, chunks_at_once: int) -> int:
        buffers = self._device.buffer_bytes(
            chunks_at_once,
            len(self.plan.models),
            width=self.widest,
            is_fused=self.is_fused,
            held=self._models_held,
            has_deltas=self.plan.has_deltas,
        )
        reading = sum(source.cost.reading_bytes for source in self.plan.sources)
        return buffers + reading + self._storing_bytes

    @cached_property
    def _storing_bytes(self) -> int:
        """The memory that the output's format takes for a tensor."""
        return max((self._unit(tensor).work_bytes for tensor in self.plan.tensors), default=0)

    @property
    def _device(self) -> Device:
        return DEVICES[self.plan.backend]

    @cached_property
    def is_fused(self) -> bool:
        """True if one kernel can combine every chunk, so that no model's values are kept."""
        if self.surveys_first or self.plan.has_deltas or not self._device.fuses:
            return False
        return not self.plan.has_later_draws and all(  # a kernel draws one mask for each model
            0 not in tensor.weights
            and tensor.is_lazy
            and len({info.dtype for _, info in self.plan.copies_of(tensor)}) == 1
            for tensor in self.plan.merged()
        )

    @cached_property
    def _models_held(self) -> int:
        """The models whose values are held at once: few, if notes are all that stages leave."""
        copies = ((tensor, model) for tensor in self.plan.merged() for model in tensor.models)
        noted = all(t.is_lazy and t.draws_of(m) in ONE_MASK_ONE_BAND for t, m in copies)
        return min(len(self.plan.models), GROUP + 1 if noted else len(self.plan.models))

    @cached_property
    def widest(self) -> int:
        """Bytes per element of the widest storage type in inputs and output."""
        kinds = set()
        for tensor in self.plan.tensors:
            copies = self.plan.copies_of(tensor)
            kinds |= {tensor.dtype, tensor.base.dtype, *(info.dtype for _, info in copies)}
        return max((kind.itemsize for kind in kinds), default=1)

    def surveys(self, tensor: TensorPlan) -> Iterator[tuple[int, int, Stage]]:
        """Yield (peak bytes, kept bytes, stage) for each survey of a tensor."""
        shape, models = tensor.shape, len(tensor.models)
        if tensor.input_axis == 0:  # stages count by outputs × inputs
            shape = shape[::-1]
        joint = [tensor.combine_stage] if tensor.combine_surveys else []
        joint += [stage for stage, _ in tensor.refine_stages]
        before = 0  # the finding of the combine stage is held while the tensor is refined
        for place, stage in enumerate(joint, start=1):
            left = stage.left_bytes(shape, models)
            held = before + stage.survey_bytes(shape, models)
            yield held, left if place == len(joint) else 0, stage
            before = max(before, left)
        for model in tensor.models:
            for stage in (tensor.stages[place] for place in tensor.surveyed_stages(model)):
                yield stage.survey_bytes(shape, 1), stage.left_bytes(shape, 1), stage

    @cached_property
    def _largest(self) -> tuple[int, str, str]:
        """The most that one survey takes for a whole matrix, its stage, and the matrix."""
        held = (
            (held, stage.name, tensor.name)
            for tensor in self.plan.merged()
            for held, _, stage in self.surveys(tensor)
        )
        return max(held, default=(0, "", ""))

    @property
    def matrix_work(self) -> int:
        """The most that one survey takes for whole matrices, its result included."""
        return self._largest[0]

    @property
    def largest_matrix(self) -> str:
        """Say which stage needs which matrix as a whole, if one does."""
        work, stage, tensor = self._largest
        return f"{stage} needs {tensor} as a whole" if work else ""

    @cached_property
    def matrix_bytes(self) -> int:
        """The most that all surveys of one tensor leave behind, until its chunks are merged."""
        merged = self.plan.merged()
        return max((sum(left for _, left, _ in self.surveys(t)) for t in merged), default=0)

    @cached_property
    def shared_bytes(self) -> int:
        """Memory that the threads share: one census at a time, reading ahead and uploading."""
        layout, censuses = self.plan.layout, self.plan.censuses
        observed = [len(census.tensors) * census.stage.observation_bytes for census in censuses]
        is_sent = layout is not None and layout.is_sent
        sent = sending_bytes(max(layout.sizes, default=0)) if layout and is_sent else 0
        ahead = sum(source.cost.ahead_bytes for source in self.plan.sources)
        return max(observed, default=0) + ahead + sent

    @property
    def least_memory(self) -> int:
        """The memory that one thread needs, which `max_memory` must allow."""
        return self._workspace_for(1) + self._matrices_for(1) + self.shared_bytes

    @property
    def threads(self) -> int:
        """Worker threads, as many as the recipe or the machine says and the memory allows."""
        one = self.workspace_bytes + self.matrix_work + self.matrix_bytes
        left = self.max_memory - self.matrix_bytes - self.shared_bytes
        return max(1, min(self._wanted_threads, left // one))

    def _matrices_for(self, threads: int) -> int:
        """Return the memory of matrices: each thread's work, and the results of one tensor more."""
        return threads * self.matrix_work + (threads + 1) * self.matrix_bytes

    @property
    def held_bytes(self) -> int:
        return self._matrices_for(self.threads) + self.shared_bytes

    @property
    def spare_bytes(self) -> int:
        """The memory that one thread's survey may use: half of what the buffers leave."""
        left = self.max_memory - self.held_bytes - self.threads * self.workspace_bytes
        return max(0, left // 2 // self.threads) if self.surveys_first else 0

    @property
    def buffer_bytes(self) -> int:
        """The most that buffers take, which `max_memory` bounds."""
        return self.held_bytes + self.threads * (self.workspace_bytes + self.spare_bytes)

    @property
    def peak_memory(self) -> int:
        """Forecast of the most memory the process takes: buffers, and Python with its packages."""
        return INTERPRETER_BYTES + TENSOR_BYTES * len(self.plan.tensors) + self.buffer_bytes

    @property
    def memory_line(self) -> str:
        """Both figures of memory, in a line."""
        return (
            f"buffers {show_size(self.buffer_bytes)} of at most {show_size(self.max_memory)} "
            f"({'what the threads need' if self.takes_more else 'max_memory'}); "
            f"the process about {show_size(self.peak_memory)}"
        )


# ---------------------------------------------------------------- this machine


# By cgroup version: its folder, the files of the limit and of its use, the prefix of counts.
CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take, within the limits of its container.

    What only holds copies of files counts as free. macOS says what there is in all, and Windows
    nothing (None).
    """
    found = list(_cgroup_memory(root))
    with suppress(OSError, ValueError, LookupError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]))
    if not found and hasattr(os, "sysconf"):
        with suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yield the rest of each limit that holds for this process."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, most, taken, prefix = CGROUPS[bool(controllers)]
            inside = root / top / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if folder.is_relative_to(root / top):
                    with suppress(OSError, ValueError):  # without a limit it is not a number
                        limit = int((folder / most).read_text())
                        lines = (folder / "memory.stat").read_text().splitlines()
                        counts = {name: int(count) for name, count in map(str.split, lines)}
                        kinds = (f"{prefix}active_file", f"{prefix}inactive_file")
                        files = sum(counts.get(kind, 0) for kind in kinds)
                        yield limit - int((folder / taken).read_text()) + files


def memory_limit(given: int | None, needed: int) -> int:
    """Return what buffers may take: as given; else 1 GiB, or more if one thread needs more."""
    return max(DEFAULT_MEMORY, needed) if given is None else given


def check_memory(given: int | None, needed: int, reason: str = "") -> None:
    """Refuse a need that is beyond what the user gives, or by default beyond what is free."""
    if given is not None and needed > given:
        least = f"allow at least {-(-needed // 1000) / 1000:.3f} MB"
        raise RecipeError(f"max_memory = {given}: one thread needs {needed} bytes; {least}")
    if given is None and needed > DEFAULT_MEMORY:
        free = available_memory()
        if free is not None and needed > free:
            raise RecipeError(
                f"memory: one thread needs {show_size(needed)}{reason and f' ({reason})'}, and "
                f"this machine has {show_size(free)} free; close other programs, use a machine "
                "with more, or a method that works on single elements, such as dare+linear; "
                f"max_memory = {needed} tries it anyway"
            )


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True, repr=False)
class Plan(PlanData, Shown):
    """A merge that can be run: every tensor's fate, and the cost."""

    @cached_property
    def cost(self) -> Cost:
        """The bytes, memory and threads that the merge takes."""
        return Cost(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        models = zip(self.model_names, self.recipe.weights(), self.recipe.seeds(), strict=True)
        return {
            "method": self.method,
            "stages": [{"stage": stage.name, **values} for stage, values in self.recipe.chain],
            "methods": dict(self.methods),
            "models": [
                dict(zip(("name", "weight", "seed"), model, strict=True)) for model in models
            ],
            **({"layers": self.layers} if self.recipe.layers else {}),
            **({"format": self.recoding.format} if self.recoding is not None else {}),
            "passes": self.cost.passes,
            "threads": self.cost.threads,
            "peak_memory_bytes": self.cost.peak_memory,
            "buffer_bytes": self.cost.buffer_bytes,
            "max_memory_bytes": self.cost.max_memory,
            "bytes_read": self.cost.bytes_read,
            "bytes_written": self.cost.bytes_written,
            "notes": [asdict(notice) for notice in self.notes],
            "files_beside": sorted(self.sidecars.files) if self.sidecars else [],
            "warnings": [asdict(notice) for notice in self.warnings],
            "tensors": [
                {
                    "name": tensor.name,
                    "fate": tensor.fate.value,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype.name,
                    "models": [self.model_names[m] for m in tensor.models],
                    "method": tensor.method if tensor.is_merged else None,
                    "place": self._places.get(tensor.name),
                }
                for tensor in self.tensors
            ],
            "left_out": list(self.left_out),
        }

    @cached_property
    def _places(self) -> dict[str, dict[str, Any]]:
        """File and position, counted from the start of the data, of every tensor."""
        places = {}
        for file, (header, placed) in (self.layout.build({}) if self.layout else {}).items():
            for name, info in placed.items():
                start = info.start - len(header)
                places[name] = {"file": file, "data_offsets": [start, start + info.nbytes]}
        return places

    def __repr__(self) -> str:
        """The plan in a line."""
        target = f" to {self.layout.target}" if self.layout is not None else ""
        elements = sum(tensor.elements for tensor in self.tensors)
        size = f"{times(len(self.tensors), 'tensor')}, {elements:,} elements"
        return printable(f"<Plan: {self.method} of {named(self.model_names)}, {size}{target}>")

    def document(self, *, brief: bool = False) -> Document:
        """Return what will be merged, how and at what cost; `brief` without the usual settings."""
        cost, recipe = self.cost, self.recipe
        elements = times(sum(tensor.elements for tensor in self.tensors), "element")
        fates = Counter(tensor.fate for tensor in self.tensors)
        fates[Fate.LEFT_OUT] = len(self.left_out)
        tensors = ", ".join(f"{fates[fate]} {fate.value}" for fate in Fate if fates[fate])
        before = ", ".join(sorted({tensor.base.dtype.name for tensor in self.tensors}))
        after = ", ".join(sorted({tensor.dtype.name for tensor in self.tensors}))
        stored = f" stored as {after}" if after != before and self.recoding is None else ""
        shared, different = self._model_settings(brief=brief)
        methods = ", ".join(f"{m} for {times(n, 'tensor')}" for m, n in self.methods.items())
        facts = [
            ("method", self._chain(shared, brief=brief)),
            *([("methods", methods)] if len(recipe.chains) > 1 else ()),
            ("base", str(recipe.base)),
            ("tensors", f"{tensors}; {elements}, {before}{stored}"),
            *([("format", self.recoding.format)] if self.recoding is not None else ()),
            ("writes", self._written),
        ]
        if not brief:
            passes = times(cost.passes, "pass", "passes")
            facts += [
                ("reads", f"{show_size(cost.bytes_read)} in {passes}"),
                ("with", times(cost.threads, "thread")),
                ("memory", cost.memory_line),
            ]
            facts += [("left out", ", ".join(self.left_out))] if self.left_out else []
        figures = zip(recipe.weights(), recipe.seeds(), strict=True)
        rows = zip(self.model_names, recipe.models, figures, different, strict=True)
        columns: dict[str, Callable[[Any], str]] = {
            "model": lambda row: row[0],
            "file": lambda row: str(row[1].file),
            "weight >": lambda row: weight_text(row[2][0]),
            "seed >": lambda row: str(row[2][1]) if self.is_random else "",
        }
        if any(different):
            columns["settings"] = lambda row: _listed(row[3])
        models = tabulate(rows, columns, optional=("file",))
        sections = [Section("models", "Models", (models,), is_brief=True)] if recipe.models else []
        if recipe.layers:
            stack = tabulate(self.layers, STACK_COLUMNS)
            sections.append(Section("layers", "Layers", (stack,), is_brief=True))
        return Document(
            title="Plan",
            kind="plan",
            facts=tuple(facts),
            sections=tuple(sections),
            notices=(*self.notes, *(() if brief else self.warnings)),
            models=self.model_names,
        )

    @cached_property
    def is_random(self) -> bool:
        """True if a stage draws at random, so that seeds matter."""
        taken = ((tensor, model) for tensor in self.merged() for model in tensor.models)
        return any({*tensor.draws_of(model)} - {None} for tensor, model in taken)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The ranges of a stack: their layers in the output, where they come from, and how."""
        ranges, first = [], 0
        for entry in self.recipe.layers:
            last = first + entry.range[1] - entry.range[0]
            models = ((each.file, each.range or entry.range) for each in entry.models)
            sources = ((entry.base, entry.range), *models)
            origin = [{"model": str(file), "range": list(span)} for file, span in sources]
            ranges.append({"layers": [first, last], "from": origin, "method": entry.methods})
            first = last
        return ranges

    def _chain(self, shared: Mapping[str, Any], *, brief: bool) -> str:
        """Return the chain with the settings that all models share, and those after."""
        joint = {
            f"{stage.name} {name}": value
            for stage, settings in self.recipe.chain
            if stage.kind != "delta"
            for name, value in settings.items()
            if (stage.name, name) not in IMPLIED  # the stage that it makes has its own
            and (stage.name, name, value) not in LATER_PARAMETERS
            and not (brief and value == stage.parameters[name].default)
        }
        scale = {} if brief and self.recipe.scale == 1 else {"scale": self.recipe.scale}
        rates = {"embedding_drop_rate": self.recipe.embedding_drop_rate}
        return _listed({names_of(self.recipe.chain): "", **shared, **rates, **joint, **scale})

    @property
    def _written(self) -> str:
        size = show_size(self.cost.bytes_written)
        if self.layout is None:
            return f"{size} (no output is named yet)"
        target = self.layout.target
        place = f"{size} to {target} ({times(len(self.layout.files), 'file')})"
        if target.exists():
            return f"{place}, which exists already"
        if self.layout.is_sent:
            room = show_size(self.layout.scratch_bytes)
            return f"{place}, file by file by way of a scratch folder, which takes {room}"
        if target.parent.exists():
            return place
        return f"{place}; the folder {target.parent} will be created"

    def _model_settings(self, *, brief: bool) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
        """Return the settings of delta stages that all models share, and each model's others."""
        every = [
            {
                parameter: value
                for stage, values in self.recipe.chain.of_kind("delta")
                for parameter, default in values.items()
                if (value := entry.settings.get(parameter, default)) is not None
                and (stage.name, parameter, value) not in LATER_PARAMETERS
                and not (brief and _is_usual(stage, parameter, value))
            }
            for entry in self.recipe.models
        ]
        first = every[0] if every else {}
        shared = {k: v for k, v in first.items() if all(k in s and s[k] == v for s in every)}
        return shared, [{k: v for k, v in s.items() if k not in shared} for s in every]


def _span_text(span: Sequence[int]) -> str:
    """Return layers as people count them, from the first to the last."""
    return f"{span[0]} to {span[1] - 1}" if span[1] - span[0] > 1 else str(span[0])


STACK_COLUMNS: dict[str, Callable[[Any], str]] = {
    "layers >": lambda row: _span_text(row["layers"]),
    "from": lambda row: ", ".join(f"{o['model']} {_span_text(o['range'])}" for o in row["from"]),
    "method": lambda row: str(row["method"]),
}


def _listed(settings: Mapping[str, Any]) -> str:
    """Return settings in a line, without those that are not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    return ", ".join(f"{name} {exact_text(value)}".strip() for name, value in given.items())


def _is_usual(stage: Stage, parameter: str, value: object) -> bool:
    """Tell if a delta stage's parameter is not worth a word: numbers always are."""
    default = stage.parameters[parameter].default
    return value == default and (isinstance(default, bool) or not isinstance(default, float))
