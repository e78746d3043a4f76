"""Folders that trainers leave behind, in which each process saves its part of every tensor.

torch.distributed.checkpoint, which FSDP and torchtitan use, writes a pickle `.metadata` that lists
the pieces of each tensor: rectangles at some offsets. Files such as `__0_0.distcp` hold many of
them, each as torch.save writes it.

DeepSpeed's ZeRO writes a file for each rank, with its share of the weights in float32, one after
the other: of a whole group of parameters in stages 1 and 2, of every parameter in stage 3. The
shapes and names are in another file.

All are read without torch, as `dare.inputs.torch_bin` reads its files: nothing in them can run. A
range of a tensor is put together from its pieces as it is read.

Folders of other trainers are refused, with the program that converts them (`checkpoints.toml`).
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import notice
from dare.errors import HeaderError, InputError
from dare.inputs.quantised import read_quantised
from dare.inputs.sources import Opening, Raw, Source, SourceView
from dare.inputs.torch_bin import (
    CONTAINERS,
    MAX_PICKLE_BYTES,
    PIECE_ELEMENTS,
    PickledTensors,
    check_allowed,
    check_fetched,
    is_count,
    is_tensor,
    read_archive,
    unpickle,
)
from dare.tensors.dtypes import BY_TORCH_NAME
from dare.tensors.files import InputFile, is_directory, list_names, read_limited, read_up_to
from dare.tensors.header import TensorInfo, admit, show_shape

MAX_DIMENSIONS = 32
MAX_USUAL_BYTES = 4096  # of a piece's pickle; all pieces of one shape have the same
MAX_CELLS = 1 << 22  # of the grid that the edges of a tensor's pieces make
_unpickle_usual = lru_cache(128)(unpickle)
_TABLES = tomllib.loads(files("dare.inputs").joinpath("checkpoints.toml").read_text("utf-8"))
KINDS: list[dict[str, str]] = _TABLES["kinds"]
METADATA, DCP, RANK, TRAINING_STATE = (
    re.compile(_TABLES[key]) for key in ("metadata", "dcp", "rank", "training_state")
)
SIGNS = re.compile("|".join([_TABLES["dcp"], _TABLES["zero"], *(kind["sign"] for kind in KINDS)]))
MAX_TAG_BYTES = 256  # of the name of a checkpoint

Shape = tuple[int, ...]


class StoredPiece(NamedTuple):
    """A piece of a tensor, and where the metadata say that it is."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int  # of what torch.save wrote
    nbytes: int
    changes: tuple[str, ...]  # of the bytes, such as compression


@dataclass(frozen=True)
class Listed:
    """An entry of the metadata, with all its pieces if it is a tensor."""

    keys: tuple[str, ...]  # of the state dict and of those inside it
    dtype: str = ""  # empty if it is not a tensor
    shape: Shape = ()
    pieces: dict[Shape, StoredPiece] = field(default_factory=dict)  # by their offsets


class Pieces(NamedTuple):
    """The pieces of a tensor: their corners, and the stored tensors that they are in."""

    shape: Shape  # of the tensor; a single dimension if its pieces are ranges of elements
    names: Sequence[str]  # of the stored tensors
    firsts: Sequence[int]  # elements of these
    starts: NDArray[np.int64]  # pieces × dimensions
    stops: NDArray[np.int64]


class PieceRun(NamedTuple):
    """What a piece has of a rectangle of a tensor."""

    name: str
    start: int  # in the piece
    size: int
    first: int  # the first element of the rectangle, in the tensor
    shape: Shape  # of the rectangle
    inside: tuple[slice, ...]  # where the part is in it


