"""The seam for devices: what a device does for a merge, and the backend for arrays.

A backend takes a batch of chunks, of one tensor or several, as stored bytes. In one call it
combines them, adds the result to the base, stores it in the type of the output, counts and hashes.
Surveys ask it for figures of whole tensors. It belongs to one worker and owns its buffers;
`kernels` says what these take before there is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.kernels import ChunkJob, Done, device_of
from dare.kernels.reference import magnitude_bits
from dare.output.journal import Record
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.stages.blocks import (
    INFINITY,
    Block,
    ComputedError,
    Deltas,
    DeltaView,
    JointView,
    Note,
    OnlyNotes,
    Scratch,
)
from dare.stages.dropping import make_up_for
from dare.stages.matrices import chunk_of_summary
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans
from dare.tensors.dtypes import StorageType
from dare.tensors.files import ALIGNMENT, aligned_bytes

Raw = NDArray[Any]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Summaries = Mapping[int, Any]  # findings of a model's surveying stages, by position in the chain
# Largest |δ|, elements over the threshold and survivors after each stage, for each model of a
# chunk; and the elements of the result that overflow, and that are NaN.
Figures = tuple[tuple[tuple[int, ...], ...], tuple[int, int]]


class Chunk(NamedTuple):
    """The same elements of the base and of models, of one chunk or several that follow it."""

    tensor: TensorPlan
    start: int
    base: Raw
    tuned: Mapping[int, Raw]  # the elements by model
    summaries: Mapping[int, Summaries]  # the findings of their surveys
    summary: Any = None  # the finding of the combine stage, or the matrix of refine stages
    # The digests of every chunk of base and models; none of those that must be computed.
    known: Sequence[Sequence[str]] = ()
    there: Sequence[int] = ()  # addresses of base and models on the GPU that merges, if it has them
    # Buffers for elements that only the GPU has, should they be needed here: then base and models
    # are `OnGpu`. There are none if the elements are here.
    rooms: Sequence[Raw] = ()

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.base.size

    @property
    def number(self) -> int:
        """The number of the first chunk in the tensor."""
        return self.start // CHUNK

    @property
    def inputs(self) -> list[Raw]:
        """The elements of the base, then of each model."""
        return [self.base, *self.tuned.values()]

    def split(self, chunks: int = 1) -> Iterator[Chunk]:
        """Yield parts of so many chunks."""
        for first in range(0, self.size, CHUNK * chunks):
            part = slice(first, first + CHUNK * chunks)
            numbers = slice(first // CHUNK, first // CHUNK + chunks)
            yield self._replace(
                start=self.start + first,
                base=self.base[part],
                tuned={model: raw[part] for model, raw in self.tuned.items()},
                known=[digests[numbers] for digests in self.known],
                there=[
                    address + first * raw.itemsize
                    for address, raw in zip(self.there, self.inputs, strict=False)
                ],
            )


# Reads a whole tensor, chunk by chunk, as often as it is called.
ReadChunks = Callable[[], Iterator[Chunk]]
# Reads elements from all over it as one chunk; None if that takes long.
ReadSample = Callable[[], Chunk | None]


class Room(NamedTuple):
    """Where the result of a chunk is made: at an address on the GPU if given, else in memory."""

    raw: Bytes
    on_gpu: int | None = None

    def part(self, first: int, nbytes: int) -> Room:
        """Return the room of some bytes."""
        place = None if self.on_gpu is None else self.on_gpu + first
        return Room(self.raw[first : first + nbytes], place)


class Made(NamedTuple):
    """Chunks of one tensor that follow each other and are done."""

    chunk: Chunk
    inputs: Sequence[Sequence[str]]  # digests of the chunks of base and models
    output: Sequence[str]  # digests of the result's
    of_models: Callable[[], Sequence[Sequence[tuple[int, ...]]]]  # figures of each model's chunks
    exceptions: Sequence[tuple[int, int]] = ()  # none if all is finite

    def records(self) -> list[Record]:
        """Return a record for each chunk."""
        name, count = self.chunk.tensor.name, len(self.output)
        numbers = range(self.chunk.number, self.chunk.number + count)
        models = list(zip(*self.of_models(), strict=True)) or [()] * count
        exceptions = self.exceptions or [(0, 0)] * count
        found = zip(zip(*self.inputs, strict=True), self.output, models, exceptions, strict=True)
        return [Record(name, number, *each) for number, each in zip(numbers, found, strict=True)]

    def summed_up(self) -> Record:
        """Return one record for all chunks, without figures; a tensor's digest joins theirs too."""
        inputs = tuple(map("".join, self.inputs))
        where = self.chunk.tensor.name, self.chunk.number
        return Record(*where, inputs, "".join(self.output), (), (0, 0))


