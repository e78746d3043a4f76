"""Models in another layout: weights like the base's, stored in other tensors.

Experts are one tensor, or one each; queries, keys and values are packed, or apart; names are longer
or shorter. transformers loads all of these. Its own conversion tables are run on tensors without
memory, for the base and for the model, there and back, and the steps for each tensor are recorded:
parts are cut, joined and transposed, never computed with. So any range of a model is presented in
the layout of its base, bit for bit. A recognised difference that cannot be converted is refused,
whatever the recipe says about missing tensors.
"""

from __future__ import annotations

import math
import re
import sys
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from dare.documents.notices import Notice, notice
from dare.errors import InputError, MismatchError
from dare.inputs.sources import CONFIG, DeltaInfo, Raw, RenamedSource, Source, SourceView
from dare.inputs.transformers_models import (
    MERGE_FIRST,
    ConversionTables,
    build_without_weights,
    find_by_table,
)
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import StorageType
from dare.tensors.header import TensorInfo

SPAN = 1 << 16  # elements that are no further apart than this are read at once
SAMPLE, SCATTER = 24, 0x9E3779B97F4A7C15  # how many elements, and a factor that scatters numbers
UNCHANGED = ""  # in place of a tensor that an adapter does not change
SAVE_ALIKE = "save both with the same program"
# Functions of torch that show, copy or join elements, and leave each as it is.
VIEWS = {"__get__", "__getitem__", "_set_grad_enabled", "chunk", "dim", "narrow", "numel", "size"}
VIEWS |= {"permute", "select", "split", "squeeze", "transpose", "unbind", "unsqueeze", "view"}
COPIES, JOINS = {"clone", "contiguous", "flatten", "reshape"}, {"cat", "stack"}
_TABLES = tomllib.loads(files("dare.inputs").joinpath("layouts.toml").read_text("utf-8"))

Read = Callable[[str, int, Raw], None]  # fills an array with elements of a stored tensor


# ---------------------------------------------------------------- tensors made of others


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the model's files, all of it."""

    name: str

    @property
    def names(self) -> frozenset[str]:
        """The stored tensors that it is made of, and perhaps others."""
        return frozenset((self.name,))

    def locate(self, index: int) -> tuple[str, int]:
        """Return the stored tensor that has an element, and the element's index there."""
        return self.name, index

    def read(self, read: Read, start: int, into: Raw) -> None:
        """Fill `into` with its elements from `start` on."""
        read(self.name, start, into)


@dataclass(frozen=True)
class Joined:
    """Several tensors side by side: a run of elements of each in turn, repeated."""

    parts: tuple[Pieces, ...]
    runs: tuple[int, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(part.names for part in self.parts))

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.runs)]

    def _find(self, index: int) -> tuple[int, int, int]:
        """Return the part that has an element, its index there, and the rest of the run."""
        row, column = divmod(index, self._starts[-1])
        part = bisect_right(self._starts, column) - 1
        run, skipped = self.runs[part], column - self._starts[part]
        return part, row * run + skipped, run - skipped

    def locate(self, index: int) -> tuple[str, int]:
        part, place, _ = self._find(index)
        return self.parts[part].locate(place)

    def read(self, read: Read, start: int, into: Raw) -> None:
        while into.size:
            part, place, count = self._find(start)
            self.parts[part].read(read, place, into[:count])
            start, into = start + count, into[count:]