class PiecedSource(SourceView):
    """Tensors that are put together from pieces as they are read."""

    def __init__(
        self,
        stored: PickledTensors,
        tensors: Mapping[str, TensorInfo],
        pieces: Mapping[str, Pieces],
        left_out: Sequence[str],
    ) -> None:
        super().__init__(stored, tensors, computed=tensors)
        self._pieces = pieces
        # what is copied, and what NumPy takes to gather pieces that are not contiguous
        self.cost = stored.cost.with_reading(PIECE_ELEMENTS * (100 if stored.strides else 8))
        if left_out:
            self.remarks = (notice("not_weights", names=", ".join(left_out)),)

    def place(self, name: str) -> Hashable:
        pieces = self._pieces[name]
        return (pieces.names[0], pieces.firsts[0]) if pieces.names else None

    def prefetch(self, name: str, start: int, count: int) -> None:
        for part in self._parts(name, start, start + count):
            self.inner.prefetch(part.name, part.start, part.size)

    def compute(self, name: str, start: int, into: Raw) -> None:
        for done in range(0, into.size, PIECE_ELEMENTS):
            end = min(done + PIECE_ELEMENTS, into.size)
            for part in self._parts(name, start + done, start + end):
                rectangle = into[part.first - start :][: math.prod(part.shape)]
                wanted = rectangle.reshape(part.shape)[part.inside]
                is_run = wanted.flags.c_contiguous
                read = wanted.reshape(-1) if is_run else np.empty(part.size, into.dtype)
                self.inner.read(part.name, part.start, read)
                if not is_run:
                    wanted[...] = read.reshape(wanted.shape)

    def _parts(self, name: str, start: int, stop: int) -> Iterator[PieceRun]:
        """Yield the parts of a range; each is a run in its piece."""
        pieces = self._pieces[name]
        for first, low, high in _rectangles(pieces.shape, start, stop):
            begins, ends = np.maximum(pieces.starts, low), np.minimum(pieces.stops, high)
            for number in np.flatnonzero((begins < ends).all(axis=1)).tolist():
                begin, end, origin = begins[number], ends[number], pieces.starts[number]
                place = np.ravel_multi_index(begin - origin, pieces.stops[number] - origin)
                inside = tuple(map(slice, begin - low, end - low))
                size = int(np.prod(end - begin))
                shape = tuple(np.subtract(high, low))
                place = int(place) + pieces.firsts[number]
                yield PieceRun(pieces.names[number], place, size, first, shape, inside)


class ShardedSource(PiecedSource):
    """A checkpoint of torch.distributed. It has pickles: open it only if the user asks for it."""

    def __init__(self, path: Path) -> None:
        stored, listed = PickledTensors(path), dict[str, Listed]()
        for name in filter(METADATA.fullmatch, list_names(path)):
            _read_metadata(stored, path / name, listed)
        if not stored.files:
            what = "has no .metadata, which is saved last"
            raise InputError(f"{path}: {what}; the save did not finish, so give another checkpoint")
        names, left_out = _find_model(listed)
        if not names:
            raise InputError(f"{path}: holds no weights, only {', '.join(left_out) or 'metadata'}")
        tensors, pieces = dict[str, TensorInfo](), dict[str, Pieces]()
        for name, key in names:
            entry, where = listed[key], f"{path}: {name}"
            if entry.dtype not in BY_TORCH_NAME:
                raise InputError(f"{where} is {entry.dtype}; give a plain tensor")
            info = TensorInfo(name, BY_TORCH_NAME[entry.dtype], entry.shape, 0)
            admit(info, tensors, str(path))
            tensors[name], pieces[name] = info, _arrange(entry, name, where)
        _describe_pieces(stored, {name: listed[key] for name, key in names})
        super().__init__(stored, tensors, pieces, left_out)


