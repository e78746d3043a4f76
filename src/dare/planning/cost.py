"""The cost of a plan: passes over the inputs, bytes read and written, memory, threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dare.documents.words import show_size
from dare.errors import RecipeError
from dare.planning.data import PlanData, TensorPlan
from dare.recipe.schema import DEFAULT_MEMORY
from dare.stages import Settings, Stage
from dare.stores.uploading import sending_bytes
from dare.tensors.chunks import CHUNK
from dare.tensors.files import ALIGNMENT

INTERPRETER_BYTES = 200 << 20  # about what Python, NumPy and compiled kernels take

CHUNKS_AT_ONCE = 4  # chunks that a thread reads and writes together, if memory allows
CHUNKS_HELD = 20  # chunks that a thread holds; with more models, fewer of each
TENSOR_BYTES = 6000  # about what is kept of one tensor of the plan


@dataclass(frozen=True)
class Cost:
    """The figures of one plan."""

    plan: PlanData

    @cached_property
    def passes(self) -> int:
        """The most times that a tensor is read, if surveys can remember what they see."""
        stages = self.plan.stages
        surveys = (
            max((tensor.survey_reads(stages, model) for model in tensor.models), default=0)
            + stages[-1].surveys(tensor.combine)
            for tensor in self.plan.merged()
        )
        return 1 + max(surveys, default=0)

    # ------------------------------------------------------------ bytes

    @cached_property
    def bytes_read(self) -> int:
        """Bytes that are read at least (a survey that cannot remember reads more than once)."""
        return sum(map(self.bytes_read_of, self.plan.tensors))

    def bytes_read_of(self, tensor: TensorPlan) -> int:
        """The same for one tensor."""
        base = tensor.base.nbytes
        models = [
            (m, self.plan.source_of(tensor, m).bytes_for(tensor.name, tensor.elements))
            for m in tensor.models
        ]
        once = base + sum(size for _, size in models)
        if not tensor.is_merged:
            return once
        stages = self.plan.stages
        surveys = sum(tensor.survey_reads(stages, m) * (base + size) for m, size in models)
        return once + surveys + once * stages[-1].surveys(tensor.combine)

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of weights in the output."""
        return sum(tensor.elements * tensor.dtype.itemsize for tensor in self.plan.tensors)

    # ------------------------------------------------------------ memory and threads

    @cached_property
    def max_memory(self) -> int:
        return memory_limit(self.plan.recipe.max_memory, self.least_memory)

    @property
    def takes_more(self) -> bool:
        return self.plan.recipe.max_memory is None and self.max_memory > DEFAULT_MEMORY

    @cached_property
    def chunks_at_once(self) -> int:
        """Chunks that a thread reads and writes together, in half the memory of all threads."""
        half, other = self.max_memory // 2, self.least_memory - self._workspace_for(1)
        chunks = CHUNKS_AT_ONCE
        while chunks > 1 and (
            chunks * (2 + len(self.plan.models)) > CHUNKS_HELD
            or self._wanted_threads * self._workspace_for(chunks) > half
            or other + self._workspace_for(chunks) > self.max_memory
        ):
            chunks //= 2
        return chunks

    @property
    def _wanted_threads(self) -> int:
        return self.plan.recipe.threads or available_cores()

    @property
    def workspace_bytes(self) -> int:
        """Buffers of one thread, and what the sources keep for it, as factors of LoRAs."""
        return self._workspace_for(self.chunks_at_once)

    def _workspace_for(self, chunks_at_once: int) -> int:
        plan = self.plan
        inputs_and_output = 2 + len(plan.models)
        floats = 2  # base and merged delta
        if not self.is_fused:  # all values, an election's sums, a survey's magnitudes, zeros
            floats += len(plan.models) + 4 + 1 + plan.has_deltas
        lanes = 2
        stored, computed = inputs_and_output * self.widest, 4 * floats + lanes
        together = chunks_at_once if self.is_fused else 1
        buffers = CHUNK * (chunks_at_once * stored + together * computed) + ALIGNMENT
        return buffers + sum(source.reading_bytes for source in plan.sources)

    @cached_property
    def is_fused(self) -> bool:
        """True if one kernel can combine every chunk, so that no model's values are kept."""
        if self.passes > 1 or self.plan.has_deltas:
            return False
        if self.plan.has_later_draws:  # a kernel draws one mask for each model
            return False
        return all(
            0 not in tensor.weights
            and tensor.is_lazy(self.plan.stages)
            and len({info.dtype for _, info in self.plan.copies_of(tensor)}) == 1
            for tensor in self.plan.merged()
        )

    @cached_property
    def widest(self) -> int:
        """Bytes per element of the widest storage type in inputs and output."""
        kinds = {
            kind
            for tensor in self.plan.tensors
            for kind in (
                tensor.dtype,
                tensor.base.dtype,
                *(info.dtype for _, info in self.plan.copies_of(tensor)),
            )
        }
        return max((kind.itemsize for kind in kinds), default=1)

    def _uses(self, tensor: TensorPlan) -> Iterator[tuple[Stage, Settings, int]]:
        """Yield each stage for each model of a tensor, its settings, and how many models it has."""
        *stages, combine = self.plan.stages
        yield combine, tensor.combine, len(tensor.models)
        for of_model in tensor.settings:
            for stage, settings in zip(stages, of_model, strict=True):
                yield stage, settings, 1

    @cached_property
    def _largest(self) -> tuple[int, str, str]:
        """The most that one survey takes for a whole matrix, its stage, and the matrix."""
        held = (
            (stage.held_bytes(settings, tensor.shape, models), stage.name, tensor.name)
            for tensor in self.plan.merged()
            for stage, settings, models in self._uses(tensor)
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
        left = (
            sum(
                stage.left_bytes(settings, tensor.shape, models)
                for stage, settings, models in self._uses(tensor)
            )
            for tensor in self.plan.merged()
        )
        return max(left, default=0)

    @cached_property
    def shared_bytes(self) -> int:
        """Memory that the threads share: one census at a time, reading ahead and uploading."""
        stages, layout = self.plan.stages, self.plan.layout
        censuses = self.plan.censuses
        observed = [len(c.tensors) * stages[c.position].observation_bytes for c in censuses]
        is_sent = layout is not None and layout.is_sent
        sent = sending_bytes(max(layout.sizes, default=0)) if layout and is_sent else 0
        ahead = sum(source.ahead_bytes for source in self.plan.sources)
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
        return max(0, left // 2 // self.threads) if self.passes > 1 else 0

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
            f"({'what one thread needs' if self.takes_more else 'max_memory'}); "
            f"the process about {show_size(self.peak_memory)}"
        )


# ---------------------------------------------------------------- this machine


CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""By cgroup version: its folder, the files of the limit and of its use, the prefix of counts."""


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
        raise RecipeError(
            f"max_memory = {given}: one thread needs {needed} bytes; "
            f"allow at least {-(-needed // 1000) / 1000:.3f} MB"
        )
    if given is None and needed > DEFAULT_MEMORY:
        free = available_memory()
        if free is not None and needed > free:
            raise RecipeError(
                f"memory: one thread needs {show_size(needed)}{reason and f' ({reason})'}, and "
                f"this machine has {show_size(free)} free; end other programs, use a machine with "
                "more, or a method that works on single elements, such as dare+linear; "
                f"max_memory = {needed} tries it all the same"
            )
