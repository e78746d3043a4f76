"""From a recipe and the headers of its files to what will be done: every tensor, byte and cost.

Everything that can be found wrong without reading weights is found here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from dare.errors import Notice
from dare.inputs.directory import Sidecars
from dare.inputs.sources import Source
from dare.planning.layout import Layout
from dare.planning.machine import available_cores
from dare.recipe.schema import Recipe
from dare.stages import Settings, Stage
from dare.tensors.chunks import CHUNK, chunk_count
from dare.tensors.dtypes import StorageType
from dare.tensors.files import ALIGNMENT
from dare.tensors.header import TensorInfo
from dare.tensors.sizes import show_size

INTERPRETER_BYTES = 200 << 20
"""About what Python, NumPy and compiled kernels take before the first buffer; for the forecast."""


class Fate(StrEnum):
    """What becomes of a tensor."""

    MERGED = "merged"
    COPIED = "copied from base (not a weight type)"
    BASE_ONLY = "copied from base (no model has it)"
    MISMATCHED = "copied from base (a model's does not fit)"
    LEFT_OUT = "left out (only in a model)"


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output."""

    name: str
    fate: Fate
    shape: tuple[int, ...]
    base: TensorInfo
    dtype: StorageType
    """Storage type in the output."""
    models: tuple[int, ...]
    """The models that take part: whose delta is merged, or whose copy is compared."""
    settings: tuple[tuple[Settings, ...], ...]
    """For each of those models, the settings of each delta stage."""
    weights: tuple[float, ...]
    """For each of those models, its weight."""
    combine: Settings

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.base.elements

    @property
    def chunks(self) -> int:
        """How many pieces of work it is cut into."""
        return chunk_count(self.elements)

    def settings_of(self, model: int) -> tuple[Settings, ...]:
        """The settings of each delta stage for one model."""
        return self.settings[self.models.index(model)]

    def draws_of(self, chain: Sequence[Stage], model: int) -> list[int | None]:
        """Which draw each delta stage makes for one model, from 0; None for those that do not."""
        draws = itertools.count()
        return [
            next(draws) if stage.is_random(settings) else None
            for stage, settings in zip(chain, self.settings_of(model), strict=False)
        ]

    def surveyed_stages(self, chain: Sequence[Stage], model: int) -> list[int]:
        """Positions of the delta stages that must survey this tensor of this model first."""
        return [
            position
            for position, settings in enumerate(self.settings_of(model))
            if chain[position].surveys_when(settings)
        ]

    def survey_reads(self, chain: Sequence[Stage], model: int) -> int:
        """How often those stages read this tensor of this model, if surveys can remember."""
        settings = self.settings_of(model)
        return sum(
            max(1, len(chain[position].rounds(settings[position])))
            for position in self.surveyed_stages(chain, model)
        )


@dataclass(frozen=True)
class CensusPlan:
    """The tensors of one model that a delta stage surveys together."""

    model: int
    position: int
    """Of the stage in the chain."""
    settings: Settings
    tensors: tuple[TensorPlan, ...]
    """In the order of their names, whatever the order in the files is."""