@dataclass(frozen=True)
class Strided:
    """Elements of another tensor from `first` on, at fixed distances in each dimension."""

    inner: Pieces
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    first: int

    @property
    def names(self) -> frozenset[str]:
        return self.inner.names

    def locate(self, index: int) -> tuple[str, int]:
        place = self.first
        for size, step in zip(self.shape[::-1], self.steps[::-1], strict=True):
            index, at = divmod(index, size)
            place += at * step
        return self.inner.locate(place)

    def read(self, read: Read, start: int, into: Raw) -> None:
        width = math.prod(self.shape[1:])
        while into.size:
            row, column = divmod(start, width)
            first, count = self.first + row * self.steps[0], into.size // width * width
            if column or not count:
                count = min(width - column, into.size)
                inside = Strided(self.inner, self.shape[1:], self.steps[1:], first)
                inside.read(read, column, into[:count])
            else:
                self._fill(read, first, into[:count].reshape(-1, *self.shape[1:]))
            start, into = start + count, into[count:]

    def _fill(self, read: Read, first: int, box: Raw) -> None:
        """Fill an array with the same number of dimensions, from one element on."""
        reach = [(n - 1) * step for n, step in zip(box.shape, self.steps, strict=True)]
        span, moving = 1 + sum(reach), list(filter(None, reach))
        is_run = span == box.size and moving == sorted(moving, reverse=True)
        if is_run and box.flags.c_contiguous:
            self.inner.read(read, first, box.reshape(-1))
        elif span <= SPAN:
            self.inner.read(read, first, near := np.empty(span, box.dtype))
            distances = [step * near.itemsize for step in self.steps]
            box[...] = np.lib.stride_tricks.as_strided(near, box.shape, distances)
        else:
            axis = reach.index(max(reach))
            half = box.shape[axis] // 2
            low, high = np.split(box, [half], axis)
            self._fill(read, first, low)
            self._fill(read, first + half * self.steps[axis], high)


Pieces = WholeTensor | Joined | Strided


def find_origin(pieces: Pieces, elements: int) -> str | None:
    """Return the stored tensor that pieces are equal to, all of it and in order, by a sample."""
    places = [0, elements - 1, *(n * SCATTER % elements for n in range(SAMPLE))] if elements else []
    origins = [pieces.locate(place) for place in places]
    is_one = len({name for name, _ in origins}) == 1 and [place for _, place in origins] == places
    return origins[0][0] if is_one else None


# ---------------------------------------------------------------- what transformers does