class Place(NamedTuple):
    """A surveying stage's place in a chain, the findings of those before it, and its census."""

    position: int
    before: Summaries
    census: Any = None


class Backend(ABC):
    """Computes for one worker, on some device."""

    batch_elements: int  # elements of each input that a batch may have
    inputs: Bytes  # a row for the base and one for each model, which a batch is read into
    output: Bytes  # room for the result of a batch
    gpu: int | None  # the number of the GPU that has the rooms on a GPU

    @abstractmethod
    def merge(self, batch: Sequence[tuple[Chunk, Room]]) -> list[Made]:
        """Merge chunks, or copy those that are not merged; store the result of each in its room.

        Chunks that follow each other may be made in several parts.
        """

    @abstractmethod
    def find_cuts(self, surveys: Sequence[tuple[TensorPlan, int]]) -> None:
        """Find what the surveys of some models' tensors will ask for, if all at once is faster."""

    @abstractmethod
    def digests(self, raws: Sequence[Raw], known: Sequence[Sequence[str]]) -> list[list[str]]:
        """Hash every chunk of each array, but where its digests are known."""

    @abstractmethod
    def kept_lanes(self, chunk: Chunk, model: int) -> NDArray[np.uint8]:
        """Return 255 for each element that a model's mask keeps, else 0; until the next call."""

    @abstractmethod
    def view(
        self, read: ReadChunks, sample: ReadSample, tensor: TensorPlan, model: int, place: Place
    ) -> DeltaView:
        """Show one model's tensor to the survey of a stage of its chain."""

    @abstractmethod
    def joint_view(self, read: ReadChunks, tensor: TensorPlan) -> JointView:
        """Show a tensor of all models to the survey of the combine stage, or to refine stages."""


class Noted(NamedTuple):
    """A part of a merge of which nothing is computed yet."""

    deltas: Deltas
    note: Note
    job: ChunkJob