class ZeroSource(PiecedSource):
    """A checkpoint of DeepSpeed's ZeRO. It has pickles: open it only if the user asks for it."""

    def __init__(self, path: Path) -> None:
        stored, folder = PickledTensors(path), _find_step(path)
        tensors, pieces = dict[str, TensorInfo](), dict[str, Pieces]()
        try:
            found, left_out = _read_ranks(stored, folder)
            for name, (shape, runs) in found.items():
                dtypes = {stored.tensors[run.name].dtype for run in runs}
                (dtype,) = dtypes or {BY_TORCH_NAME["float32"]}
                admit(info := TensorInfo(name, dtype, shape, 0), tensors, str(folder))
                tensors[name], pieces[name] = info, _line_up(runs)
                if pieces[name].shape != (info.elements,):
                    raise ValueError("has too few elements")
        except InputError:
            raise
        except Exception:  # anything can be in it
            what = "is damaged, or not what DeepSpeed writes for ZeRO"
            raise HeaderError(f"{folder}: {what}; save the checkpoint again") from None
        super().__init__(stored, tensors, pieces, left_out)


def open_form(opening: Opening) -> Source:
    """Open a distributed checkpoint, if the user allows it; refuse those of other trainers."""
    path = opening.path
    names = list_names(path) if is_directory(path) else [path.name]
    _refuse_others(path, names)
    if not is_directory(path):
        raise InputError(f"{path}: is a part of a distributed checkpoint; give its folder")
    check_allowed(opening)
    check_fetched(path)
    source = ShardedSource if any(map(DCP.fullmatch, names)) else ZeroSource
    return read_quantised(source(path), opening.config)


def _refuse_others(path: Path, names: Iterable[str]) -> None:
    for kind in KINDS:
        if found := next((name for name in names if re.fullmatch(kind["sign"], name)), None):
            raise InputError(f"{path}: {kind['what']} ({found}); {kind['remedy']}")