def _recorder() -> Any:
    """Return a context that makes tensors without memory, and records how they are rearranged."""
    torch = sys.modules["torch"]
    mode: Any = torch.overrides.TorchFunctionMode

    class Recorder(mode):  # type: ignore[misc]
        held: dict[int, tuple[Any, Pieces]]  # by id: a storage, which is kept, and its content

        def hold(self, tensor: Any, pieces: Pieces) -> Any:
            storage = tensor.untyped_storage()
            self.held[id(storage)] = storage, pieces
            return tensor

        def make(self, name: str, shape: Sequence[int]) -> Any:
            return self.hold(torch.empty(shape, device="meta"), WholeTensor(name))

        def pieces(self, tensor: Any) -> Pieces:
            inner, shape = self.held[id(tensor.untyped_storage())][1], tuple(tensor.shape)
            return Strided(inner, shape or (1,), tensor.stride() or (1,), tensor.storage_offset())

        def __torch_function__(
            self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name, kwargs = function.__name__, kwargs or {}
            if name in JOINS:
                return self.join(name == "stack", *args, **kwargs)
            if name not in VIEWS | COPIES or any(isinstance(arg, torch.dtype) for arg in args):
                raise ValueError(f"{name} may change values")
            result = function(*args, **kwargs)
            if name in COPIES and id(result.untyped_storage()) not in self.held:
                self.hold(result, self.pieces(args[0]))
            return result

        def join(self, stacks: bool, tensors: Sequence[Any], dim: int = 0) -> Any:
            # without torch, which would import its compiler for this
            dim %= tensors[0].dim() + stacks
            parts = [part.unsqueeze(dim) if stacks else part for part in tensors]
            shapes = [list(part.shape) for part in parts]
            sizes = [shape.pop(dim) for shape in shapes]
            if shapes.count(shapes[0]) < len(shapes):
                raise ValueError("tensors of different shapes cannot be joined")
            runs = tuple(size * math.prod(shapes[0][dim:]) for size in sizes)
            whole = [*shapes[0][:dim], sum(sizes), *shapes[0][dim:]]
            joined = Joined(tuple(map(self.pieces, parts)), runs)
            return self.hold(torch.empty(whole, device="meta"), joined)

    recorder = Recorder()
    recorder.held = {}
    return recorder


def _arrange_like(base: Source, model: Source, own: Mapping[str, str], built: Any) -> Any:
    """Return the tensors of the base that a model has: their shapes and their pieces."""
    recorder = _recorder()
    tables, others = ConversionTables(built), ConversionTables(built)
    ours = {name: recorder.make(name, info.shape) for name, info in base.tensors.items()}
    theirs = {name: recorder.make(own[name], info.shape) for name, info in model.tensors.items()}
    if model.is_partial:  # an adapter has names in memory, and only some of them
        unchanged = {n: recorder.make(UNCHANGED, p.shape) for n, p in tables.state.items()}
        theirs = {n: theirs.get(n, t) for n, t in unchanged.items() if n not in base.tensors}
    with recorder:
        ours = tables.save(tables.load(ours))
        theirs = tables.save(theirs if model.is_partial else others.load(theirs))
    arranged: dict[str, tuple[tuple[int, ...], Pieces]] = {}
    for pair in [(ours[name], theirs[name]) for name in ours if name in theirs]:
        turned = [t.transpose(-1, -2) if t.dim() > 1 else t for t in pair]
        for one, other in (pair, turned):  # some tables take a tensor and its transpose
            home, pieces = find_origin(recorder.pieces(one), one.numel()), recorder.pieces(other)
            if home and base.tensors[home].shape == tuple(one.shape):
                arranged[home] = tuple(other.shape), pieces
                break
    return arranged


# ---------------------------------------------------------------- models in the base's layout


class LayoutSource(SourceView):
    """A model in the base's layout: tensors under other names, and tensors made of others."""

    def __init__(
        self, inner: Source, names: Mapping[str, str], made: Mapping[str, tuple[TensorInfo, Pieces]]
    ) -> None:
        tensors = {new: replace(inner.tensors[old], name=new) for new, old in names.items()}
        tensors |= {name: info for name, (info, _) in made.items()}
        super().__init__(inner, tensors, names, computed=made)
        self.made = made
        self.cost = inner.cost.with_reading(2 * 8 * SPAN)

    def delta_of(self, name: str) -> DeltaInfo:
        parts = self.made[name][1].names - {UNCHANGED} if name in self.made else ()
        is_change = any(self.inner.delta_of(part).is_change for part in parts)
        return DeltaInfo(is_change) if parts else super().delta_of(name)

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), bytes_digest(repr(self.made).encode())]

    def place(self, name: str) -> Hashable:
        return None if name in self.made else super().place(name)

    def compute(self, name: str, start: int, into: Raw) -> None:
        self.made[name][1].read(self._read_stored, start, into)

    def _read_stored(self, name: str, start: int, into: Raw) -> None:
        if name == UNCHANGED:
            into.fill(0)
        else:
            self.inner.read(name, start, into)


def in_layout_of(
    base: Source, model: Source, name: str, path: Path, config: Mapping[str, Any]
) -> tuple[Source, tuple[Notice, ...]]:
    """Return a model in the layout of its base, given the base's path and configuration.

    `name` is the model's name in messages. Raises MismatchError for another layout that cannot be
    converted.
    """
    unknown = model.tensors.keys() - base.tensors.keys()
    is_partial = model.is_partial or not base.tensors.keys() <= model.tensors.keys()
    if not (_find_transposed(base, model) or (unknown and is_partial)):
        return model, ()
    presented, reason = model, f"transformers cannot convert between these; {SAVE_ALIKE}"
    try:
        presented = _present(base, model, path, config)
    except InputError as error:
        if model.is_partial and "model_type" in config and len(unknown) == len(model.tensors):
            raise
        reason = str(error)
    if difference := _difference(base, presented, name):
        raise MismatchError(f"{name}: {difference}; {reason}")
    count = len(presented.made) if isinstance(presented, LayoutSource) else 0
    return presented, (notice("other_layout", name, count=count),) if count else ()


