"""The computation for a chunk: stored bytes of base and models in, stored bytes and figures out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.stages import Settings
from dare.stages.blocks import Block, Deltas, Scratch
from dare.stages.dare import make_up_for
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans
from dare.tensors.dtypes import StorageType
from dare.tensors.files import ALIGNMENT, aligned_bytes

Raw = NDArray[Any]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Summaries = Mapping[int, Any]  # findings of a model's surveying stages, by position in the chain


_ModelChain = tuple[bool, list[tuple[Callable[..., None], Settings, int | None]]]
"""True for a model that is given by deltas; for each stage its function, settings and draw."""


class Chunk(NamedTuple):
    """The same elements of the base and of models, of one chunk or several that follow it."""

    tensor: TensorPlan
    start: int
    base: Raw
    tuned: Mapping[int, Raw]  # the elements by model

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.base.size

    @property
    def number(self) -> int:
        """The number of the first chunk in the tensor."""
        return self.start // CHUNK


class Figures(NamedTuple):
    """Counts for the report of a chunk."""

    models: tuple[tuple[int, ...], ...]
    """Largest |δ|, elements over the threshold and survivors after each stage, for each model."""
    exceptions: tuple[int, int]  # elements that overflow, and that are NaN


class Backend:
    """The means of one worker to compute: kernels on NumPy arrays, and buffers of its own."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._kernels = kernels.load(plan.backend)
        self.chunks_at_once = plan.cost.chunks_at_once  # read and written together, if possible
        span = CHUNK * self.chunks_at_once * plan.cost.widest
        self.inputs = np.empty((1 + len(plan.models), span), np.uint8)  # the base's, each model's
        self.output = aligned_bytes(span + ALIGNMENT)
        self.chunks_together = self.chunks_at_once if plan.cost.is_fused else 1
        """Chunks that can be merged as one, because no stage asks for values."""
        self._scratch = Scratch(CHUNK * self.chunks_together)
        self._nothing = np.zeros(CHUNK if plan.has_deltas else 0, np.float32)
        self._chains: tuple[TensorPlan, dict[int, _ModelChain]] | None = None
        self._seeds = plan.recipe.seeds()
        self._threshold_bits = np.float32(plan.recipe.delta_threshold).view(np.int32)

    def merge(
        self, chunk: Chunk, summaries: Mapping[int, Summaries], summary: Any, into: Bytes
    ) -> list[Figures]:
        """Take chunks through all stages, add the result to the base, and store it there."""
        deltas = self.deltas(chunk, summaries, summary)
        merged = self._plan.combine.apply(deltas, **chunk.tensor.combine)
        if self._plan.is_model(chunk.tensor):  # the stages were run for their figures
            merged.fill(0)
            ((model, info),) = self._plan.copies_of(chunk.tensor)
            exceptions = self._add(chunk.tuned[model], info.dtype, merged, chunk, into)
        else:
            exceptions = self._add(chunk.base, chunk.tensor.base.dtype, merged, chunk, into)
        figures = zip(*(block.figures() for block in deltas.blocks), strict=True)
        return [
            Figures(tuple(map(tuple, models)), counts)
            for models, counts in zip(figures, exceptions, strict=True)
        ]

    def convert(self, chunk: Chunk, into: Bytes) -> list[Figures]:
        """Store the base in the type of the output."""
        kind = chunk.tensor.base.dtype
        if chunk.tensor.dtype == kind:
            into[:] = chunk.base.view(np.uint8)
            return [Figures((), (0, 0))] * chunk_count(chunk.size)
        nothing = np.zeros(chunk.size, np.float32)
        return [Figures((), counts) for counts in self._add(chunk.base, kind, nothing, chunk, into)]

    def digests(self, raws: Sequence[Raw]) -> list[list[str]]:
        """Hash every chunk of some arrays."""
        found: list[list[str]] = self._kernels.digests(raws)
        return found

    def block(
        self, chunk: Chunk, model: int, summaries: Summaries, before: int | None = None
    ) -> Block:
        """Return a model's delta as it comes to the stage at a position of its chain."""
        tensor, tuned = chunk.tensor, chunk.tuned[model]
        is_delta, chain = self._chain_of(tensor, model)
        block = Block(
            self._kernels,
            tensor.key,
            chunk.start,
            self._seeds[model],
            tuned,
            self._nothing[: tuned.size] if is_delta else chunk.base,
            self._scratch,
            self._threshold_bits,
        )
        if (drop := tensor.drop_of(model)) is not None:
            make_up_for(block, *drop)
        for position, (apply, settings, draw) in enumerate(chain[:before]):
            block.summary, block.draw = summaries.get(position), draw
            apply(block, **settings)
            block.end_stage()
        if before is not None:
            block.draw = chain[before][-1]
        return block

    def _chain_of(self, tensor: TensorPlan, model: int) -> _ModelChain:
        """Return the stages for a model's tensor, found once for all its chunks."""
        if self._chains is None or self._chains[0] is not tensor:
            self._chains = tensor, {}
        chains = self._chains[1]
        if model not in chains:
            stages = self._plan.stages
            settings, draws = tensor.settings_of(model), tensor.draws_of(stages, model)
            is_delta = self._plan.source_of(tensor, model).delta_of(tensor.name).is_change
            applied = (stage.apply for stage in stages)
            chains[model] = is_delta, list(zip(applied, settings, draws, strict=False))
        return chains[model]

    def deltas(
        self, chunk: Chunk, summaries: Mapping[int, Summaries], summary: Any = None
    ) -> Deltas:
        """Return the deltas of all models as they come to the combine stage."""
        blocks = [self.block(chunk, model, summaries.get(model, {})) for model in chunk.tuned]
        weights = chunk.tensor.weights
        return Deltas(
            self._kernels, chunk.base, blocks, weights, self._scratch, self._threshold_bits, summary
        )

    def _add(
        self, base: Raw, kind: StorageType, merged: Floats, chunk: Chunk, into: Bytes
    ) -> list[tuple[int, int]]:
        """Encode base + scale·merged; count for each chunk results that overflow or are NaN."""
        dtype, scale = chunk.tensor.dtype, np.float32(self._plan.recipe.scale)
        add = self._kernels.add_to_base if dtype == kind else self._kernels.add_to_base_as
        limit = np.int32(dtype.overflow_bits)
        if add(base, merged, scale, into.view(dtype.carrier)) < limit:
            return [(0, 0)] * chunk_count(base.size)
        has_infinities = np.isinf(np.array(np.inf).astype(dtype.numpy_type))
        counts = []
        for first, size in chunk_spans(base.size):
            raw, change = base[first : first + size], merged[first : first + size]
            overflowed, nans = self._kernels.count_exceptions(raw, change, scale, limit)
            kept = 0  # infinities of the base, which do not count
            if has_infinities:
                origin = np.empty(size, np.float32)
                self._kernels.decode(raw, origin)
                with np.errstate(invalid="ignore", over="ignore"):
                    is_kept = np.isinf(origin) & (origin + scale * change == origin)
                kept = int(np.count_nonzero(is_kept))
            counts.append((int(overflowed) - kept, int(nans)))
        return counts
