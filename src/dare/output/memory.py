"""Tensors in memory: those of a live model, read and written in place, and a sink for merged ones.

A model is a torch module, or a dict of torch tensors or NumPy arrays. torch is never imported here:
a caller with tensors has imported it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from dare import kernels
from dare.errors import InputError
from dare.inputs.arrays import is_torch, place_of, plain_array
from dare.inputs.delta_files import U8
from dare.inputs.names import match_names
from dare.inputs.sources import Raw, RenamedSource, Source
from dare.output.sink import Bytes, Sink
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo, show_shape
from dare.tensors.names import some_of

Arrays = dict[str, NDArray[Any]]
F32 = STORAGE_TYPES["F32"]
ALIGN_BYTES = 64  # the start of an array is a multiple of this, counted from the first
WRITING = threading.Lock()  # held while a model is changed; only one, as models may share memory
MOST_WORK = 10_000  # most steps of the search for an element that two arrays share


@dataclass(frozen=True)
class InMemory:
    """Elements of this machine's memory: flat if they follow each other, else in any order."""

    array: Raw

    @property
    def in_place(self) -> bool:
        """True if elements are read without a copy, and so can be changed in place."""
        return self.array.flags.c_contiguous

    @property
    def _elements(self) -> Raw | np.flatiter[Raw]:  # an iterator is for one thread
        return self.array if self.in_place else self.array.flat

    def read(self, start: int, count: int) -> Raw:
        return self._elements[start : start + count]

    def write(self, start: int, raw: Raw) -> None:
        self._elements[start : start + raw.size] = raw


@dataclass(frozen=True)
class OnDevice:
    """A contiguous torch tensor on any device."""

    tensor: Any
    carrier: np.dtype[np.generic]
    in_place = False

    @property
    def _flat(self) -> Any:
        """Its elements as whole numbers."""
        whole = getattr(sys.modules["torch"], f"int{8 * self.carrier.itemsize}")
        return self.tensor.view(-1).view(whole)

    def read(self, start: int, count: int) -> Raw:
        elements: Raw = self._flat[start : start + count].cpu().numpy().view(self.carrier)
        return elements

    def write(self, start: int, raw: Raw) -> None:
        torch = sys.modules["torch"]
        whole = torch.from_numpy(raw.view(f"i{raw.itemsize}"))
        self._flat[start : start + raw.size].copy_(whole)

    def room_for(self, nbytes: int) -> Any:
        """Return a tensor of so many bytes on the same device."""
        return self.tensor.new_empty(nbytes, dtype=sys.modules["torch"].uint8)

    def widen(self, start: int, made: Any, narrow: StorageType, wide: StorageType) -> None:
        """Begin to write elements that are bytes on the same device, of a narrower type."""
        torch = sys.modules["torch"]
        values = made.view(getattr(torch, narrow.torch_name))
        whole = self._flat[start : start + values.numel()]
        whole.view(getattr(torch, wide.torch_name)).copy_(values)


# A tensor's elements, as carriers of their type, read with or without a copy and written back.
Memory = InMemory | OnDevice


def memory_of(array: Any, name: str) -> tuple[StorageType, tuple[int, ...], Memory]:
    """Return storage type, shape and elements of an array; refuse a read-only one."""
    kind, plain = plain_array(array, name, in_place=True)
    shape = tuple(plain.shape)
    if not is_torch(plain):
        if not plain.flags.writeable:
            raise InputError(f"{name}: the array is read-only; give a copy that can be written")
        elements = plain.view(kind.carrier)
    else:
        if plain.device.type != "cpu":
            if not plain.is_contiguous():
                raise InputError(f"{name}: is not contiguous; call .contiguous() first")
            return kind, shape, OnDevice(plain, kind.carrier)
        whole = getattr(sys.modules["torch"], f"int{8 * kind.itemsize}")
        elements = plain.view(whole).numpy().view(kind.carrier)
    is_flat = elements.flags.c_contiguous
    return kind, shape, InMemory(elements.reshape(-1) if is_flat else elements)


def check_apart(arrays: Mapping[str, Any], changed: Collection[str]) -> None:
    """Refuse arrays that partly share memory, if one is changed; names of one array are fine."""
    places = {}
    for name, array in arrays.items():
        with suppress(RuntimeError, NotImplementedError):  # sparse tensors and other wrappers
            places[name] = place_of(array)
    _check_places(tuple(places.items()), frozenset(changed))