def _present(base: Source, model: Source, path: Path, config: Mapping[str, Any]) -> Source:
    """Return a model in the base's layout, if transformers can convert it."""
    where = (path if path.is_dir() else path.parent) / CONFIG
    remedy = MERGE_FIRST if model.is_partial else SAVE_ALIKE
    if "model_type" not in config:
        raise InputError(f"{where}: must name the architecture (model_type); or {remedy}")
    if model.is_partial and find_by_table(config, base.tensors):
        return model
    built = build_without_weights(where, config, remedy)
    inner, own = model, {name: name for name in model.tensors}
    if isinstance(model, RenamedSource):
        inner, own = model.inner, dict(model.names)
    try:
        arranged = _arrange_like(base, model, own, built)
    except Exception as error:  # another version of transformers may raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{where}: its layout cannot be converted ({reason}); {remedy}") from error
    names: dict[str, str] = {}
    made: dict[str, tuple[TensorInfo, Pieces]] = {}
    for name, (shape, pieces) in arranged.items():
        if pieces.names == {UNCHANGED}:
            continue
        origin = find_origin(pieces, math.prod(shape))
        if origin and inner.tensors[origin].shape == shape:
            names[name] = origin
        elif (dtype := _common_type(inner, pieces.names)) is not None:
            made[name] = TensorInfo(name, dtype, shape, 0), pieces
    used = set(names.values()).union(*(pieces.names for _, pieces in made.values()))
    rest = {name: stored for name, stored in own.items() if stored not in used}  # for the plan
    if lost := sorted(rest.keys() & {*names, *made}):
        raise InputError(f"{where}: {lost[0]} would be left out; {remedy}")
    names |= rest
    renamed = RenamedSource(inner, names) if names != own else model
    return LayoutSource(inner, names, made) if made else renamed


def _common_type(source: Source, names: frozenset[str]) -> StorageType | None:
    """Return the common type of tensors that can be joined to one; None if they cannot."""
    deltas = [(part, source.delta_of(part)) for part in names - {UNCHANGED}]
    kinds = {(source.tensors[part].dtype, delta.is_change, delta.drop) for part, delta in deltas}
    ((dtype, is_change, drop), *others) = kinds
    return None if others or drop or (UNCHANGED in names and not is_change) else dtype


def _find_transposed(base: Source, model: Source) -> str:
    """Return a tensor of three dimensions whose last two are exchanged, or empty text."""
    for name, info in model.tensors.items():
        shape = base.tensors[name].shape if name in base.tensors else ()
        if len(shape) == 3 and info.shape != shape and info.shape == (shape[0], *shape[:0:-1]):
            return name
    return ""


def _difference(base: Source, model: Source, name: str) -> str:
    """Return how a model stores weights differently from the base, or empty text."""
    if turned := _find_transposed(base, model):
        forms = [source.tensors[turned].form for source in (base, model)]
        return f"{turned} is {forms[0]} in the base and {forms[1]} here"
    extra = model.tensors.keys() - base.tensors.keys()
    missing = base.tensors.keys() - (() if model.is_partial else model.tensors.keys())
    for what, *ways in _TABLES["ways"]:
        for (one, ones), (other, others) in (ways, ways[::-1]):
            ours = min(filter(re.compile(ones).search, missing), default=None)
            theirs = min(filter(re.compile(others).search, extra), default=None)
            if ours and theirs:
                return f"base stores {what} {one} ({ours}), {name} stores them {other} ({theirs})"
    return ""
