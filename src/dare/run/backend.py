"""From the stored bytes of a chunk of base and models to stored bytes and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.stages import Block, Deltas, Scratch, Settings
from dare.stages.dare import make_up_for
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans
from dare.tensors.dtypes import StorageType
from dare.tensors.files import ALIGNMENT, aligned_bytes

Raw = NDArray[Any]
"""Stored elements, as carriers of their type."""
Bytes = NDArray[np.uint8]
Summaries = Mapping[int, Any]
"""What surveying stages found in a tensor of one model, by their positions in the chain."""


_Way = tuple[bool, list[tuple[Callable[..., None], Settings, int | None]]]
"""Whether a model is given by deltas; for each stage its function, settings and draw."""


class Chunk(NamedTuple):
    """What is read for a piece of work: the same elements of the base and of models.

    It may be several chunks that follow each other.
    """

    tensor: TensorPlan
    start: int
    base: Raw
    tuned: Mapping[int, Raw]
    """By model."""

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.base.size

    @property
    def number(self) -> int:
        """Which chunk of the tensor it is, or begins with."""
        return self.start // CHUNK


class Figures(NamedTuple):
    """What became of a chunk."""

    models: tuple[tuple[int, ...], ...]
    """For each model: largest |δ|, elements over the threshold, survivors after each stage."""
    exceptions: tuple[int, int]
    """Elements that overflow, and that are NaN."""


class Backend:
    """What a worker computes with: each thread has one, which owns its buffers.

    This one runs the stages on NumPy arrays, with the kernels `cpu` or `reference`. Another device
    would override `merge` for chains whose stages are lazy; the others compute on arrays, here.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._kernels = kernels.load(plan.backend)
        self.chunks_at_once = plan.cost.chunks_at_once
        """So many are read and written together, where that can be done."""
        span = CHUNK * self.chunks_at_once * plan.cost.widest
        self.inputs = np.empty((1 + len(plan.models), span), np.uint8)
        """Where stored elements are read to: the base's, then each model's."""
        self.output = aligned_bytes(span + ALIGNMENT)
        """Where a result is made that goes elsewhere; it begins with a page."""
        self.chunks_together = self.chunks_at_once if plan.cost.is_fused else 1
        """So many can be merged as one, because no stage asks for values."""
        self._scratch = Scratch(CHUNK * self.chunks_together)
        self._nothing = np.zeros(CHUNK if plan.has_deltas else 0, np.float32)
        self._ways: tuple[TensorPlan, dict[int, _Way]] | None = None
        self._seeds = plan.recipe.seeds()
        self._threshold_bits = np.float32(plan.recipe.delta_threshold).view(np.int32)

    def merge(
        self, chunk: Chunk, summaries: Mapping[int, Summaries], summary: Any, into: Bytes
    ) -> list[Figures]:
        """Take chunks through all stages, add what comes of it to the base, and store it there."""
        deltas = self.deltas(chunk, summaries, summary)
        merged = self._plan.combine.apply(deltas, **chunk.tensor.combine)
        if self._plan.is_model(chunk.tensor):  # the stages were run for their figures
            merged.fill(0)
            ((model, info),) = self._plan.copies_of(chunk.tensor)
            exceptions = self._add(chunk.tuned[model], info.dtype, merged, chunk.tensor.dtype, into)
        else:
            exceptions = self._add_to_base(chunk, merged, into)
        figures = zip(*(block.figures() for block in deltas.blocks), strict=True)
        return [
            Figures(tuple(map(tuple, models)), counts)
            for models, counts in zip(figures, exceptions, strict=True)
        ]

    def convert(self, chunk: Chunk, into: Bytes) -> list[Figures]:
        """Only store the base in the type of the output."""
        if chunk.tensor.dtype == chunk.tensor.base.dtype:
            into[:] = chunk.base.view(np.uint8)
            return [Figures((), (0, 0))] * chunk_count(chunk.base.size)
        nothing = np.zeros(chunk.base.size, np.float32)
        return [Figures((), counts) for counts in self._add_to_base(chunk, nothing, into)]

    def digests(self, raws: Sequence[Raw]) -> list[list[str]]:
        """Hash every chunk of some arrays."""
        found: list[list[str]] = self._kernels.digests(raws)
        return found

    def block(
        self, chunk: Chunk, model: int, summaries: Summaries, before: int | None = None
    ) -> Block:
        """One model's delta, as it comes to the stage at a position of the chain, or to its end."""
        tensor, tuned = chunk.tensor, chunk.tuned[model]
        is_delta, chain = self._way_of(tensor, model)
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

    def _way_of(self, tensor: TensorPlan, model: int) -> _Way:
        """What becomes of a model's tensor, looked up once for all its chunks."""
        if self._ways is None or self._ways[0] is not tensor:
            self._ways = tensor, {}
        ways = self._ways[1]
        if model not in ways:
            stages = self._plan.stages
            settings, draws = tensor.settings_of(model), tensor.draws_of(stages, model)
            is_delta = self._plan.source_of(tensor, model).holds_delta(tensor.name)
            applied = (stage.apply for stage in stages)
            ways[model] = is_delta, list(zip(applied, settings, draws, strict=False))
        return ways[model]

    def deltas(
        self, chunk: Chunk, summaries: Mapping[int, Summaries], summary: Any = None
    ) -> Deltas:
        """The deltas of all models, as they come to the combine stage."""
        blocks = [self.block(chunk, model, summaries.get(model, {})) for model in chunk.tuned]
        return Deltas(
            self._kernels,
            chunk.base,
            blocks,
            chunk.tensor.weights,
            self._scratch,
            self._threshold_bits,
            summary,
        )

    def _add_to_base(
        self, chunk: Chunk, merged: NDArray[np.float32], into: Bytes
    ) -> list[tuple[int, int]]:
        return self._add(chunk.base, chunk.tensor.base.dtype, merged, chunk.tensor.dtype, into)

    def _add(
        self,
        base: Raw,
        kind: StorageType,
        merged: NDArray[np.float32],
        dtype: StorageType,
        into: Bytes,
    ) -> list[tuple[int, int]]:
        """Encode base + scale·merged; count for each chunk results that overflow or are NaN."""
        scale = np.float32(self._plan.recipe.scale)
        add = self._kernels.add_to_base if dtype == kind else self._kernels.add_to_base_as
        if add(base, merged, scale, into.view(dtype.carrier)) < dtype.overflow_bits:
            return [(0, 0)] * chunk_count(base.size)
        parts = (slice(first, first + size) for first, size in chunk_spans(base.size))
        return [self._count_exceptions(dtype, base[p], merged[p], scale) for p in parts]

    def _count_exceptions(
        self, dtype: StorageType, base: Raw, merged: NDArray[np.float32], scale: np.float32
    ) -> tuple[int, int]:
        limit = np.int32(dtype.overflow_bits)
        overflowed, nans = self._kernels.count_exceptions(base, merged, scale, limit)
        return int(overflowed) - self._count_kept(dtype, base, merged, scale), int(nans)

    def _count_kept(
        self, dtype: StorageType, raw: Raw, merged: NDArray[np.float32], scale: np.float32
    ) -> int:
        """How many infinities of the base stay what they are: they have not overflowed."""
        if not np.isinf(np.array(np.inf).astype(dtype.numpy_type)):
            return 0
        base = np.empty(raw.size, np.float32)
        self._kernels.decode(raw, base)
        with np.errstate(invalid="ignore", over="ignore"):
            return int(np.count_nonzero(np.isinf(base) & (base + scale * merged == base)))
