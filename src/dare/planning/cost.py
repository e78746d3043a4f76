"""The cost of a plan: passes over the inputs, bytes read and written, memory and threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dare.documents.words import show_size
from dare.errors import RecipeError
from dare.formats.recoding import Unit
from dare.inputs.sources import bytes_for
from dare.kernels import GROUP, Device, device_of
from dare.planning.data import Fate, PlanData, TensorPlan
from dare.recipe.options import DEFAULT_MEMORY
from dare.stages import Stage
from dare.stores.objects import sending_bytes
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import StorageType
from dare.tensors.system import available_cores, available_memory

INTERPRETER_BYTES = 200 << 20  # about what Python, NumPy and the library take

# The draws of a chain that a block can note down: a mask or none, then a band or none.
ONE_MASK_ONE_BAND: tuple[list[int | None], ...] = ([], [0], [None], [0, None])

Survey = tuple[int, int, Stage]  # peak bytes, kept bytes, and whose survey it is

TENSOR_BYTES = 6000  # about what is kept of one tensor of the plan


@dataclass(frozen=True)
class Cost:
    """Bytes read and written, memory and threads of a plan."""

    plan: PlanData

    @cached_property
    def passes(self) -> int:
        """The most times that a tensor is read, if surveys can remember its chunks."""
        return max(
            (self._survey_reads(t) + self._unit(t).reads for t in self.plan.tensors), default=1
        )

    @cached_property
    def surveys_first(self) -> bool:
        """True if a tensor is read for surveys before it is merged."""
        return bool(self._surveyed)

    @cached_property
    def _surveyed(self) -> list[tuple[TensorPlan, list[Survey]]]:
        """The tensors that are surveyed, each with its surveys."""
        asked = (tensor for tensor in self.plan.merged() if tensor.treatment.asks)
        return [(tensor, found) for tensor in asked if (found := list(self.surveys(tensor)))]

    @cached_property
    def _copied_types(self) -> list[tuple[Fate, list[StorageType]]]:
        """By tensor: its fate, and the storage types of the models' copies."""
        copies_of = self.plan.copies_of
        return [(t.fate, [info.dtype for _, info in copies_of(t)]) for t in self.plan.tensors]

    def _survey_reads(self, tensor: TensorPlan) -> int:
        if not tensor.is_merged or not tensor.treatment.asks:
            return 0
        surveyed = map(tensor.surveyed_stages, tensor.models)  # each is a pass, as a rule
        return max(map(len, surveyed), default=0) + tensor.joint_reads

    def _unit(self, tensor: TensorPlan) -> Unit:
        """Return the elements of a tensor that the output's format stores together."""
        recoding = self.plan.recoding
        return Unit() if recoding is None else recoding.unit(tensor.described)

    # ------------------------------------------------------------ bytes

    @cached_property
    def bytes_read(self) -> int:
        """The least bytes that are read; surveys that cannot remember chunks read more."""
        return sum(map(self.bytes_read_of, self.plan.tensors))

    def bytes_read_of(self, tensor: TensorPlan) -> int:
        """Return the least bytes that are read for one tensor."""
        base = tensor.base.nbytes
        models = [
            (m, bytes_for(self.plan.source_of(tensor, m), tensor.name, tensor.elements))
            for m in tensor.models
        ]
        once = base + sum(size for _, size in models)
        made = once * self._unit(tensor).reads
        if not tensor.is_merged or not tensor.treatment.asks:
            return made
        surveys = sum(len(tensor.surveyed_stages(m)) * (base + size) for m, size in models)
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

        Unless it is given, whole matrices may take half of the free memory, to keep threads busy.
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
            chunks * self._inputs_read > self._device.chunks_held
            or self._wanted_threads * self._workspace_for(chunks) > half
            or other + self._workspace_for(chunks) > self.max_memory
            or self._wanted_threads * self._gpu_bytes_for(chunks) > self._max_gpu_memory
        ):
            chunks //= 2
        return chunks

    @property
    def _wanted_threads(self) -> int:
        if self.is_all_on_gpu:
            return 1  # which only has to ask for everything
        cores, device = available_cores(), self._device
        most = device.matrix_threads if self._gpu_matrix_work else device.most_threads
        return self.plan.options.threads or min(cores, most or cores)

    @cached_property
    def is_all_on_gpu(self) -> bool:
        """True if a GPU merges everything, and has the inputs of it all in its memory."""
        fits = all(tensor.fits_gpu for tensor in self.plan.merged())
        return self._are_inputs_on_gpu and fits and self._is_noted and not self.surveys_here

    @cached_property
    def _are_inputs_on_gpu(self) -> bool:
        """True if a GPU has in its memory everything that is merged."""
        merged = (tensor for tensor in self.plan.merged() if tensor.elements)
        return self._device.is_gpu and all(self.plan.on_gpu(t, t.models) for t in merged)

    @cached_property
    def surveys_here(self) -> bool:
        """True if the processor must see tensors before they are merged."""
        if not (self._device.finds_cuts and self._are_inputs_on_gpu):
            return self.surveys_first
        return any(
            tensor.joint_reads or len(tensor.surveyed_stages(m)) != len(tensor.ranks_of(m)[:1])
            for tensor in self.plan.merged()
            if tensor.treatment.asks
            for m in tensor.models
        )

    @property
    def _max_gpu_memory(self) -> int:
        free = self.plan.matrix_gpus.free_bytes if self.plan.matrix_gpus else 1 << 62
        return self.plan.options.max_gpu_memory or free

    def _gpu_bytes_for(self, chunks: int) -> int:
        """Return what a thread sends to a GPU, what it gets back, and what matrices take there.

        That is nothing without one.
        """
        elements = CHUNK * chunks * (1 + self._inputs_read) if self._device.is_gpu else 0
        return elements * self.widest + self._gpu_matrix_work

    @cached_property
    def _gpu_matrix_work(self) -> int:
        """The most memory that one survey takes for whole matrices on a GPU."""
        surveyed = self._surveyed if self.plan.matrix_gpus else ()
        surveys = (survey for _, found in surveyed for survey in found)
        return max((held for held, _, stage in surveys if stage.on_gpu), default=0)

    @property
    def _inputs_read(self) -> int:
        """The number of inputs that are read into buffers."""
        return 0 if self.plan.is_held else 1 + len(self.plan.models)

    @property
    def gpu_bytes(self) -> int:
        """The most that GPUs have to have: for matrices, and for buffers, as much as here."""
        return self.threads * self._gpu_bytes_for(self.chunks_at_once)

    @property
    def workspace_bytes(self) -> int:
        """Buffers of one thread, with the memory of sources for it, such as factors of LoRAs."""
        return self._workspace_for(self.chunks_at_once)

    def _workspace_for(self, chunks_at_once: int) -> int:
        buffers = self._device.buffer_bytes(
            chunks_at_once,
            self._inputs_read,
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
        return device_of(self.plan.device)

    @cached_property
    def is_fused(self) -> bool:
        """True if one kernel can combine every chunk, without keeping any model's values."""
        return self._device.fuses and self._is_noted and not self.surveys_first

    @cached_property
    def _is_noted(self) -> bool:
        """True if stages only note down what a kernel is to do with every chunk."""
        if self.plan.has_deltas or self.plan.has_later_draws:  # it draws one mask for each model
            return False
        return all(0 not in each.weights and each.is_lazy for each in self.plan.treatments) and all(
            types.count(types[0]) == len(types)
            for fate, types in self._copied_types
            if fate is Fate.MERGED
        )

    @cached_property
    def _models_held(self) -> int:
        """The number of models whose values are held at once: few, if stages only make notes."""
        noted = all(
            each.is_lazy and all(draws in ONE_MASK_ONE_BAND for draws in each.draws)
            for each in self.plan.treatments
        )
        return min(len(self.plan.models), GROUP + 1 if noted else len(self.plan.models))

    @cached_property
    def widest(self) -> int:
        """Bytes per element of the widest storage type in inputs and output."""
        own = (kind.itemsize for t in self.plan.tensors for kind in (t.dtype, t.base.dtype))
        copies = (kind.itemsize for _, kinds in self._copied_types for kind in kinds)
        return max((*own, *copies), default=1)

    def surveys(self, tensor: TensorPlan) -> Iterator[Survey]:
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
        """The most memory that one survey takes for a whole matrix, its stage, and the matrix."""
        held = (
            (held, stage.name, tensor.name)
            for tensor, surveys in self._surveyed
            for held, _, stage in surveys
        )
        return max(held, default=(0, "", ""))

    @property
    def matrix_work(self) -> int:
        """The most memory that one survey takes for whole matrices, including its result."""
        return self._largest[0]

    @property
    def largest_matrix(self) -> str:
        """A phrase for the stage that needs the largest matrix as a whole; empty if none does."""
        work, stage, tensor = self._largest
        return f"{stage} needs {tensor} as a whole" if work else ""

    @cached_property
    def matrix_bytes(self) -> int:
        """The most memory for the results of a tensor's surveys, until its chunks are merged."""
        left = (sum(left for _, left, _ in surveys) for _, surveys in self._surveyed)
        return max(left, default=0)

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

    @cached_property
    def threads(self) -> int:
        """Worker threads: those of the recipe or the machine, as far as memory allows."""
        one = self.workspace_bytes + self.matrix_work + self.matrix_bytes
        left = self.max_memory - self.matrix_bytes - self.shared_bytes
        on_gpu = self._max_gpu_memory // max(1, self._gpu_bytes_for(self.chunks_at_once))
        return max(1, min(self._wanted_threads, left // one, on_gpu))

    def _matrices_for(self, threads: int) -> int:
        """Return the memory of matrices: each thread's work, and results of one more tensor."""
        return threads * self.matrix_work + (threads + 1) * self.matrix_bytes

    def check(self) -> None:
        """Refuse a plan that needs more memory than it may have."""
        limits = self.plan.options
        check_memory(limits.max_memory, self.least_memory, self.largest_matrix)
        if limits.max_gpu_memory is not None:
            check_memory(limits.max_gpu_memory, self._gpu_bytes_for(1), name="max_gpu_memory")
        elif self._gpu_bytes_for(1) > self._max_gpu_memory:
            needed, free = map(show_size, (self._gpu_bytes_for(1), self._max_gpu_memory))
            raise RecipeError(
                f"device = {self.plan.device}: one thread needs {needed} of the GPU's memory, and "
                f"{free} is free; close what else uses it, or merge with device = cpu"
            )

    @property
    def held_bytes(self) -> int:
        return self._matrices_for(self.threads) + self.shared_bytes

    @cached_property
    def spare_bytes(self) -> int:
        """The memory that one thread's survey may use: half of what buffers do not need."""
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
        """Buffers and peak memory, in a line."""
        return (
            f"buffers {show_size(self.buffer_bytes)} of at most {show_size(self.max_memory)} "
            f"({'what the threads need' if self.takes_more else 'max_memory'}); "
            f"the process about {show_size(self.peak_memory)}"
            + (f"; on GPUs {show_size(self.gpu_bytes)}" if self.gpu_bytes else "")
        )


def memory_limit(given: int | None, needed: int) -> int:
    """Return the limit for buffers: as given; else 1 GiB, or more if one thread needs more."""
    return max(DEFAULT_MEMORY, needed) if given is None else given


def check_memory(
    given: int | None, needed: int, reason: str = "", name: str = "max_memory"
) -> None:
    """Refuse a need for more memory than the user allows, or by default than is free."""
    if given is not None and needed > given:
        least = f"one thread needs more; allow at least {-(-needed // 1000) / 1000:.3f} MB"
        raise RecipeError(f"{name} = {show_size(given)}: {least}")
    if given is None and needed > DEFAULT_MEMORY:
        free = available_memory()
        if free is not None and needed > free:
            raise RecipeError(
                f"memory: one thread needs {show_size(needed)}{reason and f' ({reason})'}, and "
                f"this machine has {show_size(free)} free; close other programs, use a machine "
                "with more, or a method that works on single elements, such as dare+linear; "
                f"max_memory = {needed} tries it anyway"
            )
