"""What a plan costs: passes over the inputs, bytes read and written, memory, threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dare.documents.words import show_size
from dare.planning.data import PlanData, TensorPlan
from dare.planning.machine import available_cores, memory_limit
from dare.recipe.schema import DEFAULT_MEMORY
from dare.stores.uploading import sending_bytes
from dare.tensors.chunks import CHUNK
from dare.tensors.files import ALIGNMENT

INTERPRETER_BYTES = 200 << 20
"""About what Python, NumPy and compiled kernels take before the first buffer; for the forecast."""

CHUNKS_AT_ONCE = 4
"""So many a thread reads and writes together, where memory allows it."""
CHUNKS_HELD = 20
"""So many a thread has in memory of base, models and output; of more models it reads fewer
together, so that memory does not grow with their number until there is one of each."""
TENSOR_BYTES = 6000
"""About what is known of one tensor of the plan: headers, steps, figures, digests, the manifest."""


@dataclass(frozen=True)
class Cost:
    """The figures of one plan."""

    plan: PlanData

    @cached_property
    def passes(self) -> int:
        """How often a tensor is read at the most, if surveys can remember what they see."""
        return 1 + max((sum(self._surveys(t)) for t in self.plan.merged()), default=0)

    def _surveys(self, tensor: TensorPlan) -> tuple[int, int]:
        """How often its delta stages survey a tensor at the most, and the combine stage."""
        stages = self.plan.stages
        deltas = (tensor.survey_reads(stages, model) for model in tensor.models)
        return max(deltas, default=0), int(stages[-1].surveys(tensor.combine))

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
        """What buffers may take: what the recipe allows, or what there is by default."""
        return memory_limit(self.plan.recipe.max_memory, self.least_memory)

    @property
    def takes_more(self) -> bool:
        """Whether buffers take more than by default, though the recipe does not say so."""
        return self.plan.recipe.max_memory is None and self.max_memory > DEFAULT_MEMORY

    @cached_property
    def chunks_at_once(self) -> int:
        """How many chunks a thread reads and writes together, where memory allows it.

        All threads have half of the memory for it, and it is divided among the models.
        """
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
        """Buffers of one thread, and what the sources keep for it: factors of LoRAs."""
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
        return buffers + sum(source.reading_bytes for source in (plan.base, *plan.models))

    @cached_property
    def is_fused(self) -> bool:
        """Whether one kernel can combine every chunk, so that no model's values lie in memory."""
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

    @cached_property
    def _largest(self) -> tuple[int, str, str]:
        """The most that one survey takes for a whole matrix, its stage, and the matrix."""
        *stages, combine = self.plan.stages
        return max(
            (
                (stage.held_bytes(settings, tensor.shape, models), stage.name, tensor.name)
                for tensor in self.plan.merged()
                for stage, settings, models in (
                    (combine, tensor.combine, len(tensor.models)),
                    *(
                        (stage, settings, 1)
                        for of_model in tensor.settings
                        for stage, settings in zip(stages, of_model, strict=True)
                    ),
                )
            ),
            default=(0, "", ""),
        )

    @property
    def matrix_work(self) -> int:
        """The most that one survey takes for whole matrices, what it leaves behind included."""
        return self._largest[0]

    @property
    def largest_matrix(self) -> str:
        """Say which stage needs which matrix as a whole, if one does."""
        work, stage, tensor = self._largest
        return f"{stage} needs {tensor} as a whole" if work else ""

    @cached_property
    def matrix_bytes(self) -> int:
        """The most that all surveys of one tensor leave behind, until its chunks are merged."""
        *stages, combine = self.plan.stages
        return max(
            (
                combine.left_bytes(tensor.combine, tensor.shape, len(tensor.models))
                + sum(
                    stage.left_bytes(settings, tensor.shape, 1)
                    for of_model in tensor.settings
                    for stage, settings in zip(stages, of_model, strict=True)
                )
                for tensor in self.plan.merged()
            ),
            default=0,
        )

    @cached_property
    def census_bytes(self) -> int:
        """What the looks at the tensors of one census take; there is one at a time."""
        stages = self.plan.stages
        looks = (len(c.tensors) * stages[c.position].observation_bytes for c in self.plan.censuses)
        return max(looks, default=0)

    @property
    def ahead_bytes(self) -> int:
        """What is read ahead of stores, by all threads together."""
        return sum(source.ahead_bytes for source in (self.plan.base, *self.plan.models))

    @cached_property
    def sent_bytes(self) -> int:
        """What is held of a file while it is sent to a store."""
        layout = self.plan.layout
        if layout is None or not layout.is_sent:
            return 0
        return sending_bytes(max(layout.sizes, default=0))

    @property
    def shared_bytes(self) -> int:
        """What all threads have together: a census, reading ahead, and what is to be sent."""
        return self.census_bytes + self.ahead_bytes + self.sent_bytes

    @property
    def least_memory(self) -> int:
        """What one thread needs, which `max_memory` must allow."""
        return self._workspace_for(1) + self._matrices_for(1) + self.shared_bytes

    @property
    def threads(self) -> int:
        """Worker threads, as many as the recipe or the machine says and the memory allows."""
        one = self.workspace_bytes + self.matrix_work + self.matrix_bytes
        left = self.max_memory - self.matrix_bytes - self.shared_bytes
        return max(1, min(self._wanted_threads, left // one))

    def _matrices_for(self, threads: int) -> int:
        """What whole matrices take: each thread's work, and of a tensor more what is left of it."""
        return threads * self.matrix_work + (threads + 1) * self.matrix_bytes

    @property
    def held_bytes(self) -> int:
        """What whole matrices take, of all threads, and what these share."""
        return self._matrices_for(self.threads) + self.shared_bytes

    @property
    def spare_bytes(self) -> int:
        """What one thread's survey may remember: half of what the buffers leave."""
        left = self.max_memory - self.held_bytes - self.threads * self.workspace_bytes
        return max(0, left // 2 // self.threads) if self.passes > 1 else 0

    @property
    def buffer_bytes(self) -> int:
        """What buffers take at the most, which is what `max_memory` bounds."""
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