@lru_cache(maxsize=2)  # a search writes into the same model again and again
def _check_places(places: Iterable[_Place], changed: Collection[str]) -> None:
    extents = sorted(_extents(places), key=attrgetter("device", "first"))
    for number, one in enumerate(extents):
        if one.name in changed and one.overlaps_itself:
            raise InputError(f"{one.name}: shares memory with itself; give a copy (.clone())")
        for other in extents[number + 1 :]:
            if (other.device, other.first) >= (one.device, one.end):
                break
            if {one.name, other.name}.isdisjoint(changed) or one.place == other.place:
                continue
            if one.shares_memory(other):
                raise InputError(
                    f"{one.name} and {other.name} share memory, but they are different "
                    "tensors; give one of them its own memory (.clone()). Nothing was changed"
                )


_Place = tuple[str, tuple[Any, ...]]  # an array's name, and what `place_of` says of it


class _Extent(NamedTuple):
    """The range of memory that an array takes."""

    name: str
    device: str
    first: int
    end: int
    place: tuple[Any, ...]
    addresses: Raw  # an array of the same addresses, never read: they may be a device's

    @property
    def overlaps_itself(self) -> bool:
        """True if elements may share bytes; a few rare interleaved views are wrongly suspected."""
        reach = self.addresses.itemsize
        steps = zip(map(abs, self.addresses.strides), self.addresses.shape, strict=True)
        for step, count in sorted(pair for pair in steps if pair[1] > 1):
            if step < reach:
                return True
            reach += (count - 1) * step
        return False

    def shares_memory(self, other: _Extent) -> bool:
        """Tell whether elements of both may be in the same bytes."""
        try:
            return np.shares_memory(
                self.addresses,
                other.addresses,
                max_work=MOST_WORK,  # type: ignore[arg-type]
            )
        except np.exceptions.TooHardError:
            return True


def _extents(places: Iterable[_Place]) -> Iterator[_Extent]:
    """Yield the extents of arrays that have elements and their own memory."""
    for name, place in places:
        device, start, dtype, shape, steps = place
        if 0 in shape or not start:
            continue
        unit = 1 if isinstance(dtype, np.dtype) else dtype.itemsize  # torch counts in elements
        described = {
            "data": (start, False),
            "shape": tuple(shape),
            "strides": tuple(step * unit for step in steps),
            "typestr": f"|V{dtype.itemsize}",
            "version": 3,
        }
        addresses = np.asarray(SimpleNamespace(__array_interface__=described))
        yield _Extent(name, str(device), *byte_bounds(addresses), place, addresses)