def _rectangles(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield the rectangles that make a range of elements, in order, with their first elements.

    >>> list(_rectangles((3, 4), 2, 9))
    [(2, [0, 2], [1, 4]), (4, [1, 0], [2, 4]), (8, [2, 0], [3, 1])]
    """
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while start < stop:
        fits = (start % step == 0 and start + step <= stop for step in steps)
        axis = list(fits).index(True)
        low = [start // step % size for step, size in zip(steps, shape, strict=True)]
        count = min(shape[axis] - low[axis], (stop - start) // steps[axis])
        high = [*(place + 1 for place in low[:axis]), low[axis] + count, *shape[axis + 1 :]]
        yield start, low, high
        start += count * steps[axis]


# ---------------------------------------------------------------- what the metadata say


def _read_metadata(stored: PickledTensors, file: Path, listed: dict[str, Listed]) -> None:
    """Add the tensors of one file; each process may have written its own."""
    with stored.open_header(file) as opened:
        if opened.size > MAX_PICKLE_BYTES:
            how = "convert it with python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
            raise HeaderError(f"{file}: is larger than {MAX_PICKLE_BYTES} bytes; {how}")
        loaded = unpickle(bytes(read_up_to(opened, opened.size, 0)), file)
    try:
        _list_entries(loaded, listed)
    except Exception:  # anything can be in it
        what = "is damaged, or not what torch.distributed.checkpoint writes"
        raise HeaderError(f"{file}: {what}; save the checkpoint again") from None


def _list_entries(metadata: Any, listed: dict[str, Listed]) -> None:
    fields = metadata.state
    paths = fields.get("planner_data") or {}
    places = {
        (index.state["fqn"], index.state.get("offset")): info.state
        for index, info in fields["storage_data"].items()
    }
    for name, entry in fields["state_dict_metadata"].items():
        keys = paths.get(name) or (name,)
        keys = tuple(map(str, keys)) if isinstance(keys, tuple) else (name,)
        if "chunks" not in (entry.state or {}):
            listed.setdefault(str(name), Listed(keys))
            continue
        dtype, shape = entry.state["properties"].state[0].name, _shape(entry.state["size"])
        known = listed.setdefault(name, Listed(keys, dtype.removeprefix("torch."), shape))
        for chunk in entry.state["chunks"]:
            offsets, sizes = _shape(chunk.state["offsets"]), _shape(chunk.state["sizes"])
            if known.shape != shape or not len(offsets) == len(sizes) == len(shape):
                raise ValueError("shapes differ")
            if 0 not in sizes:
                place = places[name, offsets]
                numbers = place["offset"], place["length"]
                changes = tuple(map(str, place.get("transform_descriptors") or ()))
                piece = StoredPiece(offsets, sizes, place["relative_path"], *numbers, changes)
                if not isinstance(piece.file, str) or not all(map(is_count, numbers)):
                    raise TypeError("not a place")
                known.pieces[offsets] = piece


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        raise TypeError("not a shape")
    if not all(map(is_count, value)) or not is_count(math.prod(value)):
        raise ValueError("not a shape")
    return value


def _find_model(listed: dict[str, Listed]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the names of the model's tensors, each with its key, and what is not of the model."""
    inside, outside, left_out = list[tuple[str, str]](), list[tuple[str, str]](), list[str]()
    for key, entry in listed.items():
        above = entry.keys[:-1]
        depth = next((n for n, name in enumerate(above) if name in CONTAINERS), None)
        if any(map(TRAINING_STATE.fullmatch, (key.partition(".")[0], *above))):
            left_out.append(entry.keys[0].partition(".")[0])
        elif not entry.dtype:
            left_out.append(key)
        elif depth is None:
            outside.append((key, key))
        else:
            inside.append((".".join(entry.keys[depth + 1 :]), key))
    if inside:
        left_out += (listed[key].keys[0] for _, key in outside)
    return inside or outside, list(dict.fromkeys(left_out))


def _arrange(entry: Listed, name: str, where: str) -> Pieces:
    """Return the pieces of a tensor; refuse those that overlap or leave something out."""
    shape, pieces = entry.shape or (1,), entry.pieces.values()
    starts, sizes = (
        np.array(corners, np.int64).reshape(-1, len(shape))
        for corners in ([p.offsets or (0,) for p in pieces], [p.sizes or (1,) for p in pieces])
    )
    if (sizes > np.subtract(shape, starts)).any():
        raise HeaderError(f"{where}: a piece reaches beyond {show_shape(shape)}; save it again")
    stops = starts + sizes
    edges = [np.unique([0, n, *starts[:, d], *stops[:, d]]) for d, n in enumerate(shape)]
    if math.prod(len(edge) - 1 for edge in edges) > MAX_CELLS:
        raise HeaderError(f"{where}: its pieces do not form a grid; save it again")
    taken = np.zeros([len(edge) - 1 for edge in edges], bool)
    for low, high in zip(starts, stops, strict=True):
        cells = tuple(slice(*np.searchsorted(e, p)) for e, *p in zip(edges, low, high, strict=True))
        if taken[cells].any():
            raise HeaderError(f"{where}: has pieces that overlap; save the checkpoint again")
        taken[cells] = True
    if not taken.all():
        raise HeaderError(f"{where}: a piece is missing; get all files of the checkpoint again")
    names = [_piece_name(name, piece) for piece in pieces]
    return Pieces(shape, names, [0] * len(names), starts, stops)


def _piece_name(name: str, piece: StoredPiece) -> str:
    return f"{name} from {list(piece.offsets)} on"


def _describe_pieces(stored: PickledTensors, entries: Mapping[str, Listed]) -> None:
    """Find the bytes of all pieces, which must be what the metadata say."""
    held = defaultdict[str, list[tuple[str, StoredPiece]]](list)
    for name, entry in entries.items():
        for piece in entry.pieces.values():
            held[piece.file].append((name, piece))
    for file_name, pieces in held.items():
        if file_name != os.path.basename(file_name) or file_name in ("", ".", ".."):
            must = "a piece must be in a file of the same folder"
            raise HeaderError(f"{stored.path}: {pieces[0][0]} is in {file_name!r}; {must}")
        file = stored.path / file_name
        with stored.open_header(file) as opened:
            for name, piece in pieces:
                _describe_piece(stored, opened, file, _piece_name(name, piece), piece)
                found, entry = stored.tensors[_piece_name(name, piece)], entries[name]
                if (found.dtype.torch_name, found.shape) != (entry.dtype, piece.sizes):
                    what = f"is {found.described}, and {entry.dtype} {show_shape(piece.sizes)}"
                    raise HeaderError(f"{file}: {name} {what} in .metadata; save it again")


def _describe_piece(
    stored: PickledTensors, opened: InputFile, file: Path, name: str, piece: StoredPiece
) -> None:
    if piece.changes:
        how = f"was saved with {', '.join(piece.changes)}; save it without extensions"
        raise InputError(f"{file}: {name} {how}")
    span = range(piece.start, piece.start + piece.nbytes)
    if span.stop > opened.size:
        raise HeaderError(f"{file}: {name} reaches beyond its end; the file is truncated")
    pickled, records = read_archive(opened, file, span)
    is_usual = len(pickled) <= MAX_USUAL_BYTES
    value = (_unpickle_usual if is_usual else unpickle)(pickled, file)
    if not is_tensor(value):
        raise HeaderError(f"{file}: {name} is not a tensor; save the checkpoint again")
    stored.describe(name, value, file, records)


# ---------------------------------------------------------------- what ZeRO saves


SPLIT, TOGETHER = "fp32_flat_groups", "single_partition_of_fp32_groups"  # in stage 3, in others
Describe = Callable[[str, Any], TensorInfo]
Groups = Sequence[TensorInfo]  # parameters of a rank, or of all ranks, one after the other


class Run(NamedTuple):
    """Consecutive elements of a stored tensor."""

    name: str
    first: int
    size: int


Found = dict[str, tuple[Shape, list[Run]]]


def _find_step(path: Path) -> Path:
    """Return the folder with the files of all ranks: this one, or the one that `latest` names."""
    names = list_names(path)
    if any(name.endswith("_states.pt") for name in names):
        return path
    latest = read_limited(path / "latest", MAX_TAG_BYTES) if "latest" in names else b""
    if (tag := latest.decode(errors="replace").strip()) not in names:
        what = "has checkpoints of DeepSpeed, and no file `latest` that names one of them"
        raise InputError(f"{path}: {what}; give the folder of one, such as global_step100")
    _refuse_others(path / tag, list_names(path / tag))
    return path / tag


def _load(stored: PickledTensors, file: Path) -> tuple[Any, Describe]:
    """Return what a file holds, and a function that adds a tensor of it to those stored."""
    with stored.open_header(file) as opened:
        pickled, records = read_archive(opened, file)
    return unpickle(pickled, file), lambda name, value: stored.describe(name, value, file, records)


def _read_ranks(stored: PickledTensors, folder: Path) -> tuple[Found, list[str]]:
    """Return the tensors of a model, as runs of those stored, and the names of what is left out."""
    ranks, paddings, is_split = _read_groups(stored, folder)
    fragments, steps = defaultdict[str, list[TensorInfo]](list), set[int]()
    for rank in reversed(range(len(ranks) if is_split else 1)):  # rank 0 alone names what is shared
        which = f"zero_pp_rank_{rank}_" * is_split
        model, describe = _load(stored, folder / f"{which}mp_rank_00_model_states.pt")
        _refuse_others(folder, model)
        steps.add(model["global_steps"])
        for name, value in (model.get("frozen_param_fragments") or {}).items() if is_split else ():
            fragments[name].insert(0, describe(f"{name} of rank {rank}", value))
    if len(steps) > 1:
        what = f"has files of the steps {', '.join(map(str, sorted(steps)))}"
        raise HeaderError(f"{folder}: {what}; get all files of one of them")
    groups, shared, held = model["param_shapes"], model["shared_params"], model["module"]
    if is_split:
        shapes = {name: shape for group in groups for name, shape in group.items()}
        found = _lay_out(shapes, ranks, [0] * len(shapes), 1)
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            found |= _lay_out({name: shape}, [[part] for part in fragments[name]], [0], 1)
    else:
        paddings = paddings or [[0] * len(group) for group in groups]
        found = {}
        for shapes, strip, gaps in zip(groups, zip(*ranks, strict=True), paddings, strict=True):
            found |= _lay_out(shapes, [strip], gaps, 2 * len(ranks))
    whole = model["buffer_names"] if is_split else held.keys() - shared.keys()
    for name, value in held.items():
        if name in whole and name not in found and is_tensor(value):
            info = describe(f"{name} of rank 0", value)
            found[name] = info.shape, _cut([info], 0, info.elements)
    found |= {name: found[first] for name, first in shared.items() if first in found}
    return found, ["the optimizer's states", *(name for name in held if name not in found)]


def _read_groups(stored: PickledTensors, folder: Path) -> tuple[list[Groups], Any, bool]:
    """Return the parameters of each rank, what is between them, and whether each is split."""
    named = filter(None, map(RANK.fullmatch, list_names(folder)))
    files = sorted((int(match[1]), match[0]) for match in named)
    ranks, keys, counts, paddings = list[Groups](), set[str](), set[int](), None
    for rank, name in files:
        loaded, describe = _load(stored, folder / name)
        state = loaded["optimizer_state_dict"]
        keys.add(key := SPLIT if SPLIT in state else TOGETHER)
        label = f"group {{}} of optimizer {rank}"
        ranks.append([describe(label.format(n), value) for n, value in enumerate(state[key])])
        count, paddings = state["partition_count"], state.get("param_alignment_paddings")
        counts.update(count if isinstance(count, list) else [count])
    if counts != {len(files)} or any(rank != number for number, (rank, _) in enumerate(files)):
        found = ", ".join(str(rank) for rank, _ in files)
        what = f"*_optim_states.pt of these ranks are not all of one checkpoint: {found}"
        what = what if files else "has no *_optim_states.pt, which hold the weights"
        raise HeaderError(f"{folder}: {what}; get all its files again")
    return ranks, paddings, keys == {SPLIT}


def _lay_out(
    shapes: Mapping[str, Any], strips: Sequence[Groups], gaps: Sequence[int], unit: int
) -> Found:
    """Return where parameters are that lie one after the other, each in equal parts in all strips.

    Refuse them if they and the gaps after them do not fill the strips, up to multiples of a unit.
    """
    found, start = Found(), 0
    for (name, given), gap in zip(shapes.items(), gaps, strict=True):
        if not is_count(gap):
            raise TypeError("not a number of elements")
        size = math.prod(shape := _shape(given))
        share, runs = -(-size // len(strips)), list[Run]()
        for number, strip in enumerate(strips):
            runs += _cut(strip, start, min(share, size - number * share))
        found[name] = shape, runs
        start += share + gap
    sizes = [sum(group.elements for group in strip) for strip in strips]
    if any(-(-size // unit) != -(-start // unit) for size in sizes):
        raise ValueError("shapes need another number of elements")
    return found


def _cut(strip: Groups, start: int, count: int) -> list[Run]:
    """Return the runs of a strip's tensors that make a range of its elements."""
    runs = []
    for group in strip:
        first, stop = max(start, 0), min(start + count, group.elements)
        if first < stop:
            runs.append(Run(group.name, first, stop - first))
        start -= group.elements
    return runs


def _line_up(runs: Sequence[Run]) -> Pieces:
    ends = np.cumsum([0, *(run.size for run in runs)], dtype=np.int64)[:, None]
    names, firsts = [run.name for run in runs], [run.first for run in runs]
    return Pieces((int(ends[-1, 0]),), names, firsts, ends[:-1], ends[1:])