@dataclass(frozen=True)
class Plan:
    """What a merge will do, and what it will cost."""

    recipe: Recipe
    base: Source
    models: tuple[Source, ...]
    model_names: tuple[str, ...]
    tensors: tuple[TensorPlan, ...]
    left_out: tuple[str, ...]
    """Tensors that only models have, and that the recipe allows to be dropped."""
    warnings: tuple[Notice, ...]
    layout: Layout | None
    """None when the result stays in memory."""
    notes: tuple[str, ...] = ()
    """What was done so that the inputs fit together."""
    sidecars: Sidecars | None = None
    """What goes beside the weights in an output directory."""
    base_card: Mapping[str, str] | None = None
    """What an output directory's card takes over from the base's."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The chain of stages."""
        return tuple(stage for stage, _ in self.recipe.chain)

    @property
    def combine(self) -> Stage:
        """The combine stage."""
        return self.stages[-1]

    @cached_property
    def passes(self) -> int:
        """How often a tensor is read at the most, if surveys can remember what they see."""
        most = 0
        for tensor in self.merged():
            deltas = max((tensor.survey_reads(self.stages, m) for m in tensor.models), default=0)
            most = max(most, deltas + self.combine.surveys_when(tensor.combine))
        return most + 1

    @cached_property
    def has_later_draws(self) -> bool:
        """Whether more than one stage of some model's chain is random."""
        return any(
            1 in tensor.draws_of(self.stages, model)
            for tensor in self.merged()
            for model in tensor.models
        )

    def source_of(self, tensor: TensorPlan, model: int) -> Source:
        """Where a model's copy of a tensor is read: the base, if the model lacks it."""
        source = self.models[model]
        return source if tensor.name in source.tensors else self.base

    def merged(self) -> Iterator[TensorPlan]:
        """The tensors that are merged."""
        return (tensor for tensor in self.tensors if tensor.fate is Fate.MERGED)

    @property
    def workspace_bytes(self) -> int:
        """Buffers of one thread."""
        inputs_and_output = 2 + len(self.models)
        floats = 2  # base and merged delta
        if not self.is_fused:  # all values, an election's sums, a survey's magnitudes, zeros
            floats += len(self.models) + 4 + 1 + self.has_deltas
        lanes = 2
        buffers = CHUNK * (inputs_and_output * self.widest + 4 * floats + lanes) + ALIGNMENT
        return buffers + self.reading_bytes

    @cached_property
    def reading_bytes(self) -> int:
        """What the sources keep for one thread: factors of LoRAs."""
        return sum(source.reading_bytes for source in (self.base, *self.models))

    @cached_property
    def has_deltas(self) -> bool:
        """Whether models are given by deltas, not only by weights."""
        return any(model.holds_delta(name) for model in self.models for name in model.tensors)

    @cached_property
    def is_fused(self) -> bool:
        """Whether one kernel can combine every chunk, so that no model's values lie in memory."""
        if self.passes > 1 or any(0 in tensor.weights for tensor in self.merged()):
            return False
        if self.has_deltas or not all(self._is_lazy(tensor) for tensor in self.merged()):
            return False
        if self.has_later_draws:  # a kernel draws one mask for each model
            return False
        return all(
            len({self.source_of(tensor, m).tensors[tensor.name].dtype for m in tensor.models}) == 1
            for tensor in self.merged()
        )

    def _is_lazy(self, tensor: TensorPlan) -> bool:
        chains = (zip(self.stages, settings, strict=False) for settings in tensor.settings)
        return self.combine.is_lazy(tensor.combine) and all(
            stage.is_lazy(settings) for chain in chains for stage, settings in chain
        )

    @cached_property
    def widest(self) -> int:
        """Bytes per element of the widest storage type in inputs and output."""
        widest = 1
        for tensor in self.tensors:
            models = (self.source_of(tensor, m).tensors[tensor.name] for m in tensor.models)
            kinds = (tensor.dtype, tensor.base.dtype, *(info.dtype for info in models))
            widest = max(widest, *(kind.itemsize for kind in kinds))
        return widest

    @cached_property
    def matrix_bytes(self) -> int:
        """What stages that need whole matrices hold for one tensor, of all models."""
        most = 0
        for tensor in self.merged():
            held = 0
            for model in tensor.models:
                for position in tensor.surveyed_stages(self.stages, model):
                    if (survey_bytes := self.stages[position].survey_bytes) is not None:
                        held += survey_bytes(tensor.shape, 1)
            combine_bytes = self.combine.survey_bytes
            if combine_bytes is not None and self.combine.surveys_when(tensor.combine):
                held += combine_bytes(tensor.shape, len(tensor.models))
            most = max(most, held)
        return most

    @cached_property
    def censuses(self) -> tuple[CensusPlan, ...]:
        """The surveys over many tensors, in the order in which they can be made."""
        groups: dict[tuple[Any, ...], list[TensorPlan]] = {}
        for tensor in sorted(self.merged(), key=lambda tensor: tensor.name):
            for model in tensor.models:
                for position, settings in enumerate(tensor.settings_of(model)):
                    if self.stages[position].rounds(settings):
                        key = position, model, *sorted(settings.items())
                        groups.setdefault(key, []).append(tensor)
        return tuple(
            CensusPlan(model, position, dict(settings), tuple(tensors))
            for (position, model, *settings), tensors in sorted(
                groups.items(), key=lambda group: group[0][:2]
            )
        )

    @cached_property
    def census_bytes(self) -> int:
        """What the looks at the tensors of one census take; there is one at a time."""
        most = 0
        for found in self.censuses:
            census = self.stages[found.position].census
            assert census is not None  # it has rounds
            most = max(most, census.look_bytes * len(found.tensors))
        return most

    @property
    def threads(self) -> int:
        """Worker threads, as many as the recipe or the machine says and the memory allows."""
        wanted = self.recipe.threads or available_cores()
        each = self.workspace_bytes + self.matrix_bytes
        left = self.recipe.max_memory - self.matrix_bytes - self.census_bytes
        return max(1, min(wanted, left // each))

    @property
    def held_bytes(self) -> int:
        """What whole matrices take, of a tensor for each thread and of the one before; censuses."""
        return (self.threads + 1) * self.matrix_bytes + self.census_bytes

    @property
    def spare_bytes(self) -> int:
        """What one thread's survey may remember: half of what the buffers leave."""
        left = self.recipe.max_memory - self.held_bytes - self.threads * self.workspace_bytes
        return max(0, left // 2 // self.threads) if self.passes > 1 else 0

    @property
    def buffer_bytes(self) -> int:
        """What buffers take at the most, which is what `max_memory` bounds."""
        return self.held_bytes + self.threads * (self.workspace_bytes + self.spare_bytes)

    @property
    def peak_memory(self) -> int:
        """Forecast of the most memory the process takes: buffers, and Python with its packages."""
        return INTERPRETER_BYTES + self.buffer_bytes

    @property
    def memory_line(self) -> str:
        """Both figures of memory, in a line."""
        return (
            f"buffers {show_size(self.buffer_bytes)} of at most "
            f"{show_size(self.recipe.max_memory)} (max_memory); "
            f"the process about {show_size(self.peak_memory)}"
        )

    @cached_property
    def bytes_read(self) -> int:
        """Bytes that are read at least (a survey that cannot remember reads more than once)."""
        total = 0
        for tensor in self.tensors:
            base = tensor.base.nbytes
            models = {
                m: self.source_of(tensor, m).tensors[tensor.name].nbytes for m in tensor.models
            }
            total += base + sum(models.values())
            if tensor.fate is Fate.MERGED:
                total += sum(
                    tensor.survey_reads(self.stages, m) * (base + size)
                    for m, size in models.items()
                )
                if self.combine.surveys_when(tensor.combine):
                    total += base + sum(models.values())
        return total

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of weights in the output."""
        return sum(tensor.elements * tensor.dtype.itemsize for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        return {
            "method": "+".join(stage.name for stage in self.stages),
            "models": [
                {"name": name, "weight": weight, "seed": seed}
                for name, weight, seed in zip(
                    self.model_names, self.recipe.weights(), self.recipe.seeds(), strict=True
                )
            ],
            "passes": self.passes,
            "threads": self.threads,
            "peak_memory_bytes": self.peak_memory,
            "buffer_bytes": self.buffer_bytes,
            "max_memory_bytes": self.recipe.max_memory,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "notes": list(self.notes),
            "files_beside": sorted(self.sidecars.files) if self.sidecars else [],
            "warnings": [asdict(notice) for notice in self.warnings],
            "tensors": [
                {
                    "name": tensor.name,
                    "fate": tensor.fate.value,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype.name,
                    "models": [self.model_names[m] for m in tensor.models],
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
        for file, tensors in self.layout.files.items() if self.layout else ():
            position = 0
            for name, dtype, shape in tensors:
                nbytes = TensorInfo(name, dtype, shape, 0).nbytes
                places[name] = {"file": file, "data_offsets": [position, position + nbytes]}
                position += nbytes
        return places

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """The plan in a few lines."""
        fates = dict.fromkeys(Fate, 0)
        for tensor in self.tensors:
            fates[tensor.fate] += 1
        fates[Fate.LEFT_OUT] = len(self.left_out)
        elements = sum(tensor.elements for tensor in self.tensors)
        lines = [
            f"{'+'.join(stage.name for stage in self.stages)} of {len(self.models)} models "
            f"({', '.join(self.model_names)}): {len(self.tensors)} tensors, {elements:,} elements",
            *(f"  {count:6} {fate.value}" for fate, count in fates.items() if count),
            f"  reads {show_size(self.bytes_read)} in {self.passes} pass(es), "
            f"writes {show_size(self.bytes_written)}, {self.threads} threads",
            f"  {self.memory_line}",
        ]
        if self.layout is not None:
            lines.append(f"  to {self.layout.target} ({len(self.layout.files)} file(s))")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)
