"""Models that hold the same weights as the base in other tensors: the layout of their files.

Experts are one tensor, or one each; queries, keys and values are packed, or apart; names are longer
or shorter. transformers loads all of these. Its own conversion tables are run on tensors without
memory, once for the base and once for the model, there and back, and what becomes of each tensor is
recorded: parts are cut, joined and turned, never computed with. So a model is presented in the
layout of the base, any range of it, bit for bit. A difference that is seen and cannot be converted
is refused, whatever the recipe says of missing tensors.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from dare.documents.notices import Notice, notice
from dare.errors import InputError, MismatchError
from dare.inputs.loaded import MERGE_FIRST, Tables, build_without_weights
from dare.inputs.sources import (
    CONFIG,
    DeltaInfo,
    Raw,
    RenamedSource,
    Source,
    SourceView,
)
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import StorageType
from dare.tensors.header import TensorInfo

SPAN = 1 << 16  # elements: what lies so close together is read at once, and the rest left out
UNCHANGED = ""  # stands for a tensor that an adapter does not change
# Functions of torch that show, move or join elements, and leave each as it is.
VIEWS = {"__get__", "__getitem__", "_set_grad_enabled", "chunk", "dim", "narrow", "numel", "permute"}
VIEWS |= {"select", "size", "split", "squeeze", "transpose", "unbind", "unsqueeze", "view"}
COPIES = {"clone", "contiguous", "flatten", "reshape"}
JOINS = {"cat", "stack"}

# The parts of a model that are stored in more than one way: in many tensors, or in few.
WAYS = (
    ("experts", ("one by one", r"\.experts\.\d+\."), ("fused", r"\.experts\.(?!\d)[\w.]+$")),
    (
        "queries, keys and values",
        ("apart", r"\.(q|q_proj|query|q_lin|wq|to_q|query_proj)\.\w+$"),
        ("packed", r"(qkv|query_key_value|c_attn|att_proj|attn\.in_proj|W_pack)\w*(\.\w+)?$"),
    ),
    (
        "gate and up projections",
        ("apart", r"\.(gate_proj|w1)\.\w+$"),
        ("packed", r"\.(gate_up|up_gate|w12|w13|weights_in|ff_proj)\w*(\.\w+)?$"),
    ),
)
ONE_PROGRAM = "save both with one program"

ReadStored = Callable[[str, int, Raw], None]


# ---------------------------------------------------------------- tensors made of others


@dataclass(frozen=True)
class Stored:
    """A tensor of the model's files, all of it."""

    name: str
    size: int

    @property
    def names(self) -> frozenset[str]:
        """The stored tensors that it is made of."""
        return frozenset((self.name,))

    def cut(self, start: int, count: int) -> Pieces:
        """Return some of its elements."""
        return self if count == self.size else Strided(self, (count,), (1,), start)

    def read(self, read: ReadStored, start: int, into: Raw) -> None:
        """Fill `into` with its elements from one on."""
        read(self.name, start, into)


@dataclass(frozen=True)
class Joined:
    """Several tensors side by side: a row of each in turn."""

    parts: tuple[Pieces, ...]
    runs: tuple[int, ...]  # elements in a row of each
    size: int

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(part.names for part in self.parts))

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.runs)]

    def _find(self, start: int) -> tuple[int, int, int]:
        """Return the part that an element is in, its place there, and how many follow in a row."""
        row, column = divmod(start, self._starts[-1])
        number = bisect_right(self._starts, column) - 1
        run, skip = self.runs[number], column - self._starts[number]
        return number, row * run + skip, run - skip

    def cut(self, start: int, count: int) -> Pieces:
        number, place, left = self._find(start) if count else (0, 0, 0)
        if 0 < count <= left:
            return self.parts[number].cut(place, count)
        return self if count == self.size else Strided(self, (count,), (1,), start)

    def read(self, read: ReadStored, start: int, into: Raw) -> None:
        while into.size:
            number, place, left = self._find(start)
            self.parts[number].read(read, place, into[:left])
            start, into = start + left, into[left:]