def arrays_of(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a torch module by name, or the arrays of a dict."""
    if hasattr(model, "named_parameters"):  # its state_dict may hold copies
        named = (model.named_parameters, model.named_buffers)
        return {name: tensor for each in named for name, tensor in each(remove_duplicate=False)}
    if not isinstance(model, Mapping):
        raise InputError(f"expected a torch module or a dict of arrays, found {type(model)}")
    return {n: a for n, a in model.items() if is_torch(a) or isinstance(a, np.ndarray)}


def names_in(arrays: Iterable[str], stored: Iterable[str]) -> Mapping[str, str]:
    """Return the model's names of stored tensors, which may have a prefix."""
    sides = (_bare_source(stored), _bare_source(arrays))
    matched, _ = match_names(*sides, "model", base_config={}, model_config={})
    if isinstance(matched, RenamedSource):
        return matched.names
    return {name: name for name in matched.tensors}


def _bare_source(names: Iterable[str]) -> Source:
    """Make a source that only has names of tensors."""
    source = Source()
    source.tensors = {name: TensorInfo(name, U8, (), 0) for name in names}
    return source


# ---------------------------------------------------------------- where a merge is written to


class Home(NamedTuple):
    """The memory that a merged tensor goes to."""

    memory: Memory
    kind: StorageType
    merged: StorageType  # the type of the merged tensor; the memory's type, `kind`, may be wider

    def put(self, start: int, raw: Raw) -> None:
        """Write merged elements from `start` on."""
        if self.kind == self.merged:
            wide = raw
        elif self.kind == F32:
            place = self.memory.read(start, raw.size) if self.memory.in_place else None
            wide = np.empty(raw.size, np.float32) if place is None else place
            kernels.load("cpu").decode(raw, wide)
        else:
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                values = raw.view(self.merged.numpy_type).astype(self.kind.numpy_type)
            wide = values.view(self.kind.carrier)
        self.memory.write(start, wide)


class MemorySink(Sink):
    """Writes merged tensors to their homes; those without one are second names of others."""

    def __init__(self, homes: Mapping[str, Home]) -> None:
        self._homes = homes
        self._made: dict[tuple[str, int], Any] = {}  # on a GPU, to be widened there

    @classmethod
    def with_room(cls, tensors: Iterable[TensorInfo]) -> Self:
        """Make room for the bytes of tensors; `arrays` has them afterwards."""
        rooms = ((info.name, np.empty(info.nbytes, np.uint8)) for info in tensors)
        return cls({name: Home(InMemory(room), U8, U8) for name, room in rooms})

    @property
    def arrays(self) -> dict[str, Raw]:
        """The elements of tensors that are in this machine's memory, by name."""
        memories = ((name, home.memory) for name, home in self._homes.items())
        return {name: memory.array for name, memory in memories if isinstance(memory, InMemory)}

    def place(self, name: str, offset: int, nbytes: int) -> Bytes | None:
        home = self._homes.get(name)
        if home is None or home.kind != home.merged or not home.memory.in_place:
            return None
        size = home.kind.itemsize
        return home.memory.read(offset // size, nbytes // size).view(np.uint8)

    def place_on_gpu(self, gpu: int, name: str, offset: int, nbytes: int) -> int | None:
        home = self._homes.get(name)
        if home is None or not isinstance(home.memory, OnDevice):
            return None
        tensor = home.memory.tensor
        if (tensor.device.type, tensor.device.index) != ("cuda", gpu):
            return None
        if home.kind == home.merged:
            return int(tensor.data_ptr()) + offset
        made = self._made[name, offset] = home.memory.room_for(nbytes)
        return int(made.data_ptr())

    def take_from_gpu(self, places: Sequence[tuple[str, int]]) -> None:
        made = {place: self._made.pop(place) for place in places if place in self._made}
        for (name, offset), narrow in made.items():
            memory, kind, merged = self._homes[name]
            if isinstance(memory, OnDevice):
                memory.widen(offset // merged.itemsize, narrow, merged, kind)
        for device in {narrow.device for narrow in made.values()}:  # others may write there next
            sys.modules["torch"].cuda.current_stream(device).synchronize()

    def write(self, name: str, offset: int, data: Bytes) -> None:
        if (home := self._homes.get(name)) is not None:
            home.put(offset // home.merged.itemsize, data.view(home.merged.carrier))


def find_homes(plan: Plan, arrays: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Home]:
    """Find the memory of a plan's tensors in a model; shared memory has only one home."""
    if lacking := [tensor.name for tensor in plan.tensors if tensor.name not in names]:
        raise InputError(
            f"the model has no {some_of(lacking)}, but the base does; give one with its tensors"
        )
    homes: dict[str, Home] = {}
    owners: dict[Any, TensorPlan] = {}
    for tensor in plan.tensors:
        name = names[tensor.name]
        kind, shape, memory = memory_of(arrays[name], name)
        if shape != tensor.shape or not _holds_all(kind, tensor.dtype):
            raise InputError(
                f"{name}: is {show_shape(shape)} {kind.name} in the model and "
                f"{show_shape(tensor.shape)} {tensor.dtype.name} in the merge; load the model "
                "in that type or a wider one, such as float32"
            )
        if tensor.elements:
            owner = owners.setdefault(place_of(arrays[name]), tensor)
            if owner.key != tensor.key:
                raise InputError(
                    f"{owner.name} and {tensor.name} are one tensor in the model and two in "
                    "the base; untie them in the model"
                )
            if owner is tensor:
                homes[tensor.name] = Home(memory, kind, tensor.dtype)
    check_apart(arrays, {names[tensor.name] for tensor in plan.tensors})
    return homes


def _holds_all(kind: StorageType, narrower: StorageType) -> bool:
    return kind == narrower or (
        kind.is_weight
        and narrower.is_weight
        and kind.mantissa_bits >= narrower.mantissa_bits
        and kind.overflow_bits >= narrower.overflow_bits
    )


def make_arrays(plan: Plan) -> Arrays:
    """Return arrays in one piece of memory, which is faster to allocate than many small ones."""
    sizes = [-(-t.elements * t.dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES for t in plan.tensors]
    room, starts = np.empty(sum(sizes), np.uint8), accumulate(sizes, initial=0)
    return {
        t.name: np.ndarray(t.shape, t.dtype.numpy_type, room, start)
        for t, start in zip(plan.tensors, starts, strict=False)
    }


def check_arrays(plan: Plan, into: Mapping[str, NDArray[Any]]) -> Arrays:
    """Refuse arrays whose names, shapes or types are not those of a candidate."""
    wanted = {t.name: f"{show_shape(t.shape)} {t.dtype.numpy_type}" for t in plan.tensors}
    given = {name: f"{show_shape(array.shape)} {array.dtype}" for name, array in into.items()}
    for name in sorted(wanted.keys() | given.keys()):
        expected, found = (known.get(name, "absent") for known in (wanted, given))
        if found != expected:
            raise InputError(
                f"{name}: the array to fill must be {expected}, not {found}; "
                "give the arrays of a candidate with the same types"
            )
    return {name: into[name] for name in wanted}