class ArrayBackend(Backend):
    """Computes on NumPy arrays, with the kernels of any device."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._kernels = kernels.load(plan.device)
        chunks = plan.cost.chunks_at_once
        self.batch_elements = CHUNK * chunks
        span = self.batch_elements * plan.cost.widest
        self.gpu = getattr(self._kernels, "number", None)
        pinned = getattr(self._kernels, "pinned", None)  # for memory that a GPU reaches by itself
        rows, read = 1 + len(plan.models), 0 if plan.is_held else span
        inputs = pinned(rows * read) if pinned else np.empty(rows * read, np.uint8)
        self.inputs = inputs.reshape(rows, read)
        self.output = (pinned or aligned_bytes)(span + ALIGNMENT)
        self._scratch = Scratch(CHUNK)
        self._cuts: dict[tuple[str, int, int], tuple[int, int] | None] = {}
        self._nothing = np.zeros(CHUNK if plan.has_deltas else 0, np.float32)
        self._seeds = plan.recipe.seeds()
        self._threshold_bits = np.float32(plan.recipe.delta_threshold).view(np.int32)

    def merge(self, batch: Sequence[tuple[Chunk, Room]]) -> list[Made]:
        prepared = [self._prepare(chunk, into) for chunk, into in batch]
        jobs = [each.job for each in prepared if isinstance(each, Noted)]
        done = iter(self._kernels.merge(jobs, self._threshold_bits))
        made: list[Made] = []
        for (chunk, into), each in zip(batch, prepared, strict=True):
            made += self._finish(chunk, into, each, next(done)) if isinstance(each, Noted) else each
        return made

    def _prepare(self, chunk: Chunk, into: Room) -> Noted | list[Made]:
        """Take chunks through all stages: what is only noted down is left to be done."""
        tensor = chunk.tensor
        if chunk.rooms and not (tensor.fits_gpu and self._kernels.takes(chunk.inputs)):
            chunk = self._fetched(chunk)
        if not tensor.is_merged:
            return [self._made(chunk, into, self._convert(chunk, into.raw))]
        try:
            deltas = self._deltas(chunk)
            merged = self._combined(deltas, tensor)
        except ComputedError:
            return self._by_chunks(chunk, into)
        is_noted = isinstance(merged, Note) and not merged.is_array
        if is_noted and self._plan.sole_model(tensor) is None:
            scale, known = np.float32(self._plan.recipe.scale), [bool(each) for each in chunk.known]
            out = into.raw.view(tensor.dtype.carrier)
            how = merged.operands, chunk.start, merged.elects, scale, out, known, into.on_gpu
            return Noted(deltas, merged, ChunkJob(chunk.base, *how, chunk.there))
        if chunk.size > CHUNK or chunk.rooms:
            return self._by_chunks(chunk, into)
        return [self._made_of(deltas, merged, chunk, into)]

    def _combined(self, deltas: Deltas, tensor: TensorPlan) -> Any:
        """Return the merged delta: an array, or what is noted down of it."""
        if tensor.refine_stages:
            return chunk_of_summary(deltas)
        return tensor.combine_stage.apply(deltas, **tensor.combine)

    def _fetched(self, chunk: Chunk) -> Chunk:
        """Return a chunk with its elements here."""
        if not chunk.rooms:
            return chunk
        self._kernels.fetch(zip(chunk.inputs, chunk.rooms, strict=True))
        base, *tuned = chunk.rooms
        return chunk._replace(base=base, tuned=dict(zip(chunk.tuned, tuned, strict=True)), rooms=())

    def _by_chunks(self, chunk: Chunk, into: Room) -> list[Made]:
        """Compute chunks step by step, one after the other."""
        made, width = [], chunk.tensor.dtype.itemsize
        for part in self._fetched(chunk).split():
            deltas, first = self._deltas(part), (part.start - chunk.start) * width
            room = into.part(first, part.size * width)
            made.append(self._made_of(deltas, self._combined(deltas, part.tensor), part, room))
        return made

    def _made_of(self, deltas: Deltas, merged: Floats, chunk: Chunk, into: Room) -> Made:
        """Add what was merged to the base, and store it."""
        base, merged = chunk.base, np.asarray(merged)
        if (sole := self._plan.sole_model(chunk.tensor)) is not None:
            merged.fill(0)  # the stages were run for their figures
            base = chunk.tuned[sole]
        exceptions = self._add(base, merged, chunk.tensor.dtype, into.raw)
        figures = [block.figures() for block in deltas.blocks]
        return self._made(chunk, into, exceptions, figures)

    def _finish(self, chunk: Chunk, into: Room, noted: Noted, done: Done) -> list[Made]:
        """Take in what was done; do it once more, step by step, where something is not finite."""
        if done.figures[..., 0].max() >= INFINITY or done.peak >= chunk.tensor.dtype.overflow_bits:
            return self._by_chunks(chunk, into)
        pairs = zip(chunk.known, done.digests, strict=False)  # that of the result has no other
        inputs = [list(known) or digests for known, digests in pairs]
        figures = partial(_measured, noted.deltas, done.figures)
        return [Made(chunk, inputs, done.digests[-1], figures)]

    def _made(
        self,
        chunk: Chunk,
        into: Room,
        exceptions: list[tuple[int, int]],
        figures: Sequence[Sequence[tuple[int, ...]]] = (),
    ) -> Made:
        """Hash what was read and made here, while it is in the cache."""
        if into.on_gpu is not None:
            self._kernels.send(into.raw, into.on_gpu)
        raws = [*chunk.inputs, into.raw.view(chunk.tensor.dtype.carrier)]
        *inputs, output = self.digests(raws, [*chunk.known, ()])
        return Made(chunk, inputs, output, lambda: figures, exceptions)

    def _convert(self, chunk: Chunk, into: Bytes) -> list[tuple[int, int]]:
        """Store the base in the type of the output."""
        dtype = chunk.tensor.dtype
        if dtype == chunk.tensor.base.dtype:
            into[:] = chunk.base.view(np.uint8)
            return []
        return self._add(chunk.base, np.zeros(chunk.size, np.float32), dtype, into)

    def digests(self, raws: Sequence[Raw], known: Sequence[Sequence[str]]) -> list[list[str]]:
        pairs = list(zip(raws, known, strict=True))
        found = iter(self._kernels.digests([raw for raw, digests in pairs if not digests]))
        return [list(digests) or next(found) for _, digests in pairs]

    def kept_lanes(self, chunk: Chunk, model: int) -> NDArray[np.uint8]:
        return self._block(chunk, model, {}).lanes()[0]

    def view(
        self, read: ReadChunks, sample: ReadSample, tensor: TensorPlan, model: int, place: Place
    ) -> DeltaView:
        def blocks() -> Iterator[Block]:
            return (self._block(chunk, model, place.before, place.position) for chunk in read())

        def peek() -> Block | None:
            before = zip(tensor.stages[: place.position], tensor.settings_of(model), strict=False)
            if not all(stage.is_lazy(settings) for stage, settings in before):
                return None  # it may need whole rows
            chunk = sample()
            return chunk and self._block(chunk, model, place.before, place.position)

        spare_bytes = self._plan.cost.spare_bytes
        cuts = {} if place.position else self._cuts
        shown = self._kernels, tensor.shape, spare_bytes, blocks, place.census, peek
        return DeltaView(*shown, lambda rank: cuts.get((tensor.name, model, rank)))

    def find_cuts(self, surveys: Sequence[tuple[TensorPlan, int]]) -> None:
        self._cuts.clear()
        if not device_of(self._plan.device).finds_cuts:
            return
        asked = {}
        for tensor, model in surveys:
            there = self._plan.on_gpu(tensor, [model])
            if there and not self._plan.source_of(tensor, model).delta_of(tensor.name).is_change:
                for rank in tensor.ranks_of(model):
                    asked[tensor.name, model, rank] = (*there, rank)
        self._cuts |= zip(asked, self._kernels.find_cuts(list(asked.values())), strict=True)

    def joint_view(self, read: ReadChunks, tensor: TensorPlan) -> JointView:
        def deltas() -> Iterator[Deltas]:
            for chunk in read():
                yield (found := self._deltas(chunk))
                found.blocks = ()  # whoever still has it does not keep the values

        spare_bytes = self._plan.cost.spare_bytes
        return JointView(self._kernels, tensor.shape, spare_bytes, deltas, tensor.weights)

    def _block(
        self, chunk: Chunk, model: int, summaries: Summaries, before: int | None = None
    ) -> Block:
        """Return a model's delta as it comes to the stage at a position of its chain."""
        tensor, tuned = chunk.tensor, chunk.tuned[model]
        is_delta = self._plan.source_of(tensor, model).delta_of(tensor.name).is_change
        block = Block(
            self._kernels,
            tensor.key,
            chunk.start,
            self._seeds[model],
            tuned,
            self._nothing[: tuned.size] if is_delta else chunk.base,
            self._scratch_for(chunk),
            self._threshold_bits,
        )
        if (drop := tensor.drop_of(model)) is not None:
            make_up_for(block, *drop)
        place = tensor.models.index(model)
        chain, draws = tensor.treatment.chains[place], tensor.treatment.draws[place]
        for position, (stage, settings) in enumerate(chain[:before]):
            block.summary, block.draw = summaries.get(position), draws[position]
            stage.apply(block, **settings)
            block.end_stage()
        if before is not None:
            block.draw = draws[before]
        return block

    def _scratch_for(self, chunk: Chunk) -> Scratch | OnlyNotes:
        return OnlyNotes() if chunk.size > CHUNK or chunk.rooms else self._scratch

    def _deltas(self, chunk: Chunk) -> Deltas:
        """Return the deltas of all models as they come to the combine stage."""
        found, weights = chunk.summaries, chunk.tensor.weights
        blocks = [self._block(chunk, model, found.get(model, {})) for model in chunk.tuned]
        arrays = self._scratch_for(chunk), self._threshold_bits
        return Deltas(self._kernels, chunk.base, blocks, weights, *arrays, chunk.summary)

    def _add(
        self, base: Raw, merged: Floats, dtype: StorageType, into: Bytes
    ) -> list[tuple[int, int]]:
        """Encode base + scale·merged; count for each chunk results that overflow or are NaN."""
        scale, limit = np.float32(self._plan.recipe.scale), dtype.overflow_bits
        if self._kernels.add_to_base(base, merged, scale, into.view(dtype.carrier)) < limit:
            return [(0, 0)] * chunk_count(base.size)
        has_infinities = np.isinf(np.array(np.inf).astype(dtype.numpy_type))
        counts = []
        for first, size in chunk_spans(base.size):
            origin = np.empty(size, np.float32)
            self._kernels.decode(base[first : first + size], origin)
            with np.errstate(invalid="ignore", over="ignore"):
                moved = origin + scale * merged[first : first + size]
            found = magnitude_bits(moved)
            overflowed = (found >= limit) & (found <= INFINITY)
            if has_infinities:  # those of the base do not count
                overflowed &= ~(np.isinf(origin) & (moved == origin))
            nans = np.count_nonzero(found > INFINITY)
            counts.append((int(np.count_nonzero(overflowed)), int(nans)))
        return counts


def _measured(deltas: Deltas, figures: NDArray[np.int64]) -> list[list[tuple[int, ...]]]:
    """Return the figures of each model's chunks, from those of the kernel that merged them."""
    deltas.measured(figures)
    return [block.figures() for block in deltas.blocks]


def open_backend(plan: Plan) -> Backend:
    """Make a backend for the plan's device."""
    return ArrayBackend(plan)