@dataclass(frozen=True)
class Strided:
    """Some elements of another tensor, in any order that steps of fixed length give."""

    inner: Pieces
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    first: int

    @property
    def names(self) -> frozenset[str]:
        return self.inner.names

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def cut(self, start: int, count: int) -> Pieces:
        width = math.prod(self.shape[1:])
        row, column = divmod(start, max(1, width))
        first = self.first + row * self.steps[0]
        if len(self.shape) == 1 and self.steps == (1,):
            return self.inner.cut(first, count)
        if len(self.shape) > 1 and column + count <= width:
            return arrange(self.inner, self.shape[1:], self.steps[1:], first).cut(column, count)
        return self if count == self.size else Strided(self, (count,), (1,), start)

    def read(self, read: ReadStored, start: int, into: Raw) -> None:
        width = math.prod(self.shape[1:])
        while into.size:
            row, column = divmod(start, width)
            first, rows = self.first + row * self.steps[0], into.size // width
            if column or not rows:
                count = min(width - column, into.size)
                inside = Strided(self.inner, self.shape[1:], self.steps[1:], first)
                inside.read(read, column, into[:count])
            else:
                count = rows * width
                self._fill(read, first, into[:count].reshape(rows, *self.shape[1:]))
            start, into = start + count, into[count:]

    def _fill(self, read: ReadStored, first: int, box: Raw) -> None:
        """Fill an array with as many elements in each direction, from one on."""
        reach = [(n - 1) * step for n, step in zip(box.shape, self.steps, strict=True)]
        span, moving = 1 + sum(reach), list(filter(None, reach))
        is_plain = moving == sorted(moving, reverse=True) and span == box.size
        if is_plain and box.flags.c_contiguous:
            self.inner.read(read, first, box.reshape(-1))
        elif span <= SPAN:
            near = np.empty(span, box.dtype)
            self.inner.read(read, first, near)
            nbytes = [step * near.itemsize for step in self.steps]
            box[...] = np.lib.stride_tricks.as_strided(near, box.shape, nbytes)
        else:
            axis = reach.index(max(reach))
            half = box.shape[axis] // 2
            low, high = np.split(box, [half], axis)
            self._fill(read, first, low)
            self._fill(read, first + half * self.steps[axis], high)


Pieces = Stored | Joined | Strided


def arrange(inner: Pieces, shape: Iterable[int], steps: Iterable[int], first: int) -> Pieces:
    """Return some elements of a tensor, in few dimensions, and from as few tensors as can be."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, step in zip(shape, steps, strict=True):
        if sizes and strides[-1] == size * step:
            sizes[-1], strides[-1] = sizes[-1] * size, step
        elif size != 1:
            sizes, strides = [*sizes, size], [*strides, step]
    if strides in ([], [1]):
        return inner.cut(first, math.prod(sizes))
    return Strided(inner, tuple(sizes), tuple(strides), first)


# ---------------------------------------------------------------- what transformers does


class Recorder:
    """Tensors without memory, and what has become of them."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._made: dict[int, tuple[Any, Pieces]] = {}  # the storages, and what they hold

    def make(self, name: str, shape: Sequence[int]) -> Any:
        """Return a tensor that stands for a stored one."""
        tensor = self._torch.empty(shape, device="meta")
        self._note(tensor, Stored(name, math.prod(shape)))
        return tensor

    def pieces(self, tensor: Any) -> Pieces:
        """Return the elements of a tensor by their origin."""
        inner = self._made[id(tensor.untyped_storage())][1]
        return arrange(inner, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _note(self, tensor: Any, pieces: Pieces) -> None:
        storage = tensor.untyped_storage()  # kept, so that its number stays its own
        self._made[id(storage)] = storage, pieces

    def record(self) -> Any:
        """Return a context in which the functions of torch are recorded."""
        from torch.overrides import TorchFunctionMode

        outer = self

        class Mode(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(
                self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if function.__name__ not in VIEWS | COPIES | JOINS:
                    raise ValueError(f"{function.__name__} may compute")
                result = function(*args, **(kwargs or {}))
                outer._add(function.__name__, result, args, kwargs or {})
                return result

        return Mode()

    def _add(self, name: str, result: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        is_new = isinstance(result, self._torch.Tensor) and name not in VIEWS
        if not is_new or id(result.untyped_storage()) in self._made:
            return
        if name in COPIES:
            self._note(result, self.pieces(args[0]))
            return
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
        runs = tuple(math.prod(part.shape[dim:]) for part in args[0])
        self._note(result, Joined(tuple(map(self.pieces, args[0])), runs, result.numel()))


def _convert(
    tables: Tables, tensors: Mapping[str, Any], find: Callable[[str], tuple[str, str | None]]
) -> dict[str, Any]:
    """Give tensors the names that are found for them, and join or cut them as the tables say."""
    by_pattern = {
        p: converter for converter in tables.converters for p in converter.source_patterns
    }
    found: dict[str, Any] = {}
    gathered: dict[str, Any] = {}
    for name in tables.in_order(tensors):
        new, pattern = find(name)
        if pattern is None:
            found.setdefault(new, tensors[name])
        else:
            converter = gathered.setdefault(new, deepcopy(by_pattern[pattern]))
            converter.add_tensor(new, name, pattern, tensors[name])
    for new, converter in gathered.items():
        made = converter.convert(new, model=tables.model, config=tables.model.config)
        found |= {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
    return found


def _save(tables: Tables, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors in memory as they are saved, by the tables that the base was loaded by."""
    back = tables.backwards()
    found = _convert(back, loaded, lambda name: back.rename(name, [], back.converters))
    return {back.rename(name, back.renamings, [])[0]: tensor for name, tensor in found.items()}


def _home(pieces: Pieces, base: Source, shape: tuple[int, ...]) -> str | None:
    """Return the base's tensor that pieces are, all of it and in its order, by a sample."""
    name, *others = pieces.names
    if others or shape != base.tensors[name].shape:
        return None

    def number(_name: str, start: int, into: Raw) -> None:
        into[:] = np.arange(start, start + into.size)

    found, size = np.empty(1, np.int64), pieces.size
    for place in (0, 1 % size, size // 3, size // 2, size - 1) if size else ():
        pieces.read(number, place, found)
        if found[0] != place:
            return None
    return name


# ---------------------------------------------------------------- models in the base's layout


class LayoutSource(SourceView):
    """A model in the base's layout: tensors under other names, and tensors made of others."""

    def __init__(
        self,
        inner: Source,
        names: Mapping[str, str],
        made: Mapping[str, tuple[TensorInfo, Pieces]],
    ) -> None:
        tensors = {new: replace(inner.tensors[old], name=new) for new, old in names.items()}
        tensors |= {name: info for name, (info, _) in made.items()}
        super().__init__(inner, tensors, names, computed=made)
        self.made = made
        self.cost = inner.cost.with_reading(2 * SPAN * np.dtype(np.float64).itemsize)

    def delta_of(self, name: str) -> DeltaInfo:
        if name not in self.made:
            return super().delta_of(name)
        parts = self.made[name][1].names - {UNCHANGED}
        return DeltaInfo(any(self.inner.delta_of(part).is_change for part in parts))

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), bytes_digest(repr(sorted(self.made.items())).encode())]

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
    """Return a model in the layout of its base, whose path and configuration these are.

    `name` is the model's in messages. Raises MismatchError for another layout that cannot be
    converted.
    """
    unknown = model.tensors.keys() - base.tensors.keys()
    is_whole = model.is_partial or base.tensors.keys() <= model.tensors.keys()
    if not (_turned(base, model) or (unknown and (model.is_partial or not is_whole))):
        return model, ()
    found, reason = model, "transformers does not convert one into the other; " + ONE_PROGRAM
    try:
        found = _present(base, model, path, config)
    except InputError as error:
        if model.is_partial and len(unknown) == len(model.tensors):
            raise
        reason = str(error)
    if difference := _difference(base, found, name):
        raise MismatchError(f"{name}: {difference}; {reason}")
    count = len(found.made) if isinstance(found, LayoutSource) else 0
    return found, (notice("other_layout", name, count=count),) if count else ()


def _present(base: Source, model: Source, path: Path, config: Mapping[str, Any]) -> Source:
    """Return a model in the base's layout, as far as transformers knows the way."""
    where = (path if path.is_dir() else path.parent) / CONFIG
    remedy = MERGE_FIRST if model.is_partial else ONE_PROGRAM
    if "model_type" not in config:
        raise InputError(f"{where}: must name the architecture (model_type); or {remedy}")
    built = build_without_weights(where, config, remedy)
    inner, own = model, {name: name for name in model.tensors}
    if isinstance(model, RenamedSource):
        inner, own = model.inner, dict(model.names)
    try:
        found = _arrange_like(base, model, own, built)
    except Exception as error:  # whatever another version of transformers does
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{where}: its layout cannot be converted ({reason}); {remedy}") from error
    names, made = _sort(found, inner)
    used = set(names.values()).union(*(pieces.names for _, pieces in made.values()))
    for name, stored in own.items():  # what is not accounted for stays, and is for the plan
        if stored not in used:
            if name in names or name in made:
                raise InputError(f"{where}: {name} would be left out; {remedy}")
            names[name] = stored
    return LayoutSource(inner, names, made) if made else RenamedSource(inner, names)


Arranged = Mapping[str, tuple[tuple[int, ...], Pieces]]  # tensors by shape and origin


def _sort(
    found: Arranged, inner: Source
) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, Pieces]]]:
    """Split tensors: those under other names, and those made of others."""
    names: dict[str, str] = {}
    made: dict[str, tuple[TensorInfo, Pieces]] = {}
    for name, (shape, pieces) in found.items():
        if isinstance(pieces, Stored) and shape == inner.tensors[pieces.name].shape:
            names[name] = pieces.name
        elif (dtype := _common_type(inner, pieces.names)) is not None:
            made[name] = TensorInfo(name, dtype, shape, 0), pieces
    return names, made


def as_loaded(model: Source, base: Source, path: Path, config: Mapping[str, Any]) -> Source:
    """Return a model in the layout that the base, whose path this is, has once it is loaded."""
    where = (path if path.is_dir() else path.parent) / CONFIG
    tables, recorder = Tables.of(build_without_weights(where, config, ONE_PROGRAM)), Recorder()
    stored = {
        name: recorder.make(name if name in model.tensors else UNCHANGED, info.shape)
        for name, info in base.tensors.items()
    }
    try:
        with recorder.record():
            loaded = _convert(tables, stored, tables.find)
        arranged = {n: (tuple(t.shape), recorder.pieces(t)) for n, t in loaded.items()}
    except Exception as error:  # whatever another version of transformers does
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{where}: its layout cannot be converted ({reason})") from error
    found = {name: each for name, each in arranged.items() if each[1].names != {UNCHANGED}}
    names, made = _sort(found, model)
    used = set(names.values()).union(*(pieces.names for _, pieces in made.values()))
    if lost := model.tensors.keys() - used:
        raise InputError(f"{where}: {min(lost)} would be left out")
    return LayoutSource(model, names, made)


def _arrange_like(base: Source, model: Source, own: Mapping[str, str], built: Any) -> Arranged:
    """Return the tensors of the base that a model has, by what they are made of."""
    recorder, tables, others = Recorder(), Tables.of(built), Tables.of(built)
    ours = {name: recorder.make(name, info.shape) for name, info in base.tensors.items()}
    theirs = {name: recorder.make(own[name], info.shape) for name, info in model.tensors.items()}
    if model.is_partial:  # an adapter has the names in memory, and some of them
        unchanged = {n: recorder.make(UNCHANGED, p.shape) for n, p in tables.state.items()}
        theirs = {n: theirs.get(n, t) for n, t in unchanged.items() if n not in base.tensors}
    with recorder.record():
        ours = _save(tables, _convert(tables, ours, tables.find))
        loaded = theirs if model.is_partial else _convert(others, theirs, others.find)
        theirs = _save(tables, loaded)
    found: dict[str, tuple[tuple[int, ...], Pieces]] = {}
    for saved in filter(theirs.__contains__, ours):
        pair = ours[saved], theirs[saved]
        turned = [t.transpose(-1, -2) if t.dim() > 1 else t for t in pair]
        for one, other in (pair, turned):
            home = _home(recorder.pieces(one), base, tuple(one.shape))
            pieces = recorder.pieces(other)
            if home and pieces.names != {UNCHANGED}:
                found.setdefault(home, (tuple(other.shape), pieces))
    return found


def _common_type(source: Source, names: frozenset[str]) -> StorageType | None:
    """Return the type of tensors that can be parts of one; None: they cannot."""
    deltas = {name: source.delta_of(name) for name in names if name != UNCHANGED}
    kinds = {(source.tensors[name].dtype, delta.is_change) for name, delta in deltas.items()}
    if len(kinds) > 1 or any(delta.drop for delta in deltas.values()):
        return None
    ((dtype, is_change),) = kinds
    return dtype if is_change or UNCHANGED not in names else None


def _turned(base: Source, model: Source) -> str:
    """Return a tensor of three dimensions whose last two are exchanged, or empty text."""
    for name, info in model.tensors.items():
        shape = base.tensors[name].shape if name in base.tensors else ()
        if len(shape) == 3 and info.shape != shape and info.shape == (shape[0], *shape[:0:-1]):
            return name
    return ""


def _difference(base: Source, model: Source, name: str) -> str:
    """Return how a model stores the base's weights otherwise, or empty text."""
    ours, theirs = base.tensors.keys(), model.tensors.keys()
    if turned := _turned(base, model):
        forms = [source.tensors[turned].form for source in (base, model)]
        return f"{turned} is {forms[0]} in the base and {forms[1]} here"
    missing, extra = ours if model.is_partial else ours - theirs, theirs - ours
    for what, *ways in WAYS:
        for (one, ones), (other, others) in (ways, ways[::-1]):
            mine = min(filter(re.compile(ones).search, missing), default=None)
            its = min(filter(re.compile(others).search, extra), default=None)
            if mine and its:
                return f"base stores {what} {one} ({mine}), {name} has them {other} ({its})"
    return ""
